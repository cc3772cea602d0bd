"""Tile programs -> generated modules, and calls of them: argument lists built once, one grid a launch.

In: tile programs; then the tensors of their storages. Out: callables of (values, dense tables, output). Making programs
imports the generated file, binding them to tensors builds argument lists, and a call only fills in pointers: it costs
little, never waits and can be captured in a CUDA graph.

A program over a task list gives blocks of the result, one an item, in the type that sums are kept in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, starmap
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetc.backends import NUMBA, TORCH, Backend
from sparsetc.codegen import cache, split_float16
from sparsetc.codegen import numba as numba_source
from sparsetc.codegen import torch as torch_source
from sparsetc.codegen.launch import FUSED, assembled, is_interpreted, launch_of, triton_type
from sparsetc.codegen.parts import Call, InHalves, PartArrays, Values, bind_native, chunks, each, few, functions
from sparsetc.device.profile import gpu, machine_of, portable
from sparsetc.errors import PlanError
from sparsetc.ir.nest import TYPES
from sparsetc.ir.plan import MOST_THREADS
from sparsetc.ir.program import (
    HALVES,
    LANES,
    Gather,
    Product,
    Reduce,
    TileProgram,
    Value,
    Zero,
    header,
    names,
    tables_of,
)
from sparsetc.support import installed, later
from sparsetc.support.files import usable
from sparsetc.tensor.dtypes import accumulator

_triton_source = later("codegen.triton", "module_source")
"""A call on the CPU needs none of Triton's printers."""
Split = tuple[Callable[[list[Any]], None], int]
"""The launch that splits a dense operand into halves, and its number of parts."""


