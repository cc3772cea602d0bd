"""Tile programs over tiles -> the text of a Triton function.

In: a tile program whose view has sides. Out: the lines of its function. A mode's coordinate is that of its tile times
the side, plus a position in the tile, which goes by the name ``side_<letter>``: an axis of the block, a loop's number
or range, or, for a kept mode that is not among the columns, a program of the grid. Positions of several letters at once
are numbered ``across`` (the columns of a dot) and ``along`` (what it sums).
"""

from __future__ import annotations

from functools import cached_property
from math import prod

from sparsetc.codegen import triton_bitmaps as bitmaps
from sparsetc.codegen.triton_coordinates import TritonCoordinates
from sparsetc.codegen.triton_function import ADDRESS64, FunctionPrinter
from sparsetc.ir import names
from sparsetc.ir.nest.axes import ITEM
from sparsetc.ir.tile import (
    Add,
    Decode,
    DenseAxis,
    Gather,
    Loop,
    Product,
    Row,
    Slot,
    Stored,
    Sum,
    Tile,
    Value,
)


class TileFunctionPrinter(FunctionPrinter):
    """Prints one part of tiles."""

    @property
    def half(self) -> bool:
        """Whether the values are stored in bfloat16."""
        return self.p.half and self.types.accumulate == "float32" and not self.types.widen

    # -- positions --------------------------------------------------------------------------------------------------
    def head(self) -> None:
        p = self.p
        rest = "pid"
        for axis in p.split:
            name = self.begin(axis.letter) if axis.letter in p.letters else names.block(axis.letter)
            times = f" * {axis.block}" if axis.letter in p.letters and axis.block > 1 else ""
            self.put(f"{name} = {rest} % {axis.programs}{times}")
            rest = f"({rest} // {axis.programs})"
        item = rest[1:-1] if rest.startswith("(") else rest
        self.put(f"item = ({item}).to(tl.int64)" if p.index64 else f"item = {item}")
        for axis in p.axes:
            self.axis_vector(axis)
        for s in self.values:
            for name, group in zip(("across", "along"), self.sides_of(s.out), strict=True):
                if len(group) > 1:
                    self.put(f"{name} = tl.arange(0, {self.positions(group)})")
            if p.stored(s.operand).tiles.bitmap:
                bitmaps.head(self, s)
        self.put(f"start = tl.load({p.arrays[0]} + item)")
        self.put(f"stop = tl.load({p.arrays[0]} + item + 1)")

    @property
    def values(self) -> list[Value]:
        """The statements that read stored values, one an operand."""
        return [s for s, _ in self.p.statements if isinstance(s, Value)]

    def axis_vector(self, axis: DenseAxis) -> None:
        if axis.letter in self.p.letters:
            if axis.letter in self.p.looped or (axis in self.p.split and axis.block == 1):
                return
            ahead = f"{self.begin(axis.letter)} + " if axis in self.p.split else ""
            self.put(
                f"{names.side(axis.letter)} = " + (f"{ahead}tl.arange(0, {axis.block})" if axis.block > 1 else "0")
            )
            return
        self.dense_axis(axis)

    def begin(self, letter: str) -> str:
        """The first position that a program, or a turn of a loop, has of a letter, which it has not all of at once."""
        return names.side(letter) if self.p.axis(letter).block == 1 else names.first(letter)

    def length(self, letter: str) -> int:
        """Positions of a tile along a letter."""
        return self.p.axis(letter).size

    def positions(self, letters: tuple[str, ...]) -> int:
        """Positions of several letters that a program has at once."""
        return prod(self.p.axis(c).block for c in letters)

    @staticmethod
    def sides_of(tile: Tile) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(letters of a matrix's rows, of its columns)."""
        return tile.axes[: tile.folded], tile.axes[tile.folded :]

    def padded(self, letter: str) -> bool:
        """Whether a program has positions of a letter that are past a tile's, at least in its last turn."""
        return self.p.axis(letter).ragged

    # -- loops ------------------------------------------------------------------------------------------------------
    def loop_blocks(self, s: Loop) -> None:
        self.put("for tile in range(start, stop):")
        self.first_values()
        self.nested(s)

    def first_values(self) -> None:
        """Where the values of the turn's tiles begin, of those stored as bitmaps."""
        self.indent += 1
        for s in self.values:
            if self.p.stored(s.operand).tiles.bitmap:
                bitmaps.first(self, s)
        self.indent -= 1

    def loop_steps(self, s: Loop) -> None:
        """A loop over a letter's positions; the innermost is unrolled, so that its loads overlap."""
        span, axis = self.span(s), self.p.axis(s.letter)
        if axis.block == 1:
            self.put(f"for {self.begin(s.letter)} in {span}({axis.size}):")
        else:
            self.put(f"for {self.begin(s.letter)} in {span}(0, {axis.size}, {axis.block}):")
        self.indent += 1
        if axis.block > 1:
            self.put(f"{names.side(s.letter)} = {self.begin(s.letter)} + tl.arange(0, {axis.block})")
        self.indent -= 1
        self.nested(s)

    def span(self, s: Loop) -> str:
        """The range of a loop over positions."""
        return "range" if any(isinstance(inner, Loop) for inner in s.body) else "tl.static_range"

    def nested(self, s: Loop) -> None:
        self.indent += 1
        for statement in s.body:
            self.statement(statement)
        self.indent -= 1

    # -- coordinates ------------------------------------------------------------------------------------------------
    def decode(self, s: Decode, u: str) -> None:
        """A tile's coordinate; or those along its side, and whether they lie inside the tile and the mode."""
        self.put(f"{s.name} = {s.coordinate.text(TritonCoordinates(self, s.level, u))}")
        if s.tile:
            return
        conditions = [f"({self.limit(s.letter)})"] if self.padded(s.letter) else []
        conditions += [f"({s.name} < {s.end})"] if s.end else []
        if conditions:
            text = " & ".join(conditions)
            self.put(f"{names.inside(s.letter)} = {text if len(conditions) > 1 else text[1:-1]}")

    def decoded(self, letter: str, level: int, u: str) -> str:
        return names.tile(letter)

    def valid(self, level: int, u: str) -> str:
        """Every tile of an item's holds something."""
        return ""

    @cached_property
    def ends(self) -> dict[str, int]:
        """The sizes of the modes whose ends coordinates may pass."""
        return {s.letter: s.end for s, _ in self.p.statements if isinstance(s, Decode) and s.end}

    def inside(self, letter: str, axes: tuple[str, ...]) -> str:
        """The condition that a coordinate is one of its tile and its mode; empty where all are."""
        if letter not in self.ends and not self.padded(letter):
            return ""
        return self.placed(names.inside(letter), (letter,) if letter in axes else (), axes, 1)

    # -- statements -------------------------------------------------------------------------------------------------
    def value(self, s: Value) -> None:
        stored = self.p.stored(s.operand)
        if stored.tiles.bitmap:
            bitmaps.value(self, s)
            return
        self.put(f"{s.out.name} = {self.whole(s, stored.array('values'))}{self.widened(s)}")

    def whole(self, s: Value, array: str) -> str:
        """What loads a tile of which all positions are stored."""
        stored = self.p.stored(s.operand)
        terms, mask = self.place(s)
        return self.load(array, " + ".join([f"{self.tile(stored)} * {stored.tiles.volume}", *terms]), mask)

    def tile(self, stored: Stored) -> str:
        """The number of an operand's tile, as addresses take it."""
        return f"{stored.array('tile')}.to(tl.int64)" if self.p.index64 else stored.array("tile")

    def widened(self, s: Value) -> str:
        """What brings values to the type of the sums, where they are not in it and must be."""
        return f".to({self.acc})" if self.types.widen and not self.half else ""

    def place(self, s: Value) -> tuple[list[str], str]:
        """(terms of the positions of a tile of values, the condition that they are of the tile)."""
        stored = self.p.stored(s.operand)
        groups = self.sides_of(s.out) if s.out.folded else tuple((c,) for c in s.out.axes)
        called = ("across", "along") if s.out.folded else s.out.axes
        axes = tuple(str(n) for n in range(len(groups)))
        terms, conditions = [], []
        for letter in stored.letters:  # positions that are the same for the whole tile of values
            if letter not in s.out.axes:
                terms.append(self.placed(names.side(letter), (), axes, stored.stride(letter)))
            elif self.apart(letter) and len(groups) == 2 and any(letter in g and len(g) > 1 for g in groups):
                terms.append(self.placed(self.begin(letter), (), axes, stored.stride(letter)))
        for axis, name, group in zip(axes, called, groups, strict=True):
            text, stride, limit = self.flat(stored, name, group)
            terms.append(self.placed(text, (axis,), axes, stride))
            conditions.append(self.placed(limit, (axis,), axes, 1) if limit else "")
        mask = " & ".join(c if c.startswith("(") else f"({c})" for c in conditions if c)
        return [t for t in terms if t], mask

    def apart(self, letter: str) -> bool:
        """Whether a program has a share of a letter's positions at once: by a loop, or by the grid."""
        return letter in self.p.looped or any(a.letter == letter for a in self.p.split)

    def flat(self, stored: Stored, name: str, letters: tuple[str, ...]) -> tuple[str, int, str]:
        """(positions of several letters as one number, its stride, the condition that they are of the tile)."""
        last = letters[-1]
        if len(letters) == 1:
            return names.side(last), stored.stride(last), self.limit(last)
        block = [self.p.axis(c).block for c in letters]
        within = [prod(block[n + 1 :]) for n in range(len(letters))]
        strides = [stored.stride(c) for c in letters]
        terms, limits = [], []
        for n, (letter, w, b, s) in enumerate(zip(letters, within, block, strides, strict=True)):
            text = f"{name} // {w}" if w > 1 else name
            text = f"{text} % {b}" if n else text
            terms.append(f"({text}) * {s}" if s > 1 else text)
            if self.padded(letter):
                begin = f"{self.begin(letter)} + " if self.apart(letter) else ""
                limits.append(f"{begin}{text} < {self.length(letter)}")
        limit = " & ".join(f"({own})" for own in limits) if len(limits) > 1 else "".join(limits)
        if all(s == w * strides[-1] for s, w in zip(strides, within, strict=True)):
            return name, strides[-1], limit
        return " + ".join(terms), 1, limit

    def limit(self, letter: str) -> str:
        """The condition that a letter's positions are of the tile; empty where all are."""
        return f"{names.side(letter)} < {self.length(letter)}" if self.padded(letter) else ""

    def gather(self, s: Gather, u: str) -> None:
        o, axes = s.operand, s.out.axes
        address64 = o.nrows * o.width >= ADDRESS64
        terms, conditions, stride = [], [], o.nrows * o.width
        for letter, extent in zip(o.rows, o.extents, strict=True):
            stride //= extent
            name = f"{names.at(letter)}.to(tl.int64)" if address64 else names.at(letter)
            terms.append(self.placed(name, (letter,) if letter in axes else (), axes, stride))
            conditions.append(self.inside(letter, axes))
        terms += self.columns(o.axes, axes)
        conditions += [self.placed(names.inside(c), (c,), axes, 1) for c in o.axes if self.p.axis(c).ragged]
        mask = " & ".join(c for c in conditions if c)
        widen = f".to({self.acc})" if self.types.widen else ""
        self.put(f"{s.out.name} = {self.load(o.name, ' + '.join(t for t in terms if t) or '0', mask)}{widen}")

    def sum(self, s: Sum) -> None:
        text, axes = self.unfolded(s.source, s.source.name), list(s.source.axes)
        for axis in [a for a in axes if a not in s.out.axes]:
            text = f"tl.sum({text}, {axes.index(axis)})"
            axes.remove(axis)
        self.put(f"{s.out.name} = {text}")

    def product(self, s: Product, u: str) -> None:
        if not s.dot:
            super().product(s, u)
            return
        rows, columns = self.sides_of(s.out)
        shared = tuple(a for a in s.right[0].axes if a not in s.out.axes)
        left, right = self.matrix(s.left, rows, shared), f"tl.trans({self.matrix(s.right, columns, shared)})"
        precision = self.p.precision if self.types.accumulate == "float32" else "ieee"
        how = "" if precision == "bf16" else f', input_precision="{precision}"'
        total = f", {s.out.name}" if s.accumulate else ""
        self.put(f"{s.out.name} = tl.dot({left}, {right}{total}{how}, out_dtype={self.acc})")

    def matrix(self, tiles: tuple[Tile, ...], rows: tuple[str, ...], columns: tuple[str, ...]) -> str:
        """A side of a dot: its factors' product, as a matrix."""
        (tile,) = tiles
        stored = tile.name == "x" and self.half
        cast = ".to(tl.bfloat16)" if self.p.precision == "bf16" and self.types.accumulate == "float32" else ""
        cast = "" if stored else cast
        if tile.folded == len(rows) and tile.axes == (*rows, *columns):
            return f"{tile.name}{cast}"
        text = self.times(tiles, "", (*rows, *columns))
        sizes = [self.positions(rows), self.positions(columns)]
        return (f"tl.reshape({text}, {sizes})" if len(rows) != 1 or len(columns) != 1 else text) + cast

    # -- results ----------------------------------------------------------------------------------------------------
    def add(self, s: Add, u: str) -> None:
        p = self.p
        value, axes = self.unfolded(s.source, s.source.name), list(s.source.axes)
        for axis in [a for a in axes if a not in s.axes and a not in p.letters]:
            value = f"tl.sum({value}, {axes.index(axis)})"
            axes.remove(axis)
        own = tuple(axes)
        terms, conditions = self.rows(s, own)
        stride = p.width
        for letter in s.axes:
            stride //= p.axis(letter).size
            name, limit = self.numbers(letter)
            terms.append(self.placed(name, (letter,), own, stride))
            conditions.append(self.placed(limit, (letter,), own, 1))
        mask = " & ".join(c for c in conditions if c)
        guard = f", mask={mask}" if mask else ""
        address = f"{p.output} + {' + '.join(t for t in terms if t) or '0'}"
        if s.owned:
            self.put(f"tl.store({address}, {value}{guard})")
        else:
            self.put(f'tl.atomic_add({address}, {value}{guard}, sem="relaxed")')

    def numbers(self, letter: str) -> tuple[str, str]:
        """(name of the numbers of an axis, the condition that they are of it): positions, of an axis of tiles."""
        if letter in self.p.letters:
            return names.side(letter), self.limit(letter)
        return names.at(letter), names.inside(letter) if self.p.axis(letter).ragged else ""

    def rows(self, s: Add, own: tuple[str, ...]) -> tuple[list[str], list[str]]:
        """(terms of the addresses of output rows, conditions), by the kind of the key."""
        if isinstance(s.key, Slot):
            return self.slots(s.key, own)
        if isinstance(s.key, Row):
            return self.output_rows(s.key, own)
        cast = ".to(tl.int64)" if self.p.rows * self.p.width >= ADDRESS64 else ""
        return [self.placed(f"item{cast}", (), own, self.p.width)], []

    def output_rows(self, key: Row, own: tuple[str, ...]) -> tuple[list[str], list[str]]:
        """(terms of a dense output's addresses, conditions) of the kept positions."""
        address64 = self.p.rows * self.p.width >= ADDRESS64
        terms, conditions = [], []
        for letter, stride in key.terms:
            name = f"{names.at(letter)}.to(tl.int64)" if address64 else names.at(letter)
            terms.append(self.placed(name, (letter,) if letter in own else (), own, stride * self.p.width))
            conditions.append(self.inside(letter, own))
        return terms, conditions

    def slots(self, key: Slot, own: tuple[str, ...]) -> tuple[list[str], list[str]]:
        """Terms and conditions of a sparse output, whose slots are stored a kept position; -1 is none."""
        p, kept = self.p, key.kept
        places = tuple(c for c in own if c in kept)
        sizes = [self.length(c) for c in kept]
        # Under the interpreter what a loop counts is a whole number of Python's.
        owner = "item.to(tl.int64)" if key.level == ITEM else "tl.cast(tile, tl.int64)"
        owner = "item" if p.index64 and key.level == ITEM else owner
        terms, conditions = [f"{owner} * {prod(sizes)}"], []
        for n, c in enumerate(kept):
            terms.append(self.placed(names.side(c), (c,) if c in places else (), places, prod(sizes[n + 1 :])))
            if self.padded(c):
                conditions.append(f"({self.placed(names.side(c), (c,), places, 1)} < {self.length(c)})")
        mask = f", mask={' & '.join(conditions)}, other=-1" if conditions else ""
        self.put(f"slot = tl.load({key.array} + {' + '.join(terms)}{mask})")
        cast = ".to(tl.int64)" if p.rows * p.width >= ADDRESS64 else ""
        rest = len(own) - len(places)
        index = f"[{', '.join(':' if a in places else 'None' for a in own)}]" if places and rest else ""
        times = f" * {p.width}" if p.width != 1 else ""
        return [f"slot{cast}{index}{times}"], [f"(slot >= 0){index}"]
