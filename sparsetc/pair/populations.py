"""How many nonzeros the blocks of x hold, and what either side of a threshold would have to do.

In: a `Cut`. Out: `Split`s: blocks of at least so many nonzeros to be multiplied as blocks, the nonzeros of the others
one by one. By linearity in x the two add up to the result. Counts only: no task is made, and no nonzero sorted again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsetc.pair.cut import BlockWork, Cut


@dataclass(frozen=True)
class Split:
    """What a threshold makes of a contraction."""

    threshold: int
    """Nonzeros from which a block of x is multiplied as a block."""
    blocks: BlockWork
    """Of those blocks; y's are all that meet one of them, with all their nonzeros."""
    tasks: int
    """Pairs of nonzeros, of the other blocks of x."""

    @property
    def pure(self) -> str | None:
        """The path that takes all, if one does."""
        if not self.blocks.pairs.tasks:
            return "scalar"
        return None if self.tasks else "bcb"


@dataclass(frozen=True)
class Populations:
    """Of the blocks of x."""

    cut: Cut
    nonzeros: torch.Tensor
    """(x blocks,) nonzeros of each."""
    tasks: torch.Tensor
    """(x blocks,) pairs of nonzeros that theirs are in."""

    @classmethod
    def of(cls, cut: Cut) -> Populations:
        """Count."""
        nonzeros, block = torch.diff(cut.x.starts), cut.x.dense // cut.x.volume
        tasks = torch.zeros_like(nonzeros).index_add_(0, block, cut.matching.counts[cut.x.positions])
        return cls(cut, nonzeros, tasks)

    def entries(self, threshold: int) -> torch.Tensor:
        """(live x,) bool: nonzeros in blocks of at least `threshold`."""
        x = self.cut.x
        kept = (self.nonzeros >= threshold)[x.dense // x.volume]
        return torch.empty_like(kept).scatter_(0, x.positions, kept)

    def thresholds(self) -> list[int]:
        """Powers of two with blocks on both sides, the smallest of those that part them alike."""
        most = int(self.nonzeros.max()) if self.nonzeros.numel() else 0
        powers = [1 << n for n in range(1, most.bit_length())]
        below = {int((self.nonzeros < t).sum()): t for t in reversed(powers)}
        return sorted(t for blocks, t in below.items() if blocks)

    def ends(self) -> list[int]:
        """The thresholds that leave one side empty: all blocks, and none."""
        return [1, self.cut.x.volume + 1]

    def split(self, threshold: int) -> Split:
        """What `threshold` makes."""
        cut, kept = self.cut, self.nonzeros >= threshold
        share = cut.pairs.only(kept)  # every block has an entry that meets one of y's, so all are live, in order
        y = torch.diff(cut.y.starts)[cut.y_block[share.y]]
        elements = (share.x.numel() * cut.x.volume, y.numel() * cut.y.volume)
        work = BlockWork(share.part, elements, int(self.nonzeros[kept].sum() + y.sum()))
        return Split(threshold, work, int(self.tasks[~kept].sum()))
