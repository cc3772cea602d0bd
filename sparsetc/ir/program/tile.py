"""Level 3, WHAT ONE PROGRAM DOES: iterate, load, tile einsum, accumulate, over named axes.

In: what `ir.lower` derives from an einsum and a view. Out: read by `codegen` (Triton and torch), `ir.program.cost`
and the printer, all from the same statements. The grammar::

    program   := statement*                               # what one work item does; `item` is its number
    statement := coordinate = expression                  # of the item, the tile, a side of it, or the nonzero
               | tile = value | scale                     # stored values; powers of two that scale what is in halves
               | tile = gather operand[rows, axes]        # a row of a dense operand a lane, or one for the item
               | tile = zero                              # an accumulator
               | tile (+)= product tiles, multiply | dot  # the tile einsum and how it is contracted; or sum of a tile
               | loop axis { statement* }                 # tiles, pairs, blocks, steps, positions along a side
               | add | store output[key, axes] tile       # by atomics, or plainly where one item owns the row
    key       := row(coordinate*stride + …) | slot(array) | position   # the nonzero's, or the item's number

Axes are ``lane`` (what lies side by side in a step) and letters: of dense axes, or of positions along sides of tiles. A
pair of tiles is a pair of matrices: its axes are folds of letters, ``ij`` of i and j.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import ClassVar, Literal, TypeVar

import torch

from sparsetc.errors import PlanError
from sparsetc.ir.nest import ITEM, LANES, LEVELS, PAIRED, Axis, Expression, Nest
from sparsetc.ir.plan import ROUNDED, Schedule
from sparsetc.ir.program import names
from sparsetc.ir.program.operands import MADE, DenseAxis, Operand, Stored, tables
from sparsetc.support import Ints, Letters, NamedInts, Names, cached_property, row_major


@dataclass(frozen=True)
class Tile:
    """A value of the program: its name, its axes, and the level at which it is made.

    Attributes:
        folded: for the result of a dot, or of what torch makes of it: how many of the axes make up its rows; the others
            make up its columns.
    """

    name: str
    axes: Names
    level: int
    folded: int = 0

    @cached_property
    def within(self) -> Names:
        """The axes without the lanes."""
        return tuple(filter(LANES.__ne__, self.axes))

    def __str__(self) -> str:
        return f"{self.name}[{','.join(self.axes)}]" if self.axes else self.name


@dataclass(frozen=True)
class Decode:
    """``letter`` = the coordinate of one mode: a nonzero's, a tile's, or those along a tile's side.

    Attributes:
        tile: whether the coordinate is that of a whole tile.
        along: the letters along whose sides there is a coordinate for each position.
        end: the size of the mode, where coordinates may reach it, so that what they address is guarded; else 0.
    """

    letter: str
    coordinate: Expression
    level: int
    tile: bool = False
    along: Names = ()
    end: int = 0

    @cached_property
    def name(self) -> str:
        """The name of the coordinate."""
        return names.tile(self.letter) if self.tile else names.at(self.letter)


@dataclass(frozen=True)
class Value:
    """``out`` = the stored values, 1 for a pattern; of a task list, those of the tile of `operand` in the pair."""

    out: Tile
    operand: str = PAIRED[0]


@dataclass(frozen=True)
class Scale:
    """``out`` = a power of two that multiplies values of split fp16 dots.

    Of a task list those that bring back the rows of `operand`'s tiles, of the item's own. Of a dense operand that is
    made halves of one for each part that a step takes, which the coordinates of `rows` name. Elsewhere one for all of
    an operand, of stored values or dense, which brings it into the range of halves or back from it.
    """

    out: Tile
    operand: str
    into: bool = False
    rows: Names = ()


@dataclass(frozen=True)
class Gather:
    """``out`` = rows of a dense operand."""

    out: Tile
    operand: Operand


@dataclass(frozen=True)
class Zero:
    """``out`` = 0."""

    out: Tile


@dataclass(frozen=True)
class Product:
    """``out`` (+)= the product of the inputs; where `right` is not empty, a dot of both over what `out` lacks."""

    out: Tile
    left: tuple[Tile, ...]
    right: tuple[Tile, ...] = ()
    accumulate: bool = False

    @cached_property
    def inputs(self) -> tuple[Tile, ...]:
        """The factors of both sides."""
        return (*self.left, *self.right)

    @cached_property
    def dot(self) -> bool:
        """True if axes are contracted by a matrix product."""
        return bool(self.right)

    @cached_property
    def summed(self) -> Names:
        """The axes but the lanes that it sums, as dots do, and einsums of torch."""
        return tuple(dict.fromkeys(a for t in self.inputs for a in t.within if a not in self.out.axes))

    @cached_property
    def contracted(self) -> Names:
        """Return the axes of both sides that a dot contracts."""
        return tuple(dict.fromkeys(a for t in self.right for a in t.axes if a not in self.out.axes))


@dataclass(frozen=True)
class Reduce:
    """``out`` = `source` summed over the axes that `out` lacks: the lanes, or a tile's positions along a mode."""

    out: Tile
    source: Tile


