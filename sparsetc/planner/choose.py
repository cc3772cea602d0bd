"""Candidates -> cost -> choice.

In: a `Setting` and counts. Out: the chosen candidate, and what every candidate was expected to cost, for `explain`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsetc.errors import PlanError
from sparsetc.formats import FORMATS
from sparsetc.ir.cost import Statistics
from sparsetc.ir.plan import Part, Plan, verify
from sparsetc.planner.candidates import Candidate, Setting, candidates, named
from sparsetc.planner.hls import HybridPlan, offered
from sparsetc.planner.pricing import expected_seconds
from sparsetc.planner.registry import PLANS
from sparsetc.planner.statistics import Counts


@dataclass(frozen=True)
class Choice:
    """A plan, and the seconds each candidate was expected to take, the cheapest first."""

    plan: Plan
    considered: tuple[tuple[str, float], ...]
    expected: tuple[Statistics, ...] = ()
    """What packing each part was expected to give; empty for a plan given by the caller."""


def choose(wanted: str | Plan | HybridPlan, setting: Setting, counts: Counts, sparse_output: bool) -> Choice:
    """The plan of that name, the plan given, or for ``"auto"`` the candidate expected to be fastest."""
    if isinstance(wanted, Plan):
        verify(wanted)
        parts = tuple(map(_one_lane, wanted.parts)) if setting.backend == "torch" else wanted.parts
        return Choice(replace(wanted, parts=parts, reason="given by the caller"), ())
    if wanted == "hls" or isinstance(wanted, HybridPlan):
        maker = wanted if isinstance(wanted, HybridPlan) else HybridPlan()
        return _asked_for(maker(setting, counts, sparse_output), setting, sparse_output)
    if not isinstance(wanted, str):
        raise PlanError(f"plan must be a name or a Plan, found {type(wanted).__name__}")
    if wanted in PLANS:
        found = PLANS[wanted](setting, counts)
        if found is None:
            raise PlanError(f'plan {wanted!r} does not apply to "{setting.bound.einsum}"')
        return _asked_for(found, setting, sparse_output)
    offer = getattr(FORMATS.get(wanted), "offer", None)
    if offer is not None:
        found = offer(setting, counts)
        if found is None:
            raise PlanError(f'format {wanted!r} does not apply to "{setting.bound.einsum}" on this tensor')
        return _asked_for(found, setting, sparse_output)
    if wanted != "auto":
        return _asked_for(named(wanted, setting, counts), setting, sparse_output)
    everyone = list(candidates(setting, counts))
    hybrid = offered(setting, counts, sparse_output)
    everyone += [hybrid] if hybrid else []
    everyone += [c for make in PLANS.values() if (c := make(setting, counts)) is not None]
    everyone += [
        c for known in FORMATS.values() if (offer := getattr(known, "offer", None)) and (c := offer(setting, counts))
    ]
    priced = [(expected_seconds(c, setting, sparse_output), n) for n, c in enumerate(everyone)]
    best = everyone[min(priced)[1]]
    considered = tuple(sorted(((describe(everyone[n]), seconds) for seconds, n in priced), key=lambda x: x[1]))
    reason = (
        "the only plan that applies" if len(everyone) == 1 else f"the cheapest of {len(everyone)} by the cost model"
    )
    return Choice(replace(best.plan, reason=reason), considered, best.expected)


def _one_lane(part: Part) -> Part:
    """The part as the torch programs take it: one lane, so that nothing is padded."""
    return replace(part, layout=replace(part.layout, lanes=1, unroll=1))


def describe(candidate: Candidate) -> str:
    """A candidate's name and levels, on one line."""
    parts = []
    for p in candidate.plan.parts:
        levels = (p.layout.item, p.layout.lane, p.layout.leaf)
        parts.append(f"{p.format}[{' | '.join(','.join(map(str, m)) or '-' for m in levels)}]")
    return f"{candidate.plan.name}: {' + '.join(parts)}"


def _asked_for(candidate: Candidate, setting: Setting, sparse_output: bool) -> Choice:
    plan = replace(candidate.plan, reason="asked for by name")
    seconds = expected_seconds(candidate, setting, sparse_output)
    return Choice(plan, ((describe(candidate), seconds),), candidate.expected)
