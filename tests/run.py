"""Every check by one command: ``python tests/run.py``. Exits with a status that is not zero when one fails.

Lint, format and types; the tests; and the generated Triton source under Triton's interpreter, which needs a process of
its own. No GPU is needed; where there is one, the tests that are marked for it run too. ``--fast`` leaves the
interpreter out; other arguments go to pytest.

All checks start at once, so that no core waits for the end of another check; the tests are shown as they go, the others
when all are done. Triton keeps what it has compiled in its own cache, ``~/.triton`` unless TRITON_CACHE_DIR says
otherwise, so that a second run takes less time than the first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
TOOL = [sys.executable, "-m"]


def main(arguments: list[str]) -> int:
    """Run all checks, whether or not one before has failed, and sum up."""
    fast = "--fast" in arguments
    given = [a for a in arguments if a != "--fast"]
    pytest = [*TOOL, "pytest", *given]
    # It starts the same process as the last check does, but shows no progress.
    interpreted = "tests/project/test_interpreter.py"
    shown = Check("tests", [*pytest, *workers(min(8, cores())), "tests", f"--ignore={interpreted}"], output=None)
    others = [
        Check("lint", [*TOOL, "ruff", "check", "."]),
        Check("format", [*TOOL, "ruff", "format", "--check", "."]),
        Check("types", [*TOOL, "mypy"]),
    ]
    if not fast:
        # It never waits, as tests of processes do: behind these it takes the time that they leave.
        own = ["nice", "-n", "4", *pytest, *workers(min(4, cores() // 2)), "tests/interpreter"]
        others.append(Check("interpreter", own, {"TRITON_INTERPRET": "1"}))
    checks = [shown, *others]
    while sum(check.running() for check in checks):
        time.sleep(0.1)
    for check in others:
        print(f"\n== {check.name}: {check.shown}\n{check.said()}", flush=True)
    print("\nsummary")
    for check in checks:
        print(f"  {'passed' if check.status == 0 else 'FAILED'}  {check.name:12} {check.seconds:6.1f} s")
    return 1 if any(check.status for check in checks) else 0


class Check:
    """A command that runs, and what it says: kept until it is done unless ``output`` is None."""

    def __init__(self, name: str, command: list[str], extra: dict[str, str] | None = None, output: int | None = -1):
        self.name, self.seconds, self.status = name, 0.0, None
        self.shown = " ".join(command).replace(sys.executable, "python")
        self._output: IO[bytes] | None = None if output is None else tempfile.TemporaryFile()  # noqa: SIM115
        # One thread a process: workers fill the cores already. Bytecode is written even where the environment says no:
        # to compile tests and package anew in each of a hundred processes takes a tenth of the whole.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONDONTWRITEBYTECODE": "", **(extra or {})}
        if self._output is None:
            print(f"\n== {name}: {self.shown}", flush=True)
        self._start = time.perf_counter()
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self._output, stderr=subprocess.STDOUT if self._output else None
        )

    def running(self) -> bool:
        """Whether it is not done; notes its status and time when it is."""
        if self.status is None:
            self.seconds, self.status = time.perf_counter() - self._start, self._process.poll()
        return self.status is None

    def said(self) -> str:
        assert self._output
        self._output.seek(0)
        return self._output.read().decode(errors="replace")


def workers(count: int) -> list[str]:
    """Arguments for so many processes, of which none waits for one that is behind; none beside pytest's own for one."""
    return ["-n", str(count), "--dist", "worksteal"] if count > 1 else ["-n", "0"]


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
