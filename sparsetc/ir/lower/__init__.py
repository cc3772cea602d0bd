"""Level 2 to level 3: an einsum and the view of a packed part -> the tile program of one work item.

In: a `Bound` einsum with one sparse operand whose letters are distinct, the `Nest` of its packed part and a `Schedule`;
or, for `lower_pairs`, what two operands of tiles and a task list are. Out: a `TileProgram`. The tree of the
schedule says what is computed, in an order of data flow (`contract`); one rule says where each computation stands
(`place`). A schedule without a tree is completed by the default rule (`ir.lower.default_tree`).

Two sparse operands of tiles, ``x[row, inner] y[column, inner] -> z[row, column]``, are lowered as one task list::

    loop pairs of the item
      x = tile pair_x of X;  y = tile pair_y of Y
      total += dot over inner                # or, without a dot, a loop over inner that multiplies and adds
    store Z[item, row, column] = total

In the precision f16x3 tiles are stored in halves, and the total is multiplied by the scales of its rows, then by those
of its columns: never by their product, which may be no float32. An axis too short for a dot is padded in registers: its
positions past the tile are masked when loaded. One that has no letters is of one position.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.equation.einsum import Bound, joined
from sparsetc.ir.lower.default_tree import completed
from sparsetc.ir.lower.inner import Inner, Target
from sparsetc.ir.lower.lowering import Lowering
from sparsetc.ir.nest.axes import ITEM
from sparsetc.ir.nest.nest import PAIRED, Nest, pairs
from sparsetc.ir.nest.values import Bitmap, Halves, Values, Whole
from sparsetc.ir.plan import F16X3, Schedule
from sparsetc.ir.program.tile import LANES, Gather, Key, Product, Tile, TileProgram, Value
from sparsetc.support import NamedInts, Names, among, outside, volume


class WholeLowering(Lowering):
    """One part's program in the making, each of its axes one block, unless native loops cut the result into panels.

    Attributes:
        sizes: of all axes, in the order in which products have them.
        factors: the factors that each tile is made of, by its name.
    """

    def __init__(self, inner: Inner, schedule: Schedule) -> None:
        super().__init__(inner, schedule)
        cut = [a.letter for a in self.dense if schedule.native and a.slowest and a.letter in inner.output_axes][:1]
        whole = (replace(a, block=a.size, pieces=(), slowest=False) for a in self.dense)
        self.dense = tuple([a if a.letter in cut else own for a, own in zip(self.dense, whole, strict=True)])
        self.positions = tuple([replace(a, block=a.size) for a in self.positions])
        self.around, self.tile_sizes = self.view.loops, dict(inner.sides)
        sizes = {a.letter: a.size for a in (*self.dense, *self.positions)}
        stored = (a for name in inner.stored for a in self._stored(name))
        self.sizes = {a: sizes[a] for a in dict.fromkeys((*stored, *sizes))}
        self.order = (LANES, *self.sizes)
        self.axes = {name: inner.axes[name] for name in self.tree.factors}
        self.factors: dict[str, frozenset[str]] = {}

    def load(self, factor: str) -> Value | Gather:
        """Return the statement that reads stored values in order, or rows along their coordinates."""
        s = super().load(factor)
        operand = self.inner.operand.get(factor)
        axes = (*self.inner.along(operand.rows), *operand.axes) if operand else self._stored(factor)
        out = Tile(s.out.name, (*self.view.beside[s.out.level], *axes), s.out.level)
        self.factors[out.name] = frozenset((factor,))
        return replace(s, out=out)

    def _stored(self, name: str) -> Names:
        """Return the letters of stored values' positions, in the order of the sequence."""
        letters, paired = self.inner.stored[name], dict(zip(self.inner.stored, self.view.pairs, strict=False))
        values = paired.get(name, self.view.values)
        return tuple([letters[mode] for mode in values.sequence if letters[mode] in self.inner.sides])

    # -- products, each of which sums the axes that no factor outside of it has, nor the result ----------------------
    def multiply(self, name: str, factors: Sequence[Tile]) -> Tile:
        return self._product(name, factors, max([t.level for t in factors]))

    def dot(self, name: str, left: Sequence[Tile], right: Sequence[Tile], over: object) -> Tile:
        """A product like any other, whose rows are the axes of its left side."""
        tiles = (*left, *right)
        return self._product(name, tiles, max(t.level for t in tiles), rows=self._within(left))

    def sum(self, name: str, tile: Tile, over: object) -> Tile:
        """The tile: lanes are its rows, and its positions were summed by a product, or are when it is added."""
        return tile

    def accumulate(self, name: str, tile: Tile, level: int) -> Tile:
        factors = self.taken_back(tile).inputs
        return self._product(name, factors, level, tile.within[: tile.folded], accumulate=True)

    def _product(
        self, name: str, tiles: Sequence[Tile], level: int, rows: Collection[str] = (), accumulate: bool = False
    ) -> Tile:
        """The product, summed over what nothing after it reads; `rows` are axes of a left side.

        One that would sum no side, and of which a factor has all axes, sums none: it forms nothing larger than that
        factor.
        """
        inside = frozenset().union(*[self.factors[t.name] for t in tiles])
        needed = self.inner.keyed.union(*[axes for name, axes in self.axes.items() if name not in inside])
        axes = self._within(tiles)
        whole = [{*axes} <= {*t.axes} for t in tiles]
        sums = ({*axes} - needed) & self.inner.sides.keys() or True not in whole
        kept = among(axes, needed) if sums else axes
        left, right = self._separate(tiles) if accumulate and kept == axes else (tuple(tiles), ())
        if right:
            rows, kept = self._within(left), (*self._within(left), *self._within(right))
        folded = sum(map(rows.__contains__, kept))
        out = Tile(self.called(name), (*self.view.beside[level], *kept), level, folded)
        self.factors[out.name] = inside
        return self.make(Product(out, left, right, accumulate))

    def _separate(self, tiles: Sequence[Tile]) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
        """Split factors into two sets without a common axis, to be summed by a matrix product; else (all, none)."""
        groups = [g for g in joined([(t.within, t) for t in tiles]) if g[0]]
        if len(groups) < 2:
            return tuple(tiles), ()
        axes, largest = max(groups, key=lambda g: volume(self.sizes, g[0]))
        sides = tuple(largest), outside(tiles, largest)
        for side in sides:
            operands = [self.inner.operand.get(name) for tile in side for name in self.factors[tile.name]]
            if all(o and not o.rows for o in operands):  # the same for all rows: nothing is summed over them
                return tuple(tiles), ()
        return sides if self._within(tiles)[0] in axes else sides[::-1]

    def _within(self, tiles: Sequence[Tile]) -> Names:
        """The axes that tiles have together, but the lanes."""
        return among(self.sizes, set().union(*[t.axes for t in tiles])) if len(tiles) > 1 else tiles[0].within