@dataclass(frozen=True)
class Loop:
    """Over an axis: what an item takes in turn, or positions along a side of a tile."""

    axis: Axis
    body: tuple[Statement, ...] = ()


@dataclass(frozen=True)
class Key:
    """The row of the output to which a result is added: see the grammar.

    Attributes:
        kind: a sum of coordinates times strides; a number stored beside the coordinates, of tiles one for each position
            along the kept sides; or the position of the nonzero itself, or the item's number.
        level: the level at which the row is known.
        letters: of a row those whose coordinates say which it is; of a slot those along whose sides the positions of an
            item, or of a tile, are numbered; -1 says that one has no row.
        strides: of a row, one for each letter.
        array: of a slot, the numbers.
    """

    kind: Literal["row", "slot", "position"]
    level: int
    letters: Names = ()
    strides: Ints = ()
    array: str = ""


@dataclass(frozen=True)
class Add:
    """Sum the axes that the output lacks, then add into output[key, axes], or store there if `owned`.

    With several `copies` of the output, each work item adds to the next copy in turn.
    """

    source: Tile
    key: Key
    axes: Names
    owned: bool
    copies: int = 1


S = TypeVar("S")
Statement = Decode | Value | Scale | Gather | Zero | Product | Reduce | Loop | Add


@dataclass(frozen=True)
class TileProgram:
    """One part's program.

    Attributes:
        covers: whether it stores every row of the result, being products of whole tensors that a format made in its
            place.
        letters: the sparse operand's index letters, by mode.
        slot: name of the array of output slots, where the output is sparse.
        rows: rows of the output; with its width, this decides whether an address needs 64 bits.
        index64: whether the part stores so many nonzeros that their positions need 64 bits.
        at_once: whether torch runs it: no axis is split, and a product sums what nothing after it reads.
        sparse: the sparse operands, one, or the two of a task list.
        strides: of the rows of the output, and of its axes, where it does not lie as (rows, axes).
    """

    covers: ClassVar[bool] = False
    printed: ClassVar[Callable[[TileProgram], list[str]]]
    """`text.lines`, which reads the nodes defined here: it is put here by its module."""

    equation: str
    number: int
    format: str
    view: Nest
    letters: Names
    axes: tuple[DenseAxis, ...]
    operands: tuple[Operand, ...]
    output: str
    output_axes: Names
    body: tuple[Statement, ...]
    schedule: Schedule
    slot: str = ""
    rows: int = 1
    index64: bool = False
    at_once: bool = False
    sparse: tuple[Stored, ...] = ()
    strides: Ints = ()

    def __hash__(self) -> int:
        """Return a hash of a few fields: programs are looked up often, and most that agree in these are the same."""
        return hash((self.equation, self.number, self.format, self.axes, self.schedule))

    def axis(self, letter: str) -> DenseAxis:
        """The dense axis of a letter."""
        return self._axis[letter]

    @property
    def is_product(self) -> bool:
        """True if torch makes it by one product of two matrices, whose sums it keeps wide and rounds once."""
        return False

    def lines(self, dtype: torch.dtype) -> list[str]:
        """Return the text of the torch function of a program that covers the result, for operands of a type."""
        raise NotImplementedError

    @cached_property
    def _axis(self) -> dict[str, DenseAxis]:
        return {a.letter: a for a in self.axes}

    @cached_property
    def width(self) -> int:
        """Elements of one output row."""
        return self.elements(self.output_axes)

    def elements(self, letters: Letters) -> int:
        """Return the product of the sizes of axes."""
        return prod([self._axis[c].size for c in letters])

    def strided(self, letters: Names) -> NamedInts:
        """Return axes, each with how far apart neighbours along it lie where elements of the axes are contiguous."""
        return tuple(zip(letters, row_major([self._axis[c].size for c in letters]), strict=True))

    @cached_property
    def statements(self) -> tuple[tuple[Statement, int], ...]:
        """Every statement with its loop depth, outermost first."""
        return tuple(walk(self.body))

    def each(self, kind: type[S]) -> list[S]:
        """Return the statements of a kind."""
        return [s for s, _ in self.statements if isinstance(s, kind)]

    @cached_property
    def result(self) -> Add:
        """The addition to the output, which every program has one of."""
        return self.each(Add)[0]

    @cached_property
    def split(self) -> tuple[DenseAxis, ...]:
        """Axes split over the grid."""
        return tuple([a for a in self.axes if a.programs > 1 and a.letter not in self.looped])

    def blocks_of(self, operand: Operand) -> tuple[DenseAxis, ...]:
        """The axes of an operand that are split over the grid."""
        return tuple([a for a in self.split if a.letter in operand.axes])

    @cached_property
    def looped(self) -> frozenset[str]:
        """Letters of a tile whose positions a loop takes."""
        return frozenset([s.axis.letter for s in self.each(Loop) if s.axis.letter])

    @cached_property
    def along(self) -> frozenset[str]:
        """Letters of which it has positions along the sides of tiles."""
        return frozenset(a.letter for a in self.axes if a.letter in self.letters)

    @cached_property
    def read(self) -> dict[str, str]:
        """Return the name of the coordinate read for each letter: a nonzero's or a tile's, from which others follow."""
        return {s.letter: s.name for s in self.each(Decode) if not s.along}

    @cached_property
    def decodes(self) -> dict[str, Decode]:
        """Return by letter the statement that reads a coordinate of rows."""
        return {s.letter: s for s in self.each(Decode) if not s.tile}

    def read_along(self, letters: Names) -> Names:
        """The axes along which the coordinates of letters vary, as `Nest.read_along` gives them."""
        return self.view.read_along(self.letters, letters)

    def stored(self, operand: str) -> Stored:
        """Return a sparse operand by name. Raise `PlanError` if a task list has no operand of this name."""
        if operand not in PAIRED:
            raise PlanError(f"a task list has operands {', '.join(PAIRED)}, not {operand!r}")
        return self.sparse[PAIRED.index(operand)]

    def largest(self, s: Scale) -> str:
        """Return the name of the largest magnitudes that scale an operand, dense or stored."""
        dense = any(o.name == s.operand for o in self.operands)
        return names.most(s.operand) if dense else self.stored(s.operand).array("most")

    @property
    def arrays(self) -> Names:
        """The packed arrays a kernel of this program takes, in order."""
        return (*self.view.arrays, self.slot) if self.slot else self.view.arrays

    @cached_property
    def ends(self) -> dict[str, int]:
        """Sizes of the modes whose coordinates may reach them, by letter."""
        return {s.letter: s.end for s in self.each(Decode) if s.end}

    @cached_property
    def dots(self) -> tuple[Product, ...]:
        """The matrix products."""
        return tuple([s for s in self.each(Product) if (s.out.folded if self.at_once else s.dot)])

    @cached_property
    def narrow(self) -> frozenset[str]:
        """The loaded tiles that are used only as whole sides of dots with another such tile.

        Where operands are narrower than sums, these stay as narrow as they are.
        """
        statements = [s for s, _ in self.statements]
        loaded = {s.out.name for s in statements if isinstance(s, Gather | Value)}
        dots = [{t.name for t in s.inputs} for s in self.dots if len(s.left) == len(s.right) == 1]
        dots = [sides for sides in dots if sides <= loaded]
        read = [flow(s)[1] for s in statements if not (isinstance(s, Product) and {*flow(s)[1]} in dots)]
        wide = {name for names_read in read for name in names_read}
        while widened := {name for sides in dots if sides & wide for name in sides} - wide:
            wide |= widened  # both sides of a dot are of one type
        return frozenset().union(*dots) - wide

    @cached_property
    def half(self) -> bool:
        """True if values are stored in bfloat16: values of tiles that dots would cast to it anyway."""
        if self.view.pairs or self.schedule.precision != ROUNDED:
            return False
        stored = {s.out for s in self.each(Value) if s.out.within}
        return any(stored & {*d.inputs} for d in self.dots)

    def __repr__(self) -> str:
        return f'TileProgram("{self.equation}", part {self.number}: {self.format}, {self.view})'

    def __str__(self) -> str:
        return "\n".join(TileProgram.printed(self))


