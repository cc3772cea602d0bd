"""Repeated calls of Triton's kernels, which are told where operands lie: results in any order, empty rows."""

from __future__ import annotations

import pytest
import torch

import sparsetc as stc

CASES = {
    "ij,jr->ir": ("coo", "rows", "fiber"),
    "ij,jr->ri": ("coo", "rows"),
    "ij,rj->ri": ("coo", "rows"),
    "ij,rj->ir": ("coo",),
}


@pytest.mark.parametrize(("equation", "plan"), [(e, plan) for e, plans in CASES.items() for plan in plans])
@pytest.mark.parametrize("blocks", [None, (16, 16)])
def test_a_call_like_one_before(equation: str, plan: str, blocks: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    dense = torch.randn(48, 64) * (torch.rand(3, 4) < 0.4).repeat_interleave(16, 0).repeat_interleave(16, 1)
    dense[5:9] = 0
    x, turned = stc.SparseTensor.from_dense(dense, blocksize=blocks), equation.startswith("ij,rj")
    shape = (16, 64) if turned else (64, 16)
    kernel = stc.compile(equation, x, torch.zeros(shape), plan=plan if blocks is None else "auto", output="dense")
    for _ in range(3):
        b = torch.randn(shape)
        torch.testing.assert_close(kernel(b), torch.einsum(equation, dense, b), rtol=1e-4, atol=1e-4)
        x._values.mul_(2)
        dense *= 2
    b = torch.randn(shape[::-1]).t()
    torch.testing.assert_close(kernel(b), torch.einsum(equation, dense, b), rtol=1e-4, atol=1e-3)
