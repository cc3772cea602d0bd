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

from dataclasses import replace
from functools import lru_cache
from math import prod

from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.lower.default_tree import completed
from sparsetc.ir.lower.inner import Inner, Target
from sparsetc.ir.lower.lowering import lowered
from sparsetc.ir.nest import ITEM, PAIRED, Bitmap, Halves, Nest, Values, Whole, pairs
from sparsetc.ir.plan import F16X3, Schedule
from sparsetc.ir.program.tile import LANES, Key, TileProgram
from sparsetc.support import NamedInts

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
    return lowered(inner, chosen, format)


Fold = NamedInts
"""(letter, positions) of the letters that make an axis, row-major."""


@lru_cache
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
