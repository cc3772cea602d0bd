"""How the values of a sparse operand are stored: each kind says which arrays hold them.

In: nothing but numbers. Out: read by the walkers of tile programs, each of which says how it reads a kind::

    values := whole      # each nonzero's, one after another
            | ones       # none: every value is 1
            | tiles      # each position's of a tile, tile after tile
            | bitmap     # of tiles: the nonzeros' alone, and a bit a position that says which have one
            | halves     # of tiles: two of 16 bits a position, of a row that was scaled
            | scaled halves # the same, where all values were scaled as one

Arrays, by name (N stored values, T tiles):

    values (N)            the values, 0 where padded
    value_ptr (T+1)       first stored nonzero of each tile, where a bitmap says which positions have one
    bits (T*volume/word)  a bit a position, the lowest bit of a word first
    high_values (N)       of each value the nearest 16-bit float, once it was scaled
    low_values (N)        what that leaves of it, times `LOW`
    scales (rows*side)    by what the rows of tiles are to be multiplied in turn, a power of two each; tiles that are
                          one above another share none, tiles that are side by side all
    most (1)              the largest magnitude of all values, which says how they were scaled
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, TypeVar

from sparsetc.errors import FormatError
from sparsetc.support.cached import cached_property

V = TypeVar("V", bound="Values")


@dataclass(frozen=True)
class Values:
    """How values are stored."""

    structure: ClassVar[tuple[str, ...]] = ()
    """The names of the arrays that say where values are."""
    packed: ClassVar[tuple[str, ...]] = ("values",)
    """The names of the arrays of values, which are made anew for others of the same pattern."""
    ones: ClassVar[bool] = False
    """Whether every value is 1, and none is stored."""
    bitmap: ClassVar[bool] = False
    """Whether only the nonzeros' values of a tile are stored."""
    halves: ClassVar[bool] = False
    """Whether each value is stored as two of 16 bits, for dots that multiply halves."""

    sides: tuple[int, ...] = ()
    """Positions a mode of a tile; empty where there are no tiles."""
    sequence: tuple[int, ...] = ()
    """Modes in the order in which a tile's positions are stored, the last running fastest."""
    contracted: int = 0
    """How many modes at the end of `sequence` a column of a dot contracts, as they were stored; 0: no dot."""
    word: int = 32
    """Of bitmaps, positions that a word of bits stands for: 8, 16 or 32."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays that values are read from, in the order kernels take them."""
        return (*self.structure, *self.packed)

    @cached_property
    def volume(self) -> int:
        """Positions of a tile."""
        return prod(self.sides)

    @property
    def words(self) -> int:
        """Words of bits a tile; the last bits of the last may stand for no position."""
        return -(-self.volume // self.word)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """How far apart two neighbouring positions of a tile are stored, by mode."""
        place = {mode: n for n, mode in enumerate(self.sequence)}
        return tuple(prod(self.sides[m] for m in self.sequence[place[mode] + 1 :]) for mode in range(len(self.sides)))

    def of_sides(self: V, modes: Sequence[int]) -> V:
        """The same values by some modes' sides, numbered from 0 on; other sides have one position."""
        order = tuple(modes.index(m) for m in self.sequence if m in modes)
        return replace(self, sides=tuple(self.sides[m] for m in modes), sequence=order)

    def check(self) -> None:
        """Raise `FormatError` unless positions are numbered by every mode once."""
        if sorted(self.sequence) != list(range(len(self.sides))):
            raise FormatError(f"tiles store their positions by every mode once, found modes {self.sequence}")
        if any(side < 1 for side in self.sides):
            raise FormatError(f"sides of tiles must be 1 or more, found {self.sides}")
        if not 0 <= self.contracted <= len(self.sides):
            raise FormatError(f"a column of a dot contracts some modes of a tile, found {self.contracted}")

    def __str__(self) -> str:
        kind = "bitmap" if self.bitmap else "dense"
        return f"{kind} tiles of {'x'.join(map(str, self.sides))}{' in parts' if self.halves else ''}"


@dataclass(frozen=True)
class Whole(Values):
    """Every value is stored at its position: a nonzero's, or one of a tile."""


@dataclass(frozen=True)
class Ones(Values):
    """Every value is 1, and none is stored: an adjacency matrix without weights, a list of what meets.

    Its runs hold no padding, which nothing would tell from a nonzero.
    """

    packed, ones = (), True

    def check(self) -> None:
        if self.sides:
            raise FormatError("tiles store their values")


@dataclass(frozen=True)
class Bitmap(Values):
    """A tile's values that are no zeros, in order of their positions, which bits say."""

    structure, bitmap = ("value_ptr", "bits"), True

    def check(self) -> None:
        super().check()
        if not self.sides or self.word not in (8, 16, 32):
            raise FormatError("a bitmap is of tiles, in words of 8, 16 or 32 bits")


@dataclass(frozen=True)
class Halves(Values):
    """A value is the sum of two of 16 bits, the second by a fixed factor too large, and is multiplied by the scale of
    its row, a position of the first mode.
    """

    packed, halves = ("high_values", "low_values", "scales"), True

    def check(self) -> None:
        super().check()
        if not self.sides:
            raise FormatError("what is in halves are tiles, stored whole")


@dataclass(frozen=True)
class ScaledHalves(Halves):
    """Values in halves, where the largest magnitude of all values says how they were scaled."""

    packed = ("high_values", "low_values", "most")
