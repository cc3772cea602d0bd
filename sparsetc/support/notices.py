"""Words to a user beside results: warnings that point at their line, a log, a progress bar where someone is looking.

In: a message. Out: a `UserWarning` located at the innermost frame that is neither the package's, generated, nor
torch's, so that a reader sees which call of theirs it is about, and warning filters by module work.

In: the number of bytes, or of other things, to come. Out: a function that is told how many are done, and what to say
beside the bar. rich draws it; without rich, or when stderr is not a terminal, nothing is drawn. Who asked for a bar is
told that rich is missing.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

PASSED_OVER = frozenset({"sparsetc", "sparsetc_generated", "torch"})
"""Top-level modules whose frames lie between a user and a warning: autograd calls the package from torch's."""
LONG = 64 * 2**20
"""Bytes from which a file is long enough for a bar, about a second of parsing."""

_said: set[str] = set()


def warn(message: str) -> None:
    """Warn, in the name of the package, at the line of the user's that led here."""
    frame, level = sys._getframe(1), 2  # and outwards to the outermost of all, where a thread has none of a user's
    while str(frame.f_globals.get("__name__")).partition(".")[0] in PASSED_OVER and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"sparsetc: {message}", UserWarning, stacklevel=level)


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


At: TypeAlias = Callable[..., None]
"""A function told of progress: ``at(position)``, or ``at(position, title)`` to change the bar's title too."""


def unseen(position: int, title: str | None = None, /) -> None:
    """Draws nothing."""


@contextmanager
def bar(total: int, title: str, wanted: bool | None = None, unit: str = "bytes") -> Iterator[At]:
    """Yields ``at(position)``. ``wanted``: None draws for long files on a terminal, True always, False never."""
    if not (total > LONG and sys.stderr.isatty() if wanted is None else wanted):
        yield unseen
        return
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        if wanted:
            warn_once("there is no progress bar without rich: pip install 'sparsetc[progress]'")
        yield unseen
        return
    done = (
        (progress.DownloadColumn(),) if unit == "bytes" else (progress.MofNCompleteColumn(), progress.TextColumn(unit))
    )
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), *done, progress.TimeRemainingColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=total)

        def at(position: int, title: str | None = None, /) -> None:
            shown.update(task, completed=position, description=title)

        yield at
