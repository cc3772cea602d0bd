"""Generated modules of pairs of tiles -> launches, and their assembly.

In: a tile program over a task list, and the arrays its view names. Out: blocks of the result, one an item, in the type
that sums are kept in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sparsetc.codegen.launch import PartArrays, TorchPrograms, TritonPrograms, accumulator, source_name
from sparsetc.codegen.torch_rows import CHUNK, chunks
from sparsetc.ir.nest.nest import PAIRED
from sparsetc.ir.program.tile import TileProgram
from sparsetc.packing.words import WORDS


class TritonPairs(TritonPrograms):
    """The Triton kernel."""

    def __init__(self, program: TileProgram, dtype: torch.dtype, cache_dir: Path | None, machine: str) -> None:
        """Generate the kernel for a machine, as `device.targets.machine_of` names them."""
        super().__init__([program], dtype, True, machine, cache_dir, source_name(program.equation, "triton"))
        self.program = program

    def __call__(self, arrays: Sequence[torch.Tensor], pairs: tuple[int, int]) -> torch.Tensor:
        """(items, elements of a block of the result); returns before the kernel has run.

        Args:
            arrays: those of the program's view, in its order.
            pairs: the ends of the range of pairs of all items, which are on the device in ``arrays[0]``.
        """
        items = arrays[0].numel() - 1
        out = torch.empty((items, self.program.width), dtype=accumulator(self.dtype), device=arrays[0].device)
        self.bind([PartArrays(tuple(arrays), items, 0)])([], [], out)
        return out

    def assembly_of(self, target: str, number: torch.dtype, *first: torch.dtype) -> str:
        """PTX, or AMD's assembly, for a named target.

        Args:
            target: as in ``sm_90``.
            number: type of the numbers of tiles in the task list.
            first: of each operand, the type of the places where the values of bitmap tiles begin.
        """
        p, types = self.program, {"pair_ptr": torch.int64, "pair_x": number, "pair_y": number}
        for name, begins, tiles in zip(PAIRED, first, p.view.pairs, strict=True):
            own = {"value_ptr": begins, "bits": WORDS[tiles.word], "values": self.dtype}
            own |= {"high_values": torch.float16, "low_values": torch.float16, "scales": torch.float32}
            types |= {f"{name}_{array}": t for array, t in own.items()} | {f"item_{name}": torch.int32}
        given = PartArrays(tuple(torch.empty(0, dtype=types[name]) for name in p.arrays), 0, 0)
        return self.assembly(target, [given], accumulator(self.dtype))


class TorchPairs(TorchPrograms):
    """The torch program, some items at a time."""

    def __init__(self, program: TileProgram, dtype: torch.dtype, cache_dir: Path | None) -> None:
        super().__init__([program], dtype, cache_dir, source_name(program.equation, "torch"))
        self.program, self.chunk = program, CHUNK

    def __call__(self, arrays: Sequence[torch.Tensor], pairs: tuple[int, int]) -> torch.Tensor:
        """(items, elements of a block of the result), of what `TritonPairs` takes."""
        items = arrays[0].numel() - 1
        out = arrays[-1].new_empty((items, self.program.width))
        ranges = chunks(self.program, PartArrays(tuple(arrays), items, 0), self.chunk)
        getattr(self.module, f"part_{self.program.number}")(ranges, *arrays, out)
        return out


PairLaunch = TorchPairs | TritonPairs
"""A generated program over pairs, ready to be called."""
