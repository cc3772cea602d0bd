"""What a tile program costs that torch runs, its tile being the whole tensor: products, and what is read for them.

In: a `TileProgram`; then a part's `Statistics` and a `DeviceProfile`. Out: a `Cost` by the rates of torch's products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from sparsetc.device.profile import DeviceProfile
from sparsetc.ir.plan import ROUNDED
from sparsetc.ir.program.cost import Cost
from sparsetc.ir.program.counting import Statistics
from sparsetc.ir.program.tile import Add, Loop, Product, Statement, Sum, TileProgram, Value

SHARE = {"tf32": 0.7, "bf16": 1.2}
"""The share of the rate of dots that torch's product reaches where rows begin at multiples of `ALIGNED` bytes: with the
four numbers below, within a tenth of what plans took on average (H200, benchmarks/results/spmm.json)."""
UNALIGNED = 0.3
"""That share elsewhere."""
ALIGNED = 16
SETTINGS = {"ieee": "highest", "tf32x3": "highest", "tf32": "high", "bf16": "medium"}
"""The rates of `DeviceProfile.product`, by the precision of dots."""
PARTS = {"ieee": 32}
PART = 64
"""Rows, and columns, of the part of a product that a multiprocessor takes, by the precision of dots; of the others."""
SUMMED = 2e-9
"""Seconds that a product takes for a position that it sums, one after another in each part."""
WARPS = 4
"""Warps that a multiprocessor issues from at once."""
ROUNDING = 4 + 2
"""Bytes that are read and written of an element that is rounded to 16 bits."""
ROUNDING_CALL = 1e-6
"""Seconds of the rounding beside its bytes."""


class ProductCost(Cost):
    """What torch does, in place of what a kernel's loops would: all positions at once, whatever loops are around."""

    def __init__(self, program: TileProgram) -> None:
        """Count the program's products."""
        super().__init__(program)
        self.turn = 0
        self.tables = sum([o.nrows * o.width for o in program.operands])
        """Elements of dense operands."""
        self.flops = 0
        """Multiplications and additions; torch pads none."""
        self.formed = 0
        """Elements of what is made on the way, which is written and read again."""
        self.calls = self.products = 0
        """Calls of torch, and those of them that multiply what is stored, or what was made of it."""
        self.lengths: list[int] = []
        """Elements of the rows of the matrices that are multiplied."""
        self.summed = 0
        """Positions that products sum, one after another."""
        statements = [s for s, _ in program.statements]
        own = {s.out.name for s in statements if isinstance(s, Value)}  # what is made of stored values
        last = {s.source.name for s in statements if isinstance(s, Add)}
        last |= {s.source.name for s in statements if isinstance(s, Sum) and s.out.name in last}
        for s, around in _products(program.body):
            of_values = any(t.name in own for t in s.inputs)
            own |= {s.out.name} if of_values else set()
            self._multiplied(s, around, of_values, s.out.name in last)

    def _multiplied(self, s: Product, around: frozenset[str], of_values: bool, last: bool) -> None:
        """Count a product of stored values, or of operands alone; what is no result is formed on the way."""
        self.calls += 1
        if of_values:
            self.products += 1
            self.flops += 2 * self._elements({a for t in s.inputs for a in t.axes} | around)
        if not last:
            self.formed += self._elements({*s.out.axes} | (frozenset() if s.accumulate else around))
        if s.summed and of_values:
            contracted = self._elements(s.summed)
            self.lengths += [contracted, self.p.width]
            self.summed += contracted

    def _elements(self, letters: Iterable[str]) -> int:
        """Elements over axes that have sizes: lanes have none."""
        wanted = set(letters)
        return prod([a.size for a in self.p.axes if a.letter in wanted])

    def describe(self) -> list[str]:
        """Lines for a reader."""
        made = f", makes {self.formed} on the way" if self.formed else ""
        return [
            f"streams {self.once} bytes, writes {self.output} bytes",
            f"reads {self.tables} elements of dense operands{made}",
            f"{self.flops} flops in products of torch",
        ]

    def seconds(self, statistics: Statistics, profile: DeviceProfile) -> dict[str, float]:
        """Seconds each resource alone would take."""
        size, at = statistics.itemsize, statistics.symbols
        moved = self.once.at(at) + self.output.at(at) + size * (self.tables + 2 * self.formed)
        return {"memory": moved / profile.memory, "dot": self.flops / self._rate(size, profile)}

    def stored(self, statistics: Statistics) -> int:
        """Bytes of the result, all of which is stored."""
        return self.output.at(statistics.symbols)

    def predicted(self, statistics: Statistics, profile: DeviceProfile) -> float:
        """Seconds expected: a product reads while it multiplies; what is made before it, or rounded, takes its own."""
        size, rounding = statistics.itemsize, 0.0
        if self._narrow(size):  # operands are rounded, or the result is
            elements = self.p.rows * self.p.width if size == 2 else self.tables
            rounding = ROUNDING_CALL + ROUNDING * elements / profile.memory
        made = (max(1, self.calls) - 1) * profile.launch + 2 * size * self.formed / profile.memory
        multiplied = max(self.seconds(statistics, profile).values()) + SUMMED * self.summed
        call = max(0.0, profile.call - profile.launch)  # a launch is counted for every plan
        return call + made + rounding + multiplied

    def _narrow(self, itemsize: int) -> bool:
        """Whether torch multiplies 16-bit numbers: one operand and what is stored, as they are or rounded once."""
        if itemsize == 2:
            return self.calls == len(self.p.dots) == 1 and len(self.p.dots[0].inputs) == 2
        return self.p.half and self.products == 1

    def _rate(self, itemsize: int, profile: DeviceProfile) -> float:
        """Flops a second of torch's products of this type, in this precision, while parts of the result are left."""
        own = "tf32" if self.precision == ROUNDED else self.precision  # what is not rounded once is not at all
        unit, width = (ROUNDED, 2) if self._narrow(itemsize) else (own, max(4, itemsize))
        usual = profile.product["float64" if itemsize >= 8 else SETTINGS[unit]]
        busy = self._busy(PARTS.get(unit, PART), profile)
        if unit not in SHARE or itemsize >= 8:
            return usual * busy
        share = UNALIGNED if any(n * width % ALIGNED for n in self.lengths) else SHARE[unit]
        return max(usual, share * profile.matrix(unit)) * busy

    def _busy(self, side: int, profile: DeviceProfile) -> float:
        """The share of multiprocessors that have a part of the result, on average over the rounds that it takes."""
        parts, each = prod(-(-n // side) for n in (self.p.rows, self.p.width)), max(1, profile.warps // WARPS)
        return parts / (each * -(-parts // each))


def _products(
    body: Iterable[Statement], around: frozenset[str] = frozenset()
) -> Iterator[tuple[Product, frozenset[str]]]:
    """Every product, and the letters whose positions loops around it take in turn."""
    for s in body:
        if isinstance(s, Loop):
            yield from _products(s.body, around | ({s.letter} if s.letter else frozenset()))
        elif isinstance(s, Product):
            yield s, around
