"""Products of given blocks whose generated source is kept in ``tests/golden/blocks``."""

from __future__ import annotations

from pathlib import Path

import torch
from block_dot_cases import SPMM, BlockDot

import sparsetc as stc

FOLDER = Path(__file__).parents[1] / "golden" / "blocks"
MTTKRP = "ijk,jr,kr->ir"


def plan(order: int, precision: str, stages: int, **blocks: int) -> stc.plans.Plan:
    """Runs of the entries of a row of blocks, one entry a step; mode 0 numbers entries, mode 1 rows of blocks."""
    storage = stc.plans.Storage((1,), (), (0, *range(2, order + 1)))
    schedule = stc.plans.Schedule(
        4, tuple(blocks.items()), True, precision, stages=stages, lanes=0, slowest_axes=("r",)
    )
    return stc.plans.Plan("coo", (stc.plans.Part("coo", storage, schedule),))


CASES: dict[str, tuple[BlockDot, torch.dtype, str, stc.plans.Plan]] = {
    "spmm_f16": (BlockDot(SPMM, (6, 8), (32, 32)), torch.float16, "highest", plan(2, "f16", 5, i=32, j=32, r=16)),
    "spmm_tf32": (BlockDot(SPMM, (6, 8), (64, 64)), torch.float32, "high", plan(2, "tf32", 3, i=64, j=64, r=64)),
    "spmm_halves": (BlockDot(SPMM, (6, 8), (32, 32)), torch.float32, "highest", plan(2, "f16x3", 5, i=32, j=32, r=32)),
    "mttkrp_f16": (
        BlockDot(MTTKRP, (4, 4, 4), (16, 8, 16)),
        torch.float16,
        "highest",
        plan(3, "f16", 3, i=16, j=8, k=16, r=64),
    ),
}


def source(name: str) -> str:
    """The text generated for a case."""
    case, dtype, precision, chosen = CASES[name]
    x, dense = case.operands(dtype)
    return stc.compile(case.equation, x, *dense, plan=chosen, backend="triton", precision=precision).source


def path(name: str) -> Path:
    """Where it is kept."""
    return FOLDER / f"{name}.py"
