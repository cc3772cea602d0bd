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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparsetc.codegen.launch import Call, Programs
from sparsetc.streaming.file import ChunkFile
from sparsetc.streaming.store import Chunk, ChunkMemory, Feed
from sparsetc.support.notices import At, unseen


@dataclass(frozen=True)
class ChunkTimes:
    """When a chunk was copied and computed, in milliseconds from the beginning of the first copy.

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


@dataclass
class Lane:
    """What a stream has of its own on the device.

    Attributes:
        staging: (bytes of the largest chunk,) uint8; None on the CPU.
        rows: (most rows of a chunk, *width) where rows are copied back; None where the result stays.
    """

    stream: Any
    staging: torch.Tensor | None
    rows: torch.Tensor | None


@dataclass
class ResultTarget:
    """Where results go.

    Attributes:
        whole: (copies, rows, *width) on the device, to which chunks add; None where rows are copied back.
        host: (rows, *width) on the host.
        firsts: (chunks, *width) the first row of each chunk, which the chunk before may have as its last.
    """

    whole: torch.Tensor | None
    host: torch.Tensor | None = None
    firsts: torch.Tensor | None = None


class Engine:
    """Runs the chunks of one stream, in one order; it may be run again and again.

    Attributes:
        _marks: events, or times, of each chunk that was run: begin, copied, computed, copied back.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        order: Sequence[int],
        programs: Sequence[Programs],
        window: int,
        device: torch.device,
        streams: int,
    ) -> None:
        """Take chunks.

        Args:
            chunks: all of them.
            order: in which they are run, by number.
            programs: of each variant.
            window: rows that each chunk's programs are made for, where chunks number them; 0 where they do not.
            device: that runs them.
            streams: how many streams; no matter on the CPU.
        """
        self.chunks, self.order, self.programs, self.window = chunks, order, programs, window
        self.device, self.cuda = device, device.type == "cuda"
        self.streams = max(1, min(streams, len(order))) if self.cuda else 1
        self.lanes: list[Lane] = []
        self._bound: dict[int, tuple[int, Call, list[torch.Tensor]]] = {}
        self._marks: list[list[Any]] = []

    def allocate(self, width: tuple[int, ...], dtype: torch.dtype, returned: bool) -> None:
        """Take the streams' buffers, which are kept from one run to the next."""
        if self.lanes:
            return
        most = max((c.nbytes for c in self.chunks), default=0)
        for _ in range(self.streams):
            staging = torch.empty(most, dtype=torch.uint8, device=self.device) if self.cuda else None
            rows = torch.empty((self.window, *width), dtype=dtype, device=self.device) if returned else None
            self.lanes.append(Lane(torch.cuda.Stream(self.device) if self.cuda else None, staging, rows))

    def close(self) -> None:
        """Free the buffers, and what is bound to them."""
        self.lanes.clear()
        self._bound.clear()
        self._marks.clear()

    def run(self, store: ChunkMemory | ChunkFile, tables: Sequence[torch.Tensor], target: ResultTarget, at: At) -> None:
        """Run all chunks; on a GPU what is enqueued on the current stream afterwards comes after them.

        Args:
            store: has the chunks' bytes.
            tables: the dense operands, on the device.
            target: the result, of zeros; rows that go to the host are written there instead.
            at: told how many bytes of chunks are done.
        """
        self._marks = []
        with store.feed(self.chunks, self.order, self.streams) as feed:
            if not self.cuda:
                self._on_cpu(feed, tables, target, at)
                return
            here = torch.cuda.current_stream(self.device)
            try:
                self._enqueue(feed, tables, target, here)
                self._watch(at)
                for lane in self.lanes:
                    here.wait_stream(lane.stream)
                if target.host is not None or store.passing:
                    here.synchronize()
            except BaseException:
                for lane in self.lanes:  # what they read and write is about to be freed
                    lane.stream.synchronize()
                raise

    # -- GPU --------------------------------------------------------------------------------------------------------
    def _enqueue(self, feed: Feed, tables: Sequence[torch.Tensor], target: ResultTarget, here: Any) -> None:
        for lane in self.lanes:
            lane.stream.wait_stream(here)
        (get, release), copied = feed, None
        for position, number in enumerate(self.order):
            lane, chunk, held = self.lanes[position % len(self.lanes)], self.chunks[number], get(position)
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(4 if target.whole is None else 3)]
            assert lane.staging is not None
            with torch.cuda.stream(lane.stream):
                if copied is not None:
                    lane.stream.wait_event(copied)
                marks[0].record()
                lane.staging[: chunk.nbytes].copy_(held[: chunk.nbytes], non_blocking=True)
                marks[1].record()
                copied = marks[1]
                release(position, copied.synchronize)
                call, values = self._call(position, lane.staging, held)
                out = self._out(chunk, lane, target)
                call(values, tables, out)
                marks[2].record()
                if target.whole is None:
                    self._back(position, chunk, out, target)
                    marks[3].record()
            self._marks.append(marks)

    def _watch(self, at: At) -> None:
        """Tell of chunks as they end, where anyone is looking."""
        if at is unseen:
            return
        done = 0
        for number, marks in zip(self.order, self._marks, strict=True):
            marks[-1].synchronize()
            done += self.chunks[number].nbytes
            at(done)

    # -- CPU --------------------------------------------------------------------------------------------------------
    def _on_cpu(self, feed: Feed, tables: Sequence[torch.Tensor], target: ResultTarget, at: At) -> None:
        (get, release), done = feed, 0
        for position, number in enumerate(self.order):
            chunk, times = self.chunks[number], [time.perf_counter()]
            held = get(position)
            times.append(time.perf_counter())
            call, values = self._call(position, held, held)
            out = self._out(chunk, self.lanes[0], target)
            call(values, tables, out)
            times.append(time.perf_counter())
            if target.whole is None:
                self._back(position, chunk, out, target)
                times.append(time.perf_counter())
            release(position, lambda: None)
            self._marks.append(times)
            done += chunk.nbytes
            at(done)

    # -- chunks -----------------------------------------------------------------------------------------------------
    def _call(self, position: int, buffer: torch.Tensor, held: torch.Tensor) -> tuple[Call, list[torch.Tensor]]:
        """A chunk's programs, bound to its arrays in a buffer; bound once while the buffer is the same."""
        known = self._bound.get(position)
        if known is not None and known[0] == buffer.data_ptr():
            return known[1:]
        chunk = self.chunks[self.order[position]]
        arrays, values = chunk.views(buffer)
        call = self.programs[chunk.variant].bind(arrays, chunk.views(held)[0])
        self._bound[position] = (buffer.data_ptr(), call, values)
        return call, values

    def _out(self, chunk: Chunk, lane: Lane, target: ResultTarget) -> torch.Tensor:
        """What a chunk adds to."""
        if target.whole is None:
            assert lane.rows is not None
            lane.rows[: chunk.rows].zero_()
            return lane.rows
        if not self.window:
            return target.whole
        return target.whole[0, chunk.first : chunk.first + self.window]

    def _back(self, position: int, chunk: Chunk, out: torch.Tensor, target: ResultTarget) -> None:
        """Copy a chunk's rows to the host: the first apart, the others where no other chunk copies any."""
        assert target.host is not None
        assert target.firsts is not None
        target.firsts[position].copy_(out[0], non_blocking=True)
        if chunk.rows > 1:
            own = target.host[chunk.first + 1 : chunk.first + chunk.rows]
            own.copy_(out[1 : chunk.rows], non_blocking=True)

    def add_firsts(self, target: ResultTarget) -> None:
        """Add the chunks' first rows to the result on the host."""
        assert target.host is not None
        assert target.firsts is not None
        if self.order:
            first = torch.tensor([self.chunks[n].first for n in self.order], device="cpu")
            target.host.index_add_(0, first, target.firsts)

    # -- evidence ---------------------------------------------------------------------------------------------------
    def times(self) -> list[ChunkTimes]:
        """When each chunk of the last run was copied and computed, in the order in which they were run."""
        found = []
        for position, (number, marks) in enumerate(zip(self.order, self._marks, strict=False)):
            since = self._since(marks)
            chunk, back = self.chunks[number], (since[2], since[3]) if len(since) > 3 else None
            stream = position % len(self.lanes)
            spans = ((since[0], since[1]), (since[1], since[2]), back)
            found.append(ChunkTimes(number, chunk.nnz, chunk.nbytes, stream, *spans))
        return found

    def _since(self, marks: list[Any]) -> list[float]:
        begin = self._marks[0][0]
        if not self.cuda:
            return [(t - begin) * 1e3 for t in marks]
        marks[-1].synchronize()
        return [begin.elapsed_time(event) for event in marks]
