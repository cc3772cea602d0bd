"""The pairs (row, column) of a body, and the row tiles along which it is computed.

In: a pattern as users have it: a mask, sparse or boolean tensor, block mask or compressed rows. Out: `Pairs`, of one
pattern or mask for all heads, or of a stack, one for each head or batch. It keeps what is made of them as long as the
object that it was made from, and knows by which tiles they cost least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sparsetc import masks
from sparsetc.contraction.request import as_operand
from sparsetc.errors import DeviceError, FormatError, ShapeError, TransformError
from sparsetc.maps import mask_tiles
from sparsetc.maps.row_tiles import (
    RowEntries,
    RowTiles,
    entries_by_row,
    in_pieces,
    of_pattern,
    of_tiles,
    stacked_shape,
    whole_blocks,
)
from sparsetc.maps.text import Layout
from sparsetc.support import Ints
from sparsetc.support.entry import entry_point, exporting, traced_by_modes
from sparsetc.tensor.blocks import Blocks, checked, without_blocks
from sparsetc.tensor.kept_values import kept_with
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
        made: Made | None = mask_tiles.kept.get(of_mask)
        if made is None:
            with lasting():
                made = mask_tiles.kept.put(of_mask, make())
        return made

    def row_tiles(self, mode: int, layout: Layout, numbered: bool) -> RowTiles:
        """Return the row tiles of a mode, made once."""
        key = "row tiles", mode, layout.height, layout.width, layout.gathered, numbered
        return self.kept(key, lambda: self._row_tiles(mode, layout, numbered))

    def met(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows and columns of all pairs, some at a time; of a stack those of each pattern."""
        if isinstance(self.given, Pattern) and self.given.blocks is None:
            yield self.given.coords[-2], self.given.coords[-1]
            return
        tiles = self.row_tiles(0, Layout(SQUARE, SQUARE), False)
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

    def _row_tiles(self, mode: int, layout: Layout, numbered: bool) -> RowTiles:
        height, width = layout.height, layout.width
        if isinstance(self.given, Pattern):
            return of_pattern(self.given, mode, height, width, numbered, layout.gathered)
        shape = self.shape[::-1] if mode else self.shape
        if mode and height == width:
            tiles = [mask_tiles.turned_tiles(of_mask) for of_mask in self._tiles(0, height, width)]
        else:
            tiles = self._tiles(mode, height, width)
        windows = -(-shape[0] // height)
        full, part = ([*map(list, kind)] for kind in zip(*tiles, strict=True))
        for number, of_mask in enumerate(zip(full, part, strict=True)):
            for kind in of_mask:
                kind[0] = kind[0] + number * windows
        whole, bits = (tuple(map(torch.cat, zip(*kind, strict=True))) for kind in (full, part))
        return of_tiles((whole[0], whole[1]), (bits[0], bits[1], bits[2]), shape, height, width, self.patterns)

    def _tiles(self, mode: int, height: int, width: int) -> list[mask_tiles.Tiles]:
        """Return the tiles of each mask, made once."""
        each = self.given if isinstance(self.given, tuple) else (self.given,)
        shape = self.shape[::-1] if mode else self.shape

        def made() -> list[mask_tiles.Tiles]:
            turned = [mask.turned if mode else mask for mask in each if isinstance(mask, masks.Mask)]
            return [mask_tiles.tiles_of(mask, shape, height, width, self.device) for mask in turned]

        return self.kept(("tiles", mode, height, width), made)


@entry_point
def pattern_of(mask: masks.Mask, shape: tuple[int, int], device: torch.device) -> Pattern:
    """Return the entries of a mask, made once for each shape; an entry takes 16 bytes."""
    pairs = Pairs(mask, shape, device)

    def made() -> Pattern:
        row, column = map(torch.cat, zip(*pairs.met(), strict=True))
        keys = torch.sort(row * shape[1] + column).values
        return Pattern(torch.stack((keys // shape[1], keys % shape[1])), shape, True)

    return pairs.kept(("pattern",), made)


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


# -- what users have --------------------------------------------------------------------------------------------------


def pairs_of(pattern: Any, heads: Ints, shape: tuple[int, int], device: torch.device, causal: bool) -> Pairs:
    """Return the pairs of a query and a key that attend, once for all heads or as a stack.

    Args:
        pattern: as `attention` takes it; None for all pairs.
        heads: sizes of the modes in front of queries and keys.
        shape: queries and keys.
        device: of the operands.
        causal: whether a query sees only keys up to its own position.

    Raises:
        FormatError: what is no pattern.
        ShapeError: of another shape, or a stack that does not follow the heads.
        DeviceError: on another device.
    """
    if pattern is None:
        pattern = masks.causal() if causal else masks.everything()
    if isinstance(pattern, masks.Mask):
        if causal and pattern is not masks.causal():
            pattern = mask_tiles.kept.once(("causal", pattern), lambda: pattern & masks.causal())
        return Pairs(pattern, shape, device)
    if type(pattern).__name__ == "BlockMask":
        converted: tuple[Any, Ints] = _of_block_mask(pattern, shape, device)
    elif isinstance(pattern, Tensor) and pattern.dtype == torch.bool and pattern.layout == torch.strided:
        converted = _of_dense(pattern, heads, shape, device)
    else:
        converted = _of_sparse(pattern, shape, device)
    pattern, lead = converted
    if causal and isinstance(pattern, Pattern):
        pattern = _causal(pattern)
    elif causal:
        pattern = tuple([mask & masks.causal() for mask in pattern])
    if isinstance(pattern, tuple) and len(pattern) == 1:
        pattern = pattern[0]
    patterns, fastest = _stack(lead, heads)
    return Pairs(pattern, shape, device, patterns, fastest)


def parts_of(pairs: Pairs, heads: Ints) -> Ints:
    """Return the sizes of the modes of heads that share a pattern."""
    if pairs.patterns == 1:
        return heads
    count, sizes = 1, list(heads)
    while count < pairs.patterns:
        count *= sizes.pop() if pairs.fastest else sizes.pop(0)
    return tuple(sizes)


def _stack(lead: Ints, heads: Ints) -> tuple[int, bool]:
    """Return the number of patterns in a stack of these leading sizes, and whether they vary fastest over the heads."""
    while lead[:1] == (1,):
        lead = lead[1:]
    if not lead:
        return 1, False
    sizes = (1,) * (len(heads) - len(lead)) + lead
    if len(sizes) > len(heads) or any(n not in (1, size) for n, size in zip(sizes, heads, strict=True)):
        raise ShapeError(f"patterns of {lead} do not broadcast to heads {heads}")
    apart = [n == size for n, size in zip(sizes, heads, strict=True) if size > 1]
    same = len(apart) - sum(apart)
    if apart not in ([True] * sum(apart) + [False] * same, [False] * same + [True] * sum(apart)):
        raise ShapeError(f"patterns of {lead} for heads {heads}: take one for each of the first modes, or of the last")
    return prod(sizes), not apart[0]


def _check(pattern_shape: Ints, pattern_device: torch.device, shape: Ints, device: torch.device) -> None:
    if pattern_shape != shape:
        raise ShapeError(f"the pattern must be {shape}, a row a query, found {pattern_shape}")
    if pattern_device != device:
        raise DeviceError(f"the pattern must be on {device}, as the operands are, found {pattern_device}")


# -- masks ------------------------------------------------------------------------------------------------------------


def kept_of(tensors: Sequence[Tensor], key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return a thing made of tensors, kept with them while they stay the same; of those that learn, made anew."""
    unseen = traced_by_modes()
    kept = [None if unseen or one.requires_grad or one.is_meta else kept_with(one) for one in tensors]
    if not kept or kept[0] is None or None in kept:
        return make()
    others = kept[1:]  # which the first keeps, as long as their numbers are in keys
    whole = *key, *map(id, others)
    found = kept[0].get(whole)
    if found is None:
        with lasting():
            found = kept[0].put(whole, (others, make()))
    return found[1]


def _of_block_mask(flex: Any, shape: Ints, device: torch.device) -> tuple[tuple[masks.Mask, ...], Ints]:
    _check(tuple(flex.seq_lengths), flex.kv_num_blocks.device, shape, device)
    lead = tuple(flex.kv_num_blocks.shape[:2])
    key = "block mask", id(flex)
    each = mask_tiles.kept.get(key)
    if each is None:
        with lasting():
            each = tuple([masks.block_mask(flex, b, h) for b in range(lead[0]) for h in range(lead[1])])
        each = mask_tiles.kept.put(key, each, needs=[flex])
    return each, lead


def _of_dense(meets: Tensor, heads: Ints, shape: Ints, device: torch.device) -> tuple[tuple[masks.Mask, ...], Ints]:
    if exporting() and traced_by_modes():
        raise TransformError(
            "torch.export cannot look at a boolean pattern: make stc.masks.dense_mask(pattern), or a sparse tensor of "
            "it, outside forward"
        )
    sizes = (1,) * (2 - meets.ndim) + tuple(meets.shape)
    if any(n not in (1, size) for n, size in zip(sizes[-2:], shape, strict=True)):
        raise ShapeError(f"a boolean pattern must broadcast to {(*heads, *shape)}, found {sizes}")
    _check(shape, meets.device, shape, device)

    def made() -> tuple[masks.Mask, ...]:
        return tuple([masks.dense_mask(one.clone()) for one in meets.reshape(prod(sizes[:-2]), *sizes[-2:])])

    return kept_of([meets], ("dense",), made), sizes[:-2]


def within_sequences(pattern: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[masks.Mask, Tensor]:
    """Return the mask of pairs within each sequence of jagged nested tensors, and the begins of the queries' sequences.

    Raises:
        FormatError: other nested tensors, or a pattern that is no mask.
        ShapeError: `causal`, of sequences that do not have as many keys as queries.
    """
    for one in (q, k, v):
        jagged: Any = one
        if not one.is_nested or one.layout != torch.jagged or jagged._ragged_idx != one.ndim - 2 or jagged._lengths:
            raise FormatError(
                "attention takes nested tensors of layout torch.jagged, (batch, heads, rows, d), without holes; those "
                "of (batch, rows, heads, d) are turned by .transpose(1, 2)"
            )
    if pattern is not None and not isinstance(pattern, masks.Mask):
        raise FormatError("attention of nested tensors takes masks of sparsetc.masks, of positions in q.values()")
    nested: tuple[Any, Any] = q, k
    offsets = [one.offsets() for one in nested]
    documents: masks.Mask = kept_of(offsets, ("documents",), lambda: masks.documents(*offsets))
    if causal and documents.made[1] != documents.made[2]:
        raise ShapeError("attention: is_causal of nested tensors takes as many keys as queries in each sequence")
    inside = documents & masks.causal() if causal else documents
    return (inside if pattern is None else pattern & inside), offsets[0]


# -- sparse tensors ---------------------------------------------------------------------------------------------------


def _of_sparse(stored: Any, shape: Ints, device: torch.device) -> tuple[Pattern, Ints]:
    """Return a coalesced pattern of two modes (three for a stack), and the sizes of its leading modes."""
    if isinstance(stored, Pattern) and stored.is_coalesced and stored.blocks is None and stored.order == 2:
        _check(stored.shape, stored.device, shape, device)  # as most; no tensor is made of it
        return stored, ()
    if isinstance(stored, tuple) and len(stored) in (2, 4):
        operand: Any = _of_rows(stored, shape)
    elif isinstance(stored, Pattern):
        operand = SparseTensor._make(stored, torch.ones((), device=stored.device).expand(stored.values_shape(())))
    else:
        operand = as_operand(stored, "pattern")
    if not isinstance(operand, SparseTensor):
        advice = ""
        if isinstance(operand, Tensor):
            advice = ": a dense mask is boolean, as mask != 0, and numbers that are added to scores are bias="
        elif callable(stored):
            advice = ": a mask_mod becomes one by FlexAttention's create_block_mask, or is written with sparsetc.masks"
        raise FormatError(f"{type(stored).__name__} is no pattern of rows and columns{advice}")
    pattern, sizes = operand.coalesce().pattern, tuple(operand.shape)
    _check(sizes[-2:], operand.device, shape, device)
    if pattern.blocks is not None and not whole_blocks(pattern, SQUARE, NARROW):
        blocks = pattern
        pattern = blocks._once("single", lambda: single(blocks))
    if len(sizes) == 2:
        return pattern, ()
    return pattern._once("stacked", lambda: _stacked(pattern)), sizes[:-2]


def _stacked(pattern: Pattern) -> Pattern:
    """Return a pattern with its leading modes joined to one, or removed if they have a single position."""
    blocks = pattern.blocks
    if blocks is not None and prod(blocks.sides[:-2]) != 1:
        pattern, blocks = single(pattern), None
    sizes = pattern.shape
    number = torch.zeros_like(pattern.coords[0])
    for mode, size in enumerate(sizes[:-2]):
        number = number * size + pattern.coords[mode]
    stack = prod(sizes[:-2])
    front = [] if stack == 1 else [stack]
    coords = torch.stack((*([number] if front else []), *pattern.coords[-2:]))
    if blocks is not None:
        blocks = Blocks((*[1 for _ in front], *blocks.sides[-2:]), (*front, *blocks.shape[-2:]))
    return Pattern(coords, (*front, *sizes[-2:]), True, blocks)


def _causal(pattern: Pattern) -> Pattern:
    def made() -> Pattern:
        entries = single(pattern)
        before = entries.coords[-1] <= entries.coords[-2]
        return Pattern(entries.coords[:, before].contiguous(), entries.shape, True)

    return pattern._once("causal", made)


def _of_rows(given: tuple[Any, ...], shape: Ints) -> SparseTensor:
    """Return the tensor of compressed rows: row i has the columns `indices` from ``indptr[i]`` to ``indptr[i + 1]``.

    With two sides after these, rows and indices are those of blocks.
    """
    indptr, indices = map(torch.as_tensor, given[:2])
    blocks = checked(given[2:] or (1, 1), shape)

    def made() -> SparseTensor:
        ones = torch.ones(indices.shape, device=indices.device)
        try:
            rows = torch.sparse_csr_tensor(indptr, indices, ones, blocks.grid, check_invariants=True)
        except RuntimeError as error:
            raise FormatError(f"(indptr, indices) are no compressed rows of {blocks.grid}: {error}") from None
        tensor = SparseTensor.from_torch(rows)
        if len(given) == 2:
            return tensor
        pattern = Pattern(tensor.coalesce().pattern.coords, blocks.grid, True, blocks)
        return SparseTensor._make(pattern, ones.new_ones(()).expand(pattern.values_shape(())))

    return kept_of([indptr, indices], ("rows", *blocks.sides, *shape), made)  # type: ignore[no-any-return]
