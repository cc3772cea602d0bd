"""Words to a user beside results: warnings that point at their line, and a log.

In: a message. Out: a `UserWarning` located at the innermost frame that is neither the package's, generated, nor
torch's, so that a reader sees which call of theirs it is about, and warning filters by module work.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings

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
