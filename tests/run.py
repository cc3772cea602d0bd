"""Every check by one command: ``python tests/run.py``. Exits with a status that is not zero when one fails.

Lint, format and types; the tests; and the generated Triton source under Triton's interpreter, which needs a process of
its own. No GPU is needed; where there is one, the tests that are marked for it run too. ``--fast`` leaves the
interpreter out; other arguments go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOL = [sys.executable, "-m"]


def main(arguments: list[str]) -> int:
    """Run all checks, whether or not one before has failed, and sum up."""
    fast = "--fast" in arguments
    given = [a for a in arguments if a != "--fast"]
    workers = ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "worksteal"]  # no worker waits for one that is behind
    pytest = [*TOOL, "pytest", *workers, *given]
    interpreted = "tests/test_interpreter.py"  # starts the same process as the last check does, but shows no progress
    checks = [
        ("lint", [*TOOL, "ruff", "check", "."], {}),
        ("format", [*TOOL, "ruff", "format", "--check", "."], {}),
        ("types", [*TOOL, "mypy"], {}),
        ("tests", [*pytest, "tests", f"--ignore={interpreted}"], {}),
    ]
    if not fast:
        checks.append(("interpreter", [*pytest, "tests/interpreter"], {"TRITON_INTERPRET": "1"}))
    results = [(name, *run(name, command, extra)) for name, command, extra in checks]
    print("\nsummary")
    for name, status, seconds in results:
        print(f"  {'passed' if status == 0 else 'FAILED'}  {name:12} {seconds:6.1f} s")
    return 1 if any(status for _, status, _ in results) else 0


def run(name: str, command: list[str], extra: dict[str, str]) -> tuple[int, float]:
    """(exit status, seconds) of one check, its output shown as it comes."""
    print(f"\n== {name}: {' '.join(command[1:])}", flush=True)
    # One thread a process: workers fill the cores already.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **extra}
    start = time.perf_counter()
    return subprocess.run(command, cwd=ROOT, env=environment).returncode, time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
