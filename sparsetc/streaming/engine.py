"""The run of a stream: chunk after chunk copied to the device, its programs started, its rows copied back.

In: chunks and their store, bound programs, tables of dense operands. Out: the rows of the result. On a GPU each of S
streams takes every S-th chunk: copy, kernel, copy back, in this order, so that what one stream copies hides behind what
another computes, and a stream's own order guards its buffer. Copies to the device follow one another: each waits for
the event of the one before, so that two do not share the bus and end together. The host waits for the disk,
for progress where it is shown, and at the end where rows go to the host. Without a GPU the chunks are run where they
lie, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsetc.codegen.parts import Call
from sparsetc.codegen.programs import Programs
from sparsetc.streaming.cutting import StreamCut
from sparsetc.streaming.store import ChunkFile, ChunkMemory
from sparsetc.support.entry import At, unseen


@dataclass(frozen=True)
class ChunkTimes:
    """The times of a chunk's copy and kernel, in milliseconds from the beginning of the first copy.

    Attributes:
        chunk: its number, in the order in which chunks were cut.
        copy: beginning and end of its copy to the device; of a run on the CPU, of its reading.
        back: beginning and end of the copy of its rows to the host; None where the result stays on the device.
    """

    chunk: int
    nnz: int
    nbytes: int
    stream: int
    copy: tuple[float, float]
    kernel: tuple[float, float]
    back: tuple[float, float] | None


@dataclass(eq=False)
class Engine:
    """The loop that runs the chunks of one stream in one order, any number of times.

    Attributes:
        cut: the chunks.
        order: in which they are run, by number.
        programs: of each variant.
        device: that runs them.
        streams: CUDA streams, no more than chunks; 1 on the CPU.
        shape: (rows, *width) of the result, as it is summed.
        dtype: that sums are made in.
        resident: whether the result is kept on the device; else rows are copied back.
        buffers: of each stream itself, (bytes of the largest chunk,) uint8 on the device, None on the CPU, and
            (most rows of a chunk, *width) where rows are copied back, None where they are not.
        _marks: of each chunk that was run, when it began, was copied, computed, and copied back: events of CUDA, or
            times on the CPU.
    """

    cut: StreamCut
    order: Sequence[int]
    programs: Sequence[Programs]
    device: torch.device
    streams: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    resident: bool
    buffers: list[tuple[Any, Tensor | None, Any]] = field(default_factory=list)
    _bound: dict[int, tuple[int, Call, list[Tensor]]] = field(default_factory=dict)
    _marks: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cuda = self.device.type == "cuda"

    def _allocate(self) -> list[Tensor]:
        """Reuse or allocate the streams' buffers. Return zeros for the result.

        Returns:
            (copies, rows, *width) on the device, to which chunks add; or, where rows are copied back, (rows, *width) on
            the host, and (chunks, *width) for the first row of each chunk, which the chunk before may have as its last.
        """
        (rows, *width), window = self.shape, self.cut.window
        device, cuda = self.device, self.cuda
        for _ in range(0 if self.buffers else self.streams):
            staging = torch.empty(self.cut.largest, dtype=torch.uint8, device=device) if cuda else None
            chunk_rows = None if self.resident else torch.empty((window, *width), dtype=self.dtype, device=device)
            self.buffers.append((torch.cuda.Stream(device) if cuda else None, staging, chunk_rows))
        if self.resident:  # a chunk's programs see as many rows as the largest has
            return [torch.zeros((self.cut.copies, rows + window, *width), dtype=self.dtype, device=device)]
        pinned = device.type == "cuda"
        sizes = rows, len(self.order)
        return [torch.zeros((n, *width), dtype=self.dtype, device="cpu", pin_memory=pinned) for n in sizes]

    def close(self) -> None:
        """Free the buffers, and what is bound to them."""
        self.buffers.clear()
        self._bound.clear()
        self._marks.clear()

    def run(self, store: ChunkMemory | ChunkFile, tables: Sequence[Tensor], at: At) -> Tensor:
        """Run all chunks; on a GPU what is enqueued on the current stream afterwards comes after them.

        Args:
            store: has the chunks' bytes.
            tables: the dense operands, on the device.
            at: told how many bytes of chunks are done.

        Returns:
            (rows, *width) of the result, on the device or on the CPU.
        """
        self._marks = []
        results, copied = self._allocate(), list[Callable[[], object]]()
        streams = [stream for stream, *_ in self.buffers if self.cuda]
        here = torch.cuda.current_stream(self.device) if self.cuda else None
        with closing(store.feed(self.order, self.streams, copied)) as feed:
            try:
                for stream in streams:
                    stream.wait_stream(here)
                self._chunks(feed, tables, results, copied, at)
                if here is not None:
                    for stream in streams:
                        here.wait_stream(stream)
                    if store.passing or not self.resident:
                        here.synchronize()
            except BaseException:
                for stream in streams:  # what they read and write is about to be freed
                    stream.synchronize()
                raise
        if self.resident:
            (whole,) = results
            return (whole.sum(0) if self.cut.copies > 1 else whole[0])[: self.shape[0]]
        host, first_rows = results
        first = torch.tensor([self.cut.chunks[n].first for n in self.order], dtype=torch.long, device="cpu")
        return host.index_add_(0, first, first_rows)

    def _chunks(
        self,
        feed: Generator[Tensor, None, None],
        tables: Sequence[Tensor],
        results: Sequence[Tensor],
        copied: list[Callable[[], object]],
        at: At,
    ) -> None:
        """Enqueue all chunks on a GPU, or run them on the CPU."""
        done, window = 0, self.cut.window
        for position, number in enumerate(self.order):
            (stream, staging, out), chunk = self.buffers[position % len(self.buffers)], self.cut.chunks[number]
            marks = [] if self.cuda else [self._now()]
            buffer = held = next(feed)
            with torch.cuda.stream(stream):  # without effect on the CPU
                if staging is not None:
                    if self._marks:
                        stream.wait_event(self._marks[-1][1])
                    marks.append(self._now())
                    buffer = staging
                    buffer[: chunk.nbytes].copy_(held[: chunk.nbytes], non_blocking=True)
                marks.append(self._now())
                copied.append(partial(self._wait, marks[1]))
                call, values = self._call(position, buffer, held)
                if self.resident:
                    (out,) = results
                    out = out[0, chunk.first : chunk.first + window] if window else out
                else:
                    out[: chunk.rows].zero_()
                call(values, tables, out)
                marks.append(self._now())
                if not self.resident:  # rows go to the host: the first apart, others where no chunk copies any
                    host, first_rows = results
                    first_rows[position].copy_(out[0], non_blocking=True)
                    host[chunk.first + 1 : chunk.first + chunk.rows].copy_(out[1 : chunk.rows], non_blocking=True)
                    marks.append(self._now())
            self._marks.append(marks)
            done += chunk.nbytes
            if at is not unseen:  # all streams have work while the host waits for an earlier chunk
                self._wait(self._marks[max(0, position - self.streams)][-1])
                at(done)

    # -- chunks -----------------------------------------------------------------------------------------------------
    def _call(self, position: int, buffer: Tensor, held: Tensor) -> tuple[Call, list[Tensor]]:
        """A chunk's programs, bound to its arrays in a buffer; bound once while the buffer is the same."""
        bound = self._bound.get(position)
        if bound is not None and bound[0] == buffer.data_ptr():
            return bound[1:]
        chunk = self.cut.chunks[self.order[position]]
        arrays, values = chunk.views(buffer)
        call = self.programs[chunk.variant].bind(arrays, chunk.views(held)[0])
        self._bound[position] = (buffer.data_ptr(), call, values)
        return call, values

    # -- evidence ---------------------------------------------------------------------------------------------------
    def _now(self) -> Any:
        """Return an event that the current stream records; on the CPU the time in milliseconds."""
        if not self.cuda:
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait(self, mark: Any) -> None:
        """Wait until a mark is passed, as on the CPU all are."""
        if self.cuda:
            mark.synchronize()

    def times(self) -> list[ChunkTimes]:
        """Return the times of each chunk of the last run, in the order in which they ran."""
        times = []
        for position, (number, marks) in enumerate(zip(self.order, self._marks, strict=False)):
            self._wait(marks[-1])
            first = self._marks[0][0]
            begin, copied, ran, *back = [first.elapsed_time(one) if self.cuda else one - first for one in marks]
            chunk, stream = self.cut.chunks[number], position % len(self.buffers)
            to_host = (ran, *back) if back else None
            times.append(ChunkTimes(number, chunk.nnz, chunk.nbytes, stream, (begin, copied), (copied, ran), to_host))
        return times
