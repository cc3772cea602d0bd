"""Progress bars on stderr, drawn by tqdm.

In: the number of bytes, or of other things, to come. Out: a function to call with the number done. On a terminal a bar
appears after two seconds, so that short work draws nothing. Without tqdm nothing is drawn; whoever asked for a bar is
told that tqdm is missing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from sparsetc.support.notices import warn_once

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
