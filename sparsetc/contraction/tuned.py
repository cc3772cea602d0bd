"""Plans of steps by measurement (``tune=``): candidates are timed when a step is compiled, or in turn in first calls.

In: a `Step` with the plan that the cost model chose. Out: the step with the plan that was fastest, and lines of the
record. When a step is compiled, candidates run on random operands, which are nobody's.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch

from sparsetc.codegen.launch import Values
from sparsetc.contraction.canonical import Tensors
from sparsetc.contraction.prepare import in_place
from sparsetc.contraction.step import Step
from sparsetc.device.timing import Timing
from sparsetc.explain import device_name
from sparsetc.ir.plan import Plan, requested
from sparsetc.planner.candidate import Candidate, Choice, ranked
from sparsetc.planner.pricing import describe, price
from sparsetc.planner.problem import Problem
from sparsetc.planner.registry import PLANS, considered
from sparsetc.support.lru import Lru
from sparsetc.tensor.pattern import lasting
from sparsetc.tuning.known import Facts, Known
from sparsetc.tuning.search import Search, Trial, shortlist

KEPT = 64
"""Storages that candidates pack, kept while they are timed."""
ROUNDS = 3
"""Calls that candidates have, where they take turns."""
FAR = 1.2
"""How many times what the fastest takes a candidate may take to have another turn."""


@dataclass(frozen=True)
class Run:
    """A step by one of its candidates, on operands for timing."""

    step: Step
    values: torch.Tensor
    packed: Values
    dense: Tensors

    def __call__(self) -> torch.Tensor:
        return self.step.rows(self.values, self.dense, self.packed, self.dense)


def tune(step: Step) -> None:
    """Choose the plan of a step by time; as it is where its plan was given, and where there is nothing to run."""
    settings, request = step.settings, requested(step.settings.plan)
    interpreted = step.backend == "triton" and (step.device.type == "cpu" or os.environ.get("TRITON_INTERPRET") == "1")
    if interpreted or step.empty or not request.is_request or request.preferred:
        return
    with in_place(settings, step.device), lasting():
        method = PLANS.get(request.name)
        found = ranked(list(method.estimates(step.problem)) if method else considered(step.problem))
        first = as_candidate(step)
        candidates = [first, *(c for c in found if c.total is not None and c.plan != first.plan)]
        known = Known(Facts.of(step.problem), request, device_name(step.device))
        if (best := known.best(first.name)) is not None:
            _take(step, known, *best)
        elif not settings.deterministic:
            _search(step, candidates, known)


def as_candidate(step: Step) -> Candidate:
    """The plan that a step has, priced by the sizes that its parts were expected to have."""
    chosen = step.choice
    return price(Candidate(chosen.plan, chosen.expected, describe(chosen.plan, step.problem)), step.problem)


def search_of(step: Step, seconds: float) -> Search[Run]:
    """A search for the fastest plan of a step, on random operands; `OutOfMemoryError` where there is no room for them.

    Args:
        step: of any plan.
        seconds: that the search may take.
    """
    values, dense = _operands(step)
    cache: Lru[Any, Any] = Lru(KEPT)  # of what candidates pack, which goes with them

    def make(plan: Plan) -> Run:
        other = step.under(plan, cache)
        return Run(other, values, other.packed_values(values), dense)

    return Search(make, step.device, step.settings.effective_precision(), seconds)


def _search(step: Step, candidates: Sequence[Candidate], known: Known) -> None:
    mode, seconds = step.settings.effective_tune()
    few = shortlist(candidates, [c for name in known.proposed for c in candidates if c.name == name])
    search = search_of(step, seconds)
    if mode == "calls" and len(few) > 1:
        step.turns = Turns(step, search.ready(few), known)
    elif mode == "now":
        trials = search.timed(few)
        if step.backend == "triton":
            best = min(trials, key=lambda t: t.timing.median)
            search.improved(best, lambda base, plan: _changed(base, plan, step.problem))
        known.add(search.trials)
        _decide(step, known, trials[0].candidate.name)


def _take(step: Step, known: Known, best: Candidate, day: str) -> None:
    """Run a step by a plan that was timed."""
    measured = sorted(((name, line.timing.median) for name, line in known.timed.items()), key=lambda one: one[1])
    same = best.plan == step.choice.plan
    of = "the cost model's, than which none was faster by a margin," if same else "the fastest"
    plan = replace(best.plan, reason=f"{of} of {len(measured)} that were timed on {day}")
    step.take(Choice(plan, step.choice.considered, best.expected, best.seconds or (), tuple(measured)))


def _changed(base: Candidate, plan: Plan, problem: Problem) -> Candidate:
    """A candidate with an option changed, priced by the sizes that its parts had before."""
    changes = []
    for old, new in zip(base.plan.parts, plan.parts, strict=True):
        for record in ("storage", "schedule"):
            before, after = getattr(old, record), getattr(new, record)
            others = [f.name for f in fields(after) if getattr(before, f.name) != getattr(after, f.name)]
            changes += [name for name in others if name not in ("tree", "take", "turns", "ruled")]  # which follow
    named = [f"{name}={_told(plan, name)}" for name in dict.fromkeys(changes)]
    return price(Candidate(plan, base.expected, ", ".join([base.name, *named])), problem)


def _told(plan: Plan, name: str) -> str:
    part = plan.parts[0]
    value = getattr(part.storage, name, None) if hasattr(part.storage, name) else getattr(part.schedule, name)
    return "".join(str(value).split())


def _operands(step: Step) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(nnz,) values and the reduced einsum's dense operands, random; `OutOfMemoryError` where there is no room."""
    shapes, random = step.canonical.bound.dense_shapes, torch.Generator(step.device).manual_seed(0)
    nbytes = sum(map(prod, shapes)) * step.dtype.itemsize
    step.settings.check_memory(2 * nbytes, step.device, "operands for timing candidates (tune=)")

    def filled(*shape: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=step.dtype, device=step.device)
        if step.dtype.is_floating_point or step.dtype.is_complex:
            return made.uniform_(0.5, 1.5, generator=random) if step.dtype.is_floating_point else made.fill_(1 + 1j)
        return made.random_(0, 2, generator=random)

    return filled(step.operand.nnz), [filled(*shape) for shape in shapes]


