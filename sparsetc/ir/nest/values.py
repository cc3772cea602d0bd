"""How the values of a sparse operand are stored: each kind says which arrays hold them.

In: nothing but numbers. Out: read by the walkers of tile programs, each of which says how it reads a kind::

    values := whole      # each nonzero's, or each position's of a tile, one after another
            | ones       # none: every value is 1
            | bitmap     # of tiles: the nonzeros' alone, and a bit a position that says which have one
            | halves     # of tiles: two of 16 bits a position, of a row that was scaled
            | scaled halves # the same, where all values were scaled as one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Values:
    """How values are stored."""

    arrays: ClassVar[tuple[str, ...]]
    """The names of the arrays that values are read from, in the order kernels take them."""


@dataclass(frozen=True)
class Whole(Values):
    """Every value is stored at its position."""

    arrays = ("values",)


@dataclass(frozen=True)
class Ones(Values):
    """Every value is 1, and none is stored."""

    arrays = ()


@dataclass(frozen=True)
class Bitmap(Values):
    """A tile's values that are no zeros, in order of their positions, which bits say."""

    arrays = ("value_ptr", "bits", "values")

    words: int
    """Words of bits a tile."""
    word: int
    """Positions that a word stands for."""
    volume: int
    """Positions of a tile; the last bits of its last word may stand for none."""


@dataclass(frozen=True)
class Halves(Values):
    """A value is the sum of two of 16 bits, the second by a fixed factor too large, and is multiplied by its row's
    scale.
    """

    arrays = ("high_values", "low_values", "scales")


@dataclass(frozen=True)
class ScaledHalves(Halves):
    """Values in halves, where the largest magnitude of all values says how they were scaled."""

    arrays = ("high_values", "low_values", "most")