def walk(body: tuple[Statement, ...], depth: int = 0) -> list[tuple[Statement, int]]:
    """Every statement with its loop depth, outermost first."""
    statements: list[tuple[Statement, int]] = []
    for statement in body:
        statements += [(statement, depth), *(walk(statement.body, depth + 1) if isinstance(statement, Loop) else ())]
    return statements


def flow(s: Statement) -> tuple[str, Names, int]:
    """Return the data flow of a statement: the name it makes, the names it reads, and its level.

    What is no tile and no coordinate has an empty name.
    """
    match s:
        case Decode():
            return s.name, (), s.level
        case Loop():
            return "", (), s.axis.level
        case Add():
            return "", (s.source.name, *map(names.at, s.key.letters if s.key.kind == "row" else ())), s.key.level
        case Product():
            return s.out.name, tuple([t.name for t in s.inputs]), max([t.level for t in s.inputs], default=ITEM)
        case Reduce():
            return s.out.name, (s.source.name,), s.out.level
        case Gather():
            return s.out.name, tuple(map(names.at, s.operand.rows)), s.out.level
        case Scale():
            return s.out.name, tuple(map(names.at, s.rows)), s.out.level
    return s.out.name, (), s.out.level


def place(statements: Iterable[Statement], around: Sequence[Loop]) -> tuple[Statement, ...]:
    """Return the statements where they stand, with the loops around them and the zeros of their accumulators.

    - A computation stands at the depth where its inputs are known, inside as few loops as that takes. A coordinate is
      known at its level, a position along a tile in the loop that takes it, and a stored value inside all loops.
    - An accumulator is zeroed where it lives, before the loop that adds it up, and is read after that loop.
    - The computations of one depth keep their order. Those listed before an accumulation that lives there stand before
      the loop, and the others after it.

    Args:
        statements: in an order of data flow, without loops and zeros. A product that accumulates makes an accumulator,
            which lives at the level of its tile.
        around: the loops, outermost first.

    Raises:
        PlanError: a statement reads what none before it makes, or what is complete only after a loop that the
            statement stands in, or adds up over no loop.
    """
    before = defaultdict[int, list[Statement]](list)  # inside the first n loops
    zeros = defaultdict[int, list[Statement]](list)
    after = defaultdict[int, list[Statement]](list)
    turn = {loop.axis.letter: n + 1 for n, loop in enumerate(around) if loop.axis.letter}
    levels = [loop.axis.level for loop in around]
    loops_around = [sum(map(level.__ge__, levels)) for level in range(len(LEVELS))]
    depths = dict[str, int]()  # the depth at which each name is known
    late = set[str]()  # names that are known only after the loop at their depth
    for statement in statements:
        output, inputs, level = flow(statement)
        name = output or "add"
        if unknown := {*inputs} - depths.keys():
            raise PlanError(f"{name}: {', '.join(sorted(unknown))} is not made before it")
        turns = [turn.get(c, 0) for c in statement.along] if isinstance(statement, Decode) else ()
        depth = max([loops_around[level], *turns, *map(depths.__getitem__, inputs)])
        for read in late.intersection(inputs):
            if depths[read] < depth:
                raise PlanError(f"{name} stands in a loop after which {read} is complete")
        behind = bool(zeros[depth])
        (after if behind else before)[depth].append(statement)
        if isinstance(statement, Product) and statement.accumulate:
            home = loops_around[statement.out.level]
            if home >= depth:
                raise PlanError(f"{statement.out} adds up over no loop: what it adds is known where it lives")
            if Zero(statement.out) not in zeros[home]:
                zeros[home].append(Zero(statement.out))
            depth, behind = home, True
        depths[name] = depth
        late |= {name} if behind else set()
    body: tuple[Statement, ...] = ()
    for n in reversed(range(len(around) + 1)):
        inside = (replace(around[n], body=body),) if n < len(around) else ()
        body = (*before[n], *zeros[n], *inside, *after[n])
    return body


def tables_of(programs: Sequence[TileProgram]) -> list[tuple[int, str]]:
    """Return the tables of a launch of several programs: (number of a dense operand, which of `MADE`), in order.

    An operand that some programs have cast goes in both forms.
    """
    each = zip(*[map(tables, p.operands) for p in programs], strict=True)
    return [(n, made) for n, by_program in enumerate(each) for made in MADE if made in chain(*by_program)]
