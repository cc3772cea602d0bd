"""The operands of a contraction in blocks (BCB-SpTC), the pairs of them, and the tile program that multiplies a pair.

In: a `Join` of entries. Out: a `Blocking`: both operands as blocks (`bcb`), whose sides are chosen for the
equation, and the join of the blocks. The free positions of a block make the rows, or columns, of a matrix product of
about 64 x 64, the contracted ones its inner side, of about 32 (H200, third order, one contracted mode: 64 x 32 times
32 x 64 beat an inner side of 16 by 1.05 to 1.35 times in tf32, and free sides of 16 by 3 times). Blocks of batch
letters have side 1, so a pair of blocks is one matrix product whatever the equation. Pairs of blocks are found as pairs
of nonzeros are, by a `Join` of the blocks' coordinates.

A `BlockPairList` has the pairs, sorted by block of the result, in the arrays that a view of pairs names. A run of pairs
of one block of the result is an item; a long one is shared by several.

``bcb``, bit coordinates and bitmaps (section III), has a word and a bitmap for each block, and its values packed.

        word    [ ijk | ijk | …        the coordinates of each non-empty block, ceil(log2(S / H)) bits a mode
        bitmap  [ 1001… | 0110… | …    a bit a position, row-major over the block, the first in the lowest bit
        values  [ v v v | v v | …      in the order of the set bits

Blocks are in lexicographic order, so words are too. Where a block's values begin is not stored: it is the number of
bits set in the bitmaps before. Where blocks lie is known from the list of pairs: the words count in
`OperandBlocks.nbytes`, and no kernel reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from sparsetc.errors import FormatError
from sparsetc.ir.nest.nest import tiles_along
from sparsetc.join.join import Join, JoinOperand
from sparsetc.join.order import JoinOrder, composed
from sparsetc.packing import words
from sparsetc.packing.base import index_dtype
from sparsetc.packing.words import fields, packed_bits, widths
from sparsetc.support import Ints, NamedInts, Names, cached_property
from sparsetc.tensor import coords as crd
from sparsetc.tensor.coords import histogram, narrowed, numbered


@dataclass(frozen=True)
class OperandBlocks:
    """A pattern in blocks.

    Attributes:
        sides: positions a mode, powers of two.
        block_coords: (blocks,) int64 a mode: coordinates of the non-empty blocks, in lexicographic order.
        blocks: non-empty blocks, M.
        block: (nnz,) int64, the block that each nonzero is in; in the operand's order.
        place: (nnz,) int64, the position in it, row-major.
    """

    shape: Ints
    sides: Ints
    block_coords: tuple[Tensor, ...]
    blocks: int
    block: Tensor
    place: Tensor

    @property
    def nnz(self) -> int:
        """Nonzeros, N."""
        return self.block.numel()

    @cached_property
    def volume(self) -> int:
        """Positions of a block."""
        return prod(self.sides)

    @cached_property
    def word(self) -> int:
        """Bits of a word of the bitmaps: the widest that a block fills."""
        return min(64, max(8, self.volume))

    @property
    def nbytes(self) -> int:
        """Bytes of block coordinates and bitmaps; blocks of one position need no bitmap."""
        bitmap = -(-self.volume // self.word) * self.word // 8 if self.volume > 1 else 0
        index = fields(range(len(self.shape)), tiles_along(self.shape, self.sides), "word")
        return self.blocks * (sum(widths(index)) + bitmap)

    @cached_property
    def bitmap(self) -> Tensor:
        """(blocks, words of a bitmap): unsigned bits, in words of 8 to 64 bits."""
        return packed_bits(self.block, self.place, self.blocks, self.volume, self.word)

    @cached_property
    def at(self) -> Tensor:
        """(nnz,) where each nonzero stands if whole blocks are stored: block * volume + position."""
        return torch.add(self.place, self.block, alpha=self.volume)

    @cached_property
    def positions(self) -> Tensor:
        """(nnz,) the nonzero that each stored value came from: the order of the set bits."""
        return torch.argsort(self.at)

    @cached_property
    def counts(self) -> Tensor:
        """(blocks,) int64 nonzeros of each."""
        return histogram(self.block, self.blocks)

    @cached_property
    def first(self) -> Tensor:
        """(blocks,) where each block's values begin: the bits set in the bitmaps before, in 32 bits where they fit."""
        return (torch.cumsum(self.counts, 0) - self.counts).to(index_dtype(self.nnz))

    def tile_arrays(self, values: Tensor, word: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the arrays that a kernel reads tiles from: first values, bits in words of `word`, packed values.

        Args:
            values: (nnz,) in the operand's order.
            word: 8, 16 or 32, and no more than a block has positions, or 8.
        """
        return self.first, words.narrowed(self.bitmap, word), values.index_select(0, self.positions)

    def whole(self, values: Tensor) -> Tensor:
        """Return (blocks, volume): each block's values with its zeros, from `values` in the operand's order."""
        out = values.new_zeros(self.blocks * self.volume)
        return out.index_copy_(0, self.at, values).view(self.blocks, self.volume)


def in_blocks(
    rows: Sequence[Tensor], shape: Sequence[int], sides: Sequence[int], like: Tensor, n: int
) -> OperandBlocks:
    """Put nonzeros in blocks.

    Args:
        rows: (n,) int64 a mode, on the device of `like`: coordinates, all distinct, in any order.
        shape: sizes of the modes.
        sides: positions of a block a mode, powers of two.
        like: what has the device, where there is no mode.
        n: nonzeros.

    Raises:
        FormatError: sides that do not fit the shape.
    """
    shape, sides = tuple(shape), tuple(sides)
    if len(sides) != len(shape) or any(s < 1 or s & (s - 1) for s in sides):
        raise FormatError(f"sides must be powers of two, one a mode of {shape}, found {sides}")
    inside = [(row & (s - 1), s) for row, s in zip(rows, sides, strict=True) if s > 1]
    place = inside[0][0] if inside else like.new_zeros(n)
    for row, side in inside[1:]:
        place = torch.add(row, place, alpha=side)
    at = [row >> (s.bit_length() - 1) if s > 1 else row for row, s in zip(rows, sides, strict=True)]
    numbering = numbered(at, tiles_along(shape, sides), n, like)
    return OperandBlocks(shape, sides, numbering.coords, numbering.count, numbering.rank, place)


FREE, INNER = 64, 32
"""Positions along a block's free letters, and along its contracted letters, if the modes are that long."""


def sides_for(sizes: Ints, positions: int) -> Ints:
    """Return the sides of a block: powers of two, near equal, of `positions` in all or the padded sizes."""
    full = [1 << max(n - 1, 0).bit_length() for n in sizes]
    sides = [1] * len(sizes)
    while prod(sides) < positions:
        room = [m for m in range(len(sides)) if sides[m] < full[m]]
        if not room:
            break
        sides[min(room, key=lambda m: (sides[m], -m))] *= 2
    return tuple(sides)


@dataclass(frozen=True)
class BlockWork:
    """Counts of the work on pairs of blocks, of all of x's blocks or of its well-filled ones.

    Attributes:
        pairs: pairs of blocks that match.
        made: most blocks of the result: as many as pairs, or as rows times columns of blocks.
        elements: elements of the whole blocks of each operand.
        nnz: nonzeros of both operands in such blocks.
        threshold: fewest nonzeros of a block of x that is multiplied as a block.
        tasks: pairs of nonzeros that the other blocks of x are in.
    """

    pairs: int
    made: int
    elements: tuple[int, int]
    nnz: int
    threshold: int = 1
    tasks: int = 0

    @property
    def pure(self) -> str | None:
        """The plan that takes all the work, if one does."""
        if not self.pairs:
            return "scalar"
        return None if self.tasks else "bcb"


@dataclass(frozen=True)
class Blocking:
    """Both operands in blocks, and the join of the blocks.

    Attributes:
        join: the join of the nonzeros.
        pairs: the join of the blocks by their coordinates; every block matches some, as one of its nonzeros does.
    """

    join: Join
    x: OperandBlocks
    y: OperandBlocks
    pairs: Join
    rows: NamedInts
    columns: NamedInts
    inner: NamedInts

    @classmethod
    def of(cls, m: Join, sides: dict[str, int] | None = None) -> Blocking:
        """Cut the matched entries into blocks, of sides given by letter or chosen from the equation."""
        roles, sizes = m.roles, dict(zip((*m.x.letters, *m.y.letters), (*m.x.sizes, *m.y.sizes), strict=True))
        side = dict.fromkeys(roles.batch, 1)
        for letters, positions in ((roles.free_x, FREE), (roles.free_y, FREE), (roles.contracted, INNER)):
            side |= dict(zip(letters, sides_for(tuple(sizes[c] for c in letters), positions), strict=True))
        side |= {c: n for c, n in (sides or {}).items() if c in side and c not in roles.batch}

        def blocked(
            operand: JoinOperand, matched: Tensor | None, n: int, letters: Names
        ) -> tuple[OperandBlocks, JoinOperand]:
            sides = [side[c] for c in letters]
            blocks = in_blocks(operand.rows(letters, matched), operand.extents(letters), sides, operand.like, n)
            grid = tiles_along(blocks.shape, sides)
            return blocks, JoinOperand(
                letters, grid, blocks.block_coords, blocks.blocks, True, None, None, operand.like
            )

        x, x_grid = blocked(m.x, m.x_matched, m.x_key.numel(), roles.x)
        y, y_grid = blocked(m.y, m.y_matched, m.y_key.numel(), (*roles.batch, *roles.free_y, *roles.contracted))
        pairs = Join.of(x_grid, y_grid, roles)

        def axis(letters: Names) -> NamedInts:
            return tuple((c, side[c]) for c in letters)

        return cls(m, x, y, pairs, axis(roles.kept_x), axis(roles.free_y), axis(roles.contracted))

    @property
    def extents(self) -> tuple[int, int, int]:
        """Number of rows, columns and inner positions of a block."""
        positions = [prod(side for _, side in axis) for axis in (self.rows, self.columns, self.inner)]
        return positions[0], positions[1], positions[2]

    @property
    def elements(self) -> tuple[int, int]:
        """Elements of the whole blocks, of x and of y."""
        return self.x.blocks * self.x.volume, self.y.blocks * self.y.volume

    @property
    def work(self) -> BlockWork:
        """The work of all blocks."""
        return BlockWork(self.pairs.tasks, self.pairs.most_results, self.elements, self.x.nnz + self.y.nnz)


PAIRS_A_PROGRAM = 256
"""Most pairs of one program; a block of the result with more pairs is made by several programs and added up."""
FEWEST_PAIRS, PROGRAMS = 32, 512
"""Fewest pairs of a part of a run, and programs aimed at when runs are cut, so that each multiprocessor has some: a
program multiplies its pairs one after another."""


@dataclass(frozen=True)
class BlockPairList:
    """The matching pairs of blocks, sorted by block of the result.

    Attributes:
        places: (blocks of the result,) int64, ascending: row of blocks * columns of blocks + column of blocks.
        ptr: (programs + 1,) int64, the range of pairs of each program: of each block of the result, or of a part of it.
        x: (pairs,) int32 or int64, the block of x of each pair.
        y: (pairs,) int32 or int64, the block of y of each pair.
        start: the first block, of all of the result.
        owner: (programs,) the block, counted from `start`, that each program adds to; None when it is one each.
    """

    places: Tensor
    ptr: Tensor
    x: Tensor
    y: Tensor
    start: int = 0
    owner: Tensor | None = None

    @classmethod
    def of(cls, blocking: Blocking) -> BlockPairList:
        """The tasks of the join of blocks, expanded and sorted."""
        m = JoinOrder.of(blocking.pairs)
        p, q = m.expand(0, m.tasks)
        row, column = m.row.index_select(0, p), m.column.index_select(0, q)
        place = narrowed(torch.add(column, row, alpha=m.join.columns), m.join.rows * m.join.columns)
        place, order = torch.sort(place, stable=True)
        starts = torch.nonzero(crd.starts_of_runs([place])).flatten()
        ptr = torch.cat([starts, starts.new_full((1,), m.tasks)])
        narrow = index_dtype(m.tasks)
        x, y = (
            composed(entry, matched.index_select(0, order)).to(narrow)
            for entry, matched in ((m.x_entry, p), (m.y_entry, q))
        )
        return cls(place[starts].long(), ptr, x, y)

    @property
    def blocks(self) -> int:
        """Number of blocks of the result."""
        return self.places.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the list of pairs."""
        return sum(a.nbytes for a in (self.x, self.y, self.ptr))

    def some(self, start: int, room: int) -> BlockPairList:
        """Return the pairs for up to `room` blocks of the result from `start` on, divided among programs."""
        places, ptr = self.places[start : start + room], self.ptr[start : start + room + 1]
        counts, pairs = torch.diff(ptr), int(ptr[-1] - ptr[0])
        # Programs write a block each: there is room for as many as blocks, and for those that runs are split into.
        most = max(pairs_a_program(pairs), pairs // room)
        each = -(-counts // most)
        if int(each.max()) <= 1:
            return replace(self, places=places, ptr=ptr, start=start)
        owner, behind = crd.in_runs(each)
        ptr = torch.cat([ptr[owner] + behind * most, ptr[-1:]])
        return replace(self, places=places, ptr=ptr, start=start, owner=owner)


def pairs_a_program(pairs: int) -> int:
    """Return the most pairs that one program multiplies, given the number of all."""
    return min(PAIRS_A_PROGRAM, max(FEWEST_PAIRS, pairs // PROGRAMS))
