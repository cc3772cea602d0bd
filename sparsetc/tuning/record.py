"""The record of timings: a file with a line of JSON for every candidate that was timed, and plans found in it.

In: lines, and a path. Out: the file, which only grows until it is too large and loses its older half; and its lines,
without those that are damaged. Several processes may write at once.

In: facts of a problem, then trials. Out: a plan that was timed before, names of plans to try, and lines of the trials.
A line of other software, or of a problem that is only alike, proposes and does not decide.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from sparsetc.device.profile import of_backend, path_of, today
from sparsetc.device.timing import Timing
from sparsetc.errors import SparsetcError
from sparsetc.ir.contraction_tree import parse_tree
from sparsetc.ir.plan import RECORDS, Part, Plan, verify
from sparsetc.ir.program import Statistics
from sparsetc.planner import Candidate, Problem
from sparsetc.support import Ints, files
from sparsetc.support.checks import fits, from_state, misfit, state_of
from sparsetc.support.entry import warn_once
from sparsetc.tensor.checksum import bits
from sparsetc.tuning.search import STORED, Trial, best_of

MOST_BYTES = 1 << 23
"""Bytes of a file, at most; a line takes about 1.5 kB."""
MOST_LINE = 1 << 18
"""Bytes of a line, at most."""
MOST_DIGITS = 20
"""Digits and sign of an integer, at most."""
MOST_FOUND = 256
"""Lines of one problem, or of problems like it, that are read of a file, at most: the newest."""
TRIES, WAIT = 50, 0.01
"""Attempts to open a file that another process writes to, and seconds in between; a write takes 1 ms."""


@dataclass(frozen=True)
class Line:
    """The timing of one candidate.

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
    """The line; None where it is damaged, or holds what a terminal should not be shown."""
    if len(text) > MOST_LINE:
        return None
    try:
        data: dict[str, Any] = json.loads(text, parse_int=_integer)
        values: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        line = Line(**values)
        shape, dtype = line.pattern.get("shape", []), line.problem.get("dtype", "")
        texts = [value for value in (*values.values(), dtype) if isinstance(value, str)]
        fine = not misfit(line) and len(line.seconds) == 3 and all(0 < s < 1e6 for s in line.seconds)
        fine = fine and fits(shape, Ints, (list,)) and fits(dtype, str)
        return line if fine and all(map(str.isprintable, texts)) else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _integer(digits: str) -> int:
    """The integer; ValueError where floats may not hold it."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


# -- plans as plain data -----------------------------------------------------------------------------------------------


def as_data(value: Any, kinds: Mapping[str, Any] = RECORDS) -> Any:
    """Return a record of one of the kinds, such as a plan, as data for JSON; default values are left out."""
    if is_dataclass(value):
        kind = type(value).__name__
        if kind not in kinds:  # a tree
            return {kind: str(value)}
        usual = {f.name: f.default for f in fields(kinds[kind])}
        return {kind: {name: as_data(own, kinds) for name, own in state_of(value).items() if own != usual[name]}}
    return [as_data(one, kinds) for one in value] if isinstance(value, tuple | list) else value


def plan_of(data: Any, kinds: Mapping[str, Any] = RECORDS) -> Any:
    """Return the record from the data of `as_data`. Raise `SparsetcError`, ValueError or TypeError if it is damaged."""
    if isinstance(data, list):
        return tuple([plan_of(one, kinds) for one in data])
    if not isinstance(data, dict):
        return data
    ((kind, state),) = data.items()
    if kind not in kinds:
        return parse_tree(state)
    return from_state(kinds[kind], {name: plan_of(value, kinds) for name, value in state.items()})


# -- the file ----------------------------------------------------------------------------------------------------------


def read(text: bytes, *names: str) -> tuple[Line, ...]:
    """Return the valid lines of a text, oldest first.

    Args:
        text: of a file.
        names: keys of problems, and of problems like them, to look for: all but the newest lines of these are skipped,
            unparsed, since parsing a full record takes a second. Without any all lines are read.
    """
    rows = dict(row for name in names for row in _newest(text, f'"{name}"'.encode()))
    chosen = [rows[at] for at in sorted(rows)] if names else text.splitlines()
    return tuple(filter(None, map(parsed, chosen)))


def _newest(text: bytes, name: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (begin, text) of the newest lines with a name."""
    end = len(text)
    for _ in range(MOST_FOUND):
        at = text.rfind(name, 0, end)
        if at < 0:
            return
        begin, behind = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
        yield begin, text[begin : behind if behind >= 0 else None]
        end = begin


