"""The generated Triton source, run by Triton's interpreter: every operation and plan, types, ranks and patterns."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import OPERATIONS, PATTERNS, SIZES, Problem, assert_matches, check, plan_names, two_parts

import sparsetc as stc

TALL = {**SIZES, "i": 5, "j": 40, "k": 4}
"""A few rows of many nonzeros, and many rows of few."""


def run(problem: Problem, **settings: Any) -> stc.Kernel:
    """Check, and see that it was Triton's source that ran."""
    try:
        kernel = check(problem, **settings)
    except stc.PlanError as error:
        if settings.get("plan", "auto") == "auto":
            raise
        pytest.skip(f"the plan does not apply: {error}")
    assert kernel.step.executable.programs.backend.name == "triton"
    return kernel


@pytest.mark.parametrize("plan", ["auto", *plan_names()])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_by_plan(name: str, plan: str) -> None:
    run(Problem(OPERATIONS[name]), plan=plan, calls=2)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("long", ["coo", "fiber"])
@pytest.mark.parametrize("name", ["mttkrp-3-0", "mttkrp-3-1", "mttkrp-4-2", "ttmc-3-0", "spmm", "ttv-0", "semi-sparse"])
def test_two_parts(name: str, long: str, fused: bool) -> None:
    problem = Problem(OPERATIONS[name], TALL)
    operands = problem.operands()
    plan = two_parts(problem.equation, operands, long, fused)
    kernel = run(problem, plan=plan)
    assert len(kernel.plan.parts) == 2
    assert sum(p.nnz for p in kernel.plan.parts) == operands[0].nnz
    assert kernel.step.executable.programs.backend.name == "triton"
    assert len(kernel.step.executable.programs.kernels) == (1 if fused else 2)


@pytest.mark.parametrize("threshold", [1, 1000])
def test_a_part_that_gets_nothing(threshold: int) -> None:
    problem = Problem("ijk,jr,kr->ir", TALL)
    kernel = run(problem, plan=two_parts(problem.equation, problem.operands(), "coo", True, threshold))
    assert len(kernel.plan.parts) == 1


@pytest.mark.parametrize("rank", [1, 5, 24, 33, 100, 200, 201, 600])
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ij,jr->ir", "ij,ir,jr->ij", "ijk,kr->ijr"])
@pytest.mark.parametrize("plan", ["coo", "fiber", "rows"])
def test_ragged_rank(equation: str, rank: int, plan: str) -> None:
    run(Problem(equation, {**SIZES, "r": rank}, pattern="random"), plan=plan)


@pytest.mark.parametrize("ranks", [(1, 5), (16, 16), (33, 5), (70, 20), (17, 100)], ids=str)
@pytest.mark.parametrize("plan", ["coo", "fiber", "rows"])
def test_ragged_ranks_of_a_ttm_chain(ranks: tuple[int, int], plan: str) -> None:
    run(Problem("ijk,jr,ks->irs", {**SIZES, "r": ranks[0], "s": ranks[1]}), plan=plan)


@pytest.mark.parametrize("ranks", [(2, 3, 5), (16, 16, 2), (20, 4, 17)], ids=str)
def test_ragged_ranks_of_order_4(ranks: tuple[int, int, int]) -> None:
    run(Problem("ijkl,jr,ks,lt->irst", {**SIZES, **dict(zip("rst", ranks, strict=True))}, pattern="random"))


TYPED = ["mttkrp-3-0", "mttkrp-4-3", "ttmc-3-1", "spmm", "sampled", "ttv-0", "reduction", "semi-sparse", "scalar"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("name", TYPED)
def test_dtype(name: str, dtype: torch.dtype) -> None:
    for plan in ("coo", "fiber"):
        run(Problem(OPERATIONS[name], dtype=dtype), plan=plan)


@pytest.mark.parametrize("name", ["mttkrp-3-0", "spmm", "sampled", "ttv-0"])
def test_bfloat16_without_a_dot(name: str) -> None:
    run(Problem(OPERATIONS[name], dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["mttkrp-3-0", "ttmc-3-0", "sampled", "ttv-0", "reduction", "semi-sparse"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern(name: str, pattern: str) -> None:
    run(Problem(OPERATIONS[name], pattern=pattern))


@pytest.mark.parametrize("name", ["mttkrp-3-1", "sampled", "sampled-permuted", "ttv-0", "diagonal", "reduction"])
@pytest.mark.parametrize("plan", ["coo", "fiber", "rows"])
def test_uncoalesced(name: str, plan: str) -> None:
    run(Problem(OPERATIONS[name], coalesce=False), plan=plan)


@pytest.mark.parametrize("name", ["mttkrp-3-1", "ttmc-3-0", "spmm", "reduction", "ttv-0"])
@pytest.mark.parametrize("plan", ["coo", "fiber", "rows"])
def test_deterministic(name: str, plan: str) -> None:
    run(Problem(OPERATIONS[name], TALL), plan=plan, deterministic=True)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_precision_of_dots(precision: str) -> None:
    """The interpreter computes both alike."""
    kernel = run(Problem("ijk,jr,ks->irs", {**SIZES, "r": 16, "s": 16}), plan="coo", precision=precision)
    assert kernel.step.programs[0].dots


def test_dots_in_bfloat16_are_refused() -> None:
    """The interpreter gets them wrong; what has no dot runs, and the text can be looked at."""
    problem = Problem("ijk,jr,ks->irs", {**SIZES, "r": 16, "s": 16})
    operands = problem.operands()
    kernel = stc.compile(problem.equation, *operands, plan="coo", precision="medium", backend="triton")
    assert "tl.bfloat16" in kernel.source
    with pytest.raises(stc.PlanError, match=r"interpreter multiplies the bits.*take precision="):
        kernel(*operands[1:])
    run(Problem(OPERATIONS["spmm"]), plan="coo", precision="medium")


@pytest.mark.parametrize("order", [6, 8])
def test_words_of_64_bits(order: int) -> None:
    """Sizes that multiply to more than 2**63 need two words for the leaf modes."""
    sizes = dict.fromkeys("ijklmnop", 1 << 12)
    sizes = {**sizes, "i": 6, "r": 4}
    letters = "ijklmnop"[:order]
    problem = Problem(f"{letters},jr->ir", sizes, pattern="row")
    run(problem, plan="coo")
    run(problem, plan="fiber")


def test_a_kernel_whose_file_is_gone(tmp_path: Path) -> None:
    """Triton reads a kernel's source again when it is first called."""
    problem = Problem("ij,jr->ir")
    operands = problem.operands()
    kernel = stc.compile(problem.equation, *operands, plan="coo", cache_dir=tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    assert_matches(kernel(*operands[1:]), problem.equation, operands)


@pytest.mark.parametrize("plan", ["coo", "rows", "fiber", "hls", "window"])
@pytest.mark.parametrize("equation", ["ij,bjr->bir", "ijk,bjr,kr->bir", "ijk,kbjr->bir", "ijk,kjr,br->bir"])
def test_operands_and_results_lie_in_their_own_order(equation: str, plan: str) -> None:
    """No table is copied whose rows are only further apart, and a result is contiguous, unless sums have an order."""
    problem = Problem(equation, {"i": 9, "j": 7, "k": 5, "b": 3, "r": 16})
    (program,) = run(problem, plan=plan, output="dense").programs
    assert program.operands[0].strides
    assert program.strides
    kernel = run(problem, output="dense", deterministic=True)
    assert not kernel.programs[0].strides
    result = stc.einsum(equation, *problem.operands(), plan=plan, output="dense")
    assert result.is_contiguous()
    assert_matches(result, equation, problem.operands())
