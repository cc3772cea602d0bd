"""Failures of cases: what kind a failure is, and which of many are one finding.

In: a case that failed, and its error. Out: `Finding`: a key that failures of one cause share, and a reproducer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sparsetc.testing.around import Hang
from sparsetc.testing.case import Case
from sparsetc.testing.check import check
from sparsetc.testing.compare import Wrong
from sparsetc.testing.draw import draw
from sparsetc.testing.reproduce import reproducer
from sparsetc.testing.shrink import shrunk

TRIAL_SECONDS = 10.0
"""What a simpler case may take while a finding is shrunk."""
FINE = ("checked", "refused")
"""What `check` says of a case that does not fail."""
LONGEST = 6000
"""Characters of a reproducer that is printed whole."""
LARGE = """from sparsetc.testing import build, check, draw
case = draw.draw("{kind}", {seed}, "{backend}", "{device}")
print(build.call_text(case), [build.build(case).space[name] for name in case.names])
check.check(case)"""
"""The reproducer of a case that is too large to print."""


@dataclass(frozen=True)
class Finding:
    """Failures of one cause.

    Attributes:
        case: the one that was drawn.
    """

    key: str
    case: Case
    smallest: Case
    message: str

    def __str__(self) -> str:
        try:
            lines = reproducer(self.smallest)
        except Exception as error:  # a case that cannot be printed is still a finding
            lines = f"(no reproducer: {type(error).__name__}: {error})\n{self.smallest}"
        c = self.case
        if len(lines) > LONGEST:
            lines = LARGE.format(kind=c.kind, seed=c.seed, backend=c.backend, device=c.device)
        where = f"python -m sparsetc.testing fuzz {c.kind} --seed {c.seed} --cases 1 --backend {c.backend}"
        return f"{self.key}\n{self.message}\n{lines}\n# drawn by: {where}"


def failure_of(error: BaseException) -> str:
    """The kind of a failure: what of a result is wrong, or the error's class and the head of its message."""
    if isinstance(error, Wrong):
        return f"wrong {error.what}"
    if isinstance(error, Hang):
        return "hang"
    head = str(error).strip().split("\n")[0]
    head = re.sub(r'"[^"]*"|\'[^\' ]*\'|`[^`]*`', "~", head)
    head = re.sub(r"\([\d, ]*\)|\[[\d, ]*\]", "()", head)
    head = re.sub(r"-?\d[\d.,e+-]*", "N", head)
    return f"{type(error).__name__}: {head[:90]}"


def outcome(case: Case, limit: float = 60.0) -> tuple[str, str]:
    """One of `FINE` and no message, or the kind of a case's failure and its message."""
    try:
        return check(case, limit), ""
    except (Exception, Hang) as error:
        return failure_of(error), f"{type(error).__name__}: {str(error)[:600]}"


def failure(case: Case, limit: float = 60.0) -> tuple[str, str] | None:
    """(kind, message) of a case's failure; None where it does not fail."""
    kind, message = outcome(case, limit)
    return None if kind in FINE else (kind, message)


def rough_key(case: Case, kind: str) -> str:
    """What failures share that are likely to be one finding, before anything is shrunk."""
    return f"{kind} | {case.kind} | {case.plan.name} | {case.circumstance if case.circumstance != 'plain' else ''}"


def key(case: Case, kind: str) -> str:
    """What a finding is known by, once it is shrunk: all of the case that is not plain."""
    parts = [kind, case.kind]
    parts += [f"plan {case.plan.name}"] if case.plan.name not in ("auto", "coo") else []
    parts += [case.circumstance] if case.circumstance not in ("plain", "twice") else []
    parts += [f"output {case.form}"] if case.form != "auto" else []
    parts += [case.dtype] if case.dtype not in ("float32", "float64") else []
    parts += ["mixed types"] if any(o.dtype for o in case.operands) else []
    parts += ["deterministic"] if case.deterministic else []
    parts += sorted({o.memory for o in case.operands} - {"plain"})
    parts += sorted({o.form for o in case.operands} - {"tensor"})
    parts += ["NaN or infinite"] if any(o.values.specials for o in case.operands) else []
    parts += ["dense modes"] if any(o.dense_modes for o in case.operands) else []
    parts += [case.notation] if case.notation != "plain" else []
    return ", ".join(parts)


def found(case: Case, kind: str, message: str, seconds: float = 30.0) -> Finding:
    """The finding of a case that failed, shrunk unless it hangs."""
    if kind == "hang":
        return Finding(key(case, kind), case, case, message)
    again = failure(case, TRIAL_SECONDS)
    if again is None or again[0] != kind:
        return Finding(f"{kind}, not every time, {case.kind}", case, case, message)
    smallest = shrunk(case, kind, lambda c: (failure(c, TRIAL_SECONDS) or (None,))[0], seconds)
    again = failure(smallest, TRIAL_SECONDS)
    return Finding(key(smallest, kind), case, smallest, again[1] if again else message)


def sweep(kind: str, seeds: Iterable[int], backend: str = "torch", device: str = "cpu", seconds: float = 30.0) -> int:
    """Check the cases of these seeds; returns how many were checked and not refused.

    Raises:
        AssertionError: some failed; the message holds each finding, the first of each kind shrunk, for that long.
    """
    checked = 0
    texts: dict[str, str] = {}
    for seed in seeds:
        case = draw(kind, seed, backend, device)
        kind_found, message = outcome(case)
        checked += kind_found == "checked"
        rough = rough_key(case, kind_found)
        if kind_found not in FINE and rough not in texts:
            texts[rough] = str(found(case, kind_found, message, 0 if texts else seconds))
    if texts:
        raise AssertionError(f"{len(texts)} findings\n\n" + "\n\n".join(texts.values()))
    return checked
