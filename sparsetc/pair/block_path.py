"""The block path (BCB-SpTC): pairs of bitmap blocks, one program a block of the result, tensor cores inside.

In: a `Cut`. Out: the result's values by place. Blocks of the result are made dense, some at a time, by the tile program
of a pair of blocks (`ir.lower_pairs`), and read at the structural pattern: where the product of the patterns is not 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from sparsetc.codegen.launch_pairs import PairLaunch, TorchPairs, TritonPairs
from sparsetc.errors import PlanError
from sparsetc.formats.base import index_dtype
from sparsetc.ir.tile import TileProgram
from sparsetc.pair.blocks import Buffer, TaskList
from sparsetc.pair.cut import Bitmaps, Cut
from sparsetc.pair.sums import add_up, kept_dtype
from sparsetc.pair.symbolic import TASK_BYTES, Budget

MOST_POSITIONS = 1 << 16
"""Positions of an operand's or the result's block that a program may hold in registers: 8 warps spill beyond."""


@dataclass(frozen=True)
class Read:
    """What a buffer holds of the result."""

    at: torch.Tensor
    """(n,) places in the buffer."""
    slot: torch.Tensor | None
    """(n,) entries of the result that they are; None when they are all, in order."""


class BlockPath:
    """Pairs, tables of places, and the launch."""

    name = "bcb"

    def __init__(
        self,
        cut: Cut,
        equation: str,
        dtype: torch.dtype,
        backend: str,
        precision: str,
        bitmaps: Bitmaps,
        budget: Budget,
    ) -> None:
        self.cut, self.equation, self.dtype, self.backend, self.budget = cut, equation, dtype, backend, budget
        self.precision, self.bitmaps = precision, bitmaps
        r, c, k = cut.extents
        if max(r * c, r * k, c * k) > MOST_POSITIONS:
            raise PlanError(
                f"blocks of {r} x {k} and {k} x {c} positions are too large for one program; name smaller sides"
            )
        what = f"the task list of {equation}, {cut.pairs.tasks:,} pairs of blocks,"
        budget.settings.check_memory(cut.pairs.tasks * TASK_BYTES, budget.device, what)
        width = kept_dtype(dtype).itemsize
        self.tasks = TaskList.of(cut, r * c * width, budget.limit)
        self.launch = self._launch_of(backend)
        self.program, self.source, self.path = self.launch.program, self.launch.source, self.launch.path
        stored = zip(cut.elements, self.program.view.pairs, strict=True)
        whole = sum(elements for elements, tiles in stored if not tiles.bitmap)
        budget.settings.check_memory(whole * width, budget.device, f"the blocks of {equation}")

    # -- programs ---------------------------------------------------------------------------------------------------
    def _program_of(self, backend: str) -> TileProgram:
        rows = 2 * self.tasks.room  # runs that are cut take a block each, no more of them than there is room for
        return self.cut.program(self.equation, self.dtype, backend, self.precision, self.bitmaps, rows)

    def _launch_of(self, backend: str) -> PairLaunch:
        folder = self.budget.settings.cache_dir
        if backend == "torch":
            return TorchPairs(self._program_of(backend), folder)
        return TritonPairs(self._program_of(backend), self.dtype, folder, self.budget.device.type == "cuda")

    def ptx(self, target: str) -> str:
        """The kernel's assembly for a named target, whatever the backend; needs no GPU."""
        launch = self.launch if isinstance(self.launch, TritonPairs) else self._launch_of("triton")
        assert isinstance(launch, TritonPairs)
        return launch.assembly(target, self.tasks.x.dtype, self.cut.x.first.dtype, self.cut.y.first.dtype)

    # -- places -----------------------------------------------------------------------------------------------------
    @cached_property
    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The row of the result of each (row of blocks, position in it), and likewise its columns; -1 where none."""
        cut, m = self.cut, self.cut.matching
        r, c, k = cut.extents
        row = m.ends.new_full((cut.pairs.rows * r,), -1)
        block, place = cut.x.dense // cut.x.volume, cut.x.dense % cut.x.volume
        row_of_block = cut.pairs.row  # every block has an entry that meets one of y's, so all are live, in order
        row[row_of_block[block] * r + place // k] = m.row[cut.x.positions]
        column = m.ends.new_full((cut.pairs.columns * c,), -1)
        block, place = cut.y.dense // cut.y.volume, cut.y.dense % cut.y.volume
        column_of_block = torch.empty_like(self.cut.y_block)
        column_of_block[self.cut.y_block] = cut.pairs.column
        column[column_of_block[block] * c + place // k] = m.column[cut.y.positions]
        return row, column

    def places(self) -> torch.Tensor:
        """(nnz,) the result's places, ascending; where each stands among the blocks is kept for `run`."""
        m = self.cut.matching
        # On the CPU by the twin, so that a kernel is compiled for a GPU where there is none to launch it on.
        launch = self._launch_of("torch") if m.ends.device.type == "cpu" else self.launch
        dtype = self.dtype if isinstance(launch, TritonPairs) else torch.float32  # ones are exact in every type
        x = torch.ones(m.x_entry.numel(), dtype=dtype, device=m.ends.device)
        y = torch.ones(m.y_entry.numel(), dtype=dtype, device=m.ends.device)
        found, total = [], 0
        r, c, _ = self.cut.extents
        for start, stop, made in self._products(launch, x, y):
            at = torch.nonzero(made.view(-1)).flatten() + start * r * c
            total += at.numel()
            self.budget.check(total, least=stop < self.tasks.blocks)
            found.append(at)
        at = torch.cat(found) if found else m.ends.new_zeros(0)
        place, order = torch.sort(self._place_of(at))
        self._reads = self._reads_of(at, order)
        return place

    def _reads_of(self, at: torch.Tensor, order: torch.Tensor) -> list[Read]:
        """By buffer, where among its blocks the results stand. Of one buffer they are read in their own order."""
        r, c, _ = self.cut.extents
        narrow = index_dtype(2 * self.tasks.room * r * c)
        if len(self._buffers) == 1:
            return [Read(at[order].to(narrow), None)]
        slot = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        ends = [0, *(int(torch.searchsorted(at, b.stop * r * c)) for b in self._buffers)]
        return [
            Read((at[done:end] - b.start * r * c).to(narrow), slot[done:end])
            for b, done, end in zip(self._buffers, ends, ends[1:], strict=False)
        ]

    def _place_of(self, at: torch.Tensor) -> torch.Tensor:
        r, c, _ = self.cut.extents
        row, column = self._tables
        block = self.tasks.places[at // (r * c)]
        inside = at % (r * c)
        columns = max(1, self.cut.pairs.columns)
        rows = row[block // columns * r + inside // c]
        return rows * self.cut.matching.columns + column[block % columns * c + inside % c]

    # -- numbers ----------------------------------------------------------------------------------------------------
    @cached_property
    def _buffers(self) -> list[Buffer]:
        """What is made at a time; found once, so that calls wait for nothing."""
        return self.tasks.buffers()

    def run(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(nnz of the result,) by place, of values of the live entries, in the type that sums are kept in."""
        out = x.new_empty(sum(read.at.numel() for read in self._reads))
        # Triton reads the operands' own type, torch the one that sums are kept in.
        dtype = self.dtype if isinstance(self.launch, TritonPairs) else kept_dtype(self.dtype)
        made = self._products(self.launch, x.to(dtype), y.to(dtype))
        for (_, _, blocks), read in zip(made, self._reads, strict=True):
            if read.slot is None:
                return blocks.view(-1).index_select(0, read.at)
            out.index_copy_(0, read.slot, blocks.view(-1).index_select(0, read.at))
        return out

    def _products(
        self, launch: PairLaunch, x: torch.Tensor, y: torch.Tensor
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(first block, end, dense blocks) of the result, some at a time."""
        operands = zip((self.cut.x, self.cut.y), launch.program.view.pairs, (x, y), strict=True)
        arrays = [
            a
            for blocks, tiles, values in operands
            for a in (blocks.tile_arrays(values, tiles.word) if tiles.bitmap else [blocks.whole(values)])
        ]
        for b in self._buffers:
            made = launch([b.ptr, self.tasks.x, self.tasks.y, *arrays], (b.first, b.last))
            if b.owner is not None:
                made = add_up(made, b.owner, b.stop - b.start, self.budget.settings.deterministic)
            yield b.start, b.stop, made

    @property
    def nbytes(self) -> int:
        """Bytes of the task list."""
        return self.tasks.nbytes
