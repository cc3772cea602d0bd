"""The common part of tiled formats: sides, the order of positions, nonzeros by tile, tiles by work item.

In: coordinates, a storage and its view. Out: a part of `dense_tile` or `bitmap_tile`, and what is read back of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from sparsetc.errors import FormatError
from sparsetc.ir.nest.axes import ITEM
from sparsetc.ir.nest.nest import Nest, tiles, tiles_along
from sparsetc.ir.nest.values import Bitmap, Whole
from sparsetc.ir.plan import Storage
from sparsetc.packing import words
from sparsetc.packing.base import Packed, cut_runs, index_dtype, pointers
from sparsetc.support import Ints, NamedInts, Names
from sparsetc.tensor.coords import linear_key, narrowed, ranked, starts_of_runs

VOLUME = 4096
"""Positions of a tile: 16 a mode of a third-order tensor (HLSTO, section VII-A3)."""
SIDE = 16


def sides_named(order: int) -> Names:
    """The parameters by which a storage names the sides of its tiles."""
    return tuple([f"side_{m}" for m in range(order)])


@lru_cache(maxsize=256)
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


@lru_cache(maxsize=256)
def view_of(shape: Ints, storage: Storage, bitmap: bool) -> Nest:
    """Ranges of tiles that share the item modes' block coordinates.

    Positions are stored in the storage's own sequence; where it has none, the last mode of the tiles' own runs fastest,
    then those of the item. A word of bits lies within what a column of a dot contracts.
    """
    sides, rest = sides_of(shape, storage.params), (*storage.lane, *storage.leaf)
    grid = tiles_along(shape, sides)
    item = words.fields(storage.item, grid, "item_word")
    tile = words.fields(rest, grid, "tile_word")
    sequence = storage.sequence or (*rest[:-1], *storage.item, *rest[-1:])
    last = storage.contracted if storage.sequence else len(rest[-1:])
    deep = prod([sides[m] for m in sequence[len(sequence) - last :]])
    word = next((bits for bits in (32, 16) if deep % bits == 0), 8)
    if bitmap:
        return tiles(item, tile, Bitmap(sides, sequence, storage.contracted, word))
    return tiles(item, tile, Whole(sides, sequence, storage.contracted))


def packed_tiles(format: str, coords: Tensor, shape: Ints, storage: Storage, view: Nest) -> Packed:
    """Pack nonzeros sorted by tile, the item modes first; cut the tiles of a row of blocks at `max_item_nnz` positions.

    Raises:
        FormatError: two nonzeros have the same place.
    """
    order, volume = (*storage.item, *storage.lane, *storage.leaf), view.values.volume
    nnz, blocks = coords.shape[1], words.Nonzeros(coords, view.stored_shape(shape), sides=view.values.sides)
    rows = chain((blocks[m] for m in order), (_places(coords, view) for _ in "p"))
    key, spread = linear_key(rows, [*[blocks.shape[m] for m in order], volume])
    key = narrowed(key, spread)
    key, by_tile = torch.sort(key, stable=True)
    if bool((key[1:] == key[:-1]).any()):
        refuse_duplicates()
    place = key % volume
    starts = starts_of_runs([key.sub_(place)])
    del key
    tile, first = torch.cumsum(starts, 0).sub_(1), by_tile[starts]
    tiles = first.numel()

    of_items, split = items_of(blocks.at(first).starts(storage.item), storage, view)
    first_of_items = first.index_select(0, of_items)
    arrays = {
        "item_ptr": pointers(of_items, tiles, tiles),
        **words.encode(blocks.at(first_of_items), view.levels[0]),
        **words.encode(blocks.at(first), view.levels[1]),
    }
    if view.values.bitmap:
        value_ptr = torch.zeros(tiles + 1, dtype=torch.long, device=coords.device)
        value_ptr[1:] = torch.cumsum(torch.bincount(tile, minlength=tiles), 0)
        arrays["value_ptr"] = value_ptr.to(index_dtype(nnz))
        arrays["bits"] = words.packed_bits(tile, place, tiles, volume, view.values.word).flatten()
        positions = by_tile
    else:
        positions = torch.full((tiles * volume,), -1, dtype=torch.long, device=coords.device)
        positions[tile.mul_(volume).add_(place)] = by_tile
    return Packed(
        format,
        storage,
        shape,
        nnz,
        view,
        arrays,
        positions,
        stored=positions.numel(),
        items=of_items.numel(),
        representatives=(first_of_items, first),
        split_rows=split,
        padded=positions.numel() != nnz,
    )


def _places(coords: Tensor, view: Nest) -> Tensor:
    """(nnz,) the place of each nonzero in its tile."""
    place = torch.zeros_like(coords[0])
    for row, side, stride in zip(coords, view.values.sides, view.values.strides, strict=True):
        place += (row % side).mul_(stride)
    return place


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


def slots_along(packed: Packed, modes: Sequence[int], level: int, slot: Tensor) -> Tensor:
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
