"""The lowering for a walker that takes all rows of a level at once: whole axes, and sums as early as they may be.

In: an `Inner` einsum and a `Schedule`, of which the tree, the precision and what is rounded matter, and no blocks or
turns. Out: a `TileProgram` for torch, in which a side is an axis like a rank, and a product sums what nothing after it
reads: ``"nij,njr->nir"`` is one call, which forms nothing over all axes. Sums over the nonzeros of a row, of factors
without an axis in common, are dots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

from sparsetc.ir.equation.einsum import joined
from sparsetc.ir.inner import Inner
from sparsetc.ir.lower.lowering import Lowering
from sparsetc.ir.plan import Schedule
from sparsetc.ir.program.tile import LANES, Gather, Product, Scale, Sum, Tile, Value


def lowering(inner: Inner, schedule: Schedule) -> Lowering:
    """Begin the program of a complete schedule, by what is to run it."""
    return (WholeLowering if inner.target.whole else Lowering)(inner, schedule)


class WholeLowering(Lowering):
    """One part's program in the making, each of its axes one block."""

    def __init__(self, inner: Inner, schedule: Schedule) -> None:
        super().__init__(inner, schedule)
        self.dense = tuple([replace(a, block=a.size, pieces=(), slab=False) for a in self.dense])
        self.positions = tuple([replace(a, block=a.size) for a in self.positions])
        self.around, self.take = self.view.loops, dict(inner.sides)
        sizes = {a.letter: a.size for a in (*self.dense, *self.positions)}
        stored = (a for name in inner.stored for a in self._stored(name))
        self.sizes = {a: sizes[a] for a in dict.fromkeys((*stored, *sizes))}
        """Of all axes, in the order in which products have them."""
        self.order = (LANES, *self.sizes)
        self.axes = {name: inner.axes(name) for name in self.tree.factors}
        self.factors: dict[str, frozenset[str]] = {}
        """The factors that each tile is made of, by its name."""

    def value(self, name: str) -> Value:
        """Stored values, their positions as they are stored."""
        s = super().value(name)
        return replace(s, out=Tile(s.out.name, (*self.view.beside[s.out.level], *self._stored(name)), s.out.level))

    def gather(self, name: str) -> Gather:
        """Rows of a dense operand, along the sides that they are gathered by."""
        s = super().gather(name)
        lanes, along = self.view.beside[s.out.level], self.inner.along(s.operand.rows)
        return replace(s, out=replace(s.out, axes=(*lanes, *along, *s.operand.axes)))

    def _stored(self, name: str) -> tuple[str, ...]:
        """The letters of the positions of stored values, in the order of their sequence."""
        letters, paired = self.inner.stored[name], dict(zip(self.inner.stored, self.view.pairs, strict=False))
        values = paired.get(name, self.view.values)
        return tuple([letters[mode] for mode in values.sequence if letters[mode] in self.inner.sides])

    # -- products, each of which sums the axes that no factor outside of it has, nor the result ----------------------
    def make(self, statement: Value | Scale | Gather | Product | Sum) -> Tile:
        if isinstance(statement, Value | Gather):
            own = statement.operand
            self.factors[statement.out.name] = frozenset((own.upper() if isinstance(own, str) else own.name,))
        return super().make(statement)

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
        factors: tuple[Tile, ...] = (tile,)
        last = self.statements[-1]
        if isinstance(last, Product) and last.out == tile and not last.accumulate:
            self.statements.pop()
            factors = last.inputs
        return self._product(name, factors, level, tile.within[: tile.folded], accumulate=True)

    def _product(
        self, name: str, tiles: Sequence[Tile], level: int, rows: Collection[str] = (), accumulate: bool = False
    ) -> Tile:
        """The product, summed over what nothing after it reads; `rows` are axes of a left side.

        One that would sum no side, and of which a factor has all axes, sums none: it forms nothing larger than that
        factor.
        """
        inside = frozenset().union(*(self.factors[t.name] for t in tiles))
        needed = self.inner.keyed.union(*(axes for name, axes in self.axes.items() if name not in inside))
        axes = self._within(tiles)
        sums = ({*axes} - needed) & self.inner.sides.keys() or not any({*axes} <= {*t.axes} for t in tiles)
        kept = tuple([a for a in axes if a in needed]) if sums else axes
        left, right = self._separate(tiles) if accumulate and kept == axes else (tuple(tiles), ())
        if right:
            rows, kept = self._within(left), (*self._within(left), *self._within(right))
        folded = sum([a in rows for a in kept])
        out = Tile(self.called(name), (*self.view.beside[level], *kept), level, folded)
        self.factors[out.name] = inside
        return self.make(Product(out, left, right, accumulate))

    def _separate(self, tiles: Sequence[Tile]) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
        """Two sets of factors with no axis in common, so that the sum over rows is a matrix product; or all, none."""
        groups = [g for g in joined((t.within, t) for t in tiles) if g[0]]
        if len(groups) < 2:
            return tuple(tiles), ()
        axes, largest = max(groups, key=lambda g: prod([self.sizes[a] for a in g[0]]))
        sides = tuple(largest), tuple([t for t in tiles if t not in largest])
        if any(all(map(self._is_constant, side)) for side in sides):
            return tuple(tiles), ()  # a side without rows has nothing that is summed over them
        return sides if self._within(tiles)[0] in axes else sides[::-1]

    def _is_constant(self, tile: Tile) -> bool:
        """Whether a tile is the same for all rows, being made of operands that no coordinate gathers."""
        return all((o := self.inner.operand.get(name)) and not o.rows for name in self.factors[tile.name])

    def _within(self, tiles: Sequence[Tile]) -> tuple[str, ...]:
        """The axes that tiles have together, but the lanes."""
        return tuple([a for a in self._axes(tiles) if a != LANES])