__all__ = ["Fold", "Target", "drafted", "lower", "lower_pairs"]


def lower(
    bound: Bound, view: Nest, schedule: Schedule, target: Target, *, number: int = 0, format: str = ""
) -> TileProgram:
    """Lower one part to its tile program. Raise `PlanError` if the view cannot serve the einsum."""
    return _lowered(bound, view, schedule.by_rule(), target, number, format)


def drafted(bound: Bound, view: Nest, schedule: Schedule, target: Target) -> TileProgram:
    """Lower one part to its tile program for pricing, without its number and its format."""
    return _drafted(bound, view, schedule.by_rule(), target)


@lru_cache(maxsize=1024)
def _lowered(bound: Bound, view: Nest, schedule: Schedule, target: Target, number: int, format: str) -> TileProgram:
    # Native loops that cut nothing are the same program, which was drafted for its price.
    cut = schedule.native and bool(schedule.slowest_axes)
    program = _drafted(bound, view, replace(schedule, native=cut), target)
    run = replace(program.schedule, native=schedule.native)
    return replace(program, number=number, format=format, schedule=run)


@lru_cache(maxsize=1024)
def _drafted(bound: Bound, view: Nest, schedule: Schedule, target: Target) -> TileProgram:
    read = view.taking(1 if target.whole else schedule.lanes)
    read = read.of_ones() if target.ones else read
    inner = Inner.of(bound, read.in_halves() if schedule.precision == F16X3 else read, target)
    return _program(inner, schedule, "")


