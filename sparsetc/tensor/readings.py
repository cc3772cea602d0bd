"""Readings of index arrays: their pattern, and how values follow; unsorted coordinates with their values.

Sparse tensors of torch and scipy may come again: their pattern is read, sorted and packed once. A reading is found by
the memory that holds the index arrays, also where the tensor around them was made anew, and goes with that memory. It
serves only while the arrays hold what they held. On a GPU torch's count of changes tells, since to compare would wait
for the device; elsewhere an ndarray may share the memory, so the arrays are compared at each call, which takes a
hundredth of the time of reading them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sparsetc.support import Ints, Lru, cached_property, later
from sparsetc.support.entry import on_gpu
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import Blocks
from sparsetc.tensor.dtypes import computable
from sparsetc.tensor.duplicates import Merge, coalesced
from sparsetc.tensor.pattern import Pattern, Uses, followed, lasting

launch_by_hand = later("codegen.launch", "launch_by_hand")
READINGS = 64
"""Readings kept; each holds coordinates, and whatever is packed of them."""

readings: Lru[Any, Reading] = Lru(READINGS)
"""Readings of index arrays that live."""
passing: set[tuple[int, torch.dtype, torch.device]] = set()
"""Sparse orders, dtypes and devices of tensors whose patterns come and go, as einsums saw them: coordinates of such a
tensor are not sorted before somebody asks for its pattern."""


@dataclass(frozen=True)
class Reading:
    """A pattern, and how the library's values become values on it; both are made when they are first asked for.

    Attributes:
        indices: the index arrays as they were when they were read.
        versions: torch's counts of changes of the arrays at that time, where they are believed.
        coords: (order, n) int64, in range, in the order of the arrays.
        sizes: of the sparse modes, or of the grid of `blocks`.
        blocks: those that the coordinates are of.
        uses: how often einsums used the coordinates as they are.
    """

    indices: tuple[Tensor, ...]
    versions: tuple[int | None, ...]
    coords: Tensor
    sizes: Ints
    blocks: Blocks | None
    uses: Uses = field(default_factory=Uses)

    @property
    def unsorted(self) -> bool:
        """True if the pattern is still to be made and may need a sort; a GPU is not waited for."""
        return "_sorted" not in vars(self) and (self.coords.is_cuda or not crd.is_coalesced(self.coords, self.sizes))

    @property
    def pattern(self) -> Pattern:
        """The coalesced pattern of the values."""
        return self._sorted[0]

    @property
    def merge(self) -> Merge | None:
        """The map from the library's values to values on the pattern; None if they are the same."""
        return self._sorted[1]

    @cached_property
    def _sorted(self) -> tuple[Pattern, Merge | None]:
        with lasting():
            coords, merge = coalesced(self.coords, self.sizes)
            return Pattern(coords, self.sizes, True, self.blocks, self.uses), merge

    def values(self, values: Tensor) -> Tensor:
        """Return values on the pattern from the library's values in its own order."""
        values = computable(values)
        return values if self.merge is None else self.merge.values(values)

    def serves(self, indices: Sequence[Tensor]) -> bool:
        """True if these arrays, in the memory that was read before, still hold the same numbers."""
        versions = _versions(indices)
        if None not in versions and versions == self.versions:
            return True
        return all(torch.equal(now, then) for now, then in zip(indices, self.indices, strict=True))


def reading(
    kind: object,
    shape: Ints,
    indices: Sequence[Tensor],
    coords_of: Callable[[tuple[Tensor, ...]], Tensor],
    blocks: Blocks | None = None,
    memory: Sequence[object] = (),
) -> Reading:
    """Return the reading of these index arrays, known or new.

    Args:
        kind: what else the pattern depends on, as the layout.
        shape: sizes of all modes, the dense ones last.
        indices: the index arrays.
        coords_of: makes (order, n) int64 coordinates of copies of the arrays.
        blocks: those that the coordinates are of, which `kind` must tell apart.
        memory: what owns the arrays' memory, by default their storages; a reading lives no longer.
    """
    memory = memory or [i.untyped_storage() for i in indices]
    key = _key(kind, shape, indices, memory)
    kept = readings.get(key)
    if kept is not None:
        if kept.serves(indices):
            return kept
        readings.pop(key)
    with lasting():
        copies = tuple(i.detach().clone() for i in indices)
        coords = coords_of(copies)
        sizes = shape[: coords.shape[0]] if blocks is None else blocks.grid
        crd.check_range(coords, sizes, "nonzero" if blocks is None else "block")
        return readings.put(key, Reading(copies, _versions(indices), coords, sizes, blocks), memory)


