"""``bcb+scalar``: well-filled blocks of x by one method, its other nonzeros by another, one result.

In: a `Blocking`, whose populations say the work that a threshold leaves to blocks and to single nonzeros; then the
`JoinSubset`s that the two take, and their paths. Out: the result's values by place. The pattern is the union of both
patterns. Where they overlap values are added, two to an entry, so bits do not depend on an order. A threshold is found
by counts alone, those of all thresholds at once: no task is made, and no nonzero sorted.

`choose` takes one of all methods (``scalar``, ``dense``, ``bcb``, ``bcb+scalar``) by counts made before any task is. A
method that would not fit, or that the type has no kernel for, is left out under ``plan="auto"`` and refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf

import torch

from sparsetc.codegen.split_float16 import SplitOperands
from sparsetc.ir.plan import Plan
from sparsetc.join.blocking import Blocking, BlockWork
from sparsetc.planner.candidate import Candidate, Choice, choice_of
from sparsetc.products.blocks import BLOCK_LAUNCHES, BlockPath
from sparsetc.products.dense import DENSE_LAUNCHES, DensePath
from sparsetc.products.problem import PairProblem, Sizes
from sparsetc.products.scalar import SCALAR_LAUNCHES, TaskSums
from sparsetc.runtime.executable import Inspectable


def splits(blocking: Blocking, thresholds: Sequence[int]) -> list[BlockWork]:
    """Return the splits by ascending thresholds, in one transfer from the device."""
    x, y, pairs = blocking.x, blocking.y, blocking.pairs
    tasks = torch.zeros_like(x.counts).index_add_(0, x.block, blocking.join.counts)
    by_key = _most(x.counts, pairs.x_key, pairs.y_each.numel())
    fullest = by_key[pairs.y_key]  # of each block of y, the fullest block of x that it matches
    rows, columns = _most(x.counts, pairs.row.rank, pairs.rows), _most(fullest, pairs.column.rank, pairs.columns)
    edges = x.counts.new_tensor(thresholds)

    def at_least(population: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """(1 + weights, thresholds + 1) the number of blocks and sums of weights, by the thresholds reached."""
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


def _most(of: torch.Tensor, owner: torch.Tensor, owners: int) -> torch.Tensor:
    """(owners,) the largest element of each owner, 0 where it has none."""
    return of.new_zeros(owners).scatter_reduce(0, owner, of, "amax")


MERGE_LAUNCHES = 7
"""Calls of torch that a hybrid takes beside its branches: values chosen for each, zeros, and two additions."""
HYBRID_LAUNCHES = SCALAR_LAUNCHES + BLOCK_LAUNCHES + MERGE_LAUNCHES


class HybridPath(Inspectable):
    """Blocks of x with as many nonzeros as a threshold, or more, by pairs of blocks; its other nonzeros by tasks.

    Attributes:
        entries: entries of x that each side takes.
        slots: entries of the result that each side's results belong to.
    """

    name = "bcb+scalar"

    @classmethod
    def split(cls, p: PairProblem) -> BlockWork:
        """What either side gets by the threshold asked for, or by the one expected to be fastest.

        One side gets all where no threshold parts blocks.
        """
        threshold = p.option("threshold")
        if threshold is not None:
            return splits(p.blocking, [threshold])[0]
        # All blocks, those of each power of two or more, and none.
        volume = p.blocking.x.volume
        first, *powers, last = splits(p.blocking, [*(1 << n for n in range(volume.bit_length())), volume + 1])
        candidates = [s for s in powers if s.pure is None] or [first, last]
        times = [cls.seconds(p, split) for split in candidates]
        return min(zip(times, candidates, strict=True), key=lambda timed: inf if timed[0] is None else timed[0])[1]

    @classmethod
    def seconds(cls, p: PairProblem, split: BlockWork) -> float | None:
        """Time of both sides, one after the other; None where blocks do not fit."""
        scalar = TaskSums.seconds(p, split.tasks) if split.tasks else 0.0
        blocks = BlockPath.seconds(p, split) if split.pairs else 0.0
        if blocks is None:
            return None
        r, c, _ = p.blocking.extents
        results = min(split.made * r * c + split.tasks, p.join.rows * p.join.columns)
        merged = results * (8 + 3 * p.width) / p.profile.moved  # an entry's slot, its value, and the sum
        return scalar + blocks + merged + MERGE_LAUNCHES * p.profile.call

    @classmethod
    def plan(cls, p: PairProblem, split: BlockWork | None = None) -> Plan:
        """The parts of both sides; of one side whose other is empty, that side's own plan."""
        split = split or cls.split(p)
        if split.pure is not None:
            none = split.pure == TaskSums.name
            why = f"{'no block' if none else 'every block'} of x has {split.threshold:,} nonzeros or more"
            return replace((TaskSums if none else BlockPath).plan(p), reason=why)
        parts = (*BlockPath.parts(p, split), *p.parts("coo"))
        return Plan(cls.name, parts, False, "threshold", (("threshold", split.threshold),))

    def __init__(self, p: PairProblem, plan: Plan) -> None:
        """Make the paths of both sides, each of a join of its own."""
        x, self.join = p.blocking.x, p.join
        filled = (x.counts >= plan.option("threshold", 1)).index_select(0, x.block)
        (of_blocks, in_blocks), (of_tasks, others) = p.join.only(filled), p.join.only(~filled)
        self.inner = BlockPath(replace(p, join=of_blocks), plan), TaskSums(replace(p, join=of_tasks))
        self.entries = in_blocks, others
        self.slots: list[torch.Tensor] = []
        self.nnz = 0

    @property
    def sizes(self) -> Sizes:
        """Sizes of each operand that both sides read."""
        return tuple(size for path in self.inner for size in path.sizes)

    def places(self) -> torch.Tensor:
        """The union of both sides' places, (nnz,) int64."""
        sides = zip(self.inner, self.entries, strict=True)
        by_side = [path.problem.join.places_in(self.join, entries, path.places()) for path, entries in sides]
        places = torch.unique(torch.cat(by_side))
        self.slots = [torch.searchsorted(places, of_side) for of_side in by_side]
        self.nnz = places.numel()
        return places

    def halves(self, x: torch.Tensor, y: torch.Tensor) -> SplitOperands | None:
        """The halves of values that are multiplied in blocks."""
        return self.inner[0].halves(x.index_select(0, self.entries[0]), y)

    def run(self, x: torch.Tensor, y: torch.Tensor, halves: SplitOperands | None = None) -> torch.Tensor:
        """Multiply blocks, then nonzeros; an entry gets one value of each at most."""
        out, (blocks, tasks) = x.new_zeros(self.nnz), self.inner
        x_blocks, x_tasks = (x.index_select(0, entries) for entries in self.entries)
        out.index_add_(0, self.slots[0], blocks.run(x_blocks, y, halves))
        return out.index_add_(0, self.slots[1], tasks.run(x_tasks, y))

    @property
    def nbytes(self) -> int:
        """Bytes of both lists of tasks, and of where their values go."""
        return sum(path.nbytes for path in self.inner) + sum(a.numel() * 8 for a in (*self.entries, *self.slots))


