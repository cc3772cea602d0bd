"""Level 3, WHAT ONE PROGRAM DOES: iterate, load, tile einsum, accumulate, over named axes.

In: what `ir.lower` derives from an einsum and a view. Out: read by `codegen` (Triton and torch), `ir.cost` and the
printer, all from the same statements. The grammar::

    program   := statement*                               # what one work item does; `item` is its number
    statement := coordinate = decode word                 # one mode's coordinate, at the item, lane or leaf level
               | tile = value                             # the nonzeros' own values, or 1 where none are stored; of
                                                          # a pair, one operand's tile
               | tile = scale                             # of a pair's operand in halves: what its rows are worth
               | tile = gather operand[rows, axes]        # a row of a dense operand per lane, or one for the item
               | tile = zero                              # an accumulator
               | tile (+)= product tiles, multiply | dot  # the tile einsum and how it is contracted
               | tile = sum lanes of tile               # before what the lanes share is multiplied in
               | loop blocks | steps | pairs { statement* }
               | add | store output[key, axes] tile       # by atomics, or plainly where one item owns the row
    key       := row(coordinate*stride + …) | slot(array) | position   # the nonzero's, or the item's number

Axes are ``lane`` (the nonzeros or fibers taken side by side) and the einsum's own letters for the dense axes. An axis
that the output lacks is summed once, at the end, unless a dot contracts it on the way. A pair of tiles is a pair of
matrices: its axes are folds of letters, ``ij`` of i and j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from sparsetc.errors import PlanError
from sparsetc.ir import names
from sparsetc.ir.nest.coordinates import Expression
from sparsetc.ir.nest.readable import Readable
from sparsetc.ir.plan import F16X3
from sparsetc.ir.view import ITEM, LANE, LEAF, LEVELS, PAIRED, Tiles, View

LANES = "lane"
MOST_ELEMENTS = 1 << 20
"""Elements of the largest tensor that a Triton program may have."""


@dataclass(frozen=True)
class DenseAxis:
    """An axis only dense operands have (a rank): its size, and the block one program takes of it."""

    letter: str
    size: int
    block: int
    fold: tuple[tuple[str, int], ...] = ()
    """The letters that an axis of a pair of tiles is a fold of, and how many positions of each, row-major."""
    pieces: tuple[int, ...] = ()
    """Powers of two that add up to the block, where a program takes it in several vectors; empty for one."""

    @cached_property
    def programs(self) -> int:
        """Grid programs the axis is split over."""
        return -(-self.size // self.block)

    @property
    def ragged(self) -> bool:
        """Whether the last block reaches past the end."""
        return self.size % self.block != 0

    @cached_property
    def vectors(self) -> tuple[tuple[int, int, bool], ...]:
        """What a program has of the axis: the first place in its block, the length, and whether it may pass the end."""
        if not self.pieces:
            return ((0, self.block, self.ragged),)
        ends = list(accumulate(self.pieces))
        last = (self.programs - 1) * self.block
        return tuple((end - n, n, last + end > self.size) for n, end in zip(self.pieces, ends, strict=True))


@dataclass(frozen=True)
class Operand:
    """A dense operand, stored contiguously as (sparse letters, then dense letters)."""

    name: str
    position: int
    rows: tuple[str, ...]
    extents: tuple[int, ...]
    axes: tuple[str, ...]
    width: int
    """Elements of one row: the product of the sizes of `axes`."""

    @cached_property
    def nrows(self) -> int:
        """Rows of the table."""
        return prod(self.extents)


@dataclass(frozen=True)
class Stored:
    """A sparse operand as a `Value` reads it: its letters by mode, and how its tiles, if it has any, are stored."""

    name: str
    """Empty where it is the only one."""
    letters: tuple[str, ...]
    tiles: Tiles

    def array(self, name: str) -> str:
        """What one of its arrays, or a variable of its own, is called."""
        return f"{self.name}_{name}" if self.name else name

    def stride(self, letter: str) -> int:
        """How far apart a letter's positions are stored."""
        return self.tiles.strides[self.letters.index(letter)]


@dataclass(frozen=True)
class Tile:
    """A value of the program: its name, its axes, and the level at which it is made."""

    name: str
    axes: tuple[str, ...]
    level: int
    folded: int = 0
    """For the result of a dot: how many of the axes make up its rows; the others make up its columns."""

    def __str__(self) -> str:
        return f"{self.name}[{','.join(self.axes)}]" if self.axes else self.name


