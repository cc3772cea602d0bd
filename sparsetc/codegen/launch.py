"""Generated modules -> launches: argument lists built once, one grid a launch, ahead-of-time compilation.

In: tile programs, their packed arrays. Out: a callable of (values, dense tables, output). Building one imports the
generated file; calling it only fills in pointers, so that a call costs little, never waits and can be captured in a
CUDA graph.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparsetc.codegen import cache
from sparsetc.codegen import torch as torch_source
from sparsetc.codegen.header import header
from sparsetc.errors import DeviceError, PlanError
from sparsetc.formats import Packed
from sparsetc.ir.tile import TileProgram, check_sizes

if TYPE_CHECKING:
    from sparsetc.codegen.triton import Types

TORCH_CHUNK = 3 << 19
"""Elements of intermediate results a chunk of the torch programs may make: 16,000 fibers of rank 32 with two factors,
each result 2 MB (2 cores: fibers of 4,000 a chunk lost 1.6x to the calls' own time, 64,000 up to 1.25x to memory)."""

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}


@dataclass(frozen=True)
class BoundPart:
    """A tile program with the arrays it reads."""

    program: TileProgram
    packed: Packed
    slot: torch.Tensor | None = None

    @property
    def index_arrays(self) -> list[torch.Tensor]:
        """Arrays in the order of ``program.arrays``, without the values."""
        arrays = [self.packed.arrays[name] for name in self.program.view.arrays if name != "values"]
        return arrays

    def value_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """How its values are stored, those of the operands being of `dtype`."""
        return torch.bfloat16 if dtype == torch.float32 and self.program.half else dtype

    @property
    def programs(self) -> int:
        """Grid programs the part takes."""
        count = self.packed.items
        for axis in self.program.split:
            count *= axis.programs
        return count


