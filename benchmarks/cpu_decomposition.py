"""Sweeps of CP-ALS, CP-APR and Tucker over the Uber tensor on one CPU core, beside pyttb's: rank 16, 4, float64.

OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMBA_NUM_THREADS=1 python benchmarks/cpu_decomposition.py

Seconds of processor time a sweep are what a longer run takes more than a shorter one, over the sweeps between.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyttb
import torch
from common import record

import sparsetc as stc
from sparsetc.decomposition import cp_als, cp_apr, tucker

RANK, SIDE = 16, 4
INNER = 5
"""Multiplicative updates of a mode in each sweep of CP-APR."""


def sweep(run: Callable[[int], Any], short: int, long: int) -> float:
    """Seconds of one of the sweeps between."""
    run(short)  # compiles
    taken = []
    for sweeps in (short, long):
        start = time.process_time()
        run(sweeps)
        taken.append(time.process_time() - start)
    return round((taken[1] - taken[0]) / (long - short), 4)


def main() -> None:
    """Ours first, from the same start."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    x = stc.datasets.uber().to(torch.float64)
    start = [torch.rand(n, RANK, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for n in x.shape]
    peer = pyttb.sptensor(x.coords.T.numpy(), x.values.numpy()[:, None], x.shape)
    orthonormal = [torch.linalg.qr(f[:, :SIDE])[0] for f in start]

    def first() -> Any:
        return pyttb.ktensor([f.numpy().copy() for f in start])

    def of_pyttb() -> Any:
        return [f.numpy().copy() for f in orthonormal]

    ours: dict[str, Callable[[int], Any]] = {
        "cp_als": lambda n: cp_als(x, RANK, init=start, n_iter_max=n, tol=0),
        "cp_apr": lambda n: cp_apr(x, RANK, init=start, n_iter_max=n, n_inner_max=INNER, tol=0),
        "tucker": lambda n: tucker(x, SIDE, init=orthonormal, n_iter_max=n, tol=0),
    }
    theirs: dict[str, Callable[[int], Any]] = {
        "cp_als": lambda n: pyttb.cp_als(peer, RANK, stoptol=0, maxiters=n, init=first(), printitn=0),
        "cp_apr": lambda n: pyttb.cp_apr(
            peer, RANK, stoptol=0, maxiters=n, maxinneriters=INNER, init=first(), printitn=0
        ),
        "tucker": lambda n: pyttb.tucker_als(
            peer, np.full(4, SIDE), stoptol=0, maxiters=n, init=of_pyttb(), printitn=0
        ),
    }
    rows = []
    for name, run in ours.items():
        rows.append({"library": "sparsetc", "method": name, "seconds": sweep(run, 5, 55)})
        seconds = sweep(theirs[name], 1, 3)
        rows.append({"library": f"pyttb {pyttb.__version__}", "method": name, "seconds": seconds})
        print(*rows[-2:], flush=True)
    record("cpu_decomposition", rows, tensor="uber", rank=RANK, dtype="float64")


if __name__ == "__main__":
    main()
