"""A candidate -> what it is expected to take, as the backend and the type would run it.

In: a `Candidate` and its `Problem`. Out: an `Estimate`.
"""

from __future__ import annotations

from dataclasses import replace

from sparsetc.errors import PlanError
from sparsetc.formats import get_format
from sparsetc.ir.lower import Target, scheduled
from sparsetc.ir.plan import Part, Plan
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.choice import Estimate
from sparsetc.planner.pricing import Prices, views
from sparsetc.planner.problem import Problem


def estimate(candidate: Candidate, problem: Problem) -> Estimate:
    """What a candidate is expected to take; tiles' prices are of another kind than those of nonzeros alone."""
    candidate = replace(candidate, plan=suited(candidate.plan, problem))
    seconds = Prices(problem)(candidate)
    scalar = not any(view.sides for view in views(candidate, problem))
    return Estimate(describe(candidate, problem), candidate.plan, seconds, candidate.expected, scalar)


def suited(plan: Plan, problem: Problem) -> Plan:
    """The plan as the backend and the type take it, before it is priced."""
    parts = [p if problem.backend == "triton" else _one_lane(p) for p in plan.parts]
    if not problem.products:
        parts = [replace(p, schedule=replace(p.schedule, dot=False)) for p in parts]
    return replace(plan, parts=tuple(_with_tree(p, problem) for p in parts))


def _with_tree(part: Part, problem: Problem) -> Part:
    """The part with the tree that is lowered; `PlanError` for a tree of dots where the type has none."""
    if part.schedule.tree is not None and part.schedule.tree.dots and not problem.products:
        raise PlanError(f"tree {part.schedule.tree}: integers have no matrix product")
    view = get_format(part.format).view(problem.shape, part.storage)
    target = Target(problem.sparse_output, in_operand_order=part.format == "coo")
    return replace(part, schedule=scheduled(problem.bound, view, part.schedule, target))


def _one_lane(part: Part) -> Part:
    """The part as the torch programs take it: one lane, so that nothing is padded."""
    return replace(
        part,
        storage=replace(part.storage, lanes=1, narrow=False),
        schedule=replace(part.schedule, lanes=1, unroll=1),
    )


def without_idle_precision(plan: Plan) -> Plan:
    """The plan such that precisions tell only those apart whose dots have them."""
    parts = (p if p.schedule.dot else replace(p, schedule=replace(p.schedule, precision="ieee")) for p in plan.parts)
    return replace(plan, parts=tuple(parts))


def describe(candidate: Candidate, problem: Problem) -> str:
    """A candidate's name, and its parts' levels by letters and precisions of dots, on one line."""
    parts = []
    for p in candidate.plan.parts:
        own = " | ".join("".join(problem.letters[m] for m in modes) or "-" for modes in p.storage.levels)
        dots = p.schedule.dot and problem.backend == "triton"
        sizes = ", ".join(f"{name}={size}" for name, size in p.storage.params)
        parts.append(f"{p.format}{f'({sizes})' if sizes else ''}[{own}]{f' {p.schedule.precision}' if dots else ''}")
    return f"{candidate.plan.name}: {' + '.join(parts)}"
