"""`Format`, the interface of a storage; `Packed`, the result of packing; and the registry of formats.

In: coordinates of a part's nonzeros. Out: `Packed`: named arrays, the `Nest` that reads them, and where each stored
value came from, so that new values of the same pattern can be packed without sorting again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.nest import LEVELS, Nest
from sparsetc.ir.plan import Storage
from sparsetc.support import Cache, Ints, cached_property, given_to
from sparsetc.support.entry import log_since
from sparsetc.tensor.coords import INT32_MAX, picked

SPARSE = 2
"""Stored values for each nonzero from which values are put among zeros, and not each place filled from one of them."""


@dataclass(frozen=True)
class Packed:
    """A part, stored. `arrays` lacks ``values``, which `pack_values` makes.

    Attributes:
        positions: (stored,) the nonzero each stored value came from, -1 for padding; None when stored in the order
            given.
        representatives: a nonzero of each item, and of each lane (-1 for an unused one): what they share is read off
            it.
        split_rows: whether a row has several items.
        split_fibers: whether a fiber has several lanes.
        source: (nnz,) which nonzeros of the whole tensor the part holds; None for all of them.
        token: what values packed for this part are known by.
    """

    format: str
    storage: Storage
    shape: Ints
    nnz: int
    view: Nest
    arrays: dict[str, Tensor]
    positions: Tensor | None
    stored: int
    items: int
    representatives: tuple[Tensor | None, Tensor | None] = (None, None)
    split_rows: bool = False
    split_fibers: bool = False
    padded: bool = False
    source: Tensor | None = field(default=None)
    token: object = field(default_factory=object, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the index arrays (the values are `stored` elements more)."""
        return sum(a.nbytes for a in self.arrays.values())

    @property
    def index64(self) -> bool:
        """True if stored positions need 64 bits."""
        return self.stored + 4096 > INT32_MAX

    def in_whole(self, indices: Tensor | None) -> Tensor | None:
        """Nonzeros of the part -> nonzeros of the whole tensor; -1 stays."""
        if self.source is None:
            return indices
        if indices is None:
            return self.source
        if not self.source.numel():  # every position is padding
            return indices
        numbers = self.source[indices.clamp(min=0)]
        return torch.where(indices < 0, indices, numbers) if self.padded else numbers

    def pack_values(self, values: Tensor) -> Tensor:
        """(nnz of the whole tensor,) values -> (stored,) values in this format's order, 0 where padded.

        In the operand's own order, these are the values themselves.
        """
        if self.in_order:
            return values.contiguous()
        if self.scattered is not None:
            places, numbers = self.scattered
            of_part = picked(values, numbers)
            return values.new_zeros(self.stored).scatter_(0, places, of_part)
        if self.padded:  # which reads a zero
            values = torch.nn.functional.pad(values, (1, 0))
        return values.index_select(0, self.gathered)

    @property
    def in_order(self) -> bool:
        """True if all values of the whole tensor are stored, in its own order."""
        return self.positions is None and self.source is None

    @cached_property
    def scattered(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the places of nonzeros and their numbers in the tensor (None: all in order) if most is padding.

        None where it is not.
        """
        if self.positions is None or SPARSE * self.nnz > self.stored:
            return None
        places = torch.nonzero(self.positions >= 0).flatten()
        numbers = self.in_whole(self.positions[places])
        assert numbers is not None
        every = self.source is None and numbers.numel() == self.nnz
        in_order = every and bool((numbers[1:] > numbers[:-1]).all())
        return places, None if in_order else numbers

    @cached_property
    def gathered(self) -> Tensor:
        """(stored,) the nonzero of the whole tensor each value is; of padded ones one further, so that 0 is a zero."""
        places = self.in_whole(self.positions)
        assert places is not None
        return places + 1 if self.padded else places

    def slots(self, level: int, slot: Tensor) -> Tensor:
        """Return the output slot of each item, lane or stored nonzero, given the slot of every nonzero."""
        places = self.in_whole((*self.representatives, self.positions)[level])
        if places is None:
            return slot.contiguous()
        return slot[places.clamp(min=0)].contiguous() if slot.numel() else places.clamp(min=0)

    def of(self, source: Tensor | None) -> Packed:
        """The storage as a part that holds the nonzeros `source` of a larger tensor."""
        return replace(self, source=source)

    def unrolled(self, steps: int) -> Packed:
        """Return the part for kernels that unroll `steps` steps of a block while every lane has a nonzero."""
        full = self.arrays.get("block_full")
        if full is None or steps == 1:
            return self
        return replace(self, arrays=self.arrays | {"block_full": full // steps * steps})


@runtime_checkable
class Format(Protocol):
    """A way to store nonzeros. Register an instance with `register_format`.

    A format may also have ``offer(problem, counts) -> Candidate | None``: the plan it would run this einsum by, or
    None where it does not apply. What it offers is costed with the others under ``plan="auto"``.

    It may have ``parameters(order) -> names``: what `Storage.params` may name, for tensors of this order. Other names
    are refused then, with `PlanError`.

    It may have ``lower(bound, part, target, number) -> TileProgram``: what runs its parts in place of the tile program
    that would be made of its view; one that `covers` the result, with `lines` of torch of its own and `priced_by` a
    `Cost` of its own.

    Where `pack` has a parameter ``cache``, it is given what is kept with a pattern when it packs all of its nonzeros.

    With ``even = True`` tiles are those of a tensor cut evenly, by `sparsetc.packing.tiles.sides_of`: `explain` counts
    those of all nonzeros, whichever part they went to, and of other formats the tiles that are stored.
    """

    name: str

    def view(self, shape: Ints, storage: Storage) -> Nest:
        """Return the nest by which a part of this storage is read; plans are priced by it before anything is packed."""

    def pack(self, coords: Tensor, shape: Ints, storage: Storage) -> Packed:
        """Coordinates (order, nnz), int64, in lexicographic order -> arrays and their view."""


FORMATS: dict[str, Format] = {}


def get_format(name: str) -> Format:
    """The format of this name; `FormatError` lists the known ones."""
    try:
        return FORMATS[name]
    except KeyError:
        raise FormatError(_unknown(name)) from None


def _unknown(name: str) -> str:
    return f"no format is called {name!r}; known: {', '.join(sorted(FORMATS))}"


def unknown_parameter(format: str, storage: Storage, order: int) -> str:
    """Say what is wrong where a format, or a parameter of its storage, is not known; empty where nothing is."""
    if format not in FORMATS:
        return _unknown(format)
    said: Callable[[int], Sequence[str]] | None = getattr(FORMATS[format], "parameters", None)
    if said is None:
        return ""
    names = said(order)
    unknown = [name for name, _ in storage.params if name not in names]
    return f"format {format!r} has no parameter {unknown[0]!r}; known: {', '.join(names) or 'none'}" if unknown else ""


def pack(coords: Tensor, shape: Ints, format: str, storage: Storage, cache: Cache | None = None) -> Packed:
    """Pack with the named format and check its view; `cache` holds objects made of these coordinates."""
    if fault := storage.level_fault(coords.shape[0]):
        raise FormatError(fault)
    if fault := unknown_parameter(format, storage, coords.shape[0]):
        raise PlanError(fault)
    pack_part, start = get_format(format).pack, time.perf_counter()
    packed = pack_part(coords, tuple(shape), storage, **given_to(pack_part, cache))
    _verify(packed.view)
    if packed.view.order != coords.shape[0]:
        raise FormatError(f"format {format!r} walks {packed.view.order} modes of {coords.shape[0]}")
    missing = set(packed.view.arrays) - set(packed.arrays) - {"values"}
    if missing:
        raise FormatError(f"format {format!r} packed no array {', '.join(sorted(missing))}, which its view reads")
    shared = packed.view.levels[0], packed.view.levels[1] if packed.view.blocks else ()
    for level, modes, representative in zip(LEVELS, shared, packed.representatives, strict=False):
        if modes and representative is None:
            raise FormatError(f"format {format!r} gave no `representatives` of {level}s, whose nonzeros share modes")
    log_since(start, logging.DEBUG, "packed %d nonzeros as %s, %d bytes", packed.nnz, format, packed.nbytes)
    return packed


_verify = lru_cache(Nest.verify)


def index_dtype(largest: int) -> torch.dtype:
    """int32 where it holds `largest` with room for a block past the end, else int64."""
    return torch.int32 if largest + 4096 <= INT32_MAX else torch.int64


def pointers(starts: Tensor, end: int, largest: int) -> Tensor:
    """(n + 1,) where each of n ranges begins, and the last one ends, of the type that holds `largest`."""
    return torch.cat([starts, starts.new_full((1,), end)]).to(index_dtype(largest))


def cut_runs(flags: Tensor, most: int) -> tuple[Tensor, Tensor, bool]:
    """Return begins and lengths of runs from True at each start, cut after `most` (0: never), and if any was.

    Returns:
        (pieces,) the first element of each, int32 where that holds it; (pieces,) lengths, of that type; whether a run
        is cut.
    """
    n = flags.numel()
    start = torch.nonzero(flags).flatten().to(index_dtype(n))
    length = torch.diff(start, append=start.new_full((1,), n))
    if not most or not start.numel() or int(length.max()) <= most:
        return start, length, False
    count = (length + (most - 1)).div_(most, rounding_mode="floor")
    run = torch.repeat_interleave(torch.arange(start.numel(), dtype=start.dtype, device=start.device), count)
    before = torch.cumsum(count, 0, dtype=start.dtype).sub_(count).index_select(0, run)
    skipped = torch.arange(run.numel(), dtype=start.dtype, device=start.device).sub_(before).mul_(most)
    length = length.index_select(0, run).sub_(skipped).clamp_(max=most)
    return start.index_select(0, run).add_(skipped), length, True