class TorchLaunch:
    """Runs the torch programs, part after part."""

    def __init__(
        self, parts: Sequence[BoundPart], cache_dir: Path | None, name: str, about: Sequence[str] = ()
    ) -> None:
        programs, self.about = tuple(p.program for p in parts), tuple(about)
        self.source = torch_source.module_source(programs, header(programs, "torch", self.about))
        self.module, self.path = cache.load(self.source, cache_dir, name)
        self._take(parts)

    def _take(self, parts: Sequence[BoundPart]) -> None:
        self.parts = [(getattr(self.module, f"part_{p.program.number}"), p, chunks(p)) for p in parts]

    def on(self, parts: Sequence[BoundPart]) -> TorchLaunch:
        """The same programs on other arrays."""
        other = copy.copy(self)
        other._take(parts)
        return other

    def __call__(self, values: Sequence[torch.Tensor | None], dense: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Add every part into `out`, which the caller has zeroed where it must be; a pattern's values are None."""
        for (function, part, ranges), own in zip(self.parts, values, strict=True):
            slot = [part.slot] if part.slot is not None else []
            stored = [] if part.program.view.pattern else [own]
            function(ranges, *part.index_arrays, *stored, *slot, *dense, out)


def chunks(part: BoundPart) -> list[tuple[int, ...]]:
    """Ranges (i0, i1, b0, b1, n0, n1) of items, blocks and nonzeros, each small enough to stay in the cache."""
    packed, per = part.packed, torch_source.leaf_elements(part.program)
    if packed.items == 0:
        return []
    chunk = packed.view.chunk
    if chunk and packed.view.item:  # items of one size: as many whole ones as fit
        size = max(1, TORCH_CHUNK // (per[0] * chunk))
        ends = [min(i + size, packed.items) for i in range(0, packed.items, size)]
        return [
            (i, e, 0, 0, i * chunk, min(e * chunk, packed.stored)) for i, e in zip([0, *ends[:-1]], ends, strict=True)
        ]
    if chunk:
        size = max(1, TORCH_CHUNK // max(per))
        starts = list(range(0, packed.stored, size))
        return [(n, n + 1, 0, 0, at, min(at + size, packed.stored)) for n, at in enumerate(starts)]
    item_ptr = packed.arrays["item_ptr"].long()
    block_ptr = packed.arrays["block_ptr"].long() if packed.view.blocks else None
    if packed.view.bitmap:
        block_ptr = packed.arrays["value_ptr"].long()
    elif packed.view.sides:  # a tile is a block of its whole volume
        block_ptr = torch.arange(packed.stored // packed.view.volume + 1, device=item_ptr.device) * packed.view.volume
    leaf = block_ptr[item_ptr] if block_ptr is not None else item_ptr
    weight = leaf * per[0] + (item_ptr * per[1] if block_ptr is not None else 0)
    limits = torch.arange(TORCH_CHUNK, int(weight[-1]) + TORCH_CHUNK, TORCH_CHUNK, device=weight.device)
    ends = torch.unique(torch.searchsorted(weight, limits).clamp(1, packed.items)).tolist()
    found: list[tuple[int, ...]] = []
    for i0, i1 in zip([0, *ends[:-1]], ends, strict=True):
        b0, b1, n0, n1 = (int(v) for v in (item_ptr[i0], item_ptr[i1], leaf[i0], leaf[i1]))
        found.append((i0, i1, b0 if block_ptr is not None else 0, b1 if block_ptr is not None else 0, n0, n1))
    return found


class TritonLaunch:
    """Runs the Triton kernels: one launch for all parts when fused, else one a part."""

    def __init__(
        self,
        parts: Sequence[BoundPart],
        dtype: torch.dtype,
        fused: bool,
        cache_dir: Path | None,
        name: str,
        about: Sequence[str] = (),
    ) -> None:
        self.dtype, self.fused, self.name, self.about = dtype, fused, name, tuple(about)
        self.programs = tuple(p.program for p in parts)
        for program in self.programs:
            check_sizes(program)
        self.source = self.text_for(machine_of(a for p in parts for a in p.packed.arrays.values()))
        self.module, self.path = cache.load(self.source, cache_dir, name)
        self._take(parts)

    def text_for(self, machine: str) -> str:
        """The module that runs on a machine (`machine_of`), which `compile_for` compiles for its targets."""
        from sparsetc.codegen.triton import module_source  # a call on the CPU needs none of Triton's printers

        programs, types = made_for(machine, self.programs, types_of(self.dtype))
        return module_source(programs, types, header(programs, "triton", self.about), self.fused)

    def on(self, parts: Sequence[BoundPart]) -> TritonLaunch:
        """The same kernels on other arrays."""
        other = copy.copy(self)
        other._take(parts)
        return other

    def _take(self, parts: Sequence[BoundPart]) -> None:
        self.parts = tuple(parts)
        groups = [self.parts] if self.fused else [(p,) for p in self.parts]
        self.launches: list[tuple[Any, int, list[Any], list[tuple[int, int]], int, int]] = []
        for number, group in enumerate(groups):
            kernel = getattr(self.module, "kernel" if len(groups) == 1 else f"kernel_{number}")
            arguments, places = self._arguments(group)
            grid = sum(p.programs for p in group)
            self.launches.append((kernel, grid, arguments, places, group[0].program.warps, group[0].program.stages))

    def _arguments(self, group: Sequence[BoundPart]) -> tuple[list[Any], list[tuple[int, int]]]:
        """The fixed arguments (None where values go), and (place, part of the group) of the values that are stored."""
        counts: list[Any] = []
        pointers: list[Any] = []
        places: list[tuple[int, int]] = []
        for part in group:
            counts.append(part.programs)
            if part.program.view.chunk:
                counts.append(part.packed.stored)
        for number, part in enumerate(group):
            pointers += part.index_arrays
            if not part.program.view.pattern:
                places.append((len(counts) + len(pointers), number))
                pointers.append(None)
            if part.slot is not None:
                pointers.append(part.slot)
        return [*counts, *pointers], places

    def __call__(self, values: Sequence[torch.Tensor | None], dense: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Launch; returns before the kernels have run. A pattern's values are None."""
        if out.is_cuda and out.device.index != torch.cuda.current_device():
            with torch.cuda.device(out.device):  # Triton launches on the current device
                return self(values, dense, out)
        check_device(self.launches[0][0], out.device)
        for before, (kernel, grid, fixed, places, warps, stages) in enumerate(self.launches):
            arguments = fixed.copy()
            for place, number in places:
                arguments[place] = values[before + number]
            if grid:
                kernel[(grid,)](*arguments, *dense, out, num_warps=warps, num_stages=stages)

    def compile_for(self, target: str, out_dtype: torch.dtype) -> list[Any]:
        """Triton's compiled kernels for a named target; needs no GPU."""
        return [c for _, c in self._compiled(target, out_dtype)]

    def _compiled(self, target: str, out_dtype: torch.dtype) -> list[tuple[str, Any]]:
        groups = [self.parts] if self.fused else [(p,) for p in self.parts]
        names = ["kernel"] if len(groups) == 1 else [f"kernel_{number}" for number in range(len(groups))]

        def load(name: str, machine: str) -> Any:
            return getattr(cache.load(self.text_for(machine), self.path.parent, self.name)[0], name)

        compiled = []
        for name, group in zip(names, groups, strict=True):
            schedule, types = group[0].program, self._signature(group, out_dtype)
            compiled.append((name, assembled(partial(load, name), types, target, schedule.warps, schedule.stages)))
        return compiled

    def _signature(self, group: Sequence[BoundPart], out_dtype: torch.dtype) -> list[str]:
        """The types of a kernel's arguments, in order."""
        fixed, places = self._arguments(group)
        types = []
        own = {place: group[number].value_dtype(self.dtype) for place, number in places}
        for n, value in enumerate(fixed):
            if n in own:
                types.append(f"*{TRITON_TYPES[own[n]]}")
            else:
                types.append("i32" if isinstance(value, int) else f"*{TRITON_TYPES[value.dtype]}")
        return [
            *types,
            *[f"*{TRITON_TYPES[self.dtype]}"] * len(group[0].program.operands),
            f"*{TRITON_TYPES[out_dtype]}",
        ]


def assembled(load: Callable[[str], Any], types: Sequence[str], target: str, warps: int, stages: int) -> Any:
    """Triton's compiled kernel for a named target; needs no GPU.

    Args:
        load: from the machine of the target, ``cuda`` or ``hip``, to the kernel.
        types: of its arguments, in order, as Triton writes them; pointers are aligned to 16 bytes.
        target: a name of `TARGETS`.
        warps: of a program.
        stages: of its loops.

    Raises:
        PlanError: a target that is not known, or Triton's interpreter in place of its compiler.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target not in TARGETS:
        raise PlanError(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
    backend, arch, warp = TARGETS[target]
    kernel = load(backend)
    if is_interpreted(kernel):
        raise PlanError("compiling ahead of time needs TRITON_INTERPRET unset when triton is imported")
    aligned = [n for n, t in enumerate(types) if t.startswith("*")]
    attributes: dict[tuple[int, ...], list[list[Any]]] = {(n,): [["tt.divisibility", 16]] for n in aligned}
    signature = dict(zip(kernel.arg_names, types, strict=True))
    return triton.compile(
        ASTSource(kernel, signature, constexprs={}, attrs=attributes),
        target=GPUTarget(backend, arch, warp),
        options={"num_warps": warps, "num_stages": stages},
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


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """How sums of this dtype are kept: never narrower than float32, integers in 64 bits."""
    if dtype.is_complex or dtype == torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def types_of(dtype: torch.dtype) -> Types:
    """Triton's types for operands of this dtype."""
    from sparsetc.codegen.triton import Types

    kept = accumulator(dtype)
    return Types(str(kept).removeprefix("torch."), widen=kept != dtype)


def machine_of(arrays: Iterable[torch.Tensor]) -> str:
    """What programs that read these arrays are made for: ``hip`` where torch is AMD's, ``cuda``, or ``cpu``.

    On the CPU Triton interprets them, or they are only looked at.
    """
    if torch.version.hip is not None:
        return "hip"
    return "cuda" if any(a.is_cuda for a in arrays) else "cpu"


def made_for(machine: str, programs: tuple[TileProgram, ...], types: Types) -> tuple[tuple[TileProgram, ...], Types]:
    """Programs and types as a machine runs them: in a precision that it has, and counting bits by PTX on CUDA alone."""
    made = tuple(replace(p, precision=portable(p.precision, machine)) for p in programs)
    return made, replace(types, popcount=machine == "cuda")


def portable(precision: str, machine: str) -> str:
    """The precision a machine can run: tf32x3 does not compile for AMD, whose matrix units take float32 as it is."""
    return "ieee" if machine == "hip" and precision in ("tf32x3", "tf32") else precision


def is_amd(target: str) -> bool:
    """Whether a named target is AMD's; none that is not known is."""
    return target in TARGETS and TARGETS[target][0] == "hip"


def source_name(equation: str, backend: str) -> str:
    """A file name a reader recognises: the equation's letters, then the backend."""
    letters = "".join(c if c.isalnum() else "_" for c in equation.replace("->", "_to_").replace(",", "_"))
    return (
        f"{letters[:60] or 'scalar'}_{backend}"
        if len(letters) <= 60
        else f"{hashlib.sha256(letters.encode()).hexdigest()[:12]}_{backend}"
    )
