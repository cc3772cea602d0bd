"""Dense axes slowest on the grid, natively on a GPU: by every format; and a rank of many blocks, planned."""

from __future__ import annotations

import pytest
import torch
from cases import Problem, check
from grid_order_cases import CASES, MTTKRP, SPMM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", CASES)
def test_every_format(name: str) -> None:
    case = CASES[name]
    tolerance = 4e-3 if case.problem.equation.count("s") else None  # a chain's dots, whatever their precision
    check(case.problem, "cuda", tolerance, **case.settings)


@pytest.mark.parametrize("plan", ["coo", "fiber", "rows", "auto"])
@pytest.mark.parametrize("equation", [SPMM, MTTKRP])
def test_a_long_rank(equation: str, plan: str) -> None:
    sizes = {"i": 300, "j": 400, "k": 50, "r": 4096}
    problem = Problem(equation, sizes, "random")
    kernel = check(problem, "cuda", 1e-4, plan=plan)
    assert kernel.backend == "triton"
