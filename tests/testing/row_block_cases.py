"""Row blocks, the format of an example, in every einsum: what the tests of all runners share."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from cases import OPERATIONS, Problem

import sparsetc as stc

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from row_blocks import blocked

SIZES = {"i": 20, "j": 30, "k": 11, "l": 7, "m": 3, "r": 20, "s": 16, "t": 5}
LAYOUTS = {
    "windows": (16, 16, False, 0),
    "strips": (16, 16, True, 0),
    "odd-windows": (5, 12, False, 1),
    "odd-strips": (24, 3, True, 1),
}
"""Height, width, whether the columns are strips, and the grouped mode."""


def sparse_letters(equation: str) -> str:
    """The letters of the first operand."""
    return equation.replace("->", ",").split(",")[0]


EQUATIONS = sorted({*OPERATIONS.values(), "ij,i->ij", "ijk,ir->jkr", "ijk,ir,jr,kr->kji", "ijk->j"})
EQUATIONS = [e for e in EQUATIONS if len(set(sparse_letters(e))) == len(sparse_letters(e)) > 1]


def operands(equation: str, dtype: torch.dtype = torch.float32) -> tuple[stc.SparseTensor, list[torch.Tensor]]:
    """A sparse operand of some skewed nonzeros, and dense ones."""
    sizes = {c: SIZES.get(c, 4) for c in filter(str.isalpha, equation)}
    x, *dense = Problem(equation, sizes, "skewed", dtype).operands()
    assert isinstance(x, stc.SparseTensor)
    return x, dense


def plan(layout: str, order: int, axes: str = "") -> stc.plans.Plan:
    """Row blocks of one of `LAYOUTS`, for an einsum with these dense axes."""
    height, width, strips, item = LAYOUTS[layout]
    return blocked(height, width, strips, item, order, **dict.fromkeys(axes, 16))


def check(equation: str, layout: str, dtype: torch.dtype, backend: str) -> None:
    """Compare with torch; skips nothing and leaves nothing to heuristics."""
    x, dense = operands(equation, dtype)
    axes = "".join(c for c in "rst" if c in equation)
    found = stc.einsum(equation, x, *dense, plan=plan(layout, x.order, axes), backend=backend)
    found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
    expected = torch.einsum(equation, *(o.to(torch.float64) for o in (x.to_dense(), *dense)))
    limit = 1e-5 if dtype == torch.float32 else 1e-12
    assert (found.to(torch.float64) - expected).norm() <= limit * expected.norm() + 1e-30
