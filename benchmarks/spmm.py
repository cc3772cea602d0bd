"""Sparse matrix times dense matrix: every plan and precision, beside cuSPARSE, dense products and the best known peers.

SPARSETC_DATA=<folder of .npz> python benchmarks/spmm.py [names of matrices] [columns]

Times are those of a captured CUDA graph, of ours and of torch's (`csr @ b` is cuSPARSE, `a @ b` cuBLAS), medians in one
run; every result is compared with float64 first. ``peer`` is the best time known of hand-written kernels of a class on
an H200 (Sputnik, RoDe; DTC, Acc-SpMM, FlashSparse), measured with the same matrices in another run.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import torch
from common import device_microseconds, record, relative_error, tensor

import sparsetc as stc

MATRICES = (
    *("c2000_5_mat", "pruned 2048x2048", "pruned 2048x512", "pruned 512x2048", "hexahedral"),
    *("block .1 .1", "block .01 .1", "R-MAT 14 x32", "R-MAT 14 x128", "R-MAT 16 x16"),
    *("hamming10_4_mat", "p_hat1500_1_mat", "econ_mbeacxc_mat", "bcsstk16_mat", "cora_mat", "pubmed_mat"),
)
COLUMNS = (32, 128, 512, 4096)
PLANS = ("auto", "coo", "rows", "hls", "window", "1-sa", "dense")
ERROR = {"highest": 1e-5, "high": 2e-3, "medium": 1e-2}
PEERS: dict[tuple[str, int], tuple[float, float, float]] = {
    ("c2000_5_mat", 128): (65, 60, 40),
    ("c2000_5_mat", 512): (221, 199, 118),
    ("c2000_5_mat", 4096): (1615, 1381, 798),
    ("pruned 2048x2048", 128): (68, 60, 40),
    ("pruned 2048x2048", 512): (172, 195, 116),
    ("pruned 2048x2048", 4096): (1123, 1341, 791),
    ("pruned 2048x512", 128): (13, 20, 13),
    ("pruned 2048x512", 4096): (148, 224, 134),
    ("pruned 512x2048", 128): (11, 18, 11),
    ("pruned 512x2048", 4096): (43, 70, 41),
    ("hexahedral", 32): (37, 28, 17),
    ("hexahedral", 128): (129, 78, 47),
    ("hexahedral", 512): (479, 264, 162),
    ("hexahedral", 4096): (3720, 2033, 1257),
    ("block .1 .1", 128): (41, 73, 41),
    ("block .1 .1", 4096): (1071, 2088, 1071),
    ("block .01 .1", 128): (14, 15, 13),
    ("block .01 .1", 4096): (174, 310, 174),
    ("R-MAT 14 x32", 32): (24, 21, 20),
    ("R-MAT 14 x32", 128): (36, 48, 35),
    ("R-MAT 14 x32", 512): (105, 153, 105),
    ("R-MAT 14 x32", 4096): (752, 1081, 636),
}
"""Microseconds of the best peer that computes in float32, of the best in tf32, and of the best of any precision."""


def baselines(x: stc.SparseTensor, b: torch.Tensor) -> dict[str, float]:
    """Times of torch: cuSPARSE, and dense products in tf32 and float16, where the matrix fits."""
    csr = torch.sparse_coo_tensor(x.coords, x.values, x.shape).coalesce().to_sparse_csr()
    found = {"cusparse": device_microseconds(lambda: csr @ b)}
    if x.shape[0] * x.shape[1] <= 1 << 30:
        a = x.to_dense()
        torch.backends.cuda.matmul.allow_tf32 = True
        found["dense tf32"] = device_microseconds(lambda: a @ b)
        torch.backends.cuda.matmul.allow_tf32 = False
        half, columns = a.half(), b.half()
        found["dense fp16"] = device_microseconds(lambda: half @ columns)
    return {name: round(us, 1) for name, us in found.items()}


def plan_row(x: stc.SparseTensor, b: torch.Tensor, expected: torch.Tensor, plan: str, precision: str) -> dict[str, Any]:
    """One plan at one precision, once its result is known to be right."""
    start = time.perf_counter()
    try:
        k = stc.compile("ij,jk->ik", x, b, plan=plan, precision=precision)
    except stc.PlanError as error:
        return {"asked": plan, "precision": precision, "refused": str(error)}
    found = k(b)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    error = relative_error(found, expected)
    assert error < ERROR[precision], (plan, precision, error)
    us = round(device_microseconds(lambda: k(b)), 1)
    parts = [f"{p.format} {dict(p.storage.params)} {p.nnz}" for p in k.plan.parts]
    own = {"asked": plan, "precision": precision, "plan": k.plan.name, "parts": parts, "us": us, "error": error}
    return own | {"expected_us": round(sum(k.step.choice.seconds) * 1e6, 1), "first_s": round(first, 3)}


def main(words: list[str]) -> None:
    """Every matrix that is there, by every plan."""
    warnings.simplefilter("ignore")
    columns = [int(w) for w in words if w.isdigit()] or COLUMNS
    rows = []
    for name in [w for w in words if not w.isdigit()] or MATRICES:
        x = tensor(name)
        if x is None:
            continue
        for n in columns:
            b = torch.randn(x.shape[1], n, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
            whole = torch.sparse_coo_tensor(x.coords, x.values.double(), x.shape).to_sparse_csr()
            expected = (whole @ b.double()).float()
            known = {"matrix": name, "nnz": x.nnz, "columns": n, "peers": PEERS.get((name, n)), **baselines(x, b)}
            own = [plan_row(x, b, expected, plan, p) for p in ERROR for plan in PLANS]
            rows += [known | row for row in own]
            print(name, n, {k: v for k, v in known.items() if k not in ("matrix", "columns")})
            for p in ERROR:
                each = [f"{r['asked']} {r.get('us')} ({r.get('expected_us')})" for r in own if r["precision"] == p]
                print("   ", p, *each, "->", own[list(ERROR).index(p) * len(PLANS)].get("plan"), flush=True)
        torch.cuda.empty_cache()
        record("spmm", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
