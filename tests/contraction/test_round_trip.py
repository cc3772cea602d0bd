"""A kernel's plan says what the kernel does, and makes the same kernel when it is given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Problem, random_sparse
from pair_cases import operands as pair_operands

import sparsetc as stc
from sparsetc.ir.program.tile import TileProgram

SIZES = {"i": 60, "j": 50, "k": 40, "l": 30, "m": 20, "r": 32, "s": 32}


def same(first: torch.Tensor | stc.SparseTensor, second: torch.Tensor | stc.SparseTensor) -> bool:
    """To the last bit; the torch programs add in one order."""
    if isinstance(first, stc.SparseTensor):
        assert isinstance(second, stc.SparseTensor)
        return torch.equal(first.coords, second.coords) and torch.equal(first.values, second.values)
    assert isinstance(second, torch.Tensor)
    return torch.equal(first, second)


# --- one sparse operand -----------------------------------------------------------------------------------------------

PLANS: dict[str, Any] = {n: n for n in ("auto", "coo", "fiber", "rows", "coo+rows", "fiber+rows", "hls", "dense")}
PLANS |= {"all tiles": stc.plans.plan_hls(1), "some tiles": stc.plans.plan_hls(8), "no tile": stc.plans.plan_hls(5000)}


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,jr,ks->irs", "ijk,k->ij", "ijk,ir,jr,kr->ijk"])
def test_the_plan_of_a_kernel_makes_it_again(equation: str, name: str, backend: str) -> None:
    x, *dense = Problem(equation, SIZES, "skewed", torch.float32).operands()
    try:
        kernel = stc.compile(equation, x, *dense, plan=PLANS[name], backend=backend, output="dense")
    except stc.PlanError:
        pytest.skip("the plan does not apply")
    fresh = stc.SparseTensor(x.coords, x.values, x.shape)
    for operand in (x, fresh):
        again = stc.compile(equation, operand, *dense, plan=kernel.plan, backend=backend, output="dense")
        assert again.step.programs == kernel.step.programs
        assert again.source == kernel.source
        assert again.plan.parts == kernel.plan.parts
        if backend == "torch":
            assert same(again(*dense), kernel(*dense))


def test_parts_of_nothing_are_left_out_and_not_missed() -> None:
    x, *dense = Problem("ij,jr->ir", SIZES, "dense", torch.float32).operands()
    kernel = stc.compile("ij,jr->ir", x, *dense, plan=stc.plans.plan_hls(1), backend="torch")
    assert [p.format for p in kernel.plan.parts] == ["dense_tile"]
    assert (kernel.plan.partition, kernel.plan.options) == ("threshold", (("threshold", 1),)), "as it was asked"
    assert kernel.plan.shares == (0,), "and none of the share that is empty"
    assert same(stc.einsum("ij,jr->ir", x, *dense, plan=kernel.plan, backend="torch"), kernel(*dense))


def three_parts(coords: torch.Tensor, shape: tuple[int, ...], *, empty: int) -> list[Any]:
    """The nonzeros in two parts, and none in the one that is to be empty."""
    n = coords.shape[1]
    found: list[Any] = [torch.arange(n // 3), torch.arange(n // 3, n)]
    found.insert(empty, torch.arange(0))
    return found


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_an_empty_share_is_named_by_the_others(empty: int) -> None:
    stc.plans.register_partition("three")(three_parts)
    x, *dense = Problem("ij,jr->ir", SIZES, "random", torch.float32).operands()
    coo = stc.compile("ij,jr->ir", x, *dense, plan="coo", backend="torch")
    parts = coo.plan.parts * 3
    plan = stc.plans.Plan("three", parts, False, "three", (("empty", empty),))
    kernel = stc.compile("ij,jr->ir", x, *dense, plan=plan, backend="torch")
    assert kernel.plan.shares == tuple(n for n in range(3) if n != empty)
    for operand in (x, stc.SparseTensor(x.coords, x.values, x.shape)):
        again = stc.compile("ij,jr->ir", operand, *dense, plan=kernel.plan, backend="torch")
        assert again.source == kernel.source
        assert same(again(*dense), kernel(*dense))
        torch.testing.assert_close(again(*dense), coo(*dense))
    moved = stc.plans.Plan("moved", parts[:2], False, "three", (("empty", (empty + 1) % 3),), kernel.plan.shares)
    for operand in (x, stc.SparseTensor(x.coords, x.values, x.shape)):
        with pytest.raises(stc.PlanError, match="plan 'moved' has no part for"):
            stc.compile("ij,jr->ir", operand, *dense, plan=moved, backend="torch")
    with pytest.raises(stc.PlanError, match="has 2 parts and names 1 shares"):
        stc.compile("ij,jr->ir", x, *dense, plan=stc.plans.Plan("odd", parts[:2], False, "three", shares=(0,)))


# --- several ----------------------------------------------------------------------------------------------------------

PAIRED: dict[str, Any] = {name: name for name in ("auto", "scalar", "dense", "bcb", "bcb+scalar")}
PAIRED |= {
    "sides": stc.plans.plan_bcb(i=4, j=4, k=8),
    "split": stc.plans.plan_bcb(threshold=4),
    "nonzeros and blocks": stc.plans.plan_bcb(formats=("coo", "bcb")),
    "bitmaps": stc.plans.plan_bcb(storage=("bitmap", "whole")),
}


def numbers(plan: stc.plans.Plan) -> tuple[Any, ...]:
    return plan.name, plan.parts, plan.steps


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("equation", ["ijk,klm->ijlm", "ijk,klm->lmij", "ijk,ikl->ijl", "ijk,ijk->"])
def test_the_plan_of_a_contraction_makes_it_again(equation: str, name: str, backend: str) -> None:
    given = pair_operands(equation, "skewed", torch.float32)
    kernel = stc.compile(equation, *given, plan=PAIRED[name], backend=backend)
    again = stc.compile(equation, *given, plan=kernel.plan, backend=backend)
    assert numbers(again.plan) == numbers(kernel.plan)
    assert again.source == kernel.source
    assert [type(s.numeric) for s in again.contraction.steps] == [type(s.numeric) for s in kernel.contraction.steps]
    if backend == "torch":
        assert same(again(), kernel())


def test_a_chain_has_a_plan_for_each_step() -> None:
    x, y, z = (random_sparse((20, 20), "random", torch.float32, n) for n in range(3))
    dense = torch.randn(20, 8)
    kernel = stc.compile("ij,jk,kl,lr->ir", x, y, z, dense)
    assert len(kernel.plan.steps) == 3
    again = stc.compile("ij,jk,kl,lr->ir", x, y, z, dense, plan=kernel.plan)
    assert numbers(again.plan) == numbers(kernel.plan)
    assert same(again(dense), kernel(dense))
    with pytest.raises(stc.PlanError, match="is of 4 operands, the equation has 2"):
        stc.compile("ij,jk->ik", x, y, plan=kernel.plan)


def test_a_plan_of_pairs_says_what_there_is() -> None:
    given = pair_operands("ijk,klm->ijlm", "skewed", torch.float32)
    for plan in ("scalar", "dense", "bcb"):
        shown = str(stc.compile("ijk,klm->ijlm", *given, plan=plan).plan)
        assert "lanes" not in shown
        assert "warps" not in shown
        assert ("blocks of" in shown) == (plan == "bcb")


def test_a_plan_without_parts_is_a_request() -> None:
    given = pair_operands("ijk,klm->ijlm", "skewed", torch.float32)
    named = stc.compile("ijk,klm->ijlm", *given, plan="bcb")
    assert stc.plans.plan_bcb() == stc.plans.Plan("bcb")
    assert stc.plans.plan_bcb().is_request
    assert not named.plan.is_request
    assert stc.compile("ijk,klm->ijlm", *given, plan=stc.plans.Plan("bcb")).plan == named.plan
    x, *dense = Problem("ij,jr->ir", SIZES, "random", torch.float32).operands()
    for name in ("auto", "coo", "hls"):
        wanted, found = (
            stc.compile("ij,jr->ir", x, *dense, plan=p, backend="torch") for p in (name, stc.plans.Plan(name))
        )
        assert wanted.plan == found.plan
        assert wanted.source == found.source
    assert repr(stc.plans.plan_bcb(threshold=4, i=8)) == "Plan('bcb+scalar', side_i=8, threshold=4)"


def test_parts_of_two_operands_say_how_blocks_are_stored() -> None:
    given = pair_operands("ijk,klm->ijlm", "skewed", torch.float32)
    plan = stc.plans.plan_bcb(storage=("bitmap", "whole"), i=4, j=4, k=8, l=2, m=4)
    first, second = stc.compile("ijk,klm->ijlm", *given, plan=plan).plan.parts
    assert (first.sides, second.sides) == ({"i": 4, "j": 4, "k": 8}, {"k": 8, "l": 2, "m": 4})
    assert (first.bitmap, second.bitmap) == (True, False)
    assert (first.operand, second.operand) == (0, 1)


def test_a_plan_of_one_operand_is_not_for_two() -> None:
    x, *dense = Problem("ij,jr->ir", SIZES, "random", torch.float32).operands()
    plan = stc.compile("ij,jr->ir", x, *dense, plan="coo", backend="torch").plan
    with pytest.raises(stc.PlanError, match="plan must be auto, scalar, dense"):
        stc.compile("ij,kj->ik", x, x, plan=plan)


def test_it_is_not_for_one_operand() -> None:
    given = pair_operands("ijk,klm->ijlm", "skewed", torch.float32)
    plan = stc.compile("ijk,klm->ijlm", *given).plan
    with pytest.raises(stc.PlanError, match='is for two or more sparse operands, and "ijk->i" has one'):
        stc.einsum("ijk->i", given[0], plan=plan)


# --- as a line --------------------------------------------------------------------------------------------------------


def test_a_repr_is_one_line() -> None:
    x, *dense = Problem("ijk,jr,ks->irs", SIZES, "random", torch.float32).operands()
    kernel = stc.compile("ijk,jr,ks->irs", x, *dense, plan=stc.plans.plan_hls(2), backend="triton")
    pair = stc.compile("ijk,klm->ijlm", *pair_operands("ijk,klm->ijlm", "skewed", torch.float32))
    program: TileProgram = kernel.step.programs[0]
    shown: list[object] = [kernel, kernel.plan, kernel.step.choice, program, kernel.explain()]
    shown += [pair, pair.plan, pair.contraction.steps[0].choice, pair.explain()]
    for thing in shown:
        assert "\n" not in repr(thing)
        assert len(repr(thing)) < 200
        assert type(thing).__name__ in repr(thing)
    for thing in (kernel.plan, program, kernel.explain(), pair.plan, pair.explain()):
        assert "\n" in str(thing)


def test_a_plan_of_no_nonzeros_makes_the_same_program() -> None:
    x = stc.SparseTensor(torch.zeros(3, 0, dtype=torch.long), torch.zeros(0), (6, 7, 5))
    equation, dense = "ijk,ir,kr->ijk", (torch.ones(6, 4), torch.ones(5, 4))
    kernel = stc.compile(equation, x, *dense, plan="hls")
    assert stc.compile(equation, x, *dense, plan=kernel.plan).source == kernel.source
