"""Windows, natively on a GPU."""

from __future__ import annotations

import pytest
import torch
from cases import Problem, assert_matches, check
from halves_cases import PRODUCTS, compiled, error, problem
from test_native_halves import spmm
from window_cases import REQUESTS, uneven

import sparsetc as stc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SPMM = PRODUCTS["spmm"]
ERRORS = {"highest": None, "high": 3e-3, "medium": 2e-2}
CHAINS = ("chain", "outer")
"""Of these the dots take what other dots left."""


@pytest.mark.parametrize("request_name", ["window", "all of window", "odd window", "some of 1-sa"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_einsum(name: str, request_name: str) -> None:
    check(problem(PRODUCTS[name]), "cuda", 4e-3 if name in CHAINS else None, plan=REQUESTS[request_name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("request_name", ["all of window", "some of 1-sa"])
def test_every_type(request_name: str, dtype: torch.dtype) -> None:
    check(problem(SPMM, dtype), "cuda", plan=REQUESTS[request_name])


@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize(
    "plan", ["window", "1-sa", stc.plans.plan_window(64, 64, 0), stc.plans.plan_1sa(20, threshold=8)], ids=str
)
@pytest.mark.parametrize("rank", [1, 20, 64, 300])
def test_a_larger_product(rank: int, plan: str | stc.plans.Plan, precision: str) -> None:
    given = Problem(SPMM, {"i": 700, "j": 900, "r": rank}, "dense" if rank == 20 else "skewed")
    check(given, "cuda", ERRORS[precision], plan=plan, precision=precision)


@pytest.mark.parametrize("deterministic", [False, True])
def test_windows_beside_runs(deterministic: bool) -> None:
    x, b = uneven()
    x, b = x.to("cuda"), b.cuda()
    kernel = stc.compile(SPMM, x, b, plan=stc.plans.plan_window(8, 16, 100), deterministic=deterministic)
    assert len(kernel.plan.parts) == 2
    assert_matches(kernel(b), SPMM, [x, b])
    if deterministic:
        torch.testing.assert_close(kernel(b), kernel(b), rtol=0, atol=0)


@pytest.mark.parametrize("sides", [(16, 32), (64, 64), (128, 64)])
@pytest.mark.parametrize("rank", [1, 20, 64, 300])
def test_halves_as_exact_as_float32(rank: int, sides: tuple[int, int]) -> None:
    x, b = spmm(rank)
    kernel = compiled(SPMM, [x, b], stc.plans.plan_window(*sides, 0))
    assert error(kernel, x, b) < 1e-6
    assert "instead" not in vars(kernel.step)
