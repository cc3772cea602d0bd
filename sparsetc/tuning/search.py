"""The tuning search: candidates priced near the best are timed, then the best is changed step by step.

In: candidates, the cheapest first, and a function that makes a plan ready to be called. Out: trials, each with its
time. What a candidate gives is compared with what the first one gives, before it is timed.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from sparsetc.device.timing import Timing, timed
from sparsetc.errors import SparsetcError
from sparsetc.ir.plan import Part, Plan, Schedule, verify
from sparsetc.planner.candidate import Candidate
from sparsetc.support import among, outside
from sparsetc.support.entry import on_gpu

Run = TypeVar("Run", bound=Callable[[], Tensor])
NEAR = 1.6
"""Candidates are timed if their expected time is within this factor of the first one's."""
MOST = 6
"""Candidates that are timed before the fastest is changed."""
STOP = 3.0
"""A candidate slower than the fastest by this factor is not called again."""
MARGIN = 1.05
"""A candidate is taken if it is faster than the first one by this factor."""
GAIN = 1.02
"""An option is changed if the plan becomes faster by this factor."""
TIMED = 0.005
"""Seconds that a candidate is timed, after it was compiled."""
THREADS = 8
STORED = ("max_item_nnz", "lanes")
"""Numbers of a storage that are changed."""
TOLERANCE = {"highest": 1e-4, "high": 2e-2, "medium": 5e-2}
"""The largest difference of a result from the first one, as a share of its norm, by ``precision=``."""


UNTIMED = Timing(0.0, 0.0, 0.0, 0)


@dataclass(frozen=True)
class Trial(Generic[Run]):
    """A candidate ready to be called, and its timing."""

    candidate: Candidate
    run: Run
    timing: Timing = UNTIMED