class Turns:
    """The candidates of a step, which take turns in its first calls; then the fastest is taken.

    Every result is its caller's, and no call waits for a GPU: times are read once they are there.
    """

    def __init__(self, step: Step, trials: Sequence[Trial[Run]], known: Known) -> None:
        self._trials, self._known, self._owner = trials, known, weakref.ref(step)
        self._taken: list[list[float]] = [[] for _ in trials]
        self._begun, self._running = [0] * len(trials), deque[tuple[int, Any, Any]]()
        self._packed: dict[int, tuple[Any, int, Values]] = {}

    def rows(self, values: torch.Tensor | None, dense: Tensors, given: Tensors | None) -> torch.Tensor:
        """The result of a call, as `Step.rows` has it, by the candidate whose turn it is."""
        self._look()
        number = self._next()
        trial = self._trials[number].run.step
        packed = self._values(number, values)
        if values is not None and values.is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = trial._rows(values, dense, packed, given)
            end.record()
            self._running.append((number, start, end))
        else:
            begun = time.perf_counter()
            result = trial._rows(values, dense, packed, given)
            self._taken[number].append(time.perf_counter() - begun)
        self._begun[number] += 1
        return result

    def _next(self) -> int:
        """The candidate with the fewest calls, of those that are not far behind; the first while nothing is known."""
        medians = [Timing.of(own).median if own else 0.0 for own in self._taken]
        least = min((m for m in medians if m), default=0.0)
        near = [n for n, m in enumerate(medians) if not m or m <= FAR * least]
        return min(near, key=lambda n: (self._begun[n], n))

    def _look(self) -> None:
        """Read the times that are there; decide once every candidate that is not far behind had its turns."""
        while self._running and self._running[0][2].query():
            number, start, end = self._running.popleft()
            self._taken[number].append(1e-3 * start.elapsed_time(end))
        step = self._owner()
        if step is None or self._running or len(self._taken[self._next()]) < ROUNDS:
            return
        step.turns = None
        self._known.add([replace(t, timing=Timing.of(own)) for t, own in zip(self._trials, self._taken, strict=True)])
        with in_place(step.settings, step.device), lasting():
            _decide(step, self._known, self._trials[0].candidate.name)

    def _values(self, number: int, values: torch.Tensor | None) -> Values:
        """The values as a candidate stores them, packed once while they stay the same."""
        step, known = self._trials[number].run.step, self._packed.get(number)
        if values is None or values.is_inference():
            return step.packed_values(values)
        if known is None or known[0]() is not values or known[1] != values._version:
            known = self._packed[number] = (weakref.ref(values), values._version, step.packed_values(values))
        return known[2]


def _decide(step: Step, known: Known, first: str) -> None:
    """Run a step by the fastest plan that was timed."""
    best = known.best(first)
    assert best is not None
    _take(step, known, *best)
