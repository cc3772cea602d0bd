"""Windows, compiled ahead of time for named targets: a product of a sparse matrix runs on the matrix units."""

from __future__ import annotations

import os
import re

import pytest
import torch
from halves_cases import compiled as in_halves
from halves_cases import problem
from matrix_units import CUDA, MATRIX, NATIVE, TARGETS, other_types
from window_cases import uneven

import sparsetc as stc

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

SPMM = "ij,jr->ir"
INPUT = {"highest": r"\.tf32", "high": r"\.tf32", "medium": r"\.bf16"}
"""What the instructions of a precision read, on the targets of CUDA."""


def compiled(plan: stc.plans.Plan, dtype: torch.dtype = torch.float32, precision: str = "highest") -> stc.Kernel:
    operands = problem(SPMM, dtype, i=200, j=300, r=64).operands()
    return stc.compile(SPMM, *operands, plan=plan, backend="triton", precision=precision)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("precision", INPUT)
def test_a_sparse_product_runs_on_the_matrix_units(precision: str, target: str) -> None:
    kernel = compiled(stc.plans.plan_window(height=16, threshold=0), precision=precision)
    assert kernel.step.programs[0].dots
    text = kernel.ptx(target)
    assert re.search(MATRIX[target], text)
    if target == "sm_80":
        assert re.search(rf"mma\.sync\S*{INPUT[precision]}", text)
    assert target not in CUDA or not re.search(r"\.local\b", text), "nothing is spilt"


@pytest.mark.parametrize(("dtype", "target", "instruction"), other_types(MATRIX), ids=str)
def test_other_types_run_on_the_matrix_units(dtype: torch.dtype, target: str, instruction: str) -> None:
    assert re.search(instruction, compiled(stc.plans.plan_window(height=16, threshold=0), dtype).ptx(target))


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_high_windows_take_a_targets_own_instruction(target: str) -> None:
    assert re.search(NATIVE[target], compiled(stc.plans.plan_window(64, 64, 0), torch.bfloat16).ptx(target))


@pytest.mark.parametrize("plan", [stc.plans.plan_1sa(50, 4, 16, 16, 60), stc.plans.plan_window(8, 5, 20)], ids=str)
def test_windows_beside_runs_compile(plan: stc.plans.Plan) -> None:
    kernel = stc.compile(SPMM, *uneven(), plan=plan, backend="triton")
    assert len(kernel.plan.parts) == 2
    assert kernel.ptx("sm_90").count(".visible .entry") == 2


def test_high_windows_in_halves_take_a_targets_own_instruction() -> None:
    operands = problem(SPMM, i=200, j=300, r=64).operands()
    found = in_halves(SPMM, operands, stc.plans.plan_window(64, 64, 0)).ptx("sm_90")
    assert re.search(NATIVE["sm_90"] + r"\S*\.f32\.f16\.f16", found)
