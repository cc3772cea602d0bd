"""Launches of Triton's kernels: of generated modules, by hand, and of copies in another order of modes.

In: a kernel of a generated module, or one by hand, and its grid. Out: a function of its arguments, which costs little,
never waits and can be captured in a CUDA graph; or assembly for a named target, which needs no GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from importlib import import_module
from math import prod
from operator import or_
from typing import Any

import torch
from torch import Tensor

from sparsetc.codegen import COLUMNS, ROWS
from sparsetc.device.profile import gpu
from sparsetc.errors import DeviceError, PlanError
from sparsetc.support import Ints
from sparsetc.support.entry import bar, log_since, on_gpu
from sparsetc.tensor.dtypes import WORDS

FUSED = {"enable_fp_fusion": True}
"""An option of every launch: a product and a sum are one instruction. Triton's default up to 3.9, and not beyond."""
ALIGNED = 16
"""Bytes that Triton specialises kernels to: arrays that begin at a multiple are loaded several elements at once."""
PROGRAMS = 2048
"""Programs of a kernel that takes one piece of work after another, whatever there is to do."""


def launch_of(
    kernel: Any, grid: int, options: Mapping[str, int], varied: Sequence[int] = (), constant: Sequence[Any] = ()
) -> Callable[[list[Any]], None]:
    """Return a launch of one kernel on one grid, on the current device; it returns before the kernel has run.

    Triton decides by arguments' types and alignment which of a kernel's compiled forms runs, which takes most of a
    call's time. So the form that it found for tensors of one kind is kept for others that are aligned alike, and is
    given addresses in place of tensors, which it would ask the driver about one by one.

    Args:
        kernel: of a generated module.
        grid: its programs.
        options: what Triton is told beside arguments.
        varied: places of the arguments that are not the same at each call: stored values, tables and, last, the output;
            none where those are all tensors.
        constant: the arguments, of which tensors are the same at each call.

    Returns:
        A function of the list of all arguments, which it may change.
    """
    forms: dict[Any, Any] = {}
    places = [*varied]
    fixed = [one.data_ptr() if isinstance(one, Tensor) else one for one in constant]

    def launch(arguments: list[Any]) -> None:
        out = arguments[-1]
        if not places:
            places.extend([n for n, one in enumerate(arguments) if isinstance(one, Tensor)])
        addresses = [arguments[n].data_ptr() for n in places]
        apart = reduce(or_, addresses) % ALIGNED and tuple([address % ALIGNED for address in addresses])
        form = out.device, out.dtype, apart
        run = forms.get(form)
        if run is not None:
            arguments[: len(fixed)] = fixed
            for n, address in zip(places, addresses, strict=True):
                arguments[n] = address
            run(arguments)
            return
        if out.device.type == "cpu" and not is_interpreted(kernel):
            raise DeviceError(
                'backend="triton" launches kernels on a GPU, and the operands are on the CPU: move them with '
                '.to("cuda"), leave the backend to "auto", which runs the torch programs here, or set '
                "TRITON_INTERPRET=1 before Python starts. What needs no GPU is .source and .ptx()"
            )
        name, start = getattr(kernel, "__name__", kernel), time.perf_counter()
        with bar(None, f"Triton compiles {name}"):
            compiled = kernel[(grid,)](*arguments, **options)
        if compiled is not None:  # Triton's interpreter compiles nothing
            forms[form] = _start_of(compiled, grid, out.device)
            log_since(start, logging.DEBUG, "Triton made %s ready", name)

    return launch


def _start_of(compiled: Any, grid: int, device: torch.device) -> Callable[[Sequence[Any]], None]:
    """Return a launch of a compiled kernel. Profilers are told of it if any listens to Triton's launches."""
    from triton import knobs
    from triton.runtime import driver

    start, function = compiled.run, compiled.function
    metadata = compiled.packed_metadata
    stream_on, told = driver.active.get_current_stream, knobs.runtime

    def run(arguments: Sequence[Any]) -> None:
        if told.launch_enter_hook.calls or told.launch_exit_hook.calls:
            compiled[grid, 1, 1](*arguments)
        else:
            start(grid, 1, 1, stream_on(device.index), function, metadata, None, None, None, *arguments)

    return run


# -- kernels by hand, which stand in `codegen.kernels` -----------------------------------------------------------------


@lru_cache(maxsize=256)
def launch_by_hand(
    name: str, kind: object = None, programs: int = PROGRAMS, warps: int = 4
) -> Callable[[list[Any]], None]:
    """Return a launch of a kernel.

    Args:
        name: of the kernel, in a module which imports triton.
        kind: what Triton may specialise the kernel to, beside tensors; and which arguments these are.
        programs: of its grid; by default each takes one piece of work after another.
        warps: of a program.
    """
    kernel = getattr(import_module("sparsetc.codegen.kernels"), name)
    return launch_of(kernel, programs, {"num_warps": warps, **FUSED})


def run_by_hand(name: str, arguments: list[Any], kind: object = None, programs: int = PROGRAMS, warps: int = 4) -> None:
    """Launch a kernel on the device of its last argument, a tensor; the rest is as in `launch_by_hand`."""
    with on_gpu(arguments[-1].device):  # Triton launches on the current device
        launch_by_hand(name, kind, programs, warps)(arguments)


