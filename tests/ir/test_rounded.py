"""Dense operands that are rounded to bfloat16 once a call: what is printed, when it is chosen, who never has it."""

from __future__ import annotations

import os
import pickle
import re
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Problem, assert_matches
from matrix_units import CUDA, MATRIX, dealt
from rounded_cases import DOTS, MIXED, SCALAR, SPMM, Case, rounding
from test_ir_runners import interpreted

import sparsetc as stc
from sparsetc.ir.program.cost import cost_of
from sparsetc.ir.program.tile import Gather

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CASES = SCALAR | MIXED | DOTS
WIDENED = ".to(tl.float32)"


def gathers(kernel: stc.Kernel, part: int, operand: str) -> list[str]:
    """The lines of a part's function that read an operand."""
    text = kernel.source.split(f"def part_{part}(")[1].split("@triton.jit")[0]
    return [line for line in text.splitlines() if f"tl.load({operand} + " in line]


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_of_operands(name: str) -> None:
    """Rounded elements are widened once loaded, unless a dot takes them as they are; others are not."""
    case = CASES[name]
    kernel = case.compiled()
    for number, program in enumerate(kernel.programs):
        for operand in program.operands:
            assert operand.rounded == (operand.name in case.rounded and number in case.parts)
            widened = operand.rounded and operand.name not in case.kept
            lines = gathers(kernel, number, operand.name)
            assert lines
            assert all(line.endswith(WIDENED) == widened for line in lines)
        noted = {s.operand.name for s, _ in program.statements if isinstance(s, Gather) and s.operand.rounded}
        assert set(re.findall(r"gather (\w+)\[.*\]  # cast to bfloat16", str(program))) == noted


@pytest.mark.parametrize("name", CASES)
def test_a_launch_is_given_what_its_parts_read(name: str) -> None:
    case = CASES[name]
    source = case.compiled().source
    given = [set(re.findall(r"\b[BCD](?:_bf16)?\b", head)) for head in re.findall(r"def kernel\w*\(([^)]*)\)", source)]
    operands = {"B", "C", "D"} & set(re.findall(r"\b[BCD]\b", source.split("\n\n")[1]))
    rounded = {f"{operand}_bf16" for operand in case.rounded}
    everywhere = rounded | (operands - set(case.rounded))
    if name == "fused, the first" or name == "fused, the second":
        assert given == [operands | rounded]
    else:
        assert given[0] == everywhere
        assert given[1:] in ([], [everywhere if case.parts == (0, 1) else operands])


@pytest.mark.parametrize("name", CASES)
def test_what_the_programs_mean(name: str) -> None:
    """In float64, but for the operands, and the stored values of tiles in bfloat16."""
    case = CASES[name]
    operands, kernel = case.problem.operands(), case.compiled()
    found = interpreted(kernel, operands[1:]).float()
    assert_matches(found, case.equation, operands, 2e-2)
    if name not in MIXED:
        if any(p.half for p in kernel.programs):
            operands[0] = operands[0].with_values(operands[0].values.to(torch.bfloat16).float())
        assert_matches(found, case.equation, case.as_read(operands), 1e-6)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("name", "target"), dealt(["coo", "fiber", "two vectors", "fused, the second", *DOTS]))
def test_compiles_for(name: str, target: str) -> None:
    text = CASES[name].compiled().ptx(target)
    assert (f".target {target}" if target in CUDA else target) in text
    if name in DOTS:
        assert re.search(MATRIX[target], text)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_fewer_bytes_are_loaded() -> None:
    def loaded(kernel: stc.Kernel) -> int:
        return sum(int(v or 1) * int(b) for v, b in re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", kernel.ptx("sm_90")))

    case = SCALAR["coo"]
    wide = stc.compile(case.equation, *case.problem.operands(), plan=case.plan(case.problem), backend="triton")
    assert loaded(case.compiled()) < loaded(wide)


# --- who has it -------------------------------------------------------------------------------------------------------


def given(
    plan: stc.plans.Plan, equation: str = SPMM, dtype: torch.dtype = torch.float32, **settings: Any
) -> stc.Kernel:
    return stc.compile(equation, *Problem(equation, dtype=dtype).operands(), plan=plan, **settings)


def plan_of(name: str = "coo") -> stc.plans.Plan:
    case = SCALAR[name]
    plan: stc.plans.Plan = case.settings["plan"]
    return plan


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64], ids=str)
def test_other_types_are_never_rounded(dtype: torch.dtype) -> None:
    kernel = given(plan_of(), dtype=dtype, backend="triton")
    assert not kernel.plan.parts[0].schedule.rounded
    assert "bf16" not in kernel.source


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_torch_programs_read_operands_as_they_are(dtype: torch.dtype) -> None:
    kernel = given(plan_of(), dtype=dtype, backend="torch")
    assert not kernel.plan.parts[0].schedule.rounded
    operands = Problem(SPMM, dtype=dtype).operands()
    assert_matches(kernel(*operands[1:]), SPMM, operands)


def test_only_at_precision_bf16() -> None:
    (part,) = plan_of().parts
    finer = replace(part, schedule=replace(part.schedule, precision="tf32"))
    with pytest.raises(stc.PlanError, match="operands are rounded at precision bf16, not at tf32"):
        given(stc.plans.Plan("p", (finer,)), backend="triton")


