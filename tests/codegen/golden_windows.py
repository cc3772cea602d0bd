"""The products by windows whose generated source is kept in ``tests/golden/windows``."""

from __future__ import annotations

from pathlib import Path

from cases import Problem

import sparsetc as stc

FOLDER = Path(__file__).parents[1] / "golden" / "windows"
STORAGE = stc.plans.Storage((0,), (1,), params=(("height", 16), ("width", 32)))
CASES = {
    "spmm_halves": stc.plans.Plan(
        "windows", (stc.plans.Part("window", STORAGE, stc.plans.Schedule(2, (("r", 32),), True, "f16x3")),)
    )
}
"""Plans of windows of neighbouring rows alone."""


def kernel(name: str) -> stc.Kernel:
    """The kernel of a case."""
    operands = Problem("ij,jr->ir", {"i": 100, "j": 200, "r": 32}, "skewed").operands()
    return stc.compile("ij,jr->ir", *operands, plan=CASES[name], backend="triton")


def source(name: str) -> str:
    """The text generated for a case."""
    return kernel(name).source


def path(name: str) -> Path:
    """Where it is kept."""
    return FOLDER / f"{name}.py"
