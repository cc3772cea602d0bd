"""``window`` and ``vbr``: groups of output rows in dense tiles over the columns that they have (1-SA, section 3).

        rows       [ 7 12 40 . | 3 5 9 11 | …      the rows of each group, wherever they lie; . is no row
        item_ptr   [ 0       2          5 | …      the tiles of each work item, all of one group
        window     columns [ 2 3 9 30 | 31 60 . . | …   the next columns that any row of the group has, compacted
        vbr        tile_word [ 0 4 | 1 2 3 | …          strips of consecutive columns, from a multiple of the width on
        values     [ tile 0 | tile 1 | …           height x width a tile, 0 where there is no nonzero

A row of the dense operand is gathered once for all rows of a group. Parameters of the storage: ``height`` and
``width`` of a tile; ``tau``, by which rows are grouped by similarity, in percent, 0 for neighbouring rows as they are;
and ``strip``, the columns of a strip that patterns are compared by. The item mode is grouped, the last of the lane's is
cut into tiles, and a tile has one coordinate of each other mode. A zero position is multiplied like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sparsetc.errors import FormatError
from sparsetc.formats import words
from sparsetc.formats.base import Packed, index_dtype, place_in_run, register_format, runs
from sparsetc.formats.tiles import refuse_duplicates
from sparsetc.ir.nest.view import Listed, View, tiles_along
from sparsetc.ir.plan import Storage
from sparsetc.tensor import coords as crd

if TYPE_CHECKING:
    from sparsetc.partition.similarity import Groups


@dataclass(frozen=True)
class Windowing:
    """Which mode is grouped and which is cut, and the sides of a tile."""

    row: int
    others: tuple[int, ...]
    column: int
    height: int
    width: int
    tau: int
    strip: int

    @classmethod
    def of(cls, storage: Storage) -> Windowing:
        """What a storage says; `FormatError` where it is none of windows."""
        if len(storage.item) != 1 or not storage.lane or storage.leaf:
            raise FormatError(f"windows have one item mode, and all others at the lane; found {storage}")
        given = dict(storage.params)
        sides = given.get("height", 0), given.get("width", 0)
        if min(sides) < 1:
            raise FormatError(f"windows need a height and a width of 1 or more; found {given}")
        tau, strip = given.get("tau", 0), given.get("strip", sides[1])
        if not 0 <= tau <= 100 or strip < 1:
            raise FormatError(f"tau is in percent, and a strip has 1 column or more; found {given}")
        return cls(*storage.item, storage.lane[:-1], storage.lane[-1], *sides, tau, strip)

    def sides(self, order: int) -> tuple[int, ...]:
        """The sides of a tile, by mode."""
        return tuple({self.row: self.height, self.column: self.width}.get(mode, 1) for mode in range(order))


class _Windows:
    """What both formats share; they differ in which columns a tile has."""

    name: str
    compacted: bool

    def view(self, shape: tuple[int, ...], storage: Storage) -> View:
        """Rows are listed for each work item; columns are for each tile, or lie at a multiple of the width."""
        s = Windowing.of(storage)
        sides = s.sides(len(shape))
        if self.compacted:
            lane = (*words.fields(s.others, shape, "tile_word"), Listed(s.column, "columns", s.width))
        else:
            lane = words.fields(storage.lane, tiles_along(shape, sides), "tile_word")
        item = (Listed(s.row, "rows", s.height),)
        return View(len(shape), item, lane, (), False, sides=sides, sequence=(*s.others, s.row, s.column))

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
        """Group the rows, number the tiles of each group, and put every nonzero into its tile."""
        s, view, nnz = Windowing.of(storage), self.view(shape, storage), coords.shape[1]
        rows, rank = grouped_rows(coords, shape, s)
        t = tiled(coords, shape, s, rank // s.height, self.compacted)
        positions = torch.full((t.tiles * view.volume,), -1, dtype=torch.long, device=coords.device)
        place = (t.tile * s.height + rank % s.height) * s.width + t.along
        positions[place] = torch.arange(nnz, device=coords.device)
        if int((positions >= 0).sum()) != nnz:
            refuse_duplicates()
        groups = crd.starts_of_runs([t.group])
        most = max(1, storage.max_item_nnz // view.volume) if storage.max_item_nnz else 0
        item_ptr = runs(groups | (place_in_run(groups) % most == 0) if most else groups)
        of_items, first = item_ptr[:-1], coords[:, t.first]
        arrays = {
            "item_ptr": item_ptr.to(index_dtype(t.tiles)),
            "rows": listed(rows, s.height, shape[s.row]).view(-1, s.height)[t.group[of_items]].flatten(),
        }
        if self.compacted:
            columns = torch.full((t.tiles * s.width,), shape[s.column], dtype=torch.long, device=coords.device)
            columns[t.tile * s.width + t.along] = coords[s.column]
            arrays["columns"] = columns.to(index_dtype(shape[s.column]))
        else:
            first = first // torch.tensor(view.sides, device=coords.device).unsqueeze(1)
        arrays |= words.encode(first, [c for c in view.lane if c.fields])
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
            representatives=(t.first[of_items], t.first),
            split_rows=of_items.numel() > int(groups.sum()),
            padded=positions.numel() != nnz,
        )

    def unpack(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up the row and the column of every position that holds a nonzero."""
        s, arrays, view = Windowing.of(packed.storage), packed.arrays, packed.view
        assert packed.positions is not None
        at = torch.nonzero(packed.positions >= 0).flatten()
        tile, across, along = at // view.volume, at // s.width % s.height, at % s.width
        item = torch.searchsorted(arrays["item_ptr"].long(), tile, right=True) - 1
        found = {mode: own[tile] for mode, own in words.decode(arrays, [c for c in view.lane if c.fields]).items()}
        found[s.row] = arrays["rows"].long()[item * s.height + across]
        if self.compacted:
            found[s.column] = arrays["columns"].long()[tile * s.width + along]
        else:
            found[s.column] = found[s.column] * s.width + along
        return torch.stack([found[mode] for mode in range(len(packed.shape))]), packed.positions[at]


