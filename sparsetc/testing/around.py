"""What surrounds a run: a time limit, poisoned memory, no warnings, and torch's settings compared before and after.

In: a ``with`` block. Out: `Hang` where it takes too long, `Wrong` where a setting of the whole process has changed.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import warnings
from collections.abc import Iterator
from math import prod
from typing import Any
from unittest import mock

import torch

from sparsetc.testing.compare import Wrong


def random_state() -> int:
    """A number that stands for the state of torch's random generator."""
    return hash(torch.get_rng_state().numpy().tobytes())


SETTINGS = (
    random_state,
    torch.get_float32_matmul_precision,
    torch.get_default_dtype,
    torch.get_default_device,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.is_autocast_enabled,
    torch.are_deterministic_algorithms_enabled,
    torch.get_num_threads,
)
"""What a call must leave as it was."""
POISON = 77
"""What uninitialised integers are filled with."""


class Hang(BaseException):
    """A case that ran past its time limit; not an `Exception`, so that nothing below swallows it."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that say where a case runs, or that a layout of torch is new."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        yield


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Hang` after so many seconds; nothing in threads other than the main one, which get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise Hang(f"no result after {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Raise `Wrong` where a call leaves one of torch's settings for the whole process other than it was."""
    before = [setting() for setting in SETTINGS]
    yield
    for setting, was in zip(SETTINGS, before, strict=True):
        if setting() != was:
            message = f"{setting.__name__} gives {setting()!r} after the call, {was!r} before"
            torch.set_float32_matmul_precision("highest")
            raise Wrong("settings", message)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch gives uninitialised with NaN, or a large integer, so that what nobody wrote is seen."""
    places = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]
    with contextlib.ExitStack() as patches:
        for owner, name in places:
            patches.enter_context(mock.patch.object(owner, name, _filling(getattr(owner, name))))
        yield


def _filling(original: Any) -> Any:
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = original(*args, **kwargs)
        if made.dtype == torch.bool or not prod(made.shape) or made.device.type == "meta":
            return made
        with torch.no_grad():
            return made.fill_(torch.nan if made.is_floating_point() or made.is_complex() else POISON)

    return filled
