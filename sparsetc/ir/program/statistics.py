"""What a packed part holds, or is expected to: the numbers that a program's counts are multiplied by.

In: a packed storage, or a planner's estimate of one. Out: `Statistics`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsetc.support.cached import cached_property


@dataclass(frozen=True)
class Statistics:
    """What a packed part (or an estimate of one) looks like."""

    items: int
    fibers: int
    stored: int
    nnz: int
    itemsize: int
    runs: tuple[tuple[str, int], ...] = ()
    """For a sparse letter, how often its coordinate changes as stored: a row gathered again at once is in L1."""
    chain: int = 0
    """Rounds of loads that wait for one another in the longest work item."""
    split_rows: bool = False
    """Whether a row has several items: then results are added, not stored."""
    split_fibers: bool = False
    """Whether a fiber has several lanes: then results are added too."""

    def scaled(self, share: float) -> Statistics:
        """The statistics of a share of the nonzeros."""

        def part(n: int) -> int:
            return max(1, int(n * share)) if share else 0

        items, fibers, stored, nnz = (part(n) for n in (self.items, self.fibers, self.stored, self.nnz))
        return replace(self, items=items, fibers=fibers, stored=stored, nnz=nnz)

    @cached_property
    def symbols(self) -> tuple[int, ...]:
        """The values of the products of symbols that a `Count` is a sum of."""
        plain = self.fibers, self.stored, self.items, 1
        return tuple(n * w for n in plain for w in (self.itemsize, 1))
