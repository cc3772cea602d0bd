"""``dense_tile``, ``bitmap_tile`` and ``window``: tiles of nonzeros, and how nonzeros are divided by them.

``dense_tile`` and ``bitmap_tile`` cut the tensor into tiles, of which those with nonzeros are stored (HLS-D; HLSTO).

        item_ptr   [ 0        3     7 …     tiles of each work item, all of one row of output blocks
        item_word  [ ib0    | ib1 | …       block coordinates the tiles of an item share
        tile_word  [ jk jk jk | …           block coordinates of each tile's other modes
    dense_tile, every position of a tile:
        values     [ tile 0 | tile 1 | …    the positions of each tile in the order of their sequence, 0 where empty
    bitmap_tile, a bit for every position (section V-A):
        value_ptr  [ 0 n0 n0+n1 …           first value of each tile
        bits       [ tile 0 | tile 1 | …    a bit a position in the order of their sequence, in words
        values     [ n0 | n1 | …            the nonzeros of each tile, in that order

Sides are `storage.param("side_m")`, else as long as the mode and a volume of 4,096 positions allow, 16 at most. A zero
position of a dense tile is multiplied like any other: an infinity or NaN of a dense operand therefore reaches every row
of its tiles. A word holds the positions that one column of a dot contracts, 32 at most, so that a value's place is the
count of the bits before its word, and in its word.

``window`` puts groups of output rows in dense tiles over the columns that they have (1-SA, section 3).

        rows       [ 7 12 40 . | 3 5 9 11 | …      the rows of each group, wherever they lie; . is no row
        item_ptr   [ 0       2          5 | …      the tiles of each work item, all of one group
        columns    [ 2 3 9 30 | 31 60 . . | …      the next columns that any row of the group has, compacted
        values     [ tile 0 | tile 1 | …           height x width a tile, 0 where there is no nonzero

A row of the dense operand is gathered once for all rows of a group. Parameters of the storage are ``height`` and
``width`` of a tile; ``tau``, by which rows are grouped by similarity, in percent, 0 for neighbouring rows as they are;
and ``strip``, the columns of a strip that patterns are compared by.

Rows are fibers of the storage's item modes, and columns those of its lane modes; each mode has a list of its own, as
``rows_1`` of mode 1. A zero position is multiplied like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from math import prod

import torch
from torch import Tensor

from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.nest import Bitmap, Listed, Nest, Whole, tiles, tiles_along
from sparsetc.ir.plan import Storage
from sparsetc.packing import words
from sparsetc.packing.base import (
    Packed,
    cut_runs,
    index_dtype,
    items_of,
    placed,
    pointers,
    refuse_duplicates,
    sides_named,
    sides_of,
    tile_populations,
)
from sparsetc.packing.partition import register_partition
from sparsetc.planner import different, register_format
from sparsetc.similarity.groups import Groups, group_rows
from sparsetc.support import Cache, Ints, Names, outside
from sparsetc.tensor.coords import linear_key, narrow_runs, narrowed, of_modes, ranked, starts_of_runs


@register_format
@dataclass(eq=False)
class TileFormat:
    """Tiles of which every position is stored; or a bit of each, and the nonzeros, sorted by position."""

    name: str = "dense_tile"
    bitmap: bool = False

    def parameters(self, order: int) -> Names:
        """The side of a tile along each mode."""
        return sides_named(order)

    @lru_cache  # noqa: B019 (of two formats, which stay)
    def view(self, shape: Ints, storage: Storage) -> Nest:
        """Return ranges of tiles that share the item modes' block coordinates.

        Positions are stored in the storage's own sequence; where it has none, the last mode of the tiles' own runs
        fastest, then those of the item. A word of bits lies within what a column of a dot contracts.
        """
        sides, rest = sides_of(shape, storage.params), (*storage.lane, *storage.leaf)
        grid = tiles_along(shape, sides)
        item = words.fields(storage.item, grid, "item_word")
        tile = words.fields(rest, grid, "tile_word")
        sequence = storage.sequence or (*rest[:-1], *storage.item, *rest[-1:])
        last = storage.contracted if storage.sequence else len(rest[-1:])
        deep = prod([sides[m] for m in sequence[len(sequence) - last :]])
        word = next((bits for bits in (32, 16) if deep % bits == 0), 8)
        if self.bitmap:
            return tiles(item, tile, Bitmap(sides, sequence, storage.contracted, word))
        return tiles(item, tile, Whole(sides, sequence, storage.contracted))

    def pack(self, coords: Tensor, shape: Ints, storage: Storage) -> Packed:
        """Sort tiles by (item, other) modes; cut the tiles of a row at `max_item_nnz` positions.

        Raises:
            FormatError: two nonzeros have the same place.
        """
        order, view = (*storage.item, *storage.lane, *storage.leaf), self.view(shape, storage)
        volume = view.values.volume
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
            self.name,
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


register_format(partial(TileFormat, "bitmap_tile", bitmap=True))


@register_partition("threshold")
def by_threshold(coords: Tensor, shape: Ints, *, threshold: int, whole: int = 0, **sides: int) -> list[Tensor | None]:
    """[nonzeros of tiles that hold at least `threshold`, the others]; tiles of the default sides, or of `side_m`.

    With `whole`, tiles of at least so many come first, apart from those of at least `threshold`.
    """
    unknown = set(sides) - {f"side_{mode}" for mode in range(len(shape))}
    if unknown:
        raise PlanError(
            f"partition 'threshold' takes threshold=, whole= and a side_m= for each mode m, found {min(unknown)!r}"
        )
    held = tile_populations(coords, shape, sides_of(shape, tuple(sides.items())))
    bounds = (*((whole,) if whole else ()), threshold)
    part = torch.stack([held < least for least in bounds]).sum(0)
    return [torch.nonzero(part == n).flatten() for n in range(len(bounds) + 1)]


# -- windows of rows ---------------------------------------------------------------------------------------------------
PARAMETERS = ("height", "width", "tau", "strip")
"""Parameters of a storage of windows, and of the partition that divides by them."""


def sizes_of(storage: Storage) -> tuple[int, int, int, int]:
    """Return height, width, tau and strip of a storage of windows, whose item modes are rows and lane modes columns.

    Raises:
        FormatError: the storage is none of windows.
    """
    if not storage.item or not storage.lane or storage.leaf:
        raise FormatError(f"windows have item modes, and all others at the lane; found {storage}")
    params = dict(storage.params)
    height, width = params.get("height", 0), params.get("width", 0)
    if min(height, width) < 1:
        raise FormatError(f"windows need a height and a width of 1 or more; found {params}")
    tau, strip = params.get("tau", 0), params.get("strip", width)
    if not 0 <= tau <= 100 or strip < 1:
        raise FormatError(f"tau is in percent, and a strip has 1 column or more; found {params}")
    return height, width, tau, strip


def ranked_rows(coords: Tensor, shape: Ints, storage: Storage, cache: Cache | None = None) -> tuple[Tensor, int]:
    """Return the place of each nonzero's row, (nnz,), and how many rows have nonzeros; a cache keeps the groups.

    Rows are in the order of their coordinates, or group by group. What whole windows leave of the groups comes after
    them, so that no window but those has rows of several groups.
    """
    (row, count), (height, _, tau, strip) = _ranks(coords, shape, storage.item), sizes_of(storage)
    if not tau:
        return row, count

    def similar() -> Groups:
        columns, width = coords[storage.lane[-1]], shape[storage.lane[-1]]
        if len(storage.lane) > 1:
            columns, width = _ranks(coords, shape, storage.lane)
        return group_rows(row.long(), columns.long(), count, width, width=strip, tau=tau / 100)

    # The groups depend on these beside coordinates and shape, whatever the tiles.
    key = ("similar", storage.item, storage.lane, strip, tau)
    order, size = similar() if cache is None else cache.once(key, similar)
    group = torch.repeat_interleave(size)
    place = torch.arange(count, device=group.device) - (size.cumsum(0) - size)[group]
    left = place >= (size - size % height)[group]
    order = order[torch.sort(left, stable=True).indices]
    places = torch.arange(count, dtype=row.dtype, device=order.device)
    rank = torch.empty_like(places).scatter_(0, order, places)
    return rank.index_select(0, row), count


def _ranks(coords: Tensor, shape: Ints, modes: Ints) -> tuple[Tensor, int]:
    """Return (nnz,) the number of each nonzero's fiber of these modes, and the number of fibers."""
    return ranked(*linear_key(*of_modes(coords, shape, modes), coords[0]))


