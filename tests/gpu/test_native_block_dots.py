"""Given blocks by dots of operands as they are loaded, natively on a GPU: all types, precisions and sides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_dot_cases import CASES, SPMM, BlockDot, check, expected, in_halves

import sparsetc as stc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TYPES = [(torch.float16, "highest", 1), (torch.bfloat16, "highest", 1), (torch.float32, "highest", 2)]
ROUNDED = [(torch.float32, "high", 1e3), (torch.float32, "medium", 8e3)]


@pytest.mark.parametrize(("dtype", "precision", "times"), [*TYPES, *ROUNDED])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case: BlockDot, dtype: torch.dtype, precision: str, times: float) -> None:
    x, dense = case.operands(dtype, "cuda")
    want = expected(case.equation, x, dense)
    for plan in ("coo", "auto"):
        check(stc.einsum(case.equation, x, *dense, plan=plan, precision=precision), want, dtype, times)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", [CASES[2], CASES[10]], ids=str)
def test_gradients(case: BlockDot, dtype: torch.dtype) -> None:
    x, dense = case.operands(dtype, "cuda")
    leaves = [leaf.clone().requires_grad_() for leaf in (x.values, *dense)]
    result = stc.einsum(case.equation, x.with_values(leaves[0]), *leaves[1:])
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    whole = torch.einsum(case.equation, x.with_values(exact[0]).to_dense(), *exact[1:])
    weights = torch.randn(whole.shape, device="cuda", dtype=dtype)
    result.backward(weights)
    whole.backward(weights.double())
    for leaf, other in zip(leaves, exact, strict=True):
        check(leaf.grad, other.grad, dtype, 3)


@pytest.mark.parametrize("stages", [1, 3, 5, 7])
@pytest.mark.parametrize("slowest_axes", [(), ("r",)])
def test_stages_and_the_order_of_programs_change_no_result(slowest_axes: tuple[str, ...], stages: int) -> None:
    x, dense = BlockDot("ij,jr->ir", (37, 9), (32, 32)).operands(torch.float16, "cuda")
    dense = [torch.randn(dense[0].shape[0], 200, device="cuda").half()]
    plan = stc.compile(SPMM, x, *dense, plan="coo").plan
    (part,) = plan.parts
    blocks = tuple((c, 32 if c == "r" else n) for c, n in part.schedule.blocks)
    schedule = replace(part.schedule.by_rule(), stages=stages, slowest_axes=slowest_axes, blocks=blocks)
    plan = replace(plan, parts=(replace(part, schedule=schedule),))
    check(stc.einsum(SPMM, x, *dense, plan=plan), expected(SPMM, x, dense), torch.float16)


@pytest.mark.parametrize("side", [16, 32, 64, 128])
def test_blocks_in_halves_are_as_exact_as_float32(side: int) -> None:
    x, dense = BlockDot(SPMM, (9, 5), (side, side)).operands(torch.float32, "cuda")
    plan = in_halves(stc.compile(SPMM, x, *dense, plan="coo").plan)
    kernel = stc.compile(SPMM, x, *dense, plan=plan)
    check(kernel(*dense), expected(SPMM, x, dense), torch.float32)
    dense[0][0, 0], dense[0][1, 1] = 1e30, 1e-30  # more than halves can hold: by dots of float32
    check(kernel(*dense), expected(SPMM, x, dense), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0.1, 0.9])
@pytest.mark.parametrize("side", [32, 64])
def test_long_sums_of_gradients_are_rounded_once(side: int, share: float, dtype: torch.dtype) -> None:
    """Few blocks are multiplied one by one; of many, one product of torch is read. Terms are of one sign."""
    x, _ = BlockDot(SPMM, (8, 8), (side, side)).operands(dtype, "cuda", share)
    b, upstream = (torch.rand(8 * side, 5000, device="cuda").to(dtype) for _ in range(2))
    values = x.values.clone().requires_grad_()
    stc.einsum(SPMM, x.with_values(values), b).backward(upstream)
    exact = x.values.double().requires_grad_()
    (x.with_values(exact).to_dense() @ b.double()).backward(upstream.double())
    error = (values.grad.double() - exact.grad).abs() / exact.grad
    assert error.max() < (1.1 if dtype.itemsize == 2 else 30) * torch.finfo(dtype).eps
