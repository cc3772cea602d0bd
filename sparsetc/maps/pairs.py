"""The pairs (row, column) of a body, and the row tiles along which it is computed.

In: a pattern, a mask, or a stack of them. Out: `Pairs`, which keeps what is made of them, and knows by which tiles they
cost least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sparsetc import masks
from sparsetc.maps.kernel import Sides
from sparsetc.maps.row_tiles import (
    RowEntries,
    RowTiles,
    entries_by_row,
    gathered,
    in_pieces,
    of_pattern,
    of_tiles,
    stacked_shape,
)
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor

Made = TypeVar("Made")
SQUARE = 64
NARROW = 32
APART = 0
"""Columns of the tiles that are compared, of 64 rows each; and tiles of 32 columns that 16 rows gather."""
PRICES = {SQUARE: 4.0, NARROW: 2.4, APART: 1.6}
"""Relative time of a tile, by its kind (H200, float16, 8 x 64, CUDA graphs: narrow tiles took .5 to .7 times as long as
square ones)."""
ROWS, COLUMNS = 16, 32
"""Sides of tiles of gathered columns."""
NATIVE_PRICES = {64: 26.0, 32: 8.0}
ENTRY = 0.0165
LOOPED = 0.0075
"""Microseconds of a head's square tile on a CPU, by its side, and of an entry in steps and in native loops (8 x 64 and
4 x 16, float32, one thread, 2048 rows in blocks that are filled by 2 to 40 %, and scattered entries)."""
SOME_TILES = 512
"""Tiles whose pairs are listed at once, 16 MB a number. Not measured."""
SAMPLE = 32
"""Windows of 64 rows whose entries are looked at, to choose between tiles and steps."""


class Pairs(NamedTuple):
    """The pairs that a body is computed of.

    Attributes:
        given: a mask, or a coalesced pattern of two modes, of entries, or of blocks whose sides are powers of two or
            multiples of 64; of entries if these have numbers. Of a stack of patterns: a mask each, or a pattern with
            one mode more in front.
        shape: queries and keys, or rows and columns.
        device: of the tensors.
        patterns: of the stack; 1 where all heads have the same pairs.
        fastest: whether the pattern changes with each head, and not once a run of heads.
    """

    given: Pattern | masks.Mask | tuple[masks.Mask, ...]
    shape: tuple[int, int]
    device: torch.device
    patterns: int = 1
    fastest: bool = False

    @property
    def width(self) -> int:
        """Columns of the tiles that cost least; 0 where it costs less to gather them."""
        if not isinstance(self.given, Pattern):
            return SQUARE
        return self.given._once(("maps", "width"), partial(_cheapest, self.given))

    def side(self, loops: bool) -> int:
        """Side of the square tiles that cost least on a CPU; 0 where it costs less to go entry by entry, in `loops`."""
        if not isinstance(self.given, Pattern):
            return SQUARE
        price = LOOPED if loops else ENTRY
        return self.given._once(("maps", "side", loops), partial(_cheapest_side, self.given, price))

    def kept(self, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
        """Return an object made once for these pairs, kept with the pattern or by the mask."""
        if isinstance(self.given, Pattern):
            return self.given._once(key, make)
        of_mask = self.given, self.shape, self.device, *key
        made: Made | None = masks.kept.get(of_mask)
        if made is None:
            with lasting():
                made = masks.kept.put(of_mask, make())
        return made

    def row_tiles(self, mode: int, sides: Sides, numbered: bool) -> RowTiles:
        """Return the row tiles of a mode, made once."""
        key = "row tiles", mode, sides.height, sides.width, sides.gathered, numbered
        return self.kept(key, lambda: self._row_tiles(mode, sides, numbered))

    def met(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows and columns of all pairs, some at a time; of a stack those of each pattern."""
        if isinstance(self.given, Pattern) and self.given.blocks is None:
            yield self.given.coords[-2], self.given.coords[-1]
            return
        tiles = self.row_tiles(0, Sides(SQUARE, SQUARE, 0, 0), False)
        lanes = torch.arange(SQUARE, device=self.device)
        for ptr, col, bits in ((tiles.full_ptr, tiles.full_col, None), (tiles.part_ptr, tiles.part_col, tiles.bits)):
            window = torch.repeat_interleave(ptr.diff().long()) % tiles.windows
            for some in torch.arange(len(col), device=self.device).split(SOME_TILES):
                row = window[some, None, None] * SQUARE + lanes[:, None]
                column = col[some, None, None].long() * SQUARE + lanes
                row, column = torch.broadcast_tensors(row, column)
                inside = slice(None) if bits is None else (bits[some, :, None] >> lanes & 1).bool()
                yield row[inside].flatten(), column[inside].flatten()

    def entries(self) -> list[RowEntries]:
        """Return the entries of a pattern's rows, and of its columns, made once."""
        given = self.given
        assert isinstance(given, Pattern)
        return self.kept(("entries by row",), lambda: [entries_by_row(single(given), mode) for mode in (0, 1)])

    def _row_tiles(self, mode: int, sides: Sides, numbered: bool) -> RowTiles:
        height, width = sides.height, sides.width
        if isinstance(self.given, Pattern):
            return (gathered if sides.gathered else of_pattern)(self.given, mode, height, width, numbered)
        shape = self.shape[::-1] if mode else self.shape
        if mode and height == width:
            tiles = [masks.turned_tiles(of_mask) for of_mask in self._tiles(0, height, width)]
        else:
            tiles = self._tiles(mode, height, width)
        windows = -(-shape[0] // height)
        full, part = ([*map(list, kind)] for kind in zip(*tiles, strict=True))
        for number, of_mask in enumerate(zip(full, part, strict=True)):
            for kind in of_mask:
                kind[0] = kind[0] + number * windows
        whole, bits = (tuple(map(torch.cat, zip(*kind, strict=True))) for kind in (full, part))
        return of_tiles((whole[0], whole[1]), (bits[0], bits[1], bits[2]), shape, height, width, self.patterns)

    def _tiles(self, mode: int, height: int, width: int) -> list[masks.Tiles]:
        """Return the tiles of each mask, made once."""
        each = self.given if isinstance(self.given, tuple) else (self.given,)
        shape = self.shape[::-1] if mode else self.shape

        def made() -> list[masks.Tiles]:
            turned = [mask.turned if mode else mask for mask in each if isinstance(mask, masks.Mask)]
            return [masks.tiles_of(mask, shape, height, width, self.device) for mask in turned]

        return self.kept(("tiles", mode, height, width), made)


def single(pattern: Pattern) -> Pattern:
    """Return the pattern of single entries, expanded if it is in blocks."""
    if pattern.blocks is None:
        return pattern
    whole = SparseTensor._make(pattern, torch.ones((), device=pattern.device).expand(pattern.values_shape(())))
    return without_blocks(whole).pattern  # type: ignore[no-any-return]


def _cheapest_side(pattern: Pattern, entry: float) -> int:
    """Return the side of square tiles by which a pattern costs least on a CPU, or 0 for entries of this price."""
    rows = stacked_shape(pattern)[1][0]
    every = 1
    if pattern.blocks is None:
        every = max(rows // (SQUARE * SAMPLE), 1)
    costs = {}
    for side, price in NATIVE_PRICES.items():
        places = in_pieces(pattern, (side, side))
        if every > 1:
            places = places[:, places[-2] // SQUARE % every == 0]
            costs[0] = entry * places.shape[1]
        costs[side] = price * _tiles(pattern, places, side, side)
    costs.setdefault(0, entry * prod(pattern.values_shape(())))
    return min(costs, key=costs.__getitem__)


def _cheapest(pattern: Pattern) -> int:
    """Return the width of tiles, or 0 for gathered ones, by which a pattern costs least."""
    shape = stacked_shape(pattern)[1]
    costs = {}
    for width in (SQUARE, NARROW):
        places = in_pieces(pattern, (SQUARE, width))
        costs[width] = PRICES[width] * _tiles(pattern, places, SQUARE, width)
    if pattern.blocks is None:
        windows = -(-shape[0] // ROWS)
        *stack, row, column = pattern.coords
        window = row // ROWS + stack[0] * windows if stack else row // ROWS
        distinct = torch.unique(window * shape[1] + column) // shape[1]
        costs[APART] = PRICES[APART] * int((-(-torch.bincount(distinct) // COLUMNS)).sum())
    return min(costs, key=costs.__getitem__)


def _tiles(pattern: Pattern, places: Tensor, height: int, width: int) -> int:
    """Return how many tiles of neighbouring columns hold some places of a pattern."""
    rows, columns = stacked_shape(pattern)[1]
    *stack, row, column = places
    tall, wide = -(-rows // height), -(-columns // width)
    tile = row // height * wide + column // width
    return len(torch.unique(tile + stack[0] * (tall * wide) if stack else tile))
