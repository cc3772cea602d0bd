"""Launches of kernels and native loops; and what calls are given: arguments, tables, addresses.

In: a kernel of a generated module, or one by hand, and its grid. Out: a function of its arguments, which costs little,
never waits and can be captured in a CUDA graph; or assembly for a named target, which needs no GPU.

In: the text of native loops, then tensors of storages. Out: `Call`. numba compiles a function when it first runs on
arguments of some types, and keeps it beside the sources (`support.files`). Functions hold no lock of Python, so that
threads of Python share a part: its items are cut into ranges that hold about as many nonzeros each. numba's own threads
are not used: its OpenMP layer changes how many threads torch has for good and ends forked children, and its other layer
ends a process in which three threads call at once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial, reduce
from importlib import import_module
from itertools import pairwise
from math import prod
from operator import or_
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.codegen import COLUMNS, ROWS
from sparsetc.device.profile import gpu
from sparsetc.errors import DeviceError, PlanError
from sparsetc.ir.program import TileProgram
from sparsetc.packing.base import Packed
from sparsetc.support import Ints, at_fork
from sparsetc.support.entry import bar, log_since, on_gpu
from sparsetc.support.files import Kept
from sparsetc.tensor.dtypes import WORDS

FUSED = {"enable_fp_fusion": True}
"""An option of every launch: a product and a sum are one instruction. Triton's default up to 3.9, and not beyond."""
ALIGNED = 16
"""Bytes that Triton specialises kernels to: arrays that begin at a multiple are loaded several elements at once."""
PROGRAMS = 2048
"""Programs of a kernel that takes one piece of work after another, whatever there is to do."""
InHalves = tuple[Tensor, Tensor, Tensor]
"""(stored,) high halves and low halves, and (scales,) float32 the largest magnitudes, which scales follow from."""
Values = Sequence[Tensor | InHalves | None]
"""Packed values, one a part; None of a pattern, which stores none."""
Call = Callable[[Values, Sequence[Tensor], Tensor], None]
"""Programs bound to the arrays of storages: a function of values, tables and output."""


def each(values: Values) -> Sequence[Tensor | None]:
    """The tensors of packed values, as a launch takes them."""
    return [one for packed in values for one in (packed if isinstance(packed, tuple) else (packed,))]


@dataclass(frozen=True)
class PartArrays:
    """The index tensors that a part's program reads, and the number of its work items.

    Attributes:
        index: the arrays that ``program.arrays`` names, in its order, without the values.
    """

    index: tuple[Tensor, ...]
    items: int
    stored: int

    @classmethod
    def of(cls, program: TileProgram, packed: Packed, rows: Tensor | None = None) -> PartArrays:
        """The tensors of a storage, and the result rows of what the program adds, where it reads them."""
        index = [packed.arrays[name] for name in program.view.arrays if name not in program.view.packed]
        return cls((*index, rows) if rows is not None else tuple(index), packed.items, packed.stored)

    def programs(self, program: TileProgram) -> int:
        """Grid programs that the part takes."""
        return self.items * prod(axis.programs for axis in program.split)

    def named(self, program: TileProgram) -> dict[str, Tensor]:
        """The tensors by the names that the program has for them."""
        index = (name for name in program.arrays if name not in program.view.packed)
        return dict(zip(index, self.index, strict=True))


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


# -- native loops -----------------------------------------------------------------------------------------------------

RANGES = 4
"""Ranges of items for each thread, if items own the rows they write; a thread that is free takes the next."""


@lru_cache
def _native_source() -> str:
    """Return the source of the functions that are compiled into native loops."""
    return (Path(__file__).parents[1] / "runtime" / "vectors.py").read_text(encoding="utf-8")


def functions(module: ModuleType, names: Sequence[str], source: str, folder: Path | None) -> list[Any]:
    """Return functions of a module, which are compiled when they first run, or found in the folder."""
    each = [getattr(module, name) for name in names]
    for function in each:
        function._cache = Kept(function.__name__, source + _native_source(), folder)
    return each


