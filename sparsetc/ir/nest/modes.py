"""How the coordinate of a mode is read: as bits of a word, by a formula, consecutive to another, or from a list.

In: numbers and names. Out: an `Expression` of the position at the level where the mode stands, read by the nest::

    coordinate  := field    # bits shift .. shift+bits of a stored word, added to the base of its frame if it has one
                 | computed # a formula over coordinates read before it
                 | consecutive # the position, shifted by what another mode's coordinate has stored
                 | listed   # of tiles: a list of coordinates, one a position along a side, for each item or tile
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass

from sparsetc.errors import FormatError
from sparsetc.ir.nest.coordinates import (
    OPERATORS,
    Along,
    Bits,
    Constant,
    Coordinate,
    Expression,
    Formula,
    Lookup,
    Position,
)
from sparsetc.support.cached import cached_property
from sparsetc.support.names import shown

FORMULA = re.compile(r"(?:\{(?:m[0-9]+|p|lane)\}|0x[0-9a-fA-F]+|[0-9]+|//|<<|>>|[-+*%&|()]|[ ])+")
"""The signs of a formula: coordinates, numbers, and operators that Triton and torch both read."""
NODES = (ast.BitOr, ast.BitAnd, ast.LShift, ast.RShift, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
SIGNS: dict[type[ast.operator], str] = dict(zip(NODES, OPERATORS, strict=True))


def parsed(formula: str, position: Position) -> Expression:
    """The expression of a formula in ``{m0}, {m1}, …`` (coordinates read before it), ``{p}`` (`position`) and
    ``{lane}``.

    Raises:
        FormatError: it is anything else than numbers and these under operators.
    """
    if isinstance(formula, str) and FORMULA.fullmatch(formula):
        try:  # in parentheses, names that touch are no longer ones
            tree = ast.parse(formula.strip().replace("{", "(").replace("}", ")"), mode="eval")
            return _expression(tree.body, position)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            pass
    raise FormatError(
        "the formula of a coordinate is printed into generated programs; it may hold {m0}, {m1}, ..., {p}, whole "
        f"numbers, parentheses and + - * // % << >> & |, found {shown(formula)}"
    )


def _expression(node: ast.expr, position: Position) -> Expression:
    match node:
        case ast.Constant(int(value)):
            return Constant(value)
        case ast.Name("p"):
            return position
        case ast.Name("lane"):
            return Position("lane")
        case ast.Name(name):
            return Coordinate(int(name[1:]))
        case ast.BinOp(left, sign, right) if type(sign) in SIGNS:
            return Formula(SIGNS[type(sign)], _expression(left, position), _expression(right, position))
        case ast.UnaryOp(ast.USub(), operand):
            return Formula("-", Constant(0), _expression(operand, position))
        case ast.UnaryOp(ast.UAdd(), operand):
            return _expression(operand, position)
    raise ValueError


@dataclass(frozen=True)
class ModeCoordinate:
    """How the coordinate of `mode` is read."""

    mode: int

    def expression(self, at: Position) -> Expression:
        """The coordinate, where the position of its level is `at`."""
        raise NotImplementedError

    def check(self, leaf: bool) -> None:
        """Raise `FormatError` unless the coordinate may stand at its level, which is the leaf or not."""

    @cached_property
    def fields(self) -> tuple[Bits, ...]:
        """The bits of words that the coordinate is read from."""
        return self.expression(Position("nonzero")).fields


@dataclass(frozen=True)
class Field(ModeCoordinate):
    """Coordinate of `mode`: bits ``shift .. shift + bits`` of `array`; `top` says that no bits lie above it."""

    array: str
    shift: int
    bits: int
    top: bool
    frame: int = 0
    """Positions whose words are offsets from one base (frame of reference), a power of two; 0: words are whole."""

    def expression(self, at: Position) -> Expression:
        bits = Bits(Lookup(self.array, at), self.shift, self.bits, self.top)
        number = Formula(">>", at, Constant(self.frame.bit_length() - 1))
        return Formula("+", bits, Lookup(f"{self.array}_base", number)) if self.frame else bits

    def check(self, leaf: bool) -> None:
        if self.frame and (not leaf or self.frame & (self.frame - 1) or self.frame < 0):
            raise FormatError(f"a frame is of a leaf mode and a power of two of positions, found {self}")


@dataclass(frozen=True)
class Computed(ModeCoordinate):
    """Coordinate of `mode` by an expression, or by a formula in ``{m0}, {m1}, …`` (coordinates read before it) and
    ``{p}`` (its position).

    Nothing is stored for a formula: a banded matrix knows its column from its row and its place in the band. The
    position is that of the item, the lane or the nonzero, by the level at which the coordinate stands. Operators are
    ``+ - * // % >> << & |``, operands of ``//`` and ``%`` not negative.
    """

    formula: str | Expression

    def expression(self, at: Position) -> Expression:
        return self.formula if isinstance(self.formula, Expression) else parsed(self.formula, at)


@dataclass(frozen=True)
class Consecutive(ModeCoordinate):
    """Coordinate of `mode` that rises by one from nonzero to nonzero while that of `by`, read before it, is the same.

    All that is stored is the difference between coordinate and position, once for each coordinate of `by`: so do the
    entries of a row of a compressed matrix lie, and those that meet an entry of another operand.
    """

    array: str
    """Name of the array of differences, one for each coordinate of `by`; they may be negative."""
    by: int

    def expression(self, at: Position) -> Expression:
        return Formula("+", at, Lookup(self.array, Coordinate(self.by)))

    def check(self, leaf: bool) -> None:
        if not leaf:
            raise FormatError(
                f"mode {self.mode} is consecutive by mode {self.by}, which must be read before it, at the leaf"
            )


@dataclass(frozen=True)
class Listed(ModeCoordinate):
    """Coordinates of `mode` at the positions along a side, which each item, or each tile, has its own list of.

    So rows of any numbers make a group, and columns of any numbers a window. A place that stands for no coordinate
    holds the size of the mode, or more. Where several modes are listed along one side, each of its places is a fiber.
    """

    array: str
    """Name of the array of lists, one after another."""
    side: int
    """Places of a list."""
    along: int | None = None
    """The mode whose side the places lie along, where the mode, whose own side is 1, rides along it; None: its own."""

    def expression(self, at: Position) -> Expression:
        place = Along(self.mode if self.along is None else self.along)
        return Lookup(self.array, Formula("+", Formula("*", at, Constant(self.side)), place))


def word_bits(coordinates: Iterable[ModeCoordinate | Expression], name: str) -> int:
    """Bits in use of the words called `name`; 31 of those that are read whole."""
    return max([f.shift + f.width for c in coordinates for f in c.fields if f.word.array == name], default=31)
