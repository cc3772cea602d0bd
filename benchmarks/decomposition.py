"""An iteration of CP-ALS, of CP-APR and of Tucker's, beside the einsums that it is made of.

SPARSETC_DATA=<folder of .npz> python benchmarks/decomposition.py [names of tensors]

Milliseconds an iteration in float32 at rank 32: what a longer run takes more than a shorter one, over the iterations
between, so that compiling and capturing are left out. ``mttkrp`` is the sum of the modes' kernels alone.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import factors, kernel_microseconds, mttkrp_equation, record, tensor

import sparsetc as stc
from sparsetc.decomposition import cp_als, cp_apr, tucker

RANK, SHORT, LONG = 32, 16, 2064
TENSORS = ("uber_amj_4d", "guanine_TEvv_3d", "nell-2 x0.25")


def seconds(run: Callable[[int], Any], n_iter: int) -> float:
    """One run of so many iterations."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(n_iter)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def iteration(run: Callable[[int], Any], long: int = LONG) -> float:
    """Milliseconds an iteration."""
    run(SHORT)
    short, longer = (min(seconds(run, n) for _ in range(3)) for n in (SHORT, long))
    return round(1e3 * (longer - short) / (long - SHORT), 4)


def measured(x: stc.SparseTensor) -> dict[str, Any]:
    """The iterations of one tensor."""
    own, kernels = factors(x, RANK), []
    for m in range(x.order):
        others = [f for n, f in enumerate(own) if n != m]
        kernels.append(kernel_microseconds(stc.compile(mttkrp_equation(x.order, m), x, *others), others))
    counts, ranks = x.with_values(x.values.ceil()), [min(16, n) for n in x.shape]
    als = iteration(lambda n: cp_als(x, RANK, n_iter_max=n, tol=0, random_state=0))
    apr = iteration(lambda n: cp_apr(counts, RANK, n_iter_max=n, tol=0, random_state=0), 32)
    chains = iteration(lambda n: tucker(x, ranks, n_iter_max=n, tol=0), 32)
    alone = round(sum(kernels) / 1e3, 4)
    ratio = round(als / alone, 2)
    return {"als_ms": als, "mttkrp_ms": alone, "als_over_mttkrp": ratio, "apr_ms": apr, "tucker_16_ms": chains}


def main(names: list[str]) -> None:
    """Every tensor that is there."""
    warnings.simplefilter("ignore")
    rows = []
    for name in names or TENSORS:
        x = tensor(name)
        if x is not None:
            rows.append({"tensor": name, "nnz": x.nnz, **measured(x)})
            print(rows[-1], flush=True)
    record("decomposition", rows, rank=RANK)


if __name__ == "__main__":
    main(sys.argv[1:])
