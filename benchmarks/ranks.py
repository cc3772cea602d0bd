"""Ranks that are not powers of two: MTTKRP at the first mode, over the straight line between their neighbours that are.

SPARSETC_DATA=<folder of .npz> python benchmarks/ranks.py

``line`` is the time that lies between those of the two neighbouring powers of two as the rank does, for the same plan.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from common import factors, kernel_microseconds, mttkrp_equation, mttkrp_reference, record, relative_error, tensor

import sparsetc as stc

TENSORS = ("guanine_TEvv_3d", "uber_amj_4d", "nell-2 x0.25")
RANKS = (16, 20, 24, 25, 32, 40, 48, 50, 64, 80, 96, 100, 128, 200, 256)
PLANS = ("auto", "coo", "fiber")


def rank_row(x: stc.SparseTensor, name: str, plan: str, rank: int) -> dict[str, Any]:
    """One plan at one rank, once its result is known to be right."""
    f = factors(x, rank)
    k = stc.compile(mttkrp_equation(x.order, 0), x, *f[1:], plan=plan, precision="highest")
    error = relative_error(k(*f[1:]), mttkrp_reference(x, f, 0, chunk=1 << 19))
    assert error < 1e-5, (name, plan, rank, error)
    us = round(kernel_microseconds(k, f[1:]), 1)
    return {"tensor": name, "asked": plan, "plan": k.plan.name, "rank": rank, "kernel_us": us, "error": error}


def over_line(rows: list[dict[str, Any]]) -> None:
    """Add, to rows of one tensor and plan, what each takes over the line between powers of two."""
    powers = [r for r in rows if r["rank"] & (r["rank"] - 1) == 0]
    for low, high in pairwise(powers):
        for row in rows:
            share = (row["rank"] - low["rank"]) / (high["rank"] - low["rank"])
            if 0 < share < 1:
                line = low["kernel_us"] + share * (high["kernel_us"] - low["kernel_us"])
                row["over_line"] = round(row["kernel_us"] / line, 3)


def main() -> None:
    """Every tensor that is there, by every plan."""
    rows = []
    for name in TENSORS:
        x = tensor(name)
        for plan in PLANS if x is not None else ():
            own = [rank_row(x, name, plan, rank) for rank in RANKS]
            over_line(own)
            rows += own
            shown = [f"{r['rank']}: {r['kernel_us']} ({r.get('over_line', '-')})" for r in own]
            print(f"{name} {plan}", *shown, flush=True)
        del x
        torch.cuda.empty_cache()
    record("ranks", rows)


if __name__ == "__main__":
    main()
