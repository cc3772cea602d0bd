"""Coordinates as data: integers for each position of the axes on which they depend.

    expression ::= position(axis) | along(mode) | coordinate(mode) | number | array[expression] | bits of a word
                 | expression operator expression               operators: + - * // % << >> & |

An expression says which modes, arrays and axes it reads. It is evaluated on tensors through a `Reader`, and written as
source text through a `Writer`, of which each backend has its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

from sparsetc.support.cached import cached_property

AXIS_LEVEL = {"item": 0, "fiber": 1, "tile": 1, "nonzero": 2, "lane": 2}
"""Axes that have positions, and the level at which each is known: lanes stand side by side in a step of nonzeros."""

OPERATORS: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "|": (1, operator.or_),
    "&": (2, operator.and_),
    "<<": (3, operator.lshift),
    ">>": (3, operator.rshift),
    "+": (4, operator.add),
    "-": (4, operator.sub),
    "*": (5, operator.mul),
    "//": (5, operator.floordiv),
    "%": (5, operator.mod),
}
"""How tightly each operator binds, as in Python, and what it does to tensors and whole numbers."""


@dataclass(frozen=True)
class Reader:
    """What an expression is evaluated with; tensors and whole numbers stand for one another."""

    position: Callable[[str], Any]
    """The positions along an axis."""
    coordinate: Callable[[int], Any]
    """The coordinates of a mode that was read before; of tiles, those of the tile."""
    along: Callable[[int], Any]
    """The positions along a mode's side of a tile."""
    lookup: Callable[[str, Any], Any]
    """The elements of an array at some positions."""


class Writer(Protocol):
    """What an expression is written with, in a language whose operators are Python's."""

    def position(self, axis: str) -> str:
        """The name of the positions along an axis."""

    def coordinate(self, mode: int) -> str:
        """The name of a mode's coordinate."""

    def along(self, mode: int) -> str:
        """The name of the positions along a mode's side of a tile."""

    def lookup(self, lookup: Lookup) -> str:
        """What reads an array, as text that needs no parentheses."""

    def bits(self, bits: Bits) -> tuple[str, str]:
        """What reads bits of a word, and the operator that it ends in; empty where it needs no parentheses."""
        return bits.operations(self.lookup(bits.word))


class Expression:
    """An integer for each position of some axes."""

    def evaluate(self, reader: Reader) -> Any:
        """The integers, for what a reader gives."""
        raise NotImplementedError

    def text(self, writer: Writer, least: int = 0) -> str:
        """Source text, in parentheses where its operator binds less than `least`."""
        raise NotImplementedError

    @cached_property
    def nodes(self) -> tuple[Expression, ...]:
        """The expression, then what it is made of, from left to right."""
        found: list[Expression] = []
        left: list[object] = [self]
        while left:
            if isinstance(node := left.pop(), Expression):
                found.append(node)
                # Not vars(node), which another thread may be adding a cached property to.
                left += map(getattr, repeat(node), reversed(node.__dataclass_fields__))  # type: ignore[attr-defined]
        return tuple(found)

    @cached_property
    def modes(self) -> frozenset[int]:
        """Modes whose coordinates are read."""
        return frozenset([node.mode for node in self.nodes if isinstance(node, Coordinate)])

    @cached_property
    def sides(self) -> frozenset[int]:
        """Modes along whose sides positions are read."""
        return frozenset([node.mode for node in self.nodes if isinstance(node, Along)])

    @cached_property
    def axes(self) -> frozenset[str]:
        """Axes whose positions are read."""
        return frozenset([node.axis for node in self.nodes if isinstance(node, Position)])

    @cached_property
    def lookups(self) -> tuple[Lookup, ...]:
        """What is read of arrays."""
        return tuple([node for node in self.nodes if isinstance(node, Lookup)])

    @cached_property
    def fields(self) -> tuple[Bits, ...]:
        """The bits of words that are read."""
        return tuple([node for node in self.nodes if isinstance(node, Bits)])

    @cached_property
    def counted(self) -> frozenset[str]:
        """Axes whose positions count as numbers, not only as places of words."""
        read = [node.axis for node in self.nodes if isinstance(node, Position)]
        places = [axis for lookup in self.lookups if lookup.every == 1 for axis in lookup.axes]
        return frozenset(axis for axis in read if read.count(axis) > places.count(axis))