def shortlist(candidates: Sequence[Candidate], proposed: Sequence[Candidate] = ()) -> list[Candidate]:
    """Return the first candidate, then proposed ones, then the best of each name priced near it, then others.

    Args:
        candidates: the cheapest first.
        proposed: those that were fast for problems like this one.
    """
    first = candidates[0]
    near = [c for c in candidates[1:] if c.total <= NEAR * first.total]
    best = {c.plan.name: c for c in reversed([first, *near])}
    by_name = among(near, [*best.values()])
    return list(dict.fromkeys((first, *proposed[: MOST // 2], *by_name, *near)))[:MOST]


def best_of(trials: Sequence[Trial[Run]]) -> Trial[Run]:
    """The fastest, if it is faster than the first by `MARGIN` and beyond both spreads; else the first."""
    fastest = min(trials, key=lambda t: t.timing.median)
    return fastest if fastest.timing.beats(trials[0].timing, MARGIN) else trials[0]


def neighbours(plan: Plan, threads: int) -> Iterator[Plan]:
    """The plan with one option changed: warps, steps taken together, lanes, blocks of an axis, items, the grid.

    Args:
        plan: with parts.
        threads: that torch programs may run by on a CPU, whose number is their only option; 0 for Triton programs.
    """
    if threads:
        yield from (plan.scheduled(lambda own, n=n: replace(own, threads=1 << n)) for n in range(threads.bit_length()))  # type: ignore[misc]
        return
    blocks = dict.fromkeys(axis for part in plan.parts for axis, _ in part.schedule.blocks)
    changes: list[Callable[[Schedule, int], dict[str, Any]]] = [
        *(lambda own, by, n=name: {n: _shifted(getattr(own, n), by)} for name in ("warps", "unroll", "lanes")),  # type: ignore[misc]
        *(
            lambda own, by, a=axis: {  # type: ignore[misc]
                "blocks": tuple([(c, _shifted(n, by) if c == a else n) for c, n in own.blocks]),
                "vectors": (),
            }
            for axis in blocks
        ),
        lambda own, by: {"slowest_axes": tuple(blocks) if by > 0 else ()},
        # Two more hold one more step's operands where these are found by words that are loaded ahead.
        lambda own, by: {"stages": _staged(own, by)},
        lambda own, by: {"copies": _shifted(own.copies, 2 * by) if own.copies > 1 else 1},
    ]
    for by in (1, -1):
        for name in STORED:
            yield replace(plan, parts=tuple(_stored(part, by, name) for part in plan.parts))
        for change in changes:
            yield plan.scheduled(lambda own, c=change, b=by: replace(own.by_rule(), **c(own, b)))  # type: ignore[misc]


def _staged(own: Schedule, by: int) -> int:
    if not own.dot:
        return own.stages
    return max(1, own.stages + (by if own.lanes else 2 * by))


def _shifted(number: int, by: int) -> int:
    return number and max(1, number << by if by > 0 else number >> -by)


def _stored(part: Part, by: int, name: str) -> Part:
    """The part with another number of its storage, where it has one."""
    number: dict[str, Any] = {name: _shifted(getattr(part.storage, name), by)}
    return replace(part, storage=replace(part.storage, **number)) if getattr(part.storage, name) > 1 else part


class Search(Generic[Run]):
    """Makes candidates ready and times them, for some seconds.

    Attributes:
        trials: all that were timed, in order.
    """

    def __init__(self, make: Callable[[Plan], Run], device: torch.device, precision: str, seconds: float) -> None:
        self._make = make
        self._device = device
        self._end = time.perf_counter() + seconds
        self._tolerance, self._expected = TOLERANCE[precision], torch.empty(0)
        self.trials: list[Trial[Run]] = []

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._end - time.perf_counter())

    def ready(self, candidates: Sequence[Candidate]) -> list[Trial[Run]]:
        """Return the candidates that run and agree with the first one's result, each called once.

        They are compiled side by side; those that have not begun when no time is left are not. On a CPU, whose calls
        take all of its cores, one after the other.
        """
        pool = ThreadPoolExecutor(THREADS if self._device.type == "cuda" else 1)
        calls = [pool.submit(contextvars.copy_context().run, self._called, c) for c in candidates]
        try:
            if not self._expected.numel():
                self._expected = calls[0].result()[1]
            wait(calls, timeout=self.left)
        finally:  # nothing is compiled while calls are timed, nor after an interrupt
            pool.shutdown(cancel_futures=True)
        trials = []
        for candidate, call in zip(candidates, calls, strict=True):
            # It may not apply, or take more than the device has.
            with suppress(SparsetcError, RuntimeError, CancelledError):
                run, result = call.result()
                if self._agrees(result):
                    trials.append(Trial(candidate, run))
        return trials

    def _called(self, candidate: Candidate) -> tuple[Run, Tensor]:
        with torch.no_grad(), on_gpu(self._device):
            verify(candidate.plan)
            run = self._make(candidate.plan)
            return run, run()

    def _agrees(self, result: Tensor) -> bool:
        if not (result.is_floating_point() or result.is_complex()):
            return torch.equal(result, self._expected)
        off, size = torch.linalg.vector_norm(result - self._expected), torch.linalg.vector_norm(self._expected)
        return bool(off <= self._tolerance * size)

    def timed(self, candidates: Sequence[Candidate]) -> list[Trial[Run]]:
        """The candidates that can be run, timed in turn."""
        ready = self.ready(candidates)
        times = timed([t.run for t in ready], self._device, TIMED * len(ready), STOP)
        trials = [replace(t, timing=timing) for t, timing in zip(ready, times, strict=True)]
        self.trials += trials
        return trials

    def improved(self, best: Trial[Run], price: Callable[[Candidate, Plan], Candidate], threads: int) -> None:
        """Time what changing one option after another gives, of the fastest so far, while time is left.

        Args:
            best: to begin with.
            price: gives the candidate of a plan with other options than another candidate's.
            threads: as of `neighbours`.
        """
        root = best.candidate
        seen = {best.candidate.plan}
        around = tuple(neighbours(best.candidate.plan, threads))
        while (around := outside(dict.fromkeys(around), seen)) and self.left:
            few = around[:THREADS]
            seen.update(few)
            before, *others = self.timed([best.candidate, *(price(root, plan) for plan in few)]) or [best]
            better = [t for t in others if t.timing.beats(before.timing, GAIN)]
            if better:
                best = min(better, key=lambda t: t.timing.median)
                around = tuple(neighbours(best.candidate.plan, threads))
