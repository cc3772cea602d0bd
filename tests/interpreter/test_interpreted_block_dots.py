"""Given blocks by dots of operands as they are loaded: generated Triton source, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from block_dot_cases import CASES, SPMM, BlockDot, check, expected, in_halves

import sparsetc as stc

TYPES = [(torch.float16, "highest"), (torch.float32, "high"), (torch.float32, "highest")]


@pytest.mark.parametrize(("dtype", "precision"), TYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case: BlockDot, dtype: torch.dtype, precision: str) -> None:
    x, dense = case.operands(dtype)
    check(
        stc.einsum(case.equation, x, *dense, plan="coo", precision=precision), expected(case.equation, x, dense), dtype
    )


WAYS = [(torch.float16, "coo", False), (torch.float32, "coo", False), (torch.float16, "auto", True)]


@pytest.mark.parametrize(("dtype", "plan", "deterministic"), WAYS)
@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[10], *CASES[-4:-1]], ids=str)
def test_gradients(case: BlockDot, dtype: torch.dtype, plan: str, deterministic: bool) -> None:
    x, dense = case.operands(dtype, share=0.3)  # each element of a block is a program's turn
    leaves = [leaf.clone().requires_grad_() for leaf in (x.values, *dense)]
    options = {"plan": plan, "deterministic": deterministic, "output": "dense"}
    result = stc.einsum(case.equation, x.with_values(leaves[0]), *leaves[1:], **options)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    whole = torch.einsum(case.equation, x.with_values(exact[0]).to_dense(), *exact[1:])
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1))
    result.backward(weights.to(dtype))
    whole.backward(weights.to(dtype).double())
    for leaf, other in zip(leaves, exact, strict=True):
        check(leaf.grad, other.grad, dtype, 3)


def test_bfloat16_is_refused_where_triton_interprets() -> None:
    x, dense = BlockDot(SPMM, (4, 4), (16, 16)).operands(torch.bfloat16)
    with pytest.raises(stc.PlanError, match="interpreter multiplies the bits of matrices in bfloat16"):
        stc.einsum(SPMM, x, *dense, plan="coo")


def test_what_a_step_gathers_in_halves_has_a_scale_of_its_own() -> None:
    """Rows 2**-34 times as large as others are as exact: one scale for all leaves 2**-17 of them."""
    g = torch.Generator().manual_seed(0)
    x = stc.SparseTensor.from_blocks(torch.arange(4).expand(2, -1), 1 + torch.rand(4, 16, 16, generator=g), (64, 64))
    b = 1 + torch.rand(64, 40, generator=g)
    b[:16] *= 2.0**-34
    kernel = stc.compile(SPMM, x, b, plan=in_halves(stc.compile(SPMM, x, b, plan="coo").plan))
    found, want = kernel(b), expected(SPMM, x, [b])
    for rows in (slice(16), slice(16, None)):
        check(found[rows], want[rows], torch.float32)


def test_long_blocks_are_summed_in_parts() -> None:
    x, (b,) = BlockDot(SPMM, (2, 2), (16, 128)).operands(torch.float32)
    b = b.repeat(1, 26)[:, :1030].contiguous()
    want = expected(SPMM, x, [b])
    kernel = stc.compile(SPMM, x, b, plan="coo")
    assert kernel.step.programs[0].axis("j").size == 32
    check(kernel(b), want, torch.float32)
    halves = stc.compile(SPMM, x, b, plan=in_halves(kernel.plan))
    check(halves(b), want, torch.float32)
    values = x.values.clone().requires_grad_()
    stc.einsum(SPMM, x.with_values(values), b, plan="coo").sum().backward()
    check(
        values.grad,
        x.with_values(b.double().sum(1).view(2, 128)[x.coords[1]][:, None].expand(-1, 16, -1)).values,
        torch.float32,
    )


@pytest.mark.parametrize("largest", [1.0, 1e30])
@pytest.mark.parametrize("side", [16, 32, 48])
def test_halves(side: int, largest: float) -> None:
    """They are as exact as float32; what they cannot hold is multiplied by dots of float32."""
    x, dense = BlockDot(SPMM, (3, 4), (side, side)).operands(torch.float32)
    kernel = stc.compile(SPMM, x, *dense, plan=in_halves(stc.compile(SPMM, x, *dense, plan="coo").plan))
    dense[0][0, 0], dense[0][1, 1] = largest, 1 / largest
    for _ in range(2):
        check(kernel(*dense), expected(SPMM, x, dense), torch.float32)
