"""An iteration of CP-ALS, of CP-APR and of Tucker's, beside the einsums that it is made of.

SPARSETC_DATA=<folder of .npz> python benchmarks/decomposition.py [names of tensors]

Milliseconds an iteration in float32 at rank 32: what a longer run takes more than a shorter one, over the iterations
between, so that compiling and capturing are left out. ``mttkrp`` is the sum of the modes' kernels alone.
"""

from __future__ import annotations

import sys
import time
import warnings

import torch
from common import factors, kernel_microseconds, mttkrp_equation, record, tensor

import sparsetc as stc

RANK, SHORT, LONG = 32, 16, 144
TENSORS = ("uber_amj_4d", "guanine_TEvv_3d", "nell-2 x0.25")


def seconds(run, n_iter: int) -> float:
    """One run of so many iterations."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(n_iter)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def iteration(run, long: int = LONG) -> float:
    """Milliseconds an iteration."""
    run(SHORT)
    short, longer = (min(seconds(run, n) for _ in range(3)) for n in (SHORT, long))
    return round(1e3 * (longer - short) / (long - SHORT), 4)


def main(names: list[str]) -> None:
    """Every tensor that is there."""
    warnings.simplefilter("ignore")
    rows = []
    for name in names or TENSORS:
        x = tensor(name)
        if x is None:
            continue
        own = factors(x, RANK)
        kernels = []
        for m in range(x.order):
            others = [f for n, f in enumerate(own) if n != m]
            kernels.append(kernel_microseconds(stc.compile(mttkrp_equation(x.order, m), x, *others), others))
        als = iteration(lambda n: stc.decomposition.cp_als(x, RANK, n_iter_max=n, tol=0, random_state=0))
        counts = x.with_values(x.values.ceil())
        apr = iteration(lambda n: stc.decomposition.cp_apr(counts, RANK, n_iter_max=n, tol=0, random_state=0), 32)
        tucker = iteration(
            lambda n: stc.decomposition.tucker(x, [min(16, n) for n in x.shape], n_iter_max=n, tol=0), 32
        )
        row = {"tensor": name, "nnz": x.nnz, "als_ms": als, "mttkrp_ms": round(sum(kernels) / 1e3, 4)}
        rows.append(row | {"als_over_mttkrp": round(als / row["mttkrp_ms"], 2), "apr_ms": apr, "tucker_16_ms": tucker})
        print(rows[-1], flush=True)
    record("decomposition", rows, rank=RANK)


if __name__ == "__main__":
    main(sys.argv[1:])
