"""The storage of values of a sparse operand: each kind names the arrays that hold them.

In: nothing but numbers. Out: a `Values`, which interpreters and printers of tile programs read::

    values := values     # one for each nonzero, one after another
            | ones       # none: every value is 1
            | whole      # one for each position of a tile, tile after tile
            | bitmap     # of tiles: one for each nonzero, and a bit for each position that says whether it has one
            | halves     # of tiles: two of 16 bits for each position, of values that were scaled

Arrays, by name (N stored values, T tiles):

    values (N)            the values, 0 where padded
    value_ptr (T+1)       first stored nonzero of each tile, where a bitmap says which positions have one
    bits (T*words)        a bit a position, the lowest bit of a word first; each tile begins a word
    high_values (N)       of each value the nearest 16-bit float, once it was scaled
    low_values (N)        what that leaves of it, times `LOW`
    most (groups)         the largest magnitude of each group of values, from which the group's one scale follows

A group is all values of an operand. Where tiles of two operands are multiplied in pairs, it is a row of positions:
tiles in one tile row share their groups, different tile rows do not. A float32 v times its group's scale is
``high + low / LOW``. The scale is the power of two that brings the largest magnitude of the group to between 2**14 and
2**15::

    high = float16(v * scale)      11 bits      low = float16((v * scale - high) * 2**11)      12 bits more, the sign
                                                                                              among them

A float16 is normal from 2**-14 on, so these 23 bits are there where a value is at least 2**-28 of the largest; of any
other, no more than 2**-50 of the largest is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsetc.support import Ints, Names, cached_property, volume
from sparsetc.tensor.coords import set_bits


@dataclass(frozen=True)
class Values:
    """A storage of values: one for each nonzero or, in tiles without a bitmap, for each position.

    Attributes:
        structure: the names of the arrays that say where values are.
        bitmap: whether only the nonzeros' values of a tile are stored.
        sides: how many positions a tile has along each mode; empty where there are no tiles.
        sequence: modes in the order in which a tile's positions are stored, the last running fastest.
        contracted: how many modes at the end of `sequence` are contracted by a dot; 0 if the order serves no dot.
        word: bits of a word of a bitmap: 8, 16 or 32.
        held: the names of the arrays with one element for each value; none where every value is 1.
        packed: the names of the arrays that are made again when values change and the pattern does not.
        halves: whether each value is stored as two of 16 bits, for dots that multiply halves.
    """

    structure: ClassVar[Names] = ()
    bitmap: ClassVar[bool] = False

    sides: Ints = ()
    sequence: Ints = ()
    contracted: int = 0
    word: int = 32
    held: Names = ("values",)
    packed: Names = ("values",)
    halves: bool = False

    @property
    def arrays(self) -> Names:
        """The names of the arrays that values are read from, in the order kernels take them."""
        return (*self.structure, *self.packed)

    @cached_property
    def volume(self) -> int:
        """Positions of a tile."""
        return prod(self.sides)

    @property
    def words(self) -> int:
        """The number of bitmap words a tile; the last bits of the last word may be unused."""
        return -(-self.volume // self.word)

    @cached_property
    def strides(self) -> Ints:
        """Return the distance in storage between two neighbouring positions of a tile, by mode."""
        place = {mode: n for n, mode in enumerate(self.sequence)}
        return tuple(volume(self.sides, self.sequence[place[mode] + 1 :]) for mode in range(len(self.sides)))

    def begins(self, arrays: Mapping[str, Tensor], tiles: Tensor) -> Tensor:
        """Return the begin of the values of tiles, or nonzeros, by id."""
        return tiles * self.volume

    def number(self, arrays: Mapping[str, Tensor], stored: int) -> int:
        """Return the number of tiles, or nonzeros, that `stored` values belong to."""
        return stored // self.volume

    def places(self, arrays: Mapping[str, Tensor], tiles: int, device: torch.device) -> Tensor:
        """Return (tiles, volume) bool: True at positions that have a stored value."""
        return torch.ones((tiles, self.volume), dtype=torch.bool, device=device)

    def describe(self, array: Callable[[str], str], order: str) -> str:
        """Return where the values of tiles lie, given what arrays are called and how positions are numbered."""
        return f"{' and '.join(map(array, self.held))} at [tile * {self.volume} + position], {order}"

    def scaling(self, operand: Any) -> list[str]:
        """Return lines for a reader: the formula of an operand's values, if they are not stored directly."""
        if not self.halves:
            return []
        high, low = operand.held
        row = f"[item_{operand.name}[item] * {self.sides[0]} + {operand.letters[0]}]" if operand.name else ""
        scale = f"2 ** (exponent of {operand.array('most')}{row} - {HEAD})"
        return [f"{operand.name.upper() or 'X'} = ({high} + {low} / {LOW}) * {scale}, in float16"]

    def __str__(self) -> str:
        kind = "bitmap" if self.bitmap else "dense"
        return f"{kind} tiles of {'x'.join(map(str, self.sides))}{' in split float16' if self.halves else ''}"


