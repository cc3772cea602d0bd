"""Mixed-mode fibers, by the generated Triton source and its interpreter."""

from __future__ import annotations

import pytest
import torch
from cases import OPERATIONS, PATTERNS, SIZES, TOLERANCE, Problem, check, mttkrp, random_values
from mixed_mode_cases import crossed

import sparsetc as stc
from sparsetc.codegen.launch import TritonPrograms
from sparsetc.formats import Packed

PLAN = "mm-csf"


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "vector"])
def test_operation(name: str) -> None:
    kernel = check(Problem(OPERATIONS[name], pattern="random"), plan=PLAN)
    programs = kernel.step.executable.programs
    assert isinstance(programs, TritonPrograms)
    assert len(programs.kernels) == 1


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("equation", ["ijk,ir,kr->jr", "ijk,i->jk", "ijk,ir,jr,kr->ijk"])
def test_pattern(equation: str, pattern: str) -> None:
    check(Problem(equation, pattern=pattern), plan=PLAN)


@pytest.mark.parametrize("dtype", [d for d in TOLERANCE if not d.is_complex], ids=str)
@pytest.mark.parametrize("equation", ["ijk,ir,kr->jr", "ijk,jr,ks->irs", "ijk,i->jk"])
def test_dtype(equation: str, dtype: torch.dtype) -> None:
    check(Problem(equation, {"i": 3, "j": 4, "k": 3, "r": 2, "s": 3}, "random", dtype), plan=PLAN)


@pytest.mark.parametrize("ranks", [(1, 5), (16, 16), (33, 17)], ids=str)
def test_ragged_ranks_of_a_ttm_chain(ranks: tuple[int, int]) -> None:
    check(Problem("ijk,jr,ks->irs", {**SIZES, "r": ranks[0], "s": ranks[1]}, "random"), plan=PLAN)


def test_fibers_longer_than_a_lane_takes() -> None:
    check(Problem("ijk,ir,kr->jr", {**SIZES, "i": 80}, "dense"), plan=PLAN)


def test_gradients_read_the_same_parts() -> None:
    x = crossed(3, torch.float64)
    factors = [random_values((n, 4), torch.float64, n) for n in x.shape]

    def gradients(plan: str) -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (x.values, *factors[1:])]
        result = stc.einsum(mttkrp(3, 0), x.with_values(leaves[0]), *leaves[1:], plan=plan)
        return torch.autograd.grad(result, leaves, factors[0])

    found = gradients(PLAN)
    assert sum(isinstance(kept, Packed) for kept in x.pattern.cache.values()) == 3
    for own, other in zip(found, gradients("coo"), strict=True):
        torch.testing.assert_close(own, other)
