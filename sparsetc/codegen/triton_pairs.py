"""Tile programs over a task list -> the text of a Triton function: tiles of two operands, multiplied pair by pair.

In: a tile program whose view has pairs. Out: the lines of its function. All that concerns tiles, their loads and
expansion, dots and stores, is printed as for one operand; what a task list adds is the numbers of a pair's tiles.
"""

from __future__ import annotations

from sparsetc.codegen.triton_tiles import TileFunctionPrinter
from sparsetc.ir.tile import DenseAxis, Loop, Value
from sparsetc.ir.view import PAIRED


class PairFunctionPrinter(TileFunctionPrinter):
    """Prints one part over pairs of tiles."""

    def axis_vector(self, axis: DenseAxis) -> None:
        if axis.letter not in self.p.looped:
            self.put(f"{axis.letter}_in = tl.arange(0, {axis.block})")

    def loop_blocks(self, s: Loop) -> None:
        self.put("for pair in range(start, stop):")
        self.indent += 1
        for operand in PAIRED:
            self.put(f"{operand}_tile = tl.load(pair_{operand} + pair)")
        self.indent -= 1
        self.first_values()
        self.nested(s)

    def span(self, s: Loop) -> str:
        """A loop: tiles of pairs are longer than what is worth unrolling."""
        return "range"

    def widened(self, s: Value) -> str:
        """Dots take narrow values as they are and add up wide; all else is multiplied in the type of the sums."""
        return "" if self.p.dots else super().widened(s)
