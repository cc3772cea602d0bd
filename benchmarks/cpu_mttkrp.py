"""MTTKRP on the CPU, float32, R = 32, every mode, against the plain torch expression in the same run.

SPARSETC_DATA=<folder of .npz> python benchmarks/cpu_mttkrp.py
"""

from __future__ import annotations

import warnings
from math import exp, log

import torch
from common import DEVICE, factors, microseconds, mttkrp_equation, mttkrp_reference, record, relative_error, tensor

import sparsetc as stc


def plain(x: stc.SparseTensor, f: list[torch.Tensor], mode: int) -> torch.Tensor:
    """Gather, multiply, index_add_: what a torch user writes."""
    product = x.values[:, None]
    for m in range(x.order):
        if m != mode:
            product = product * f[m][x.coords[m]]
    return torch.zeros(x.shape[mode], f[0].shape[1]).index_add_(0, x.coords[mode], product)


def main() -> None:
    assert DEVICE == "cpu", "run this one without a GPU (CUDA_VISIBLE_DEVICES=)"
    warnings.simplefilter("ignore")
    x = tensor("uber_amj_4d")
    assert x is not None, "SPARSETC_DATA must hold uber_amj_4d.npz"
    f, rows = factors(x, 32), []
    for mode in range(x.order):
        dense = [m for n, m in enumerate(f) if n != mode]
        k = stc.compile(mttkrp_equation(x.order, mode), x, *dense)
        error = relative_error(k(*dense), mttkrp_reference(x, f, mode))
        assert error < 1e-5, (mode, error)
        ours, theirs = microseconds(lambda: k(*dense)), microseconds(lambda: plain(x, f, mode))  # noqa: B023
        rows.append(
            {
                "mode": mode,
                "plan": k.plan.name,
                "ms": round(ours / 1e3, 2),
                "plain_ms": round(theirs / 1e3, 1),
                "speedup": round(theirs / ours, 1),
            }
        )
        print(rows[-1], f"error {error:.0e}", flush=True)
    mean = exp(sum(log(r["speedup"]) for r in rows) / len(rows))
    print(f"geometric mean {mean:.1f}, sum {sum(r['ms'] for r in rows):.1f} ms")
    record("cpu_mttkrp", rows, geometric_mean_speedup=round(mean, 1))


if __name__ == "__main__":
    main()
