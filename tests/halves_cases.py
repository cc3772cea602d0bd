"""Einsums by windows whose dots multiply halves of float32: what the tests of all runners share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from window_cases import PRODUCTS, problem

import sparsetc as stc
from sparsetc.ir.plan import F16X3

SPMM = PRODUCTS["spmm"]
REFUSED = ("mttkrp", "chain", "outer", "same letters")
"""Products whose dots take what other products left, which is not split."""
TAKEN = {name: equation for name, equation in PRODUCTS.items() if name not in REFUSED}
ALL = stc.plan_window(height=16, width=16, threshold=0)
BESIDE_RUNS = stc.plan_window(height=16, width=16, threshold=40)


def in_halves(plan: stc.Plan) -> stc.Plan:
    """A plan whose windows are multiplied in halves."""
    parts = (
        replace(p, schedule=replace(p.schedule, precision=F16X3)) if p.format == "window" else p for p in plan.parts
    )
    return replace(plan, parts=tuple(parts))


def compiled(equation: str, operands: list[Any], request: stc.Plan = ALL, **settings: Any) -> stc.Kernel:
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
