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

from functools import lru_cache
from math import prod

from sparsetc.errors import PlanError
from sparsetc.ir.operands import MIN_DOT, Target
from sparsetc.ir.plan import F16X3, Schedule
from sparsetc.ir.tile import (
    Add,
    DenseAxis,
    Loop,
    Position,
    Product,
    Scale,
    Statement,
    Tile,
    TileProgram,
    Value,
    Zero,
    verify,
)
from sparsetc.ir.view import ITEM, LANE, LEAF, PAIRED, Tiles, View
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
    letters = [c for fold in folds for c, _ in fold]
    if len(set(letters)) != len(letters):
        raise PlanError(f"rows, columns and inner positions share no letter, found {''.join(letters)!r}")
    row, column, inner = axes = _axes(folds, schedule.dot, least)
    terms = ((row.letter, inner.letter), (column.letter, inner.letter))
    halves = schedule.precision == F16X3
    stored = [_stored(free.size, inner.size, b, halves) for free, b in zip((row, column), bitmaps, strict=True)]
    program = TileProgram(
        equation=equation,
        number=0,
        format=" x ".join("bcb" if tiles.volume > 1 else "coo" for tiles in stored),
        view=View(0, (), (), (), False, pairs=tuple(stored)),
        letters=tuple(a.letter for a in axes),
        axes=axes,
        operands=(),
        output="Z",
        output_axes=(row.letter, column.letter),
        body=_body(terms, schedule.dot, halves),
        unroll=1,
        masked_unroll=1,
        warps=schedule.warps,
        stages=schedule.stages,
        precision=schedule.precision,
        rows=target.rows,
        wide=target.wide,
        terms=terms,
    )
    verify_view(program.view)
    verify(program)
    return program


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


def _body(terms: tuple[tuple[str, str], tuple[str, str]], dot: bool, halves: bool) -> tuple[Statement, ...]:
    (row, inner), (column, _) = terms
    own = ((row, inner), (column, inner)) if dot else ((row,), (column,))
    x, y = (Tile(name, axes, LEAF, folded=int(dot)) for name, axes in zip(PAIRED, own, strict=True))
    total = Tile("total", (row, column), ITEM, folded=1)
    product = Product(total, (x,), (y,), accumulate=True) if dot else Product(total, (x, y), accumulate=True)
    step: tuple[Statement, ...] = (*(Value(t, t.name) for t in (x, y)), product)
    pairs = Loop(LANE, step if dot else (Loop(LEAF, step, inner),))
    scales = [Tile(f"{name}_scale", (letter,), ITEM) for name, letter in zip(PAIRED, total.axes, strict=True)]
    read = [Scale(scale, name) for name, scale in zip(PAIRED, scales, strict=True)]
    by_scale = [Product(total, (total, scale)) for scale in scales]
    scaled: tuple[Statement, ...] = (*read, *by_scale) if halves else ()
    return Zero(total), pairs, *scaled, Add(total, Position(ITEM), (row, column), owned=True)
