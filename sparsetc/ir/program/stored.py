"""What a tile program says of a sparse operand: which letters it has, and from which arrays its values are read.

In: an operand's name, letters and tiles. Out: read by the walkers of tile programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsetc.ir.nest.nest import Nest
from sparsetc.ir.nest.values import Values


@dataclass(frozen=True)
class Stored:
    """A sparse operand as a `Value` reads it: its letters by mode, and how its tiles, if it has any, are stored.

    Of tiles, the letters are those along whose sides values lie.
    """

    name: str
    """Empty where it is the only one."""
    letters: tuple[str, ...]
    values: Values

    def array(self, name: str) -> str:
        """What one of its arrays, or a variable of its own, is called."""
        return f"{self.name}_{name}" if self.name else name

    @property
    def held(self) -> tuple[str, ...]:
        """The arrays of its values; of tiles in halves, of the high and of the low ones."""
        return tuple(map(self.array, ("high_values", "low_values") if self.values.halves else ("values",)))

    def stride(self, letter: str) -> int:
        """How far apart a letter's positions are stored."""
        return self.values.strides[self.letters.index(letter)]


def stored_of(view: Nest, letters: Sequence[str]) -> Stored:
    """The one sparse operand of a view, by the letters of its modes."""
    own = [letters[mode] for mode in view.sided] if view.values.sides else letters
    return Stored("", tuple(own), view.along_sides)
