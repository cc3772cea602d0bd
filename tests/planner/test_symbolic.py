"""Costs as expressions: the numbers that plans are priced by, and the formulas that a reader expects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import random_sparse, random_values

import sparsetc as stc
from sparsetc.device.profile import of_backend
from sparsetc.ir.program.cost import cost_of
from sparsetc.planner import registry
from sparsetc.planner.pricing import seconds_of
from sparsetc.planner.report import statistics_of

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import formulas  # noqa: E402

EQUATIONS = ("ijk,jr,kr->ir", "ijk,kr->ijr", "ijk,ir,js->rs", "ijk,jr,kr->ijk", "ijk,r->r")
PLANS = ("auto", *registry.PLANS)


def kernel(equation: str, plan: str, seed: int, backend: str = "triton") -> Any:
    terms = equation.partition("->")[0].split(",")
    sizes = {"i": 40, "j": 30, "k": 20, "r": 12 + seed, "s": 8}
    x = random_sparse((40, 30, 20), ("random", "skewed", "dense")[seed % 3], torch.float32, seed)
    dense = [random_values(tuple(sizes[c] for c in term), torch.float32, seed) for term in terms[1:]]
    return stc.compile(equation, x, *dense, plan=plan, backend=backend)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_they_are_the_numbers_that_plans_are_priced_by(equation: str, plan: str, backend: str) -> None:
    seed = EQUATIONS.index(equation) + PLANS.index(plan)
    try:
        k = kernel(equation, plan, seed, backend)
    except stc.PlanError:
        pytest.skip("there is no such plan")
    step = k.step
    stored = statistics_of(step.choice, [p.packed for p in step.parts], step.filled, step.problem)
    costs, profile = [cost_of(program) for program in k.programs], of_backend(backend)
    found, work = k.cost.at(), [cost.work(own, profile) for cost, own in zip(costs, stored, strict=True)]
    assert found["seconds"] == pytest.approx(sum(seconds_of(k.plan, costs, stored, profile)), rel=1e-9)
    assert found["bytes"] == sum(moved for moved, _, _ in work)
    assert found["products"] == sum(flops for _, _, flops in work)


def test_a_reader_finds_the_formula() -> None:
    cost = kernel("ijk,jr,kr->ir", "coo", 0).cost
    assert str(cost["products"]) == "3*nonzeros*r"
    assert str(cost["gathered rows"]) == "2*nonzeros"
    assert cost["atomics"] == 0
    assert [*cost] == ["bytes", "gathered rows", "atomics", "products", "seconds"]
    assert "where i = 40" in str(kernel("ijk,jr,kr->ir", "coo", 0).explain(symbolic=True))


def test_sizes_may_be_others() -> None:
    cost = kernel("ijk,jr,kr->ir", "coo", 0).cost
    assert cost.at(nonzeros=10**9, r=128)["products"] == 3 * 10**9 * 128
    with pytest.raises(stc.PlanError, match=r"no symbol is called 'q'; symbols: .*nonzeros"):
        cost.at(q=1)
    for number in (0, -1, float("nan"), "x", None):
        with pytest.raises(stc.PlanError, match=f"r is a number above 0, found {number!r}"):
            cost.at(r=number)  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", ["coo", "rows", "hls", "window", "dense"])
def test_wide_operands_are_counted_in_symbols(plan: str) -> None:
    """Where an axis is split over the grid, numbers of programs are expressions too."""
    x = random_sparse((6, 5), "dense", torch.float32, 0)
    if plan not in PLANS:
        pytest.skip("there is no such plan")
    k = stc.compile("ij,jr->ir", x, torch.ones(5, 1024), plan=plan, backend="triton")
    assert k.cost.at()["products"] > 0
    assert k.cost["products"].free_symbols


def test_several_sparse_operands_have_none() -> None:
    x = random_sparse((8, 8), "random", torch.float32, 0)
    with pytest.raises(
        stc.PlanError, match="only an einsum that runs as a step of one sparse operand has symbolic costs"
    ):
        stc.explain("ij,jk->ik", x, x, symbolic=True)


def test_neither_an_import_nor_a_call_imports_sympy() -> None:
    code = """if True:
        import sys, torch
        before = "sympy" in sys.modules
        import sparsetc as stc
        x = stc.SparseTensor([[0], [1]], torch.ones(1), (2, 2))
        stc.einsum("ij,jr->ir", x, torch.ones(2, 2))
        print(before or "sympy" not in sys.modules)"""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert found.stdout == "True\n"


def test_the_page_is_what_the_program_says() -> None:
    assert (ROOT / "docs" / "how" / "formulas.md").read_text() == formulas.page() + "\n"
