"""Einsums by windows, as requests and as plans in full: what the tests of all runners share."""

from __future__ import annotations

from typing import Any

import torch
from cases import check, random_values
from halves_cases import problem

import sparsetc as stc

REQUESTS: dict[str, Any] = {
    "window": "window",
    "1-sa": "1-sa",
    "all of window": stc.plans.plan_window(height=4, width=8, threshold=0),
    "some of window": stc.plans.plan_window(height=4, width=4, threshold=4),
    "none of window": stc.plans.plan_window(threshold=10**6),
    "odd window": stc.plans.plan_window(height=3, width=5, threshold=1),
    "higher and wider than the matrix": stc.plans.plan_window(height=100, width=128),
    "all of 1-sa": stc.plans.plan_1sa(tau=30, strip=4, height=4, width=8, threshold=0),
    "some of 1-sa": stc.plans.plan_1sa(tau=60, strip=2, height=2, width=4, threshold=3),
    "equal rows": stc.plans.plan_1sa(tau=100, strip=1, height=4),
}
OTHERS = {
    "batch": "bij,bjk->bik",
    "batch last": "ijb,jkb->ikb",
    "spmv": "ij,j->i",
    "ttv": "ijk,k->ij",
    "row sums": "ij->i",
    "column sums": "ij->j",
    "projection": "ijk->ik",
    "dense letters": "ij,r->ir",
}
"""Einsums that torch programs run by windows, and that a GPU needs other plans for."""
WHOLE = ("ij,ir,jr->ij", "ij->ji", "ij,ir,jr->", "ij->")
"""Einsums of which all modes of the sparse operand are kept, or none."""
MODES = {
    "spmm": "ij,jr->ir",
    "sddmm": "ij,ir,jr->ij",
    "mttkrp": "ijk,jr,kr->ir",
    "ttm": "ijk,jr->irk",
    "sum": "ij,ir,jr->",
}
"""Einsums for plans written in full, which take formats of windows where requests do not."""


def checked(equation: str, plan: Any, backend: str, dtype: torch.dtype = torch.float32, **settings: Any) -> stc.Kernel:
    """Compared with the reference, twice on poisoned memory."""
    return check(problem(equation, dtype), plan=plan, backend=backend, **settings)


def whole(
    format: str,
    order: int,
    height: int,
    width: int,
    rows: tuple[int, ...] = (0,),
    tau: int = 0,
    cut: int = 0,
    **blocks: int,
) -> stc.plans.Plan:
    """A plan of one part, whose rows are fibers of some modes, and columns of the others."""
    return stc.plans.Plan(
        f"{format} alone", (stc.plans.Part(format, stored(order, height, width, rows, tau, 0, cut), _of(blocks)),)
    )


def _of(blocks: dict[str, int]) -> stc.plans.Schedule:
    return stc.plans.Schedule(1, tuple(blocks.items()), True, "ieee")


def stored(
    order: int, height: int, width: int, rows: tuple[int, ...] = (0,), tau: int = 0, strip: int = 0, cut: int = 0
) -> stc.plans.Storage:
    """A storage of windows, whose items are cut from so many positions on."""
    others = tuple(m for m in range(order) if m not in rows)
    similar = (("strip", strip or width), ("tau", tau)) if tau else ()
    return stc.plans.Storage(
        item=rows, lane=others, max_item_nnz=cut, params=(("height", height), *similar, ("width", width))
    )


def scrambled(blocks: int, side: int, seed: int = 0) -> stc.SparseTensor:
    """Dense blocks along a diagonal, whose rows were shuffled."""
    g = torch.Generator().manual_seed(seed)
    dense = torch.block_diag(*(torch.rand(side, side, generator=g, dtype=torch.float64) + 0.1 for _ in range(blocks)))
    return stc.SparseTensor.from_dense(dense[torch.randperm(len(dense), generator=g)])


def uneven() -> tuple[stc.SparseTensor, torch.Tensor]:
    """Eight full rows of 32, then 24 of one nonzero."""
    dense = torch.zeros(32, 40, dtype=torch.float64)
    dense[:8, :32] = random_values((8, 32), torch.float64, 1)
    dense[torch.arange(8, 32), torch.arange(8, 32)] = 1.0
    return stc.SparseTensor.from_dense(dense), random_values((40, 8), torch.float64, 2)
