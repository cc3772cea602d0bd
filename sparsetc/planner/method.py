"""A way to run a step, be its sparse operands one or two: what it is expected to take, and what its name stands for.

In: a problem. Out: `Estimate`s, from which the chooser makes a `Choice`. A method for one sparse operand has
`Candidate`s. Each is priced as the backend and the dtype would run it, then with options that may gain: the order of
the grid, copies of the output, and dense operands that are rounded to bfloat16 once a call. Its plans say all of how
their parts are stored and run, so one function prepares them (`sparsetc.contraction.prepare`); a method for two sparse
operands prepares what runs its plan itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any, Generic, TypeVar

from sparsetc.device.profile import of_backend
from sparsetc.errors import PlanError
from sparsetc.ir.lower import Target, scheduled
from sparsetc.ir.plan import ROUNDED, Part, Plan, Schedule, in_bf16
from sparsetc.ir.program.operands import dense_axes, named_operands
from sparsetc.packing.base import get_format
from sparsetc.planner.candidate import APART, Candidate, Estimate
from sparsetc.planner.pricing import Priced, price
from sparsetc.planner.problem import Counts, Problem

MOST_COPIES = 128
"""Copies of the output, at most."""
Option = Callable[[Schedule, Problem], Schedule]
"""One decision of how programs run: return the schedule with it."""


def estimate(candidate: Candidate, problem: Problem) -> Estimate:
    """Return what a candidate is expected to take, with the grid's order and copies of the output decided."""
    candidate = replace(candidate, plan=suited(candidate.plan, problem))
    best = in_order(candidate, problem)
    adds = problem.backend == "triton" and not problem.deterministic
    if adds and any(cost.met for cost in best.costs):  # elsewhere no addition waits for another
        best = tried(_in_copies, best, candidate, problem)
    candidate = replace(candidate, plan=replace(candidate.plan, parts=best.parts))
    scalar = not any(cost.p.view.values.sides for cost in best.costs)
    return Estimate(describe(candidate, problem), candidate.plan, best.seconds, candidate.expected, scalar)


def in_order(candidate: Candidate, problem: Problem) -> Priced:
    """Return the parts, each with its grid in slabs (`Schedule.slabs`) if the cost model expects that to be faster."""
    return tried(_in_slabs, price(candidate, problem), candidate, problem, by_part=True)


def tried(option: Option, own: Priced, candidate: Candidate, problem: Problem, by_part: bool = False) -> Priced:
    """Return the parts with an option if their prices say that it gains: each part for itself, or all together."""
    parts = tuple([replace(p, schedule=option(p.schedule, problem)) for p in own.parts])
    if parts == own.parts:
        return own
    other = price(replace(candidate, plan=replace(candidate.plan, parts=parts)), problem)
    least_gain = of_backend(problem.backend).laws["least_gain"]
    together = [(sum(own.seconds), sum(other.seconds))] * len(parts)
    seconds = zip(own.seconds, other.seconds, strict=True) if by_part else together
    each: Any = zip(zip(*own, strict=True), zip(*other, strict=True), seconds, strict=True)  # (part, cost, seconds)
    kept = [new if least_gain * after < before else old for old, new, (before, after) in each]
    return Priced(*zip(*kept, strict=True))


def _in_slabs(own: Schedule, problem: Problem) -> Schedule:
    """Take every axis that is split over the grid in slabs, unless the schedule names slabs."""
    sizes = problem.bound.by_index
    return replace(own, slabs=own.slabs or tuple([c for c in dense_axes(problem.bound) if sizes[c] > own.block(c)]))


