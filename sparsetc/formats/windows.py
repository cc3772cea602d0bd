"""``window`` and ``vbr``: groups of output rows in dense tiles over the columns that they have (1-SA, section 3).

        rows       [ 7 12 40 . | 3 5 9 11 | …      the rows of each group, wherever they lie; . is no row
        item_ptr   [ 0       2          5 | …      the tiles of each work item, all of one group
        window     columns [ 2 3 9 30 | 31 60 . . | …   the next columns that any row of the group has, compacted
        vbr        tile_word [ 0 4 | 1 2 3 | …          strips of consecutive columns, from a multiple of the width on
        values     [ tile 0 | tile 1 | …           height x width a tile, 0 where there is no nonzero

A row of the dense operand is gathered once for all rows of a group. Parameters of the storage are ``height`` and
``width`` of a tile; ``tau``, by which rows are grouped by similarity, in percent, 0 for neighbouring rows as they are;
and ``strip``, the columns of a strip that patterns are compared by.

Rows are fibers of the storage's item modes, and columns those of its lane modes; each mode has a list of its own, as
``rows_1`` of mode 1. Strips are of the last lane mode, and a tile of strips has one coordinate of each other lane mode.
A zero position is multiplied like any other.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from sparsetc.errors import FormatError
from sparsetc.formats import words
from sparsetc.formats.base import Packed, cut_runs, index_dtype, register_format
from sparsetc.formats.tiles import items_of, refuse_duplicates
from sparsetc.ir.nest.modes import Listed
from sparsetc.ir.nest.nest import Nest, tiles, tiles_along
from sparsetc.ir.nest.values import Whole
from sparsetc.ir.plan import Storage
from sparsetc.similarity.groups import Groups, group_rows
from sparsetc.support.lru import Lru
from sparsetc.tensor import coords as crd
from sparsetc.tensor.numbering import narrow_ranks, narrow_runs

PARAMETERS = ("height", "width", "tau", "strip")
"""What a storage of windows may name, and a partition that deals by them."""


@dataclass(frozen=True)
class Windowing:
    """Which modes make rows and columns, the sides of a tile, and how rows are grouped."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    height: int
    width: int
    tau: int = 0
    """The similarity of a group's rows, in percent; 0 leaves rows where they are."""
    strip: int = 1
    """Columns of a strip; rows are compared by the strips that they touch."""

    @classmethod
    def of(cls, storage: Storage) -> Windowing:
        """What a storage says; `FormatError` where it is none of windows."""
        if not storage.item or not storage.lane or storage.leaf:
            raise FormatError(f"windows have item modes, and all others at the lane; found {storage}")
        given = dict(storage.params)
        sides = given.get("height", 0), given.get("width", 0)
        if min(sides) < 1:
            raise FormatError(f"windows need a height and a width of 1 or more; found {given}")
        tau, strip = given.get("tau", 0), given.get("strip", sides[1])
        if not 0 <= tau <= 100 or strip < 1:
            raise FormatError(f"tau is in percent, and a strip has 1 column or more; found {given}")
        return cls(storage.item, storage.lane, *sides, tau, strip)

    @property
    def grouping(self) -> Hashable:
        """What groups of rows depend on, beside coordinates and shape: whatever the tiles."""
        return ("similar", self.rows, self.columns, self.strip, self.tau)

    def sides(self, order: int) -> tuple[int, ...]:
        """The sides of a tile, by mode; the other modes of rows, and of columns, are listed along them."""
        return tuple({self.rows[0]: self.height, self.columns[-1]: self.width}.get(m, 1) for m in range(order))


