"""Windows of fibers, a format outside the package: the generated Triton source, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from fiber_window_cases import EQUATIONS, check

SOME = (
    "ijk,jr,kr->ir",
    "ijk,ir,kr->jr",
    "ijk,ir,jr->kr",
    "ijk,jr,ks->irs",
    "ijk,jr,ks->isr",
    "ijk,jr->irk",
    "ijk,ir->jkr",
    "ijk,i->jk",
    "ijk,ir,jr,kr->ijk",
    "ijk,ir,jr,kr->kji",
    "ijk,jkr->ir",
    "ijk,j,k->i",
    "ijk->ik",
    "ijk->",
    "ijkl,jr,kr,lr->ir",
    "ijkl,jr,ks->ilrs",
)
"""Einsums of tensors; each takes seconds."""


@pytest.mark.parametrize("layout", ["columns", "odd-rows", "aligned"])
@pytest.mark.parametrize("equation", SOME)
def test_every_einsum(equation: str, layout: str) -> None:
    check(equation, layout, torch.float32, "triton")


@pytest.mark.parametrize("equation", [e for e in SOME if e in EQUATIONS][:4])
def test_bitmaps(equation: str) -> None:
    check(equation, "bitmaps", torch.float32, "triton")
