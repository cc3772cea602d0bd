"""Words to a user beside results: warnings that point at their line, a log, and progress bars on stderr.

In: a message. Out: a `UserWarning` located at the innermost frame that is neither the package's, generated, nor
torch's, so that a reader sees which call of theirs it is about, and warning filters by module work.

In: the number of bytes, or of other things, to come. Out: a function to call with the number done. On a terminal a bar
appears after two seconds, so that short work draws nothing. Without tqdm nothing is drawn; whoever asked for a bar is
told that tqdm is missing.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from sparsetc.errors import printable

PASSED_OVER = frozenset({"sparsetc", "sparsetc_generated", "torch"})
"""Top-level modules whose frames lie between a user and a warning: autograd calls the package from torch's."""

_said: set[str] = set()


def warn(message: str) -> None:
    """Warn, in the name of the package, at the line of the user's that led here."""
    frame, level = sys._getframe(1), 2  # and outwards to the outermost of all, where a thread has none of a user's
    while str(frame.f_globals.get("__name__")).partition(".")[0] in PASSED_OVER and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"sparsetc: {printable(message)}", UserWarning, stacklevel=level)


def warn_once(message: str) -> None:
    """Warn the first time in a process that this message is given."""
    if message not in _said:
        _said.add(message)
        warn(message)


log = logging.getLogger("sparsetc")
"""The package's log: compiled, tuned and streamed einsums at INFO, packed parts and programs at DEBUG, with times."""


def log_since(start: float, level: int, message: str, *args: object) -> None:
    """Log a message with the milliseconds since a time of `time.perf_counter`."""
    if log.isEnabledFor(level):
        log.log(level, f"{message}, %.1f ms", *args, 1e3 * (time.perf_counter() - start))


# -- progress bars -----------------------------------------------------------------------------------------------------

PATIENCE = 2.0
"""Seconds before a bar appears."""

At: TypeAlias = Callable[..., None]
"""A function told of progress: ``at(position)``, or ``at(position, title)`` to change the bar's title too."""


def unseen(position: int, title: str | None = None, /) -> None:
    """Draw nothing."""


@contextmanager
def bar(total: int | None, title: str, wanted: bool | None = None, unit: str = "bytes") -> Iterator[At]:
    """Yield ``at(position)``, which moves a bar.

    Args:
        total: how much there is to do; None if nobody knows.
        title: stands before the bar.
        wanted: None draws on a terminal after `PATIENCE` seconds, True draws at once, False never.
        unit: of `total`.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield unseen
        return
    try:
        from tqdm import tqdm
    except ImportError:
        if wanted:
            warn_once("there is no progress bar without tqdm: pip install 'sparsetc[progress]'")
        yield unseen
        return
    delay = 0.0 if wanted else PATIENCE
    unit = "B" if unit == "bytes" else f" {unit}"
    line = tqdm(total=total, desc=title, unit=unit, unit_scale=unit == "B", delay=delay, leave=False, file=sys.stderr)

    def at(position: int, title: str | None = None, /) -> None:
        if title:
            line.set_description_str(title, refresh=False)
        line.update(position - line.n)

    timer = threading.Timer(delay, line.update, (0,))  # for work that reports nothing meanwhile, such as compiling
    timer.daemon = True
    timer.start()
    try:
        yield at
    finally:
        timer.cancel()
        line.close()