@dataclass(frozen=True)
class Decode:
    """``letter`` = the coordinate of one mode."""

    letter: str
    coordinate: Expression
    level: int


@dataclass(frozen=True)
class Value:
    """``out`` = the stored values, 1 where the view is a pattern; of a task list, those of the tile that the pair names
    of `operand`.
    """

    out: Tile
    operand: str = PAIRED[0]


@dataclass(frozen=True)
class Scale:
    """``out`` = by what the rows of `operand`'s tiles in halves are to be multiplied, those of the item's tiles."""

    out: Tile
    operand: str


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
    """``out`` (+)= the product of the inputs; where `right` is not empty, a dot of `left` and it over the lanes."""

    out: Tile
    left: tuple[Tile, ...]
    right: tuple[Tile, ...] = ()
    accumulate: bool = False

    @cached_property
    def inputs(self) -> tuple[Tile, ...]:
        """All factors."""
        return (*self.left, *self.right)

    @cached_property
    def dot(self) -> bool:
        """Whether the lanes are contracted by a matrix product."""
        return bool(self.right)


@dataclass(frozen=True)
class Sum:
    """``out`` = `source` summed over the axes that `out` lacks: the lanes, or a tile's positions along a mode."""

    out: Tile
    source: Tile


@dataclass(frozen=True)
class Loop:
    """Over the blocks, tiles or pairs of an item (level LANE), the steps of a block or of an item (level LEAF), or the
    positions of a tile along `letter`.
    """

    level: int
    body: tuple[Statement, ...]
    letter: str = ""


@dataclass(frozen=True)
class Row:
    """The output row: a sum of coordinates times strides."""

    terms: tuple[tuple[str, int], ...]
    level: int


@dataclass(frozen=True)
class Slot:
    """The output row: a number stored beside the coordinates."""

    array: str
    level: int


@dataclass(frozen=True)
class Position:
    """The output row: the position of the nonzero itself, or, at the item level, the item's number."""

    level: int = LEAF


Key = Row | Slot | Position


@dataclass(frozen=True)
class Add:
    """Sum the axes that the output lacks, then add (or store, where `owned`) into output[key, axes]."""

    source: Tile
    key: Key
    axes: tuple[str, ...]
    owned: bool


Statement = Decode | Value | Scale | Gather | Zero | Product | Sum | Loop | Add


@dataclass(frozen=True)
class TileProgram:
    """One part's program."""

    equation: str
    number: int
    format: str
    view: View
    letters: tuple[str, ...]
    """The sparse operand's index letters, by mode."""
    axes: tuple[DenseAxis, ...]
    operands: tuple[Operand, ...]
    output: str
    output_axes: tuple[str, ...]
    body: tuple[Statement, ...]
    unroll: int
    masked_unroll: int
    warps: int
    stages: int
    precision: str
    slot: str = ""
    """Name of the array of output slots, where the output is sparse."""
    rows: int = 1
    """Rows of the output; with its width, this decides whether an address needs 64 bits."""
    extents: tuple[int, ...] = ()
    """Sizes of the sparse operand's modes, where tiles may reach past them."""
    index64: bool = False
    """Whether the part stores so many nonzeros that their positions need 64 bits."""
    terms: tuple[tuple[str, ...], ...] = ()
    """Letters of each operand of a task list, by mode; empty without one."""

    def axis(self, letter: str) -> DenseAxis:
        """The dense axis of a letter."""
        return next(a for a in self.axes if a.letter == letter)

    @cached_property
    def width(self) -> int:
        """Elements of one output row."""
        return prod(self.axis(letter).size for letter in self.output_axes)

    @cached_property
    def statements(self) -> tuple[tuple[Statement, int], ...]:
        """Every statement with its loop depth, outermost first."""
        return tuple(walk(self.body))

    @cached_property
    def split(self) -> tuple[DenseAxis, ...]:
        """Axes split over the grid."""
        return tuple(a for a in self.axes if a.programs > 1 and a.letter not in self.looped)

    @cached_property
    def looped(self) -> frozenset[str]:
        """Letters of a tile whose positions a loop takes."""
        return frozenset(s.letter for s, _ in self.statements if isinstance(s, Loop) and s.letter)

    def stored(self, operand: str) -> Stored:
        """A sparse operand by its name; PlanError where the task list has none of that name."""
        if not self.view.pairs:
            return Stored("", self.letters, self.view)
        if operand not in PAIRED:
            raise PlanError(f"a task list has operands {', '.join(PAIRED)}, not {operand!r}")
        number = PAIRED.index(operand)
        return Stored(operand, self.terms[number], self.view.pairs[number])

    @property
    def arrays(self) -> tuple[str, ...]:
        """The packed arrays a kernel of this program takes, in order."""
        return (*self.view.arrays, self.slot) if self.slot else self.view.arrays

    @cached_property
    def dots(self) -> tuple[Product, ...]:
        """Its matrix products."""
        return tuple(s for s, _ in self.statements if isinstance(s, Product) and s.dot)

    @cached_property
    def half(self) -> bool:
        """Whether its values are stored in bfloat16: those of tiles, where dots would round them to it anyway."""
        return bool(self.view.sides) and self.precision == "bf16" and bool(self.dots)

    def __repr__(self) -> str:
        return f'TileProgram("{self.equation}", part {self.number}: {self.format}, {self.view})'

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def walk(body: tuple[Statement, ...], depth: int = 0) -> list[tuple[Statement, int]]:
    """Every statement with its loop depth, outermost first."""
    found: list[tuple[Statement, int]] = []
    for statement in body:
        found.append((statement, depth))
        if isinstance(statement, Loop):
            found += walk(statement.body, depth + 1)
    return found


