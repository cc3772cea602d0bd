"""Windows of rows with the tiles of columns that each meets: what a walk of a body goes along.

In: coordinates of entries, blocks, or the tiles of a mask. Out: `RowTiles`. A tile is `height` rows by `width` columns,
either neighbouring ones or, `gathered`, the distinct columns of a window in order. A full tile needs no bits; of a
partial one there is a word a row, whose bit c says whether the row meets the tile's column c. A walk of the columns
takes the row tiles of the transposed pattern.

Long windows are cut into several work items, whose partial sums are combined.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from sparsetc.support.lru import Lru, cached_property
from sparsetc.tensor.pattern import Pattern

FIELDS = 6
"""Numbers of a work item: its window, where its full and its partial tiles begin and end, and its slot, or -1."""


@dataclass(frozen=True, eq=False)
class RowTiles:
    """Windows of rows, each with its tiles.

    Attributes:
        rows: of the pattern.
        columns: of the pattern.
        height: rows of a window.
        width: columns of a tile, 64 at most.
        gathered: whether tiles hold any columns, and not neighbouring ones.
        full_ptr: (windows + 1,) int32, where the full tiles of each window begin.
        full_col: (full tiles,) int32, the number of each one's block of columns.
        part_ptr: (windows + 1,) likewise of partial tiles.
        part_col: (partial tiles,) likewise; gathered, (partial tiles, width) columns, one of the window's twice
            in place of none: so nothing is read that the window does not meet.
        bits: (partial tiles, height) a word a row.
        full_base: (full tiles, height) int32, the number of the first entry of each row of a tile; None unless asked.
        part_base: (partial tiles, height) likewise.
        order: (nnz,) int32, the number that an entry has in the pattern, of its number here; None if they are equal.
    """

    rows: int
    columns: int
    height: int
    width: int
    gathered: bool
    full_ptr: torch.Tensor
    full_col: torch.Tensor
    part_ptr: torch.Tensor
    part_col: torch.Tensor
    bits: torch.Tensor
    full_base: torch.Tensor | None = None
    part_base: torch.Tensor | None = None
    order: torch.Tensor | None = None
    _items: Lru[int, tuple[torch.Tensor, torch.Tensor, int]] = field(default_factory=lambda: Lru(8))

    @property
    def even(self) -> bool:
        """Whether no tile reaches past the last column."""
        return self.gathered or self.columns % self.width == 0

    @cached_property
    def longest(self) -> int:
        """The most tiles of a window."""
        return int(self._counts.sum(0).max()) if self._counts.numel() else 0

    @cached_property
    def tiles(self) -> int:
        """The number of tiles."""
        return int(self.full_ptr[-1]) + int(self.part_ptr[-1])

    @property
    def _counts(self) -> torch.Tensor:
        """(2, windows) full and partial tiles of each window."""
        return torch.stack((self.full_ptr, self.part_ptr)).diff(dim=1).long()

    def items(self, most: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return work items of at most so many tiles (0: of any number), the windows that were cut, and the slots.

        A window that is cut has a slot for the partial sums of each item; the longest items come first.

        Returns:
            (items, FIELDS) int32; (windows that were cut, 3) int32, each with its first slot and the one after its
            last; the number of slots.
        """
        return self._items.once(most, partial(self._cut, most))

    def _cut(self, most: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        full, part = self._counts
        total, device = full + part, full.device
        pieces = torch.ones_like(total)
        if most:
            pieces = (-(-total // most)).clamp(min=1)
        window = torch.repeat_interleave(torch.arange(len(pieces), device=device), pieces)
        piece = torch.arange(len(window), device=device) - (pieces.cumsum(0) - pieces)[window]
        share, end, of_full = (-(-total // pieces))[window], total[window], full[window]
        begin, stop = (piece * share).minimum(end), ((piece + 1) * share).minimum(end)
        slots = torch.where(pieces > 1, pieces, 0)
        first = slots.cumsum(0) - slots
        slot = torch.where(slots[window] > 0, first[window] + piece, -1)
        full_from, part_from = self.full_ptr[:-1].long()[window], self.part_ptr[:-1].long()[window]
        columns = (
            window,
            full_from + begin.minimum(of_full),
            full_from + stop.minimum(of_full),
            part_from + (begin - of_full).clamp(min=0),
            part_from + (stop - of_full).clamp(min=0),
            slot,
        )
        longest_first = torch.argsort(stop - begin, descending=True, stable=True)
        items = torch.stack(columns, 1)[longest_first].int().contiguous()
        windows = slots.nonzero()[:, 0]
        cut = torch.stack((windows, first[windows], (first + slots)[windows]), 1).int().contiguous()
        return items, cut, int(slots.sum())


def of_tiles(
    full: tuple[torch.Tensor, torch.Tensor],
    part: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    shape: tuple[int, int],
    height: int,
    width: int,
) -> RowTiles:
    """Return the row tiles of blocks of neighbouring columns.

    Args:
        full: windows and blocks of the full tiles, in any order.
        part: windows, blocks and words (tiles, height) int64 of the partial ones.
        shape: of the pattern.
        height: of a tile.
        width: of a tile, 32 or 64.
    """
    blocks, windows = -(-shape[1] // width), -(-shape[0] // height)
    by_place = [torch.argsort(tiles[0] * blocks + tiles[1]) for tiles in (full, part)]
    word = torch.int64 if width > 32 else torch.int32
    return RowTiles(
        rows=shape[0],
        columns=shape[1],
        height=height,
        width=width,
        gathered=False,
        full_ptr=_pointers(full[0], windows),
        full_col=full[1][by_place[0]].int(),
        part_ptr=_pointers(part[0], windows),
        part_col=part[1][by_place[1]].int(),
        bits=part[2][by_place[1]].to(word),
    )


def of_pattern(pattern: Pattern, mode: int, height: int, width: int, numbered: bool = False) -> RowTiles:
    """Return blocks of neighbouring columns of a coalesced pattern of two modes; of one in blocks without expanding it.

    Sides of blocks must be multiples of the tile's, or divide them: see `whole_blocks`.

    Args:
        pattern: of entries or blocks.
        mode: 0 for windows of its rows, 1 for windows of its columns.
        height: of a tile, a power of two.
        width: of a tile, 32 or 64.
        numbered: whether entries have numbers; not of a pattern in blocks.
    """
    blocks = pattern.blocks
    if blocks is None:
        shape = pattern.shape
        own, other, order = _sorted(pattern, mode)
        word = _bit(other, width)
    else:
        shape = blocks.shape
        tile = (height, width) if mode == 0 else (width, height)
        sides = tuple(map(min, blocks.sides, tile))
        pieces = pattern.cut(sides)[0].coords * pattern.coords.new_tensor(sides)[:, None]
        own, other, word = _runs(pieces[mode], pieces[1 - mode], sides[mode], sides[1 - mode], shape, mode, width)
        order = None
    rows, columns = shape[mode], shape[1 - mode]
    across = -(-columns // width)
    keys, tile_of = torch.unique(own // height * across + other // width, return_inverse=True)
    place = tile_of * height + own % height
    bits = torch.zeros(len(keys) * height, dtype=torch.int64, device=own.device).index_add_(0, place, word)
    bits = bits.view(-1, height)
    whole = (bits == (-1 if width == 64 else (1 << width) - 1)).all(1)
    window, block = keys // across, keys % across
    part = ~whole
    tiles = of_tiles(
        (window[whole], block[whole]), (window[part], block[part], bits[part]), (rows, columns), height, width
    )
    if not numbered:
        return tiles
    base = _first(place, len(keys) * height).view(-1, height)
    numbers = {"full_base": base[whole].int(), "part_base": base[part].int()}
    return _with_numbers(tiles, numbers, order)


def gathered(pattern: Pattern, mode: int, height: int, width: int, numbered: bool = False) -> RowTiles:
    """Return windows of gathered columns, of a coalesced pattern of single entries; arguments as of `of_pattern`."""
    own, other, order = _sorted(pattern, mode)
    rows, columns = pattern.shape[mode], pattern.shape[1 - mode]
    windows, device = -(-rows // height), own.device
    keys, column_of = torch.unique(own // height * columns + other, return_inverse=True)
    window, column = keys // columns, keys % columns
    distinct = torch.bincount(window, minlength=windows)
    tiles_each, first = -(-distinct // width), distinct.cumsum(0) - distinct
    ptr = _cumulated(tiles_each)
    within = torch.arange(len(keys), device=device) - first[window]
    slot = ptr.long()[window] * width + within
    tiles = int(ptr[-1])
    of_tile = torch.repeat_interleave(first, tiles_each)  # where the columns of a tile's window begin
    part_col = column[of_tile].int().repeat_interleave(width)
    part_col[slot] = column.int()
    at = slot[column_of]
    place = at // width * height + own % height
    bits = torch.zeros(tiles * height, dtype=torch.int64, device=device)
    bits.index_add_(0, place, _bit(at, width))
    row_tiles = RowTiles(
        rows=rows,
        columns=columns,
        height=height,
        width=width,
        gathered=True,
        full_ptr=torch.zeros_like(ptr),
        full_col=ptr.new_zeros(0),
        part_ptr=ptr,
        part_col=part_col.view(-1, width),
        bits=bits.view(-1, height).to(torch.int64 if width > 32 else torch.int32),
    )
    if not numbered:
        return row_tiles
    base = _first(place, tiles * height).view(-1, height).int()
    return _with_numbers(row_tiles, {"full_base": base[:0], "part_base": base}, order)


def whole_blocks(pattern: Pattern, height: int, width: int) -> bool:
    """Return True if a pattern is of entries, or of blocks that tiles of these sides divide or are divided by."""
    sides = () if pattern.blocks is None else pattern.blocks.sides
    return all(side % size == 0 or size % side == 0 for side in sides for size in (height, width))


def _with_numbers(tiles: RowTiles, bases: dict[str, torch.Tensor], order: torch.Tensor | None) -> RowTiles:
    fields = {name: getattr(tiles, name) for name in tiles.__dataclass_fields__ if name != "_items"}
    return RowTiles(**{**fields, **bases, "order": order})


def _sorted(pattern: Pattern, mode: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the coordinates of entries in the order of a mode, and the number of each in the pattern."""
    if mode == 0:
        return pattern.coords[0], pattern.coords[1], None
    turned, order = pattern.permuted((1, 0))
    assert order is not None
    return turned.coords[0], turned.coords[1], order.int()


def _runs(
    own: torch.Tensor, other: torch.Tensor, rows: int, columns: int, shape: tuple[int, ...], mode: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row of pieces inside of the shape: its place, its first column, and the word of its columns."""
    device = own.device
    own = (own[:, None] + torch.arange(rows, device=device)).flatten()
    other = other.repeat_interleave(rows)
    inside = own < shape[mode]
    own, other = own[inside], other[inside]
    length = (shape[1 - mode] - other).clamp(max=columns)
    ones = torch.where(length == 64, -1, (1 << length.clamp(max=63)) - 1)
    return own, other, ones << (other % width)


def _bit(column: torch.Tensor, width: int) -> torch.Tensor:
    return torch.ones_like(column) << (column % width)


def _first(place: torch.Tensor, places: int) -> torch.Tensor:
    """Return the number of the first entry at each place."""
    numbers = torch.arange(len(place), device=place.device)
    return numbers.new_zeros(places).scatter_reduce_(0, place, numbers, "amin", include_self=False)


def _pointers(window: torch.Tensor, windows: int) -> torch.Tensor:
    return _cumulated(torch.bincount(window, minlength=windows))


def _cumulated(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
