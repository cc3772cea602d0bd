"""Numbers of things that a program does, as sums over what a part stores: so many a nonzero, a fiber, an item.

In: whole numbers. Out: `Count`, of which `ir.program.counting` makes what a program costs. The symbols::

    P  work items      L  fibers (lanes stored)      N  nonzeros stored, padding included      w  bytes of a value

Of tiles, L are those stored, of a task list its pairs; N are then the values of both operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add, mul

SYMBOLS = ("L*w", "L", "N*w", "N", "P*w", "P", "w", "")
"""What a count is a sum of, in this order: products of a symbol or 1 and, at even places, the bytes of a value."""


@dataclass(frozen=True)
class Count:
    """A sum of the products in `SYMBOLS`, each times a number."""

    factors: tuple[int, ...]

    def __add__(self, other: Count) -> Count:
        return Count(tuple(map(add, self.factors, other.factors)))

    def __mul__(self, n: int) -> Count:
        return Count(tuple([n * factor for factor in self.factors]))

    __rmul__ = __mul__

    @property
    def bytes(self) -> Count:
        """The bytes of this many values; a count in bytes has none."""
        return Count(tuple([f for plain in self.factors[1::2] for f in (plain, 0)]))

    def of(self, symbol: Count) -> int:
        """The factor of one symbol."""
        return self.factors[symbol.factors.index(1)]

    def at(self, symbols: tuple[int, ...]) -> int:
        """The number where each product in `SYMBOLS` has the value given."""
        return sum(map(mul, self.factors, symbols))

    def __str__(self) -> str:
        terms = ((f, s) for f, s in zip(self.factors, SYMBOLS, strict=True) if f)
        return " + ".join(f"{f}*{s}" if s and f != 1 else s or str(f) for f, s in terms) or "0"


FIBERS, STORED, ITEMS, ONE = (Count(tuple(int(at == place) for at in range(8))) for place in (1, 3, 5, 7))
ZERO = Count((0,) * 8)
