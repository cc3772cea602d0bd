"""Triton's kernels, compiled ahead of time for targets by name; what of this needs Triton's compiler, and not a GPU.

In: kernels, and the types of their arguments. Out: assembly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from sparsetc.device.profile import gpu
from sparsetc.errors import DeviceError, PlanError

FUSED = {"enable_fp_fusion": True}
"""An option of every launch: a product and a sum are one instruction. Triton's default up to 3.9, and not beyond."""


def assembled(kernel: Any, types: Sequence[str], target: str, options: Mapping[str, int]) -> Any:
    """Return Triton's compiled kernel for a named target; needs no GPU.

    Args:
        kernel: printed for the target's machine.
        types: of its arguments, in order, as Triton writes them; pointers are aligned to 16 bytes.
        target: a name of `device.profile.TARGETS`.
        options: what Triton is told of a launch beside its arguments.

    Raises:
        PlanError: a target that is not known, or Triton's interpreter in place of its compiler.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    machine, arch, warp = gpu(target)
    if is_interpreted(kernel):
        raise PlanError("compiling ahead of time needs TRITON_INTERPRET unset when triton is imported")
    aligned = [n for n, t in enumerate(types) if t.startswith("*")]
    attributes: dict[tuple[int, ...], list[list[Any]]] = {(n,): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(kernel, dict(zip(kernel.arg_names, types, strict=True)), constexprs={}, attrs=attributes)
    return triton.compile(source, target=GPUTarget(machine, arch, warp), options=options)


def check_installed() -> None:
    """PlanError where there is no Triton."""
    if find_spec("triton") is None:
        raise PlanError(
            'generated Triton kernels need Triton, which is not installed: pip install "triton>=3.6" (Linux), or take '
            'backend="torch"'
        )


def is_interpreted(kernel: Any) -> bool:
    """Whether Triton made a function for its interpreter of a kernel, and not one to compile."""
    from triton.runtime.jit import JITFunction

    return not isinstance(kernel, JITFunction)


def check_device(kernel: Any, device: torch.device) -> None:
    """DeviceError where a kernel that is to be compiled would be launched without a GPU."""
    if device.type == "cpu" and not is_interpreted(kernel):
        raise DeviceError(
            'backend="triton" launches kernels on a GPU, and the operands are on the CPU: move them with .to("cuda"), '
            'leave the backend to "auto", which runs the torch programs here, or set TRITON_INTERPRET=1 before Python '
            "starts. What needs no GPU is .source and .ptx()"
        )


def check_products(kernel: Any) -> None:
    """PlanError where a kernel with products of matrices in bfloat16 would be interpreted."""
    if is_interpreted(kernel):
        raise PlanError(
            "Triton's interpreter multiplies the bits of matrices in bfloat16 as integers, which gives wrong numbers: "
            'take precision="high" or "highest" here, or compile for a GPU without TRITON_INTERPRET'
        )


TRITON_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
