"""Contractions of two sparse tensors by every path, against the dense product and torch's sparse one in the same run.

SPARSETC_DATA=<folder of .npz> python benchmarks/pair.py

Values are compared with the scalar path's in float64 before any time is taken. ``compile_ms`` is the symbolic phase
with all else that is done once, by the second of two compilations.
"""

from __future__ import annotations

import time
import warnings
from math import prod
from typing import Any

import torch
from common import DEVICE, microseconds, record, relative_error, tensor

import sparsetc as stc

CASES = (
    ("guanine_TEoo_3d", "guanine_TEoo_3d", "ijk,abk->ijab"),
    ("guanine_TEoo_3d", "guanine_TEov_3d", "ijk,abk->ijab"),
    ("guanine_TEov_3d", "guanine_TEov_3d", "ijk,abk->ijab"),
    ("uber_amj_4d", "uber_amj_4d", "ijkl,mjkl->im"),
    ("uber_amj_4d", "uber_amj_4d", "ijkl,mnkl->ijmn"),
    ("nips", "nips", "ijkl,mnkl->ijmn"),
)
LIMIT = {"highest": 1e-5, "high": 2e-3}
PLANS = ("scalar", "dense", "bcb", stc.plan_bcb(storage="bitmap"))
MOST_TASKS = 2_000_000_000
"""Tasks above which the scalar path is not timed."""


def unfolded(x: stc.SparseTensor, rows: int) -> torch.Tensor:
    """CSR, the first modes down."""
    key = torch.zeros(2, x.nnz, dtype=torch.long, device=x.device)
    for m in range(x.order):
        key[int(m >= rows)] = key[int(m >= rows)] * x.shape[m] + x.coords[m]
    return torch.sparse_coo_tensor(key, x.values, (prod(x.shape[:rows]), prod(x.shape[rows:]))).to_sparse_csr()


def compile_ms(equation: str, x: stc.SparseTensor, y: stc.SparseTensor, **settings: Any) -> float:
    """Milliseconds of compiling, Triton's own not counted, which happened the first time."""
    start = time.perf_counter()
    stc.compile(equation, x, y, **settings)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Every case, plan and precision that fits."""
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for left, right, equation in CASES:
        x, y = tensor(left), tensor(right, seed=1)
        if x is None or y is None:
            continue
        wide = [o.with_values(o.values.double()) for o in (x, y)]
        auto = stc.compile(equation, *wide)
        tasks = auto.chain.pairs[0].matching.tasks
        expected = auto().values
        for plan in PLANS:
            for precision, limit in LIMIT.items():
                if plan == "scalar" and (tasks > MOST_TASKS or precision != "highest"):
                    continue
                settings = {"plan": plan, "precision": precision}
                try:
                    k = stc.compile(equation, x, y, **settings)
                except stc.SparsetcError as refused:
                    print(f"{left} {equation} {plan}: {refused}", flush=True)
                    continue
                error = relative_error(k().values, expected)
                assert error < limit, (equation, plan, precision, error)
                step = k.chain.pairs[0]
                name = plan if isinstance(plan, str) else f"bcb, {plan.storage}"
                row = {
                    "tensors": f"{left} x {right}",
                    "equation": equation,
                    "plan": name,
                    "precision": precision,
                    "nnz": k.nnz,
                    "tasks": tasks,
                    "pairs": step.cut.pairs.tasks,
                    "us": round(microseconds(k), 1),
                    "compile_ms": round(compile_ms(equation, x, y, **settings), 1),
                    "expected_us": round(1e6 * (dict(step.question.expected())[k.plan.name] or 0), 1),
                    "error": float(f"{error:.1e}"),
                    "auto": auto.plan.name,
                }
                rows.append(row)
                print(row, flush=True)
        kept = len(equation.split("->")[1]) // 2
        try:
            a, b = unfolded(x, kept), unfolded(y, kept).to_sparse_coo().t().to_sparse_csr()
            us = microseconds(lambda: a @ b)  # noqa: B023
            rows.append(
                {"tensors": f"{left} x {right}", "equation": equation, "plan": "torch.sparse", "us": round(us, 1)}
            )
            print(rows[-1], flush=True)
        except RuntimeError as refused:
            print(f"{left} {equation} torch.sparse: {refused}", flush=True)
    record("pair", rows)


if __name__ == "__main__":
    main()
