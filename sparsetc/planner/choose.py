"""Candidates -> cost -> choice.

In: a `Setting` and counts. Out: the chosen candidate, and what every candidate was expected to cost, for `explain`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsetc.errors import PlanError
from sparsetc.formats import FORMATS
from sparsetc.ir.cost import Statistics
from sparsetc.ir.plan import FIXED, PAIRED_PLANS, Part, Plan, requested, verify
from sparsetc.planner.candidates import Candidate, Setting, candidates, named
from sparsetc.planner.hls import hls, offered
from sparsetc.planner.pricing import expected_seconds, views
from sparsetc.planner.registry import PLANS
from sparsetc.planner.statistics import Counts


@dataclass(frozen=True)
class Choice:
    """A plan, and the seconds each candidate was expected to take, the cheapest first."""

    plan: Plan
    considered: tuple[tuple[str, float], ...]
    expected: tuple[Statistics, ...] = ()
    """What packing each part was expected to give; empty for a plan given by the caller."""
    seconds: tuple[float, ...] = ()
    """Of each part of the plan, launches included: together what `considered` says of it; empty as `expected` is."""

    def __repr__(self) -> str:
        expected = f"{1e6 * sum(self.seconds):.1f} us expected, " if self.seconds else ""
        return f"Choice({self.plan.name!r}, {expected}{len(self.considered)} considered)"


def choose(wanted: str | Plan, setting: Setting, counts: Counts, sparse_output: bool) -> Choice:
    """The plan given, the one that a request names, or for ``"auto"`` the candidate expected to be fastest."""
    plan = requested(wanted)
    _refuse_plans_of_pairs(plan, setting)
    if not plan.is_request:
        verify(plan)
        parts = tuple(map(_one_lane, plan.parts)) if setting.backend == "torch" else plan.parts
        return Choice(replace(plan, parts=parts, reason="given by the caller"), ())
    if plan.name == "auto" and plan.name not in PLANS:
        return _cheapest(everyone(setting, counts, sparse_output), setting, sparse_output)
    return _asked_for(_candidate_of(plan, setting, counts, sparse_output), setting, sparse_output)


def _candidate_of(request: Plan, setting: Setting, counts: Counts, sparse_output: bool) -> Candidate:
    """The candidate that a request stands for."""
    name = request.name
    if name in PLANS:
        return _applied(PLANS[name](setting, counts), f"plan {name!r}", setting)
    if name == "hls":
        return hls(setting, counts, sparse_output, request.option("threshold", None))
    offer = getattr(FORMATS.get(name), "offer", None)
    if offer is not None:
        return _applied(offer(setting, counts), f"format {name!r}", setting)
    return named(name, setting, counts)


def _applied(found: Candidate | None, what: str, setting: Setting) -> Candidate:
    if found is None:
        raise PlanError(f'{what} does not apply to "{setting.bound.einsum}" on this tensor')
    return found


def everyone(setting: Setting, counts: Counts, sparse_output: bool) -> list[Candidate]:
    """Every plan that applies, at the precision asked for and at those that are more exact.

    A lower precision thus adds candidates and takes none away, so it is never expected to be slower.
    """
    found: dict[Plan, Candidate] = {}
    for precision in (setting.precision, *setting.finer):
        own = replace(setting, precision=precision)
        hybrid = offered(own, counts, sparse_output)
        made = [*candidates(own, counts), *([hybrid] if hybrid else [])]
        made += [c for make in PLANS.values() if (c := make(own, counts)) is not None]
        offers = [getattr(known, "offer", None) for known in FORMATS.values()]
        made += [c for offer in offers if offer and (c := offer(own, counts)) is not None]
        for candidate in made:
            found.setdefault(_without_idle_precision(candidate.plan), candidate)
    return list(found.values())


def _without_idle_precision(plan: Plan) -> Plan:
    """The plan such that precisions tell only those apart whose dots have them."""
    parts = (p if p.schedule.dot else replace(p, schedule=replace(p.schedule, precision="ieee")) for p in plan.parts)
    return replace(plan, parts=tuple(parts))


APART = 1.05
"""How many times another's a scalar plan's time must be for the cost model to tell them apart; of nearer ones that of
fewest parts is taken (H200, SpMM of pubmed, 32 columns: `coo+rows`, priced 4 % below `coo`, took 2.3 times as long)."""


def _cheapest(found: list[Candidate], setting: Setting, sparse_output: bool) -> Choice:
    """The candidate expected to be fastest, with what all were expected to take."""
    seconds = [expected_seconds(c, setting, sparse_output) for c in found]
    order = sorted(range(len(found)), key=lambda n: (sum(seconds[n]), n))
    least = sum(seconds[order[0]])
    if not _has_tiles(found[order[0]], setting):  # whose price is of another kind
        near = [n for n in order if sum(seconds[n]) <= APART * least and not _has_tiles(found[n], setting)]
        simplest = min(near, key=lambda n: len(found[n].plan.parts))
        order = [simplest, *(n for n in order if n != simplest)]
    best = found[order[0]]
    considered = tuple((describe(found[n], setting), sum(seconds[n])) for n in order)
    reason = "the only plan that applies" if len(found) == 1 else f"the cheapest of {len(found)} by the cost model"
    return Choice(replace(best.plan, reason=reason), considered, best.expected, seconds[order[0]])


def _has_tiles(candidate: Candidate, setting: Setting) -> bool:
    return any(view.sides for view in views(candidate, setting))


def _refuse_plans_of_pairs(plan: Plan, setting: Setting) -> None:
    """Raise `PlanError` where a plan of two sparse operands is asked for of one, unless someone registered its name."""
    if plan.pairs or (plan.is_request and plan.name in PAIRED_PLANS and plan.name not in PLANS):
        raise PlanError(
            f'plan {plan.name!r} is for two or more sparse operands, and "{setting.bound.einsum}" has one; known for '
            f"one: auto, hls, {', '.join((*FIXED, *PLANS))}"
        )


def _one_lane(part: Part) -> Part:
    """The part as the torch programs take it: one lane, so that nothing is padded."""
    return replace(part, layout=replace(part.layout, lanes=1, unroll=1))


def describe(candidate: Candidate, setting: Setting) -> str:
    """A candidate's name, and its parts' levels by letters and precisions of dots, on one line."""
    parts = []
    for p in candidate.plan.parts:
        levels = (p.layout.item, p.layout.lane, p.layout.leaf)
        own = " | ".join("".join(setting.letters[m] for m in modes) or "-" for modes in levels)
        dots = p.schedule.dot and setting.backend == "triton" and setting.floating
        parts.append(f"{p.format}[{own}]{f' {p.schedule.precision}' if dots else ''}")
    return f"{candidate.plan.name}: {' + '.join(parts)}"


def _asked_for(candidate: Candidate, setting: Setting, sparse_output: bool) -> Choice:
    plan = replace(candidate.plan, reason="asked for by name")
    seconds = expected_seconds(candidate, setting, sparse_output)
    return Choice(plan, ((describe(candidate, setting), sum(seconds)),), candidate.expected, seconds)
