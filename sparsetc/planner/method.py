"""A way to run a step, be its sparse operands one or two: what it is expected to take, and what its name stands for.

In: a problem. Out: `Estimate`s, from which the chooser makes a `Choice`. Of one sparse operand a method has
`Candidate`s; each is priced as the backend and the type would run it, and once more with dense operands rounded to
bfloat16, once a call: those whose rows are gathered faster so, by more than rounding them takes. A method of two
operands prepares what runs its plan too; parts of one operand say all of how they are stored and run, so one function
prepares every plan of them (`sparsetc.contraction.prepare`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Generic, TypeVar

from sparsetc.device.profile import of_backend
from sparsetc.errors import PlanError
from sparsetc.ir.lower import Target, scheduled
from sparsetc.ir.plan import ROUNDED, Part, Plan, in_bf16
from sparsetc.ir.program.operands import dense_axes, named_operands
from sparsetc.packing.base import get_format
from sparsetc.planner.candidate import APART, Candidate, Estimate
from sparsetc.planner.pricing import costs, price, views
from sparsetc.planner.problem import Problem
from sparsetc.planner.statistics import Counts

MOST_COPIES = 128
"""Copies of the output, at most."""


def estimate(candidate: Candidate, problem: Problem) -> Estimate:
    """What a candidate is expected to take; tiles' prices are of another kind than those of nonzeros alone."""
    candidate, seconds = in_order(replace(candidate, plan=suited(candidate.plan, problem)), problem)
    candidate, seconds = _apart(candidate, seconds, problem)
    scalar = not any(view.values.sides for view in views(candidate, problem))
    return Estimate(describe(candidate, problem), candidate.plan, seconds, candidate.expected, scalar)


def in_order(candidate: Candidate, problem: Problem) -> tuple[Candidate, tuple[float, ...]]:
    """The candidate, parts of which take the axes that are split over the grid in slabs where that pays; its prices."""
    plan = candidate.plan
    slabs = tuple([_in_slabs(part, problem) for part in plan.parts])
    seconds = price(candidate, problem)
    if slabs == plan.parts:
        return candidate, seconds
    others = price(replace(candidate, plan=replace(plan, parts=slabs)), problem)
    least_gain = of_backend(problem.backend).laws["least_gain"]
    taken = [least_gain * other < own for own, other in zip(seconds, others, strict=True)]
    parts = tuple([slab if take else part for part, slab, take in zip(plan.parts, slabs, taken, strict=True)])
    found = tuple([other if take else own for own, other, take in zip(seconds, others, taken, strict=True)])
    return replace(candidate, plan=replace(plan, parts=parts)), found


def _in_slabs(part: Part, problem: Problem) -> Part:
    """The part with all dense axes in slabs that are split over the grid; as it is where it has slabs of its own."""
    own, sizes = part.schedule, problem.bound.by_index
    split = [c for c in dense_axes(problem.bound) if sizes[c] > (sum(own.pieces_of(c)) or own.block(c))]
    return part if own.slabs else replace(part, schedule=replace(own, slabs=tuple(split)))


def _apart(candidate: Candidate, seconds: tuple[float, ...], problem: Problem) -> tuple[Candidate, tuple[float, ...]]:
    """The candidate, whose parts add to copies of the output where rows are so few that this pays; its prices."""
    if problem.backend != "triton" or problem.deterministic or problem.sparse_output:
        return candidate, seconds
    if not any(cost.met for cost in costs(candidate, problem)):  # copies of what nothing waits for only take longer
        return candidate, seconds
    law = of_backend(problem.backend).laws
    copies = min(MOST_COPIES, 1 << max(int(law["uncrowded"]) // problem.rows, 1).bit_length() - 1)
    if copies == 1:
        return candidate, seconds
    parts = tuple([replace(p, schedule=replace(p.schedule, copies=copies)) for p in candidate.plan.parts])
    other = replace(candidate, plan=replace(candidate.plan, parts=parts))
    found = price(other, problem)
    return (other, found) if law["least_gain"] * sum(found) < sum(seconds) else (candidate, seconds)


def suited(plan: Plan, problem: Problem) -> Plan:
    """The plan as the backend and the type take it, before it is priced."""
    parts = [p if problem.backend == "triton" else _one_lane(p) for p in plan.parts]
    if problem.backend != "triton" or not problem.floating or problem.itemsize != 4:  # float32 alone is rounded
        parts = [replace(p, schedule=replace(p.schedule, rounded=())) for p in parts]
    if problem.backend != "triton" or problem.deterministic:
        parts = [replace(p, schedule=replace(p.schedule, copies=1)) for p in parts]
    if not problem.products:
        parts = [replace(p, schedule=replace(p.schedule, dot=False)) for p in parts]
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
                key = without_idle_precision(candidate.plan)
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
