"""Tiles laid out over axes -> the text of Triton's tensors: indices, shapes, addresses and conditions.

In: a tile program. Out: text. An axis of a tile is a dimension of a tensor, or, of a tile with folds, one of several
that are numbered together. Positions along several sides at once are numbered ``across`` (the columns of a dot) and
``along`` (what it sums). Coordinates are loads of words, once a scope, and of what is looked up besides, under the
lanes' masks. An axis in pieces is taken by several vectors, of which one is at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

from sparsetc.ir.nest.coordinates import AXIS_LEVEL, OPERATORS, Lookup, Writer, word_bits
from sparsetc.ir.nest.nest import LEAF
from sparsetc.ir.program import names
from sparsetc.ir.program.operands import Stored
from sparsetc.ir.program.tile import LANES, Add, DenseAxis, Tile, TileProgram, Value
from sparsetc.support.lru import cached_property

if TYPE_CHECKING:
    from sparsetc.codegen.triton import TritonPrinter


ADDRESS64 = 2**31
"""Elements from which on an array's addresses take 64 bits."""


class Layout:
    """What a printer says of the axes of a program's tiles.

    Attributes:
        vector: the vector of an axis in pieces that a statement is printed for.
    """

    def __init__(self, program: TileProgram) -> None:
        self.p = program
        self.vector = 0

    @cached_property
    def written(self) -> frozenset[str]:
        """The dense axes that every result has.

        What tiles hold past the end of such an axis only meets the guard of a write. So reads of it go around to the
        row's first elements, which cost nothing more, and are not guarded themselves (H200: MTTKRP of rank 25 is 1.3
        to 1.6 times as fast, `benchmarks/results/ranks.json`).
        """
        return frozenset.intersection(*(frozenset(s.axes) for s, _ in self.p.statements if isinstance(s, Add)))

    # -- axes in pieces ---------------------------------------------------------------------------------------------
    def pieced(self, axes: Iterable[str]) -> DenseAxis | None:
        """The one of these axes that is in pieces, if one is."""
        return next((self.p.axis(a) for a in axes if a != LANES and self.p.axis(a).pieces), None)

    def piece(self, axes: Iterable[str]) -> str:
        """Suffix of what has an axis in pieces: the place at which the vector begins, none for the first."""
        axis = self.pieced(axes) if self.vector else None
        return f"_{axis.vectors[self.vector][0]}" if axis else ""

    def vectors(self, axes: Iterable[str]) -> Iterator[None]:
        """The vectors that a statement over these axes is printed for, each while it is the one at hand."""
        axis = self.pieced(axes)
        for self.vector in range(len(axis.pieces) if axis else 1):
            yield
        self.vector = 0

    def vector_of(self, axis: str) -> tuple[int, int, bool]:
        """The vector at hand of an axis: its first place, its length, whether it may pass the end."""
        dense_axis = self.p.axis(axis)
        return dense_axis.vectors[self.vector if dense_axis.pieces else 0]

    # -- positions --------------------------------------------------------------------------------------------------
    def at(self, letter: str) -> str:
        """The positions of a dense axis, or along a side of a tile."""
        return names.side(letter) if letter in self.p.letters else names.at(letter) + self.piece((letter,))

    def within(self, letter: str) -> str:
        """The condition that the positions of an axis are within its size; empty where all are."""
        if not self.vector_of(letter)[2]:
            return ""
        return self.limit(letter) if letter in self.p.letters else names.inside(letter) + self.piece((letter,))

    def limit(self, letter: str) -> str:
        """The condition that positions along a side of a tile are of the tile; empty where all are."""
        axis = self.p.axis(letter)
        return f"{names.side(letter)} < {axis.size}" if axis.ragged else ""

    def apart(self, letter: str) -> bool:
        """Whether a program has a share of the positions along a side at once: by a loop, or by the grid."""
        return letter in self.p.looped or any(a.letter == letter for a in self.p.split)

    def begin(self, letter: str) -> str:
        """The first position that a program, or a turn of a loop, has along a side that it has not all of at once."""
        return names.side(letter) if self.p.axis(letter).block == 1 else names.first(letter)

    def positions(self, letters: Iterable[str]) -> int:
        """Positions along several sides that a program has at once."""
        return prod(self.p.axis(c).block for c in letters)

    # -- tensors ----------------------------------------------------------------------------------------------------
    def size(self, axis: str) -> int:
        """The length of a dimension."""
        return self.p.view.lanes if axis == LANES else self.vector_of(axis)[1]

    def shape(self, tile: Tile) -> list[int]:
        """The shape of a tile: that of a matrix where its axes are folded in two."""
        sizes = [self.size(a) for a in tile.axes]
        return [prod(sizes[: tile.folded]), prod(sizes[tile.folded :])] if tile.folded else sizes

    def unfolded(self, tile: Tile, name: str) -> str:
        """A tile with a dimension for each of its axes."""
        folds = tile.folded and len(tile.axes) > 2
        return f"tl.reshape({name}, {[self.size(a) for a in tile.axes]})" if folds else name

    def named(self, tile: Tile, u: str) -> str:
        """What a tile is called in a copy of its statement."""
        return f"{tile.name}{self.piece(tile.axes)}{u if tile.level == LEAF else ''}"

    def factor(self, tile: Tile, u: str, axes: Sequence[str]) -> str:
        """A factor laid out over `axes`."""
        name = self.unfolded(tile, self.named(tile, u))
        order = [a for a in axes if a in tile.axes]
        if tuple(order) != tile.axes:
            name = f"tl.permute({name}, {tuple([tile.axes.index(a) for a in order])})"
        if len(order) == len(axes) or not order:
            return name
        return f"{name}[{', '.join(':' if a in order else 'None' for a in axes)}]"

    def times(self, tiles: Sequence[Tile], u: str, axes: Sequence[str]) -> str:
        """The product of factors; small ones are multiplied together before they are spread over the larger tile."""
        return " * ".join(self.factor(t, u, axes) for t in sorted(tiles, key=lambda t: len(t.axes)))

    def summed(self, tile: Tile, u: str, left: Sequence[str]) -> tuple[str, list[str]]:
        """(a tile summed over all axes but those that are left, its axes)."""
        text, axes = self.unfolded(tile, self.named(tile, u)), list(tile.axes)
        for axis in [a for a in axes if a not in left]:
            text = f"tl.sum({text}, {axes.index(axis)})"
            axes.remove(axis)
        return text, axes

    # -- addresses --------------------------------------------------------------------------------------------------
    @staticmethod
    def placed(name: str, own: Sequence[str], axes: Sequence[str], stride: int = 1) -> str:
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

    def terms(self, each: Iterable[tuple[str, tuple[str, ...], int]], axes: Sequence[str], wide: bool) -> list[str]:
        """Terms of an address, laid out; those that depend on the same axes are added up first.

        Args:
            each: a number a position, the axes that it depends on, and the stride that it is multiplied by.
            axes: of the address.
            wide: whether it takes 64 bits.
        """
        cast, laid_out = ".to(tl.int64)" if wide else "", []
        for depends_on, group in groupby(each, key=lambda term: term[1]):
            text, before = "", 0
            for name, _, stride in group:
                text = f"({text})" if " + " in text else text
                text = f"{text} * {before // stride} + {name}{cast}" if text else f"{name}{cast}"
                before = stride
            laid_out.append(self.placed(text, depends_on, axes, before))
        return laid_out

    def columns(self, own: Sequence[str], axes: Sequence[str]) -> list[str]:
        """Terms of an address: the place in a row over its `own` axes, laid out over `axes`."""
        sizes = [self.p.axis(letter).size for letter in own]
        strides = [prod(sizes[n + 1 :]) for n in range(len(own))]
        return [self.placed(self.at(c), (c,), axes, stride) for c, stride in zip(own, strides, strict=True)]

    def bounds(self, own: Iterable[str], axes: Sequence[str]) -> list[str]:
        """Conditions that the places in a row are within it, laid out over `axes`."""
        return [self.placed(self.within(a), (a,), axes) for a in own]

    @staticmethod
    def all_of(conditions: Iterable[str]) -> str:
        """Conditions as one; empty where there is none."""
        each = [c for c in conditions if c]
        return " & ".join(f"({c})" if " < " in c or " > " in c else c for c in each) if len(each) > 1 else "".join(each)

    @staticmethod
    def address(terms: Iterable[str]) -> str:
        """Terms of an address as one."""
        return " + ".join(filter(None, terms)) or "0"

    @staticmethod
    def load(pointer: str, at: str, mask: str = "") -> str:
        """What loads elements of an array, 0 where they are masked."""
        return f"tl.load({pointer} + {at}, mask={mask}, other=0)" if mask else f"tl.load({pointer} + {at})"