FEWEST = {1: 1 << 15, 2: 1 << 15, 4: 1 << 16, 8: 1 << 18}
"""Elements, by their bytes, from which on transposed copies are a kernel's: of fewer torch's takes as long, or less."""
Mode = tuple[int, int, int]
"""The size of a mode, its stride in a view, and in a contiguous tensor of the view's shape."""
Matrices = tuple[Mode, Mode, Mode]
"""The matrices of a view: their number, their rows and their columns."""


def contiguous(view: Tensor) -> Tensor:
    """Return the tensor contiguous: itself if it is so, else a copy.

    Where the view is of matrices whose rows are contiguous, a kernel copies them on a GPU by tiles; torch's own copy
    reads or writes one element in a sector of memory, and takes up to four times as long (NVIDIA H100, float16, a CUDA
    graph of the copy: 4096 x 4096 in 31 us in place of 129, 256 x 4096 in 7.3 in place of 13.0, 16 x 4096 in 5.4, not
    6.1; `benchmarks/results/transpose.json`).

    Args:
        view: strided, as `permute` gives it, of any dtype and on any device; a gradient is recorded as by
            `torch.Tensor.contiguous`.
    """
    recorded = view.requires_grad and torch.is_grad_enabled()
    if not view.is_cuda or recorded or view.is_contiguous() or type(view) is not Tensor:
        return view.contiguous()
    size = view.element_size()
    few = view.numel() < FEWEST.get(size, view.numel() + 1)
    matrices = None if few else as_matrices(view.shape, view.stride())
    if matrices is None:
        return view.contiguous()
    result = torch.empty(view.shape, dtype=view.dtype, device=view.device)
    turn(view.view(WORDS[size]), result.view(WORDS[size]), matrices)
    return result


def turn(source: Tensor, result: Tensor, matrices: Matrices) -> None:
    """Copy matrices in the other order of their modes, by Triton's kernel."""
    (count, source_matrix, result_matrix), (rows, source_row, _), (columns, _, result_row) = matrices
    tiles = -(-rows // ROWS), -(-columns // COLUMNS)
    numbers = source_matrix, source_row, result_matrix, result_row, rows, columns, *tiles
    run_by_hand("transpose", [source, *numbers, result], numbers, count * prod(tiles), warps=2)


@lru_cache(maxsize=256)
def as_matrices(shape: Ints, strides: Ints) -> Matrices | None:
    """Return the matrices that a view turns; None where it does not.

    The last mode of the view are the rows, which are contiguous in memory; of the view the columns are.
    """
    modes: list[Mode] = []
    behind = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if modes and stride == modes[-1][0] * modes[-1][1]:  # one mode with the one behind it
            modes[-1] = (modes[-1][0] * size, *modes[-1][1:])
        elif size > 1:
            modes.append((size, stride, behind))
        behind *= size
    turned = [n for n, (_, stride, _) in enumerate(modes) if n and stride == 1]
    if not turned or len(modes) > 3 or modes[0][1] == 1:
        return None
    others = [mode for n, mode in enumerate(modes) if n not in (0, turned[0])]
    return others[0] if others else (1, 0, 0), modes[0], modes[turned[0]]


# -- what needs Triton, and not a GPU ----------------------------------------------------------------------------------


def triton_type(dtype: torch.dtype) -> str:
    """Return Triton's name of a type of elements, as ``fp32``, ``bf16``, ``i64`` or ``u8``."""
    kind = "i" if dtype.is_signed else "u"
    if dtype.is_floating_point:
        kind = "bf" if dtype == torch.bfloat16 else "fp"
    return f"{kind}{8 * dtype.itemsize}"


def assembled(
    kernel: Any, types: Sequence[str], target: str, options: Mapping[str, int], divisible: Sequence[int] = ()
) -> Any:
    """Return Triton's compiled kernel for a named target; needs no GPU.

    Args:
        kernel: printed for the target's machine.
        types: of its arguments, in order, as Triton writes them; pointers are aligned to 16 bytes.
        target: a name of `device.profile.TARGETS`.
        options: what Triton is told of a launch beside its arguments.
        divisible: places of the numbers that are multiples of 16, as a launch sees by itself.

    Raises:
        PlanError: a target that is not known, or Triton's interpreter in place of its compiler.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    machine, arch, warp = gpu(target)
    if is_interpreted(kernel):
        raise PlanError("compiling ahead of time needs TRITON_INTERPRET unset when triton is imported")
    aligned = [*divisible, *[n for n, t in enumerate(types) if t.startswith("*")]]
    attributes: dict[tuple[int, ...], list[list[Any]]] = {(n,): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(kernel, dict(zip(kernel.arg_names, types, strict=True)), constexprs={}, attrs=attributes)
    return triton.compile(source, target=GPUTarget(machine, arch, warp), options=options)


def is_interpreted(kernel: Any) -> bool:
    """Return True if Triton made a function for its interpreter of a kernel, and not one to compile."""
    from triton.runtime.jit import JITFunction

    return not isinstance(kernel, JITFunction)
