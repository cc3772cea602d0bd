"""Products of tiles whose dots multiply halves of float32: what the tests of all runners share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import SIZES, TILED, Problem

import sparsetc as stc
from sparsetc.ir.plan import F16X3
from sparsetc.planner.registry import PLANS

NUMBERS = SIZES | {"i": 21, "j": 34, "b": 3}
PRODUCTS = {
    "spmm": "ij,jr->ir",
    "spmm, permuted": "ij,jr->ri",
    "transposed": "ij,ik->jk",
    "batch in one table": "ij,jbr->bir",
    "mttkrp": "ijk,jr,kr->ir",
    "mttkrp of order 2": "ij,ir,jr->ir",
    "ttm": "ijk,kr->ijr",
    "ttm, permuted": "ijk,ir->rkj",
    "chain": "ijk,jr,ks->irs",
    "outer": "ij,jr,js->irs",
    "same letters": "ij,jr,jr,r->ir",
    "diagonal": "iij,jr->ir",
    "diagonal of the dense operand": "ij,jrr->ir",
    "scalar": "ij,,jr->ir",
    "one mode summed alone": "ijk,jr->ir",
}
"""Einsums that have a matrix product for the tensor cores."""
SPMM = PRODUCTS["spmm"]
REFUSED = ("mttkrp", "chain", "outer", "same letters")
"""Products whose dots take what other products left, which is not split."""
TAKEN = {name: equation for name, equation in PRODUCTS.items() if name not in REFUSED}


def problem(equation: str, dtype: torch.dtype = torch.float32, pattern: str = "skewed", **sizes: int) -> Problem:
    return Problem(equation, NUMBERS | sizes, pattern, dtype)


def tiles(name: str, threshold: int = 0, height: int = 16, width: int = 16) -> stc.plans.Plan:
    """A request for tiles by the plan of this name, of these sides where it takes them; the rest are runs."""
    sides = (("height", height), ("width", width)) if "height" in PLANS[name].options else ()
    return stc.plans.Plan(name, options=(*sides, ("threshold", threshold)))


BY_TILES = pytest.mark.parametrize("request_", [tiles(name) for name in TILED], ids=str)
EVERY_EINSUM = pytest.mark.parametrize(
    ("name", "request_"),
    [(n, tiles(p)) for n in TAKEN for p in TILED if (n, p) != ("one mode summed alone", "hls")],
    ids=str,
)
"""Those that are taken, by tiles of every sort; `hls` cuts all modes, and of one that is summed alone makes no dot."""


def in_halves(plan: stc.plans.Plan) -> stc.plans.Plan:
    """A plan whose first part, its tiles, is multiplied in halves."""
    first, *others = plan.parts
    return replace(plan, parts=(replace(first, schedule=replace(first.schedule, precision=F16X3)), *others))


def compiled(equation: str, operands: list[Any], request: stc.plans.Plan, **settings: Any) -> stc.Kernel:
    """A kernel that multiplies halves."""
    how = {"backend": "triton"} | settings
    plan = stc.compile(equation, *operands, plan=request, **how).plan
    kernel = stc.compile(equation, *operands, plan=in_halves(plan), **how)
    assert kernel.programs[0].schedule.precision == F16X3
    return kernel


def spmm(**sizes: int) -> tuple[stc.SparseTensor, torch.Tensor]:
    """A sparse matrix and a table."""
    x, b = problem(SPMM, torch.float32, "dense", **sizes).operands()
    return x, b


def error(kernel: stc.Kernel, x: stc.SparseTensor, b: torch.Tensor) -> float:
    """Of a sparse product on one plan, relative to the largest sum of magnitudes of a column."""
    wide, table = x.to_dense().double(), b.double()
    apart = (kernel(b).double() - wide @ table).abs()
    return float((apart / (wide.abs() @ table.abs()).amax(0).clamp(min=1e-300)).max())


SPREAD = {
    "wide": lambda t: t * torch.where(torch.arange(t.numel()).view(t.shape) % 7 == 0, 2.0**-37, 1.0),
    "too large": lambda t: t * 2.0**82,
    "too small": lambda t: t * 2.0**-84,
}
"""What makes halves too coarse for an operand."""
FIT = {
    "zeros among them": lambda t: t * (torch.arange(t.numel()).view(t.shape) % 3 > 0),
    "zeros": torch.zeros_like,
    "spread": lambda t: t * torch.where(torch.arange(t.numel()).view(t.shape) % 7 == 0, 2.0**-20, 1.0),
    "large": lambda t: t * 2.0**70,
    "small": lambda t: t * 2.0**-70,
}
"""What does not."""
