"""Which plan a step takes, be its sparse operands one or two.

In: a problem, the methods that run such, and what a user asks for. Out: a `Choice`: the plan, and what every one that
was considered was expected to take, for `explain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from sparsetc.errors import PlanError
from sparsetc.ir.plan import PAIRED_PLANS, PREFERRED, Plan, requested, verify
from sparsetc.packing.base import unknown_parameter
from sparsetc.planner.candidate import Choice, Estimate, choice_of
from sparsetc.planner.method import Method, suited
from sparsetc.planner.problem import Problem
from sparsetc.planner.registry import PLANS

P = TypeVar("P")


def choose(wanted: str | Plan, problem: Problem) -> Choice:
    """The plan of one sparse operand: as given, as a request names it, or the one expected to be fastest."""
    plan = requested(wanted)
    if plan.pairs or (plan.is_request and plan.name in PAIRED_PLANS and plan.name not in PLANS):
        raise PlanError(
            f'plan {plan.name!r} is for two or more sparse operands, and "{problem.equation}" has one; known for '
            f"one: {_names()}"
        )
    if not plan.is_request:
        verify(plan)
        for number, part in enumerate(plan.parts):
            if fault := part.storage.misdealt(problem.order, problem.letters):
                raise PlanError(f"plan {plan.name!r}, part {number} ({part.format}): {fault}")
            if fault := unknown_parameter(part.format, part.storage, problem.order):
                raise PlanError(f"plan {plan.name!r}, part {number}: {fault}")
        return Choice(replace(suited(plan, problem), reason="given by the caller"))
    check_request(plan)
    return chosen(problem, PLANS, plan)


def check_request(wanted: str | Plan) -> None:
    """Raise `PlanError` where a request for a plan of one sparse operand names none, or an option that it has not."""
    plan = requested(wanted)
    if not plan.is_request:
        return
    if plan.name not in ("auto", *PLANS):
        called = repr(plan.name)
        raise PlanError(f"plan {called} has no parts, and no plan is called {called}; known: {_names()}")
    options = (PREFERRED,) if plan.name == "auto" else PLANS[plan.name].options
    unknown = [name for name, _ in plan.options if name not in options]
    if unknown:
        raise PlanError(f"plan {plan.name!r} has no option {unknown[0]!r}")


def chosen(problem: P, known: Mapping[str, Method[P]], request: Plan) -> Choice:
    """What a request stands for: the method of its name, or for ``"auto"`` the cheapest that any method estimates.

    A method that the request prefers comes before all others where it applies.
    """
    if request.name in known:
        return choice_of([known[request.name].requested(problem, request)], "asked for by name")
    first = known.get(request.preferred)
    if first and (found := list(first.estimates(problem))):
        return choice_of(found, "preferred where it applies")
    return choice_of(considered(problem, known))


def considered(problem: P, known: Mapping[str, Method[P]]) -> list[Estimate]:
    """What ``"auto"`` considers for an einsum by itself."""
    return [found for method in known.values() if method.alone for found in method.estimates(problem)]


def _names() -> str:
    return ", ".join(("auto", *PLANS))