@lru_cache
def _pool() -> ThreadPoolExecutor:
    """Return Python's threads for native functions. A forked child has its own."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="sparsetc")


at_fork(after_in_child=_pool.cache_clear)


def in_threads(threads: int, jobs: Sequence[Callable[[], None]]) -> None:
    """Run jobs on this many threads; the calling thread is one of them."""
    left = iter(jobs)

    def some() -> None:
        for job in left:
            job()

    others = [_pool().submit(some) for _ in range(min(threads, len(jobs)) - 1)]
    some()
    for other in others:
        other.result()


def bind_native(
    functions: Sequence[Any],
    programs: Sequence[TileProgram],
    arrays: Sequence[PartArrays],
    known: Sequence[PartArrays],
    most: int,
) -> Call:
    """Bind native programs to these tensors, run by at most `most` threads; arguments as for `Programs.bind`."""
    parts = [_bound(*part) for part in zip(functions, programs, arrays, known, strict=True)]

    def call(values: Values, dense: Sequence[Tensor], out: Tensor) -> None:
        threads = min(most, torch.get_num_threads())
        tables, flat = [_flat(table) for table in dense], _flat(out)
        for run, stored in zip(parts, values, strict=True):
            run(None if stored is None else _flat(stored), tables, flat, threads)

    return call


def _flat(tensor: Any) -> np.ndarray[Any, Any]:
    array = tensor if isinstance(tensor, np.ndarray) else tensor.numpy(force=True)
    return array.reshape(-1)


def _bound(function: Any, program: TileProgram, part: PartArrays, known: PartArrays) -> Callable[..., None]:
    """Return what adds a part to a result, or stores its rows there, given values, tables, the result and threads."""
    named = part.named(program)
    view, owned = program.view, program.result.owned
    arrays = [_flat(named[name]) if name in named else None for name in program.arrays]
    place = program.arrays.index("values") if "values" in program.arrays else None
    items = known.stored if view.items.counts else known.items

    @cache
    def cut(ranges: int) -> list[tuple[int, int]]:
        """Return ranges of items, or of nonzeros."""
        if items < 2:
            return [(0, items)]
        if view.items.size:
            return list(pairwise(sorted({items * n // ranges for n in range(ranges + 1)})))
        held = known.named(program)
        first = held[program.arrays[0]].long()
        for axis in view.loops[:-1]:
            first = held[f"{axis.name}_ptr"].long()[first]
        return list(pairwise(ends(first, ranges)))

    def run(values: Any, tables: Sequence[Any], out: Any, threads: int) -> None:
        fixed = [*arrays]
        if place is not None:
            fixed[place] = values
        if not owned and threads * out.size > known.stored * program.width:
            threads = 1  # copies of the result would take longer than what is added to it
        arguments = (*fixed, *tables)
        if threads == 1:
            function(0, items, *arguments, out)
            return
        several = owned and not program.split  # each range copies panels of its own
        ranges = cut(threads * RANGES if several else threads)
        into = [out] * len(ranges) if owned else np.zeros((len(ranges), out.size), out.dtype)
        in_threads(threads, [partial(function, *each, *arguments, to) for each, to in zip(ranges, into, strict=True)])
        if not owned:
            for one in into:  # in order, so that the same bits come back at every run
                out += one

    return run


def ends(first: Tensor, ranges: int) -> list[int]:
    """Return where ranges of items begin that have about as many nonzeros each, and where the last one ends.

    Args:
        first: (items + 1,) int64, the first nonzero of each item, and where those of the last end.
        ranges: how many are asked for.
    """
    last, wanted = len(first) - 1, first[0] + (first[-1] - first[0]) * torch.arange(1, ranges) // ranges
    return sorted({0, last, *torch.searchsorted(first, wanted).clamp(0, last).tolist()})
