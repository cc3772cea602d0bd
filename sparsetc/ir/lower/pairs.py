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

from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.default_tree.by_pairs import by_pairs
from sparsetc.ir.inner import Inner, Target
from sparsetc.ir.lower.whole import lowering
from sparsetc.ir.nest.axes import ITEM
from sparsetc.ir.nest.nest import PAIRED, pairs
from sparsetc.ir.nest.values import Bitmap, Halves, Values, Whole
from sparsetc.ir.plan import F16X3, Schedule
from sparsetc.ir.program.checks import verify
from sparsetc.ir.program.tile import LANES, Position, TileProgram

NAMED = (LANES, "pair")
"""Axes of a program of pairs that are no letters': those of lanes, and of the loop over pairs."""
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
) -> TileProgram:
    """The tile program of a contraction of tiles.

    Args:
        equation: what the reader is told.
        folds: of rows, columns and inner; sides are powers of two. No letter is in two of them.
        schedule: dot or multiply, its precision, warps and stages. f16x3 has both operands stored in halves.
        target: rows of the output, a block each, and whether positions of stored values need 64 bits.
        bitmaps: whether each operand is stored as bitmaps and packed values.

    Raises:
        PlanError, FormatError: sides that are not powers of two, letters that repeat, or bitmaps or multiplications in
            f16x3.
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
    made = Inner(
        equation=equation,
        view=view,
        target=replace(target, owned=True),
        letters=tuple(named),
        stored=dict(zip(map(str.upper, PAIRED), ((row, inner), (column, inner)), strict=True)),
        sides=sides,
        key=Position(ITEM),
        output="Z",
        output_axes=(row, column),
        folds=named,
    )
    chosen = by_pairs(made, schedule) if schedule.tree is None else schedule
    program = lowering(made, chosen).program(0, " x ".join("bcb" if tiles.volume > 1 else "coo" for tiles in stored))
    verify(program)
    return program


def _name(fold: Fold, role: str) -> str:
    """What an axis is called: its letters, or the role of one that has none; never as lanes or a loop are."""
    name = "".join(c for c, _ in fold) or f"one_{role}"
    return f"{name}_{role}" if name in NAMED else name


def _stored(free: int, inner: int, bitmap: bool, halves: bool) -> Values:
    """Row-major tiles, their bits in the widest words that they fill.

    Triton lays out a dot's sides by the narrowest load that their addresses depend on, and aborts where that is
    narrower than 32 bits and the values are of 64 (3.6, 3.7).
    """
    word = max(8, min(32, free * inner))
    if bitmap and halves:
        raise FormatError("what is in halves are tiles, stored whole")
    kind = Bitmap if bitmap else Halves if halves else Whole
    return kind((free, inner), (0, 1), word=word)
