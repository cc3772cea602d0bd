"""What a stream may take of the device's memory, and what it takes: decided before anything runs.

In: an einsum, the memory limit, what the caller asks of chunks. Out: `StreamBudget`: whether the result stays on the
device, how large a chunk may be, how many rows of the result it may have; or `OutOfMemoryError`, with the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from sparsetc.contraction.output import Output
from sparsetc.errors import OutOfMemoryError, PlanError
from sparsetc.support.memory import as_bytes
from sparsetc.tensor.sums import INTEGERS, accumulator

if TYPE_CHECKING:
    from sparsetc.streaming.compiler import Compiler

CHUNK = 64 << 20
"""Bytes of a chunk where none are asked for: over PCIe of 50 GB/s a copy of 1.3 ms, a hundred times what it costs to
start one; and a power of two, to which torch rounds pinned memory."""
ROUNDED = 64 << 10
"""Bytes set apart on a GPU, where each tensor begins at a multiple of 512, and small ones are made on the way."""
BLOCK = 1 << 20
"""Bytes above which torch's memory of a GPU gives a tensor a block that may be this much larger than it."""
SMALLEST = 4096
"""Bytes of the smallest chunk."""
STREAMS = 2
"""Streams where no number is asked for: of plain copies an H200 reached 98 % with 2 and 96 with 3
(`benchmarks/results/stream.json`)."""
MOST_STREAMS = 64
COPIES_SHARE = 8
"""Copies of a result that is met in no order take at most this part of what is free beside it."""


@dataclass(frozen=True)
class Sizes:
    """Bytes that an einsum takes on the device beside chunks.

    Attributes:
        dense: dense operands, and the tables made of them.
        row: a row of the result, as it is summed.
        finished: what is made of a row where the result is converted, or copied in another order; 0 where it is not.
        coordinates: coordinates of a row of a sparse result.
        block: what a tensor larger than this may take more than its bytes; 0 where it takes none.
    """

    dense: int
    row: int
    finished: int
    coordinates: int
    block: int = 0

    @classmethod
    def of(cls, compiler: Compiler, streams: int, drop_zeros: bool) -> Sizes:
        """Return the sizes of an einsum whose zeros are left out of the result or not."""
        canonical, output, dtype = compiler.canonical, compiler.template.output, compiler.dtype
        widened, gpu = compiler.backend == "torch", compiler.target.type == "cuda"
        beside, block = (ROUNDED, BLOCK) if gpu else (0, 0)
        e, wide = canonical.written.einsum, accumulator(dtype).itemsize
        lie = [prod(canonical.written.shape(p)) * dtype.itemsize for p in e.dense]
        given = sum(lie) + 2 * block * sum(n > block for n in lie)  # of each there may be a table
        own = sum(prod(canonical.bound.shape(p)) for p in canonical.bound.einsum.dense)
        moved = bool(canonical.reduction.steps) or any(p is not None for p in canonical.arrangement)
        tables = own * wide if widened and wide != dtype.itemsize else own * dtype.itemsize if moved else 0
        made = wide != dtype.itemsize or output.permutation is not None
        # A sparse result of several elements a row, in another order, has a pattern of them all, and their numbers.
        moved_pattern = output.sparse and output.permutation is not None
        letters = len(output.kept_shape) + len(output.width_shape)
        coordinates = 8 * (output.width * (letters + 1) if moved_pattern else len(output.kept_shape))
        finished = output.width * dtype.itemsize if made else 0
        if dtype in INTEGERS:  # which are looked at for such as do not fit
            finished += output.width
        if drop_zeros and output.sparse:  # a copy of what is left, and its numbers
            finished, coordinates = finished + output.width * (dtype.itemsize + 1), 2 * coordinates + 8
        if compiler.settings.effective_precision() == "medium" and compiler.backend == "triton":
            beside += own * 2 * streams  # as many launches may round tables at once
        return cls(given + tables + beside, output.width * wide, finished, coordinates if output.sparse else 0, block)

    def result(self, rows: int, copies: int = 1) -> int:
        """Bytes of a whole result on the device, and of what is made of it at the end."""
        summed = self.row if copies > 1 else 0
        each = [rows * n for n in (self.row * copies, summed, self.finished, self.coordinates)]
        return sum(each) + self.block * sum(n > self.block for n in each)

    def within(self, room: int) -> int:
        """Bytes of the largest tensor that takes this much at most."""
        return max(min(room, self.block), room - self.block)

    def chunks(self, nbytes: int, streams: int) -> int:
        """Bytes that a chunk of this size takes in all streams."""
        return streams * (nbytes + (self.block if nbytes > self.block else 0))


