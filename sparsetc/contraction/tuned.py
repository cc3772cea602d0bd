"""Plans by measurement (``tune=``): candidates are timed when a contraction is compiled, or in turn in first calls.

In: a `Step` or a `Pair` with the plan that the cost model chose. Out: the same with the plan that was fastest,
and lines of the record. When something is compiled, candidates run on random operands, which are nobody's.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsetc.contraction.pair import Pair
from sparsetc.contraction.prepare import in_force_on
from sparsetc.contraction.request import Tensors
from sparsetc.contraction.step import Step
from sparsetc.device.timing import Timing
from sparsetc.errors import OutOfMemoryError, SparsetcError
from sparsetc.explain import device_name
from sparsetc.ir.plan import AUTO, ONE_PASS, Plan, requested
from sparsetc.packing.partition import storage_keys
from sparsetc.planner.candidate import Candidate, Choice, ranked
from sparsetc.planner.pricing import describe, price
from sparsetc.planner.problem import Problem
from sparsetc.planner.registry import PLANS
from sparsetc.products import WAYS
from sparsetc.support import Cache
from sparsetc.support.checks import check_memory, state_of
from sparsetc.support.entry import bar, log_since, warn_once, without_autocast
from sparsetc.tensor.checksum import bits
from sparsetc.tensor.dtypes import accumulator
from sparsetc.tensor.pattern import lasting
from sparsetc.tuning.record import DAMAGED, Known, digest, facts_of
from sparsetc.tuning.search import Search, Trial, shortlist

KEPT = 64
"""Storages that candidates pack, kept while they are timed."""
ROUNDS = 3
"""Calls that each candidate is timed for, when candidates are timed in calls."""
CLOSE = 1.1
"""Candidates within this factor of the fastest go on to be timed in calls."""


@dataclass(frozen=True)
class Run:
    """A `Step` or a `Pair` by a candidate's plan, and a call of it on the operands for timing."""

    made: Any
    call: Callable[[], Tensor]

    def __call__(self) -> Tensor:
        """Compute the result."""
        return self.call()


leader: ContextVar[tuple[bool, dict[str, Plan]] | None] = ContextVar("sparsetc_leader", default=None)
"""Plan decisions shared by processes that compile for shares of a tensor: True where this one decides, and its plans by
equation."""


def tune(made: Step | Pair) -> None:
    """Choose a plan by time, as options ask for.

    The plan stays where the caller gave parts or options, where there are no nonzeros, and where Triton's programs
    cannot run: without a GPU, or by its interpreter. With ``deterministic=True`` nothing is timed; a record counts.
    """
    request = requested(made.settings.plan)
    request = AUTO if request == ONE_PASS else request
    no_gpu = made.device.type == "cpu" or os.environ.get("TRITON_INTERPRET") == "1"
    if made.empty or not request.is_request or request.options or (made.problem.backend.gpu and no_gpu):
        return
    with in_force_on(made.settings, made.device), lasting():
        candidates = _considered(made, request.name)
        known, (leads, plans) = Known(_facts(made), request, device_name(made.device)), leader.get() or (True, None)
        if plans is not None and not leads:
            if made.equation in plans:
                with suppress(SparsetcError):  # it does not apply to this share
                    made.take(Choice(plans[made.equation]))
            return
        runs: dict[str, Run] = {}
        if known.best(candidates) is None and not made.settings.deterministic:
            try:
                runs = _search(made, candidates, known, alone=plans is None)
            except (OutOfMemoryError, torch.OutOfMemoryError) as error:
                warn_once(f'"{made.equation}" is planned by the cost model, since plans cannot be timed: {error}')
        if getattr(made, "in_turns", None) is None:
            _decide(made, known, candidates, runs)
        if plans is not None:
            plans[made.equation] = made.choice.plan


def _considered(made: Step | Pair, name: str) -> list[Candidate]:
    """Return the candidates to time, the cost model's choice first, with those that `plan="auto"` leaves out."""
    methods: Mapping[str, Any] = PLANS if isinstance(made, Step) else WAYS
    asked = [methods[name]] if name in methods else methods.values()
    candidates = ranked([c for method in asked for c in method.estimates(made.problem)])
    if isinstance(made, Step):
        first = as_candidate(made)
    else:
        unpriced = Candidate(made.choice.plan, name=made.choice.plan.name)
        first = next((c for c in candidates if c.plan == unpriced.plan), unpriced)
    return [first, *(c for c in candidates if c.seconds and c.plan != first.plan)]


