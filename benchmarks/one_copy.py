"""MTTKRP of all modes from one copy of the tensor (plan ``"mm-csf"``), and from a copy a mode, beside one-copy peers.

SPARSETC_DATA=<folder of .npz> python benchmarks/one_copy.py [names of tensors]

Microseconds of each mode's kernel at rank 32 in float32, medians in one run, once results are known to be right; bytes
are what is stored, values included. ``peer`` is the sum over modes of the best known peer that keeps one copy (BLCO or
MM-CSF), measured on an H200 with the same tensors in another run; BLCO takes 12 bytes a nonzero of third order, 16 of
fourth.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from common import (
    factors,
    kernel_microseconds,
    microseconds,
    mttkrp_equation,
    mttkrp_reference,
    record,
    relative_error,
    tensor,
)

import sparsetc as stc

RANK = 32
PEERS = {
    "uber_amj_4d": ((210, 195, 128, 133), (134, 109, 243, 347)),
    "guanine_TEvv_3d": ((128, 129, 119), (140, 338, 217)),
    "clustered": ((628, 636, 595), (476, 499, 564)),
    "nell-2 x0.25": ((1380, 1460, 1610), (2700, 2360, 2000)),
    "flickr x0.1": ((1470, 1560, 1420),),
}
"""Microseconds a mode of BLCO, then of MM-CSF in its best setting."""
PLANS = ("mm-csf", "auto")


def measured(x: stc.SparseTensor, plan: str, expected: list[torch.Tensor]) -> dict[str, Any]:
    """One plan: times, and bytes kept with the pattern."""
    own = factors(x, RANK)
    equations = [mttkrp_equation(x.order, m) for m in range(x.order)]
    others = [[f for n, f in enumerate(own) if n != m] for m in range(x.order)]
    stc.clear_cache()
    torch.cuda.synchronize()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    kernels = stc.compile_many(equations, x, others, plan=plan)
    results = [k(*f) for k, f in zip(kernels, others, strict=True)]
    torch.cuda.synchronize()
    first, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() - before
    errors = [relative_error(a, e) for a, e in zip(results, expected, strict=True)]
    assert max(errors) < 1e-5, (plan, errors)
    del results
    kept = torch.cuda.memory_allocated() - before
    us = [round(kernel_microseconds(k, f), 1) for k, f in zip(kernels, others, strict=True)]
    calls = [round(microseconds(lambda k=k, f=f: k(*f)), 1) for k, f in zip(kernels, others, strict=True)]
    expected_us = [round(sum(k.step.choice.seconds) * 1e6, 1) for k in kernels]
    parts = [str(p) for p in kernels[0].plan.parts]
    row = {"plan": plan, "us": us, "sum": round(sum(us), 1), "calls": calls, "expected_us": expected_us, "parts": parts}
    return row | {
        "bytes_per_nonzero": round(kept / x.nnz, 2),
        "peak_per_nonzero": round(peak / x.nnz, 1),
        "first_s": first,
    }


def main(names: list[str]) -> None:
    """Every tensor that is there."""
    rows = []
    for name in names or PEERS:
        x = tensor(name)
        if x is None:
            continue
        expected = [mttkrp_reference(x, factors(x, RANK), m) for m in range(x.order)]
        peer = min(map(sum, PEERS.get(name, ((0,),))))
        for plan in PLANS:
            row = measured(x, plan, expected)
            rows.append({"tensor": name, "nnz": x.nnz, "peer": peer, **row})
            shown = {k: v for k, v in row.items() if k != "parts"}
            print(name, x.nnz, "peer", peer, f"ratio {peer / row['sum']:.2f}", shown, flush=True)
            print("    ", *row["parts"], sep="\n     ")
        del x, expected
        torch.cuda.empty_cache()
    record("one_copy", rows, rank=RANK)


if __name__ == "__main__":
    main(sys.argv[1:])
