"""``bcb+scalar``: well-filled blocks of x by one method, its other nonzeros by another, one result.

In: the `JoinSubset`s of a `Join` that the two take, and their paths. Out: the result's values by place. The pattern is
the union of both patterns. Where they overlap values are added, two to an entry, so bits do not depend on an order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sparsetc.codegen.split_float16 import Halves
from sparsetc.ir.plan import Plan
from sparsetc.ir.program.tile import TileProgram
from sparsetc.pair.join import JoinSubset
from sparsetc.pair.method import NumericPath, PairMethod, Sizes
from sparsetc.pair.methods.block_pairs import BlockPairs
from sparsetc.pair.methods.nonzero_pairs import NonzeroPairs
from sparsetc.pair.populations import Split
from sparsetc.pair.prices import MERGE_LAUNCHES
from sparsetc.pair.problem import PairProblem
from sparsetc.planner.method import Hybrid
from sparsetc.planner.requests import HYBRID


class ByBlocks(PairMethod, Hybrid[PairProblem]):
    """Blocks of x with as many nonzeros as a threshold, or more, take one method, its other nonzeros another."""

    name = HYBRID

    def __init__(self, blocks: BlockPairs, rest: NonzeroPairs) -> None:
        self.blocks, self.rest = blocks, rest

    def split(self, p: PairProblem) -> Split:
        """What either side gets by the threshold asked for, or by the one expected to be fastest.

        One side gets all where no threshold parts blocks.
        """
        return p.once("split", lambda: self._split(p))

    def _split(self, p: PairProblem) -> Split:
        threshold, counts = p.wanted.option("threshold", None), p.populations
        if threshold is not None:
            return counts.splits([threshold])[0]
        splits = [s for s in counts.powers() if s.pure is None] or counts.ends()
        return self.best(p, splits, lambda split: self.seconds(p, split))

    def seconds(self, p: PairProblem, split: Split | None = None) -> float | None:
        """Time of both sides, one after the other; None where blocks do not fit."""
        split = split or self.split(p)
        scalar = self.rest.seconds(p, split.tasks) if split.tasks else 0.0
        blocks = self.blocks.seconds(p, split.blocks) if split.blocks.pairs else 0.0
        if blocks is None:
            return None
        r, c, _ = p.blocking.extents
        results = min(split.blocks.made * r * c + split.tasks, p.join.rows * p.join.columns)
        merged = results * (8 + 3 * p.width) / p.profile.moved  # an entry's slot, its value, and the sum
        return scalar + blocks + merged + MERGE_LAUNCHES * p.profile.call

    def plan(self, p: PairProblem) -> Plan:
        """The parts of both sides; of one side whose other is empty, that side's own plan."""
        split = self.split(p)
        if split.pure is not None:
            none = split.pure == self.rest.name
            why = f"{'no block' if none else 'every block'} of x has {split.threshold:,} nonzeros or more"
            return replace((self.rest if none else self.blocks).plan(p), reason=why)
        parts = (*p.block_parts(self.blocks.bitmaps(p, split.blocks)), *p.parts("coo"))
        return Plan(self.name, parts, False, "threshold", (("threshold", split.threshold),))

    def prepare(self, p: PairProblem, plan: Plan) -> HybridPath:
        """The paths of both sides."""
        filled = p.populations.entries(plan.option("threshold", 1))
        blocks, rest = p.join.only(filled), p.join.only(~filled)
        return HybridPath(
            Branch(blocks, self.blocks.prepare(p.of(blocks.join), plan)),
            Branch(rest, self.rest.prepare(p.of(rest.join), plan)),
        )


@dataclass(frozen=True)
class Branch:
    """One of the two paths, and what it takes."""

    subset: JoinSubset
    path: NumericPath

    def places(self) -> torch.Tensor:
        """Places of its results, ascending, among those of the whole."""
        return self.subset.places(self.path.places())

    def halves(self, x: torch.Tensor, y: torch.Tensor) -> Halves | None:
        """Its values in halves, of the values of all entries."""
        return self.path.halves(x.index_select(0, self.subset.entries), y)

    def run(self, x: torch.Tensor, y: torch.Tensor, halves: Halves | None = None) -> torch.Tensor:
        """Values by place of its own, of the values of all entries."""
        return self.path.run(x.index_select(0, self.subset.entries), y, halves)


class HybridPath:
    """Blocks by one method, then the other nonzeros by another."""

    def __init__(self, *branches: Branch) -> None:
        self.branches = branches
        self.slots: list[torch.Tensor] = []
        """Entries of the result that each branch's results belong to."""
        self.nnz = 0

    @property
    def sizes(self) -> Sizes:
        """How much of each operand both branches read."""
        return tuple(own for branch in self.branches for own in branch.path.sizes)

    def places(self) -> torch.Tensor:
        """The union of both branches' places, (nnz,) int64."""
        found = [branch.places() for branch in self.branches]
        places = torch.unique(torch.cat(found))
        self.slots = [torch.searchsorted(places, own) for own in found]
        self.nnz = places.numel()
        return places

    def halves(self, x: torch.Tensor, y: torch.Tensor) -> Halves | None:
        """The halves of values that are multiplied in blocks."""
        return self.branches[0].halves(x, y)

    def run(self, x: torch.Tensor, y: torch.Tensor, halves: Halves | None = None) -> torch.Tensor:
        """Multiply blocks, then nonzeros; an entry gets one value of each at most."""
        out = x.new_zeros(self.nnz)
        for branch, slots, own in zip(self.branches, self.slots, (halves, None), strict=True):
            out.index_add_(0, slots, branch.run(x, y, own))
        return out

    @property
    def programs(self) -> tuple[TileProgram, ...]:
        """The programs of both branches."""
        return tuple(program for branch in self.branches for program in branch.path.programs)

    @property
    def source(self) -> str:
        """The texts of both programs, one after the other."""
        return "\n\n".join(branch.path.source for branch in self.branches)

    @property
    def path(self) -> Path:
        """The file of the blocks' program."""
        return self.branches[0].path.path

    @property
    def nbytes(self) -> int:
        """Bytes of both lists of tasks, and of where their values go."""
        own = [branch.subset.entries for branch in self.branches] + self.slots
        return sum(branch.path.nbytes for branch in self.branches) + sum(a.numel() * 8 for a in own)

    def ptx(self, target: str) -> str:
        """The assembly of both kernels."""
        return "\n".join(branch.path.ptx(target) for branch in self.branches)