class Programs:
    """The generated programs of the parts of a plan: Triton's, one launch for all parts when fused, or a CPU's.

    Attributes:
        kernels: the name of each function that a call runs, and the numbers of the parts that it runs.
    """

    def __init__(
        self,
        programs: Sequence[TileProgram],
        dtype: torch.dtype,
        backend: Backend,
        device: torch.device,
        cache_dir: Path | None,
        fused: bool = True,
        name: str = "",
        about: Sequence[str] = (),
    ) -> None:
        """Generate programs.

        Args:
            programs: one a part.
            dtype: of the operands.
            backend: of the programs; those of torch whose schedules say so are native loops of numba.
            device: that Triton's kernels are for.
            cache_dir: folder of generated sources.
            fused: whether one launch runs all parts.
            name: what the file is named after; the equation of the programs where it is empty.
            about: lines for a reader of the source, as `header` takes them.
        """
        native = backend is TORCH and not dtype.is_complex and all(p.schedule.native for p in programs)
        if native and not any(map(numba_source.unprinted, programs)) and usable():  # which holds for all parts or none
            backend = NUMBA
        self.programs = tuple(programs)
        self.dtype = dtype
        self.backend = backend
        self.about = tuple(about)
        self.machine, self.fused = machine_of(device), fused or len(self.programs) == 1
        names = [f"kernel_{n}" if backend.gpu else f"part_{p.number}" for n, p in enumerate(self.programs)]
        self.kernels: list[tuple[str, Sequence[int]]] = [(name, [n]) for n, name in enumerate(names)]
        if backend.gpu and self.fused:
            self.kernels = [("kernel", range(len(names)))]
        self.name = cache.source_name(name or programs[0].equation, backend.name)
        self.source = self.text_for(self.machine)
        self.module, self.path = cache.load(self.source, cache_dir, self.name)
        if self.backend.loops:
            self.native = functions(self.module, names, self.source, self.path.parent)

    def text_for(self, machine: str) -> str:
        """Return the module that runs on a machine."""
        if self.backend.gpu and not installed("triton"):
            raise PlanError(
                'generated Triton kernels need Triton, which is not installed: pip install "triton>=3.6" (Linux), or '
                'take backend="torch"'
            )
        return _text(self.programs, self.dtype, self.backend, self.about, self.fused, machine)

    def bind(self, arrays: Sequence[PartArrays], known: Sequence[PartArrays] | None = None) -> Call:
        """Bind the programs to these tensors. Return a function that adds every part to an output.

        Args:
            arrays: what calls read.
            known: tensors of what the arrays hold when a call is made, where they do not hold it yet.

        Raises:
            PlanError: Triton interprets, which gives wrong products of matrices in bfloat16.
        """
        triton, every = self.backend.gpu, tables_of(self.programs)
        with_dots, bf16 = [p for p in self.programs if p.dots and triton], self.dtype == torch.bfloat16
        rounded = any(p.schedule.precision == "bf16" or (bf16 and p.narrow) for p in with_dots)
        if rounded and is_interpreted(getattr(self.module, self.kernels[0][0])):
            raise PlanError(
                "Triton's interpreter multiplies the bits of matrices in bfloat16 as integers, which gives wrong "
                'numbers: take precision="high" or "highest" here, and operands of another type than bfloat16, or '
                "compile for a GPU without TRITON_INTERPRET"
            )
        parts, launches = list(zip(self.programs, known or arrays, strict=True)), []
        alone = not triton and all(few(*part, self.backend.loops) for part in parts)
        threads = max(p.schedule.threads for p, _ in parts) or int(alone)
        if self.backend.loops:
            return bind_native(self.native, self.programs, arrays, known or arrays, threads or MOST_THREADS)
        for name, group in self.kernels:
            launch, (arguments, places) = getattr(self.module, name), self._arguments(group, arrays)
            numbers = [every.index(table) for table in tables_of([self.programs[n] for n in group])]
            if triton:
                grid = sum(arrays[n].programs(self.programs[n]) for n in group)
                if not grid:
                    continue
                varied = [*places, *range(len(arguments), len(arguments) + len(numbers) + 1)]
                launch = launch_of(launch, grid, self._options(group, self.machine), varied, arguments)
            else:
                at_once = partial(launch, chunks(*parts[group[0]]))
                launch = partial(lambda run, arguments: run(*arguments), at_once)
            launches.append((launch, arguments, places, numbers))
        plain, several = not any(form for _, form in every), any(len(p.view.packed) > 1 for p in self.programs)
        splits = {
            n: (launch_of(kernel, parts, options), parts) for n, kernel, parts, options in self._splits(self.module)
        }

        def run(values: Values, dense: Sequence[Tensor], out: Tensor) -> None:
            stored: Any = each(values) if several else values
            tables = dense if plain else _as_read(dense, every, splits)
            for launch, arguments, places, numbers in launches:
                filled = [*arguments]
                for place, number in places.items():
                    filled[place] = stored[number]
                launch([*filled, *(dense if plain else [tables[n] for n in numbers]), out])

        def call(values: Values, dense: Sequence[Tensor], out: Tensor) -> None:
            if out.is_cuda and out.device.index != torch._C._cuda_getDevice():  # Triton launches on the current device
                with torch.cuda.device(out.device):
                    run(values, dense, out)
            else:
                run(values, dense, out)

        if triton:
            return call
        return _by_threads(run, threads) if threads else run

    def blocks(self, arrays: Sequence[Tensor]) -> Tensor:
        """Return (items, elements of a block): each item's sum over its pairs of tiles; a GPU is not waited for.

        Args:
            arrays: of the program's nest, in its order; the pairs of the items are from ``arrays[0][0]`` on.
        """
        (program,) = self.programs
        items = arrays[0].numel() - 1
        pairs = arrays[1].numel()
        shape, dtype = (items, program.width), accumulator(arrays[-1].dtype)
        out = torch.empty(shape, dtype=dtype, device=arrays[0].device)
        self.bind([PartArrays(tuple(arrays), items, pairs)])([None], [], out)
        return out

    def _arguments(self, group: Sequence[int], arrays: Sequence[PartArrays]) -> tuple[list[Any], dict[int, int]]:
        """Return the arguments, and by place the numbers among `each` of the stored values that go there."""
        counts: list[int] = []
        pointers: list[Tensor | int] = []  # a number where stored values go
        first = [0, *accumulate(max(1, len(p.view.packed)) for p in self.programs)]
        for n in group:
            program, part = self.programs[n], arrays[n]
            if self.backend.gpu:
                counts += [part.programs(program), *[part.stored for _ in program.view.items.counts]]
                counts += program.ends.values()
            values, end = range(first[n], first[n] + len(program.view.packed)), len(part.index) - bool(program.slot)
            pointers += [*part.index[:end], *values, *part.index[end:]]  # result rows come last
        places = {n: number for n, number in enumerate(pointers, len(counts)) if isinstance(number, int)}
        return [*counts, *pointers], places

    def _splits(self, module: Any) -> Iterator[tuple[int, Any, int, dict[str, int]]]:
        """Yield the number of each dense operand in halves, the kernel that splits it, its programs, and options."""
        for n, p in enumerate(self.programs):
            for number, o in enumerate(p.operands):
                if o.halves:
                    parts = o.nrows * prod(axis.programs for axis in p.blocks_of(o))
                    yield number, getattr(module, names.split(o.name)), parts, self._options([n], self.machine)

    def _options(self, group: Sequence[int], machine: str) -> dict[str, int]:
        """Return Triton's launch options; a limit of registers only if all parts have the same."""
        first, registers = self.programs[group[0]].schedule, {self.programs[n].schedule.registers for n in group}
        limited = {"maxnreg": first.registers} if machine == "cuda" and registers - {0} and len(registers) == 1 else {}
        return {"num_warps": first.warps, "num_stages": first.stages, **limited, **FUSED}

    def assembly(self, target: str, arrays: Sequence[PartArrays], out_dtype: torch.dtype) -> str:
        """Return the PTX, or AMD's assembly, of all kernels for a named target; needs no GPU."""
        machine = gpu(target)[0]
        module, _ = cache.load(self.text_for(machine), self.path.parent, self.name)
        kernels = [
            (getattr(module, name), self._types(group, arrays, out_dtype), self._options(group, machine))
            for name, group in self.kernels
        ]
        kernels += [(k, ["*fp32", "*fp16", "*fp16", "*fp32"], options) for _, k, _, options in self._splits(module)]
        texts = [assembled(kernel, types, target, options).asm for kernel, types, options in kernels]
        return "\n".join(str(asm["ptx"] if "ptx" in asm else asm["amdgcn"]) for asm in texts)

    def _types(self, group: Sequence[int], arrays: Sequence[PartArrays], out_dtype: torch.dtype) -> list[str]:
        """Return the types of a kernel's arguments, in order."""
        fixed, numbers = self._arguments(group, arrays)
        named = [(p, name) for p in self.programs for name in p.view.packed or ("",)]
        stored = [TYPES.get(name, stored_dtype(p, self.dtype, self.backend)) for p, name in named]
        types = [stored[numbers[n]] if n in numbers else getattr(a, "dtype", None) for n, a in enumerate(fixed)]
        tables = tables_of([self.programs[n] for n in group])
        form_types = {"rounded": torch.bfloat16} | dict.fromkeys(HALVES[:2], torch.float16)
        types += [form_types.get(form, self.dtype) for _, form in tables]
        return [f"*{triton_type(t)}" if t else "i32" for t in (*types, out_dtype)]


