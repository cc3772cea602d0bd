"""``bcb``: pairs of bitmap blocks that meet, a matrix product each (BCB-SpTC)."""

from __future__ import annotations

from sparsetc.ir.plan import Plan
from sparsetc.pair.block_path import BlockPath
from sparsetc.pair.blocking import WHOLE, Bitmaps, BlockWork
from sparsetc.pair.method import PairMethod
from sparsetc.pair.plans import storages_of
from sparsetc.pair.prices import block_seconds
from sparsetc.pair.problem import PairProblem
from sparsetc.pair.symbolic import TASK_BYTES

WORD = 32
"""Bits of a word of a bitmap."""


class BlockPairs(PairMethod):
    """Pairs of blocks are multiplied as matrices."""

    name = "bcb"

    def seconds(self, p: PairProblem, work: BlockWork | None = None) -> float | None:
        """Time of so many pairs, or of all; None where the blocks, or the pairs, do not fit."""
        work = work or p.blocking.work
        stored = self.bitmaps(p, work)
        if not _fits(p, work, stored) or work.pairs * TASK_BYTES > p.budget.limit // 2:
            return None
        return block_seconds(work, p.block_program(stored), p.width, p.rated, p.profile)

    def plan(self, p: PairProblem) -> Plan:
        """Both operands in blocks."""
        return Plan(self.name, p.block_parts(self.bitmaps(p, p.blocking.work)), False)

    def prepare(self, p: PairProblem, plan: Plan) -> BlockPath:
        """The task list and the kernel."""
        x, y = p.given([part.bitmap for part in plan.parts[:2]])
        return BlockPath(p, (x, y))

    def bitmaps(self, p: PairProblem, work: BlockWork) -> Bitmaps:
        """Which operands' blocks are read as bitmaps: as asked, or whole where that takes a quarter of the memory limit
        or less; else the larger operand's, or both.

        Blocks that do not fill a word of bits are read whole.
        """
        x, y = p.given(storages_of(p.wanted))
        own = (x == "bitmap", y == "bitmap")
        if x == y == "auto" and p.backend == "triton" and p.dtype.is_floating_point:
            larger = work.elements[0] >= work.elements[1]
            own = next((b for b in (WHOLE, (larger, not larger)) if _fits(p, work, b)), (True, True))
        return own[0] and p.blocking.x.volume >= WORD, own[1] and p.blocking.y.volume >= WORD


def _fits(p: PairProblem, work: BlockWork, bitmaps: Bitmaps) -> bool:
    """Whether what is read whole takes a quarter of the memory limit or less."""
    whole = sum(n for n, bitmap in zip(work.elements, bitmaps, strict=True) if not bitmap)
    return whole * p.width <= p.budget.limit // 4
