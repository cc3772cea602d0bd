"""Candidates -> cost -> choice.

In: a `Setting` and counts. Out: the chosen candidate, and what every candidate was expected to cost, for `explain`.
"""

from __future__ import annotations

from dataclasses import replace

from sparsetc.errors import PlanError
from sparsetc.ir.plan import FIXED, PAIRED_PLANS, Part, Plan, requested, verify
from sparsetc.planner.candidates import Candidate, Setting
from sparsetc.planner.choice import Choice, Estimate, choice_of
from sparsetc.planner.methods import methods, named
from sparsetc.planner.pricing import expected_seconds, views
from sparsetc.planner.registry import PLANS
from sparsetc.planner.statistics import Counts


def choose(wanted: str | Plan, setting: Setting, counts: Counts) -> Choice:
    """The plan given, the one that a request names, or for ``"auto"`` the candidate expected to be fastest."""
    plan = requested(wanted)
    _refuse_plans_of_pairs(plan, setting)
    if not plan.is_request:
        verify(plan)
        return Choice(replace(_suited(plan, setting), reason="given by the caller"))
    if plan.name == "auto" and plan.name not in PLANS:
        return choice_of([estimate(c, setting) for c in everyone(setting, counts)])
    return choice_of([estimate(named(plan, setting, counts), setting)], "asked for by name")


def everyone(setting: Setting, counts: Counts) -> list[Candidate]:
    """Every plan that applies, at the precision asked for and at those that are more exact.

    A lower precision thus adds candidates and takes none away, so it is never expected to be slower.
    """
    found: dict[Plan, Candidate] = {}
    for precision in (setting.precision, *setting.finer):
        own = replace(setting, precision=precision)
        for candidate in (c for method in methods().values() for c in method.offered(own, counts)):
            if candidate is not None:
                found.setdefault(_without_idle_precision(candidate.plan), candidate)
    return list(found.values())


def _without_idle_precision(plan: Plan) -> Plan:
    """The plan such that precisions tell only those apart whose dots have them."""
    parts = (p if p.schedule.dot else replace(p, schedule=replace(p.schedule, precision="ieee")) for p in plan.parts)
    return replace(plan, parts=tuple(parts))


def estimate(candidate: Candidate, setting: Setting) -> Estimate:
    """What a candidate is expected to take; tiles' prices are of another kind than those of nonzeros alone."""
    candidate = replace(candidate, plan=_suited(candidate.plan, setting))
    seconds = expected_seconds(candidate, setting)
    scalar = not any(view.sides for view in views(candidate, setting))
    return Estimate(describe(candidate, setting), candidate.plan, seconds, candidate.expected, scalar)


def _refuse_plans_of_pairs(plan: Plan, setting: Setting) -> None:
    """Raise `PlanError` where a plan of two sparse operands is asked for of one, unless someone registered its name."""
    if plan.pairs or (plan.is_request and plan.name in PAIRED_PLANS and plan.name not in PLANS):
        raise PlanError(
            f'plan {plan.name!r} is for two or more sparse operands, and "{setting.bound.einsum}" has one; known for '
            f"one: auto, hls, {', '.join((*FIXED, *PLANS))}"
        )


def _suited(plan: Plan, setting: Setting) -> Plan:
    """The plan as the backend and the type take it, before it is priced."""
    parts = [p if setting.backend == "triton" else _one_lane(p) for p in plan.parts]
    if not setting.products:
        parts = [replace(p, schedule=replace(p.schedule, dot=False)) for p in parts]
    return replace(plan, parts=tuple(parts))


def _one_lane(part: Part) -> Part:
    """The part as the torch programs take it: one lane, so that nothing is padded."""
    return replace(
        part,
        storage=replace(part.storage, lanes=1, narrow=False),
        schedule=replace(part.schedule, lanes=1, unroll=1),
    )


def describe(candidate: Candidate, setting: Setting) -> str:
    """A candidate's name, and its parts' levels by letters and precisions of dots, on one line."""
    parts = []
    for p in candidate.plan.parts:
        own = " | ".join("".join(setting.letters[m] for m in modes) or "-" for modes in p.storage.levels)
        dots = p.schedule.dot and setting.backend == "triton"
        parts.append(f"{p.format}[{own}]{f' {p.schedule.precision}' if dots else ''}")
    return f"{candidate.plan.name}: {' + '.join(parts)}"
