"""Formats and plans by name, the package's own and users', and the choice among plans.

To register: a class, a method, or a function from a `Problem` and counts to a `Candidate`, None where it does not
apply, becomes an entry of `FORMATS` or `PLANS`. A registered plan takes part in ``plan="auto"`` by its expected cost.
To choose: of a problem, the methods that run such (of one sparse operand or two) and what a user asks for, a `Choice`:
the plan, and what every one that was considered was expected to take, for `explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from dataclasses import replace as changed
from functools import partial
from typing import TypeVar, overload

from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.plan import PAIRED_PLANS, PREFERRED, Plan, requested, verify
from sparsetc.packing.base import FORMATS, Format, unknown_parameter
from sparsetc.planner.candidate import Candidate, Choice, Estimate, choice_of
from sparsetc.planner.method import Method, OperandMethod, suited
from sparsetc.planner.pricing import orderly
from sparsetc.planner.problem import Counts, Problem
from sparsetc.support.names import check_free, check_identifier, check_label
from sparsetc.tensor.pattern import clear_patterns

MakePlan = Callable[[Problem, Counts], Candidate | None]
F = TypeVar("F", bound=Callable[..., Format])
M = TypeVar("M", bound=MakePlan)

PLANS: dict[str, Method[Problem]] = {}
"""The methods that run one sparse operand, by the names of their plans, in the order in which they are considered."""


def add_plans(*methods: Method[Problem]) -> None:
    """Make methods of the package known."""
    PLANS.update({method.name: method for method in methods})


class Registered(OperandMethod):
    """A function that a format offers or a user registers, as a method."""

    def __init__(self, name: str, make: MakePlan, shared: bool = False) -> None:
        self.name, self.make, self.shared = name, make, shared

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
        plan, sizes = changed(found.plan, name=self.name), len(found.expected)
        verify(plan)
        if sizes != len(plan.parts):
            raise PlanError(f"plan {self.name!r} has {len(plan.parts)} parts, and the expected sizes of {sizes}")
        return changed(found, plan=plan)


def register_plan(name: str, *, shared: bool = False, replace: bool = False) -> Callable[[M], M]:
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

    def register(function: M) -> M:
        check_free(name, "plan", _holders(name), replace, PlanError, function)
        PLANS[name] = Registered(name, function, shared)
        clear_patterns()
        return function

    return register


@overload
def register_format(cls: F) -> F: ...
@overload
def register_format(*, replace: bool) -> Callable[[F], F]: ...
def register_format(cls: F | None = None, *, replace: bool = False) -> F | Callable[[F], F]:
    """Class decorator: make a format known by its ``name``, to plans, to `explain` and to the conformance suite.

    Args:
        cls: the class; one instance of it is made here, without arguments.
        replace: put the format in the place of one that comes with the package, or under the name of a plan that does.

    Raises:
        FormatError: the class lacks what a format has, or its name is no identifier, or is taken by the package.
    """
    if cls is None:
        return partial(register_format, replace=replace)  # type: ignore[call-overload, no-any-return]
    instance, called = cls(), getattr(cls, "__name__", repr(cls))
    missing = [written for part, written in PARTS.items() if not hasattr(instance, part)]
    if missing:
        raise FormatError(f"{called} is not a format: it has no {', no '.join(missing)}")
    name = check_identifier(instance.name, f"a format ({called})", FormatError)
    check_free(name, "the name", _holders(name), replace, FormatError, cls)
    FORMATS[name] = instance
    if offer := getattr(instance, "offer", None):
        PLANS[name] = Registered(name, offer)
    clear_patterns()
    return cls


PARTS = {
    "name": "name",
    "view": "view(shape, storage)",
    "pack": "pack(coords, shape, storage)",
}
"""What a format must have, as its author writes it."""


def _holders(name: str) -> list[object]:
    """What has this name among formats and plans; the functions that users registered are theirs, wherever defined."""
    held = PLANS.get(name)
    plan = requested if name in ("auto", *PAIRED_PLANS) else None if isinstance(held, Registered) else held
    return [FORMATS.get(name), plan]


def plan_preferring(name: str) -> Plan:
    """The plan of this name where it applies, and elsewhere the one that is expected to be fastest."""
    return Plan("auto", options=((PREFERRED, name),))


def plan_of_derived(wanted: str | Plan) -> str | Plan:
    """The request for einsums that follow from one by this plan, as its gradients do: "auto", or a shared plan first.

    A plan that was chosen for one einsum does not serve another, unless it says so.
    """
    plan = requested(wanted)
    name = plan.preferred or plan.name
    return plan_preferring(name) if name in PLANS and PLANS[name].shared else "auto"


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
