"""Tiles laid out over axes -> the text of Triton's tensors: indices, shapes, addresses and conditions.

In: a tile program. Out: text. An axis of a tile is a dimension of a tensor, or, of a tile with folds, one of several
that are numbered together. Positions along several sides at once are numbered ``across`` (the columns of a dot) and
``along`` (what it sums). Coordinates are loads of words, once a scope, and of what is looked up besides, under the
lanes' masks. A statement is printed once for each step taken together, and for each vector of a split axis: one
copy and one vector are at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from math import prod

from sparsetc.ir.nest import AXIS_LEVEL, LANE, LEAF, OPERATORS, Bits, Lookup, Writer, word_bits
from sparsetc.ir.plan import F16X3
from sparsetc.ir.program import LANES, DenseAxis, Gather, Lines, Product, Tile, TileProgram, Value, flow, names
from sparsetc.support import Names, among, outside

ADDRESS64 = 2**31
"""Elements from which on an array's addresses take 64 bits."""


class TritonLayout(Writer, Lines):
    """The text of one tile program as a Triton function, and what it says of the axes of the program's tiles.

    Attributes:
        acc: Triton's type of the sums.
        widen: the text that brings what is loaded to the type of the sums.
        halves: whether dots multiply halves.
        half: whether the values are stored in bfloat16.
        apart: letters of a tile of which a program has a share of the positions at once, by a loop or by the grid.
        copies: how many steps are taken together.
        copy: suffix of the copy at hand of a statement.
        vector: the vector at hand of a split axis.
        level: of the coordinate that is written.
        words: words loaded so far in the scope of each level.
        values: the statements that read stored values, one an operand.
        decodes: by letter, the statement that reads the coordinate which addresses rows.
        bf16: the gathered tiles that stay rounded: those that are whole sides of dots in bfloat16, and nothing else.
        in_halves: the gathered tiles that are loaded in halves.
        narrow: the loaded tiles that stay in the 16-bit type of the operands.
        spanned: axes of which stored values have several positions at once.
        written: the dense axes that every result has. What tiles hold past the end of such an axis only meets the guard
            of a write. So reads of it go around to the row's first elements, which cost nothing more, and are not
            guarded themselves (H200: MTTKRP of rank 25 is 1.3 to 1.6 times as fast, `benchmarks/results/ranks.json`).
    """

    def __init__(self, program: TileProgram, sums: str, widen: bool) -> None:
        """Set the program, Triton's type of its sums, and whether operands must be widened to it."""
        Lines.__init__(self)
        self.p = program
        self.acc = sums
        self.widen = f".to({sums})" if widen else ""
        self.halves = program.schedule.precision == F16X3
        self.half = program.half and sums == "tl.float32" and not widen
        self.apart = program.looped | {axis.letter for axis in program.split}
        self.copies = 1
        self.copy = ""
        self.vector = 0
        self.level = LEAF
        self.masked = False
        self.words: tuple[set[str], ...] = (set(), set(), set())
        statements = [s for s, _ in program.statements]
        self.values = program.each(Value)
        self.decodes = program.decodes
        self.spanned = frozenset(a for s in self.values for a in s.out.axes)
        self.bf16 = {s.out.name for s in program.each(Gather) if s.operand.rounded}
        for s in statements:
            sides = (s.left, s.right) if isinstance(s, Product) and s.dot else ()
            self.bf16 -= {*flow(s)[1]} - {side[0].name for side in sides if len(side) == 1}
        self.in_halves = {s.out for s in program.each(Gather) if s.operand.halves}
        self.narrow = program.narrow if widen and sums == "tl.float32" else frozenset()
        self.written = frozenset(program.result.axes)

    # -- copies and guards ------------------------------------------------------------------------------------------
    def each(self, level: int) -> Iterator[int]:
        """The copies a statement is printed for, each while it is the one at hand: one a step taken together."""
        several = level == LEAF and self.copies > 1
        for n in range(self.copies if several else 1):
            self.copy = f"_{n}" if several else ""
            yield n
        self.copy = ""

    def copied(self, axes: Names, level: int) -> Iterator[int]:
        """Yield for each copy of a statement over these axes, for every vector of a split axis."""
        for _ in self.vectors(axes):
            yield from self.each(level)

    def guard(self, level: int) -> str:
        """The condition under which a lane of this level holds something; empty where all do."""
        if level == LEAF:
            return f"ok{self.copy}" if self.masked else ""
        return "length > 0" if level == LANE and self.p.view.beside[level] else ""

    def inside(self, letter: str, axes: Names) -> str:
        """The condition that a coordinate is one of its tile and its mode, laid out over axes; empty where all are."""
        decode = self.decodes[letter]
        guarded = decode.end or any(self.p.axis(c).ragged for c in decode.along)
        return placed(names.inside(letter), self.own((letter,), axes), axes) if guarded else ""

    def own(self, letters: Names, axes: Names, level: int = LANE) -> Names:
        """The axes on which a coordinate depends: positions along a side, or the lanes, below the item."""
        sides = chain.from_iterable(self.decodes[c].along if c in self.decodes else (c,) for c in letters)
        return (*self.p.view.beside[level], *dict.fromkeys(filter(axes.__contains__, sides)))

    # -- split axes ------------------------------------------------------------------------------------------------
    def split_axis(self, axes: Names) -> DenseAxis | None:
        """Return the axis among these that is split into vectors, if there is one."""
        return next((self.p.axis(a) for a in axes if a != LANES and self.p.axis(a).lengths), None)

    def vector_suffix(self, axes: Names) -> str:
        """Return the suffix of a variable along a split axis: the place of the vector's begin, empty for the first."""
        axis = self.split_axis(axes) if self.vector else None
        return f"_{axis.vectors[self.vector][0]}" if axis else ""

    def vectors(self, axes: Names) -> Iterator[None]:
        """Yield once for each vector of a statement over these axes, with the vector selected meanwhile."""
        axis = self.split_axis(axes)
        for self.vector in range(len(axis.lengths) if axis else 1):
            yield
        self.vector = 0

    def vector_of(self, axis: str) -> tuple[int, int, bool]:
        """The vector at hand of an axis: its first place, its length, whether it may pass the end."""
        dense_axis = self.p.axis(axis)
        return dense_axis.vectors[self.vector if dense_axis.lengths else 0]

    # -- positions --------------------------------------------------------------------------------------------------
    def at(self, letter: str) -> str:
        """The positions of a dense axis, or along a side of a tile."""
        return names.side(letter) if letter in self.p.letters else names.at(letter) + self.vector_suffix((letter,))

    def within(self, letter: str) -> str:
        """The condition that the positions of an axis are within its size; empty where all are."""
        if not self.vector_of(letter)[2]:
            return ""
        return self.limit(letter) if letter in self.p.letters else names.inside(letter) + self.vector_suffix((letter,))

    def limit(self, letter: str) -> str:
        """Return the condition that positions along a side lie inside the tile; empty if all do."""
        axis = self.p.axis(letter)
        return f"{names.side(letter)} < {axis.size}" if axis.ragged else ""

    def begin(self, letter: str) -> str:
        """Return the first position of a program, or of a loop step, along a side that is taken in blocks."""
        if letter not in self.p.letters:
            return f"{names.block(letter)} * {self.p.axis(letter).block}"
        return names.side(letter) if self.p.axis(letter).block == 1 else names.first(letter)

    def positions(self, letters: Names) -> int:
        """Positions along several sides that a program has at once."""
        return prod(self.p.axis(c).block for c in letters)

    # -- tensors ----------------------------------------------------------------------------------------------------
    def size(self, axis: str) -> int:
        """The length of a dimension."""
        return self.p.view.lanes if axis == LANES else self.vector_of(axis)[1]

    def shape(self, tile: Tile) -> list[int]:
        """Return the shape of a tile, or of a matrix if its axes are folded in two."""
        sizes = [self.size(a) for a in tile.axes]
        return [prod(sizes[: tile.folded]), prod(sizes[tile.folded :])] if tile.folded else sizes

    def widened(self, tile: Tile) -> str:
        """The text that brings a loaded tile to the type of the sums; empty where dots take it as it is."""
        return "" if tile.name in self.narrow else self.widen

    def unfolded(self, tile: Tile, name: str) -> str:
        """A tile with a dimension for each of its axes."""
        folds = tile.folded and len(tile.axes) > 2
        return f"tl.reshape({name}, {[self.size(a) for a in tile.axes]})" if folds else name

    def named(self, tile: Tile) -> str:
        """Return the tile's variable name, with the number of its vector and of the statement's copy."""
        return f"{tile.name}{self.vector_suffix(tile.axes)}{self.copy if tile.level == LEAF else ''}"

    def factor(self, tile: Tile, axes: Names) -> str:
        """A factor laid out over `axes`."""
        name = self.unfolded(tile, self.named(tile))
        order = among(axes, tile.axes)
        if order != tile.axes:
            name = f"tl.permute({name}, {tuple([tile.axes.index(a) for a in order])})"
        if len(order) == len(axes) or not order:
            return name
        return f"{name}[{', '.join(':' if a in order else 'None' for a in axes)}]"

    def times(self, tiles: Sequence[Tile], axes: Names) -> str:
        """The product of factors; small ones are multiplied together before they are spread over the larger tile."""
        return " * ".join(self.factor(t, axes) for t in sorted(tiles, key=lambda t: len(t.axes)))

    def summed(self, tile: Tile, left: Names) -> tuple[str, Names]:
        """Return (text of the tile summed over all axes not in `left`, its remaining axes)."""
        text, axes = self.unfolded(tile, self.named(tile)), list(tile.axes)
        for axis in outside(axes, left):
            text = f"tl.sum({text}, {axes.index(axis)})"
            axes.remove(axis)
        return text, among(tile.axes, left)

    # -- addresses --------------------------------------------------------------------------------------------------
    def rows(self, strides: Iterable[tuple[str, int]], axes: Names, level: int, elements: int) -> list[str]:
        """Return the terms of the address of rows; terms that depend on the same axes are added first.

        Args:
            strides: the letters whose coordinates say which rows these are, and what each is multiplied by.
            axes: of the address.
            level: of the statement.
            elements: of the array.
        """
        cast, laid_out = ".to(tl.int64)" if elements >= ADDRESS64 else "", []
        for depends_on, group in groupby(strides, key=lambda term: self.own((term[0],), axes, level)):
            text, before = "", 0
            for letter, stride in group:
                copy = self.copy if self.decodes[letter].level == LEAF else ""
                name = f"{names.at(letter)}{copy}{cast}"
                if text and before % stride:  # further apart than the letter before it: a term of its own
                    laid_out.append(placed(text, depends_on, axes, before))
                    text = ""
                text = f"({text})" if " + " in text else text
                text = f"{text} * {before // stride} + {name}" if text else name
                before = stride
            laid_out.append(placed(text, depends_on, axes, before))
        return laid_out

    def address(self, terms: Iterable[str], columns: Names, axes: Names, strides: Sequence[int] = ()) -> str:
        """An address laid out over `axes`: terms of its row, and the place in the row over its `columns`."""
        each = zip(columns, strides, strict=True) if strides else self.p.strided(columns)
        within = [placed(self.at(c), (c,), axes, stride) for c, stride in each]
        return " + ".join(filter(None, (*terms, *within))) or "0"

    # -- coordinates ------------------------------------------------------------------------------------------------
    def position(self, axis: str) -> str:
        return f"pos{self.copy}" if axis == "nonzero" else axis

    def coordinate(self, mode: int) -> str:
        return f"{self.p.read[self.p.letters[mode]]}{self.copy if self.p.view.level_of(mode) == LEAF else ''}"

    def along(self, mode: int) -> str:
        return names.side(self.p.letters[mode])

    def bits(self, bits: Bits) -> tuple[str, str]:
        return bits.operations(self.lookup(bits.word))

    def lookup(self, lookup: Lookup) -> str:
        levels = [*map(AXIS_LEVEL.__getitem__, lookup.axes), *map(self.p.view.level_of, lookup.modes)]
        within = [self.limit(self.p.letters[mode]) for mode in sorted(lookup.sides)]
        mask = all_of([self.guard(min(max(levels, default=0), self.level)), *within])
        at = lookup.where.text(self, OPERATORS["+"][0] + 1)  # as an operand of a sum
        text = load(lookup.array, at, mask)
        if lookup.every != 1:
            return text
        word, words = f"{lookup.array}_bits{self.copy}", self.words[self.level]
        if word not in words:
            words.add(word)
            # Words of 16 bits, which only leaf words are stored in, are decoded as 32.
            narrow = self.level == LEAF and word_bits(self.p.view.levels[2], lookup.array) <= 16
            self.put(f"{word} = {text}{'.to(tl.int32)' if narrow else ''}")
        return word


def sides_of(tile: Tile) -> tuple[Names, Names]:
    """(axes of a matrix's rows, of its columns)."""
    return tile.axes[: tile.folded], tile.axes[tile.folded :]


def placed(name: str, own: Names, axes: Names, stride: int = 1) -> str:
    """A term of an address: what has its `own` axes laid out over `axes`, times its stride."""
    if not name:
        return ""
    expanded = name
    if len(axes) > 1 and own:
        index = ", ".join([":" if a in own else "None" for a in axes])
        expanded = f"({name})[{index}]" if " " in name else f"{name}[{index}]"
    elif " " in name and stride != 1:
        expanded = f"({name})"
    return expanded if stride == 1 else f"{expanded} * {stride}"


def all_of(conditions: Iterable[str]) -> str:
    """Join conditions by "and"; empty if there are none."""
    each = [c for c in conditions if c]
    if len(each) < 2:
        return "".join(each)
    return " & ".join(f"({c})" if " < " in c or " > " in c else c for c in each)


def load(pointer: str, at: str, mask: str = "") -> str:
    """The text of a load of an array's elements, 0 where they are masked."""
    return f"tl.load({pointer} + {at}, mask={mask}, other=0)" if mask else f"tl.load({pointer} + {at})"
