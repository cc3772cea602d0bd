"""Two sparse operands of tiles and a task list -> tile program: ``x[row, inner] y[column, inner] -> z[row, column]``.

In: the letters, with their sides, that make up each of the three axes; a schedule; how tiles are stored. Out: a
verified `TileProgram`::

    loop pairs of the item
      x = tile pair_x of X;  y = tile pair_y of Y
      total += dot over inner                # or, without a dot, a loop over inner that multiplies and adds
    store Z[item, row, column] = total

In the precision f16x3 tiles are stored in halves, and the total is multiplied by the scales of its rows, then by those
of its columns: never by their product, which may be no float32.

An axis too short for a dot is padded in registers: its positions past the tile are masked when loaded. One that has no
letters is of one position.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

from sparsetc.errors import PlanError
from sparsetc.ir.lower.contract import DataFlow
from sparsetc.ir.lower.lowering import Lowering, Target
from sparsetc.ir.nest.axes import ITEM, LEAF, Turns
from sparsetc.ir.operands import MIN_DOT
from sparsetc.ir.plan import F16X3, Schedule
from sparsetc.ir.tile import DenseAxis, Position, Scale, Tile, TileProgram, Value
from sparsetc.ir.view import PAIRED, Tiles, View
from sparsetc.ir.view import verify as verify_view

Fold = tuple[tuple[str, int], ...]
"""(letter, positions) of the letters that make an axis, row-major."""


@lru_cache(maxsize=256)
def lower_pairs(
    equation: str,
    folds: tuple[Fold, Fold, Fold],
    schedule: Schedule,
    target: Target,
    *,
    bitmaps: tuple[bool, bool] = (False, False),
    least: int = MIN_DOT,
) -> TileProgram:
    """The tile program of a contraction of tiles.

    Args:
        equation: what the reader is told.
        folds: of rows, columns and inner; sides are powers of two. No letter is in two of them.
        schedule: dot or multiply, its precision, warps and stages. f16x3 has both operands stored in halves.
        target: rows of the output, a block each, and whether positions of stored values need 64 bits.
        bitmaps: whether each operand is stored as bitmaps and packed values.
        least: positions of an axis, at least, where a dot contracts; 1 where nothing needs padding.

    Raises:
        PlanError, FormatError: sides that are not powers of two, letters that repeat, or bitmaps or multiplications in
            f16x3.
    """
    lowering = PairLowering(equation, folds, schedule, replace(target, owned=True), bitmaps, least)
    verify_view(lowering.view)
    return lowering.program(0, " x ".join("bcb" if tiles.volume > 1 else "coo" for tiles in lowering.view.pairs))


class PairLowering(Lowering):
    """The lowering of pairs of tiles."""

    output, key = "Z", Position(ITEM)

    def __init__(
        self,
        equation: str,
        folds: tuple[Fold, Fold, Fold],
        schedule: Schedule,
        target: Target,
        bitmaps: tuple[bool, bool],
        least: int,
    ) -> None:
        letters = [c for fold in folds for c, _ in fold]
        if len(set(letters)) != len(letters):
            raise PlanError(f"rows, columns and inner positions share no letter, found {''.join(letters)!r}")
        row, column, inner = self.positions = _axes(folds, schedule.dot, least)
        self.halves = schedule.precision == F16X3
        free = zip((row, column), bitmaps, strict=True)
        stored = tuple(_stored(axis.size, inner.size, bitmap, self.halves) for axis, bitmap in free)
        super().__init__(View(0, (), (), (), False, pairs=stored), schedule, target)
        self.equation, self.letters = equation, tuple(a.letter for a in self.positions)
        self.output_axes = self.letters[:2]
        self.terms = ((row.letter, inner.letter), (column.letter, inner.letter))
        self.turns = () if schedule.dot else (Turns(inner.letter, inner.size, inner.block, unrolled=False),)

    def contract(self, flow: DataFlow) -> Tile:
        """A pair's product, added up over the pairs, and scaled where tiles are in halves."""
        dot = self.schedule.dot
        own = zip(PAIRED, self.terms, strict=True)
        x, y = (flow.make(Value(Tile(n, c if dot else c[:1], LEAF, folded=int(dot)), n)) for n, c in own)
        product = flow.dot("total", [x], [y], self.letters[2:]) if dot else flow.multiply("total", (x, y))
        total = flow.accumulate("total", product, ITEM)
        if self.halves:
            own = zip(PAIRED, self.terms, strict=True)
            for scale in [flow.make(Scale(Tile(f"{n}_scale", c[:1], ITEM), n)) for n, c in own]:
                total = flow.scale("total", total, [scale])
        return total


def _axes(folds: tuple[Fold, Fold, Fold], dot: bool, least: int) -> tuple[DenseAxis, DenseAxis, DenseAxis]:
    """Rows, columns, inner; without a dot a loop takes one inner position at a time."""

    def axis(fold: Fold, role: str) -> DenseAxis:
        size = prod(side for _, side in fold)
        name = "".join(c for c, _ in fold) or f"one_{role}"
        block = max(size, least) if dot else 1 if role == "inner" else size
        return DenseAxis(name, size, block, fold)

    rows, columns, inner = folds
    return axis(rows, "row"), axis(columns, "column"), axis(inner, "inner")


def _stored(free: int, inner: int, bitmap: bool, halves: bool) -> Tiles:
    """Row-major tiles, their bits in the widest words that they fill.

    Triton lays out a dot's sides by the narrowest load that their addresses depend on, and aborts where that is
    narrower than 32 bits and the values are of 64 (3.6, 3.7).
    """
    word = max(8, min(32, free * inner))
    return Tiles(sides=(free, inner), sequence=(0, 1), bitmap=bitmap, word=word, halves=halves)
