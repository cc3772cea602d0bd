"""Which pairs of blocks each program multiplies: the task list, and the blocks of the result made at a time.

In: a `Blocking`. Out: a `BlockPairList`: pairs sorted by block of the result, and `Buffer`s, with the arrays that a
view of pairs names. A run of pairs of one block of the result is an item; a long one is shared by several.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsetc.formats.base import index_dtype
from sparsetc.pair.blocking import Blocking
from sparsetc.pair.symbolic import JoinOrder, composed
from sparsetc.tensor import coords as crd
from sparsetc.tensor.numbering import narrowed

PAIRS_A_PROGRAM = 256
"""Most pairs of one program; a block of the result with more pairs is made by several programs and added up."""
FEWEST_PAIRS, PROGRAMS = 32, 512
"""Fewest pairs to which runs are split, and programs up to which they are, so that each of a GPU's multiprocessors has
some: a program takes its pairs one after another."""
BUFFER_BYTES = 1 << 31
"""Bytes of dense blocks of the result made at a time."""


@dataclass(frozen=True)
class Buffer:
    """Blocks of the result that are made together, dense."""

    start: int
    stop: int
    first: int
    """Pairs of these blocks: ``first .. last`` of the list."""
    last: int
    ptr: torch.Tensor
    """(programs + 1,) int64, the range of pairs of each program."""
    owner: torch.Tensor | None
    """(programs,) the block, counted from `start`, that each program adds to; None when it is one each."""


@dataclass(frozen=True)
class BlockPairList:
    """The pairs of blocks that match, sorted by block of the result."""

    places: torch.Tensor
    """(blocks of the result,) int64, ascending: row of blocks * columns of blocks + column of blocks."""
    ptr: torch.Tensor
    """(blocks of the result + 1,) int64, the range of pairs of each block."""
    x: torch.Tensor
    """(pairs,) int32 or int64, the block of x of each pair."""
    y: torch.Tensor
    """(pairs,) int32 or int64, the block of y of each pair."""
    room: int
    """Most blocks of the result made at a time."""

    @classmethod
    def of(cls, blocking: Blocking, nbytes: int, limit: int) -> BlockPairList:
        """The tasks of the join of blocks, expanded and sorted.

        Args:
            blocking: operands in blocks, and their join.
            nbytes: bytes of a block of the result.
            limit: of memory, in bytes; the blocks of the result made at a time take a quarter of it or less.
        """
        m = JoinOrder.of(blocking.pairs)
        tasks = m.expand(0, m.tasks)
        row, column = m.row.index_select(0, tasks.p), m.column.index_select(0, tasks.q)
        place = narrowed(torch.add(column, row, alpha=m.columns), m.rows * m.columns)
        place, order = torch.sort(place, stable=True)
        starts = torch.nonzero(crd.starts_of_runs([place])).flatten()
        ptr = torch.cat([starts, starts.new_full((1,), m.tasks)])
        narrow = index_dtype(m.tasks)
        x, y = (
            composed(entry, matched.index_select(0, order)).to(narrow)
            for entry, matched in ((m.x_entry, tasks.p), (m.y_entry, tasks.q))
        )
        room = max(1, min(BUFFER_BYTES, max(1, limit // 4)) // nbytes)
        return cls(place[starts].long(), ptr, x, y, room)

    @property
    def blocks(self) -> int:
        """Number of blocks of the result."""
        return self.places.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the list of pairs."""
        return sum(a.numel() * a.element_size() for a in (self.x, self.y, self.ptr))

    def buffers(self) -> list[Buffer]:
        """Blocks of the result that are made at a time, with their pairs."""
        bounds = [(start, min(start + self.room, self.blocks)) for start in range(0, self.blocks, self.room)]
        return [
            Buffer(start, stop, *pairs, *self._pieces(start, stop, pairs))
            for (start, stop), pairs in zip(bounds, self._ranges(bounds), strict=True)
        ]

    def _ranges(self, bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The range of pairs of each buffer, given its blocks."""
        if len(bounds) == 1:
            return [(0, self.x.numel())]
        return [(int(self.ptr[start]), int(self.ptr[stop])) for start, stop in bounds]

    def _pieces(self, start: int, stop: int, pairs: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The range of pairs of each program, and the block of the result that it adds to; None when it is one each."""
        ptr = self.ptr[start : stop + 1]
        counts = torch.diff(ptr)
        # Programs write a block each: a buffer has room for as many as blocks, and for those that runs are split into.
        most = max(pairs_a_program(pairs[1] - pairs[0]), (pairs[1] - pairs[0]) // self.room)
        each = -(-counts // most)
        if int(each.max()) <= 1:
            return ptr, None
        owner = torch.repeat_interleave(torch.arange(stop - start, device=ptr.device), each)
        behind = torch.arange(owner.numel(), device=ptr.device) - (torch.cumsum(each, 0) - each)[owner]
        return torch.cat([ptr[owner] + behind * most, ptr[-1:]]), owner


def pairs_a_program(pairs: int) -> int:
    """The most pairs that one program takes, of so many in all."""
    return min(PAIRS_A_PROGRAM, max(FEWEST_PAIRS, pairs // PROGRAMS))
