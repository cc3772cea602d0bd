"""Statistics of a packed part, and counts that are linear in them.

In: the numbers of a packed storage, or a planner's estimate of them. Out: `Statistics`, and `Count`, a sum of so many a
nonzero, a fiber, an item. The symbols::

    P  work items      L  fibers (lanes stored)      N  nonzeros stored, padding included      w  bytes of a value

L counts the stored tiles of a part in tiles, and the pairs of a task list, whose N are the values of both operands. In
text, R are rows of the result. A text has no sizes of modes: one source serves many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import add, mul

from sparsetc.support import Ints, NamedInts
from sparsetc.support.lru import cached_property

SYMBOLS = ("L*w", "L", "N*w", "N", "P*w", "P", "w", "")
"""Terms of a count, in this order: products of a symbol or 1 and, at even places, the bytes of a value."""


@dataclass(frozen=True)
class Count:
    """A sum of the products in `SYMBOLS`, each times a number."""

    factors: Ints

    def __add__(self, other: Count) -> Count:
        return Count(tuple(map(add, self.factors, other.factors)))

    def __mul__(self, n: int) -> Count:
        return Count(tuple(map(mul, self.factors, (n,) * len(self.factors))))

    __rmul__ = __mul__

    @property
    def bytes(self) -> Count:
        """The bytes of this many values; a count in bytes has none."""
        return Count(tuple([f for plain in self.factors[1::2] for f in (plain, 0)]))

    def of(self, symbol: Count) -> int:
        """Return the factor of one symbol."""
        return self.factors[symbol.factors.index(1)]

    def at(self, symbols: Ints) -> int:
        """The number where each product in `SYMBOLS` has the value given."""
        return sum(map(mul, self.factors, symbols))

    def __str__(self) -> str:
        terms = ((f, s) for f, s in zip(self.factors, SYMBOLS, strict=True) if f)
        return " + ".join(f"{f}*{s}" if s and f != 1 else s or str(f) for f, s in terms) or "0"


FIBERS, STORED, ITEMS, ONE = (Count(tuple(int(at == place) for at in range(8))) for place in (1, 3, 5, 7))
ZERO = Count((0,) * 8)
BY_LEVEL = (ITEMS, FIBERS, STORED)
"""Counts of what each level has; of blocks, their fibers."""


@dataclass(frozen=True)
class Statistics:
    """Counts of a packed part, or estimates of them.

    Attributes:
        runs: for a sparse letter, how often its coordinate changes as stored: a row gathered again at once is in L1.
        chain: rounds of loads that wait for one another in the longest work item.
        split_rows: True if a row has several items: then results are added, not stored.
        split_fibers: True if a fiber has several lanes: then results are added too.
        near: for a sparse letter whose coordinates are stored in panels, how many a panel has.
    """

    items: int
    fibers: int
    stored: int
    nnz: int
    itemsize: int
    runs: NamedInts = ()
    chain: int = 0
    split_rows: bool = False
    split_fibers: bool = False
    near: NamedInts = ()

    def scaled(self, share: float) -> Statistics:
        """The statistics of a share of the nonzeros."""
        counts = self.items, self.fibers, self.stored, self.nnz
        items, fibers, stored, nnz = [max(1, int(n * share)) if share else 0 for n in counts]
        return replace(self, items=items, fibers=fibers, stored=stored, nnz=nnz)

    @cached_property
    def symbols(self) -> Ints:
        """The values of the products of symbols that a `Count` is a sum of."""
        plain = self.fibers, self.stored, self.items, 1
        return tuple([n * w for n in plain for w in (self.itemsize, 1)])
