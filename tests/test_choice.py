"""What a plan is chosen by: the program that runs, at its price, and never a dearer one for asking less precision."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from cases import Problem

import sparsetc as stc
from sparsetc.ir.program.tile import Add, TileProgram, walk

SIZES = {"i": 60, "j": 50, "k": 40, "r": 32, "s": 32}
EQUATIONS = ("ijk,jr,kr->ir", "ijk,jr,ks->irs", "ijk,kr->ijr", "ijk,k->ij", "ijk,ir,jr,kr->ijk", "ijk,i,j,k->")
PLANS = ("coo", "fiber", "rows", "coo+rows", "hls")


@lru_cache
def filled(equation: str, pattern: str = "dense") -> list[Any]:
    return Problem(equation, SIZES, pattern, torch.float32).operands()


@lru_cache
def matrix(rows: int, columns: int, share: float) -> stc.SparseTensor:
    """The same tensor at every call: its pattern keeps what planning counts."""
    g = torch.Generator().manual_seed(0)
    return stc.SparseTensor.from_dense((torch.rand(rows, columns, generator=g) < share).float())


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 8, 32, 128, 512, 4096])
@pytest.mark.parametrize("share", [0.5, 0.1, 0.02])
def test_less_precision_is_never_expected_to_take_longer(share: float, columns: int) -> None:
    x, b = matrix(800, 800, share), torch.zeros(()).expand(800, columns)
    chosen = {p: stc.compile("ij,jr->ir", x, b, precision=p, backend="triton").step.choice for p in PRECISIONS}
    seconds = [sum(chosen[p].seconds) for p in PRECISIONS]
    assert seconds == sorted(seconds, reverse=True)
    for exact, coarse in (("highest", "high"), ("high", "medium")):
        allowed = {name for name, _ in chosen[coarse].considered}
        assert {name for name, _ in chosen[exact].considered if "tf32x3" in name or "coo[" in name[:8]} <= allowed


PRECISIONS = ("highest", "high", "medium")


@pytest.mark.parametrize("equation", EQUATIONS)
def test_nor_for_tensors(equation: str) -> None:
    given = filled(equation)
    seconds = [
        sum(stc.compile(equation, *given, precision=p, backend="triton").step.choice.seconds) for p in PRECISIONS
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_tiles_of_a_half_filled_matrix_are_multiplied_whole() -> None:
    """On an H200, at 512 columns: 127, 79 and 85 us by tiles, 399 by runs, by torch 28, 16."""
    x, b = matrix(2048, 2048, 0.5), torch.zeros(()).expand(2048, 512)
    for precision, measured in (("highest", 127e-6), ("high", 79e-6), ("medium", 85e-6)):
        choice = stc.compile("ij,jr->ir", x, b, precision=precision, backend="triton", plan="hls").step.choice
        assert 0.7 * measured < sum(choice.seconds) < 1.4 * measured
        best = stc.compile("ij,jr->ir", x, b, precision=precision, backend="triton")
        assert precision == "highest" or best.plan.name == "dense"
    runs = stc.compile("ij,jr->ir", x, b, plan="coo", backend="triton").step.choice
    assert 0.7 * 399e-6 < sum(runs.seconds) < 1.4 * 399e-6


def test_few_nonzeros_a_tile_are_not() -> None:
    """At 512 columns and a share of 2 %: 126 us by tiles, 21 by runs; by torch 100, 28 and 16 by precision."""
    x, b = matrix(2048, 2048, 0.02), torch.zeros(()).expand(2048, 512)
    for precision in PRECISIONS:
        best = stc.compile("ij,jr->ir", x, b, precision=precision, backend="triton").plan.name
        assert best == ("dense" if precision == "medium" else "coo")


# --- the program that runs --------------------------------------------------------------------------------------------


def owned(kernel: stc.Kernel) -> list[bool]:
    return stored(kernel.step.programs)


def stored(programs: Iterable[TileProgram]) -> list[bool]:
    return [s.owned for p in programs for s, _ in walk(p.body) if isinstance(s, Add)]


def priced(kernel: stc.Kernel) -> list[bool]:
    """As it was priced: of the parts that run."""
    from sparsetc.planner import pricing
    from sparsetc.planner.candidate import Candidate

    candidate = Candidate(kernel.step.choice.plan, kernel.step.choice.expected)
    found = pricing.costs(candidate, kernel.step.problem)
    return stored(found[n].p for n in kernel.step.filled)


@pytest.mark.parametrize("pattern", ["dense", "random", "skewed"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_what_stores_its_rows_is_priced_so(equation: str, plan: str, pattern: str) -> None:
    given = filled(equation, pattern)
    try:
        kernel = stc.compile(equation, *given, plan=plan, backend="triton", output="dense")
    except stc.PlanError:
        pytest.skip("the plan does not apply")
    assert priced(kernel) == owned(kernel)


def test_rows_that_several_items_add_to_are_priced_as_additions() -> None:
    x, b = matrix(40, 2000, 0.5), torch.zeros(()).expand(2000, 32)
    kernel = stc.compile("ij,jr->ir", x, b, plan="coo", backend="triton")
    for found in (kernel.step.parts[0].packed, kernel.step.choice.expected[0]):
        assert (found.split_rows, found.split_fibers) == (True, False)
    assert owned(kernel) == priced(kernel) == [False]


def test_a_plan_of_which_one_part_is_left_stores_its_rows() -> None:
    x, b = matrix(300, 300, 0.05), torch.zeros(()).expand(300, 32)
    kernel = stc.compile("ij,jr->ir", x, b, plan=stc.plan_hls(5000), backend="triton")
    assert [p.format for p in kernel.plan.parts] == ["coo"]
    assert owned(kernel) == priced(kernel) == [True]


def test_the_output_is_priced_by_its_rows() -> None:
    few, many = (
        stc.compile("ij,jr->ir", stc.SparseTensor([[0], [0]], [1.0], (rows, 4)), torch.zeros(4, 64), backend="triton")
        for rows in (10, 10**6)
    )
    assert few.step.problem.rows == 10
    written = 4 * 64 * 10**6 / 4.4e12
    assert sum(many.step.choice.seconds) - sum(few.step.choice.seconds) == pytest.approx(written, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,jr,ks->irs", "ijk,i->jk", "ij,ir,jr->ij"])
def test_the_program_that_is_priced_is_the_one_that_runs(equation: str, backend: str, dtype: torch.dtype) -> None:
    from sparsetc.planner.candidate import Candidate
    from sparsetc.planner.pricing import costs

    given = Problem(equation, SIZES, "skewed", dtype).operands()
    for plan, output in itertools.product(("auto", *PLANS), ("sparse", "dense")):
        try:
            kernel = stc.compile(equation, *given, plan=plan, backend=backend, output=output)
        except stc.PlanError:
            continue
        priced = costs(Candidate(kernel.step.choice.plan, kernel.step.choice.expected), kernel.step.problem)
        programs = zip((priced[n].p for n in kernel.step.filled), kernel.programs, strict=True)
        assert all(replace(own, number=p.number, format=p.format) == p for own, p in programs)


def test_integers_are_priced_without_dots() -> None:
    """A plan that is given, or chosen, for a type with no matrix product has none before it is priced."""
    x, b = matrix(60, 50, 0.2), torch.ones(50, 32)
    given = stc.compile("ij,jr->ir", x, b, plan="coo", backend="torch").plan
    assert given.parts[0].schedule.dot
    x, b = x.with_values(torch.ones(x.nnz)).to(torch.int64), b.to(torch.int64)
    for plan in ("auto", given):
        kernel = stc.compile("ij,jr->ir", x, b, plan=plan, backend="torch")
        assert not kernel.step.choice.plan.parts[0].schedule.dot
        assert kernel.plan.parts[0].schedule == kernel.step.choice.plan.parts[0].schedule


# --- what explain says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("plan", ["auto", *PLANS, "plan_hls(200)"])
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,jr,ks->irs"])
def test_one_time_is_expected_of_a_plan(equation: str, plan: str, backend: str) -> None:
    wanted = stc.plan_hls(200) if plan.startswith("plan_hls") else plan
    given = filled(equation, "skewed")
    try:
        explained = stc.explain(equation, *given, plan=wanted, backend=backend)
    except stc.PlanError:
        pytest.skip("the plan does not apply")
    assert sum(p.predicted_us for p in explained.parts) == pytest.approx(explained.considered[0][1])
    assert explained.predicted_us == pytest.approx(explained.considered[0][1])


def test_parts_of_one_launch_are_charged_one() -> None:
    dense = torch.ones(200, 300)
    dense[20:, 5:] = 0  # 20 long rows, and 180 short ones
    x, b = stc.SparseTensor.from_dense(dense), torch.zeros(()).expand(300, 32)
    kernel = stc.compile("ij,jr->ir", x, b, plan="coo+rows", backend="triton")
    assert x.nnz < kernel.step.problem.rules["fuse_below"]
    assert kernel.explain().launches == 1
    apart = stc.Plan(kernel.plan.name, kernel.plan.parts, False, kernel.plan.partition, kernel.plan.options)
    two = stc.explain("ij,jr->ir", x, b, plan=apart, backend="triton")
    one = stc.explain("ij,jr->ir", x, b, plan=kernel.plan, backend="triton")
    assert (one.launches, two.launches) == (1, 2)
    launch_and_waits = 4 + 3 * 1
    assert two.predicted_us - one.predicted_us == pytest.approx(launch_and_waits, rel=0.01)


def test_modes_are_letters_everywhere() -> None:
    given = filled("ijk,jr,kr->ir")
    texts = [str(stc.explain("ijk,jr,kr->ir", *given, backend="triton", plan=p)) for p in ("auto", stc.plan_hls(1))]
    assert "coo[i | - | jk]" in texts[0]
    assert "dense_tile[i | jk | -] tf32x3 + coo[i | - | jk]" in texts[1]
    for text in texts:
        assert not any(f"[{n}" in text or f"| {n}" in text for n in range(3))
