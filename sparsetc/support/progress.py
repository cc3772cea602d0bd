"""A progress bar for long files and other long work, where someone is looking.

In: the number of bytes, or of other things, to come. Out: a function that is told how many are done, and what to say
beside the bar. rich draws it; without rich, or when stderr is not a terminal, nothing is drawn. Who asked for a bar is
told that rich is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from sparsetc.support.warn import warn_once

LONG = 64 * 2**20
"""Bytes from which a file is long enough for a bar, about a second of parsing."""


class At(Protocol):
    """What is told of progress."""

    def __call__(self, position: int, title: str | None = None, /) -> None:
        """So many are done; the bar's title is another from now on, if one is given."""


def unseen(position: int, title: str | None = None, /) -> None:
    """Draws nothing."""


@contextmanager
def bar(total: int, title: str, wanted: bool | None = None, unit: str = "bytes") -> Iterator[At]:
    """Yields ``at(position)``. ``wanted``: None draws for long files on a terminal, True always, False never."""
    asked = wanted
    if wanted is None:
        wanted = total > LONG and sys.stderr.isatty()
    if not wanted:
        yield unseen
        return
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        if asked:
            warn_once("there is no progress bar without rich: pip install 'sparsetc[progress]'")
        yield unseen
        return
    done = (DownloadColumn(),) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
    columns = (TextColumn("{task.description}"), BarColumn(), *done, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=total)

        def at(position: int, title: str | None = None, /) -> None:
            shown.update(task, completed=position, description=title)

        yield at