Whole = Values
"""Values of tiles: every position has one, 0 where it has no nonzero. Without sides, one for each nonzero."""
Ones = partial(Values, held=(), packed=())
"""Values that are all 1 and not stored, such as those of an adjacency matrix without weights. Its runs hold no padding,
which nothing would tell from a nonzero."""
IN_HALVES = ("high_values", "low_values")
Halves = partial(Values, held=IN_HALVES, packed=(*IN_HALVES, "most"), halves=True)
"""Values of tiles, each the sum of two of 16 bits, the second by a fixed factor too large, times its group's power of
two. Paired tiles have a group for each row, a position of the first mode; values of one operand are one group."""


@dataclass(frozen=True)
class Bitmap(Values):
    """The nonzero values of each tile in the order of their positions, with a bitmap of these positions."""

    structure = ("value_ptr", "bits")
    bitmap = True

    def begins(self, arrays: Mapping[str, Tensor], tiles: Tensor) -> Tensor:
        return arrays["value_ptr"][tiles].long()

    def number(self, arrays: Mapping[str, Tensor], stored: int) -> int:
        return arrays["value_ptr"].numel() - 1

    def describe(self, array: Callable[[str], str], order: str) -> str:
        values, first, bits = map(array, ("values", "value_ptr", "bits"))
        return f"{values}[{first}[tile] + n], at the n-th bit set in {bits}[tile * {self.words}] and on, {order}"

    def places(self, arrays: Mapping[str, Tensor], tiles: int, device: torch.device) -> Tensor:
        return set_bits(arrays["bits"].view(-1, self.words), self.word)[:, : self.volume]


TYPES = {"high_values": torch.float16, "low_values": torch.float16, "most": torch.float32}
"""Types of arrays of values, if they differ from the operand's type."""
LOW = 2**11
"""Factor that low halves of values are multiplied by: their exponents are then those of the high halves."""
TOP = 0x7FFFFFFF
"""The largest magnitude that bits can say: a mask of all but the sign."""
HEAD, BIAS = 14, 127
"""Exponent of the largest magnitude of scaled values; bias of a float32's exponent."""
SPREAD, SPREAD_OF_ALL = 28, 36
"""Exponents of two: how far a nonzero may be below its row's largest, and below the largest of an operand that has one
scale. None of the latter then loses more than 2**-14 of itself, nor those from 2**-28 of the largest on more than
2**-23.
"""
RANGE = 80
"""Largest magnitudes lie between 2^-RANGE and 2^RANGE, so that multiplying by one scale after the other neither
overflows nor leaves the normal numbers."""
EXACT = 0
INEXACT = 1
INFINITE = 2
"""Verdicts on the halves of values, from good to bad."""
INFINITE_BITS = (2 * BIAS + 1) << 23
LEAST_BITS, MOST_BITS = (BIAS - RANGE) << 23, (BIAS + RANGE) << 23


def scale(most: Tensor, into: bool) -> Tensor:
    """Return the power of two that scales values of this largest magnitude (float32) to the range of halves.

    If not `into`, return its inverse. Both are normal numbers.
    """
    exponent = (most.view(torch.int32) >> 23).clamp(min=HEAD + 1)
    return ((2 * BIAS + HEAD - exponent if into else exponent - HEAD) << 23).view(torch.float32)


def halved(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """The high and low halves, float16, of scaled values, float32."""
    high = scaled.half()
    return high, ((scaled - high.float()) * LOW).half()


def scaled_halves(values: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """The high and low halves, float16, of values, given the largest magnitude of each one's group, or of all."""
    return halved(values * scale(most, into=True))