@register_format
@dataclass(eq=False)
class Window:
    """Tiles over the columns that any row of a group has."""

    name: str = "window"

    def parameters(self, order: int) -> Names:
        """The sides of a tile, and how rows are grouped."""
        return PARAMETERS

    def view(self, shape: Ints, storage: Storage) -> Nest:
        """Rows are listed for each work item, columns for each tile."""
        height, width, *_ = sizes_of(storage)
        rows = storage.item
        columns = storage.lane
        sides = tuple([{rows[0]: height, columns[-1]: width}.get(m, 1) for m in range(len(shape))])
        sequence = (*rows[1:], *columns[:-1], rows[0], columns[-1])
        return tiles(_listed("rows", rows, height), _listed("columns", columns, width), Whole(sides, sequence))

    def pack(self, coords: Tensor, shape: Ints, storage: Storage, cache: Cache | None = None) -> Packed:
        """Group the rows, number the tiles of each group, and put every nonzero into its tile."""
        height, width, *_ = sizes_of(storage)
        view = self.view(shape, storage)
        nnz = coords.shape[1]
        rank, rows = ranked_rows(coords, shape, storage, cache)
        tile, along, group, first = tiled(coords, shape, storage, rank // height)
        place = tile.long().mul_(height).add_(rank % height).mul_(width).add_(along)
        positions = placed(place, first.numel() * view.values.volume)
        del place
        of_items, split = items_of(starts_of_runs([group]), storage, view)
        arrays = {"item_ptr": pointers(of_items, first.numel(), first.numel())}
        for array, mode in _arrays("rows", storage.item):  # the last window is filled up
            lists = _filled(-(-rows // height) * height, rank, coords[mode], shape[mode])
            arrays[array] = lists.view(-1, height).index_select(0, group.index_select(0, of_items)).flatten()
        at = tile.long().mul_(width).add_(along)
        for array, mode in _arrays("columns", storage.lane):
            arrays[array] = _filled(first.numel() * width, at, coords[mode], shape[mode])
        return Packed(
            self.name,
            storage,
            shape,
            nnz,
            view,
            arrays,
            positions,
            stored=positions.numel(),
            items=of_items.numel(),
            representatives=(first.index_select(0, of_items), first),
            split_rows=split,
            padded=positions.numel() != nnz,
        )


def _filled(size: int, places: Tensor, coordinates: Tensor, none: int) -> Tensor:
    """Return (size,) coordinates at their places, and `none` elsewhere."""
    kind = index_dtype(none)
    lists = torch.full((size,), none, dtype=kind, device=coordinates.device)
    return lists.scatter_(0, places.long(), coordinates.to(kind))


def _arrays(name: str, modes: Ints) -> list[tuple[str, int]]:
    """The arrays of coordinates of each mode, and the mode."""
    return [(f"{name}_{number}" if number else name, mode) for number, mode in enumerate(modes)]


def _listed(name: str, modes: Ints, side: int) -> tuple[Listed, ...]:
    """Return the coordinates listed along one side; the rows' first mode or the columns' last carries the others."""
    carrier = modes[0] if name == "rows" else modes[-1]
    return tuple(
        Listed(mode, array, side, None if mode == carrier else carrier) for array, mode in _arrays(name, modes)
    )


def tiled(coords: Tensor, shape: Ints, storage: Storage, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Number the tiles of each group, of its next columns.

    Returns:
        (nnz,) the tile of each nonzero, and (nnz,) its place along the tile's columns; (tiles,) the group of each tile,
        in order, and (tiles,) a nonzero of it.
    """
    sizes = [max(1, coords.shape[1]), *[shape[m] for m in storage.lane]]
    # The different columns of each group, and the first nonzero of each.
    columns = (coords[m] for m in storage.lane)
    number, first = narrow_runs(chain((group.long() for _ in "g"), columns), sizes, coords[0])
    width = storage.param("width")
    start, length, _ = cut_runs(starts_of_runs([group.index_select(0, first)]), width)
    tiles = torch.arange(start.numel(), dtype=start.dtype, device=start.device)
    tile = torch.repeat_interleave(tiles, length).index_select(0, number)
    first = first.index_select(0, start)
    return tile, number - start.index_select(0, tile), group.index_select(0, first), first


def populations(coords: Tensor, shape: Ints, storage: Storage, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
    """(nnz,) the window of each nonzero; (windows,) how many nonzeros, and how many columns, each window has."""
    group = ranked_rows(coords, shape, storage, cache)[0] // storage.param("height")
    columns, spread = linear_key(*of_modes(coords, shape, storage.lane))
    nonzeros = torch.bincount(group)
    return group, nonzeros, different(group, columns, spread, nonzeros.numel())


@register_partition("row_similarity", whole_rows=True)
def by_row_similarity(
    coords: Tensor, shape: Ints, kept: Ints, *, threshold: int, cache: Cache | None = None, **params: int
) -> list[Tensor | None]:
    """[nonzeros of the groups of rows whose tiles hold at least `threshold` on average, the others].

    Args:
        coords: (order, nnz).
        shape: sizes of the modes.
        kept: modes that the output keeps, whose fibers are the rows.
        threshold: nonzeros a tile.
        cache: where groups of rows are kept, and found.
        params: ``height``, ``width``, ``tau`` and ``strip``, as the storage of windows has them; where there is no
            ``tau``, neighbouring rows are a group.

    Raises:
        PlanError: an option of another name, or an output that keeps no mode, or all.
    """
    if unknown := set(params) - set(PARAMETERS):
        raise PlanError(f"windows have a height, a width, tau and a strip, found {min(unknown)!r}")
    others = outside(range(len(shape)), kept)
    if not kept or not others:
        raise PlanError("rows are fibers of the modes that the output keeps, columns those of the others: found none")
    storage = Storage(item=kept, lane=others, params=tuple(params.items()))
    group, nonzeros, columns = populations(coords, shape, storage, cache)
    filled = (nonzeros // tiles_over(columns, storage) >= threshold)[group]
    return [torch.nonzero(filled).flatten(), torch.nonzero(~filled).flatten()]


def tiles_over(columns: Tensor, storage: Storage) -> Tensor:
    """Return (windows,) the number of tiles for this many columns."""
    width = storage.param("width")
    return (columns + (width - 1)) // width
