"""Plans a user adds: functions from a `Setting` and counts to a `Candidate`, or None where they do not apply.

A registered plan takes part in ``plan="auto"`` by its expected cost, and is also known by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sparsetc.planner.candidates import Candidate, Setting
from sparsetc.planner.statistics import Counts

MakePlan = Callable[[Setting, Counts], Candidate | None]

PLANS: dict[str, MakePlan] = {}
F = TypeVar("F", bound=MakePlan)


def register_plan(name: str) -> Callable[[F], F]:
    """Decorator: make ``make(setting, counts) -> Candidate | None`` known to plans by `name`."""

    def register(function: F) -> F:
        PLANS[name] = function
        return function

    return register