def _facts(made: Step | Pair) -> dict[str, Any]:
    """Return what a problem is known by."""
    if isinstance(made, Step):
        return facts_of(made.problem)
    join = made.join
    about = {
        "precision": made.problem.precision,
        "dtype": str(made.dtype),
        "backend": made.backend,
        "sizes": dict(made.bound.sizes),
    }
    tensor = digest(bits(join.x_key), bits(join.y_key))
    return {"tensor": tensor, "equation": made.equation, "problem": about, "pattern": {"tasks": join.tasks}}


def as_candidate(step: Step) -> Candidate:
    """Return a step's plan as a candidate, priced by the expected sizes of its parts."""
    chosen = step.choice
    return price(Candidate(chosen.plan, chosen.expected, describe(chosen.plan, step.problem)), step.problem)


def search_of(made: Step | Pair, seconds: float) -> Search[Run]:
    """Prepare a search for the fastest plan on random operands.

    Args:
        made: by any plan.
        seconds: that the search may take.
    """
    random, dtype = torch.Generator(made.device).manual_seed(0), made.dtype
    if isinstance(made, Step):
        shapes = [(made.problem.nnz,), *made.bound.dense_shapes]
    else:
        dtype, shapes = accumulator(made.summed), [(made.join.x.n,), (made.join.y.n,)]
    nbytes = 2 * sum(map(prod, shapes)) * dtype.itemsize
    check_memory("operands for timing candidates (tune=)", nbytes, made.device, made.settings.memory_limit)
    operands = [torch.empty(shape, dtype=dtype, device=made.device) for shape in shapes]
    for one in operands:
        if dtype.is_complex or dtype.is_floating_point:
            (torch.view_as_real(one) if dtype.is_complex else one).uniform_(0.5, 1.5, generator=random)
        else:
            one.random_(0, 2, generator=random)
    make = partial(_by, made, Cache(KEPT), operands)
    return Search(make, made.device, made.settings.effective_precision(), seconds)


def _by(made: Step | Pair, cache: Cache, operands: Sequence[Tensor], plan: Plan) -> Run:
    """Return a step or a pair by another plan, to be timed on operands; what is packed for it is kept in a cache."""
    other = copy(made)
    if not isinstance(other, Step):
        other.take(Choice(plan))
        with without_autocast(other.device):
            other.numeric.places()
        return Run(other, partial(other.product, "z", *operands))
    other.problem = replace(other.problem, counts=other.problem.counts.cached_in(cache))
    other.in_turns = None
    other.take(Choice(plan))
    values, *dense = operands
    return Run(other, partial(other.rows, values, dense, other.packed_values(values), dense))


def _search(made: Step | Pair, candidates: Sequence[Candidate], known: Known, alone: bool) -> dict[str, Run]:
    """Time candidates now; close ones are then timed in calls, if there is one sparse operand and nothing follows."""
    start, (mode, seconds) = time.perf_counter(), made.settings.effective_tune()
    few = shortlist(
        candidates, [c for name in known.proposed for c in candidates if f"{name}, ".startswith(f"{c.name}, ")]
    )
    search = search_of(made, seconds)
    with bar(None, f'timing {len(few)} plans of "{made.equation}"'):
        trials = sorted(search.timed(few), key=lambda t: t.timing.median)
    if not trials:  # results that are not finite, of random operands
        return {}
    close = [t for t in trials if t.timing.median <= CLOSE * trials[0].timing.median]
    if mode == "calls" and alone and isinstance(made, Step):
        both = dict.fromkeys((*close, search.trials[0]))
        made.in_turns = in_turns(made, [*both], known, candidates) if len(close) > 1 else None
    elif isinstance(made, Step) and (made.problem.backend.gpu or made.device.type == "cpu"):
        threads = 0 if made.problem.backend.gpu else torch.get_num_threads()
        search.improved(trials[0], partial(_changed, made.problem), threads)
    if getattr(made, "in_turns", None) is None:  # else calls alone count: a search lacks what their launches take
        known.add(search.trials)
    about = len(trials), made.equation, trials[0].candidate.name, 1e6 * trials[0].timing.median
    log_since(start, logging.INFO, 'timed %d plans of "%s", the fastest %s with %.1f us', *about)
    return runs_of(search.trials)