def _in_copies(own: Schedule, problem: Problem) -> Schedule:
    """Add to copies of the output, the more the fewer rows it has, so that additions wait less for one another."""
    crowd = max(1, int(of_backend(problem.backend).laws["uncrowded"]) // problem.rows)
    return replace(own, copies=max(own.copies, min(MOST_COPIES, 1 << crowd.bit_length() - 1)))


def suited(plan: Plan, problem: Problem) -> Plan:
    """The plan as the backend and the type take it, before it is priced; torch has one lane, so that nothing is padded.

    Raises:
        PlanError: a tree has dots, and the type has none.
    """
    triton = problem.backend == "triton"
    without: tuple[tuple[bool, dict[str, Any]], ...] = (  # what stands where an option does not apply
        (triton, {"lanes": 1, "unroll": 1}),
        (triton and problem.floating and problem.itemsize == 4, {"rounded": ()}),  # float32 alone is rounded
        (triton and not problem.deterministic, {"copies": 1}),
        (problem.products, {"dot": False}),
    )
    options = {name: value for applies, own in without if not applies for name, value in own.items()}
    parts = [replace(p, schedule=replace(p.schedule, **options)) for p in plan.parts]
    if not triton:
        parts = [replace(p, storage=replace(p.storage, lanes=1, narrow=False)) for p in parts]
    return replace(plan, parts=tuple([_with_tree(p, problem) for p in parts]))


def _with_tree(part: Part, problem: Problem) -> Part:
    """The part with the tree that is lowered; `PlanError` for a tree of dots where the type has none."""
    if part.schedule.tree is not None and part.schedule.tree.dots and not problem.products:
        raise PlanError(f"tree {part.schedule.tree}: integers have no matrix product")
    own = get_format(part.format)
    if hasattr(own, "lower"):  # which reads no tree
        return part
    view = own.view(problem.shape, part.storage)
    target = Target(problem.sparse_output, in_operand_order=part.format == "coo")
    return replace(part, schedule=scheduled(problem.bound, view, part.schedule, target))


def describe(candidate: Candidate, problem: Problem) -> str:
    """A candidate's name, and its parts' levels by letters and precisions of dots, on one line."""
    parts = []
    for p in candidate.plan.parts:
        own = " | ".join(["".join(map(problem.letters.__getitem__, modes)) or "-" for modes in p.storage.levels])
        dots = p.schedule.dot and problem.backend == "triton"
        sizes = ", ".join(f"{name}={size}" for name, size in p.storage.params)
        parts.append(f"{p.format}{f'({sizes})' if sizes else ''}[{own}]{f' {p.schedule.precision}' if dots else ''}")
    rounded = dict.fromkeys(name for p in candidate.plan.parts for name in p.schedule.rounded)
    return f"{candidate.plan.name}: {' + '.join(parts)}{f', {in_bf16(rounded)}' if rounded else ''}"


def estimates(candidate: Candidate, problem: Problem) -> list[Estimate]:
    """What a candidate is expected to take: as it is, and last with operands rounded, where that is worth it."""
    priced = cache(lambda own: estimate(own, problem))
    best = rounded(candidate, problem, lambda own: sum(priced(own).seconds or ()))
    return [priced(own) for own in dict.fromkeys((candidate, best))]


def rounded(candidate: Candidate, problem: Problem, seconds: Callable[[Candidate], float]) -> Candidate:
    """The candidate with those operands rounded of which each saves time that the cost model tells apart."""
    if problem.backend != "triton" or ROUNDED not in [p.schedule.precision for p in candidate.plan.parts]:
        return candidate
    left = [o.name for o in named_operands(problem.bound)[1] if o.rows]
    best, least = candidate, seconds(candidate)
    while left:
        others = {name: replace(best, plan=best.plan.scheduled(partial(_cast, name))) for name in left}
        times = {name: seconds(other) for name, other in others.items()}
        name = min(left, key=lambda name: times[name])
        if APART * times[name] > least:
            break
        best, least = others[name], times[name]
        left.remove(name)
    return best


def _cast(name: str, own: Schedule) -> Schedule:
    """Round one more operand, if the precision allows it."""
    allowed = own.precision == ROUNDED and name not in own.rounded
    return replace(own, rounded=(*own.rounded, name)) if allowed else own


P = TypeVar("P")


class Method(ABC, Generic[P]):
    """One way to run a step."""

    name: str
    """The name of the method's plans."""
    alone: bool = True
    """Whether ``"auto"`` considers the method for an einsum by itself, and not only for several that share a copy."""
    shared: bool = False
    """Whether nonzeros are dealt and stored alike for every einsum, so that one packed copy serves them all."""
    options: tuple[str, ...] = ()
    """What a request by the method's name may say beside it."""

    @abstractmethod
    def estimates(self, problem: P) -> Iterable[Estimate]:
        """What ``"auto"`` considers of the method, and what that is expected to take."""

    @abstractmethod
    def requested(self, problem: P, request: Plan) -> Estimate:
        """What a request by the method's name stands for; `PlanError` where the method does not apply."""


class OperandMethod(Method[Problem]):
    """One way to run an einsum with one sparse operand: its plans are candidates, costed before one is packed."""

    @abstractmethod
    def candidates(self, problem: Problem, counts: Counts) -> Iterable[Candidate]:
        """The plans worth considering; none where the method does not apply."""

    @abstractmethod
    def candidate(self, problem: Problem, counts: Counts, request: Plan) -> Candidate | None:
        """What a request stands for; None, or `PlanError`, where the method does not apply."""

    def estimates(self, problem: Problem) -> Iterable[Estimate]:
        """Every candidate, at the precision asked for and at those that are more exact, and with operands rounded.

        A lower precision thus adds candidates and takes none away, so it is never expected to be slower.
        """
        found: dict[Plan, list[Estimate]] = {}
        for precision in (problem.precision, *problem.finer):
            own = replace(problem, precision=precision)
            for candidate in self.candidates(own, problem.counts):
                # Precisions tell only those plans apart whose dots have them.
                key = candidate.plan.scheduled(lambda s: s if s.dot else replace(s, precision="ieee"))
                if key not in found:
                    found[key] = estimates(candidate, problem)
        return chain(*found.values())

    def requested(self, problem: Problem, request: Plan) -> Estimate:
        """The candidate that is named, with operands rounded where that pays, and what it is expected to take."""
        found = self.candidate(problem, problem.counts, request)
        if found is None:
            said = f'plan {request.name!r} does not apply to "{problem.equation}" on this tensor'
            raise PlanError(f'{said}: the function that makes it gave None, and no candidate; "auto" takes another')
        return estimates(found, problem)[-1]