def reads(s: Statement) -> tuple[str, ...]:
    """The names of the tiles and coordinates that a statement takes as inputs."""
    if isinstance(s, Product):
        return tuple(t.name for t in s.inputs)
    if isinstance(s, Sum):
        return (s.source.name,)
    if isinstance(s, Gather):
        return tuple(map(names.at, s.operand.rows))
    if isinstance(s, Add):
        letters = [letter for letter, _ in s.key.terms] if isinstance(s.key, Row) else []
        return (s.source.name, *map(names.at, letters))
    return ()


def made(s: Statement) -> str:
    """The name of what a statement makes; empty where that is no tile and no coordinate."""
    if isinstance(s, Decode):
        return names.at(s.letter)
    return "" if isinstance(s, Loop | Add) else s.out.name


def level_of(s: Statement) -> int:
    """The level at which a statement is executed."""
    if isinstance(s, Product):
        return max((t.level for t in s.inputs), default=ITEM)
    if isinstance(s, Add):
        return s.key.level
    return s.level if isinstance(s, Loop | Decode) else s.out.level


def verify(program: TileProgram) -> None:
    """Raise `PlanError` naming the statement that reads what was not made, or adds what it should not."""
    scopes: list[set[str]] = []  # what has been made so far, by loop: what a loop makes is gone after it
    adds = 0
    for statement, depth in program.statements:
        del scopes[depth + 1 :]
        scopes += [set() for _ in range(depth + 1 - len(scopes))]
        inputs = reads(statement)
        if isinstance(statement, Product):
            if statement.accumulate:
                inputs += (statement.out.name,)
            if statement.dot and (LANES in statement.out.axes or not statement.out.folded):
                raise PlanError(f"{statement.out}: a dot contracts the lanes and folds the other axes in two")
            summed = {a for t in statement.inputs for a in t.axes} - set(statement.out.axes)
            if summed - ({LANES, *program.letters} if statement.dot else set()):
                raise PlanError(f"{statement.out}: a product sums no axis (a dot: the lanes), found {sorted(summed)}")
        elif isinstance(statement, Add):
            adds += 1
            missing = set(statement.axes) - set(statement.source.axes)
            if missing:
                raise PlanError(f"add of {statement.source}: it has no axis {', '.join(sorted(missing))}")
        elif isinstance(statement, Sum):
            summed = set(statement.source.axes) - set(statement.out.axes)
            if not summed or not summed <= {LANES, *program.letters}:
                raise PlanError(
                    f"{statement.out}: a sum of {statement.source} is over the lanes, or a tile's positions"
                )
        elif isinstance(statement, Decode):
            c = statement.coordinate
            lacking = [lookup.array for lookup in c.lookups if lookup.array not in program.view.arrays]
            if lacking:
                raise PlanError(f"decode {statement.letter}: the view has no array {lacking[0]!r}")
            inputs = tuple(names.at(program.letters[mode]) for mode in c.modes)
        unknown = [name for name in inputs if not any(name in scope for scope in scopes)]
        if unknown:
            raise PlanError(f"{_line(program, statement).strip()}: {', '.join(unknown)} is not made before it")
        scopes[depth].add(made(statement))
    if adds != 1:
        raise PlanError(f"a tile program adds to its output once, found {adds}")
    if program.view.pairs:
        _verify_pairs(program)
    elif program.precision == F16X3:
        raise PlanError(f"{F16X3} multiplies halves, which only the tiles of a task list are stored in")


