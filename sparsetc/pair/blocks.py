"""The block path (BCB-SpTC): pairs of bitmap blocks, one program a block of the result, tensor cores inside.

In: a `Matching` of entries. Out: the result's values by place. Operands are cut into blocks (`formats.bcb`) whose sides
are chosen for the equation: the free positions of a block make the rows, or columns, of a matrix product of about
64 x 64, the contracted ones its inner side, of about 32 (H200, third order, one contracted mode: 64 x 32 . 32 x 64 beat
an inner side of 16 by 1.05 to 1.35 times in tf32, and free sides of 16 by 3 times). Blocks of batch letters have side
1, so a pair of blocks is one matrix product whatever the equation.

Pairs of blocks are found as pairs of nonzeros are, by a `Matching` of the blocks' coordinates. Blocks of the result
are made dense, some at a time, and read at the structural pattern: where the product of the patterns is not 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from sparsetc.codegen import cache
from sparsetc.codegen.launch import TARGETS, TRITON_TYPES, portable, source_name
from sparsetc.errors import PlanError
from sparsetc.formats.base import index_dtype
from sparsetc.formats.bcb import Bcb, Blocks
from sparsetc.ir.view import tiles_along
from sparsetc.pair.equation import Side, prepared
from sparsetc.pair.source import BlockProgram, torch_source, triton_source, word_bits
from sparsetc.pair.sums import add_up, kept_dtype
from sparsetc.pair.symbolic import TASK_BYTES, Budget, Matching

FREE, INNER = 64, 32
"""Positions that the free, and the contracted, letters of a block make, where the modes are that long."""
PAIRS_A_PROGRAM = 256
"""Most pairs of one program; a block of the result with more is made by several and added up."""
MOST_POSITIONS = 1 << 16
"""Positions of an operand's or the result's block that a program may hold in registers: 8 warps spill beyond."""
TORCH_CHUNK = 1 << 23
"""Elements of the products that the torch twin makes at a time."""
BUFFER_BYTES = 1 << 28
"""Bytes of dense blocks of the result made at a time."""


def sides_for(sizes: tuple[int, ...], positions: int) -> tuple[int, ...]:
    """Powers of two, as equal as the sizes allow, that multiply to `positions` or to what the sizes fill."""
    full = [1 << max(n - 1, 0).bit_length() for n in sizes]
    sides = [1] * len(sizes)
    while prod(sides) < positions:
        room = [m for m in range(len(sides)) if sides[m] < full[m]]
        if not room:
            break
        sides[min(room, key=lambda m: (sides[m], -m))] *= 2
    return tuple(sides)


@dataclass(frozen=True)
class Cut:
    """Both operands cut into blocks, and the blocks matched. Counts only: pairs are made by `BlockPath`."""

    matching: Matching
    x: Blocks
    y: Blocks
    pairs: Matching
    """Of the blocks' coordinates."""
    y_block: torch.Tensor
    """(y blocks,) the block of `y` that each of the matching's is."""
    rows: tuple[tuple[str, int], ...]
    columns: tuple[tuple[str, int], ...]
    inner: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, m: Matching, sides: dict[str, int] | None = None) -> Cut:
        """Cut the entries that meet anything; `sides` by letter, or those that suit the equation."""
        roles, sizes = m.roles, dict(zip((*m.x.letters, *m.y.letters), (*m.x.sizes, *m.y.sizes), strict=True))
        side = dict.fromkeys(roles.batch, 1)
        for letters, positions in ((roles.free_x, FREE), (roles.free_y, FREE), (roles.contracted, INNER)):
            side |= dict(zip(letters, sides_for(tuple(sizes[c] for c in letters), positions), strict=True))
        side |= {c: n for c, n in (sides or {}).items() if c not in roles.batch}

        def pack(operand: Side, entry: torch.Tensor, letters: tuple[str, ...]) -> Blocks:
            coords = operand.rows(letters)[:, entry]
            return Bcb().pack(coords, operand.extents(letters), [side[c] for c in letters])

        y_letters = (*roles.batch, *roles.free_y, *roles.contracted)
        x, y = pack(m.x, m.x_entry, roles.x), pack(m.y, m.y_entry, y_letters)
        grid = {c: tiles_along([sizes[c]], [side[c]])[0] for c in side}
        x_side = prepared(roles.x, x.coordinates(), grid, roles.x)
        y_side = prepared(y_letters, y.coordinates(), grid, roles.y)
        pairs = Matching.of(x_side, y_side, roles)
        y_block = pairs.y_entry if y_side.source is None else y_side.source[pairs.y_entry]

        def axis(letters: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
            return tuple((c, side[c]) for c in letters)

        return cls(m, x, y, pairs, y_block, axis(roles.kept_x), axis(roles.free_y), axis(roles.contracted))

    @property
    def extents(self) -> tuple[int, int, int]:
        """Rows, columns and inner positions of a block."""
        found = [prod(side for _, side in axis) for axis in (self.rows, self.columns, self.inner)]
        return found[0], found[1], found[2]

    @property
    def flops(self) -> int:
        """Multiplications and additions of all pairs, padding included."""
        return 2 * self.pairs.tasks * prod(self.extents)

    @property
    def elements(self) -> int:
        """Elements of the whole blocks of both operands."""
        return self.x.blocks * self.x.volume + self.y.blocks * self.y.volume


@dataclass(frozen=True)
class Buffer:
    """Blocks of the result that are made together, dense."""

    start: int
    stop: int
    first: int
    """Their pairs: ``first .. last`` of the task list."""
    last: int
    ptr: torch.Tensor
    """(programs + 1,) int64: the range of pairs of each."""
    owner: torch.Tensor | None
    """(programs,) the block that each is a share of, counted from `start`; None when it is one each."""


class BlockPath:
    """Pairs, tables of places, and the launch."""

    name = "bcb"

    def __init__(
        self, cut: Cut, equation: str, dtype: torch.dtype, backend: str, precision: str, storage: str, budget: Budget
    ) -> None:
        self.cut, self.dtype, self.backend, self.budget = cut, dtype, backend, budget
        r, c, k = cut.extents
        if max(r * c, r * k, c * k) > MOST_POSITIONS:
            raise PlanError(
                f"blocks of {r} x {k} and {k} x {c} positions are too large for one program; name smaller sides"
            )
        what = f"the task list of {equation}, {cut.pairs.tasks:,} pairs of blocks,"
        budget.settings.check_memory(cut.pairs.tasks * TASK_BYTES, budget.device, what)
        self._make_pairs()
        bitmap = storage == "bitmap" and backend == "triton" and _has_dot(dtype)
        if not bitmap:
            nbytes = cut.elements * kept_dtype(dtype).itemsize
            budget.settings.check_memory(nbytes, budget.device, f"the blocks of {equation}")
        small = 2**31 - 2**16
        self.program = BlockProgram(
            equation,
            cut.rows,
            cut.columns,
            cut.inner,
            str(kept_dtype(dtype)).removeprefix("torch."),
            _has_dot(dtype),
            _precision(precision, dtype),
            bitmap,
            (
                cut.x.blocks * cut.x.volume > small,
                cut.y.blocks * cut.y.volume > small,
                2 * self._blocks_a_buffer * r * c > small,
            ),
            8 if r * c > 64 * 64 else 4,
        )
        self._load()

    # -- pairs ------------------------------------------------------------------------------------------------------
    def _make_pairs(self) -> None:
        """Expand the task list, sorted by block of the result."""
        m = self.cut.pairs
        chunk = max(1, m.tasks)
        found = list(m.chunks(chunk))
        device = m.ends.device
        empty = torch.zeros(0, dtype=torch.long, device=device)
        p, q, place = found[0] if found else (empty, empty, empty)
        order = torch.argsort(place, stable=True)
        self.blocks, counts = torch.unique_consecutive(place[order], return_counts=True)
        """(blocks of the result,) their places among the blocks' rows and columns, ascending."""
        narrow = index_dtype(m.tasks)
        self.pair_x = m.x_entry[p[order]].to(narrow)
        self.pair_y = self.cut.y_block[q[order]].to(narrow)
        self.ptr = torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])
        self.owner = torch.repeat_interleave(torch.arange(counts.numel(), device=device), counts, output_size=m.tasks)

    @property
    def _blocks_a_buffer(self) -> int:
        r, c, _ = self.cut.extents
        room = min(BUFFER_BYTES, max(1, self.budget.limit // 4))
        return max(1, room // (r * c * kept_dtype(self.dtype).itemsize))

    @cached_property
    def _buffers(self) -> list[Buffer]:
        """What is made at a time, with its share of the task list; found once, so that calls wait for nothing."""
        size, count = self._blocks_a_buffer, self.blocks.numel()
        bounds = [(start, min(start + size, count)) for start in range(0, count, size)]
        return [
            Buffer(start, stop, int(self.ptr[start]), int(self.ptr[stop]), *self._pieces(start, stop))
            for start, stop in bounds
        ]

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
        backend = "torch" if m.ends.device.type == "cpu" else self.backend
        dtype = self._stored_dtype if backend == "triton" else torch.float32  # ones are exact in every type
        x = torch.ones(m.x_entry.numel(), dtype=dtype, device=m.ends.device)
        y = torch.ones(m.y_entry.numel(), dtype=dtype, device=m.ends.device)
        found, total = [], 0
        r, c, _ = self.cut.extents
        for start, stop, buffer in self._products(x, y, backend):
            at = torch.nonzero(buffer.view(-1)).flatten() + start * r * c
            total += at.numel()
            self.budget.check(total, least=stop < self.blocks.numel())
            found.append(at)
        at = torch.cat(found) if found else m.ends.new_zeros(0)
        place, order = torch.sort(self._place_of(at))
        self._slot = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        self._at = at
        self._ends = [0, *(int(torch.searchsorted(at, b.stop * r * c)) for b in self._buffers)]
        return place

    def _place_of(self, at: torch.Tensor) -> torch.Tensor:
        r, c, _ = self.cut.extents
        row, column = self._tables
        block = self.blocks[at // (r * c)]
        inside = at % (r * c)
        columns = max(1, self.cut.pairs.columns)
        rows = row[block // columns * r + inside // c]
        return rows * self.cut.matching.columns + column[block % columns * c + inside % c]

    # -- numbers ----------------------------------------------------------------------------------------------------
    @property
    def _stored_dtype(self) -> torch.dtype:
        """Of the blocks' values: the operands' own where Triton reads them, what sums are kept in elsewhere."""
        return self.dtype if self.backend == "triton" else kept_dtype(self.dtype)

    def run(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(nnz of the result,) by place, of values of the live entries, in the type that sums are kept in."""
        out = x.new_empty(self._at.numel())
        r, c, _ = self.cut.extents
        x, y = x.to(self._stored_dtype), y.to(self._stored_dtype)
        for (start, _, buffer), done, end in zip(
            self._products(x, y, self.backend), self._ends, self._ends[1:], strict=False
        ):
            part = buffer.view(-1).index_select(0, self._at[done:end] - start * r * c)
            out.index_copy_(0, self._slot[done:end], part)
        return out

    def _products(self, x: torch.Tensor, y: torch.Tensor, backend: str) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(first block, end, dense blocks) of the result, some at a time."""
        r, c, k = self.cut.extents
        if self.program.bitmap and backend == "triton":
            operands = [*self._packed(self.cut.x, x), *self._packed(self.cut.y, y)]
        else:
            operands = [self.cut.x.whole(x).view(-1, r, k), self.cut.y.whole(y).view(-1, c, k)]
        for b in self._buffers:
            if backend == "triton":
                yield b.start, b.stop, self._launch(operands, b)
                continue
            buffer = torch.zeros((b.stop - b.start, r, c), dtype=x.dtype, device=x.device)
            step = max(1, TORCH_CHUNK // (r * c + (r + c) * k))
            chunks = [(n, min(n + step, b.last)) for n in range(b.first, b.last, step)]
            owner = self.owner - b.start if b.start else self.owner
            self._twin.contract(chunks, self.pair_x, self.pair_y, owner, *operands, buffer)
            yield b.start, b.stop, buffer

    @cached_property
    def _twin(self) -> Any:
        """The torch module."""
        if self.backend == "torch":
            return self.module
        name = source_name(self.program.equation, "torch")
        return cache.load(torch_source(self.program), self.budget.settings.cache_dir, name)[0]

    def _packed(self, blocks: Blocks, values: torch.Tensor) -> list[torch.Tensor]:
        bits = word_bits(blocks.volume)
        bitmap = blocks.bitmap.view(torch.int32) if bits == 32 else blocks.bitmap
        return [bitmap, blocks.starts[:-1], blocks.pack_values(values).contiguous()]

    def _launch(self, operands: list[torch.Tensor], b: Buffer) -> torch.Tensor:
        r, c, _ = self.cut.extents
        pieces = b.ptr.numel() - 1
        buffer = torch.empty((pieces, r * c), dtype=kept_dtype(self.dtype), device=b.ptr.device)
        arguments = (b.ptr, self.pair_x, self.pair_y, *operands, buffer)
        # Triton launches on the current device.
        with torch.cuda.device(buffer.device) if buffer.is_cuda else contextlib.nullcontext():
            self.module.kernel[(pieces,)](*arguments, num_warps=self.program.warps)
        if b.owner is None:
            return buffer
        return add_up(buffer, b.owner, b.stop - b.start, self.budget.settings.deterministic)

    def _pieces(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(ranges of pairs, a program each; the block of the result each is of, None when it is one each)."""
        ptr = self.ptr[start : stop + 1]
        counts = torch.diff(ptr)
        # Programs write a block each, so there are no more of them than blocks that a buffer has room for, and the cut.
        share = max(PAIRS_A_PROGRAM, int(ptr[-1] - ptr[0]) // self._blocks_a_buffer)
        each = -(-counts // share)
        if int(each.max()) <= 1:
            return ptr, None
        owner = torch.repeat_interleave(torch.arange(stop - start, device=ptr.device), each)
        behind = torch.arange(owner.numel(), device=ptr.device) - (torch.cumsum(each, 0) - each)[owner]
        return torch.cat([ptr[owner] + behind * share, ptr[-1:]]), owner

    # -- source -----------------------------------------------------------------------------------------------------
    def _load(self) -> None:
        text = triton_source if self.backend == "triton" else torch_source
        self.source = text(self.program)
        name = source_name(self.program.equation, self.backend)
        module, self.path = cache.load(self.source, self.budget.settings.cache_dir, name)
        self.module: Any = module

    @property
    def nbytes(self) -> int:
        """Bytes of the task list."""
        return sum(a.numel() * a.element_size() for a in (self.pair_x, self.pair_y, self.ptr, self.owner))

    def ptx(self, target: str) -> str:
        """The kernel's assembly for a named target; needs no GPU."""
        return assembly(self.program, self.dtype, target, self.pair_x.dtype, self.path)


def assembly(program: BlockProgram, dtype: torch.dtype, target: str, pairs: torch.dtype, path: Path) -> str:
    """Compile a block program ahead of time: PTX, or AMD's assembly."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target not in TARGETS:
        raise PlanError(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
    backend, arch, warp = TARGETS[target]
    program = replace(program, precision=portable(program.precision, backend))
    module, _ = cache.load(triton_source(program), path.parent, source_name(program.equation, "triton"))
    kernel: Any = module.kernel  # type: ignore[attr-defined]
    if not hasattr(kernel, "arg_names"):
        raise PlanError("compiling ahead of time needs TRITON_INTERPRET unset when triton is imported")
    value, out = TRITON_TYPES[dtype], TRITON_TYPES[kept_dtype(dtype)]
    types = {"pair_ptr": "i64", "pair_x": TRITON_TYPES[pairs], "pair_y": TRITON_TYPES[pairs], "X": value, "Y": value}
    types |= {"X_first": "i64", "Y_first": "i64", "Z": out}
    for name, volume in (("X_bits", 0), ("Y_bits", 1)):
        types[name] = f"i{word_bits(program.extents[volume] * program.extents[2])}"
    signature = {name: f"*{types[name]}" for name in kernel.arg_names}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {
        (n,): [["tt.divisibility", 16]] for n in range(len(signature))
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs={}, attrs=attributes),
        target=GPUTarget(backend, arch, warp),
        options={"num_warps": program.warps},
    )
    return compiled.asm["ptx"] if "ptx" in compiled.asm else compiled.asm["amdgcn"]


def _has_dot(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _precision(precision: str, dtype: torch.dtype) -> str:
    """What a dot of this type runs in; 16-bit floats are multiplied as they are, exactly."""
    if dtype != torch.float32:
        return "ieee"
    return {"highest": "tf32x3", "high": "tf32", "medium": "bf16"}[precision]