def runs_of(trials: Iterable[Trial[Run]]) -> dict[str, Run]:
    """Return what was made by each candidate, by its name."""
    return {t.candidate.name: t.run for t in trials}


def _decide(made: Step | Pair, known: Known, candidates: Sequence[Candidate], runs: dict[str, Run]) -> None:
    """Switch to the fastest timed plan, if any was timed."""
    best, first = known.best(candidates), candidates[0].name
    if best is None:
        return
    measured = sorted(((name, line.timing.median) for name, line in known.timed.items()), key=lambda one: one[1])
    of = "the cost model's, than which none was faster by a margin," if best.name == first else "the fastest"
    plan = replace(best.plan, reason=f"{of} of {len(measured)} that were timed on {known.timed[best.name].day}")
    run = runs.get(best.name)
    if run and isinstance(made, Step):
        for key in storage_keys(plan, made.problem.kept):  # others of the pattern may take what is packed
            if (packed := run.made.problem.counts.cache.get(key)) is not None:
                made.problem.counts.cache.put(key, packed)
    with suppress(*DAMAGED, RuntimeError):  # a damaged line, which leaves all as it was
        considered = made.choice.considered
        made.take(Choice(plan, best.expected, best.name, best.seconds, considered=considered, measured=tuple(measured)))


def _changed(problem: Problem, base: Candidate, plan: Plan) -> Candidate:
    """A candidate with an option changed, priced by the sizes that its parts had before."""
    changes: dict[str, str] = {}
    for old, new in zip(base.plan.parts, plan.parts, strict=True):
        for before, after in (old.storage, new.storage), (old.schedule, new.schedule):
            for name, value in state_of(after).items():
                follows = name in ("tree", "tile_sizes", "tile_loops", "ruled")
                if not follows and value != getattr(before, name):
                    changes.setdefault(name, "".join(str(value).split()))
    name = ", ".join([base.name, *(f"{name}={value}" for name, value in changes.items())])
    return price(Candidate(plan, base.expected, name), problem)


def in_turns(
    step: Step, trials: Sequence[Trial[Run]], known: Known, candidates: Sequence[Candidate]
) -> Callable[[Tensor | None, Tensors, Tensors | None], Tensor]:
    """Return `Step.rows` of a step whose candidates take turns in its first calls; then the fastest is taken.

    Every result is its caller's, and no call waits for a GPU: times are read once they are there.
    """
    owner, calls = weakref.ref(step), 0
    taken: list[list[float]] = [[] for _ in trials]
    running = deque[tuple[int, Any, Any]]()

    def look() -> None:
        """Read the times that are there; decide once every candidate had its turns."""
        while running and running[0][2].query():
            number, start, end = running.popleft()
            taken[number].append(1e-3 * start.elapsed_time(end))
        step = owner()
        if step is None or min(map(len, taken)) < ROUNDS:
            return
        known.add([replace(t, timing=Timing.of(own)) for t, own in zip(trials, taken, strict=True)])
        taken[0].clear()  # one call decides
        with in_force_on(step.settings, step.device), lasting():
            _decide(step, known, candidates, runs_of(trials))
        step.in_turns = None  # last: until then calls of other threads run what was timed

    def rows(values: Tensor | None, dense: Tensors, given: Tensors | None) -> Tensor:
        """The result of a call by the candidate whose turn it is, or the first."""
        nonlocal calls
        number = calls % len(trials) if calls < ROUNDS * len(trials) else 0
        trial = trials[number].run.made
        packed = trial.packed_values(None) if values is None else trial.packed(values)
        if trial.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = trial._rows(values, dense, packed, given)
            end.record()
            running.append((number, start, end))
        else:
            begun = time.perf_counter()
            result = trial._rows(values, dense, packed, given)
            taken[number].append(time.perf_counter() - begun)
        calls += 1
        Step.turned += 1
        look()
        return result

    return rows
