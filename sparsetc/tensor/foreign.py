"""Sparse tensors of torch and scipy that come again: their pattern is read, sorted and packed once.

In: the index arrays of such a tensor. Out: `Reading`, a pattern, which takes the values of each call. A
reading is found by the memory that holds the index arrays, also where the tensor around them was made anew, and goes
with that memory. It serves only while the arrays hold what they held. On a GPU torch's count of changes tells, since to
compare would wait for the device; elsewhere an ndarray may share the memory, so the arrays are compared at each call,
which takes a hundredth of the time of reading them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparsetc.support.lru import Lru
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import Blocks
from sparsetc.tensor.inputs import Merge, check_dtype, coalesced
from sparsetc.tensor.pattern import Pattern, lasting

READINGS = 64
"""Readings kept; each holds coordinates, and whatever is packed of them."""

Numbered = Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor | None]]
"""A reader of index arrays: (coordinates (order, n) int64, which value each is; None for one after the other)."""

readings: Lru[Any, Reading] = Lru(READINGS)
"""Those of index arrays that live."""


@dataclass(frozen=True)
class Reading:
    """A pattern, and how the library's values become values on it."""

    indices: tuple[torch.Tensor, ...]
    """The index arrays as they were when they were read."""
    versions: tuple[int | None, ...]
    """Torch's counts of changes of the arrays at that time, where they are believed."""
    pattern: Pattern
    merge: Merge | None

    def values(self, values: torch.Tensor) -> torch.Tensor:
        """Values on the pattern, of those that the library has in its own order."""
        check_dtype(values.dtype)
        return values if self.merge is None else self.merge.values(values)

    def serves(self, indices: Sequence[torch.Tensor]) -> bool:
        """Whether these arrays, which have the memory of those that were read, hold what those held."""
        versions = _versions(indices)
        if None not in versions and versions == self.versions:
            return True
        return all(torch.equal(now, then) for now, then in zip(indices, self.indices, strict=True))


def reading(
    kind: object,
    shape: tuple[int, ...],
    indices: Sequence[torch.Tensor],
    memory: Sequence[object],
    numbered: Numbered,
    blocks: Blocks | None = None,
) -> Reading:
    """The reading of these index arrays, known or new.

    Args:
        kind: what else the pattern depends on, as the layout.
        shape: sizes of all modes, the dense ones last.
        indices: the index arrays.
        memory: the objects that own their memory; a reading lives no longer than these.
        numbered: reads copies of the arrays.
        blocks: those that the coordinates are of, which `kind` must tell apart.
    """
    places = tuple((i.storage_offset(), i.shape, i.stride(), i.dtype) for i in indices)
    key = (kind, shape, places, *map(id, memory))
    found = readings.get(key)
    if found is not None:
        if found.serves(indices):
            return found
        readings.pop(key)
    with lasting():
        return readings.put(key, _read(indices, shape, numbered, blocks), memory)


def _versions(indices: Sequence[torch.Tensor]) -> tuple[int | None, ...]:
    return tuple(i._version if i.is_cuda and not i.is_inference() else None for i in indices)


def _read(given: Sequence[torch.Tensor], shape: tuple[int, ...], numbered: Numbered, blocks: Blocks | None) -> Reading:
    versions, indices = _versions(given), tuple(i.detach().clone() for i in given)
    coords, number = numbered(indices)
    sizes = shape[: coords.shape[0]] if blocks is None else blocks.grid
    crd.check_range(coords, sizes, "nonzero" if blocks is None else "block")
    coords, merge = coalesced(coords, sizes)
    if number is not None:
        order = number if merge is None else number.index_select(0, merge.order)
        same = merge is None and torch.equal(order, torch.arange(order.numel(), device=order.device))
        run, count = (None, order.numel()) if merge is None else (merge.run, merge.count)
        merge = None if same else Merge(order, run, count)
    return Reading(indices, versions, Pattern(coords, sizes, True, blocks), merge)
