"""Coordinates -> torch: a chunk's words as slices, and what is looked up besides by `index_select`."""

from __future__ import annotations

from typing import Protocol

from sparsetc.ir.nest.coordinates import AXIS_LEVEL, Lookup, Writer

RANGES = ("i0:i1", "b0:b1", "n0:n1")
"""What a chunk has of each level."""


class ChunkPrinter(Protocol):
    """What printers of torch functions know of a chunk."""

    @property
    def device(self) -> str:
        """Where the arrays live, as source text."""

    def word(self, array: str, level: int) -> str:
        """The words of an array of a level."""

    def coordinate_of(self, mode: int, level: int) -> str:
        """A mode's coordinate, for each position of a level."""

    def spread(self, name: str, own: int, level: int) -> str:
        """What there is for each position of the level `own`, for each of another."""


class TorchCoordinates(Writer):
    """Writes the coordinates of one level."""

    def __init__(self, printer: ChunkPrinter, level: int) -> None:
        self.printer, self.level = printer, level

    def position(self, axis: str) -> str:
        if axis == "lane":
            return f"torch.zeros(1, dtype=torch.int64, device={self.printer.device})"  # these programs have one
        own = AXIS_LEVEL[axis]
        numbers = f"torch.arange({RANGES[own].replace(':', ', ')}, device={self.printer.device})"
        return self.printer.spread(numbers, own, self.level)

    def coordinate(self, mode: int) -> str:
        return self.printer.coordinate_of(mode, self.level)

    def lookup(self, lookup: Lookup) -> str:
        if lookup.every != 1:
            return f"{lookup.array}.index_select(0, {lookup.where.text(self)})"
        (own,) = (AXIS_LEVEL[axis] for axis in lookup.axes)
        return self.printer.spread(self.printer.word(lookup.array, own), own, self.level)
