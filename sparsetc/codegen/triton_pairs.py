"""Tile programs over a task list -> the text of a Triton function: tiles of two operands, multiplied pair by pair.

In: a tile program whose view has pairs. Out: the lines of its function. All that concerns tiles, their loads and
expansion, dots and stores, is printed as for one operand; what a task list adds is the numbers of a pair's tiles, and
tiles in halves.
"""

from __future__ import annotations

from sparsetc.codegen.triton_tiles import TileFunctionPrinter
from sparsetc.ir import names
from sparsetc.ir.plan import F16X3
from sparsetc.ir.tile import DenseAxis, Loop, Product, Scale, Value
from sparsetc.ir.view import LOW, PAIRED


class PairFunctionPrinter(TileFunctionPrinter):
    """Prints one part over pairs of tiles."""

    def axis_vector(self, axis: DenseAxis) -> None:
        if axis.letter not in self.p.looped:
            self.put(f"{names.side(axis.letter)} = tl.arange(0, {axis.block})")

    def loop_blocks(self, s: Loop) -> None:
        # What dots round off the sums of low halves is as much smaller as those are, so they add up all pairs.
        summed = [inner.out for inner in s.body if isinstance(inner, Product) and self.in_halves(inner)]
        for total in summed:
            self.put(f"{total.name}_low = tl.zeros({self.shape(total)}, {self.acc})")
        self.put("for pair in range(start, stop):")
        self.indent += 1
        for operand in PAIRED:
            self.put(f"{operand}_tile = tl.load(pair_{operand} + pair)")
        self.indent -= 1
        self.first_values()
        self.nested(s)
        for total in summed:
            self.put(f"{total.name} += {total.name}_low * {1 / LOW}")

    def in_halves(self, s: Product) -> bool:
        """Whether it multiplies tiles in halves."""
        return s.dot and self.p.precision == F16X3

    def span(self, s: Loop) -> str:
        """A loop: tiles of pairs are longer than what is worth unrolling."""
        return "range"

    def value(self, s: Value) -> None:
        stored = self.p.stored(s.operand)
        if not stored.tiles.halves:
            super().value(s)
            return
        for half in ("high", "low"):
            self.put(f"{s.out.name}_{half} = {self.whole(s, stored.array(f'{half}_values'))}")

    def scale(self, s: Scale) -> None:
        (letter,) = s.out.axes
        row = f"tl.load(item_{s.operand} + item){'.to(tl.int64)' if self.p.wide else ''}"
        address = f"{row} * {self.length(letter)} + {names.side(letter)}"
        array = self.p.stored(s.operand).array("scales")
        self.put(f"{s.out.name} = {self.load(array, address, self.limit(letter))}")

    def product(self, s: Product, u: str) -> None:
        if not self.in_halves(s):
            super().product(s, u)
            return
        (x,), (y,), total = s.left, s.right, s.out.name
        high, low, how = f"{total}_high", f"{total}_low", f"out_dtype={self.acc}"
        self.put(f"{high} = tl.dot({x.name}_high, tl.trans({y.name}_high), {how})")
        self.put(f"{low} = tl.dot({x.name}_low, tl.trans({y.name}_high), {low}, {how})")
        self.put(f"{low} = tl.dot({x.name}_high, tl.trans({y.name}_low), {low}, {how})")
        # Of a plain sum with `high` Triton would make the dot's accumulator, and matrix units round towards zero.
        self.put("# Pairs are summed outside of the dot, which rounds its sums towards zero.")
        self.put(f"{total} = tl.fma({high}, 1.0, {total})")

    def widened(self, s: Value) -> str:
        """Dots take narrow values as they are and add up wide; all else is multiplied in the type of the sums."""
        return "" if self.p.dots else super().widened(s)
