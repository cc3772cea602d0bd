"""Plans a user adds: functions from a `Problem` and counts to a `Candidate`, or None where they do not apply.

A registered plan takes part in ``plan="auto"`` by its expected cost, and is also known by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sparsetc.errors import PlanError
from sparsetc.formats.base import OWN
from sparsetc.ir.plan import PLAN_NAMES
from sparsetc.names import check_free, check_label
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.problem import Problem
from sparsetc.planner.statistics import Counts

MakePlan = Callable[[Problem, Counts], Candidate | None]

PLANS: dict[str, MakePlan] = {}
F = TypeVar("F", bound=MakePlan)


def register_plan(name: str, *, replace: bool = False) -> Callable[[F], F]:
    """Decorator: make ``make(problem, counts) -> Candidate | None`` known to plans by `name`.

    Args:
        name: one line of printable characters, without quotes and backslashes, that ``plan=`` takes.
        replace: put the plan in the place of one that comes with the package, or of a format's.

    Raises:
        PlanError: a name that cannot be one, or is taken by the package.
    """
    check_label(name, "a plan", PlanError)

    def register(function: F) -> F:
        check_free(name, "plan", (*PLAN_NAMES, *OWN), replace, PlanError, function)
        PLANS[name] = function
        return function

    return register
