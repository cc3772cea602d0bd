"""The ways to run an einsum with one sparse operand, one a file, by the names of their plans.

Each says which plans of it ``"auto"`` considers, and which one a request by its name stands for::

    runs.py       coo                     runs of an output row
    rows.py       rows                    an output row a lane
    fibers.py     fiber                   fibers along one mode, side by side
    by_rows.py    coo+rows, fiber+rows    long rows by one of these, short ones a lane each
    by_tiles.py   hls                     dense tiles, and what they leave as runs or fibers
    mixed_mode.py mm-csf                  fibers along every mode, one copy for the einsums of all modes
    windows.py    window, 1-sa            groups of rows in dense tiles over their columns, and other rows as runs
    dense.py      dense                   the dense tensor, multiplied by torch

Formats that offer a plan, and plans that users register, are methods too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sparsetc.errors import PlanError
from sparsetc.formats import FORMATS
from sparsetc.ir.plan import Plan, verify
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.method import OperandMethod
from sparsetc.planner.methods.dense import Dense
from sparsetc.planner.methods.fibers import Fibers, MixedMode
from sparsetc.planner.methods.rows import ByRows, Rows, Runs, coo
from sparsetc.planner.methods.tiles import ByTiles
from sparsetc.planner.methods.windows import TAUS, USUAL, Windows
from sparsetc.planner.pricing import orderly
from sparsetc.planner.problem import Problem
from sparsetc.planner.requests import PLANS, MakePlan
from sparsetc.planner.statistics import Counts

FIBERS = Fibers()
OWN = (
    Runs(),
    Rows(),
    FIBERS,
    ByRows("coo+rows", lambda problem, counts: (coo(problem, counts),)),
    ByRows("fiber+rows", FIBERS.candidates),
    ByTiles(),
    Windows("window", (0,), (0,)),
    Windows("1-sa", TAUS, USUAL),
    Dense(),
    MixedMode(),
)
"""The package's methods, in the order in which they are considered."""


class Registered(OperandMethod):
    """A function that a format offers or a user registers, as a method."""

    def __init__(self, name: str, make: MakePlan) -> None:
        self.name, self.make = name, make

    def candidates(self, problem: Problem, counts: Counts) -> Iterable[Candidate]:
        """The function's plan, where it has one and its sums need not be in an order that it cannot keep."""
        found = self.candidate(problem, counts, Plan(self.name))
        return () if found is None or (problem.ordered and not orderly(found, problem)) else (found,)

    def candidate(self, problem: Problem, counts: Counts, request: Plan) -> Candidate | None:
        """The function's plan, where it has one, by its registered name; `PlanError` where it is malformed."""
        found = self.make(problem, counts)
        if found is None:
            return None
        if not isinstance(found, Candidate):
            raise PlanError(
                f"what makes plan {self.name!r} must give a Candidate or None, found {type(found).__name__}"
            )
        plan, sizes = replace(found.plan, name=self.name), len(found.expected)
        verify(plan)
        if sizes != len(plan.parts):
            raise PlanError(f"plan {self.name!r} has {len(plan.parts)} parts, and the expected sizes of {sizes}")
        return replace(found, plan=plan)


def methods() -> dict[str, OperandMethod]:
    """Every method, by name; what is registered stands in the place of what it replaces."""
    offers = {name: getattr(known, "offer", None) for name, known in FORMATS.items()}
    makers = {name: offer for name, offer in offers.items() if offer}
    makers |= {name: known.make for name, known in PLANS.items()}
    return {method.name: method for method in OWN} | {name: Registered(name, make) for name, make in makers.items()}
