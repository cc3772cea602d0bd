"""The common part of tiled formats: sides, the order of positions, nonzeros by tile, tiles by work item.

In: coordinates, a storage and its view. Out: a part of `dense_tile` or `bitmap_tile`, and what is read back of it.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from sparsetc.errors import FormatError
from sparsetc.ir.nest import ITEM, Nest, tiles_along
from sparsetc.ir.plan import Storage
from sparsetc.packing.base import Packed, cut_runs, index_dtype
from sparsetc.support import Ints, NamedInts, Names
from sparsetc.tensor.coords import linear_key, ranked

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
