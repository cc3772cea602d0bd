"""The block path (BCB-SpTC): pairs of bitmap blocks, one program a block of the result, tensor cores inside.

In: a `Blocking`. Out: the result's values by place. Blocks of the result are made dense, some at a time, by the tile
program of a pair of blocks (`lower_pairs`), and read at the structural pattern: where the product of the patterns is
not 0. Where blocks are multiplied in halves (`in_halves`) there is a second program, of blocks as they are,
for the pattern, for values that halves are not exact enough for, and for those that cannot be looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from sparsetc.backends import TORCH, TRITON, Backend
from sparsetc.codegen.parts import PartArrays
from sparsetc.codegen.programs import Programs
from sparsetc.codegen.split_float16 import SplitOperands, TilePositions, split
from sparsetc.device.profile import DeviceProfile, gpu, has_halves, machine_of
from sparsetc.errors import PlanError
from sparsetc.ir.lower import Target, lower_pairs
from sparsetc.ir.nest.nest import PAIRED
from sparsetc.ir.nest.values import TYPES
from sparsetc.ir.plan import DOTS, F16X3, SIDE, Part, Plan, Schedule, Storage
from sparsetc.ir.program.cost import cost_of
from sparsetc.ir.program.resources import Statistics
from sparsetc.ir.program.tile import TileProgram
from sparsetc.join.blocking import BlockPairList, BlockWork, pairs_a_program
from sparsetc.join.join import add_up
from sparsetc.join.order import TASK_BYTES
from sparsetc.packing.base import index_dtype
from sparsetc.packing.words import WORDS
from sparsetc.products.problem import JoinPath, JoinProblem, Sizes, Terms
from sparsetc.support import cached_property
from sparsetc.tensor.coords import picked, sorted_keys
from sparsetc.tensor.dtypes import accumulator

SPREAD = 4
"""Positions of the unfolded result, for each position of its blocks, up to which places are found by unfolding."""
BUFFER_BYTES = 1 << 31
"""Bytes of dense blocks of the result made at a time."""
MOST_POSITIONS = 1 << 16
"""Positions of an operand's or the result's block that a program may hold in registers: 8 warps spill beyond."""


Read = tuple[Tensor, Tensor | None]
"""(n,) positions in a buffer, and the entries of the result that stand there; None when they are all, in order."""


class BlockPath(JoinPath):
    """The path of pairs of blocks: list of pairs, programs, and where results stand in their blocks.

    Attributes:
        room: most blocks of the result made at a time.
    """

    name = "bcb"
    first = 400  # that cut blocks, and find places in them
    # 16, one of them a wait (H200: 65 to 180 us of a call; `benchmarks/results/pair.json`), and .01 of the first.
    launches = 20

    @classmethod
    def terms(cls, p: JoinProblem, work: BlockWork | None = None) -> Terms | None:
        """Time of so many pairs, or of all; None where the blocks, or the pairs, do not fit."""
        work = work or p.blocking.work
        stored = bitmaps_of(p, work)
        if not _fits(p, work, stored) or work.pairs * TASK_BYTES > p.limit // 2:
            return None
        program = block_program(p, stored, p.backend, in_halves(p, stored))
        return block_terms(work, program, p.width, p.rated, p.profile)

    @classmethod
    def plan_of(cls, p: JoinProblem, work: BlockWork | None = None) -> Plan:
        """Both operands in blocks."""
        return Plan(cls.name, cls.parts(p, work or p.blocking.work), False)

    @staticmethod
    def parts(p: JoinProblem, work: BlockWork) -> tuple[Part, ...]:
        """Both operands in blocks, in the equation's order; sizes are known once they are packed."""
        blocking = p.blocking
        lengths = dict((*blocking.rows, *blocking.columns, *blocking.inner))
        stored = p.given(list(zip((blocking.x, blocking.y), bitmaps_of(p, work), strict=True)))
        return tuple(
            replace(
                part,
                format="bcb" if blocks.volume > 1 else "coo",  # one position: a word of coordinates and a value
                storage=Storage(params=(("bitmap", int(bitmap)), *((SIDE + c, lengths[c]) for c in part.label))),
            )
            for part, (blocks, bitmap) in zip(p.parts("bcb"), stored, strict=True)
        )

    def __init__(self, p: JoinProblem, plan: Plan) -> None:
        """Find the pairs, and make the kernel."""
        x, y = p.given([part.bitmap for part in plan.parts[:2]])
        self.problem = p
        self.bitmaps = (x, y)
        self.blocking = p.blocking
        self.dtype = p.dtype
        blocking = p.blocking
        self._rooms: dict[int, list[SplitOperands]] = {}
        r, c, k = blocking.extents
        if max(r * c, r * k, c * k) > MOST_POSITIONS:
            raise PlanError(
                f"blocks of {r} x {k} and {k} x {c} positions are too large for one program; name smaller sides"
            )
        what = f"the task list of {p.equation}, {blocking.pairs.tasks:,} pairs of blocks,"
        p.require(blocking.pairs.tasks * TASK_BYTES, what)
        self.tasks, buffer = BlockPairList.of(blocking), max(1, min(BUFFER_BYTES, p.limit // 4))
        self.room = max(1, buffer // (r * c * p.width))
        self.launch_of_halves = self._launch_of(p.backend, True) if in_halves(p, self.bitmaps) else None
        first = self.launch_of_halves or self.launch
        self.generated, (self.program,) = (first,), first.programs
        stored = zip(blocking.elements, self.program.view.pairs, strict=True)
        whole = sum(elements for elements, tiles in stored if not tiles.bitmap)
        p.require(whole * p.width, f"the blocks of {p.equation}")

    # -- programs ---------------------------------------------------------------------------------------------------
    @cached_property
    def launch(self) -> Programs:
        """The program of blocks as they are, made when first asked for."""
        return self._launch_of(self.problem.backend)

    def _launch_of(self, backend: Backend, halves: bool = False) -> Programs:
        rows = 2 * self.room  # runs that are cut take a block each, no more of them than there is room for
        program = block_program(self.problem, self.bitmaps, backend, halves, rows)
        return Programs([program], self.dtype, backend, self.problem.device, self.problem.settings.cache_dir)

    def ptx(self, target: str) -> str:
        """The kernel's assembly for a named target, whatever the backend; needs no GPU."""
        halves = in_halves(self.problem, self.bitmaps, gpu(target)[0])
        launch, number = self._launch_of(TRITON, halves), self.tasks.x.dtype
        (program,), types = launch.programs, {"pair_ptr": torch.int64, "pair_x": number, "pair_y": number}
        operands = zip(PAIRED, (self.blocking.x, self.blocking.y), program.view.pairs, strict=True)
        for name, blocks, tiles in operands:
            of_operand = {"value_ptr": blocks.first.dtype, "bits": WORDS[tiles.word], "values": self.dtype} | TYPES
            types |= {f"{name}_{array}": t for array, t in of_operand.items()} | {f"item_{name}": torch.int32}
        part_arrays = PartArrays(tuple(torch.empty(0, dtype=types[name]) for name in program.arrays), 0, 0)
        return launch.assembly(target, [part_arrays], accumulator(self.dtype))

    # -- places -----------------------------------------------------------------------------------------------------
    @cached_property
    def _lines(self) -> tuple[Tensor, Tensor]:
        """The line of blocks * side + line in the block, of the rows of the result, (rows,), and of its columns."""
        blocking, m = self.blocking, self.blocking.join
        r, c, k = blocking.extents
        lines = []
        for blocks, block_line, side, line in (
            (blocking.x, blocking.pairs.row, r, m.row),
            (blocking.y, blocking.pairs.column, c, m.column),
        ):
            block_lines = torch.add(blocks.place // k, block_line.rank.index_select(0, blocks.block), alpha=side)
            lines.append(block_lines.new_empty(line.count).index_copy_(0, line.rank, block_lines))
        return lines[0], lines[1]

    def places(self) -> Tensor:
        """(nnz,) the result's places, ascending; their positions among the blocks are kept for `run`."""
        m = self.blocking.join
        # On the CPU by the twin, so that a kernel is compiled for a GPU where there is none to launch it on.
        launch = self._launch_of(TORCH) if m.x_key.device.type == "cpu" else self.launch
        dtype = torch.float32 if launch.backend.widens else self.dtype  # ones are exact in every type
        x, y = (
            torch.ones(blocks.nnz, dtype=dtype, device=m.x_key.device) for blocks in (self.blocking.x, self.blocking.y)
        )
        blocks_made = self._products(launch, x, y)
        r, c, _ = self.blocking.extents
        if len(self._buffers) == 1 and m.rows * m.columns <= SPREAD * self.tasks.blocks * r * c:
            (blocks,) = blocks_made
            return self._unfolded(blocks.view(-1))
        return self._sorted(blocks_made)

    def _unfolded(self, products: Tensor) -> Tensor:
        """Return (nnz,) places in the dense product, without sorting, if it is little larger than its blocks."""
        r, c, _ = self.blocking.extents
        row, column = self._lines
        tasks = self.tasks
        columns = self.blocking.pairs.columns
        narrow = index_dtype(products.numel())
        block = torch.full((self.blocking.pairs.rows * columns,), -1, dtype=narrow, device=row.device)
        block.index_copy_(0, tasks.places, torch.arange(tasks.blocks, dtype=narrow, device=row.device))
        block = block.view(-1, columns).index_select(0, row // r).index_select(1, column // c)
        inside = torch.add((column % c).to(narrow), (row % r).to(narrow).unsqueeze(1), alpha=c)
        at = torch.add(inside, block, alpha=r * c).view(-1)
        if tasks.blocks == self.blocking.pairs.rows * columns:
            nonzero = products.index_select(0, at) != 0
        else:
            nonzero = (products.index_select(0, at.clamp(min=0)) != 0) & (at >= 0)
        places = torch.nonzero(nonzero).flatten()
        self.problem.check(places.numel())
        self._reads: list[Read] = [(at.index_select(0, places), None)]
        return places

    def _sorted(self, buffers: Iterable[Tensor]) -> Tensor:
        """(nnz,) the places in any number of buffers, found among blocks and sorted."""
        r, c, _ = self.blocking.extents
        positions, total = [self.blocking.join.x_key[:0]], 0
        for b, blocks in zip(self._buffers, buffers, strict=True):
            at = torch.nonzero(blocks.view(-1)).flatten() + b.start * r * c
            total += at.numel()
            self.problem.check(total, least=b is not self._buffers[-1])
            positions.append(at)
        at = torch.cat(positions)
        places, order = sorted_keys(self._place_of(at), self.blocking.join.rows * self.blocking.join.columns)
        narrow = index_dtype(2 * self.room * r * c)
        if len(self._buffers) == 1:
            self._reads = [(at.index_select(0, order).to(narrow), None)]
            return places
        slot = torch.empty_like(at).scatter_(0, order.long(), torch.arange(at.numel(), device=at.device))
        ends = [*(int(torch.searchsorted(at, b.start * r * c)) for b in self._buffers), at.numel()]
        self._reads = [
            ((at[done:end] - b.start * r * c).to(narrow), slot[done:end])
            for b, (done, end) in zip(self._buffers, pairwise(ends), strict=True)
        ]
        return places

    def _place_of(self, at: Tensor) -> Tensor:
        """(n,) the places of the result of positions in its blocks."""
        r, c, _ = self.blocking.extents
        pairs = self.blocking.pairs
        m = self.blocking.join
        row, column = (
            line.new_zeros(lines * side).index_copy_(0, line, torch.arange(line.numel(), device=line.device))
            for line, lines, side in zip(self._lines, (pairs.rows, pairs.columns), (r, c), strict=True)
        )
        block = at // (r * c)
        inside = at % (r * c)
        columns = max(1, pairs.columns)
        line, rank = self.tasks.places // columns * r, self.tasks.places % columns * c
        line, rank = line.index_select(0, block).add_(inside // c), rank.index_select(0, block).add_(inside % c)
        return column.index_select(0, rank).add_(row.index_select(0, line), alpha=m.columns)

    # -- numbers ----------------------------------------------------------------------------------------------------
    @cached_property
    def _buffers(self) -> list[BlockPairList]:
        """The pairs for each group of result blocks computed together, found once, so that calls wait for nothing."""
        return [self.tasks.some(start, self.room) for start in range(0, self.tasks.blocks, self.room)]

    def halves(self, x: Tensor, y: Tensor) -> SplitOperands | None:
        """Both operands in halves, from the values of all entries; None where blocks are read as they are."""
        if self.launch_of_halves is None:
            return None
        m, pool = self.blocking.join, self._room
        return split((picked(x, m.x_matched), picked(y, m.y_matched)), self._rows, pool.pop() if pool else None)

    @property
    def _room(self) -> list[SplitOperands]:
        """Halves of earlier calls on the current stream, free to be overwritten: their zeros serve again."""
        device = self.problem.device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return self._rooms.setdefault(stream, [])

    @cached_property
    def _rows(self) -> tuple[TilePositions, TilePositions]:
        """The positions of the values of both operands, by row of blocks; a row of y is a column of the result."""
        blocking, (r, c, k) = self.blocking, self.blocking.extents
        x, y = (
            blocks.at.to(index_dtype(stored))
            for blocks, stored in zip((blocking.x, blocking.y), blocking.elements, strict=True)
        )
        return (
            TilePositions(x, blocking.pairs.row.rank.int(), blocking.pairs.rows, r, k),
            TilePositions(y, blocking.pairs.column.rank.int(), blocking.pairs.columns, c, k),
        )

    @cached_property
    def _items(self) -> list[tuple[Tensor, Tensor]]:
        """The row of blocks of each operand that the programs of a buffer make blocks of the result for, by buffer."""
        columns = max(1, self.blocking.pairs.columns)
        places = [b.places if b.owner is None else b.places[b.owner] for b in self._buffers]
        return [((place // columns).int(), (place % columns).int()) for place in places]

    def run(self, x: Tensor, y: Tensor, halves: SplitOperands | None = None) -> Tensor:
        """Return the values of the result's entries by place, (nnz,), in the type that sums are kept in."""
        results = self._read(self._made(x, y, halves))
        if halves is not None:
            self._room.append(halves)
        return results

    def _read(self, buffers: Iterator[Tensor]) -> Tensor:
        """(nnz,) the results, read from the blocks."""
        if self._reads[0][1] is None:
            (blocks,) = buffers
            return blocks.view(-1).index_select(0, self._reads[0][0])
        out = torch.empty(
            sum(at.numel() for at, _ in self._reads), dtype=accumulator(self.dtype), device=self.problem.device
        )
        for blocks, (at, slot) in zip(buffers, self._reads, strict=True):
            assert slot is not None
            out.index_copy_(0, slot, blocks.view(-1).index_select(0, at))
        return out

    def _made(self, x: Tensor, y: Tensor, halves: SplitOperands | None) -> Iterator[Tensor]:
        """Blocks of the result, made of the values of all entries or of their halves."""
        if halves is not None:
            assert self.launch_of_halves is not None
            values = [array for operand in halves.arrays for array in operand]
            return self._multiplied(self.launch_of_halves, [[*items, *values] for items in self._items])
        m = self.blocking.join
        # Triton reads the operands' own type, torch the one that sums are kept in.
        dtype = accumulator(self.dtype) if self.launch.backend.widens else self.dtype
        return self._products(self.launch, picked(x, m.x_matched).to(dtype), picked(y, m.y_matched).to(dtype))

    def _products(self, launch: Programs, x: Tensor, y: Tensor) -> Iterator[Tensor]:
        """Blocks of the result, made of the values of the matched entries as they are."""
        operands = zip((self.blocking.x, self.blocking.y), launch.programs[0].view.pairs, (x, y), strict=True)
        arrays = [
            a
            for blocks, tiles, values in operands
            for a in (blocks.tile_arrays(values, tiles.word) if tiles.bitmap else [blocks.whole(values)])
        ]
        return self._multiplied(launch, [arrays] * len(self._buffers))

    def _multiplied(self, launch: Programs, arrays: list[list[Tensor]]) -> Iterator[Tensor]:
        """Blocks of the result, some at a time; `arrays` has those of each buffer, without the list of pairs."""
        for b, arrays_of_operands in zip(self._buffers, arrays, strict=True):
            sums = launch.blocks([b.ptr, b.x, b.y, *arrays_of_operands])
            if b.owner is not None:
                sums = add_up(sums, b.owner, b.blocks, self.problem.settings.deterministic)
            yield sums

    @property
    def sizes(self) -> Sizes:
        """The nonzeros of the blocks, and bytes of words and bitmaps, of x and of y."""
        return tuple((blocks.nnz, blocks.nbytes) for blocks in (self.blocking.x, self.blocking.y))

    @property
    def nbytes(self) -> int:
        """Bytes of the list of pairs, and of halves that are kept to be overwritten."""
        return self.tasks.nbytes + sum(halves.nbytes for room in self._rooms.values() for halves in room)


Bitmaps = tuple[bool, bool]
"""For each operand, True if its blocks are read as bitmaps and packed values, False if whole."""
WHOLE: Bitmaps = (False, False)
NARROW = 2**31 - 2**16
"""Most stored values whose positions, and those of a block's padding behind them, fit in 32 bits."""


def in_halves(p: JoinProblem, bitmaps: Bitmaps, machine: str | None = None) -> bool:
    """Return True where blocks are multiplied in halves of 16 bits, on the device's machine or a named one.

    They are where float32 at ``highest`` is read whole by Triton's kernel and contracted by a dot.
    """
    wanted = p.dtype == torch.float32 and p.precision == "highest" and bitmaps == WHOLE and p.blocking.extents[2] > 1
    kernel = machine is not None or p.backend.tensor_cores
    return wanted and kernel and has_halves(machine or machine_of(p.device))


def block_program(p: JoinProblem, bitmaps: Bitmaps, backend: Backend, halves: bool, rows: int = 1) -> TileProgram:
    """Return the program of one work item: a block of the result, or some of its pairs.

    Floats are contracted by a dot, integers by multiplications and additions.

    Args:
        p: operands in blocks, their dtype and precision.
        bitmaps: whether a dot reads each operand's blocks as bits and packed values.
        backend: of the program; one that takes whole axes reads whole blocks and pads nothing.
        halves: whether blocks are in halves, where `in_halves` allows it.
        rows: most blocks of the result that are made at a time.
    """
    blocking, (r, c, k) = p.blocking, p.blocking.extents
    at_once, floats = backend.at_once, p.dtype.is_floating_point or p.dtype.is_complex
    # Over one inner position there is nothing to add up: a dot would multiply its padding fifteen times of sixteen.
    dot = floats and (at_once or k > 1)
    how = DOTS[p.precision] if p.dtype == torch.float32 else "ieee"
    stages = Schedule.stages
    if halves:
        how = F16X3
        stages = 2  # a third took longer on an H200
    warps = 4 if r * c > 64 else 1
    if r * c > 64 * 64:
        warps = 8
    schedule = Schedule(warps, dot=dot, precision=how, stages=stages)
    return lower_pairs(
        p.equation,
        (blocking.rows, blocking.columns, blocking.inner),
        schedule,
        Target(rows=rows, index64=max(blocking.elements) > NARROW, at_once=at_once),
        bitmaps=bitmaps if dot and not at_once else WHOLE,
    )


WORD = 32
"""Bits of a word of a bitmap."""


def block_terms(work: BlockWork, program: TileProgram, width: int, precision: str, profile: DeviceProfile) -> Terms:
    """Return the seconds of pairs of blocks: scatter, multiply, gather."""
    counts = Statistics(work.made, work.pairs, sum(work.elements), work.nnz, width)
    moved, read, flops = cost_of(program).work(counts, profile)
    far = sum(work.elements) * width > profile.near_bytes
    read_rate = profile.far_blocks if far else profile.near_blocks
    rate = profile.block_dot.get(program.schedule.precision, profile.block_dot[precision])
    chain = min(pairs_a_program(work.pairs), work.pairs // max(1, work.made)) * profile.pair_turn
    return {
        "calls": BlockPath.launches * profile.call,
        "pairs of blocks": max(flops / rate, read / read_rate, chain),
        "bytes moved": moved / profile.moved,
    }


def bitmaps_of(p: JoinProblem, work: BlockWork) -> Bitmaps:
    """Return which operands' blocks are read as bitmaps: as asked, else as few as the memory limit has room for.

    They are whole where that takes a quarter of the limit or less; else the larger operand's are bitmaps, or both.

    Blocks that do not fill a word of bits are read whole.
    """
    x, y = p.given(p.option("storage"))
    bitmaps = (x == "bitmap", y == "bitmap")
    if x == y == "auto" and not p.backend.at_once and p.dtype.is_floating_point:
        larger = work.elements[0] >= work.elements[1]
        bitmaps = next((b for b in (WHOLE, (larger, not larger)) if _fits(p, work, b)), (True, True))
    return bitmaps[0] and p.blocking.x.volume >= WORD, bitmaps[1] and p.blocking.y.volume >= WORD


def _fits(p: JoinProblem, work: BlockWork, bitmaps: Bitmaps) -> bool:
    """Return True if what is read whole takes a quarter of the memory limit or less."""
    whole = sum(n for n, bitmap in zip(work.elements, bitmaps, strict=True) if not bitmap)
    return whole * p.width <= p.limit // 4
