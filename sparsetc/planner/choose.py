"""Candidates -> cost -> choice.

In: a `Setting` and counts. Out: the chosen candidate, and what every candidate was expected to cost, for `explain`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsetc.errors import PlanError
from sparsetc.formats import FORMATS, get_format
from sparsetc.ir.cost import CPU, Cost, Rates, Statistics, cost
from sparsetc.ir.lower import lower
from sparsetc.ir.operands import Target
from sparsetc.ir.plan import Part, Plan, verify
from sparsetc.planner.candidates import Candidate, Setting, candidates, named
from sparsetc.planner.hls import HybridPlan
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
    rates = CPU if setting.backend == "torch" else Rates()
    if wanted == "hls" or isinstance(wanted, HybridPlan):
        maker = wanted if isinstance(wanted, HybridPlan) else HybridPlan()
        return _asked_for(maker(setting, counts), setting, rates, sparse_output)
    if not isinstance(wanted, str):
        raise PlanError(f"plan must be a name or a Plan, found {type(wanted).__name__}")
    if wanted in PLANS:
        found = PLANS[wanted](setting, counts)
        if found is None:
            raise PlanError(f'plan {wanted!r} does not apply to "{setting.bound.einsum}"')
        return _asked_for(found, setting, rates, sparse_output)
    offer = getattr(FORMATS.get(wanted), "offer", None)
    if offer is not None:
        found = offer(setting, counts)
        if found is None:
            raise PlanError(f'format {wanted!r} does not apply to "{setting.bound.einsum}" on this tensor')
        return _asked_for(found, setting, rates, sparse_output)
    if wanted != "auto":
        return _asked_for(named(wanted, setting, counts), setting, rates, sparse_output)
    everyone = list(candidates(setting, counts))
    everyone += [c for make in PLANS.values() if (c := make(setting, counts)) is not None]
    everyone += [
        c for known in FORMATS.values() if (offer := getattr(known, "offer", None)) and (c := offer(setting, counts))
    ]
    priced = [(expected_seconds(c, setting, rates, sparse_output), n) for n, c in enumerate(everyone)]
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


def expected_seconds(candidate: Candidate, setting: Setting, rates: Rates, sparse_output: bool) -> float:
    """Time of one call: the launch, and the parts one after another (a fused launch overlaps only their ends)."""
    total = rates.launch * (1 if candidate.plan.fused else len(candidate.plan.parts))
    for part_cost, statistics in zip(costs(candidate, setting, sparse_output), candidate.expected, strict=True):
        total += part_cost.predicted(statistics, rates)
    return total


def costs(candidate: Candidate, setting: Setting, sparse_output: bool) -> list[Cost]:
    """Costs of the parts' tile programs, lowered from the views their formats promise."""
    (sparse,) = setting.bound.einsum.sparse
    shape = setting.bound.extents(setting.bound.einsum.inputs[sparse])
    found = []
    for part in candidate.plan.parts:
        view = get_format(part.format).view(shape, part.layout)
        keyed = (
            setting.kept == part.layout.item
            or not setting.rest
            or (not part.layout.item and setting.kept == part.layout.lane)
        )
        target = Target(sparse_output, natural=part.format == "coo", owned=keyed)
        program = lower(setting.bound, view, part.schedule, target, unroll=part.layout.unroll)
        found.append(cost(program))
    return found


def _asked_for(candidate: Candidate, setting: Setting, rates: Rates, sparse_output: bool) -> Choice:
    plan = replace(candidate.plan, reason="asked for by name")
    seconds = expected_seconds(candidate, setting, rates, sparse_output)
    return Choice(plan, ((describe(candidate), seconds),), candidate.expected)
