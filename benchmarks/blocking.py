"""Groups of similar rows (1-SA): the time that grouping takes, and the blocks that it finds.

    python benchmarks/blocking.py [--small]

Three questions, a table each. How long does it take, on an R-MAT graph of degree 128 and on a power-law graph of 317
thousand rows? Are the blocks of A(8192, 64, θ = 0.1, ρ) found again once the rows are scrambled (Labini et al., figure
3), at the similarity whose blocks are nearest to 64 high? And are blocks as dense, at a height, as those of the paper's
algorithm, which takes rows one by one? A grouping is checked against Theorem 1 before it is reported. With ``--small``
everything is a trial of a few seconds, and nothing is recorded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import synthetic
import torch
from common import DEVICE, record

from sparsetc.similarity.curve import BlockingPoint, measured
from sparsetc.similarity.groups import Groups, group_of_nonzeros, group_rows

sys.path.append(str(Path(__file__).parent.parent / "tests" / "similarity"))
from paper_algorithms import group_rows_by_definition

SMALL = "--small" in sys.argv
WIDTH = 64
DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
TAUS = tuple(n / 20 for n in range(2, 20))
Matrix = tuple[torch.Tensor, tuple[int, int]]


def point(matrix: Matrix, tau: float, grouping: Callable[..., Groups] = group_rows) -> BlockingPoint:
    """A blocking, timed where it has run before, and checked."""
    (rows, columns), (n_rows, n_columns) = matrix
    groups, seconds = timed(lambda: grouping(rows, columns, n_rows, n_columns, width=WIDTH, tau=tau))
    check(groups, rows, columns, tau)
    return measured(groups, rows, columns, n_columns, WIDTH, tau, seconds)


def timed(call: Callable[[], Groups]) -> tuple[Groups, float]:
    """(what a call gives, seconds)."""
    start = time.perf_counter()
    found = call()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return found, time.perf_counter() - start


def check(groups: Groups, rows: torch.Tensor, columns: torch.Tensor, tau: float) -> None:
    """Exit where a row is missing or there twice, or Theorem 1 fails."""
    strips = columns // WIDTH
    span = int(strips.max()) + 1
    group = group_of_nonzeros(groups, rows)
    touched = torch.unique(rows * span + strips) // span
    filled = torch.bincount(group_of_nonzeros(groups, touched), minlength=groups[1].numel())
    union = torch.bincount(torch.unique(group * span + strips) // span, minlength=groups[1].numel())
    dense = filled.double() >= tau / 2 * (groups[1] * union).double() * (1 - 1e-12)
    if not torch.equal(groups[0].sort().values, torch.unique(rows)) or not bool(dense.all()):
        raise SystemExit(f"WRONG groups at tau {tau}")


def row(table: str, name: str, p: BlockingPoint, **extra: Any) -> dict[str, Any]:
    """A line of the record, printed."""
    found = {"table": table, "matrix": name, **extra, **{k: round(v, 5) for k, v in asdict(p).items()}}
    print("  ".join(f"{key} {value}" for key, value in found.items()), flush=True)
    return found


def times() -> list[dict[str, Any]]:
    """Seconds of the second grouping of each graph."""
    if SMALL:
        graphs = {
            "R-MAT 10 x128": synthetic.rmat(10, 128, device=DEVICE),
            "power law, 5 K rows": synthetic.power_law(5000, 30_000, device=DEVICE),
        }
    else:
        graphs = {
            "R-MAT 14 x128": synthetic.rmat(14, 128, device=DEVICE),
            "R-MAT 18 x8": synthetic.rmat(18, 8, device=DEVICE),
            "power law, 317 K rows": synthetic.power_law(device=DEVICE),
        }
    found = []
    for name, matrix in graphs.items():
        for tau in (0.2, 0.3, 0.5, 0.7):
            point(matrix, tau)
            found.append(row("time", name, point(matrix, tau), nonzeros=matrix[0].shape[1]))
    return found


def recovery() -> list[dict[str, Any]]:
    """For each density in blocks, the blocking nearest to the height that the blocks had."""
    found = []
    for density in DENSITIES:
        matrix = synthetic.block_matrix(2048 if SMALL else 8192, WIDTH, 0.1, density, device=DEVICE)
        points = [point(matrix, tau) for tau in TAUS]
        best = min(points, key=lambda p: (round(abs(p.height - WIDTH), 2), -p.density))
        share = round(best.density / density, 3)
        found.append(row("recovery", f"A({matrix[1][0]}, 64, 0.1, {density})", best, share_of_density=share))
    return found


def against_the_definition() -> list[dict[str, Any]]:
    """Both curves of a graph that the sequential algorithm can take."""
    nodes = 9 if SMALL else 12
    matrix = synthetic.rmat(nodes, 32, device=DEVICE)
    found = []
    for name, grouping in (("rounds", group_rows), ("definition", group_rows_by_definition)):
        for tau in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
            found.append(row("curves", f"R-MAT {nodes} x32", point(matrix, tau, grouping), by=name))
    return found


if __name__ == "__main__":
    rows = [*times(), *recovery(), *against_the_definition()]
    if not SMALL:
        print(record("blocking", rows, width=WIDTH))
