"""Which dense operands a candidate reads in bfloat16, rounded once a call: those whose rows are gathered faster so.

In: a candidate of any method, with parts at a precision that allows it. Out: the candidate with operands rounded, where
that is expected to save more time than to round them takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from sparsetc.ir.plan import ROUNDED
from sparsetc.ir.program.operands import named_operands
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.choice import APART, Estimate
from sparsetc.planner.estimate import estimate
from sparsetc.planner.problem import Problem


def estimates(candidate: Candidate, problem: Problem) -> list[Estimate]:
    """What a candidate is expected to take: as it is, and last with operands rounded, where that is worth it."""
    priced = cache(lambda own: estimate(own, problem))
    best = rounded(candidate, problem, lambda own: sum(priced(own).seconds or ()))
    return [priced(own) for own in dict.fromkeys((candidate, best))]


def rounded(candidate: Candidate, problem: Problem, seconds: Callable[[Candidate], float]) -> Candidate:
    """The candidate with those operands rounded of which each saves time that the cost model tells apart."""
    if problem.backend != "triton" or all(p.schedule.precision != ROUNDED for p in candidate.plan.parts):
        return candidate
    left = [o.name for o in named_operands(problem.bound)[1] if o.rows]
    best, least = candidate, seconds(candidate)
    while left:
        others = {name: _with(best, name) for name in left}
        times = {name: seconds(other) for name, other in others.items()}
        name = min(left, key=lambda name: times[name])
        if APART * times[name] > least:
            break
        best, least = others[name], times[name]
        left.remove(name)
    return best


def _with(candidate: Candidate, name: str) -> Candidate:
    """The candidate with one operand more rounded, in all parts whose precision allows it."""
    parts = []
    for part in candidate.plan.parts:
        own = part.schedule
        if own.precision == ROUNDED and name not in own.rounded:
            part = replace(part, schedule=replace(own, rounded=(*own.rounded, name)))
        parts.append(part)
    return replace(candidate, plan=replace(candidate.plan, parts=tuple(parts)))
