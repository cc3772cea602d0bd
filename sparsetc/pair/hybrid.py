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
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

import torch

from sparsetc.codegen.split_float16 import Halves
from sparsetc.ir.plan import Plan
from sparsetc.pair.block_path import BLOCK_LAUNCHES, BlockPath
from sparsetc.pair.blocking import Blocking, BlockWork
from sparsetc.pair.dense import DENSE_LAUNCHES, DensePath
from sparsetc.pair.problem import PairProblem, Path, Sizes
from sparsetc.pair.scalar import SCALAR_LAUNCHES, TaskSums
from sparsetc.planner.candidate import Candidate, Choice, choice_of


@dataclass(frozen=True)
class Split:
    """The work of a contraction that a threshold splits in two."""

    threshold: int
    """Fewest nonzeros of a block of x that is multiplied as a block."""
    blocks: BlockWork
    """Work of such blocks of x, with all blocks of y that match one of them, and all their nonzeros."""
    tasks: int
    """Pairs of nonzeros that the other blocks of x are in."""

    @property
    def pure(self) -> str | None:
        """The plan that takes all the work, if one does."""
        if not self.blocks.pairs:
            return "scalar"
        return None if self.tasks else "bcb"


@dataclass(frozen=True)
class Populations:
    """The number of nonzeros of each block of x, and what those match."""

    blocking: Blocking
    tasks: torch.Tensor
    """(x blocks,) number of pairs of nonzeros that the nonzeros of each block are in."""
    most: torch.Tensor
    """(keys of blocks,) number of nonzeros of the fullest block of x with each shared coordinate."""

    @classmethod
    def of(cls, blocking: Blocking) -> Populations:
        """The populations of a blocking."""
        counts = blocking.x.counts
        tasks = torch.zeros_like(counts).index_add_(0, blocking.x.block, blocking.join.counts)
        most = _most(counts, blocking.pairs.x_key, blocking.pairs.y_each.numel())
        return cls(blocking, tasks, most)

    def entries(self, threshold: int) -> torch.Tensor:
        """(matched x,) bool, whether each nonzero is in a block of at least `threshold`."""
        return (self.blocking.x.counts >= threshold).index_select(0, self.blocking.x.block)

    def powers(self) -> list[Split]:
        """The splits by powers of two from 2 on, up to the largest that leaves a block."""
        volume = self.blocking.x.volume
        found = self.splits([1 << n for n in range(1, volume.bit_length())])
        return [s for s in found if s.blocks.pairs]

    def ends(self) -> list[Split]:
        """The splits that leave one side empty: all blocks, and none."""
        return self.splits([1, self.blocking.x.volume + 1])

    def splits(self, thresholds: Sequence[int]) -> list[Split]:
        """The splits by ascending thresholds, in one transfer from the device."""
        blocking, pairs, counts = self.blocking, self.blocking.pairs, self.blocking.x.counts
        edges = counts.new_tensor(thresholds)
        fullest = self.most[pairs.y_key]  # of each block of y, the fullest block of x that it matches
        rows, columns = _most(counts, pairs.row.rank, pairs.rows), _most(fullest, pairs.column.rank, pairs.columns)

        def at_least(population: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            """(1 + weights, thresholds + 1) the number of blocks and sums of weights, by the thresholds reached."""
            reached = torch.bucketize(population, edges, right=True)
            own = torch.stack([torch.ones_like(population), *weights])
            return own.new_zeros((len(own), len(thresholds) + 1)).index_add_(1, reached, own)

        table = torch.cat(
            [
                at_least(counts, counts, self.tasks, pairs.counts),
                at_least(fullest, blocking.y.counts),
                at_least(rows),
                at_least(columns),
            ]
        ).tolist()
        sums = [list(accumulate(reversed(line)))[::-1] for line in table]
        return [self._split(t, n + 1, sums) for n, t in enumerate(thresholds)]

    def _split(self, threshold: int, reached: int, sums: list[list[int]]) -> Split:
        x, x_nnz, tasks, pairs, y, y_nnz, rows, columns = (line[reached] for line in sums)
        elements = (x * self.blocking.x.volume, y * self.blocking.y.volume)
        work = BlockWork(pairs, min(pairs, rows * columns), elements, x_nnz + y_nnz)
        return Split(threshold, work, self.blocking.join.tasks - tasks)


def _most(of: torch.Tensor, owner: torch.Tensor, owners: int) -> torch.Tensor:
    """(owners,) the largest element of each owner, 0 where it has none."""
    return of.new_zeros(owners).scatter_reduce(0, owner, of, "amax")


MERGE_LAUNCHES = 7
"""Calls of torch that a hybrid takes beside its branches: values chosen for each, zeros, and two additions."""
HYBRID_LAUNCHES = SCALAR_LAUNCHES + BLOCK_LAUNCHES + MERGE_LAUNCHES


class HybridPath(Path):
    """Blocks of x with as many nonzeros as a threshold, or more, by pairs of blocks; its other nonzeros by tasks."""

    name = "bcb+scalar"

    @classmethod
    def split(cls, p: PairProblem) -> Split:
        """What either side gets by the threshold asked for, or by the one expected to be fastest.

        One side gets all where no threshold parts blocks.
        """
        return p.once("split", lambda: cls._split(p))

    @classmethod
    def _split(cls, p: PairProblem) -> Split:
        threshold, counts = p.option("threshold"), populations(p)
        if threshold is not None:
            return counts.splits([threshold])[0]
        splits = [s for s in counts.powers() if s.pure is None] or counts.ends()
        times = [cls.seconds(p, split) for split in splits]
        return min(zip(times, splits, strict=True), key=lambda timed: inf if timed[0] is None else timed[0])[1]

    @classmethod
    def seconds(cls, p: PairProblem, split: Split | None = None) -> float | None:
        """Time of both sides, one after the other; None where blocks do not fit."""
        split = split or cls.split(p)
        scalar = TaskSums.seconds(p, split.tasks) if split.tasks else 0.0
        blocks = BlockPath.seconds(p, split.blocks) if split.blocks.pairs else 0.0
        if blocks is None:
            return None
        r, c, _ = p.blocking.extents
        results = min(split.blocks.made * r * c + split.tasks, p.join.rows * p.join.columns)
        merged = results * (8 + 3 * p.width) / p.profile.moved  # an entry's slot, its value, and the sum
        return scalar + blocks + merged + MERGE_LAUNCHES * p.profile.call

    @classmethod
    def plan(cls, p: PairProblem) -> Plan:
        """The parts of both sides; of one side whose other is empty, that side's own plan."""
        split = cls.split(p)
        if split.pure is not None:
            none = split.pure == TaskSums.name
            why = f"{'no block' if none else 'every block'} of x has {split.threshold:,} nonzeros or more"
            return replace((TaskSums if none else BlockPath).plan(p), reason=why)
        parts = (*BlockPath.parts(p, split.blocks), *p.parts("coo"))
        return Plan(cls.name, parts, False, "threshold", (("threshold", split.threshold),))

    def __init__(self, p: PairProblem, plan: Plan) -> None:
        """Make the paths of both sides, each of a join of its own."""
        self.join, self.inner, self.entries = p.join, list[Path](), list[torch.Tensor]()
        filled = populations(p).entries(plan.option("threshold", 1))
        for side, kept in ((BlockPath, filled), (TaskSums, ~filled)):
            join, entries = p.join.only(kept)
            self.inner.append(side(replace(p, join=join), plan))
            self.entries.append(entries)
        self.slots: list[torch.Tensor] = []
        """Entries of the result that each side's results belong to."""
        self.nnz = 0

    @property
    def sizes(self) -> Sizes:
        """How much of each operand both sides read."""
        return tuple(own for path in self.inner for own in path.sizes)

    def places(self) -> torch.Tensor:
        """The union of both sides' places, (nnz,) int64."""
        sides = zip(self.inner, self.entries, strict=True)
        found = [path.problem.join.places_in(self.join, entries, path.places()) for path, entries in sides]
        places = torch.unique(torch.cat(found))
        self.slots = [torch.searchsorted(places, own) for own in found]
        self.nnz = places.numel()
        return places

    def halves(self, x: torch.Tensor, y: torch.Tensor) -> Halves | None:
        """The halves of values that are multiplied in blocks."""
        return self.inner[0].halves(x.index_select(0, self.entries[0]), y)

    def run(self, x: torch.Tensor, y: torch.Tensor, halves: Halves | None = None) -> torch.Tensor:
        """Multiply blocks, then nonzeros; an entry gets one value of each at most."""
        out = x.new_zeros(self.nnz)
        for path, entries, slots, own in zip(self.inner, self.entries, self.slots, (halves, None), strict=True):
            out.index_add_(0, slots, path.run(x.index_select(0, entries), y, own))
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of both lists of tasks, and of where their values go."""
        return sum(path.nbytes for path in self.inner) + sum(a.numel() * 8 for a in (*self.entries, *self.slots))


def populations(p: PairProblem) -> Populations:
    """The populations of a problem's blocks, counted once."""
    return p.once("populations", lambda: Populations.of(p.blocking))


PATHS: dict[str, type[Path]] = {path.name: path for path in (TaskSums, DensePath, BlockPath, HybridPath)}
"""Every path, by the name of its plans."""
FEW_TASKS = 4
"""Tasks a nonzero up to which the scalar path is taken unseen: it then costs no more than cutting into blocks does."""


def choose(p: PairProblem) -> Choice:
    """The plan named in the request, or the one expected to be fastest."""
    join = p.join
    if p.wanted.name in PATHS:
        return choice_of([PATHS[p.wanted.name].candidate(p, priced=False)], "asked for by name")
    if join.tasks <= FEW_TASKS * (join.x_key.numel() + join.y_key.numel()):
        return choice_of([TaskSums.candidate(p, priced=False)], f"at most {FEW_TASKS} tasks a nonzero")
    if TaskSums.seconds(p) <= min(BLOCK_LAUNCHES, DENSE_LAUNCHES) * p.profile.call:
        return choice_of([TaskSums.candidate(p, priced=False)], "no other path is launched in as little time")
    return choice_of(estimates(p))


def estimates(p: PairProblem, every: bool = False) -> list[Candidate]:
    """What each path is expected to take, the hybrid one where a threshold parts blocks.

    Without `every`, a hybrid whose launches alone take longer than another path is not looked at.
    """
    candidates = [path.candidate(p) for path in PATHS.values() if path is not HybridPath]
    best = min(c.total for c in candidates if c.total is not None)
    if (every or best > HYBRID_LAUNCHES * p.profile.call) and HybridPath.split(p).pure is None:
        candidates.append(HybridPath.candidate(p))
    return candidates