@lru_cache
def _text(
    programs: tuple[TileProgram, ...],
    dtype: torch.dtype,
    backend: Backend,
    about: tuple[str, ...],
    fused: bool,
    machine: str,
) -> str:
    """Return the module of programs for a machine."""
    sums = accumulator(dtype)
    if not backend.gpu:
        text = header(programs, backend.name, about)
        if backend.loops:
            return numba_source.module_source(programs, text)
        return torch_source.module_source(programs, text, dtype)
    for program in programs:
        check_sizes(program)
    ported = tuple([_ported(program, machine) for program in programs])
    named, text = f"tl.{str(sums).removeprefix('torch.')}", header(ported, backend.name, about)
    return _triton_source(ported, named, sums != dtype, text, fused, popcount=machine == "cuda")


MOST_ELEMENTS = 1 << 20
"""Elements of the largest tensor that a Triton program may have."""


def check_sizes(p: TileProgram) -> None:
    """Raise `PlanError` where a tile of the program holds more elements than Triton's tensors may (`MOST_ELEMENTS`)."""
    for statement, _ in p.statements:
        if not isinstance(statement, Value | Gather | Zero | Product | Reduce):
            continue
        tiles = (statement.out, *(statement.inputs if isinstance(statement, Product) else ()))
        for tile in tiles:
            elements = prod([p.view.lanes if a == LANES else p.axis(a).block for a in tile.axes])
            if elements > MOST_ELEMENTS:
                raise PlanError(
                    f'part {p.number} ({p.format}) of "{p.equation}": {tile} would hold {elements:,} elements, and a '
                    f"program's tile at most {MOST_ELEMENTS:,}; give the schedule smaller blocks"
                )


def _by_threads(call: Call, most: int) -> Call:
    def run(values: Values, dense: Sequence[Tensor], out: Tensor) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(min(most, threads))
        try:
            call(values, dense, out)
        finally:
            torch.set_num_threads(threads)

    return run


def _ported(program: TileProgram, machine: str) -> TileProgram:
    """The program with dots of a precision that the machine has."""
    schedule = program.schedule
    precision = portable(schedule.precision, machine)
    if precision == schedule.precision:
        return program
    return replace(program, schedule=replace(schedule, precision=precision))


def stored_dtype(program: TileProgram, dtype: torch.dtype, backend: Backend) -> torch.dtype:
    """Return the dtype in which a part's values are stored, for operands of `dtype`."""
    if backend.widens:
        return accumulator(dtype)
    return torch.bfloat16 if dtype == torch.float32 and program.half else dtype


def _as_read(dense: Sequence[Tensor], every: Sequence[tuple[int, str]], splits: Mapping[int, Split]) -> list[Tensor]:
    """The tables that programs are given, each made once."""
    most = {n: split_float16.largest(dense[n]) for n, form in every if form == "most" and n not in splits}
    halves = {n: _split(dense[n], *split) for n, split in splits.items()}

    def read(n: int, form: str) -> Tensor:
        if form in HALVES:
            return halves[n][HALVES.index(form)] if n in halves else most[n]
        return dense[n].to(torch.bfloat16) if form else dense[n]

    return list(starmap(read, every))


def _split(values: Tensor, launch: Callable[[list[Any]], None], parts: int) -> InHalves:
    """Return the halves of values, and the largest magnitude of each part."""
    high, low = (torch.empty_like(values, dtype=torch.float16) for _ in range(2))
    most = torch.empty(parts, device=values.device)
    if values.numel():
        launch([values, high, low, most])
    return high, low, most
