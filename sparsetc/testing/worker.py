"""What one process of a long run does: draws cases one after the other, and says what it finds.

In: an `Errand`. Out: messages on a pipe. A process that dies, or hangs where no signal reaches it, leaves the seed of
its case behind. The messages are ::

    ("begins", seed)                             of the next case; -1 before what takes its time
    ("ran", cases, refused, failures, seed)      since the last report, the failures by rough key, and the next seed
    ("found", key, text)                         a finding
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

REPORT_SECONDS = 1.0
"""How often a process says how far it is."""
SHRUNK = 2
"""How many failures of one kind, plan and circumstance are shrunk; the others are counted."""


@dataclass(frozen=True)
class Errand:
    """What a process is to do.

    Attributes:
        seed: seed of its first case; the next are `step` apart.
        deadline: on the clock of `time.time`.
        known: rough keys of findings that need not be shrunk again.
        most: cases after which it ends; 0 for no end but the deadline.
    """

    kind: str
    seed: int
    step: int
    deadline: float
    backend: str
    device: str
    known: tuple[str, ...] = ()
    most: int = 0
    limit: float = 60.0
    shrink_seconds: float = 30.0


def work(errand: Errand, pipe: Connection) -> None:
    """Run an errand; the entry of a process."""
    with tempfile.TemporaryDirectory(prefix="sparsetc-fuzz-", ignore_cleanup_errors=True) as folder:
        os.environ["SPARSETC_CACHE_DIR"] = os.path.join(folder, "cache")
        if errand.kind == "readers":
            _read(errand, pipe)
        else:
            _draw(errand, pipe)
    pipe.close()


def _read(errand: Errand, pipe: Connection) -> None:
    from sparsetc.testing.readers import fuzz_readers  # type: ignore[import-not-found, unused-ignore]

    def report(message: str) -> None:
        pipe.send(("found", re.sub(r"\d+|'.*'", "", message.strip().split("\n")[0]), message))

    left = max(0.0, errand.deadline - time.time())
    cases = fuzz_readers(time.monotonic() + left, errand.seed, report)
    pipe.send(("ran", cases, 0, {}, errand.seed + errand.step))


def _draw(errand: Errand, pipe: Connection) -> None:
    import torch

    from sparsetc.testing.draw import draw
    from sparsetc.testing.findings import FINE, found, outcome, rough_key

    torch.set_num_threads(1)
    tally: Counter[str] = Counter()
    shrunk: Counter[str] = Counter(dict.fromkeys(errand.known, SHRUNK))
    state: dict[str, Any] = {"cases": 0, "refused": 0, "reported": 0.0}
    seed, count = errand.seed, 0

    def tell(following: int) -> None:
        pipe.send(("ran", state["cases"], state["refused"], dict(tally), following))
        tally.clear()
        state.update(cases=0, refused=0, reported=time.time())

    while time.time() < errand.deadline and not (errand.most and count >= errand.most):
        if time.time() - state["reported"] > REPORT_SECONDS:
            tell(seed)
        pipe.send(("begins", seed))
        case = draw(errand.kind, seed, errand.backend, errand.device)
        kind, message = outcome(case, errand.limit)
        state["cases"] += 1
        state["refused"] += kind == "refused"
        if kind not in FINE:
            rough = rough_key(case, kind)
            tally[rough] += 1
            if shrunk[rough] < SHRUNK:
                shrunk[rough] += 1
                pipe.send(("begins", -1))
                finding = found(case, kind, message, errand.shrink_seconds)
                pipe.send(("found", finding.key, str(finding)))
        seed, count = seed + errand.step, count + 1
    tell(seed)