def check_sizes(p: TileProgram) -> None:
    """Raise `PlanError` where a tile of the program holds more elements than Triton's tensors may (`MOST_ELEMENTS`)."""
    for statement, _ in p.statements:
        if not isinstance(statement, Value | Gather | Zero | Product | Sum):
            continue
        tiles = (statement.out, *(statement.inputs if isinstance(statement, Product) else ()))
        for tile in tiles:
            elements = prod(p.view.lanes if a == LANES else p.axis(a).block for a in tile.axes)
            if elements > MOST_ELEMENTS:
                raise PlanError(
                    f'part {p.number} ({p.format}) of "{p.equation}": {tile} would hold {elements:,} elements, and a '
                    f"program's tile at most {MOST_ELEMENTS:,}; give the schedule smaller blocks"
                )


def _verify_pairs(p: TileProgram) -> None:
    """Raise `PlanError` unless tiles are read whole, in the loop over pairs, and blocks are stored at their items."""
    if [len(term) for term in p.terms] != [len(tiles.sides) for tiles in p.view.pairs]:
        raise PlanError(f"the operands {p.terms} do not have the modes of {p.view}")
    for operand in map(p.stored, PAIRED):
        sizes = tuple(p.axis(c).size for c in operand.letters)
        if sizes != operand.tiles.sides:
            raise PlanError(f"{operand.name}: a tile has {operand.tiles.sides} positions, its axes have {sizes}")
        if operand.tiles.halves != (p.precision == F16X3) or (operand.tiles.halves and not p.dots):
            raise PlanError(f"{operand.name}: tiles in halves are multiplied by dots in {F16X3}, and only they")
    loops: list[Loop] = []
    for statement, depth in p.statements:
        del loops[depth:]
        if isinstance(statement, Loop):
            loops.append(statement)
        elif isinstance(statement, Value):
            letters = p.stored(statement.operand).letters
            taken = [*statement.out.axes, *(loop.letter for loop in loops if loop.letter in letters)]
            if not any(loop.level == LANE for loop in loops) or sorted(taken) != sorted(letters):
                raise PlanError(
                    f"{statement.out}: in the loop over pairs, a tile of {statement.operand} is read along "
                    f"{', '.join(letters)}, each an axis or a loop; found {', '.join(taken) or 'none'}"
                )
        elif isinstance(statement, Scale):
            own = p.stored(statement.operand)
            if not own.tiles.halves or loops or statement.out.axes != own.letters[:1]:
                raise PlanError(
                    f"{statement.out}: scales are of the rows of tiles in halves, and the same for all pairs"
                )
        elif isinstance(statement, Add) and (statement.key != Position(ITEM) or not statement.owned):
            raise PlanError(f"{_line(p, statement).strip()}: a block of the result is stored at its item's number")


def _lines(p: TileProgram) -> list[str]:
    head = f'tile program  "{p.equation}"  part {p.number}: {p.format}, {p.view}'
    axes = ", ".join(map(_axis, p.axes))
    over = f"chunks of {p.view.chunk}" if p.view.chunk else "pair_ptr" if p.view.pairs else "item_ptr"
    lines = [head, f"  item over {over}"]
    if axes:
        lines.append(f"  axes {axes}")
    return [*lines, *("  " * (depth + 1) + _line(p, s) for s, depth in p.statements)]


