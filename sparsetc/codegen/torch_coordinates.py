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
    """Writes the coordinates of one level; those along the sides of tiles are columns beside one another."""

    def __init__(self, printer: FunctionPrinter | TileFunctionPrinter, level: int, along: bool = False) -> None:
        self.printer, self.level, self.column = printer, level, "[:, None]" if along else ""

    def position(self, axis: str) -> str:
        if axis == "lane":
            return f"torch.zeros(1, dtype=torch.int64, device={self.printer.device})"  # these programs have one
        own = AXIS_LEVEL[axis]
        numbers = f"torch.arange({RANGES[own].replace(':', ', ')}, device={self.printer.device})"
        return self.printer.spread(numbers, own, self.level) + self.column

    def coordinate(self, mode: int) -> str:
        found = self.printer.coordinate(self.printer.p.letters[mode], self.level)
        return f"{found}.long(){self.column}" if self.column else found

    def along(self, mode: int) -> str:
        return f"torch.arange({self.printer.p.view.sides[mode]}, device={self.printer.device})"

    def lookup(self, lookup: Lookup) -> str:
        if lookup.every != 1:
            where = lookup.where.text(self)
            return f"{lookup.array}[{where}]" if self.column else f"{lookup.array}.index_select(0, {where})"
        (own,) = (AXIS_LEVEL[axis] for axis in lookup.axes)
        return self.printer.spread(self.printer.word(lookup.array, own), own, self.level) + self.column