Path = TaskSums | DensePath | BlockPath | HybridPath
"""One way to contract two sparse operands, to the values of a result whose pattern it finds.

Each tells `seconds`, the time of a call (None where the operands, stored so, do not fit, or there is no kernel for
their type), and its `plan` for a problem, whatever that takes. One that is made finds `places` once, (nnz,) ascending,
then takes any number of calls of `run`, with the values of both operands' entries. `sizes` and `nbytes` are what it
reads, and what it keeps for later calls.
"""
PATHS: dict[str, type[Path]] = {path.name: path for path in (TaskSums, DensePath, BlockPath, HybridPath)}
"""Every path, by the name of its plans."""
FEW_TASKS = 4
"""Tasks a nonzero up to which the scalar path is taken unseen: it then costs no more than cutting into blocks does."""


def choose(p: PairProblem) -> Choice:
    """The plan named in the request, or the one expected to be fastest."""
    join = p.join
    if p.wanted.name in PATHS:
        path, reason = PATHS[p.wanted.name], "asked for by name"
    elif join.tasks <= FEW_TASKS * (join.x_key.numel() + join.y_key.numel()):
        path, reason = TaskSums, f"at most {FEW_TASKS} tasks a nonzero"
    elif TaskSums.seconds(p) <= DENSE_LAUNCHES * p.profile.call:
        path, reason = TaskSums, "no other path is launched in as little time"
    else:
        return choice_of(estimates(p))
    return choice_of([_candidate(path.plan(p), None)], reason)  # what prices take to count, the plan may not need


def _candidate(plan: Plan, seconds: float | None) -> Candidate:
    """A path's one plan, of a time or without."""
    return Candidate(plan, (), plan.name, None if seconds is None else (seconds,))


def estimates(p: PairProblem, every: bool = False) -> list[Candidate]:
    """What each path is expected to take, the hybrid one where a threshold parts blocks.

    Without `every`, blocks whose launches alone take longer than another path are not cut.
    """
    candidates = [_candidate(path.plan(p), path.seconds(p)) for path in (TaskSums, DensePath)]
    for path, launches in ((BlockPath, BLOCK_LAUNCHES), (HybridPath, HYBRID_LAUNCHES)):
        if not every and min(c.total for c in candidates if c.total is not None) <= launches * p.profile.call:
            break
        split = HybridPath.split(p) if path is HybridPath else p.blocking.work
        if path is BlockPath or split.pure is None:
            candidates.append(_candidate(path.plan(p, split), path.seconds(p, split)))
    return candidates
