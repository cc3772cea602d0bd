"""`Format`, the interface of a storage; `Packed`, the result of packing; the registry of formats; and sides of tiles.

In: coordinates of a part's nonzeros. Out: `Packed`: named arrays, the `Nest` that reads them, and where each stored
value came from, so that new values of the same pattern can be packed without sorting again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.nest import ITEM, LEVELS, Nest, tiles_along
from sparsetc.ir.plan import Storage
from sparsetc.support import Cache, Ints, NamedInts, Names, cached_property, given_to
from sparsetc.support.entry import log_since
from sparsetc.tensor.coords import INT32_MAX, linear_key, picked, ranked

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


# -- tiles: their sides, the order of their positions, nonzeros by tile, tiles by work item ----------------------------
VOLUME = 4096
"""Positions of a tile: 16 a mode of a third-order tensor (HLSTO, section VII-A3)."""
SIDE = 16


def sides_named(order: int) -> Names:
    """The parameters by which a storage names the sides of its tiles."""
    return tuple([f"side_{m}" for m in range(order)])


@lru_cache
def sides_of(shape: Ints, params: NamedInts = ()) -> Ints:
    """Return the sides of tiles: named by parameters (``side_m`` of mode m), else the largest fitting powers of two.

    Raises:
        FormatError: a side of no positions.
    """
    named = dict(params)
    sides = [min(SIDE, 1 << max(n - 1, 0).bit_length()) for n in shape]
    while prod(sides) > VOLUME:
        sides[sides.index(max(sides))] //= 2
    all_sides = tuple([named.get(name, side) for name, side in zip(sides_named(len(sides)), sides, strict=True)])
    if min(all_sides, default=1) < 1:
        raise FormatError(f"sides of tiles must be 1 or more, found {all_sides}")
    return all_sides


def items_of(rows: Tensor, storage: Storage, view: Nest) -> tuple[Tensor, bool]:
    """(items,) where each work item begins, given True at the first tile of each row; whether a row has several.

    An item has whole tiles, of `max_item_nnz` positions at most where there is more than one.
    """
    start, _, split = cut_runs(rows, max(1, storage.max_item_nnz // view.values.volume) if storage.max_item_nnz else 0)
    return start, split


def placed(places: Tensor, size: int) -> Tensor:
    """Return (size,) the nonzero at each place, -1 for none. Raise `FormatError` if two have the same place."""
    positions, numbers = places.new_full((size,), -1), torch.arange(places.numel(), device=places.device)
    positions.scatter_(0, places, numbers)
    if not torch.equal(positions.index_select(0, places), numbers):
        refuse_duplicates()
    return positions


def refuse_duplicates() -> NoReturn:
    """Raise `FormatError`: a tile holds one value a position, and two nonzeros have the same."""
    raise FormatError(
        "tiles hold one value a position, and the operand has duplicates: take its coalesce(), or a plan without tiles"
    )


def slots_along(packed: Packed, modes: Ints, level: int, slot: Tensor) -> Tensor:
    """(items or tiles * kept positions,) the output slot of every kept position; -1 where it has no nonzero.

    Args:
        packed: a part of tiles.
        modes: those that the output keeps, in the order in which the positions along their sides are numbered.
        level: whether an item has a table of its own (ITEM), or a tile (LANE).
        slot: (nnz,) the output slots of the part's nonzeros, in the order given to `pack`.
    """
    view = packed.view
    tile, place, nonzero = tiles_of_nonzeros(packed)
    kept, sides = torch.zeros_like(place), view.read_along(range(view.order), modes)
    for mode in sides:
        kept = kept * view.values.sides[mode] + place // view.values.strides[mode] % view.values.sides[mode]
    owner = torch.repeat_interleave(torch.diff(packed.arrays["item_ptr"].long()))[tile] if level == ITEM else tile
    count = prod(view.values.sides[mode] for mode in sides)
    owners = packed.items if level == ITEM else tile_count(packed)
    table = torch.full((owners * count,), -1, dtype=torch.long, device=place.device)
    table[owner * count + kept] = slot[nonzero]
    return table.to(index_dtype(int(slot.max()) if slot.numel() else 0))


def tile_count(packed: Packed) -> int:
    """Return how many tiles a part stores."""
    return packed.view.values.number(packed.arrays, packed.stored)


def tiles_of_nonzeros(packed: Packed) -> tuple[Tensor, ...]:
    """(tile of each stored nonzero, its position in it, which nonzero it is)."""
    assert packed.positions is not None
    real = packed.positions >= 0
    has = packed.view.values.places(packed.arrays, tile_count(packed), real.device)
    return (*torch.nonzero(has.masked_scatter(has, real), as_tuple=True), packed.positions[real])


def tile_populations(coords: Tensor, shape: Ints, sides: Ints) -> Tensor:
    """(nnz,) for every nonzero, how many its tile holds."""
    if coords.shape[1] == 0:
        return coords.new_zeros(0)
    rows = (row // side for row, side in zip(coords, sides, strict=True))
    tile, _ = ranked(*linear_key(rows, tiles_along(shape, sides), coords[0]))
    return torch.bincount(tile).index_select(0, tile)
