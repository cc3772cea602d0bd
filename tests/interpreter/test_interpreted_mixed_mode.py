"""Mixed-mode fibers, by the generated Triton source and its interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import (
    OPERATIONS,
    PATTERNS,
    SIZES,
    TOLERANCE,
    Problem,
    assert_matches,
    check,
    densified,
    mttkrp,
    random_sparse,
    random_values,
)
from mixed_mode_cases import crossed

import sparsetc as stc
from sparsetc.ir.nest.axes import LANE, LEAF
from sparsetc.packing.base import Packed

PLAN = "mm-csf"


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "vector"])
def test_operation(name: str) -> None:
    kernel = check(Problem(OPERATIONS[name], pattern="random"), plan=PLAN)
    programs = kernel.step.executable.programs
    assert programs.backend.name == "triton"
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


# --- sums in one order ------------------------------------------------------------------------------------------------


def check_in_order(kernel: stc.Kernel, equation: str, operands: list[Any]) -> None:
    """Every result has a partial row of its own, which nothing else writes; the same bits come at every run."""
    assert kernel.plan.name == PLAN
    assert "atomic" not in kernel.source
    second, dense = kernel.step.arrays.second, operands[1:]
    assert second is not None
    slots = torch.cat([part.arrays.index[-1] for part in kernel.step.parts])
    assert torch.equal(slots, torch.arange(second.partials))
    found = kernel(*dense)
    assert_matches(found, equation, operands)
    assert torch.equal(densified(kernel(*dense)), densified(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", range(4))
def test_sums_in_one_order_in_all_roles(mode: int, dtype: torch.dtype) -> None:
    x = crossed(4, dtype, 9)
    operands = [x, *(random_values((9, 5), dtype, n) for n in range(3))]
    kernel = stc.compile(mttkrp(4, mode), *operands, plan=PLAN, deterministic=True)
    assert len(kernel.step.parts) == 4
    assert {part.program.view.level_of(mode) for part in kernel.step.parts} >= {LANE, LEAF}
    check_in_order(kernel, mttkrp(4, mode), operands)


def test_sums_in_one_order_where_slices_are_apart() -> None:
    x = random_sparse((2, 64, 70), "dense", torch.float32)
    operands = [x, *(random_values((n, 3), x.dtype, n) for n in x.shape[1:])]
    kernel = stc.compile(mttkrp(3, 0), *operands, plan=PLAN, deterministic=True)
    assert kernel.plan.parts[0].storage.item == (0,), "the root"
    check_in_order(kernel, mttkrp(3, 0), operands)


@pytest.mark.parametrize("equation", ["ijk,jr,ks->irs", "ijk,i->jk", "ijk,ir,jr,kr->ijk", "ijk->", "ijk,kr->ijr"])
@pytest.mark.parametrize("pattern", ["skewed", "empty"])
def test_other_sums_in_one_order(equation: str, pattern: str) -> None:
    check(Problem(equation, pattern=pattern), plan=PLAN, deterministic=True)


def test_sums_of_a_workload_in_one_order() -> None:
    x = crossed(3, torch.float32)
    factors = [random_values((n, 4), x.dtype, n) for n in x.shape]
    equations = [mttkrp(3, mode) for mode in range(3)]
    others = [factors[:mode] + factors[mode + 1 :] for mode in range(3)]
    with stc.options(plan=PLAN, deterministic=True):
        kernels, found = stc.compile_many(equations, x, others), stc.mttkrp(x, factors)
    assert isinstance(found, tuple)
    for kernel, one, equation, own in zip(kernels, found, equations, others, strict=True):
        check_in_order(kernel, equation, [x, *own])
        assert torch.equal(kernel(*own), one)
    assert sum(isinstance(kept, Packed) for kept in x.pattern.cache.values()) == 3


def test_gradients_in_one_order() -> None:
    x = crossed(3, torch.float64)
    factors = [random_values((n, 4), torch.float64, n) for n in x.shape]

    def gradients(**how: Any) -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (x.values, *factors[1:])]
        result = stc.einsum(mttkrp(3, 0), x.with_values(leaves[0]), *leaves[1:], **how)
        return torch.autograd.grad(result, leaves, factors[0])

    found, again = (gradients(plan=PLAN, deterministic=True) for _ in range(2))
    for own, same, other in zip(found, again, gradients(plan="coo"), strict=True):
        assert torch.equal(own, same)
        torch.testing.assert_close(own, other)
