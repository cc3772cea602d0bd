"""Windows: the generated Triton source, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from cases import assert_matches, random_values
from halves_cases import PRODUCTS, compiled, error, problem, spmm
from window_cases import MODES, REQUESTS, checked, whole

import sparsetc as stc

SPMM = PRODUCTS["spmm"]


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_einsum(name: str) -> None:
    checked(PRODUCTS[name], stc.plans.plan_window(height=16, width=16, threshold=0), "triton")


@pytest.mark.parametrize("request_name", REQUESTS)
def test_every_request(request_name: str) -> None:
    checked(SPMM, REQUESTS[request_name], "triton")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.int64], ids=str)
def test_every_type(dtype: torch.dtype) -> None:
    checked(SPMM, stc.plans.plan_window(16, 16, 3), "triton", dtype)


def test_a_lower_precision() -> None:
    x, b = problem(SPMM).operands()
    assert_matches(stc.einsum(SPMM, x, b, plan="window", precision="high"), SPMM, [x, b], 2e-3)


@pytest.mark.parametrize("name", MODES)
def test_plans_in_full(name: str) -> None:
    equation = MODES[name]
    order = len(equation.split(",")[0])
    checked(equation, whole("window", order, 5, 12, tuple(range(1, order)), 50, 60, r=16), "triton")


@pytest.mark.parametrize("plan", [stc.plans.plan_window(16, 16, 60), stc.plans.plan_1sa(50, 16, 16, 16, 60)], ids=str)
def test_long_windows_are_cut_beside_short_rows(plan: stc.plans.Plan) -> None:
    dense = random_values((36, 150), torch.float32, 1)
    dense[16:] *= torch.arange(150) % 50 == 0
    x, b = stc.SparseTensor.from_dense(dense), random_values((150, 20), torch.float32, 2)
    for ordered in (False, True):
        kernel = stc.compile(SPMM, x, b, plan=plan, deterministic=ordered)
        windows, rest = kernel.plan.parts
        assert (windows.nnz, rest.nnz) == (16 * 150, 20 * 3)
        assert ("atomic_add" in kernel.source) != ordered
        assert_matches(kernel(b), SPMM, [x, b])


def test_a_rank_of_several_blocks_and_a_table_that_lies_otherwise() -> None:
    x, _ = problem(SPMM).operands()
    b = random_values((150, 34), torch.float32, 1).T
    assert_matches(stc.einsum(SPMM, x, b, plan=stc.plans.plan_window(16, 16, 0)), SPMM, [x, b])


def test_gradients() -> None:
    x, b = problem(SPMM, torch.float64).operands()
    values, table = x.values.clone().requires_grad_(), b.clone().requires_grad_()
    expected = torch.autograd.grad((x.with_values(values).to_dense() @ table).square().sum(), (values, table))
    found = stc.einsum(SPMM, x.with_values(values), table, plan="window")
    assert isinstance(found, torch.Tensor)
    for one, other in zip(torch.autograd.grad(found.square().sum(), (values, table)), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("plan", [stc.plans.plan_window(5, 12, 0), stc.plans.plan_1sa(50, 4, 16, 32, 0)], ids=str)
def test_halves_as_exact_as_float32(plan: stc.plans.Plan) -> None:
    x, b = spmm(i=40, j=150, r=20)
    kernel = compiled(SPMM, [x, b], plan)
    assert error(kernel, x, b) < 1e-6
    assert "instead" not in vars(kernel.step)
