"""The tuning record of a problem: its fastest plan, and plans that were fast for similar problems.

In: facts of a problem, then trials. Out: a plan that was timed before, names of plans to try, and lines of the trials.
A line of other software, or of a problem that is only alike, proposes and does not decide.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from sparsetc.device.profile import of_backend, path_of, today
from sparsetc.errors import SparsetcError
from sparsetc.ir.plan import Part, Plan, verify
from sparsetc.ir.program.resources import Statistics
from sparsetc.planner import Candidate, Counts, Problem
from sparsetc.support.checks import misfit
from sparsetc.support.entry import warn_once
from sparsetc.tensor.checksum import bits
from sparsetc.tuning.lines import Line, append, as_data, lines, plan_of, read
from sparsetc.tuning.search import STORED, Trial, best_of

MOST_PROPOSED = 3
"""Plans that are proposed of other problems, at most."""
FACTS = ("backend", "precisions", "halves", "coalesced", "rows", "sparse_output", "adding")
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


@dataclass(frozen=True)
class Facts:
    """The properties that identify a problem.

    Attributes:
        tensor: the patterns of its sparse operands.
        equation: with its sizes.
        problem: all else that plans are made by.
        pattern: sizes and counts, for a fit and for what is alike.
    """

    tensor: str
    equation: str
    problem: dict[str, Any]
    pattern: dict[str, Any]

    @classmethod
    def of(cls, p: Problem) -> Facts:
        """Return the facts of an einsum with one sparse operand."""
        counts, letters = p.counts, dict(enumerate(p.letters))
        slices = {c: counts.distinct((m,)) for m, c in letters.items()}
        fibers = {c: counts.distinct(tuple(n for n in letters if n != m)) for m, c in letters.items()}
        pattern = {"shape": p.shape, "nnz": counts.nnz, "slices": slices, "fibers": fibers}
        problem = {name: getattr(p, name) for name in FACTS} | {"dtype": str(p.dtype), "sizes": dict(p.bound.sizes)}
        return cls(digest(bits_of(counts), p.shape), p.equation, problem, pattern)

    @property
    def alike(self) -> str:
        """The facts with numbers to a power of two."""
        return digest(self.equation, _rounded(self.problem), _rounded(self.pattern))


@lru_cache
def shipped() -> bytes:
    """Return the record shipped with the package: the fastest plan of each problem used to fit the rates."""
    return gzip.decompress((resources.files("sparsetc.device") / "profiles" / "tuned.jsonl.gz").read_bytes())


def bits_of(counts: Counts) -> int:
    """A number for the coordinates of a pattern, kept with it."""
    return counts.once("bits", lambda: bits(counts.coords))


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

    def __init__(self, facts: Facts, request: Plan, device: str) -> None:
        self._facts = facts
        self._device = device
        self._path = path_of(device, "tuning", "jsonl")
        self._key = digest(facts.tensor, facts.equation, sorted(facts.problem.items()), request.name, request.options)
        self._like, now = facts.alike, versions()
        names = self._key, self._like
        recorded = [line for line in (*read(shipped(), *names), *lines(self._path, *names)) if line.device == device]
        self.timed = {line.name: line for line in recorded if (line.key, line.versions) == (self._key, now)}
        fastest: dict[str, Line] = {}
        for line in recorded:
            if line.like == self._like and line.seconds[1] <= fastest.get(line.key, line).seconds[1]:
                fastest[line.key] = line
        self.proposed = list(dict.fromkeys(line.name for line in fastest.values()))[-MOST_PROPOSED:]

    def best(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the fastest timed candidate that is one of these but for options; None if the first was not timed."""
        trials, allowed = [], {(skeleton(c.plan), len(c.expected), len(c.seconds or ())) for c in candidates}
        for line in self.timed.values():
            with suppress(*DAMAGED):
                candidate = candidate_of(line)
                if (skeleton(candidate.plan), len(candidate.expected), len(line.predicted)) in allowed:
                    trials.append(Trial[Any](candidate, None, line.timing))
        first = [t for t in trials if t.candidate.name == candidates[0].name]
        return best_of([*first, *trials]).candidate if first else None

    def add(self, trials: Iterable[Trial[Any]]) -> None:
        """A line for each trial; a warning where they cannot be written."""
        facts = self._facts
        profile, new = of_backend(facts.problem["backend"]), []
        for trial in trials:
            c, t = trial.candidate, trial.timing
            terms = [cost.seconds(sizes, profile) for cost, sizes in zip(c.costs, c.expected, strict=False)]
            new.append(
                Line(
                    key=self._key,
                    like=self._like,
                    device=self._device,
                    versions=versions(),
                    day=today(),
                    name=c.name,
                    plan=as_data(c.plan),
                    seconds=(t.low, t.median, t.high),
                    calls=t.calls,
                    predicted=c.seconds or (),
                    terms=tuple(terms),
                    expected=tuple(map(asdict, c.expected)),
                    **vars(facts),
                )
            )
        try:
            append(self._path, new)
        except OSError as error:
            warn_once(f"what was timed is not kept: {error}")
        self.timed |= {line.name: line for line in new}