def sides_of(tile: Tile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(axes of a matrix's rows, of its columns)."""
    return tile.axes[: tile.folded], tile.axes[tile.folded :]


def dimensions_of(tile: Tile) -> tuple[tuple[str, ...], ...]:
    """The axes of each dimension of a tensor of values."""
    return sides_of(tile) if tile.folded else tuple((c,) for c in tile.axes)


def widened(printer: TritonPrinter, s: Value) -> str:
    """What brings values to the type of the sums, where they are not in it and must be.

    Dots of two stored operands take narrow values as they are, and add up wide.
    """
    as_they_are = printer.half or (printer.p.stored(s.operand).name and printer.p.dots)
    return "" if as_they_are else printer.widen


def whole(printer: TritonPrinter, s: Value, array: str) -> str:
    """What loads a tile of which all positions are stored."""
    stored = printer.p.stored(s.operand)
    terms, mask = place(printer, s)
    return printer.load(array, " + ".join([f"{number(printer, stored)} * {stored.values.volume}", *terms]), mask)


def number(printer: TritonPrinter, stored: Stored) -> str:
    """The number of an operand's tile, as addresses take it."""
    return f"{stored.array('tile')}.to(tl.int64)" if printer.p.index64 else stored.array("tile")


def place(printer: TritonPrinter, s: Value) -> tuple[list[str], str]:
    """(terms of the positions of a tile of values, the condition that they are of the tile)."""
    stored = printer.p.stored(s.operand)
    groups = dimensions_of(s.out)
    called = ("across", "along") if s.out.folded else s.out.axes
    axes = tuple(str(n) for n in range(len(groups)))
    terms, conditions = [], []
    for letter in stored.letters:  # positions that are the same for the whole tile of values
        if letter not in s.out.axes:
            terms.append(printer.placed(names.side(letter), (), axes, stored.stride(letter)))
        elif printer.apart(letter) and len(groups) == 2 and any(letter in g and len(g) > 1 for g in groups):
            terms.append(printer.placed(printer.begin(letter), (), axes, stored.stride(letter)))
    for axis, name, group in zip(axes, called, groups, strict=True):
        text, stride, limit = _flat(printer, stored, name, group)
        terms.append(printer.placed(text, (axis,), axes, stride))
        conditions.append(printer.placed(limit, (axis,), axes))
    return [t for t in terms if t], printer.all_of(conditions)


def _flat(printer: TritonPrinter, stored: Stored, name: str, letters: tuple[str, ...]) -> tuple[str, int, str]:
    """(positions along several sides as one number, its stride, the condition that they are of the tile)."""
    last = letters[-1]
    if len(letters) == 1:
        return names.side(last), stored.stride(last), printer.limit(last)
    block = [printer.p.axis(c).block for c in letters]
    within = [prod(block[n + 1 :]) for n in range(len(letters))]
    strides = [stored.stride(c) for c in letters]
    terms, limits = [], []
    for n, (letter, w, b, stride) in enumerate(zip(letters, within, block, strides, strict=True)):
        text = f"{name} // {w}" if w > 1 else name
        text = f"{text} % {b}" if n else text
        terms.append(f"({text}) * {stride}" if stride > 1 else text)
        if printer.p.axis(letter).ragged:
            begin = f"{printer.begin(letter)} + " if printer.apart(letter) else ""
            limits.append(f"{begin}{text} < {printer.p.axis(letter).size}")
    if all(s == w * strides[-1] for s, w in zip(strides, within, strict=True)):
        return name, strides[-1], printer.all_of(limits)
    return " + ".join(terms), 1, printer.all_of(limits)


FACTOR = OPERATORS["+"][0] + 1
"""How tightly an operand of a sum must bind."""


class TritonCoordinates(Writer):
    """Writes the coordinates of one level, of the copy of a step that has the suffix `u`."""

    def __init__(self, printer: TritonPrinter, level: int, u: str) -> None:
        self.printer, self.level, self.u = printer, level, u

    def position(self, axis: str) -> str:
        return f"pos{self.u}" if axis == "nonzero" else axis

    def coordinate(self, mode: int) -> str:
        printer, letter = self.printer, self.printer.p.letters[mode]
        return f"{printer.p.read[letter]}{self.u if printer.p.view.level_of(mode) == LEAF else ''}"

    def along(self, mode: int) -> str:
        return names.side(self.printer.p.letters[mode])

    def lookup(self, lookup: Lookup) -> str:
        printer, view = self.printer, self.printer.p.view
        levels = [*map(AXIS_LEVEL.__getitem__, lookup.axes), *map(view.level_of, lookup.modes)]
        within = [printer.limit(printer.p.letters[mode]) for mode in sorted(lookup.sides)]
        mask = printer.all_of([printer.guard(min(max(levels, default=0), self.level), self.u), *within])
        load = printer.load(lookup.array, lookup.where.text(self, FACTOR), mask)
        if lookup.every != 1:
            return load
        word, words = f"{lookup.array}_bits{self.u}", printer.words[self.level]
        if word not in words:
            words.add(word)
            # Words of 16 bits, which only leaf words are stored in, are decoded as 32.
            narrow = self.level == LEAF and word_bits(view.levels[2], lookup.array) <= 16
            printer.put(f"{word} = {load}{'.to(tl.int32)' if narrow else ''}")
        return word
