"""Generated modules of pairs of tiles -> launches, and their assembly.

In: a tile program over a task list, and the arrays its view names. Out: blocks of the result, one an item, in the type
that sums are kept in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from sparsetc.codegen import cache
from sparsetc.codegen import torch as torch_source
from sparsetc.codegen import triton as triton_source
from sparsetc.codegen.header import header
from sparsetc.codegen.launch import TRITON_TYPES, accumulator, assembled, check_device, made_for, source_name, types_of
from sparsetc.formats.bits import WORDS
from sparsetc.ir.tile import TileProgram
from sparsetc.ir.view import PAIRED

TORCH_CHUNK = 1 << 23
"""Elements of the products that the torch programs make at a time."""


class PairLaunch(Protocol):
    """A generated program over pairs, ready to be called."""

    program: TileProgram
    source: str
    path: Path

    def __call__(self, arrays: Sequence[torch.Tensor], pairs: tuple[int, int]) -> torch.Tensor:
        """(items, elements of a block of the result).

        Args:
            arrays: those of the program's view, in its order.
            pairs: the ends of the range of pairs of all items, which are on the device in ``arrays[0]``.
        """
        ...


class TritonPairs:
    """The Triton kernel."""

    def __init__(self, program: TileProgram, dtype: torch.dtype, cache_dir: Path | None, machine: str) -> None:
        """Generate the kernel for a machine, as `device.targets.machine_of` names them."""
        self.program, self.dtype = program, dtype
        self.source, self.module, self.path = self._load(machine, cache_dir)

    def text_for(self, machine: str) -> str:
        """The module that runs on a machine, which `assembly` compiles for its targets."""
        programs, types = made_for(machine, (self.program,), types_of(self.dtype))
        return triton_source.module_source(programs, types, header(programs, "triton"), fused=True)

    def _load(self, machine: str, cache_dir: Path | None) -> tuple[str, Any, Path]:
        text = self.text_for(machine)
        return text, *cache.load(text, cache_dir, source_name(self.program.equation, "triton"))

    def __call__(self, arrays: Sequence[torch.Tensor], pairs: tuple[int, int]) -> torch.Tensor:
        """Launch; returns before the kernel has run."""
        check_device(self.module.kernel, arrays[0].device)
        p, items = self.program, arrays[0].numel() - 1
        out = torch.empty((items, p.width), dtype=accumulator(self.dtype), device=arrays[0].device)
        # Triton launches on the current device.
        with torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext():
            self.module.kernel[(items,)](items, *arrays, out, num_warps=p.warps, num_stages=p.stages)
        return out

    def assembly(self, target: str, number: torch.dtype, *first: torch.dtype) -> str:
        """PTX, or AMD's assembly, for a named target.

        Args:
            target: as in ``sm_90``.
            number: type of the numbers of tiles in the task list.
            first: of each operand, the type of the places where the values of bitmap tiles begin.
        """

        def load(machine: str) -> Any:
            return self._load(machine, self.path.parent)[1].kernel

        p, types = self.program, {"pair_ptr": torch.int64, "pair_x": number, "pair_y": number}
        for name, begins, tiles in zip(PAIRED, first, p.view.pairs, strict=True):
            own = {"value_ptr": begins, "bits": WORDS[tiles.word], "values": self.dtype}
            own |= {"high_values": torch.float16, "low_values": torch.float16, "scales": torch.float32}
            types |= {f"{name}_{array}": t for array, t in own.items()} | {f"item_{name}": torch.int32}
        given = [*(types[name] for name in p.arrays), accumulator(self.dtype)]
        signature = ["i32", *(f"*{TRITON_TYPES[t]}" for t in given)]
        asm = assembled(load, signature, target, p.warps, p.stages).asm
        return asm["ptx"] if "ptx" in asm else asm["amdgcn"]


class TorchPairs:
    """The torch program, some pairs at a time."""

    def __init__(self, program: TileProgram, cache_dir: Path | None) -> None:
        self.program = program
        self.source = torch_source.module_source((program,), header((program,), "torch"))
        module, self.path = cache.load(self.source, cache_dir, source_name(program.equation, "torch"))
        self.function = getattr(module, f"part_{program.number}")
        made = program.width + sum(tiles.volume for tiles in program.view.pairs)
        self.chunk = max(1, TORCH_CHUNK // made)

    def __call__(self, arrays: Sequence[torch.Tensor], pairs: tuple[int, int]) -> torch.Tensor:
        """Run."""
        first, last = pairs
        out = arrays[-1].new_zeros((arrays[0].numel() - 1, self.program.width))
        chunks = [(n, min(n + self.chunk, last)) for n in range(first, last, self.chunk)]
        self.function(chunks, *arrays, out)
        return out
