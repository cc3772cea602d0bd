"""The kernels of small systems, compiled ahead of time for named targets; no GPU is needed."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from matrix_units import TARGETS

from sparsetc.decomposition.linear import KERNEL_ELEMENTS, least
from sparsetc.device.targets import gpu

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "width", "a_row"), [("fp32", 16, 0), ("fp64", 32, 1), ("fp32", 256, 1)])
def test_nonnegative_updates_compile(dtype: str, width: int, a_row: int, target: str) -> None:
    from sparsetc.decomposition.linear_kernels import update

    numbers = {"WIDTH": width, "BLOCK": KERNEL_ELEMENTS // width, "A_ROW": a_row, "LEAST": least(DTYPES[dtype])}
    compiled(update, dict.fromkeys(("factor", "rhs", "gram"), f"*{dtype}"), numbers, target, 4)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "width", "warps"), [("fp32", 16, 4), ("fp64", 32, 4), ("fp32", 64, 8)])
def test_inverses_compile(dtype: str, width: int, warps: int, target: str) -> None:
    from sparsetc.decomposition.linear_kernels import invert

    types = {"gram": "*fp64", "pivots": "*fp64", "own": f"*{dtype}", "inverse": f"*{dtype}", "share": "fp32"}
    compiled(invert, types, {"WIDTH": width, "LEAST": least(DTYPES[dtype])}, target, warps)


def compiled(kernel: Any, types: dict[str, str], numbers: dict[str, float], target: str, warps: int) -> None:
    """Compile a kernel whose other arguments are 32-bit integers; it must not spill."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    machine, arch, warp = gpu(target)
    signature = dict.fromkeys(kernel.arg_names, "i32") | types | dict.fromkeys(numbers, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in numbers.items()}
    source = ASTSource(kernel, signature, constexprs=places)
    found = triton.compile(source, target=GPUTarget(machine, arch, warp), options={"num_warps": warps})
    if machine == "cuda":
        assert not re.search(r"\.local\b", found.asm["ptx"])
    else:
        assert found.asm["amdgcn"]
