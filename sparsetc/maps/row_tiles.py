"""Windows of rows with their tiles of columns, in the order in which a body is computed.

In: coordinates of entries, blocks, or the tiles of a mask. Out: `RowTiles`. A tile is `height` rows by `width` columns,
either neighbouring ones or, `gathered`, the distinct columns of a window in order. A full tile needs no bits; of a
partial one there is a word a row, whose bit c says whether the row meets the tile's column c. A walk of the columns
takes the row tiles of the transposed pattern.

A stack of patterns, one a head or a batch, has the windows of its first pattern, then those of its second, and so on.

Long windows are cut into several work items, whose partial sums are combined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsetc.support import cached_property
from sparsetc.tensor.pattern import Pattern

FIELDS = 6
"""Numbers of a work item: its window, where its full and its partial tiles begin and end, and its slot, or -1."""


@dataclass(frozen=True, eq=False)
class RowTiles:
    """Windows of rows, each with its tiles.

    Attributes:
        rows: of each pattern.
        columns: of each pattern.
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
        patterns: how many there are.
    """

    rows: int
    columns: int
    height: int
    width: int
    gathered: bool
    full_ptr: Tensor
    full_col: Tensor
    part_ptr: Tensor
    part_col: Tensor
    bits: Tensor
    full_base: Tensor | None = None
    part_base: Tensor | None = None
    order: Tensor | None = None
    patterns: int = 1

    @property
    def windows(self) -> int:
        """The number of windows of each pattern."""
        return -(-self.rows // self.height)

    @property
    def even(self) -> bool:
        """True if no tile reaches past the last column."""
        return self.gathered or self.columns % self.width == 0

    @property
    def met(self) -> int:
        """The number of pairs in partial tiles."""
        bits = self.bits[..., None].contiguous().view(torch.uint8)
        return sum(int((bits >> n & 1).sum()) for n in range(8))

    @cached_property
    def in_runs(self) -> bool:
        """True if the full tiles of each window are neighbours, as those of a causal mask."""
        window = torch.repeat_interleave(self.full_ptr.diff().long())
        return len(window) > 1 and bool(((self.full_col.diff() == 1) | (window.diff() != 0)).all())

    @cached_property
    def longest(self) -> int:
        """The most tiles of a window."""
        return int(self._counts.sum(0).max()) if self._counts.numel() else 0

    @cached_property
    def tiles(self) -> int:
        """The number of tiles."""
        return int(self.full_ptr[-1]) + int(self.part_ptr[-1])

    @property
    def _counts(self) -> Tensor:
        """(2, windows) full and partial tiles of each window."""
        return torch.stack((self.full_ptr, self.part_ptr)).diff(dim=1).long()

    def items(self, most: int) -> tuple[Tensor, Tensor, int]:
        """Return work items of at most `most` tiles (0: any number), the windows that were cut, and their slots.

        A window that is cut has a slot for the partial sums of each item; the longest items come first.

        Returns:
            (items, FIELDS) int32; (windows that were cut, 3) int32, each with its first slot and the one after its
            last; the number of slots.
        """
        full, part = self._counts
        total, device = full + part, full.device
        pieces = torch.ones_like(total)
        if most:
            pieces = (-(-total // most)).clamp(min=1)
        window = torch.repeat_interleave(torch.arange(len(pieces), device=device), pieces)
        piece = torch.arange(len(window), device=device) - (pieces.cumsum(0) - pieces)[window]
        share = (-(-total // pieces))[window]
        end = total[window]
        of_full = full[window]
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
    full: tuple[Tensor, Tensor],
    part: tuple[Tensor, Tensor, Tensor],
    shape: tuple[int, int],
    height: int,
    width: int,
    patterns: int = 1,
) -> RowTiles:
    """Return the row tiles of blocks of neighbouring columns.

    Args:
        full: windows and blocks of the full tiles, in any order.
        part: windows, blocks and words (tiles, height) int64 of the partial ones.
        shape: of each pattern.
        height: of a tile.
        width: of a tile, 32 or 64.
        patterns: how many there are.
    """
    blocks, windows = -(-shape[1] // width), -(-shape[0] // height) * patterns
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
        patterns=patterns,
    )


def of_pattern(
    pattern: Pattern, mode: int, height: int, width: int, numbered: bool = False, gathered: bool = False
) -> RowTiles:
    """Make tiles of a coalesced pattern; blocks are not expanded.

    Sides of blocks must be multiples of the tile's, or divide them: see `whole_blocks`.

    Args:
        pattern: of entries or blocks; of two modes, or of three, the first of which is of the patterns of a stack.
        mode: 0 for windows of its rows, 1 for windows of its columns.
        height: of a tile, a power of two.
        width: of a tile, 64 at most; of neighbouring columns 32 or 64.
        numbered: whether entries have numbers; not of a pattern in blocks.
        gathered: whether tiles have the distinct columns of a window, and not neighbouring ones; not of blocks.
    """
    patterns, shape = stacked_shape(pattern)
    rows, columns = shape[mode], shape[1 - mode]
    listed = None
    if pattern.blocks is None:
        own, other, order = _sorted(pattern, mode, height)
        if gathered:
            listed, of_column = torch.unique(own // height * columns + other, return_inverse=True)
            distinct = torch.bincount(listed // columns, minlength=-(-rows // height) * patterns)
            first = distinct.cumsum(0) - distinct
            other = of_column - first[own // height]  # the number of a column among those of its window
        word = torch.ones_like(other) << (other % width)
    else:
        tile = (height, width) if mode == 0 else (width, height)
        *stack, row, column = in_pieces(pattern, tile)
        tall, wide = (min(side, size) for side, size in zip(pattern.blocks.sides[-2:], tile, strict=True))
        pieces, sides = (row, column), (tall, wide)
        which, own, other, word = _runs(
            stack, pieces[mode], pieces[1 - mode], sides[mode], sides[1 - mode], (rows, columns), width
        )
        own, order = own + which * (-(-rows // height) * height), None
    across = -(-columns // width)
    keys, tile_of = torch.unique(own // height * across + other // width, return_inverse=True)
    place = tile_of * height + own % height
    bits = torch.zeros(len(keys) * height, dtype=torch.int64, device=own.device).index_add_(0, place, word)
    bits = bits.view(-1, height)
    whole = (bits == (-1 if width == 64 else (1 << width) - 1)).all(1) & (listed is None)
    window, block = keys // across, keys % across
    part = ~whole
    tiles = of_tiles(
        (window[whole], block[whole]), (window[part], block[part], bits[part]), (rows, columns), height, width, patterns
    )
    if listed is not None:
        number = block[:, None] * width + torch.arange(width, device=own.device)
        number = first[window, None] + number.minimum(distinct[window, None] - 1)
        tiles = replace(tiles, gathered=True, part_col=(listed % columns)[number].int())
    if not numbered:
        return tiles
    base = _first(place, len(keys) * height).view(-1, height)
    return replace(tiles, full_base=base[whole].int(), part_base=base[part].int(), order=order)


RowEntries = tuple[int, Tensor, Tensor, Tensor | None]
"""The entries of a coalesced pattern, row by row; rows of a stack's second pattern follow those of its first.