@pytest.mark.parametrize("name", ["C", "X", "j"])
def test_only_what_is_gathered(name: str) -> None:
    with pytest.raises(stc.PlanError, match=f"'{name}' is rounded, and rows are gathered of B"):
        given(rounding(plan_of(), name), backend="triton")


def test_not_what_has_no_rows() -> None:
    plan = rounding(plan_of(), "C")
    with pytest.raises(stc.PlanError, match="'C' is rounded, and rows are gathered of B"):
        given(plan, "ij,jr,r->ir", backend="triton")


# --- when it is chosen ------------------------------------------------------------------------------------------------


def matrix(rows: int, columns: int, share: float) -> stc.SparseTensor:
    g = torch.Generator().manual_seed(0)
    return stc.SparseTensor.from_dense((torch.rand(rows, columns, generator=g) < share).float())


def planned(x: stc.SparseTensor, columns: int, **settings: Any) -> stc.Kernel:
    return stc.compile(SPMM, x, torch.zeros(()).expand(x.shape[1], columns), **{"backend": "triton"} | settings)


@pytest.fixture(scope="module")
def x() -> stc.SparseTensor:
    return matrix(1000, 1000, 0.05)


def test_many_columns_are_rounded_at_medium(x: stc.SparseTensor) -> None:
    considered = dict(planned(x, 4096, precision="medium").step.choice.considered)
    name = next(name for name in considered if name.startswith("coo: ") and name.endswith(", B in bf16"))
    assert considered[name.removesuffix(", B in bf16")] > considered[name]
    kernel = planned(x, 4096, precision="medium", plan="coo")
    assert all(p.schedule.rounded == ("B",) for p in kernel.plan.parts)
    assert "B in bf16" in str(kernel.explain())
    assert "B in bf16" in str(kernel.plan)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_at_no_other_precision(x: stc.SparseTensor, precision: str) -> None:
    kernel = planned(x, 4096, precision=precision)
    assert not any("in bf16" in name for name, _ in kernel.step.choice.considered)
    assert "bf16" not in kernel.source


def test_few_columns_are_not_worth_it(x: stc.SparseTensor) -> None:
    kernel = planned(x, 8, precision="medium")
    assert not any("in bf16" in name for name, _ in kernel.step.choice.considered)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_for_float32_on_a_gpu_alone(x: stc.SparseTensor, dtype: torch.dtype, backend: str) -> None:
    b = torch.zeros((), dtype=dtype).expand(x.shape[1], 4096)
    kernel = stc.compile(SPMM, x.to(dtype), b, precision="medium", backend=backend, plan="coo")
    assert ("bf16" in kernel.source) == (dtype == torch.float32 and backend == "triton")


@pytest.mark.parametrize("name", ["coo", "coo+rows", "hls"])
def test_for_plans_by_name(x: stc.SparseTensor, name: str) -> None:
    kernel = planned(x, 4096, precision="medium", plan=name)
    assert all(p.schedule.rounded == ("B",) for p in kernel.plan.parts)


def test_the_operands_that_are_worth_it() -> None:
    """A vector's elements take as much of a cache as a short row does: nothing is saved by rounding it."""
    g = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, n, (2_000_000,), generator=g) for n in (2000, 40_000, 4)])
    tensor = stc.SparseTensor(coords, torch.rand(coords.shape[1]), (2000, 40_000, 4))
    b, c = torch.zeros(()).expand(40_000, 128), torch.zeros(4)
    kernel = stc.compile("ijk,jr,k->ir", tensor, b, c, plan="coo", precision="medium", backend="triton")
    assert kernel.plan.parts[0].schedule.rounded == ("B",)


def test_a_plan_makes_its_kernel_again(x: stc.SparseTensor) -> None:
    kernel = planned(x, 4096, precision="medium")
    plan = pickle.loads(pickle.dumps(kernel.plan))
    assert plan == kernel.plan
    assert planned(x, 4096, plan=plan).source == kernel.source


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_half_the_bytes_and_a_call_more() -> None:
    case = SCALAR["rows"]
    wide = stc.compile(case.equation, *case.problem.operands(), plan=case.plan(case.problem), backend="triton")
    costs = [cost_of(k.programs[0]) for k in (case.compiled(), wide)]
    assert [c.made for c in costs] == [(("rounded", "B", 9 * 8), ("rounded", "C", 5 * 8)), ()]
    assert "gathers N rows of 16 bytes of B" in costs[0].describe()
    assert "gathers N rows of 8*w bytes of B" in costs[1].describe()
    assert "reads C in bfloat16, cast before the launch" in costs[0].describe()


def test_what_parts_share_is_rounded_once() -> None:
    from sparsetc.device.profile import of_backend
    from sparsetc.planner.candidate import Choice
    from sparsetc.planner.pricing import seconds_of
    from sparsetc.planner.report import statistics_of

    def seconds(case: Case) -> float:
        kernel = case.compiled()
        costs = [copy(cost_of(p)) for p in kernel.programs]
        for cost in costs:
            cost.multiply = cost.output
        packed = [p.packed for p in kernel.step.parts]
        own = statistics_of(Choice(kernel.plan), packed, kernel.step.filled, kernel.step.problem)
        profile = of_backend("triton")
        return sum(seconds_of(kernel.plan, costs, own, profile)) / profile.call

    one, both = (seconds(replace(SCALAR["fused"], parts=parts)) for parts in ((0,), (0, 1)))
    assert both - one < 0.5
