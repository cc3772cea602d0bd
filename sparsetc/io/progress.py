"""A progress bar for long files and other long work, where someone is looking.

In: the number of bytes, or of other things, to come. Out: a function that is told how many are done. rich draws the
bar; without it, or when stderr is not a terminal, nothing is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONG = 64 * 2**20
"""Bytes from which a file is long enough for a bar, about a second of parsing."""


@contextmanager
def bar(total: int, title: str, wanted: bool | None = None, unit: str = "bytes") -> Iterator[Callable[[int], None]]:
    """Yields ``at(position)``. ``wanted``: None draws for long files on a terminal, True always, False never."""
    if wanted is None:
        wanted = total > LONG and sys.stderr.isatty()
    if not wanted:
        yield lambda position: None
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
        yield lambda position: None
        return
    done = (DownloadColumn(),) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
    columns = (TextColumn("{task.description}"), BarColumn(), *done, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=total)
        yield lambda position: shown.update(task, completed=position)
