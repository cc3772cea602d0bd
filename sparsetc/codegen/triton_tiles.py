"""Tile programs over dense tiles -> the text of a Triton function.

In: a tile program whose view has sides. Out: the lines of its function. A mode's coordinate is that of its tile times
the side, plus a position in the tile: an axis of the block, a loop's number, or, for a kept mode beyond the dot's rows,
a program of the grid. All three go by the name ``<letter>_in``.
"""

from __future__ import annotations

from sparsetc.codegen.triton_function import WIDE, FunctionPrinter
from sparsetc.ir.tile import Add, Decode, DenseAxis, Gather, Loop, Product, Row, Sum, Tile, Value, walk
from sparsetc.ir.view import Field


class TileFunctionPrinter(FunctionPrinter):
    """Prints one part of dense tiles."""

    def head(self) -> None:
        p = self.p
        rest = "pid"
        for axis in p.split:
            name = f"{axis.letter}_in" if axis.letter in p.letters else f"{axis.letter}_block"
            self.put(f"{name} = {rest} % {axis.programs}")
            rest = f"({rest} // {axis.programs})"
        item = rest[1:-1] if rest.startswith("(") else rest
        self.put(f"item = ({item}).to(tl.int64)" if p.wide else f"item = {item}")
        for axis in p.axes:
            self.axis_vector(axis)
        self.put("start = tl.load(item_ptr + item)")
        self.put("stop = tl.load(item_ptr + item + 1)")

    def axis_vector(self, axis: DenseAxis) -> None:
        if axis.letter in self.p.letters:
            if axis.programs == 1 and not self.looped(axis.letter):
                self.put(f"{axis.letter}_in = tl.arange(0, {axis.block})")
            return
        base = f"{axis.letter}_block * {axis.block} + " if axis.programs > 1 else ""
        self.put(f"{axis.letter} = {base}tl.arange(0, {axis.block})")
        if axis.ragged:
            self.put(f"in_{axis.letter} = {axis.letter} < {axis.size}")

    def loop_blocks(self, s: Loop) -> None:
        self.put("for tile in range(start, stop):")
        self.nested(s)

    def loop_steps(self, s: Loop) -> None:
        """A loop over a letter's positions; the innermost is unrolled, so that its loads overlap."""
        innermost = not any(isinstance(inner, Loop) for inner in s.body)
        span = "tl.static_range" if innermost else "range"
        self.put(f"for {s.letter}_in in {span}({self.p.axis(s.letter).size}):")
        self.indent += 1
        self.coordinates(s.letter)
        self.indent -= 1
        self.nested(s)

    def nested(self, s: Loop) -> None:
        self.indent += 1
        for statement in s.body:
            self.statement(statement)
        self.indent -= 1

    def decode(self, s: Decode, u: str) -> None:
        c = s.coordinate
        assert isinstance(c, Field)  # a tile's coordinates are stored
        at = "item" if c in self.p.view.item else "tile"
        word = f"{c.array}_bits"
        if word not in self.words[s.level]:
            self.put(f"{word} = tl.load({c.array} + {at})")
            self.words[s.level].add(word)
        self.put(f"{s.letter}_tile = {c.expression(word)}")
        if not self.looped(s.letter):
            self.coordinates(s.letter)

    def value(self, s: Value) -> None:
        tile = "tile.to(tl.int64)" if self.p.wide else "tile"
        terms, stride = [f"{tile} * {self.p.view.volume}"], self.p.view.volume
        for letter, side in zip(self.p.letters, self.p.view.sides, strict=True):
            stride //= side
            if side > 1:
                terms.append(self.placed(f"{letter}_in", self.own(letter, s.out), s.out.axes, stride))
        widen = f".to({self.acc})" if self.types.widen else ""
        self.put(f"{s.out.name} = {self.load('values', ' + '.join(terms), '')}{widen}")

    @staticmethod
    def own(letter: str, tile: Tile) -> tuple[str, ...]:
        """The axis a letter's position is, where it is one of this tile's."""
        return (letter,) if letter in tile.axes else ()

    def coordinates(self, letter: str) -> None:
        """Put a mode's coordinates, and whether they lie inside it, once the tile's and the position's are known."""
        read = {c for o in self.p.operands for c in o.rows} | {c for c, _ in self.key.terms}
        if letter not in read:
            return
        mode = self.p.letters.index(letter)
        extent, side = self.p.extents[mode], self.p.view.sides[mode]
        self.put(f"{letter} = {letter}_tile * {side} + {letter}_in")
        if extent % side:
            self.put(f"in_{letter} = {letter} < {extent}")

    @property
    def key(self) -> Row:
        """The output's key."""
        key = next(s.key for s, _ in walk(self.p.body) if isinstance(s, Add))
        assert isinstance(key, Row)
        return key

    def inside(self, letter: str, axes: tuple[str, ...]) -> str:
        """The condition that a coordinate is not past its mode's end; empty where no tile reaches it."""
        mode = self.p.letters.index(letter)
        if self.p.extents[mode] % self.p.view.sides[mode] == 0:
            return ""
        return self.placed(f"in_{letter}", (letter,) if letter in axes else (), axes, 1)

    def looped(self, letter: str) -> bool:
        """Whether a letter's positions are taken one a turn."""
        return any(isinstance(s, Loop) and s.letter == letter for s, _ in walk(self.p.body))

    def gather(self, s: Gather, u: str) -> None:
        o, axes = s.operand, s.out.axes
        wide = o.nrows * o.width >= WIDE
        terms, conditions, stride = [], [], o.nrows * o.width
        for letter, extent in zip(o.rows, o.extents, strict=True):
            stride //= extent
            name = f"{letter}.to(tl.int64)" if wide else letter
            terms.append(self.placed(name, (letter,) if letter in axes else (), axes, stride))
            conditions.append(self.inside(letter, axes))
        for letter in o.axes:
            stride //= self.p.axis(letter).size
            terms.append(self.placed(letter, (letter,), axes, stride))
            conditions.append(self.placed(f"in_{letter}", (letter,), axes, 1) if self.p.axis(letter).ragged else "")
        mask = " & ".join(c for c in conditions if c)
        widen = f".to({self.acc})" if self.types.widen else ""
        self.put(f"{s.out.name} = {self.load(o.name, ' + '.join(t for t in terms if t) or '0', mask)}{widen}")

    def sum(self, s: Sum) -> None:
        text, axes = s.source.name, list(s.source.axes)
        text = self.unfolded(s.source, text)
        for axis in [a for a in axes if a not in s.out.axes]:
            text = f"tl.sum({text}, {axes.index(axis)})"
            axes.remove(axis)
        self.put(f"{s.out.name} = {text}")

    def product(self, s: Product, u: str) -> None:
        if not s.dot:
            super().product(s, u)
            return
        shared = next(a for a in s.right[0].axes if a not in s.out.axes)
        left = self.matrix(s.left, (*s.out.axes[: s.out.folded], shared))
        right = self.matrix(s.right, (shared, *s.out.axes[s.out.folded :]))
        if self.types.accumulate == "int64":  # no matrix instruction takes it
            text = f"tl.sum({left}[:, :, None] * {right}[None, :, :], 1)"
            self.put(f"{s.out.name} {'+=' if s.accumulate else '='} {text}")
            return
        precision = self.p.precision if self.types.accumulate == "float32" else "ieee"
        cast = ".to(tl.bfloat16)" if precision == "bf16" else ""
        how = "" if precision == "bf16" else f', input_precision="{precision}"'
        total = f", {s.out.name}" if s.accumulate else ""
        self.put(f"{s.out.name} = tl.dot({left}{cast}, {right}{cast}{total}{how}, out_dtype={self.acc})")

    def matrix(self, tiles: tuple[Tile, ...], axes: tuple[str, ...]) -> str:
        """A side of a dot as a matrix: its factors' product over `axes`, all but the shared one folded."""
        text = self.times(tiles, "", axes)
        text = f"({text})" if " * " in text else text
        if len(axes) == 2:
            return text
        sizes = [self.p.axis(a).block for a in axes]
        rows, cols = (sizes[:-1], sizes[-1:]) if axes[0] not in self.p.letters else (sizes[:1], sizes[1:])
        folded = [1, 1]
        for n in rows:
            folded[0] *= n
        for n in cols:
            folded[1] *= n
        return f"tl.reshape({text}, {folded})"

    def add(self, s: Add, u: str) -> None:
        p = self.p
        value, axes = self.unfolded(s.source, s.source.name), list(s.source.axes)
        for axis in [a for a in axes if a not in s.axes and a not in p.letters]:
            value = f"tl.sum({value}, {axes.index(axis)})"
            axes.remove(axis)
        own = tuple(axes)
        wide = p.rows * p.width >= WIDE
        terms, conditions = [], []
        for letter, stride in self.key.terms:
            name = f"{letter}.to(tl.int64)" if wide else letter
            terms.append(self.placed(name, (letter,) if letter in own else (), own, stride * p.width))
            conditions.append(self.inside(letter, own))
        stride = p.width
        for letter in s.axes:
            stride //= p.axis(letter).size
            terms.append(self.placed(letter, (letter,), own, stride))
            conditions.append(self.placed(f"in_{letter}", (letter,), own, 1) if p.axis(letter).ragged else "")
        mask = " & ".join(c for c in conditions if c)
        guard = f", mask={mask}" if mask else ""
        address = f"{p.output} + {' + '.join(t for t in terms if t) or '0'}"
        if s.owned:
            self.put(f"tl.store({address}, {value}{guard})")
        else:
            self.put(f'tl.atomic_add({address}, {value}{guard}, sem="relaxed")')
