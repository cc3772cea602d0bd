"""Level 2 to level 3: an einsum and the view of a packed part -> the tile program of one work item.

In: a `Bound` einsum with one sparse operand whose letters are distinct, the `View` of its packed part and a `Schedule`;
or, for `lower_pairs`, what two operands of tiles and a task list are. Out: a verified `TileProgram`. A lowering says
what is computed, in an order of data flow (`contract`); one rule says where each computation stands (`place`).
"""

from __future__ import annotations

from sparsetc.ir.einsum import Bound
from sparsetc.ir.lower.lowering import DenseLowering, Target
from sparsetc.ir.lower.pairs import Fold, lower_pairs
from sparsetc.ir.lower.runs import RunLowering
from sparsetc.ir.lower.tiles import TileLowering
from sparsetc.ir.plan import Schedule
from sparsetc.ir.tile import TileProgram
from sparsetc.ir.view import View

__all__ = ["Fold", "Target", "lower", "lower_pairs"]


def lower(
    bound: Bound, view: View, schedule: Schedule, target: Target, *, number: int = 0, format: str = ""
) -> TileProgram:
    """The tile program of one part; raises `PlanError` when the view cannot serve the einsum."""
    lowering: type[DenseLowering] = TileLowering if view.sides else RunLowering
    return lowering(bound, view, schedule, target).program(number, format)
