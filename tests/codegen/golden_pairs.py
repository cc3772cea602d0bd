"""The contractions of sparse operands whose generated source is kept in ``tests/golden/pairs``."""

from __future__ import annotations

from pathlib import Path

import torch
from pair_cases import operands

import sparsetc as stc

FOLDER = Path(__file__).parents[1] / "golden" / "pairs"
SIZES = {"b": 5, "i": 20, "j": 20, "k": 70, "l": 20, "m": 20}

CASES: dict[str, tuple[str, torch.dtype, str | stc.plans.Plan, str]] = {
    "one_mode": ("ijk,klm->ijlm", torch.float32, "bcb", "triton"),
    "one_mode_bitmap": ("ijk,klm->ijlm", torch.float32, stc.plans.plan_bcb(storage="bitmap"), "triton"),
    "two_modes_ragged": ("ijk,ljk->il", torch.float16, stc.plans.plan_bcb(i=8, l=8), "triton"),
    "ragged_bitmap": ("ijk,ljk->il", torch.float32, stc.plans.plan_bcb("bitmap", i=8, l=16, j=2, k=2), "triton"),
    "blocks_by_nonzeros": ("ijk,klm->ijlm", torch.float32, stc.plans.plan_bcb(formats=("bcb", "coo")), "triton"),
    "nothing_free": ("ijk,ijk->", torch.float32, "bcb", "triton"),
    "batch_integers": ("bij,bjk->bik", torch.int64, "bcb", "triton"),
    "one_mode_torch": ("ijk,klm->ijlm", torch.float32, "bcb", "torch"),
    "scalar": ("ijk,klm->ijlm", torch.float32, "scalar", "triton"),
    "scalar_torch": ("ijk,klm->ijlm", torch.float32, "scalar", "torch"),
    "dense": ("ijk,klm->ijlm", torch.float32, "dense", "torch"),
}


def source(name: str) -> str:
    """The text generated for a case."""
    equation, dtype, plan, backend = CASES[name]
    given = operands(equation, "skewed", dtype, sizes=SIZES)
    return stc.compile(equation, *given, plan=plan, precision="highest", backend=backend).source


def path(name: str) -> Path:
    """Where it is kept."""
    return FOLDER / f"{name}.py"