def _program(inner: Inner, schedule: Schedule, format: str) -> TileProgram:
    """Lower by the schedule's tree: the one given, or that of the default rule."""
    chosen = completed(inner, schedule) if schedule.tree is None else schedule
    return (WholeLowering if inner.target.whole else Lowering)(inner, chosen).program(format)


Fold = NamedInts
"""(letter, positions) of the letters that make an axis, row-major."""


@lru_cache(maxsize=256)
def lower_pairs(
    equation: str,
    folds: tuple[Fold, Fold, Fold],
    schedule: Schedule,
    target: Target,
    *,
    bitmaps: tuple[bool, bool] = (False, False),
) -> TileProgram:
    """The tile program of a contraction of tiles.

    Args:
        equation: what the reader is told.
        folds: of rows, columns and inner; sides are powers of two. No letter is in two of them.
        schedule: dot or multiply, its precision, warps and stages. f16x3 has both operands stored in halves.
        target: rows of the output, a block each, and whether positions of stored values need 64 bits.
        bitmaps: whether each operand is stored as bitmaps and packed values.

    Raises:
        PlanError, FormatError: sides that are not powers of two, letters that repeat, or bitmaps in f16x3.
    """
    letters = [c for fold in folds for c, _ in fold]
    if len(set(letters)) != len(letters):
        raise PlanError(f"rows, columns and inner positions share no letter, found {''.join(letters)!r}")
    named = dict(zip(map(_name, folds, ("row", "column", "inner")), folds, strict=True))
    (row, column, inner), sides = named, {name: prod(side for _, side in fold) for name, fold in named.items()}
    free = zip((row, column), bitmaps, strict=True)
    stored = tuple(_stored(sides[c], sides[inner], bitmap, schedule.precision == F16X3) for c, bitmap in free)
    view = pairs(*stored)
    view.verify()
    inner_einsum = Inner(
        equation=equation,
        view=view,
        target=replace(target, owned=True),
        letters=tuple(named),
        stored=dict(zip(map(str.upper, PAIRED), ((row, inner), (column, inner)), strict=True)),
        sides=sides,
        key=Key("position", ITEM),
        output="Z",
        output_axes=(row, column),
        folds=named,
    )
    return _program(inner_einsum, schedule, " x ".join("bcb" if tiles.volume > 1 else "coo" for tiles in stored))


def _name(fold: Fold, role: str) -> str:
    """Return the name of an axis: its letters, or its role if it has none; never the name of the lanes or pairs."""
    name = "".join(c for c, _ in fold) or f"one_{role}"
    return f"{name}_{role}" if name in (LANES, "pair") else name


def _stored(free: int, inner: int, bitmap: bool, halves: bool) -> Values:
    """Row-major tiles, their bits in the widest words that they fill.

    Triton lays out a dot's sides by the narrowest load that their addresses depend on, and aborts where that is
    narrower than 32 bits and the values are of 64 (3.6, 3.7).
    """
    word = max(8, min(32, free * inner))
    if bitmap and halves:
        raise FormatError("what is in halves are tiles, stored whole")
    kind = Halves if halves else Whole
    return (Bitmap if bitmap else kind)((free, inner), (0, 1), word=word)
