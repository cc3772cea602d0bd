"""Progress bars on stderr: one display a process, a line of it for each thing that is under way, drawn by rich.

In: how many bytes, or other things, are to come. Out: a function that is told how many are done. On a terminal the
display appears two seconds after the first line began, so that what is short draws nothing; rich is imported then.
Without rich nothing is drawn, and who asked for a bar is told that rich is missing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from sparsetc.support.notices import warn_once

PATIENCE = 2.0
"""Seconds for which a line is under way before the display appears."""

At: TypeAlias = Callable[..., None]
"""A function told of progress: ``at(position)``, or ``at(position, title)`` to change the line's title too."""


def unseen(position: int, title: str | None = None, /) -> None:
    """Draw nothing."""


@contextmanager
def bar(total: int | None, title: str, wanted: bool | None = None, unit: str = "bytes") -> Iterator[At]:
    """Yield ``at(position)``, which moves a line of the display.

    Args:
        total: how much there is to do; None draws how long it takes instead.
        title: stands before the bar.
        wanted: None draws on a terminal what takes longer than `PATIENCE`, True draws at once, False never.
        unit: of `total`.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield unseen
        return
    line = _Line(title, total, unit)
    _display.begin(line, bool(wanted))
    try:
        yield line.at
    finally:
        _display.end(line)


@dataclass(eq=False)
class _Line:
    """One thing under way, and the task of rich that draws it once the display is there."""

    title: str
    total: int | None
    unit: str
    position: int = 0
    update: Callable[..., None] | None = None
    start: float = field(default_factory=time.monotonic)

    def at(self, position: int, title: str | None = None, /) -> None:
        self.position, self.title = position, title or self.title
        update = self.update  # which the display's thread sets
        if update is not None:
            update(completed=position, description=self.title, count=self.count)

    @property
    def count(self) -> str:
        from rich.filesize import decimal

        if self.total is None:
            return ""
        done, total = (decimal(n) if self.unit == "bytes" else f"{n:,}" for n in (self.position, self.total))
        return f"{done}/{total}" if self.unit == "bytes" else f"{done}/{total} {self.unit}"


class _Display:
    """The lines that are under way, and rich's display of them from `PATIENCE` seconds on, by a timer's thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.lines: dict[_Line, Any] = {}  # and the task of each that is drawn
        self.drawn: Any = None
        self.timer: threading.Timer | None = None

    def begin(self, line: _Line, now: bool) -> None:
        with self.lock:
            self.lines[line] = None
            if self.drawn is not None:
                self._add(line)
            elif now:
                self.draw(now)
            elif self.timer is None:
                self.timer = threading.Timer(PATIENCE, self.draw)
                self.timer.daemon = True
                self.timer.start()

    def draw(self, now: bool = False) -> None:
        try:
            from rich import progress
            from rich.console import Console
        except ImportError:
            if now:
                warn_once("there is no progress bar without rich: pip install 'sparsetc[progress]'")
            return
        text = progress.TextColumn("{task.description}"), progress.TextColumn("{task.fields[count]}")
        times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
        with self.lock:
            if not self.lines or self.drawn is not None:
                return
            columns = (text[0], progress.BarColumn(), text[1], *times)
            self.drawn = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            for line in self.lines:
                self._add(line)
            self.drawn.start()

    def _add(self, line: _Line) -> None:
        task = self.drawn.add_task(line.title, total=line.total, completed=line.position, count=line.count)
        next(t for t in self.drawn.tasks if t.id == task).start_time = line.start  # and not when it was first drawn
        self.lines[line], line.update = task, partial(self.drawn.update, task)

    def end(self, line: _Line) -> None:
        with self.lock:
            task, line.update = self.lines.pop(line), None
            if task is not None:
                self.drawn.remove_task(task)
            if self.lines:
                return
            if self.timer is not None:
                self.timer.cancel()
            if self.drawn is not None:
                self.drawn.stop()
            self.timer = self.drawn = None


_display = _Display()