def lines(path: Path | None, *names: str) -> tuple[Line, ...]:
    """Return the lines of a file as `read` does; none if it is missing or, with a warning, cannot be trusted."""
    try:
        return () if path is None else read(files.read_record(path, 2 * MOST_BYTES), *names)
    except FileNotFoundError:
        return ()
    except OSError as error:
        warn_once(f"a record of what was timed is passed over: {error}")
        return ()


def append(path: Path | None, new: Iterable[Line]) -> None:
    """Add lines to a file; `OSError` where it cannot be written to, or would not be read."""
    data = written(new)
    if path is None or not data:
        return
    with _locked(path), files.open_private(path, "r+b", os.O_CREAT | os.O_APPEND) as file:
        size = file.seek(0, os.SEEK_END)
        if size > 2 * MOST_BYTES:
            raise OSError(f"{path} has more than {2 * MOST_BYTES:,} bytes")
        file.seek(max(0, size - 1))
        torn = file.read() not in (b"", b"\n")  # by a writer that was killed
        file.write((b"\n" if torn else b"") + data)
        file.flush()
        if size + len(data) > MOST_BYTES:
            file.seek(-(MOST_BYTES // 2), os.SEEK_END)
            files.write_private(path, file.read().partition(b"\n")[2])


def written(of: Iterable[Line]) -> bytes:
    """The text of lines."""
    return b"".join(json.dumps(asdict(line), separators=(",", ":")).encode() + b"\n" for line in of)


def remove(path: Path, chosen: Callable[[Line], bool]) -> int:
    """Remove lines from a file; return how many were chosen. What is damaged goes with them."""
    with _locked(path):
        kept_lines = lines(path)
        kept = [line for line in kept_lines if not chosen(line)]
        if len(kept) < len(kept_lines):
            files.write_private(path, written(kept))
    return len(kept_lines) - len(kept)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A block in which no other process writes to the file; `OSError` where one goes on doing so."""
    files.claim_record(path)
    with files.open_private(path.with_suffix(".lock"), "r+b", os.O_CREAT) as lock:
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


# -- what it says of a problem ----------------------------------------------------------------------------------------

MOST_PROPOSED = 3
"""Plans that are proposed of other problems, at most."""
FACTS = ("precisions", "halves", "coalesced", "rows", "sparse_output", "adding")
"""Attributes of a `Problem` that plans, their costs and their results depend on, beside the einsum and the pattern."""


@lru_cache
def versions() -> str:
    """The software that times depend on."""
    from importlib.metadata import PackageNotFoundError, version

    named = []
    for name in ("sparsetc", "torch", "triton"):
        with suppress(PackageNotFoundError):
            named.append(f"{name} {version(name)}")
    return ", ".join(named)


def digest(*parts: object) -> str:
    """A short name of things by what they print as."""
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()[:24]


def facts_of(p: Problem) -> dict[str, Any]:
    """Return what an einsum with one sparse operand is known by: ``tensor``, ``equation``, ``problem`` and ``pattern``.

    They are fields of a `Line`.
    """
    counts, letters = p.counts, dict(enumerate(p.letters))
    slices = {c: counts.distinct((m,)) for m, c in letters.items()}
    fibers = {c: counts.distinct(tuple(n for n in letters if n != m)) for m, c in letters.items()}
    pattern = {"shape": p.shape, "nnz": counts.nnz, "slices": slices, "fibers": fibers}
    problem = {"backend": p.backend.name} | {name: getattr(p, name) for name in FACTS}
    problem |= {"dtype": str(p.dtype), "sizes": dict(p.bound.sizes)}
    tensor = digest(counts.once("bits", lambda: bits(counts.coords)), p.shape)
    return {"tensor": tensor, "equation": p.equation, "problem": problem, "pattern": pattern}


@lru_cache
def shipped() -> bytes:
    """Return the record shipped with the package: the fastest plan of each problem used to fit the rates."""
    return gzip.decompress((resources.files("sparsetc.device") / "profiles" / "tuned.jsonl.gz").read_bytes())


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(own) for name, own in value.items()}
    if isinstance(value, tuple | list):
        return [*map(_rounded, value)]
    return value.bit_length() if isinstance(value, int) and not isinstance(value, bool) else value


DAMAGED = (SparsetcError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""Exceptions that a damaged line may raise."""


def candidate_of(line: Line) -> Candidate:
    """Return the candidate of a line, with its expected sizes. Raise one of `DAMAGED` if there is none."""
    expected = [Statistics(**{name: _as_tuples(value) for name, value in sizes.items()}) for sizes in line.expected]
    plan = plan_of(line.plan)
    if not isinstance(plan, Plan):
        raise ValueError("no plan")
    verify(plan)
    if any(misfit(sizes) or min(sizes.chain, *sizes.symbols, *dict(sizes.runs).values()) < 0 for sizes in expected):
        raise ValueError("sizes that no part has")
    return Candidate(plan, tuple(expected), line.name, line.predicted)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def skeleton(plan: Plan) -> Plan:
    """The plan without the options that a search changes."""
    plain: dict[str, Any] = dict.fromkeys(STORED, 1)
    return replace(plan, parts=tuple(Part(p.format, replace(p.storage, **plain)) for p in plan.parts))


class Known:
    """The lines of a device's record about one problem.

    Attributes:
        timed: by name, the latest line of each plan that this software timed for this problem.
        proposed: names of plans that were the fastest of others, by other software or for problems like it.
    """

    def __init__(self, facts: dict[str, Any], request: Plan, device: str) -> None:
        """Read what there is of a problem, given the fields of its lines as `facts_of` gives them."""
        problem, now = facts["problem"], versions()
        self._path = path_of(device, "tuning", "jsonl")
        key = digest(facts["tensor"], facts["equation"], sorted(problem.items()), request.name, request.options)
        like = digest(facts["equation"], _rounded(problem), _rounded(facts["pattern"]))
        self._facts = {**facts, "key": key, "like": like, "device": device, "versions": now}
        recorded = [*read(shipped(), key, like), *lines(self._path, key, like)]
        recorded = [line for line in recorded if line.device == device]
        self.timed = {line.name: line for line in recorded if (line.key, line.versions) == (key, now)}
        fastest: dict[str, Line] = {}
        for line in recorded:
            if line.like == like and line.seconds[1] <= fastest.get(line.key, line).seconds[1]:
                fastest[line.key] = line
        self.proposed = list(dict.fromkeys(line.name for line in fastest.values()))[-MOST_PROPOSED:]

    def best(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the fastest timed candidate that is one of these but for options; None if the first was not timed."""
        trials, allowed = [], {(skeleton(c.plan), len(c.expected), len(c.seconds)) for c in candidates}
        for line in self.timed.values():
            with suppress(*DAMAGED):
                candidate = candidate_of(line)
                if (skeleton(candidate.plan), len(candidate.expected), len(line.predicted)) in allowed:
                    trials.append(Trial[Any](candidate, None, line.timing))
        first = [t for t in trials if t.candidate.name == candidates[0].name]
        return best_of([*first, *trials]).candidate if first else None

    def add(self, trials: Iterable[Trial[Any]]) -> None:
        """A line for each trial; a warning where they cannot be written."""
        profile, new = of_backend(self._facts["problem"]["backend"]), []
        for trial in trials:
            c, t = trial.candidate, trial.timing
            terms = [cost.seconds(sizes, profile) for cost, sizes in zip(c.costs, c.expected, strict=False)]
            line = Line(
                day=today(),
                name=c.name,
                plan=as_data(c.plan),
                seconds=(t.low, t.median, t.high),
                calls=t.calls,
                predicted=c.seconds,
                terms=tuple(terms),
                expected=tuple(map(asdict, c.expected)),
                **self._facts,
            )
            new.append(line)
        try:
            append(self._path, new)
        except OSError as error:
            warn_once(f"what was timed is not kept: {error}")
        self.timed |= {line.name: line for line in new}
