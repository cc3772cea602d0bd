"""Coordinates -> torch: a chunk's words as slices, and what is looked up besides by `index_select`."""

from __future__ import annotations

from sparsetc.codegen.torch_rows import ENDS, RANGES, Rows
from sparsetc.ir.nest.coordinates import AXIS_LEVEL, Bits, Lookup, Writer
from sparsetc.ir.program import names
from sparsetc.ir.program.tile import Decode


class TorchCoordinates(Writer):
    """Writes the coordinates of a statement; those along a side are columns beside one another."""

    def __init__(self, rows: Rows, statement: Decode) -> None:
        self.rows, self.level, self.along_side = rows, statement.level, bool(statement.coordinate.sides)
        self.column = "[:, None]" if self.along_side else ""

    def position(self, axis: str) -> str:
        device = self.rows.device
        if axis == "lane":
            return f"torch.zeros(1, dtype=torch.int64, device={device})"  # these programs have one
        own = AXIS_LEVEL[axis]
        return self.rows.spread(f"torch.arange({', '.join(ENDS[own])}, device={device})", own, self.level) + self.column

    def coordinate(self, mode: int) -> str:
        p, letter = self.rows.p, self.rows.p.letters[mode]
        read = {s.name for s, _ in p.statements if isinstance(s, Decode)}
        name = names.tile(letter) if names.tile(letter) in read else names.at(letter)
        found = self.rows.spread(name, p.view.level_of(mode), self.level)
        return f"{found}.long(){self.column}" if self.along_side else found

    def along(self, mode: int) -> str:
        return f"torch.arange({self.rows.p.view.values.sides[mode]}, device={self.rows.device})"

    def bits(self, bits: Bits) -> tuple[str, str]:
        text, last = bits.operations(self.lookup(bits.word))
        return (text[1:-1], ">>") if bits.top and bits.shift and not last else (text, last)

    def lookup(self, lookup: Lookup) -> str:
        if lookup.every != 1:
            where = lookup.where.text(self)
            listed = f"{lookup.array}[{where}].long()"
            return listed if self.along_side else f"{lookup.array}.index_select(0, {where})"
        (own,) = (AXIS_LEVEL[axis] for axis in lookup.axes)
        return self.rows.spread(f"{lookup.array}[{RANGES[own]}]", own, self.level) + self.column
