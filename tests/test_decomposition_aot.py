"""The kernel of nonnegative updates, compiled ahead of time for named targets; no GPU is needed."""

from __future__ import annotations

import os
import re

import pytest
from matrix_units import TARGETS

from sparsetc.device.targets import gpu

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "width", "a_row"), [("fp32", 16, 0), ("fp64", 32, 1), ("fp32", 256, 1)])
def test_nonnegative_updates_compile(dtype: str, width: int, a_row: int, target: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sparsetc.decomposition.hals_kernel import update
    from sparsetc.decomposition.linear import KERNEL_ELEMENTS

    machine, arch, warp = gpu(target)
    numbers = {"WIDTH": width, "BLOCK": KERNEL_ELEMENTS // width, "A_ROW": a_row}
    types = dict.fromkeys(update.arg_names, "i32") | dict.fromkeys(("factor", "rhs", "gram"), f"*{dtype}")
    signature = types | dict.fromkeys(numbers, "constexpr")
    places = {(update.arg_names.index(name),): value for name, value in numbers.items()}
    found = triton.compile(ASTSource(update, signature, constexprs=places), target=GPUTarget(machine, arch, warp))
    if machine == "cuda":
        assert not re.search(r"\.local\b", found.asm["ptx"])
    else:
        assert found.asm["amdgcn"]
