"""The long run: kinds of cases in turn, in processes of their own, and what was found at the end.

In: kinds, minutes, a seed. Out: distinct findings as they are made, counts for each kind, an exit status. Processes are
new for every turn, so what a process keeps does not grow; one that dies or hangs is a finding of the case it ran.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from sparsetc.testing.worker import Errand, work

KINDS = ("einsums", "gradients", "contractions", "readers")
TURN_SECONDS = 120.0
"""The longest turn of one kind."""
GRACE = 2.0
"""How many time limits a case may take before its process is ended from outside."""


@dataclass(frozen=True)
class Settings:
    """What a run is told.

    Attributes:
        cases: cases of each kind; 0 for as many as the minutes allow.
    """

    kinds: tuple[str, ...] = KINDS
    minutes: float = 10.0
    seed: int = 0
    backend: str = "torch"
    device: str = "cpu"
    workers: int = 1
    cases: int = 0
    limit: float = 60.0


@dataclass
class Tally:
    """What a run has done so far."""

    cases: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    findings: dict[str, dict[str, str]] = field(default_factory=dict)
    known: dict[str, set[str]] = field(default_factory=dict)

    def summary(self, kinds: Sequence[str]) -> str:
        """A line for each kind."""
        lines = []
        for kind in kinds:
            found = len(self.findings.get(kind, {}))
            refused = f", {self.refused[kind]:,} refused by a plan" if self.refused[kind] else ""
            failed = f" ({self.failures[kind]:,} cases)" if self.failures[kind] else ""
            ending = "" if found == 1 else "s"
            lines.append(f"{kind}: {self.cases[kind]:,} cases, {found} finding{ending}{failed}{refused}")
        return "\n".join(lines)


@dataclass
class Worker:
    """A process, its pipe, and the case it runs."""

    process: Any
    pipe: Connection
    errand: Errand
    seed: int = -1
    since: float = 0.0
    next_seed: int = 0

    @property
    def late(self) -> bool:
        """Whether its case, or all of it, runs for longer than any signal would have let it."""
        grace = GRACE * self.errand.limit
        return (self.seed >= 0 and time.time() - self.since > grace) or time.time() > self.errand.deadline + 2 * grace


def fuzz(settings: Settings, say: Callable[[str], None] = print) -> Tally:
    """Run until the minutes, or the cases, are over."""
    tally = Tally()
    if settings.backend == "triton" and settings.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when a process imports triton
    end = time.time() + 60 * settings.minutes
    turn = min(TURN_SECONDS, 60 * settings.minutes / len(settings.kinds))
    seeds = {k: [settings.seed + w for w in range(settings.workers)] for k in settings.kinds}
    while time.time() < end:
        for kind in settings.kinds:
            if time.time() >= end:
                break
            seeds[kind] = _turn(kind, settings, seeds[kind], min(end, time.time() + turn), tally, say)
        if settings.cases:
            break
    return tally


def _turn(
    kind: str, settings: Settings, seeds: list[int], deadline: float, tally: Tally, say: Callable[[str], None]
) -> list[int]:
    """One turn of a kind in all processes; returns the seeds from which the next goes on."""
    step, most = settings.workers, -(-settings.cases // settings.workers)
    known = tuple(sorted(tally.known.setdefault(kind, set())))
    pairs = (settings.backend, settings.device)
    errands = [Errand(kind, s, step, deadline, *pairs, known, most, settings.limit) for s in seeds]
    workers = [_started(e) for e in errands]
    following = list(seeds)
    while workers:
        for worker in list(workers):
            _listen(worker, tally, say)
            if worker.process.is_alive() and not worker.late:
                continue
            workers.remove(worker)
            again = _ended(worker, tally, say)
            following[(worker.errand.seed - settings.seed) % step] = worker.next_seed
            if again is not None:
                workers.append(_started(again))
        time.sleep(0.05)
    return following


def _started(errand: Errand) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(errand, theirs), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours, errand, next_seed=errand.seed)


def _listen(worker: Worker, tally: Tally, say: Callable[[str], None]) -> None:
    """Take what a process has said."""
    kind = worker.errand.kind
    try:
        while worker.pipe.poll():
            match worker.pipe.recv():
                case "begins", seed:
                    worker.seed, worker.since = seed, time.time()
                case "ran", cases, refused, failures, seed:
                    tally.cases[kind] += cases
                    tally.refused[kind] += refused
                    tally.failures[kind] += sum(failures.values())
                    tally.known[kind] |= set(failures)
                    worker.next_seed = seed
                case "found", key, text:
                    _note(tally, kind, key, text, say)
    except (EOFError, OSError):
        worker.seed = -1


def _note(tally: Tally, kind: str, key: str, text: str, say: Callable[[str], None]) -> None:
    own = tally.findings.setdefault(kind, {})
    if key not in own:
        own[key] = text
        say(f"\n-- finding {len(own)} of {kind}: {text}\n")


def _ended(worker: Worker, tally: Tally, say: Callable[[str], None]) -> Errand | None:
    """Note how a process ended; what is left of its errand where it did not end by itself."""
    errand = worker.errand
    late = worker.late
    if late:
        worker.process.kill()
    worker.process.join()
    _listen(worker, tally, say)
    status = worker.process.exitcode
    worker.pipe.close()
    if status == 0:
        return None
    what = "hangs" if late else f"ends the process with status {status}"
    where = f"python -m sparsetc.testing fuzz {errand.kind} --seed {worker.seed} --cases 1 --backend {errand.backend}"
    _note(tally, errand.kind, f"a case {what}", f"a case {what}\n# drawn by: {where}", say)
    tally.cases[errand.kind] += 1
    tally.failures[errand.kind] += 1
    if errand.kind == "readers" or worker.seed < 0 or errand.most or time.time() > errand.deadline:
        return None
    return replace(errand, seed=worker.seed + errand.step)