def _axis(a: DenseAxis) -> str:
    if a.fold:
        letters = " ".join(f"{c}:{n}" for c, n in a.fold)
        return f"{a.letter} = {a.size}" + (f" ({letters})" if len(a.fold) > 1 else "")
    blocks = f" in blocks of {a.block}" if a.programs > 1 else ""
    return f"{a.letter} = {a.size}{blocks}" + (f" as {' + '.join(map(str, a.pieces))}" if a.pieces else "")


def _line(p: TileProgram, s: Statement) -> str:
    if isinstance(s, Loop):
        if s.letter:
            block = p.axis(s.letter).block
            return f"loop {s.letter} in the tile" + (f", {block} at a time" if block > 1 else "")
        if p.view.sides or p.view.pairs:
            return f"loop {'tiles' if p.view.sides else 'pairs'} of the item"
        return (
            "loop blocks of the item"
            if s.level == LANE
            else f"loop steps of {p.view.lanes} lanes, {p.unroll} at a time"
        )
    if isinstance(s, Decode):
        lanes = "" if s.level == ITEM or p.view.sides else "[lane]"
        return f"{_decoded(p)(s.letter)}{lanes} = {_coordinate(p, s)}"
    if isinstance(s, Value):
        if not p.view.pairs:
            return f"{s.out} = {'1' if p.view.pattern else 'load X.values'}"
        how = "expand" if p.stored(s.operand).tiles.bitmap else "load"
        halves = "  # high and low parts" if p.stored(s.operand).tiles.halves else ""
        return f"{s.out} = {how} {s.operand.upper()}.tile[pair_{s.operand}]{halves}"
    if isinstance(s, Scale):
        return f"{s.out} = load {s.operand.upper()}.scale[item_{s.operand}]"
    if isinstance(s, Gather):
        how = "gather" if s.operand.rows else "load"
        return f"{s.out} = {how} {s.operand.name}[{', '.join((*map(names.at, s.operand.rows), *s.operand.axes))}]"
    if isinstance(s, Zero):
        return f"{s.out} = 0"
    if isinstance(s, Sum):
        return f"{s.out} = sum {', '.join(a for a in s.source.axes if a not in s.out.axes)} of {s.source.name}"
    if isinstance(s, Product):
        spec = ",".join("".join(_short(a) for a in t.axes) for t in s.inputs) + "->" + "".join(map(_short, s.out.axes))
        factors = ", ".join(t.name for t in s.inputs)
        shared = [a for t in s.right for a in t.axes if a not in s.out.axes]
        over = shared if p.view.sides or p.view.pairs else ["the lanes"]
        how = f"dot over {', '.join(over)}, {p.precision}" if s.dot else "multiply"
        return f'{s.out} {"+=" if s.accumulate else "="} einsum "{spec}" {factors}  # {how}'
    key = s.key
    if isinstance(key, Row):
        terms = [(names.at(letter), stride) for letter, stride in key.terms]
        row = " + ".join(f"{at}*{stride}" if stride != 1 else at for at, stride in terms) or "0"
    else:
        row = key.array if isinstance(key, Slot) else "item" if key.level == ITEM else "position"
    keyed = {letter for letter, _ in key.terms} if isinstance(key, Row) else set()
    late = [a for a in s.source.axes if a not in {*s.axes, *keyed} and not (a == LANES and key.level != ITEM)]
    summed = f"  # {', '.join(late)} summed here, once" if late else ""
    return f"{'store' if s.owned else 'add'} {p.output}[{', '.join((row, *s.axes))}] {s.source}{summed}"


def _decoded(p: TileProgram) -> Callable[[str], str]:
    """The name of what is decoded for a letter: the tile's coordinate, where there are tiles."""
    return names.tile if p.view.sides else names.at


def _coordinate(p: TileProgram, s: Decode) -> str:
    level = "tile" if p.view.sides and s.level == LANE else LEVELS[s.level]
    notes = [f"{field.width} bits, {level}" for field in s.coordinate.fields]
    notes += [f"a base every {lookup.every}" for lookup in s.coordinate.lookups if lookup.every > 1]
    text = s.coordinate.text(Readable([*map(_decoded(p), p.letters)], p.view.axes[s.level]))
    return f"{text}  # {', '.join(notes)}" if notes else text


def _short(axis: str) -> str:
    if axis == LANES:
        return "n"
    return "" if "_" in axis else axis  # an axis that stands for no letter
