"""How many nonzeros the blocks of x hold, and what either side of a threshold would have to do.

In: a `Cut`. Out: `Split`s: blocks of at least so many nonzeros to be multiplied as blocks, the nonzeros of the others
one by one. By linearity in x the two add up to the result. Counts only, those of all thresholds at once: no task is
made, and no nonzero sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from sparsetc.pair.cut import BlockWork, Cut


@dataclass(frozen=True)
class Split:
    """What a threshold makes of a contraction."""

    threshold: int
    """Nonzeros from which a block of x is multiplied as a block."""
    blocks: BlockWork
    """Work of such blocks of x; y's are all that meet one of them, with all their nonzeros."""
    tasks: int
    """Pairs of nonzeros, of the other blocks of x."""

    @property
    def pure(self) -> str | None:
        """The path that takes all, if one does."""
        if not self.blocks.pairs:
            return "scalar"
        return None if self.tasks else "bcb"


@dataclass(frozen=True)
class Populations:
    """How many nonzeros the blocks of x hold, and what they meet."""

    cut: Cut
    tasks: torch.Tensor
    """(x blocks,) pairs of nonzeros that theirs are in."""
    most: torch.Tensor
    """(keys of blocks,) nonzeros of the fullest block of x with each shared coordinate."""

    @classmethod
    def of(cls, cut: Cut) -> Populations:
        """Count."""
        counts = cut.x.counts
        tasks = torch.zeros_like(counts).index_add_(0, cut.x.block, cut.join.counts)
        most = _most(counts, cut.pairs.x_key, cut.pairs.y_each.numel())
        return cls(cut, tasks, most)

    def entries(self, threshold: int) -> torch.Tensor:
        """(matched x,) bool: nonzeros in blocks of at least `threshold`."""
        return (self.cut.x.counts >= threshold).index_select(0, self.cut.x.block)

    def powers(self) -> list[Split]:
        """The splits by powers of two from 2 on, up to the largest that leaves a block."""
        volume = self.cut.x.volume
        found = self.splits([1 << n for n in range(1, volume.bit_length())])
        return [s for s in found if s.blocks.pairs]

    def ends(self) -> list[Split]:
        """The splits that leave one side empty: all blocks, and none."""
        return self.splits([1, self.cut.x.volume + 1])

    def splits(self, thresholds: Sequence[int]) -> list[Split]:
        """What each of ascending thresholds makes; one transfer from the device."""
        cut, pairs, counts = self.cut, self.cut.pairs, self.cut.x.counts
        edges = counts.new_tensor(thresholds)
        met = self.most[pairs.y_key]  # of each block of y, the fullest of x that it meets
        rows, columns = _most(counts, pairs.row.rank, pairs.rows), _most(met, pairs.column.rank, pairs.columns)

        def at_least(population: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            """(1 + weights, thresholds + 1): how many, and their sums, by the thresholds reached."""
            reached = torch.bucketize(population, edges, right=True)
            own = torch.stack([torch.ones_like(population), *weights])
            return own.new_zeros((len(own), len(thresholds) + 1)).index_add_(1, reached, own)

        table = torch.cat(
            [
                at_least(counts, counts, self.tasks, pairs.counts),
                at_least(met, cut.y.counts),
                at_least(rows),
                at_least(columns),
            ]
        ).tolist()
        sums = [list(accumulate(reversed(line)))[::-1] for line in table]
        return [self._split(t, n + 1, sums) for n, t in enumerate(thresholds)]

    def _split(self, threshold: int, reached: int, sums: list[list[int]]) -> Split:
        x, x_nnz, tasks, pairs, y, y_nnz, rows, columns = (line[reached] for line in sums)
        elements = (x * self.cut.x.volume, y * self.cut.y.volume)
        work = BlockWork(pairs, min(pairs, rows * columns), elements, x_nnz + y_nnz)
        return Split(threshold, work, self.cut.join.tasks - tasks)


def _most(of: torch.Tensor, owner: torch.Tensor, owners: int) -> torch.Tensor:
    """(owners,) the largest of each one's, 0 of none."""
    return of.new_zeros(owners).scatter_reduce(0, owner, of, "amax")
