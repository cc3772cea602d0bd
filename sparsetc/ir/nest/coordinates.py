"""Coordinates of a mode as data: expressions that give an integer for each position of the axes they depend on.

    expression ::= position(axis) | along(mode) | coordinate(mode) | number | array[expression] | bits of a word
                 | expression operator expression               operators: + - * // % << >> & |

An expression says which modes, arrays and axes it reads. It is evaluated on tensors through a `Reader`, and written as
source text through a `Writer`, of which each backend has its own.

The coordinate of a mode is an expression of the position at the level where the mode stands::

    coordinate  := field    # bits shift .. shift+bits of a stored word, added to the base of its frame if it has one
                 | computed # a formula over coordinates read before it
                 | consecutive # the position, shifted by what another mode's coordinate has stored
                 | listed   # of tiles: a list of coordinates, one a position along a side, for each item or tile
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, Literal

from sparsetc.errors import FormatError
from sparsetc.support import Names, cached_property

AXIS_LEVEL = {"item": 0, "fiber": 1, "tile": 1, "nonzero": 2, "lane": 2}
"""Axes with positions, and the level at which each is known: lanes stand side by side in a step of nonzeros."""

OPERATORS: dict[str, tuple[int, Callable[[Any, Any], Any], type[ast.operator]]] = {
    "|": (1, operator.or_, ast.BitOr),
    "&": (2, operator.and_, ast.BitAnd),
    "<<": (3, operator.lshift, ast.LShift),
    ">>": (3, operator.rshift, ast.RShift),
    "+": (4, operator.add, ast.Add),
    "-": (4, operator.sub, ast.Sub),
    "*": (5, operator.mul, ast.Mult),
    "//": (5, operator.floordiv, ast.FloorDiv),
    "%": (5, operator.mod, ast.Mod),
}
"""For each operator its precedence, as in Python, its function on tensors and whole numbers, and its class in `ast`."""


@dataclass(frozen=True)
class Reader:
    """The functions by which an expression is evaluated on tensors. A whole number may stand for any of the tensors.

    Attributes:
        position: the positions along an axis.
        coordinate: the coordinates of a mode that was read before; of tiles, those of the tile.
        along: the positions along a mode's side of a tile.
        lookup: the elements of an array at some positions.
    """

    position: Callable[[str], Any]
    coordinate: Callable[[int], Any]
    along: Callable[[int], Any]
    lookup: Callable[[str, Any], Any]


@dataclass(eq=False)
class Writer:
    """Writes an expression with Python's operators, for readers; printers derive from it for their languages.

    Attributes:
        names: of the modes.
        own_axis: the axis whose positions are called ``position``; those of others have the name of their axis.
        field: a template of the text for bits of a word; if it is empty, the text is the shift and the mask.
    """

    names: Sequence[str]
    own_axis: str
    field: str = ""

    def position(self, axis: str) -> str:
        """The name of the positions along an axis."""
        return "position" if axis == self.own_axis else axis

    def coordinate(self, mode: int) -> str:
        """The name of a mode's coordinate."""
        return self.names[mode]

    def along(self, mode: int) -> str:
        """The name of the positions along a mode's side of a tile."""
        return "place"

    def lookup(self, lookup: Lookup) -> str:
        """Return the text that reads an array, without parentheses; of bases, the array alone."""
        return lookup.array if lookup.every > 1 else f"{lookup.array}[{lookup.where.text(self)}]"

    def bits(self, bits: Bits) -> tuple[str, str]:
        """Return the text that reads bits of a word, and its last operator; empty if the text needs no parentheses.

        `Bits.operations` puts a shift in parentheses; they are dropped where no mask follows it.
        """
        if self.field:
            return self.field.format(array=bits.word.array, bits=bits.width), ""
        text, last = bits.operations(self.lookup(bits.word))
        return (text[1:-1], ">>") if bits.top and bits.shift and not last else (text, last)


