"""A tile program over runs or blocks -> the text of one Triton function.

In: a tile program and the types it runs in. Out: the lines of a function of its program number, named as the
program's statements are. `codegen.triton` puts functions together to a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from sparsetc.codegen.triton_coordinates import TritonCoordinates
from sparsetc.ir import names
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF
from sparsetc.ir.tile import (
    LANES,
    Add,
    Decode,
    DenseAxis,
    Gather,
    Loop,
    Position,
    Product,
    Row,
    Scale,
    Slot,
    Statement,
    Sum,
    Tile,
    TileProgram,
    Value,
    Zero,
)
from sparsetc.ir.view import WHOLE

ADDRESS64 = 2**31


@dataclass(frozen=True)
class Types:
    """Element types of a program: how sums are kept, and whether what is loaded must be widened to that."""

    accumulate: str
    """``float32``, ``float64`` or ``int64``."""
    widen: bool
    """The operands are narrower than the sums."""
    popcount: bool = False
    """The target counts bits by an instruction of PTX; elsewhere, and under the interpreter, shifts and masks do."""


def signature(head: str, args: list[str], tail: str) -> list[str]:
    """A head and its arguments in parentheses, over as many lines as it takes."""
    one = f"{head}({', '.join(args)}){tail}"
    if len(one) <= 112:
        return [one]
    lines, line = [f"{head}("], "    "
    for arg in args:
        if len(line) + len(arg) > 110:
            lines.append(line.rstrip())
            line = "    "
        line += f"{arg}, "
    return [*lines, line.rstrip(), f"){tail}"]


def by(stride: int) -> str:
    """The third argument of a range."""
    return f", {stride}" if stride != 1 else ""


class FunctionPrinter:
    """Prints one tile program as a Triton function of its program number."""

    def __init__(self, program: TileProgram, types: Types) -> None:
        self.p, self.types = program, types
        self.acc = f"tl.{types.accumulate}"
        self.out: list[str] = []
        self.indent = 1
        self.masked = False
        self.copies = 1
        self.vector = 0
        """The vector of an axis in pieces that a statement is printed for."""
        self.words: tuple[set[str], ...] = (set(), set(), set())
        """Words loaded so far in the scope of each level."""

    # -- text -------------------------------------------------------------------------------------------------------
    def put(self, text: str) -> None:
        self.out.append("    " * self.indent + text)

    def lines(self) -> list[str]:
        p = self.p
        count = ["nonzeros"] if p.view.chunk else []
        arguments = ["pid", *count, *p.arrays, *(o.name for o in p.operands), p.output]
        self.head()
        for statement in p.body:
            self.statement(statement)
        comment = ["# " + line for line in str(p).splitlines()]
        return [*comment, "@triton.jit", *signature(f"def part_{p.number}", arguments, ":"), *self.out]

    def head(self) -> None:
        p = self.p
        rest = "pid"
        for axis in p.split:
            self.put(f"{names.block(axis.letter)} = {rest} % {axis.programs}")
            rest = f"({rest} // {axis.programs})"
        item = rest if rest == "pid" else rest[1:-1]  # the outermost parentheses
        self.put(f"item = ({item}).to(tl.int64)" if p.index64 else f"item = {item}")
        self.put(f"lane = tl.arange(0, {p.view.lanes})")
        for axis in p.axes:
            self.dense_axis(axis)
        if p.view.chunk == WHOLE:
            self.put("start = 0")
            self.put("stop = nonzeros")
        elif p.view.chunk:
            self.put(f"start = item * {p.view.chunk}")
            self.put(f"stop = tl.minimum(start + {p.view.chunk}, nonzeros)")
        else:
            self.put("start = tl.load(item_ptr + item)")
            self.put("stop = tl.load(item_ptr + item + 1)")

    def dense_axis(self, axis: DenseAxis) -> None:
        """The positions of a dense axis that the program takes, and which of them it has."""
        base = f"{names.block(axis.letter)} * {axis.block} + " if axis.programs > 1 else ""
        for _ in self.vectors((axis.letter,)):
            first, length, ragged = self.vector_of(axis.letter)
            at, ahead = self.at(axis.letter), f"{first} + " if first else ""
            self.put(f"{at} = {base}{ahead}tl.arange(0, {length})")
            if ragged:
                self.put(f"{self.within(axis.letter)} = {at} < {axis.size}")

    # -- axes in pieces ---------------------------------------------------------------------------------------------
    def pieced(self, axes: Iterable[str]) -> DenseAxis | None:
        """The one of these axes that is in pieces, if one is."""
        return next((self.p.axis(a) for a in axes if a != LANES and self.p.axis(a).pieces), None)

    def piece(self, axes: Iterable[str]) -> str:
        """Suffix of what has an axis in pieces: the place at which the vector begins, none for the first."""
        own = self.pieced(axes) if self.vector else None
        return f"_{own.vectors[self.vector][0]}" if own else ""

    def at(self, letter: str) -> str:
        """The positions of a dense axis."""
        return names.at(letter) + self.piece((letter,))

    def within(self, letter: str) -> str:
        """The condition that a position of a dense axis is within its size."""
        return names.inside(letter) + self.piece((letter,))

    def named(self, tile: Tile, u: str) -> str:
        """What a tile is called in a copy of its statement."""
        return f"{tile.name}{self.piece(tile.axes)}{u if tile.level == LEAF else ''}"

    def vectors(self, axes: Iterable[str]) -> Iterator[None]:
        """The vectors that a statement over these axes is printed for, each while it is the one at hand."""
        own = self.pieced(axes)
        for self.vector in range(len(own.pieces) if own else 1):
            yield
        self.vector = 0

    def vector_of(self, axis: str) -> tuple[int, int, bool]:
        """The vector at hand of an axis: its first place, its length, whether it may pass the end."""
        own = self.p.axis(axis)
        return own.vectors[self.vector if own.pieces else 0]

    # -- statements -------------------------------------------------------------------------------------------------
    def statement(self, s: Statement) -> None:
        if isinstance(s, Loop):
            self.loop_blocks(s) if s.level == LANE else self.loop_steps(s)
        elif isinstance(s, Decode):
            for u in self.each(s.level):
                self.decode(s, u)
        elif isinstance(s, Value):
            self.value(s)
        elif isinstance(s, Gather):
            for _ in self.vectors(s.out.axes):
                for u in self.each(s.out.level):
                    self.gather(s, u)
        elif isinstance(s, Scale):
            self.scale(s)
        elif isinstance(s, Zero):
            for _ in self.vectors(s.out.axes):
                self.put(f"{self.named(s.out, '')} = tl.zeros({self.shape(s.out)}, {self.acc})")
        elif isinstance(s, Sum):
            self.sum(s)
        elif isinstance(s, Product):
            for _ in self.vectors(s.out.axes):
                for u in self.each(max(t.level for t in s.inputs) if s.accumulate else s.out.level):
                    self.product(s, u)
        else:
            for _ in self.vectors(s.source.axes):
                for u in self.each(s.key.level):
                    self.add(s, u)

    def each(self, level: int) -> list[str]:
        """Suffixes of the copies a statement is printed for: one a step taken together."""
        if level != LEAF or self.copies == 1:
            return [""]
        return [f"_{n}" for n in range(self.copies)]

    def loop_blocks(self, s: Loop) -> None:
        lanes = self.p.view.lanes
        self.put("for block in range(start, stop):")
        self.indent += 1
        self.put("first = tl.load(block_ptr + block)")
        self.put(f"steps = (tl.load(block_ptr + block + 1) - first) // {lanes}")
        self.put("full = tl.load(block_full + block)")
        self.put(f"fiber = block * {lanes} + lane")
        self.put("length = tl.load(lane_len + fiber)")
        self.words[LANE].clear()
        for statement in s.body:
            self.statement(statement)
        self.indent -= 1

    def loop_steps(self, s: Loop) -> None:
        """Whole groups of steps without a mask, then the rest with one."""
        lanes, unroll, masked = self.p.view.lanes, self.p.unroll, self.p.masked_unroll
        stride = lanes * unroll
        if self.p.view.blocks:
            self.steps(s, f"for step in range(0, full{by(unroll)}):", masked=False)
            self.steps(s, f"for step in range(full, steps{by(masked)}):", masked=True)
        else:
            self.put(f"full = start + (stop - start) // {stride} * {stride}")
            self.steps(s, f"for first in range(start, full, {stride}):", masked=False)
            self.steps(s, f"for first in range(full, stop{by(lanes * masked)}):", masked=True)

    def steps(self, s: Loop, head: str, masked: bool) -> None:
        lanes, blocks = self.p.view.lanes, self.p.view.blocks
        self.put(head)
        self.indent += 1
        self.masked, self.copies = masked, self.p.masked_unroll if masked else self.p.unroll
        self.words[LEAF].clear()
        for n, u in enumerate(self.each(LEAF)):
            ahead = f" + {n * lanes}" if n else ""
            self.put(f"pos{u} = first + step * {lanes}{ahead} + lane" if blocks else f"pos{u} = first{ahead} + lane")
            if masked:
                self.put(f"ok{u} = {f'step + {n}' if n else 'step'} < length" if blocks else f"ok{u} = pos{u} < stop")
        for statement in s.body:
            self.statement(statement)
        self.masked, self.copies = False, 1
        self.indent -= 1

    def value(self, s: Value) -> None:
        for u in self.each(LEAF):
            if self.p.view.pattern:
                ones = f"ok{u}.to({self.acc})" if self.masked else f"tl.full([{self.p.view.lanes}], 1, {self.acc})"
                self.put(f"{s.out.name}{u} = {ones}")
                continue
            widen = f".to({self.acc})" if self.types.widen else ""
            self.put(f"{s.out.name}{u} = {self.load('values', f'pos{u}', self.valid(LEAF, u))}{widen}")

    def scale(self, s: Scale) -> None:
        raise AssertionError("scales are of tiles in halves, which task lists alone pair")

    def sum(self, s: Sum) -> None:
        for _ in self.vectors(s.source.axes):
            self.put(f"{self.named(s.out, '')} = tl.sum({self.named(s.source, '')}, 0)")

    def decode(self, s: Decode, u: str) -> None:
        text = s.coordinate.text(TritonCoordinates(self, s.level, u))
        self.put(f"{self.decoded(s.letter, s.level, u)} = {text}")

    def decoded(self, letter: str, level: int, u: str) -> str:
        """The name of what is decoded for a letter."""
        return self.coordinate(letter, level, u)

    def coordinate(self, letter: str, level: int, u: str) -> str:
        """The name a coordinate goes by in a statement of `level`."""
        own = self.p.view.level_of(self.p.letters.index(letter))
        return f"{names.at(letter)}{u}" if own == LEAF else names.at(letter)

    def gather(self, s: Gather, u: str) -> None:
        o, level = s.operand, s.out.level
        address64 = o.nrows * o.width >= ADDRESS64
        terms = [
            self.placed(
                self.row(o.rows, o.extents, level, u, address64), (LANES,) if level != ITEM else (), s.out.axes, o.width
            )
        ]
        terms += self.columns(o.axes, s.out.axes)
        mask = self.mask(s.out.axes, self.valid(level, u) if o.rows else "", level)
        widen = f".to({self.acc})" if self.types.widen else ""
        address = " + ".join(t for t in terms if t) or "0"
        self.put(f"{self.named(s.out, u)} = {self.load(o.name, address, mask)}{widen}")

    def row(self, rows: tuple[str, ...], extents: tuple[int, ...], level: int, u: str, address64: bool) -> str:
        """Row number from coordinates; a lane's coordinate is a vector, an item's a scalar."""
        text = ""
        for letter, extent in zip(rows, extents, strict=True):
            name = self.coordinate(letter, level, u)
            name = f"{name}.to(tl.int64)" if address64 else name
            text = f"({text}) * {extent} + {name}" if " + " in text else f"{text} * {extent} + {name}" if text else name
        return text

    def placed(self, name: str, own: tuple[str, ...], axes: tuple[str, ...], stride: int) -> str:
        """A term of an address: `name` laid out over `axes`, times its stride."""
        if not name:
            return ""
        expanded = name
        if len(axes) > 1 and own:
            index = ", ".join(":" if a in own else "None" for a in axes)
            expanded = f"({name})[{index}]" if " " in name else f"{name}[{index}]"
        elif " " in name and stride != 1:
            expanded = f"({name})"
        return expanded if stride == 1 else f"{expanded} * {stride}"

    def columns(self, own: tuple[str, ...], axes: tuple[str, ...]) -> list[str]:
        """Terms of an address: the place in a row over its `own` axes, laid out over `axes`."""
        sizes = [self.p.axis(letter).size for letter in own]
        strides = [prod(sizes[n + 1 :]) for n in range(len(own))]
        return [self.placed(self.at(c), (c,), axes, stride) for c, stride in zip(own, strides, strict=True)]

    def limit(self, letter: str) -> str:
        """The condition that the positions that a program has of a tile's side are of the tile; empty where all are."""
        return ""

    def valid(self, level: int, u: str) -> str:
        """The condition under which a lane of this level holds something."""
        if level == LEAF:
            return f"ok{u}" if self.masked else ""
        return "length > 0" if level == LANE else ""

    def mask(self, axes: tuple[str, ...], lanes: str, level: int) -> str:
        conditions = []
        if lanes and level != ITEM:
            conditions.append(self.placed(lanes, (LANES,), axes, 1))
        conditions += [self.placed(self.within(a), (a,), axes, 1) for a in axes if a != LANES and self.vector_of(a)[2]]
        return " & ".join(f"({c})" if " " in c and not c.startswith("(") else c for c in conditions)

    @staticmethod
    def load(pointer: str, at: str, mask: str) -> str:
        return f"tl.load({pointer} + {at}, mask={mask}, other=0)" if mask else f"tl.load({pointer} + {at})"

    def shape(self, tile: Tile) -> str:
        sizes = [self.p.view.lanes if a == LANES else self.vector_of(a)[1] for a in tile.axes]
        if tile.folded:
            sizes = [prod(sizes[: tile.folded]), prod(sizes[tile.folded :])]
        return f"[{', '.join(map(str, sizes))}]"

    def unfolded(self, tile: Tile, name: str) -> str:
        return (
            f"tl.reshape({name}, {self.shape(Tile('', tile.axes, 0))})" if tile.folded and len(tile.axes) > 2 else name
        )

    def factor(self, tile: Tile, u: str, axes: tuple[str, ...]) -> str:
        """A factor laid out over `axes`."""
        name = self.unfolded(tile, self.named(tile, u))
        order = [a for a in axes if a in tile.axes]
        if tuple(order) != tile.axes:
            name = f"tl.permute({name}, {tuple(tile.axes.index(a) for a in order)})"
        if len(order) == len(axes) or not order:
            return name
        return f"{name}[{', '.join(':' if a in order else 'None' for a in axes)}]"

    def times(self, tiles: tuple[Tile, ...], u: str, axes: tuple[str, ...]) -> str:
        # Small factors first: they are multiplied together before they are spread over the larger tile.
        return " * ".join(self.factor(t, u, axes) for t in sorted(tiles, key=lambda t: len(t.axes)))

    def product(self, s: Product, u: str) -> None:
        name = self.named(s.out, u)
        if s.dot:
            left = self.side(s.left, s.contracted, s.out.axes[: s.out.folded], u)
            right = self.side(s.right, s.contracted, s.out.axes[s.out.folded :], u)
            if self.types.accumulate == "int64":  # no matrix unit multiplies 64-bit integers
                sums = "+=" if s.accumulate else "="
                self.put(f"{name} {sums} tl.sum(({left})[:, :, None] * ({right})[:, None, :], 0)")
                return
            precision = self.p.precision if self.types.accumulate == "float32" else "ieee"
            cast = ".to(tl.bfloat16)" if precision == "bf16" else ""
            how = "" if precision == "bf16" else f', input_precision="{precision}"'
            total = f", {name}" if s.accumulate else ""
            self.put(f"{name} = tl.dot(tl.trans({left}){cast}, {right}{cast}{total}{how}, out_dtype={self.acc})")
            return
        self.put(f"{name} {'+=' if s.accumulate else '='} {self.times(s.inputs, u, s.out.axes)}")

    def side(self, tiles: tuple[Tile, ...], over: tuple[str, ...], axes: tuple[str, ...], u: str) -> str:
        """One side of a dot: the product of its factors over (what is contracted, the other axes), each folded."""
        text = self.times(tiles, u, (*over, *axes))
        text = f"({text})" if " * " in text else text
        if len(over) == len(axes) == 1:
            return text
        return f"tl.reshape({text}, [{', '.join(str(prod(map(self.taken, own))) for own in (over, axes))}])"

    def taken(self, axis: str) -> int:
        """Positions of an axis that a program has at once."""
        return self.p.view.lanes if axis == LANES else self.p.axis(axis).block

    def add(self, s: Add, u: str) -> None:
        p, key = self.p, s.key
        value, axes = (
            self.unfolded(s.source, self.named(s.source, u)),
            list(s.source.axes),
        )
        per_lane = key.level != ITEM
        for axis in [a for a in axes if a not in s.axes and not (a == LANES and per_lane)]:
            value = f"tl.sum({value}, {axes.index(axis)})"
            axes.remove(axis)
        if per_lane and LANES not in axes:
            raise AssertionError("a result keyed by the lane has a lane axis")
        address64 = p.rows * p.width >= ADDRESS64
        at = ("item", "fiber", f"pos{u}")[key.level]
        if isinstance(key, Row):
            row = " + ".join(
                (
                    f"{self.coordinate(c, key.level, u)}{'.to(tl.int64)' if address64 else ''}"
                    + (f" * {n}" if n != 1 else "")
                )
                for c, n in key.terms
            )
            # A coordinate shared by the item is a scalar; the address still needs the lane axis when another is not.
        else:
            row = at if isinstance(key, Position) else self.load(key.array, at, self.valid(key.level, u))
            row = f"{row}.to(tl.int64)" if address64 and isinstance(key, Slot) else row
        terms = [self.placed(row, (LANES,) if per_lane else (), tuple(axes), p.width)]
        terms += self.columns(s.axes, tuple(axes))
        mask = self.mask(tuple(axes), self.valid(key.level, u), key.level)
        address = f"{p.output} + " + (" + ".join(t for t in terms if t) or "0")
        guard = f", mask={mask}" if mask else ""
        if s.owned:
            self.put(f"tl.store({address}, {value}{guard})")
        else:
            self.put(f'tl.atomic_add({address}, {value}{guard}, sem="relaxed")')
