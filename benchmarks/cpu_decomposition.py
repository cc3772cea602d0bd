"""A sweep of CP-ALS over the Uber tensor on one CPU core, beside pyttb's: rank 16, float64.

OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMBA_NUM_THREADS=1 python benchmarks/cpu_decomposition.py

Seconds a sweep are what a longer run takes more than a shorter one, over the sweeps between.
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
from sparsetc.decomposition import cp_als

RANK = 16


def sweep(run: Callable[[int], Any], short: int, long: int) -> float:
    """Seconds of one of the sweeps between."""
    run(short)  # compiles
    taken = []
    for sweeps in (short, long):
        start = time.perf_counter()
        run(sweeps)
        taken.append(time.perf_counter() - start)
    return round((taken[1] - taken[0]) / (long - short), 4)


def main() -> None:
    """Ours first, from the same start."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    x = stc.datasets.uber().to(torch.float64)
    start = [torch.rand(n, RANK, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for n in x.shape]
    own = sweep(lambda n: cp_als(x, RANK, init=start, n_iter_max=n, tol=0), 5, 55)
    theirs = pyttb.sptensor(x.coords.T.numpy(), x.values.numpy()[:, None], x.shape)
    given = [f.numpy() for f in start]

    def peer(sweeps: int) -> Any:
        model = pyttb.ktensor([np.array(f) for f in given])
        return pyttb.cp_als(theirs, RANK, stoptol=0, maxiters=sweeps, init=model, printitn=0)

    other = sweep(peer, 1, 4)
    print({"sparsetc": own, "pyttb": other})
    rows = [{"library": "sparsetc", "seconds": own}, {"library": f"pyttb {pyttb.__version__}", "seconds": other}]
    record("cpu_decomposition", rows, tensor="uber", rank=RANK, dtype="float64")


if __name__ == "__main__":
    main()
