"""The populations of the blocks of x, and the work that a threshold leaves to blocks and to single nonzeros.

In: a `Blocking`. Out: `Split`s: blocks of at least so many nonzeros to be multiplied as blocks, the nonzeros of the
others one by one. By linearity in x the two add up to the result. Counts only, those of all thresholds at once: no task
is made, and no nonzero sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from sparsetc.pair.blocking import Blocking, BlockWork


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
