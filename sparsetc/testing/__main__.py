"""The command line of what finds faults: ``python -m sparsetc.testing fuzz``.

In: kinds of cases, minutes, a seed. Out: findings with reproducers, counts, and an exit status of 1 where anything was
found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sparsetc.testing.fuzz import KINDS, Settings, fuzz


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sparsetc.testing", description="Find faults of sparsetc.")
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("fuzz", help="draw random cases and compare each with a float64 reference")
    command.add_argument("kinds", nargs="*", metavar="kind", help=f"{', '.join(KINDS)}; all in turn if none is named")
    command.add_argument("--minutes", type=float, default=10.0, help="how long to go on (default: 10)")
    command.add_argument("--seed", type=int, default=0, help="of the first case; the next is one more (default: 0)")
    command.add_argument("--cases", type=int, default=0, help="end after so many cases of each kind")
    command.add_argument(
        "--backend",
        choices=("auto", "torch", "triton"),
        default="auto",
        help="without a GPU, triton runs in its interpreter",
    )
    command.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    command.add_argument("--limit", type=float, default=60.0, help="seconds that one case may take (default: 60)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.kinds) - set(KINDS))
    if unknown:
        parser.error(f"kinds are {', '.join(KINDS)}; found {', '.join(unknown)}")
    if options.minutes <= 0 or options.workers < 1 or options.cases < 0 or options.seed < 0:
        parser.error("minutes and workers must be more than 0, cases and seed not less than 0")
    return _fuzz(options)


def _fuzz(options: argparse.Namespace) -> int:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = options.backend if options.backend != "auto" else "triton" if device == "cuda" else "torch"
    kinds = tuple(options.kinds) or KINDS
    settings = Settings(
        kinds, options.minutes, options.seed, backend, device, options.workers, options.cases, options.limit
    )
    interpreter = ", in its interpreter" if backend == "triton" and device == "cpu" else ""
    print(f"{', '.join(kinds)} on {device}, backend {backend}{interpreter}", flush=True)
    tally = fuzz(settings, lambda text: print(text, flush=True))
    print(tally.summary(kinds))
    return 1 if any(tally.findings.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
