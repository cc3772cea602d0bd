"""Mixed-mode fibers, compiled ahead of time for named targets: one launch adds the forests of every mode."""

from __future__ import annotations

import os

import pytest
import torch
from cases import mttkrp, random_values, ttmc
from matrix_units import CUDA, dealt
from mixed_mode_cases import crossed

import sparsetc as stc

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


def compiled(equation: str, order: int, dtype: torch.dtype, rank: int) -> stc.Kernel:
    x = crossed(order, dtype, size=80)
    count = equation.count(",")
    return stc.compile(equation, x, *[random_values((80, rank), dtype, 1)] * count, plan="mm-csf", backend="triton")


@pytest.mark.parametrize(("mode", "target"), dealt(range(3)))
def test_every_mode_compiles(mode: int, target: str) -> None:
    kernel = compiled(mttkrp(3, mode), 3, torch.float32, 32)
    assert len(kernel.plan.parts) == 3
    text = kernel.ptx(target)
    if target in CUDA:
        assert text.count(".visible .entry") == 1
        assert ".local" not in text, "nothing is spilt"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("equation", [mttkrp(4, 2), ttmc(3, 1)])
def test_other_types_and_operations_compile(equation: str, dtype: torch.dtype) -> None:
    kernel = compiled(equation, len(equation.split(",")[0]), dtype, 16)
    assert kernel.ptx("sm_90").count(".visible .entry") == 1
