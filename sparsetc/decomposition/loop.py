"""The loop around every decomposition: its end, its progress messages, and Ctrl-C.

In: a step that changes a model in place and measures it. Out: the measures of all iterations and why there are no more.
Steps record no gradients and heed no autocast (`undisturbed`), and on a GPU run from a CUDA graph (`captured`) where
they can be captured.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature
from math import isfinite
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsetc.contraction.step import Step
from sparsetc.decomposition import checks
from sparsetc.errors import SparsetcError
from sparsetc.support.entry import bar, log_since, warn


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a step of an iteration that on a GPU is captured at its second call, or once no plans take turns in it."""
    return partial(next, _calls(step, device)) if device.type == "cuda" else step


def _calls(step: Callable[[], None], device: torch.device) -> Iterator[None]:
    taken = -1
    while taken != Step.turned:
        taken = Step.turned
        step()  # in which kernels are compiled and libraries get ready
        yield
    graph = _capture(step, device)
    replay = step if graph is None else graph.replay
    while True:
        replay()
        yield


def _capture(step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph | None:
    """Capture a step as a CUDA graph; None if it cannot be captured. Buffers are restored in either case."""
    if torch.cuda.is_current_stream_capturing():
        return None  # the caller's own graph
    graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    try:
        # Not `torch.cuda.graph`, which waits for the GPU and gives all memory back that torch keeps: 4 ms.
        with torch.cuda.device(device), torch.cuda.stream(aside):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
    except RuntimeError:  # a library that waits for the GPU; nothing was run, so nothing was changed
        number = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[number]
        generator.graphsafe_set_state(generator.clone_state())  # which the failed capture has left capturing
        return None
    return graph


P = ParamSpec("P")
R = TypeVar("R")


def undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a decomposition: runs it without gradients and without autocast, and names it in errors.

    Autocast would round dense products to half precision, which normal equations do not bear, and would hand buffers
    of another dtype to steps in place, which raise. Arguments that only other libraries have are answered by ours.
    """
    parameters = signature(function).parameters

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        checks.names(kwargs.keys() - parameters.keys(), function.__name__)
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            try:
                return function(*args, **kwargs)
            except SparsetcError as error:
                if not str(error).startswith(function.__name__):
                    error.args = (f"{function.__name__}: {error}",)
                raise

    return run


LOOK = 8
"""Iterations on a GPU between two looks at their measures, each of which waits for it. A callback or a progress bar
wants them after every one. On the CPU they are always at hand."""

Rows = Sequence[Sequence[float]]
"""The measures of each iteration, the fit first."""


def convergence_test(tol: float, dtype: torch.dtype) -> Callable[[Rows], bool]:
    """Return a test that is True if the fit changed by less than `tol` (0: never) or the dtype's rounding."""
    least = max(tol, torch.finfo(dtype).eps) if tol else 0.0
    return lambda rows: len(rows) > 1 and abs(rows[-1][0] - rows[-2][0]) < least


def iterate(
    step: Callable[[], None],
    measures: Tensor,
    model: Callable[[Rows, str], R],
    n_iter_max: int,
    converged: Callable[[Rows], bool],
    callback: Callable[[R, float], Any] | None,
    progress: bool | None,
    title: str,
    *,
    capture: bool = True,
    together: Callable[[str], str] | None = None,
    silent: bool = False,
) -> R:
    """Call a step until its measures say that it converged, or something else ends the run; return the model.

    Args:
        step: changes a model in place and writes `measures`; on a GPU a CUDA graph, where it may be.
        measures: float64, on the model's device; the fit first.
        model: makes a model of the measures of each iteration, and of why there are no more.
        n_iter_max: calls, at most.
        converged: asked whenever measures are looked at.
        callback: called after each iteration with the model and its error; True ends the run.
        progress: whether to draw a bar; as `bar` takes it.
        title: of the bar.
        capture: whether the step waits for nothing, so that a CUDA graph may hold it.
        together: where several processes iterate together: of why each stops, empty for not at all, why all do. Called
            whenever measures are looked at.
        silent: whether another process draws the bar.

    Ctrl-C ends a run after the iteration it falls into (a second one raises at once), in the main thread and under
    Python's own handler; elsewhere KeyboardInterrupt goes where it always goes.
    """
    advance = captured(step, measures.device) if capture else step
    looks = LOOK if measures.is_cuda and callback is None and not progress else 1
    rows: list[list[float]] = []
    unread: list[Tensor] = []
    stopped = ""
    shown, start = False if silent else progress, time.perf_counter()
    with _interruptions() as interrupted, bar(n_iter_max, title, shown, "iterations") as at:
        while not stopped and len(rows) + len(unread) < n_iter_max:
            advance()
            unread.append(measures.clone())
            if interrupted() and together is None:
                stopped = "interrupted"
            elif len(unread) == looks:
                rows += _read(unread)
                at(len(rows), f"{title}, fit {rows[-1][0]:.4f}")
                said = None if callback is None else callback(model(rows, ""), 1 - rows[-1][0])
                asked = isinstance(said, bool | Tensor | np.bool_) and bool(said)
                stopped = "callback" if asked else _ended(rows, converged)
                if together is not None:
                    stopped = together("interrupted" if interrupted() else stopped)
        rows += _read(unread)
    log_since(start, logging.INFO, "%s: %d iterations, %s", title, len(rows), stopped or "n_iter_max")
    if stopped == "interrupted":
        warn(f"interrupted after {len(rows)} iterations; the result is that of the last, and init= continues from it")
    return model(rows, stopped or "n_iter_max")


def _ended(rows: Rows, converged: Callable[[Rows], bool]) -> str:
    if not isfinite(rows[-1][0]):
        warn(f"the fit is no number after {len(rows)} iterations: values overflow; scale x, or use float64")
        return "diverged"
    return "converged" if converged(rows) else ""


def column(rows: Rows, number: int) -> tuple[float, ...]:
    """One measure of every iteration."""
    return tuple(row[number] for row in rows)


def _read(unread: list[Tensor]) -> list[list[float]]:
    """The measures that were not looked at yet, in one transfer."""
    measures = torch.stack(unread).tolist() if unread else []
    unread.clear()
    return measures  # type: ignore[no-any-return]


@contextmanager
def _interruptions() -> Iterator[Callable[[], bool]]:
    """Yields whether Ctrl-C was pressed in the block."""
    asked: list[int] = []

    def noted(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, noted)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