The rows of each pattern; (rows + 1,) int64, where each one's entries begin; (nnz,) int64 columns; and (nnz,) int32, the
number that an entry has in the pattern, of its number here, None if they are equal.
"""


def entries_by_row(pattern: Pattern, mode: int) -> RowEntries:
    """Return the entries of rows, or of columns in their place for mode 1."""
    patterns, shape = stacked_shape(pattern)
    own, other, order = _sorted(pattern, mode, 1)
    return shape[mode], _pointers(own, shape[mode] * patterns).long(), other, order


def stacked_shape(pattern: Pattern) -> tuple[int, tuple[int, int]]:
    """Return the number of patterns of a stack, 1 of a pattern of two modes, and the sizes of each."""
    *stack, rows, columns = pattern.shape if pattern.blocks is None else pattern.blocks.shape
    return (stack[0] if stack else 1), (rows, columns)


def whole_blocks(pattern: Pattern, height: int, width: int) -> bool:
    """True if a pattern has single entries, or blocks whose sides divide those of tiles or are multiples of them."""
    sides = () if pattern.blocks is None else pattern.blocks.sides[-2:]
    return all(side % size == 0 or size % side == 0 for side in sides for size in (height, width))


def in_pieces(pattern: Pattern, tile: tuple[int, int]) -> Tensor:
    """Return (modes, pieces) the first positions of entries, or of what of blocks lies in one tile each."""
    if pattern.blocks is None:
        return pattern.coords
    *stack, tall, wide = pattern.blocks.sides
    sides = (*stack, min(tall, tile[0]), min(wide, tile[1]))
    return pattern.cut(sides)[0].coords * pattern.coords.new_tensor(sides)[:, None]


def _sorted(pattern: Pattern, mode: int, height: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the coordinates of entries in the order of a mode, and the number of each in the pattern.

    Own coordinates of a stack's second pattern begin where a window of this height does, after those of the first.
    """
    order = None
    if mode == 1:
        pattern, order = pattern.permuted((*range(pattern.order - 2), pattern.order - 1, pattern.order - 2))
    *stack, own, other = pattern.coords
    if stack:
        own = own + stack[0] * (-(-pattern.shape[1] // height) * height)
    return own, other, None if order is None else order.int()


def _runs(
    stack: list[Tensor], own: Tensor, other: Tensor, rows: int, columns: int, shape: tuple[int, int], width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row of pieces inside of the shape: its pattern, its place, its first column, and their word."""
    device = own.device
    which = stack[0] if stack else torch.zeros_like(own)
    own = (own[:, None] + torch.arange(rows, device=device)).flatten()
    inside = own < shape[0]
    own = own[inside]
    which, other = (t.repeat_interleave(rows)[inside] for t in (which, other))
    length = (shape[1] - other).clamp(max=columns)
    ones = torch.where(length == 64, -1, (1 << length.clamp(max=63)) - 1)
    return which, own, other, ones << (other % width)


def _first(place: Tensor, places: int) -> Tensor:
    """Return the number of the first entry at each place."""
    numbers = torch.arange(len(place), device=place.device)
    return numbers.new_zeros(places).scatter_reduce_(0, place, numbers, "amin", include_self=False)


def _pointers(window: Tensor, windows: int) -> Tensor:
    return torch.nn.functional.pad(torch.bincount(window, minlength=windows).cumsum(0), (1, 0)).int()
