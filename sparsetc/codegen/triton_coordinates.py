"""Coordinates -> Triton: loads of words, once a scope, and of what is looked up besides, under the lanes' masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsetc.ir.nest.axes import LEAF
from sparsetc.ir.nest.coordinates import AXIS_LEVEL, OPERATORS, Lookup, Writer
from sparsetc.ir.nest.modes import word_bits
from sparsetc.ir.program import names

if TYPE_CHECKING:
    from sparsetc.codegen.triton_function import FunctionPrinter

FACTOR = OPERATORS["+"][0] + 1
"""How tightly an operand of a sum must bind."""


class TritonCoordinates(Writer):
    """Writes the coordinates of one level, of the copy of a step that has the suffix `u`."""

    def __init__(self, printer: FunctionPrinter, level: int, u: str) -> None:
        self.printer, self.level, self.u = printer, level, u

    def position(self, axis: str) -> str:
        return f"pos{self.u}" if axis == "nonzero" else axis

    def coordinate(self, mode: int) -> str:
        printer, letter = self.printer, self.printer.p.letters[mode]
        return names.tile(letter) if printer.p.view.along else printer.coordinate(letter, self.u)

    def along(self, mode: int) -> str:
        return names.side(self.printer.p.letters[mode])

    def lookup(self, lookup: Lookup) -> str:
        printer, view = self.printer, self.printer.p.view
        known = [*(AXIS_LEVEL[axis] for axis in lookup.axes), *map(view.level_of, lookup.modes)]
        within = (printer.limit(printer.p.letters[mode]) for mode in sorted(lookup.sides))
        mask = " & ".join(filter(None, (printer.guard(min(max(known, default=0), self.level), self.u), *within)))
        load = printer.load(lookup.array, lookup.where.text(self, FACTOR), mask)
        if lookup.every != 1:
            return load
        word, words = f"{lookup.array}_bits{self.u}", printer.words[self.level]
        if word not in words:
            words.add(word)
            # Words of 16 bits, which only leaf words are stored in, are decoded as 32.
            narrow = self.level == LEAF and word_bits(view.levels[2], lookup.array) <= 16
            printer.put(f"{word} = {load}{'.to(tl.int32)' if narrow else ''}")
        return word