@register_format
class Window(_Windows):
    """Tiles over the columns that any row of a group has, compacted."""

    name, compacted = "window", True


@register_format
class Vbr(_Windows):
    """Tiles over strips of consecutive columns (1-SA): variable block rows of a fixed width."""

    name, compacted = "vbr", False


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
    nnz, column = coords.shape[1], coords[s.column] if compacted else coords[s.column] // s.width
    modes, sizes = [group, *coords[list(s.others)], column], [shape[s.row], *(shape[m] for m in s.others)]
    order, fresh = crd.sorted_runs(crd.sort_keys(modes, [*sizes, shape[s.column]]))
    number, heads = torch.cumsum(fresh, 0) - 1, order[fresh]  # of the different columns of each group
    if compacted:
        start = crd.starts_of_runs([mode[heads] for mode in modes[:-1]])
        place = place_in_run(start) % s.width
        start = place == 0
        tile, first = torch.cumsum(start, 0) - 1, heads[start]
    else:
        place, tile, first = None, torch.arange(heads.numel(), device=coords.device), heads
    of_nonzeros = torch.empty(nnz, dtype=torch.long, device=coords.device).scatter_(0, order, number)
    along = coords[s.column] % s.width if place is None else place[of_nonzeros]
    return Tiled(first.numel(), tile[of_nonzeros], along, group[first], first)


def populations(
    coords: torch.Tensor, shape: tuple[int, ...], s: Windowing, groups: Groups | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(nnz,) the window of each nonzero; (windows,) how many nonzeros, and how many tiles, each window has.

    Groups of similar rows are made where they are not given.
    """
    _, rank = grouped_rows(coords, shape, s, groups)
    group = rank // s.height
    t = tiled(coords, shape, s, group, compacted=True)
    return group, torch.bincount(group), torch.bincount(t.group)


def grouped_rows(
    coords: torch.Tensor, shape: tuple[int, ...], s: Windowing, groups: Groups | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the rows that have nonzeros, those of a group side by side; (nnz,) the place of each nonzero's row among them).

    What whole windows leave of the groups comes after them, so that no window but those has rows of several groups.
    """
    row, count = coords[s.row], shape[s.row]
    if s.tau:
        rows = _in_windows(groups or similar_rows(coords, shape, s), s.height)
    elif count <= 8 * row.numel() + (1 << 20):
        seen = torch.zeros(count, dtype=torch.bool, device=row.device)
        seen[row] = True
        rows = torch.nonzero(seen).flatten()
    else:
        rows = torch.unique(row)
    ordered, of_row = torch.sort(rows)
    return rows, of_row[torch.searchsorted(ordered, row)]


def similar_rows(coords: torch.Tensor, shape: tuple[int, ...], s: Windowing) -> Groups:
    """Groups of the rows of the tensor's unfolding along the mode of rows."""
    from sparsetc.partition.row_similarity import unfolded  # which imports the formats
    from sparsetc.partition.similarity import group_rows

    rows, columns, count = unfolded(coords, shape, s.row)
    return group_rows(rows, columns, shape[s.row], count, width=s.strip, tau=s.tau / 100)


def _in_windows(groups: Groups, height: int) -> torch.Tensor:
    """The rows that have nonzeros: whole windows of each group, then what is left of the groups."""
    size = groups.heights
    group = torch.repeat_interleave(torch.arange(size.numel(), device=size.device), size)
    place = torch.arange(group.numel(), device=group.device) - groups.ptr[:-1][group]
    left = place >= (size - size % height)[group]
    return groups.order[torch.sort(left, stable=True).indices]


def listed(numbers: torch.Tensor, side: int, none: int) -> torch.Tensor:
    """Numbers as lists of so many places, the last filled up by what stands for none."""
    missing = -numbers.numel() % side
    return torch.nn.functional.pad(numbers, (0, missing), value=none).to(index_dtype(none))
