"""``bcb+scalar``: well-filled blocks of x by one method, its other nonzeros by another, one result.

In: a `Blocking`, whose populations say the work that a threshold leaves to blocks and to single nonzeros; then a
`JoinProblem`, whose join is cut into two (`Join.only`), with a path for each. Out: the result's values by place. The
pattern is the union of both patterns. Where they overlap values are added, two to an entry, so bits do not depend on an
order. A threshold is found by counts alone, those of all thresholds at once: no task is made, and no nonzero sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import Any

import torch
from torch import Tensor

from sparsetc.codegen.split_float16 import SplitOperands
from sparsetc.ir.plan import Plan
from sparsetc.join.blocking import Blocking, BlockWork
from sparsetc.planner.candidate import Best, Candidate
from sparsetc.products.blocks import BlockPath
from sparsetc.products.problem import JoinPath, JoinProblem, Sizes, Terms
from sparsetc.products.scalar import TaskSums


def splits(blocking: Blocking, thresholds: Sequence[int]) -> list[BlockWork]:
    """Return the splits by ascending thresholds, in one transfer from the device."""
    x = blocking.x
    y = blocking.y
    pairs = blocking.pairs
    tasks = torch.zeros_like(x.counts).index_add_(0, x.block, blocking.join.counts)
    by_key = _most(x.counts, pairs.x_key, pairs.y_each.numel())
    fullest = by_key[pairs.y_key]  # of each block of y, the fullest block of x that it matches
    rows, columns = _most(x.counts, pairs.row.rank, pairs.rows), _most(fullest, pairs.column.rank, pairs.columns)
    edges = x.counts.new_tensor(thresholds)

    def at_least(population: Tensor, *weights: Tensor) -> Tensor:
        """Return (1 + weights, thresholds + 1): blocks and sums of weights by the number of thresholds reached."""
        reached = torch.bucketize(population, edges, right=True)
        lines = torch.stack([torch.ones_like(population), *weights])
        return lines.new_zeros((len(lines), len(thresholds) + 1)).index_add_(1, reached, lines)

    of_x, of_y = at_least(x.counts, x.counts, tasks, pairs.counts), at_least(fullest, y.counts)
    table = torch.cat([of_x, of_y, at_least(rows), at_least(columns)]).tolist()
    works, sums = list[BlockWork](), [list(accumulate(reversed(line)))[::-1] for line in table]
    for n, threshold in enumerate(thresholds, 1):
        x_blocks, x_nnz, x_tasks, n_pairs, y_blocks, y_nnz, n_rows, n_columns = (line[n] for line in sums)
        elements = (x_blocks * x.volume, y_blocks * y.volume)
        results, left = min(n_pairs, n_rows * n_columns), blocking.join.tasks - x_tasks
        works.append(BlockWork(n_pairs, results, elements, x_nnz + y_nnz, threshold, left))
    return works


def _most(population: Tensor, owner: Tensor, owners: int) -> Tensor:
    """Return (owners,) the largest population of each owner, 0 where it has none."""
    return population.new_zeros(owners).scatter_reduce(0, owner, population, "amax")


MERGE_LAUNCHES = 7
"""Calls of torch that a hybrid takes beside its branches: values chosen for each, zeros, and two additions."""


class HybridPath(JoinPath):
    """Blocks of x with as many nonzeros as a threshold, or more, by pairs of blocks; its other nonzeros by tasks.

    Attributes:
        sides: the paths of blocks, and of tasks.
        entries: entries of x that each side takes.
        slots: entries of the result that each side's results belong to.
    """

    name = "bcb+scalar"
    launches = TaskSums.launches + BlockPath.launches + MERGE_LAUNCHES
    first = BlockPath.first
    sides: tuple[BlockPath | TaskSums, ...]

    @classmethod
    def split(cls, p: JoinProblem) -> BlockWork:
        """Return the work of either side by the threshold asked for, or by the one expected to be fastest.

        One side gets all where no threshold parts blocks.
        """
        threshold = p.option("threshold")
        if threshold is not None:
            return splits(p.blocking, [threshold])[0]
        # All blocks, those of each power of two or more, and none.
        volume = p.blocking.x.volume
        first, *powers, last = splits(p.blocking, [*(1 << n for n in range(volume.bit_length())), volume + 1])
        candidates = [s for s in powers if s.pure is None] or [first, last]

        def seconds(split: BlockWork) -> float:
            terms = cls.terms(p, split)
            return inf if terms is None else sum(terms.values())

        return min(candidates, key=seconds)

    @classmethod
    def terms(cls, p: JoinProblem, split: BlockWork | None = None) -> Terms | None:
        """Return the time of both sides, one after the other; None if blocks do not fit."""
        split = split or cls.split(p)
        scalar = TaskSums.terms(p, split.tasks) if split.tasks else {}
        blocks = BlockPath.terms(p, split) if split.pairs else {}
        if blocks is None:
            return None
        r, c, _ = p.blocking.extents
        results = min(split.made * r * c + split.tasks, p.join.rows * p.join.columns)
        merged = results * (8 + 3 * p.width) / p.profile.moved  # an entry's slot, its value, and the sum
        return {
            TaskSums.name: sum(scalar.values()),
            BlockPath.name: sum(blocks.values()),
            "merging": merged,
            "calls": MERGE_LAUNCHES * p.profile.call,
        }

    @classmethod
    def candidates(cls, p: JoinProblem, best: Best) -> list[Candidate]:
        """Return the plan with its price, where a threshold parts blocks."""
        split = cls.split(p)
        return [cls.candidate(cls.plan_of(p, split), cls.terms(p, split))] if split.pure is None else []

    @classmethod
    def plan_of(cls, p: JoinProblem, split: BlockWork | None = None) -> Plan:
        """Return the plan with the parts of both sides; if one side is empty, the other side's own plan."""
        split = split or cls.split(p)
        if split.pure is not None:
            none = split.pure == TaskSums.name
            why = f"{'no block' if none else 'every block'} of x has {split.threshold:,} nonzeros or more"
            return replace((TaskSums if none else BlockPath).plan_of(p), reason=why)
        parts = (*BlockPath.parts(p, split), *p.parts("coo"))
        return Plan(cls.name, parts, False, "threshold", (("threshold", split.threshold),))

    def __init__(self, p: JoinProblem, plan: Plan) -> None:
        """Make the paths of both sides, each of a join of its own."""
        x, self.join = p.blocking.x, p.join
        filled = (x.counts >= plan.option("threshold", 1)).index_select(0, x.block)
        (of_blocks, in_blocks), (of_tasks, others) = p.join.only(filled), p.join.only(~filled)
        self.sides = BlockPath(replace(p, join=of_blocks), plan), TaskSums(replace(p, join=of_tasks))
        self.entries = in_blocks, others
        self.slots: list[Tensor] = []
        self.nnz = 0

    @property
    def generated(self) -> list[Any]:  # type: ignore[override]
        """The generated programs of both sides."""
        return [programs for path in self.sides for programs in path.generated]

    def ptx(self, target: str) -> str:
        """Return the assembly of both sides' kernels."""
        return "\n".join(path.ptx(target) for path in self.sides)

    @property
    def sizes(self) -> Sizes:
        """Sizes of each operand that both sides read."""
        return tuple(size for path in self.sides for size in path.sizes)

    def places(self) -> Tensor:
        """Return (nnz,) the union of both sides' places, int64."""
        sides = zip(self.sides, self.entries, strict=True)
        by_side = [path.problem.join.places_in(self.join, entries, path.places()) for path, entries in sides]
        places = torch.unique(torch.cat(by_side))
        self.slots = [torch.searchsorted(places, of_side) for of_side in by_side]
        self.nnz = places.numel()
        return places

    def halves(self, x: Tensor, y: Tensor) -> SplitOperands | None:
        """Return the halves of values that are multiplied in blocks."""
        return self.sides[0].halves(x.index_select(0, self.entries[0]), y)

    def run(self, x: Tensor, y: Tensor, halves: SplitOperands | None = None) -> Tensor:
        """Multiply blocks, then nonzeros; an entry gets one value of each at most."""
        out, (blocks, tasks) = x.new_zeros(self.nnz), self.sides
        x_blocks, x_tasks = (x.index_select(0, entries) for entries in self.entries)
        out.index_add_(0, self.slots[0], blocks.run(x_blocks, y, halves))
        return out.index_add_(0, self.slots[1], tasks.run(x_tasks, y))

    @property
    def nbytes(self) -> int:
        """Bytes of both lists of tasks, and of where their values go."""
        return sum(path.nbytes for path in self.sides) + sum(a.numel() * 8 for a in (*self.entries, *self.slots))