@dataclass(frozen=True)
class StreamBudget:
    """What fits.

    Attributes:
        resident: whether the whole result is kept on the device; else a chunk's rows at a time, which are copied back.
        chunk: most bytes of a chunk.
        rows: most rows of the result that a chunk may number; None for any.
    """

    limit: int
    resident: bool
    chunk: int
    rows: int | None

    @classmethod
    def of(
        cls, sizes: Sizes, output: Output, nnz: int, limit: int, streams: int, chunk: int | None, where: Any, what: str
    ) -> StreamBudget:
        """The budget of an einsum.

        Args:
            sizes: of the einsum.
            output: what it returns; a result that keeps modes may have its rows numbered by chunks.
            nnz: how many nonzeros there are.
            limit: bytes of the device.
            streams: each of which holds a chunk.
            chunk: most bytes of a chunk, as asked for; None for what is best.
            where: the device, for the message.
            what: the equation, for the message.

        Raises:
            OutOfMemoryError: it cannot be run in this memory.
        """
        wanted, free, rows = chunk or CHUNK, limit - sizes.dense, most_rows(output, nnz)
        numbered, row = bool(output.kept_shape), max(1, sizes.result(1))
        room = free - sizes.result(rows)
        if output.sparse and room // 2 >= max(streams * SMALLEST, row):
            # The result has as many rows more as a chunk numbers at most.
            return cls(limit, True, min(wanted, _pages(sizes.within(room // 2 // streams))), room // 2 // row)
        if not output.sparse and room >= streams * SMALLEST:
            return cls(limit, True, min(wanted, _pages(sizes.within(room // streams))), None)
        least = streams * (SMALLEST + (sizes.row if numbered else 0))
        if not numbered or free < least:
            result = sizes.row if numbered else sizes.result(rows)
            rows_of = "a row of the result for each chunk" if numbered else "the result"
            raise OutOfMemoryError(
                f'"{what}" on {where}: the dense operands take {sizes.dense:,} bytes, {rows_of} {result:,}, and '
                f"{streams} chunks {streams * SMALLEST:,} at least; the limit is {limit:,}. Raise memory_limit=, take "
                "fewer columns of the dense operands at a time, or fewer streams"
            )
        # Half of what is left for chunks, half for their rows.
        chunk_room = max(SMALLEST, min(wanted, _pages(sizes.within(free // 2 // streams))))
        rows_room = sizes.within((free - sizes.chunks(chunk_room, streams)) // streams)
        return cls(limit, False, chunk_room, max(1, rows_room // max(1, sizes.row)))

    @classmethod
    def opened(
        cls,
        sizes: Sizes,
        rows: int,
        copies: int,
        chunk: int,
        window: int | None,
        limit: int,
        streams: int,
        where: Any,
        what: str,
    ) -> StreamBudget:
        """The budget of chunks that are packed already.

        Args:
            sizes: of the einsum.
            rows: of the result.
            copies: of it, to which programs add.
            chunk: bytes of the largest chunk.
            window: rows that chunks number at most; None where they do not.
            limit: bytes of the device.
            streams: each of which holds a chunk.
            where: the device, for the message.
            what: the equation, for the message.

        Raises:
            OutOfMemoryError: it cannot be run in this memory.
        """
        held = sizes.dense + sizes.chunks(chunk, streams)
        if held + sizes.result(rows + (window or 0), copies) <= limit:
            return cls(limit, True, chunk, None)
        pieces = None if window is None else held + sizes.chunks(window * sizes.row, streams)
        if pieces is not None and pieces <= limit:
            return cls(limit, False, chunk, window)
        raise OutOfMemoryError(
            f'"{what}" on {where}: the dense operands take {sizes.dense:,} bytes, {streams} chunks '
            f"{streams * chunk:,}, and the result {sizes.result(rows, copies):,}; the limit is {limit:,}. Raise "
            "memory_limit=, take fewer streams, or pack the tensor again in smaller chunks"
        )

    def known(self, sizes: Sizes, rows: int, chunk: int, streams: int) -> StreamBudget:
        """The budget once the rows of a sparse result are known: it is kept on the device where it fits there.

        Args:
            sizes: of the einsum.
            rows: of the result, and as many more as a chunk numbers at most.
            chunk: bytes of the largest chunk.
            streams: each of which holds a chunk.
        """
        fits = sizes.dense + sizes.result(rows) + sizes.chunks(chunk, streams) <= self.limit
        return replace(self, resident=True, rows=None) if fits else self

    def copies(self, sizes: Sizes, rows: int, streams: int) -> int:
        """How many copies of the result programs may add to, a power of two."""
        free = self.limit - sizes.dense - sizes.result(rows) - sizes.chunks(self.chunk, streams)
        most = free // COPIES_SHARE // max(1, rows * sizes.row)
        return 1 << (most.bit_length() - 1) if self.resident and most > 1 else 1


def most_rows(output: Output, nnz: int) -> int:
    """The rows of a result, or as many as it can have of so many nonzeros."""
    return min(nnz, prod(output.kept_shape)) if output.sparse else output.rows


def _pages(nbytes: int) -> int:
    return nbytes // SMALLEST * SMALLEST


def checked_chunk(chunk_bytes: Any) -> int | None:
    """Bytes of a chunk as the caller gives them, text included; `PlanError` where they are none, or too few."""
    if chunk_bytes is None:
        return None
    try:
        found = as_bytes(chunk_bytes)
    except PlanError:
        found = 0
    if found < SMALLEST:
        raise PlanError(
            f'chunk_bytes must be a number of bytes, {SMALLEST} or more, or text like "64MiB"; found '
            f"{chunk_bytes!r:.80}"
        )
    return found


def checked_streams(streams: Any) -> int:
    """The number of streams; `PlanError` where it is none."""
    if streams is None:
        return STREAMS
    if not isinstance(streams, int) or isinstance(streams, bool) or not 1 <= streams <= MOST_STREAMS:
        raise PlanError(f"streams must be a whole number from 1 to {MOST_STREAMS}, found {streams!r:.80}")
    return streams
