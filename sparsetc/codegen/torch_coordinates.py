"""Coordinates -> torch: a chunk's words as slices, and what is looked up besides by `index_select`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsetc.ir.nest.coordinates import AXIS_LEVEL, Lookup, Writer

if TYPE_CHECKING:
    from sparsetc.codegen.torch import FunctionPrinter
    from sparsetc.codegen.torch_tiles import TileFunctionPrinter

RANGES = ("i0:i1", "b0:b1", "n0:n1")
"""What a chunk has of each level."""


class TorchCoordinates(Writer):
    """Writes the coordinates of one level."""

    def __init__(self, printer: FunctionPrinter | TileFunctionPrinter, level: int) -> None:
        self.printer, self.level = printer, level

    def position(self, axis: str) -> str:
        if axis == "lane":
            return f"torch.zeros(1, dtype=torch.int64, device={self.printer.device})"  # these programs have one
        own = AXIS_LEVEL[axis]
        numbers = f"torch.arange({RANGES[own].replace(':', ', ')}, device={self.printer.device})"
        return self.printer.spread(numbers, own, self.level)

    def coordinate(self, mode: int) -> str:
        return self.printer.coordinate(self.printer.p.letters[mode], self.level)

    def lookup(self, lookup: Lookup) -> str:
        if lookup.every != 1:
            return f"{lookup.array}.index_select(0, {lookup.where.text(self)})"
        (own,) = (AXIS_LEVEL[axis] for axis in lookup.axes)
        return self.printer.spread(self.printer.word(lookup.array, own), own, self.level)
