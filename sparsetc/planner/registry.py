"""Plans a user adds: functions from a `Problem` and counts to a `Candidate`, or None where they do not apply.

A registered plan takes part in ``plan="auto"`` by its expected cost, and is also known by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from sparsetc.errors import PlanError
from sparsetc.formats.base import OWN
from sparsetc.ir.plan import PLAN_NAMES, SHARED, Plan, requested
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.problem import Problem
from sparsetc.planner.requests import plan_preferring, preferred
from sparsetc.planner.statistics import Counts
from sparsetc.support.names import check_free, check_label
from sparsetc.tensor.pattern import clear_patterns

MakePlan = Callable[[Problem, Counts], Candidate | None]


@dataclass(frozen=True)
class RegisteredPlan:
    """A function and what is known of its plans."""

    name: str
    make: MakePlan
    shared: bool
    """Parts are dealt and stored alike for every einsum."""


PLANS: dict[str, RegisteredPlan] = {}
F = TypeVar("F", bound=MakePlan)


def register_plan(name: str, *, shared: bool = False, replace: bool = False) -> Callable[[F], F]:
    """Decorator: make ``make(problem, counts) -> Candidate | None`` known to plans by `name`.

    Args:
        name: one line of printable characters, without quotes and backslashes, that ``plan=`` takes.
        shared: the plan deals and stores nonzeros alike for every einsum, so that one packed copy serves them all.
            Where it is asked for, gradients and batches take it too, if it applies to them; those of other plans are
            planned anew.
        replace: put the plan in the place of one that comes with the package, or of a format's.

    Raises:
        PlanError: a name that cannot be one, or is taken by the package.
    """
    check_label(name, "a plan", PlanError)

    def register(function: F) -> F:
        check_free(name, "plan", (*PLAN_NAMES, *OWN), replace, PlanError, function)
        PLANS[name] = RegisteredPlan(name, function, shared)
        clear_patterns()
        return function

    return register


def plan_of_derived(wanted: str | Plan) -> str | Plan:
    """The request for einsums that follow from one by this plan, as its gradients do: "auto", or a shared plan first.

    A plan that was chosen for one einsum does not serve another, unless it says so.
    """
    plan = requested(wanted)
    name = preferred(plan) or plan.name
    shared = PLANS[name].shared if name in PLANS else name in SHARED
    return plan_preferring(name) if shared else "auto"
