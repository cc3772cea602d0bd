"""A contraction in the making: its computations in an order of data flow, without loops and zeros.

In: tiles. Out: statements, which `place` puts into loops. What a lowering composes::

    tile  :=  load                              # stored values, rows of a dense operand, scales
           |  multiply(tiles)                   # the tile einsum that sums nothing
           |  dot(tiles, tiles, over axes)      # a matrix product
           |  sum(tile, over axes)              # over axes that are in registers
           |  accumulate(tile, level)           # over the loops inside a level
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sparsetc.ir.tile import LANES, Gather, Product, Scale, Statement, Sum, Tile, Value


class DataFlow:
    """Computations, each of which reads what those before it made."""

    def __init__(self, dense: Sequence[str], positions: Sequence[str] = ()) -> None:
        """Nothing is computed yet.

        Args:
            dense: axes that only dense operands have, in the order in which tiles have them.
            positions: axes along a stored tile, in the order in which tiles have them.
        """
        self.dense, self.order = frozenset(dense), (LANES, *dense, *positions)
        self.statements: list[Statement] = []

    def make(self, statement: Value | Scale | Gather | Product | Sum) -> Tile:
        """What a statement makes."""
        self.statements.append(statement)
        return statement.out

    def multiply(self, name: str, factors: Sequence[Tile]) -> Tile:
        """The product of tiles, which sums no axis."""
        return self.make(Product(Tile(name, self._axes(factors), _level(factors)), tuple(factors)))

    def scale(self, name: str, tile: Tile, factors: Sequence[Tile]) -> Tile:
        """A tile times factors, its axes first; itself where there are none."""
        if not factors:
            return tile
        axes = dict.fromkeys((*tile.axes, *self._axes((tile, *factors))))
        return self.make(Product(Tile(name, tuple(axes), _level((tile, *factors))), (tile, *factors)))

    def dot(self, name: str, left: Sequence[Tile], right: Sequence[Tile], over: Iterable[str]) -> Tile:
        """The matrix product of two sides, whose rows and columns are the axes of each side that are not summed."""
        rows, columns = self._free(left, set(over)), self._free(right, set(over))
        out = Tile(name, (*rows, *columns), _level((*left, *right)), folded=len(rows))
        return self.make(Product(out, tuple(left), tuple(right)))

    def sum(self, name: str, tile: Tile, over: Iterable[str]) -> Tile:
        """A tile summed over those of the axes that it has; itself where it has none of them."""
        summed = set(over)
        axes = tuple(a for a in tile.axes if a not in summed)
        return self.make(Sum(Tile(name, axes, tile.level), tile)) if axes != tile.axes else tile

    def accumulate(self, name: str, tile: Tile, level: int) -> Tile:
        """The sum of a tile, the last that was made, over the loops inside a level.

        A product is added up by the statement that multiplies.
        """
        last, out = self.statements[-1], replace(tile, name=name, level=level)
        if isinstance(last, Product) and last.out == tile and not last.accumulate:
            self.statements[-1] = replace(last, out=out, accumulate=True)
            return out
        return self.make(Product(out, (tile,), accumulate=True))

    def _axes(self, tiles: Sequence[Tile]) -> tuple[str, ...]:
        """The axes that tiles have together; one alone keeps the order of its own."""
        present = {a for t in tiles for a in t.axes}
        return tuple(a for a in self.order if a in present) if len(tiles) > 1 else tiles[0].axes

    def _free(self, side: Sequence[Tile], over: set[str]) -> list[str]:
        """The axes of a dot's side that are not summed, positions of a stored tile before dense ones."""
        return sorted((a for a in self._axes(side) if a not in over), key=self.dense.__contains__)


def _level(tiles: Iterable[Tile]) -> int:
    """The level at which the product of some tiles is known."""
    return max(t.level for t in tiles)
