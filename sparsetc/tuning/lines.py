"""The record of what was timed, as a file: a line of JSON for every candidate.

In: lines, and a path. Out: the file, which only grows until it is too large and loses its older half; and its lines,
without those that are damaged. Several processes may write at once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from sparsetc.device.timing import Timing
from sparsetc.ir.contraction_tree import parse_tree
from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.support import files
from sparsetc.support.pickles import Record, from_state, misfit

MOST_BYTES = 1 << 23
"""Bytes of a file, at most; a line takes about 1.5 kB."""
TRIES, WAIT = 50, 0.01
"""How often a file is asked for that another process writes to, and seconds in between; a write takes 1 ms."""
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Plan, Part, Schedule, Storage)}


@dataclass(frozen=True)
class Line:
    """What one candidate took.

    Attributes:
        key: the problem and the pattern, exactly.
        like: the same, rounded: what is fast for one is worth trying for another.
        tensor: the pattern alone, by which a fit is held out.
        device, versions: that it was timed on, and of what.
        day: on which it was timed.
        equation: with its sizes.
        name: of the plan, for a reader.
        plan: as plain data.
        seconds: a quarter, a half and three quarters of the calls took this or less.
        calls: how many were timed.
        predicted: seconds of each part.
        terms: seconds that each resource alone would take, of each part.
        expected: the sizes of each part that these follow from.
        problem: what else these follow from.
        pattern: sizes, nonzeros, slices and fibers of each mode.
    """

    key: str
    like: str
    tensor: str
    device: str
    versions: str
    day: str
    equation: str
    name: str
    plan: dict[str, Any]
    seconds: tuple[float, ...]
    calls: int
    predicted: tuple[float, ...] = ()
    terms: tuple[dict[str, float], ...] = ()
    expected: tuple[dict[str, Any], ...] = ()
    problem: dict[str, Any] = field(default_factory=dict)
    pattern: dict[str, Any] = field(default_factory=dict)

    @property
    def timing(self) -> Timing:
        """The times."""
        low, median, high = self.seconds
        return Timing(low, median, high, self.calls)


def parsed(text: bytes) -> Line | None:
    """The line; None where it is damaged."""
    try:
        data: dict[str, Any] = json.loads(text)
        values: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        line = Line(**values)
        fine = not misfit(line) and len(line.seconds) == 3 and all(0 < s < 1e6 for s in line.seconds)
        return line if fine else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


# -- plans as plain data -----------------------------------------------------------------------------------------------


def as_data(value: Any) -> Any:
    """A plan, or what one is made of, as JSON holds it: what is as by default is left out."""
    if isinstance(value, Record):
        kind = type(value).__name__
        if kind not in KINDS:  # a tree
            return {kind: str(value)}
        usual = {f.name: f.default for f in fields(KINDS[kind])}
        return {kind: {name: as_data(own) for name, own in value.state.items() if own != usual[name]}}
    return [*map(as_data, value)] if isinstance(value, tuple | list) else value


def plan_of(data: Any) -> Any:
    """What `as_data` made this of; `SparsetcError`, ValueError or TypeError where it is damaged."""
    if isinstance(data, list):
        return tuple(map(plan_of, data))
    if not isinstance(data, dict):
        return data
    ((kind, state),) = data.items()
    if kind not in KINDS:
        return parse_tree(state)
    return from_state(KINDS[kind], {name: plan_of(value) for name, value in state.items()})


# -- the file ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _read(path: Path, changed: tuple[int, ...]) -> tuple[Line, ...]:
    return read(files.read_private(path, 2 * MOST_BYTES))


def read(text: bytes) -> tuple[Line, ...]:
    """The lines of a text, without those that are damaged."""
    return tuple(filter(None, map(parsed, text.splitlines())))


def lines(path: Path | None) -> tuple[Line, ...]:
    """The lines of a file, the oldest first; none where it is absent, or cannot be trusted."""
    with suppress(OSError):
        if path is not None:
            status = os.stat(path)
            return _read(path, (status.st_mtime_ns, status.st_size, status.st_ino))
    return ()


def append(path: Path | None, new: Iterable[Line]) -> None:
    """Add lines to a file; `OSError` where it cannot be written to."""
    data = written(new)
    if path is None or not data:
        return
    with _locked(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with open(handle, "r+b") as file:
            size = os.fstat(handle).st_size
            torn = size and os.pread(handle, 1, size - 1) != b"\n"  # by a writer that was killed
            os.write(handle, (b"\n" if torn else b"") + data)
            if size + len(data) > MOST_BYTES:
                file.seek(0)
                newer = file.read()[-MOST_BYTES // 2 :]
                files.write_private(path, newer[newer.index(b"\n") + 1 :])


def written(of: Iterable[Line]) -> bytes:
    """The text of lines."""
    return b"".join(json.dumps(asdict(line), separators=(",", ":")).encode() + b"\n" for line in of)


def rewrite(path: Path, kept: Iterable[Line]) -> None:
    """Make these the lines of a file."""
    with _locked(path):
        files.write_private(path, written(kept))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A block in which no other process writes to the file; `OSError` where one goes on doing so."""
    files.claim(path.parent.parent)
    files.claim(path.parent, tighten=True)
    with open(path.with_suffix(".lock"), "ab", opener=partial(os.open, mode=0o600)) as lock:
        with suppress(ImportError):  # Windows
            import fcntl

            for left in reversed(range(TRIES)):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if not left:
                        raise OSError(f"{path} is being written by another process") from error
                    time.sleep(WAIT)
        yield