def _key(kind: object, shape: Ints, indices: Sequence[Tensor], memory: Sequence[object]) -> tuple[object, ...]:
    layouts = [(i.storage_offset(), i.shape, i.stride(), i.dtype) for i in indices]
    return kind, shape, *layouts, *map(id, memory)


def _versions(indices: Sequence[Tensor]) -> tuple[int | None, ...]:
    return tuple(version_of(i) if i.is_cuda else None for i in indices)


def version_of(tensor: Tensor) -> int | None:
    """Return torch's version count of a tensor, or None."""
    return None if tensor.is_inference() else tensor._version


READ_TOGETHER = 4
"""Most modes of coordinates that are read together with values."""


def read_together(shape: Any, coords: Any, values: Any) -> Unsorted | None:
    """Read coordinates and values of passing entries by one kernel, which copies both and checks the range.

    None of arguments that it does not serve, or that are wrong, and of coordinates that were read before.
    """
    if not passing or type(coords) is not Tensor or type(values) is not Tensor or coords.is_nested or values.is_nested:
        return None
    device, sizes = values.device, tuple(shape) if isinstance(shape, list | tuple) else ()
    plain = coords.is_cuda and coords.dtype == torch.int64 and coords.layout == values.layout == torch.strided
    fits = coords.shape == (len(sizes), *values.shape) and values.ndim == 1 and {*map(type, sizes)} == {int}
    kind = len(sizes), values.dtype, device
    if not (plain and fits and len(sizes) <= READ_TOGETHER and coords.device == device and kind in passing):
        return None
    traced = followed([values]) or torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack()
    most = max(*sizes, coords.numel())
    key = _key(torch.sparse_coo, sizes, [coords], memory := [coords.untyped_storage()])
    if traced or most > crd.INT32_MAX or min(sizes) < 0 or values.is_complex() or readings.get(key):
        return None
    with on_gpu(device):
        word, outside, launch = _watch(device, get_ident())
        own, copy = torch.empty_like(coords, memory_format=torch.contiguous_format), torch.empty_like(values)
        four = *sizes, *[1] * (READ_TOGETHER - len(sizes))
        launch([coords.contiguous(), word, *coords.shape, *four, values.contiguous(), own, copy])
        entries = readings.put(key, Reading((own,), _versions([coords]), own, sizes, None), memory)
        torch.cuda.current_stream(device).synchronize()
        if outside[0]:
            outside[0] = 0
            readings.pop(key)
            crd.check_range(coords, sizes)
    return Unsorted(entries, values, copy, version_of(values))


@lru_cache
def _watch(device: torch.device, thread: int) -> tuple[Tensor, Any, Callable[[list[Any]], None]]:
    """Return a word of the host's memory that a thread's launches write to, as a tensor and an ndarray; and the launch.

    The host waits for the kernel and reads the word, which costs less than to copy a tensor of a GPU.
    """
    word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
    return word, word.numpy(), launch_by_hand("read_entries")


@dataclass(frozen=True)
class Unsorted:
    """A tensor's values beside coordinates that may be in no order, until somebody asks for its pattern.

    Attributes:
        given: the values as they are now, which are those of sorted coordinates.
        values: as they were, which are those of all others.
        version: torch's count of changes of those given, at that time.
    """

    reading: Reading
    given: Tensor
    values: Tensor
    version: int | None

    @property
    def unchanged(self) -> bool:
        """True if the values were not changed since they were read."""
        return self.version is not None and self.version == self.given._version

    def coalesced(self) -> tuple[Pattern, Tensor]:
        """The pattern and values on it, differentiable wherever the values are."""
        if self.reading.merge is None:
            return self.reading.pattern, self.given
        with _disable_current_modes(), torch.set_grad_enabled(self.values.requires_grad):
            return self.reading.pattern, self.reading.values(self.values)