@dataclass(frozen=True)
class Position(Expression):
    """The position along an axis: ``item``, ``fiber``, ``tile``, ``nonzero`` or ``lane``."""

    axis: str

    def evaluate(self, reader: Reader) -> Any:
        return reader.position(self.axis)

    def text(self, writer: Writer, least: int = 0) -> str:
        return writer.position(self.axis)


@dataclass(frozen=True)
class Along(Expression):
    """The positions along a mode's side of a tile, from 0 on."""

    mode: int

    def evaluate(self, reader: Reader) -> Any:
        return reader.along(self.mode)

    def text(self, writer: Writer, least: int = 0) -> str:
        return writer.along(self.mode)


@dataclass(frozen=True)
class Coordinate(Expression):
    """The coordinate of a mode that is read before; of tiles, that of the tile."""

    mode: int

    def evaluate(self, reader: Reader) -> Any:
        return reader.coordinate(self.mode)

    def text(self, writer: Writer, least: int = 0) -> str:
        return writer.coordinate(self.mode)


@dataclass(frozen=True)
class Constant(Expression):
    """A whole number."""

    value: int

    def evaluate(self, reader: Reader) -> int:
        return self.value

    def text(self, writer: Writer, least: int = 0) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Lookup(Expression):
    """The element of an array at another expression; a *word* where that is a position."""

    array: str
    where: Expression

    @cached_property
    def every(self) -> int:
        """Neighbouring positions that read one element: 1 of a word, 0 where more than a position says which."""
        match self.where:
            case Position(axis) if axis != "lane":
                return 1
            case Formula(">>", Position(axis), Constant(bits)) if axis != "lane":
                return 1 << bits
        return 0

    @cached_property
    def each(self) -> int:
        """Elements of each position's own, where the array is a list along a side for each; else 0."""
        match self.where:
            case Formula("+", Formula("*", Position(_), Constant(side)), Along(_)):
                return side
        return 0

    def elements(self, counts: dict[str, int], shape: tuple[int, ...]) -> int | None:
        """Elements that the array must have, by the positions of each axis and the sizes of modes; None: unknown."""
        if self.every or self.each:
            (axis,) = self.axes
            positions = counts[axis]
            return positions * self.each if self.each else -(-positions // self.every)
        return shape[self.where.mode] if isinstance(self.where, Coordinate) else None

    def evaluate(self, reader: Reader) -> Any:
        return reader.lookup(self.array, self.where.evaluate(reader))

    def text(self, writer: Writer, least: int = 0) -> str:
        return writer.lookup(self)


@dataclass(frozen=True)
class Bits(Expression):
    """Bits ``shift .. shift + width`` of a word; `top` says that no bits lie above them."""

    word: Lookup
    shift: int
    width: int
    top: bool

    @property
    def mask(self) -> int:
        """A bit for each that is kept, once shifted."""
        return (1 << self.width) - 1

    def of(self, word: Any) -> Any:
        """The bits of words given as tensors of integers."""
        return word >> self.shift if self.top and self.width else word >> self.shift & self.mask

    def evaluate(self, reader: Reader) -> Any:
        return self.of(self.word.evaluate(reader))

    def text(self, writer: Writer, least: int = 0) -> str:
        return enclosed(*writer.bits(self), least)

    def operations(self, word: str) -> tuple[str, str]:
        """The text that takes the bits of a word of this name, and the operator that it ends in."""
        if not self.width:
            return f"{word} * 0", "*"
        shifted = f"({word} >> {self.shift})" if self.shift else word
        return (shifted, "") if self.top else (f"{shifted} & {hex(self.mask)}", "&")


@dataclass(frozen=True)
class Formula(Expression):
    """Two expressions under one of `OPERATORS`; operands of ``//`` and ``%`` must not be negative."""

    operator: str
    left: Expression
    right: Expression

    def evaluate(self, reader: Reader) -> Any:
        return OPERATORS[self.operator][1](self.left.evaluate(reader), self.right.evaluate(reader))

    def text(self, writer: Writer, least: int = 0) -> str:
        binds = OPERATORS[self.operator][0]
        operands = self.left.text(writer, binds), self.right.text(writer, binds + 1)
        return enclosed(f" {self.operator} ".join(operands), self.operator, least)


def enclosed(text: str, last: str, least: int) -> str:
    """The text, in parentheses where the operator that it ends in binds less than `least`."""
    return f"({text})" if last and OPERATORS[last][0] < least else text


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