@dataclass(frozen=True)
class Rows:
    """The rows that have nonzeros, as windows take them."""

    rank: torch.Tensor
    """(nnz,) the place of each nonzero's row, int32 where that holds them."""
    count: int

    @classmethod
    def of(cls, coords: torch.Tensor, shape: tuple[int, ...], s: Windowing, cache: Lru[Any, Any] | None = None) -> Rows:
        """The rows in the order of their coordinates, or group by group; a cache keeps the groups.

        What whole windows leave of the groups comes after them, so that no window but those has rows of several groups.
        """
        own, count = _ranks(coords, shape, s.rows)
        if not s.tau:
            return cls(own, count)
        groups = (Lru(1) if cache is None else cache).once(s.grouping, lambda: similar(coords, shape, s))
        order = _in_windows(groups, s.height)
        places = torch.arange(count, dtype=own.dtype, device=order.device)
        rank = torch.empty(count, dtype=own.dtype, device=order.device).scatter_(0, order, places)
        return cls(rank.index_select(0, own), count)

    def listed(self, coordinate: torch.Tensor, height: int, none: int) -> torch.Tensor:
        """(windows * height,) the rows' coordinates, the last window filled up by what stands for none."""
        size, kind = -(-self.count // height) * height, index_dtype(none)
        lists = torch.full((size,), none, dtype=kind, device=coordinate.device)
        return lists.scatter_(0, self.rank.long(), coordinate.to(kind))


def _ranks(coords: torch.Tensor, shape: tuple[int, ...], modes: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """(nnz,) the number of each nonzero's fiber of these modes, and how many fibers there are."""
    return narrow_ranks((coords[m] for m in modes), [shape[m] for m in modes], coords[0])


def similar(coords: torch.Tensor, shape: tuple[int, ...], s: Windowing) -> Groups:
    """Groups of the rows that have nonzeros, by their numbers; several modes of columns are numbered too."""
    (rows, count), columns, width = _ranks(coords, shape, s.rows), coords[s.columns[-1]], shape[s.columns[-1]]
    if len(s.columns) > 1:
        columns, width = _ranks(coords, shape, s.columns)
    return group_rows(rows.long(), columns.long(), count, width, width=s.strip, tau=s.tau / 100)


def _in_windows(groups: Groups, height: int) -> torch.Tensor:
    """The numbers of the rows: whole windows of each group, then what is left of the groups."""
    size = groups.heights
    group = torch.repeat_interleave(size)
    place = torch.arange(group.numel(), device=group.device) - groups.ptr[:-1][group]
    left = place >= (size - size % height)[group]
    return groups.order[torch.sort(left, stable=True).indices]


class _Windows:
    """What both formats share; they differ in which columns a tile has."""

    name: str
    compacted: bool

    def parameters(self, order: int) -> tuple[str, ...]:
        """The sides of a tile, and how rows are grouped."""
        return PARAMETERS

    def view(self, shape: tuple[int, ...], storage: Storage) -> Nest:
        """Rows are listed for each work item; columns are for each tile, or lie at a multiple of the width."""
        s = Windowing.of(storage)
        sides = s.sides(len(shape))
        if self.compacted:
            lane: tuple[Listed, ...] | tuple[words.Field, ...] = _listed("columns", s.columns, s.width)
        else:
            lane = words.fields(s.columns, tiles_along(shape, sides), "tile_word")
        item = _listed("rows", s.rows, s.height)
        sequence = (*s.rows[1:], *s.columns[:-1], s.rows[0], s.columns[-1])
        return tiles(item, lane, Whole(sides, sequence))

    def pack(
        self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage, cache: Lru[Any, Any] | None = None
    ) -> Packed:
        """Group the rows, number the tiles of each group, and put every nonzero into its tile."""
        s, view, nnz = Windowing.of(storage), self.view(shape, storage), coords.shape[1]
        rows = Rows.of(coords, shape, s, cache)
        t = tiled(coords, shape, s, rows.rank // s.height, self.compacted)
        positions = self._positions(t, rows.rank % s.height, s, view.values.volume)
        groups = crd.starts_of_runs([t.group])
        of_items, split = items_of(groups, storage, view)
        arrays = {"item_ptr": torch.cat([of_items, of_items.new_full((1,), t.tiles)]).to(index_dtype(t.tiles))}
        for array, mode in _arrays("rows", s.rows):
            lists = rows.listed(coords[mode], s.height, shape[mode])
            arrays[array] = lists.view(-1, s.height).index_select(0, t.group.index_select(0, of_items)).flatten()
        if self.compacted:
            at = t.tile.long().mul_(s.width).add_(t.along)
            for array, mode in _arrays("columns", s.columns):
                kind = index_dtype(shape[mode])
                lists = torch.full((t.tiles * s.width,), shape[mode], dtype=kind, device=coords.device)
                arrays[array] = lists.scatter_(0, at, coords[mode].to(kind))
        else:
            strips = {m: coords[m].index_select(0, t.first) // view.values.sides[m] for m in s.columns}
            arrays |= words.encode(strips, view.levels[1])
        return Packed(
            format=self.name,
            storage=storage,
            shape=shape,
            nnz=nnz,
            view=view,
            arrays=arrays,
            positions=positions,
            stored=positions.numel(),
            items=of_items.numel(),
            representatives=(t.first.index_select(0, of_items), t.first),
            split_rows=split,
            padded=positions.numel() != nnz,
        )

    def _positions(self, t: Tiled, across: torch.Tensor, s: Windowing, volume: int) -> torch.Tensor:
        """(tiles * volume,) the nonzero of each position, -1 where there is none; `across` are places along rows."""
        positions = torch.full((t.tiles * volume,), -1, dtype=torch.long, device=across.device)
        place = t.tile.long().mul_(s.height).add_(across).mul_(s.width).add_(t.along)
        nonzeros = torch.arange(place.numel(), device=across.device)
        positions.scatter_(0, place, nonzeros)
        if not torch.equal(positions.index_select(0, place), nonzeros):
            refuse_duplicates()
        return positions


@register_format
class Window(_Windows):
    """Tiles over the columns that any row of a group has, compacted."""

    name, compacted = "window", True


@register_format
class Vbr(_Windows):
    """Tiles over strips of consecutive columns (1-SA): variable block rows of a fixed width."""

    name, compacted = "vbr", False


def _arrays(name: str, modes: Sequence[int]) -> list[tuple[str, int]]:
    """The arrays of coordinates of each mode, and the mode."""
    return [(f"{name}_{number}" if number else name, mode) for number, mode in enumerate(modes)]


def _listed(name: str, modes: Sequence[int], side: int) -> tuple[Listed, ...]:
    """Coordinates along one side: that of the first of the rows' modes, or of the last of the columns'."""
    carrier = modes[0] if name == "rows" else modes[-1]
    return tuple(
        Listed(mode, array, side, None if mode == carrier else carrier) for array, mode in _arrays(name, modes)
    )


@dataclass(frozen=True)
class Tiled:
    """Nonzeros dealt to the tiles of groups of rows."""

    tiles: int
    tile: torch.Tensor
    """(nnz,) the tile of each nonzero."""
    along: torch.Tensor
    """(nnz,) its place along the tile's columns."""
    group: torch.Tensor
    """(tiles,) the group of each tile, in order."""
    first: torch.Tensor
    """(tiles,) a nonzero of each tile."""


def tiled(coords: torch.Tensor, shape: tuple[int, ...], s: Windowing, group: torch.Tensor, compacted: bool) -> Tiled:
    """Number the tiles of each group: of its next columns, or of the strips that it touches."""
    *outer, last = s.columns
    columns = chain((coords[m] for m in outer), (coords[last] if compacted else coords[last] // s.width for _ in "c"))
    sizes = [max(1, coords.shape[1]), *(shape[m] for m in s.columns)]
    # The different columns of each group, or its strips, and the first nonzero of each.
    number, first = narrow_runs(chain((group.long() for _ in "g"), columns), sizes, coords[0])
    if not compacted:
        return Tiled(first.numel(), number, coords[last] % s.width, group.index_select(0, first), first)
    start, length, _ = cut_runs(crd.starts_of_runs([group.index_select(0, first)]), s.width)
    tiles = torch.arange(start.numel(), dtype=start.dtype, device=start.device)
    tile = torch.repeat_interleave(tiles, length).index_select(0, number)
    first = first.index_select(0, start)
    return Tiled(first.numel(), tile, number - start.index_select(0, tile), group.index_select(0, first), first)


def populations(
    coords: torch.Tensor, shape: tuple[int, ...], s: Windowing, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(nnz,) the window of each nonzero; (windows,) how many nonzeros, and how many tiles, each window has."""
    group = rows.rank // s.height
    t = tiled(coords, shape, s, group, compacted=True)
    return group, torch.bincount(group), torch.bincount(t.group)