class Expression:
    """An integer for each position of some axes."""

    def evaluate(self, reader: Any) -> Any:
        """The integers, for what a `Reader` gives."""
        raise NotImplementedError

    def text(self, writer: Writer, least: int = 0) -> str:
        """Source text, in parentheses where its operator binds less than `least`; for a leaf, a writer's name of it."""
        return str(self.evaluate(writer))

    @cached_property
    def nodes(self) -> tuple[Expression, ...]:
        """The expression, then what it is made of, from left to right."""
        nodes: list[Expression] = []
        left: list[object] = [self]
        while left:
            if isinstance(node := left.pop(), Expression):
                nodes.append(node)
                # Not vars(node), which another thread may be adding a cached property to.
                left += map(getattr, repeat(node), reversed(node.__dataclass_fields__))  # type: ignore[attr-defined]
        return tuple(nodes)

    @cached_property
    def modes(self) -> frozenset[int]:
        """Modes whose coordinates are read."""
        return self._read("coordinate")

    @cached_property
    def sides(self) -> frozenset[int]:
        """Modes along whose sides positions are read."""
        return self._read("along")

    @cached_property
    def axes(self) -> frozenset[str]:
        """Axes whose positions are read."""
        return self._read("position")

    def _read(self, kind: str) -> frozenset[Any]:
        return frozenset([node.of for node in self.nodes if isinstance(node, Atom) and node.kind == kind])

    @cached_property
    def lookups(self) -> tuple[Lookup, ...]:
        """Return every array lookup of the expression."""
        return tuple([node for node in self.nodes if isinstance(node, Lookup)])

    @cached_property
    def fields(self) -> tuple[Bits, ...]:
        """The bits of words that are read."""
        return tuple([node for node in self.nodes if isinstance(node, Bits)])


@dataclass(frozen=True)
class Atom(Expression):
    """Positions along an axis or a side of a tile, the coordinate of a mode that was read before, or a number."""

    kind: Literal["position", "along", "coordinate", "number"]
    of: str | int

    def evaluate(self, reader: Any) -> Any:
        return self.of if self.kind == "number" else getattr(reader, self.kind)(self.of)


Position = partial(Atom, "position")
"""The position along an axis: ``item``, ``fiber``, ``tile``, ``nonzero`` or ``lane``."""
Along = partial(Atom, "along")
"""The positions along a mode's side of a tile, from 0 on."""
Coordinate = partial(Atom, "coordinate")
"""The coordinate of a mode that was read before; in tiles, the tile's coordinate."""
Constant = partial(Atom, "number")
"""A whole number."""


