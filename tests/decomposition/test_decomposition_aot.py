"""The kernels of small systems, compiled ahead of time for named targets; no GPU is needed."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import Any

import assembler
import pytest
import torch
from matrix_units import TARGETS, dealt

from sparsetc.decomposition.linear import KERNEL_ELEMENTS, least
from sparsetc.device.profile import gpu

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "width", "a_row"), [("fp32", 16, 0), ("fp64", 32, 1), ("fp32", 256, 1)])
def test_nonnegative_updates_compile(dtype: str, width: int, a_row: int, target: str) -> None:
    from sparsetc.decomposition.linear_kernels import update

    numbers = {"WIDTH": width, "BLOCK": KERNEL_ELEMENTS // width, "A_ROW": a_row, "LEAST": least(DTYPES[dtype])}
    compiled(update, dict.fromkeys(("factor", "rhs", "gram"), f"*{dtype}"), numbers, target, 4, stack=8)


@pytest.mark.parametrize(("kind", "target"), dealt([("fp32", 16), ("fp64", 32), ("fp32", 64)]), ids=str)
def test_inverses_compile(kind: tuple[str, int], target: str) -> None:
    from sparsetc.decomposition.linear_kernels import invert

    dtype, width = kind
    types = {"gram": "*fp64", "pivots": "*fp64", "inverse": f"*{dtype}", "share": "fp32"}
    numbers = {"WIDTH": width, "LEAST": least(DTYPES[dtype])}
    compiled(invert, types, numbers, target, 8 if width > 32 else 4)


def compiled(
    kernel: Any, types: dict[str, Any], numbers: dict[str, Any], target: str, warps: int, stack: int = 0, **options: int
) -> None:
    """Compile a kernel whose other arguments are 32-bit integers; a thread must not spill more than `stack` bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    machine, arch, warp = gpu(target)
    signature = dict.fromkeys(kernel.arg_names, "i32") | types | dict.fromkeys(numbers, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in numbers.items()}
    source = ASTSource(kernel, signature, constexprs=places)
    with assembler.needed():
        found = triton.compile(source, target=GPUTarget(machine, arch, warp), options={"num_warps": warps} | options)
    if machine == "cuda":
        assert not re.search(r"\.local\b", found.asm["ptx"])
        assert stack_of(found.asm["cubin"]) <= stack
    else:
        assert re.search(r"\.vgpr_spill_count: +0\b", found.asm["amdgcn"])


def stack_of(cubin: bytes) -> int:
    """Bytes a thread that a kernel for an NVIDIA GPU keeps in memory, for want of registers."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        call = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"STACK:(\d+)", said)
    return int(found)
