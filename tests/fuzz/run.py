"""Look for faults for as long as you like: ``python tests/fuzz/run.py --minutes 10``.

In: kinds of cases, minutes, a seed. Out: what fails, shrunk, as lines of Python and as hypothesis reproduces it, and an
exit status of 1 where anything did. Failures are kept in a folder and tried first when their kind is run again; a kind
that has failed is not gone on with.

Cases run in processes that are new for every turn of a kind, so what a process keeps does not grow. One that dies, or
that `faulthandler` ends because a case takes too long, leaves its last case behind, which is a failure too.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, wherever it is run
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase

KINDS = ("einsums", "gradients", "contractions", "files")
TURN_SECONDS = 120.0
"""The longest turn of one kind."""
ROUND = 10
"""Cases that hypothesis draws before it starts anew; of more it would make five of six out of parts of those before."""
SEEDS = 10**6
"""Rounds that have a seed of their own, by the seed of a sweep."""
FAILED, DEVICE_LOST, NONE = 3, 4, 5
"""Exit statuses of a turn: a case failed, the GPU is lost, there was no time for any case."""


class Over(BaseException):
    """The time is over; no `Exception`, so that it is no failure of a case."""


def sweep(
    kind: str,
    number: int,
    examples: int = ROUND,
    backend: str = "torch",
    device: str = "cpu",
    before: Callable[[Any, Counter[str]], None] = lambda case, tally: None,
    **more: Any,
) -> Counter[str]:
    """Have hypothesis check cases of a kind, and shrink what fails; returns what became of them.

    Args:
        kind: one of `KINDS`.
        number: the seed.
        examples: how many cases, at least.
        backend: "torch", "numba", or "triton", which runs in its interpreter on the CPU.
        device: where operands are.
        before: is called before a case runs, with it and with what became of those before it.
        more: settings of hypothesis.
    """
    if kind == "files":
        from fuzz import files  # which wants libraries that write them

        ours, program, strategy = files.check_file, files.program, files.files()
    else:
        from fuzz import calls, check, strategies

        ours, program, strategy = check.check, calls.program, strategies.cases(kind, backend, device)
    more = {"database": None, "print_blob": True, "suppress_health_check": [*HealthCheck], **more}
    tally: Counter[str] = Counter()

    @settings(max_examples=ROUND, deadline=None, **more)
    @given(strategy)
    def agrees(case: Any) -> None:
        before(case, tally)
        try:
            tally[ours(case)] += 1
        except Exception:
            tally["failed"] += 1
            note(program(case))
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()  # what hypothesis does between cases has no limit

    for n in range(-(-examples // ROUND)):
        seed(number * SEEDS + n)(agrees)()
    return tally


def turn(kind: str, number: int, end: float, folder: Path, options: argparse.Namespace) -> None:
    """One turn of a kind, in a process of its own."""
    os.environ["SPARSETC_CACHE_DIR"] = str(folder / "cache")
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreting

        interpreting.faster()
    import torch

    torch.set_num_threads(1)
    faulthandler.enable()
    count = 0

    def before(case: Any, tally: Counter[str]) -> None:
        nonlocal count
        if time.time() > end and not tally["failed"]:
            raise Over
        count += 1
        (folder / "last").write_bytes(pickle.dumps(case))
        faulthandler.dump_traceback_later(options.limit, exit=True)

    database = DirectoryBasedExampleDatabase(Path(options.database, f"{kind} {options.backend}"))
    phases, examples = [Phase.reuse, Phase.generate, Phase.shrink], options.examples or 10**9
    status = 0
    try:
        sweep(kind, number, examples, options.backend, options.device, before, database=database, phases=phases)
    except Over:
        pass
    except Exception as error:
        for one in getattr(error, "exceptions", (error,)):  # a group of several failures
            print(f"\n-- {kind}: {type(one).__name__}: {one}", *getattr(one, "__notes__", ()), sep="\n")
        status = DEVICE_LOST if "CUDA error" in str(error) else FAILED  # after which every case fails
    print(f"{kind}: {count:,} cases", flush=True)
    sys.exit(status or (0 if count else NONE))


def fuzz(options: argparse.Namespace) -> int:
    """Run until the minutes, or the cases, are over; returns how many kinds have failed, or had no case."""
    from fuzz import calls, files

    end, context = time.time() + 60 * options.minutes, multiprocessing.get_context("spawn")
    kinds, number, ran = [*options.kinds], options.seed, set[str]()
    seconds = min(TURN_SECONDS, 60 * options.minutes / len(kinds))
    while kinds and time.time() < end and not (options.examples and number > options.seed):
        for kind in [*kinds]:
            with tempfile.TemporaryDirectory(prefix="sparsetc-fuzz-", ignore_cleanup_errors=True) as folder:
                last = Path(folder, "last")
                given = (kind, number, min(end, time.time() + seconds), Path(folder), options)
                process = context.Process(target=turn, args=given)
                process.start()
                process.join()
                ran |= {kind} if process.exitcode != NONE else set()
                if process.exitcode not in (0, NONE):
                    kinds.remove(kind)
                if process.exitcode not in (0, FAILED, NONE):
                    case = pickle.loads(last.read_bytes()) if last.exists() else None
                    text = case and (files.program if kind == "files" else calls.program)(case)
                    print(f"\n-- {kind}: status {process.exitcode}, or no end, in this case:\n{text}", flush=True)
        number += 1
    if unrun := [kind for kind in options.kinds if kind not in ran]:
        print(f"no time for any case of {', '.join(unrun)}: give more --minutes")
    return len(options.kinds) - len(kinds) + len(unrun)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(description="Draw random cases and compare each with a float64 reference.")
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"{', '.join(KINDS)}; all in turn if none is named")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to go on (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the first cases (default: 0)")
    parser.add_argument("--examples", type=int, default=0, help="end after so many cases of each kind")
    parser.add_argument(
        "--backend", choices=("torch", "triton", "numba"), help="without a GPU, triton runs in its interpreter"
    )
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that one case may take (default: 60)")
    parser.add_argument("--database", default=".hypothesis/fuzz", help="folder of failures (default: .hypothesis/fuzz)")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.kinds) - set(KINDS)):
        parser.error(f"kinds are {', '.join(KINDS)}; found {', '.join(unknown)}")
    import torch

    options.kinds = options.kinds or KINDS
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.backend = options.backend or ("triton" if options.device == "cuda" else "torch")
    if options.backend == "triton" and options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when a process imports triton
    return 1 if fuzz(options) else 0


if __name__ == "__main__":
    sys.exit(main())