@dataclass(frozen=True)
class Lookup(Expression):
    """The element of an array whose index another expression gives; it is a *word* if the index is a position."""

    array: str
    where: Expression

    @cached_property
    def every(self) -> int:
        """Return how many neighbouring positions read one element: 1 for a word, 0 if the index is more than those."""
        match self.where:
            case Atom("position", axis) if axis != "lane":
                return 1
            case Formula(">>", Atom("position", axis), Atom("number", int(bits))) if axis != "lane":
                return 1 << bits
        return 0

    @cached_property
    def each(self) -> int:
        """The length of each position's own list along a side; 0 if the array holds no such lists."""
        match self.where:
            case Formula("+", Formula("*", Atom("position"), Atom("number", int(side))), Atom("along")):
                return side
        return 0

    def elements(self, counts: dict[str, int], shape: tuple[int, ...]) -> int | None:
        """Elements that the array must have, by the positions of each axis and the sizes of modes; None: unknown."""
        if self.every or self.each:
            (axis,) = self.axes
            positions = counts[axis]
            return positions * self.each if self.each else -(-positions // self.every)
        match self.where:
            case Atom("coordinate", int(mode)):
                return shape[mode]
        return None

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
        """Return the text that extracts the bits from the variable `word`, and its last operator."""
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


FORMULA = re.compile(r"(?:\{(?:m[0-9]+|p|lane)\}|0x[0-9a-fA-F]+|[0-9]+|//|<<|>>|[-+*%&|()]|[ ])+")
"""The signs of a formula: coordinates, numbers, and operators that Triton and torch both read."""
SIGNS = {node: sign for sign, (*_, node) in OPERATORS.items()}


def parsed(formula: str, position: Expression) -> Expression:
    """The expression of a formula in ``{m0}, {m1}, …`` (coordinates read before), ``{p}`` and ``{lane}``.

    Raises:
        FormatError: it is anything else than numbers and these under operators.
    """
    if isinstance(formula, str) and (expression := _parsed(formula, position)):
        return expression
    raise FormatError(
        "the formula of a coordinate is printed into generated programs; it may hold {m0}, {m1}, ..., {p}, whole "
        f"numbers, parentheses and + - * // % << >> & |, found {formula!r:.80}"
    )


@lru_cache
def _parsed(formula: str, position: Expression) -> Expression | None:
    if FORMULA.fullmatch(formula):
        with suppress(SyntaxError, ValueError, MemoryError, RecursionError):
            # In parentheses, names that touch are no longer ones.
            tree = ast.parse(formula.strip().replace("{", "(").replace("}", ")"), mode="eval")
            return _expression(tree.body, position)
    return None


def _expression(node: ast.expr, position: Expression) -> Expression:
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
    """The rule by which the coordinate of `mode` is read."""

    mode: int

    def expression(self, at: Atom) -> Expression:
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
    """Coordinate of `mode`: bits ``shift .. shift + bits`` of `array`; `top` says that no bits lie above it.

    Attributes:
        frame: positions whose words are offsets from one base (frame of reference), a power of two; 0: words are whole.
    """

    array: str
    shift: int
    bits: int
    top: bool
    frame: int = 0

    def expression(self, at: Atom) -> Expression:
        bits = Bits(Lookup(self.array, at), self.shift, self.bits, self.top)
        number = Formula(">>", at, Constant(self.frame.bit_length() - 1))
        return Formula("+", bits, Lookup(f"{self.array}_base", number)) if self.frame else bits

    def check(self, leaf: bool) -> None:
        if self.frame and (not leaf or self.frame & (self.frame - 1) or self.frame < 0):
            raise FormatError(f"a frame is of a leaf mode and a power of two of positions, found {self}")


@dataclass(frozen=True)
class Computed(ModeCoordinate):
    """Coordinate of `mode` by an expression or a formula in ``{m0}, {m1}, …`` (read before it), ``{p}`` and ``{lane}``.

    Nothing is stored for a formula: a banded matrix knows its column from its row and its place in the band. ``{p}`` is
    the position of the item, the fiber, the tile or the nonzero, by the level at which the coordinate stands, and
    ``{lane}`` the number of a nonzero's lane. Operators are ``+ - * // % >> << & |``, operands of ``//`` and ``%`` not
    negative.
    """

    formula: str | Expression

    def expression(self, at: Atom) -> Expression:
        return self.formula if isinstance(self.formula, Expression) else parsed(self.formula, at)


def consecutive(mode: int, array: str, by: int) -> Computed:
    """A coordinate that rises by one a nonzero while the coordinate of mode `by`, read before, is the same.

    All that is stored is the difference between coordinate and position, once for each coordinate of `by`: so do the
    entries of a row of a compressed matrix lie, and those that meet an entry of another operand.

    Args:
        mode: which is read by each nonzero.
        array: name of the array of differences, one for each coordinate of `by`; they may be negative.
        by: the other mode.
    """
    return Computed(mode, Formula("+", Position("nonzero"), Lookup(array, Coordinate(by))))


@dataclass(frozen=True)
class Listed(ModeCoordinate):
    """Coordinates of `mode` at the positions along a side, which each item, or each tile, has its own list of.

    So rows of any numbers make a group, and columns of any numbers a window. A place that stands for no coordinate
    holds the size of the mode, or more. Where several modes are listed along one side, each of its places is a fiber.

    Attributes:
        array: name of the array of lists, one after another.
        side: places of a list.
        along: the mode whose side the places lie along, where the mode, whose own side is 1, rides along it; None: its
            own.
    """

    array: str
    side: int
    along: int | None = None

    def expression(self, at: Atom) -> Expression:
        place = Along(self.mode if self.along is None else self.along)
        return Lookup(self.array, Formula("+", Formula("*", at, Constant(self.side)), place))


def expressions(axes: Names, levels: Iterable[Iterable[ModeCoordinate]]) -> dict[int, Expression]:
    """Return the coordinate of each mode, in reading order, given the axes that number the positions of each level."""
    read = zip(axes, levels, strict=True)
    return {c.mode: c.expression(Position(axis)) for axis, coordinates in read for c in coordinates}


def with_inputs(modes: set[int], coordinates: Mapping[int, Expression]) -> set[int]:
    """Add to `modes` those that their coordinates are read from, and return it; coordinates are in reading order."""
    for mode, coordinate in reversed([*coordinates.items()]):
        modes |= coordinate.modes if mode in modes else set()
    return modes


def lookups(levels: Iterable[Iterable[Expression]]) -> list[tuple[Lookup, ...]]:
    """Return the array lookups of the coordinates of each level."""
    return [tuple([lookup for value in level for lookup in value.lookups]) for level in levels]


def words_of(levels: Iterable[Iterable[Lookup]], read: Iterable[Expression]) -> list[list[tuple[int, bool]]]:
    """Return, for each array of words of each level, the bits in use, and True if words are offsets from bases.

    Words that are read whole have 31.
    """
    framed = {f.word.array for value in read for f in value.fields if any(w.every > 1 for w in value.lookups)}
    words = [dict.fromkeys([w.array for w in level if w.every == 1]) for level in levels]
    return [[(word_bits(read, array) or 31, array in framed) for array in each] for each in words]


def word_bits(coordinates: Iterable[ModeCoordinate | Expression], name: str) -> int:
    """Return the bits in use of the words called `name`; 31 for words that are read whole."""
    return max([f.shift + f.width for c in coordinates for f in c.fields if f.word.array == name], default=31)
