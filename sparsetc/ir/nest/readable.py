"""Coordinates as people read them: in a tile program, and at the top of a generated file."""

from __future__ import annotations

from collections.abc import Sequence

from sparsetc.ir.nest.coordinates import Bits, Lookup, Writer


class Readable(Writer):
    """Writes coordinates with the names of modes; positions along the axis `own` go without its name."""

    def __init__(self, names: Sequence[str], own: str, field: str = "decode {array}") -> None:
        self.names, self.own, self.field = names, own, field

    def position(self, axis: str) -> str:
        return "position" if axis == self.own else axis

    def coordinate(self, mode: int) -> str:
        return self.names[mode]

    def along(self, mode: int) -> str:
        return "place"

    def lookup(self, lookup: Lookup) -> str:
        """An element; of bases, which several positions share, the array alone."""
        return lookup.array if lookup.every > 1 else f"{lookup.array}[{lookup.where.text(self)}]"

    def bits(self, bits: Bits) -> tuple[str, str]:
        return self.field.format(array=bits.word.array, bits=bits.width), ""
