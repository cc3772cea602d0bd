"""Level 2 to level 3: an einsum and the view of a packed part -> the tile program of one work item.

In: a `Bound` einsum with one sparse operand whose letters are distinct, the `Nest` of its packed part and a `Schedule`;
or, for `lower_pairs`, what two operands of tiles and a task list are. Out: a verified `TileProgram`. The tree of the
schedule says what is computed, in an order of data flow (`contract`); one rule says where each computation stands
(`place`). A schedule without a tree is completed by the default rule (`ir.default_tree`).
"""

from __future__ import annotations

from sparsetc.ir.default_tree import completed
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.inner import Inner, Target
from sparsetc.ir.lower.pairs import Fold, lower_pairs
from sparsetc.ir.lower.whole import lowering
from sparsetc.ir.nest.nest import Nest
from sparsetc.ir.plan import F16X3, Schedule
from sparsetc.ir.program.checks import verify
from sparsetc.ir.program.tile import TileProgram

__all__ = ["Fold", "Target", "drafted", "lower", "lower_pairs", "scheduled"]


def lower(
    bound: Bound, view: Nest, schedule: Schedule, target: Target, *, number: int = 0, format: str = ""
) -> TileProgram:
    """The verified tile program of one part; raises `PlanError` when the view cannot serve the einsum."""
    made = drafted(bound, view, schedule, target, number=number, format=format)
    verify(made)
    return made


def drafted(
    bound: Bound, view: Nest, schedule: Schedule, target: Target, *, number: int = 0, format: str = ""
) -> TileProgram:
    """The tile program of one part as it is priced: before it is one of those that run, and verified."""
    inner = _inner(bound, view, schedule, target)
    return lowering(inner, completed(inner, schedule)).program(number, format)


def scheduled(bound: Bound, view: Nest, schedule: Schedule, target: Target) -> Schedule:
    """The schedule with the tree that is lowered."""
    return completed(_inner(bound, view, schedule, target), schedule)


def _inner(bound: Bound, view: Nest, schedule: Schedule, target: Target) -> Inner:
    """What one work item computes, of a view that is read as the schedule says."""
    read = view.taking(schedule.lanes)
    return Inner.of(bound, read.in_halves() if schedule.precision == F16X3 else read, target)
