"""Level 2 to level 3: an einsum and the view of a packed part -> the tile program of one work item.

In: a `Bound` einsum with one sparse operand whose letters are distinct, the `Nest` of its packed part and a `Schedule`;
or, for `lower_pairs`, what two operands of tiles and a task list are. Out: a verified `TileProgram`. The tree of the
schedule says what is computed, in an order of data flow (`contract`); one rule says where each computation stands
(`place`). A schedule without a tree is completed by the default rule (`ir.default_tree`).

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
from sparsetc.ir.default_tree import completed
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.inner import Inner, Target
from sparsetc.ir.lower.whole import lowering
from sparsetc.ir.nest.nest import ITEM, PAIRED, Nest, pairs
from sparsetc.ir.nest.values import Bitmap, Halves, Values, Whole
from sparsetc.ir.plan import F16X3, Schedule
from sparsetc.ir.program.checks import verify
from sparsetc.ir.program.tile import LANES, Position, TileProgram

__all__ = ["Fold", "Target", "drafted", "lower", "lower_pairs", "scheduled"]


def lower(
    bound: Bound, view: Nest, schedule: Schedule, target: Target, *, number: int = 0, format: str = ""
) -> TileProgram:
    """The verified tile program of one part; raises `PlanError` when the view cannot serve the einsum."""
    return _verified(bound, view, scheduled(bound, view, schedule, target), target, number, format)


@lru_cache(maxsize=1024)
def _verified(bound: Bound, view: Nest, schedule: Schedule, target: Target, number: int, format: str) -> TileProgram:
    made = replace(_drafted(bound, view, schedule, target), number=number, format=format)
    verify(made)
    return made


def drafted(bound: Bound, view: Nest, schedule: Schedule, target: Target) -> TileProgram:
    """The tile program of one part as it is priced: before it is one of those that run, and verified."""
    return _drafted(bound, view, scheduled(bound, view, schedule, target), target)


@lru_cache(maxsize=1024)
def _drafted(bound: Bound, view: Nest, schedule: Schedule, target: Target) -> TileProgram:
    return lowering(_inner(bound, view, schedule, target), schedule).program(0, "")


def scheduled(bound: Bound, view: Nest, schedule: Schedule, target: Target) -> Schedule:
    """The schedule with the tree that is lowered: its author's, or the default rule's."""
    given = schedule.by_rule()
    return given if given.tree is not None else _by_rule(bound, view, given, target.sparse, target.in_operand_order)


@lru_cache(maxsize=1024)
def _by_rule(bound: Bound, view: Nest, schedule: Schedule, sparse: bool, in_operand_order: bool) -> Schedule:
    return completed(_inner(bound, view, schedule, Target(sparse, in_operand_order)), schedule)


def _inner(bound: Bound, view: Nest, schedule: Schedule, target: Target) -> Inner:
    """What one work item computes, of a view that is read as the schedule says."""
    read = view.taking(1 if target.whole else schedule.lanes)
    return Inner.of(bound, read.in_halves() if schedule.precision == F16X3 else read, target)


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
    chosen = completed(made, schedule) if schedule.tree is None else schedule
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
