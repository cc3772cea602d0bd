"""Streaming a tensor that is larger than is wanted on the GPU: the rate of chunks beside that of plain copies.

python benchmarks/stream.py                   # 8 GiB packed, a few GiB for the rest; a GPU, 40 GB of host memory
python benchmarks/stream.py --gib 0.002 --rest-gib 0.001 --chunk 64KiB      # anywhere, in seconds: does it run?

Coordinates are random, generated block by block on the GPU (a block is a slab of mode 0, so its rows are its own), and
packed there into pinned memory. The rate of plain copies is measured in the same run, of the same pinned buffers. Each
result is checked first: the rows of one block, against float64 nonzero by nonzero.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, mttkrp_reference, record, relative_error

import sparsetc as stc
from sparsetc.streaming import Stream

ROWS, MIDDLE, LAST = 32, 64, 65_536
"""A block's rows, and the sizes of modes 1 and 2: long fibers, as of SpTV, and a last mode that 16 bits hold."""
RANK = 32
RUNS = 5
READERS, PIECE = 8, 1 << 22
"""Threads of plain reads of a file, and bytes that each reads at once: as a stream does."""


class Blocks:
    """Nonzeros in blocks, each generated when it is taken: a random one in each of equal steps of its positions."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.shape = (len(sizes) * ROWS, MIDDLE, LAST)
        self.ends = torch.tensor(sizes).cumsum(0).tolist()
        self.nnz, self.dtype = self.ends[-1], torch.float32
        self._held: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def take(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Nonzeros by number, all of one block, on the GPU."""
        number = next(n for n, end in enumerate(self.ends) if start < end)
        coords, values = self.block(number)
        first = self.ends[number] - self.sizes[number]
        return coords[:, start - first : stop - first].contiguous(), values[start - first : stop - first]

    def block(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All nonzeros of a block."""
        if self._held is None or self._held[0] != number:
            n, cells = self.sizes[number], prod((ROWS, *self.shape[1:]))
            g, step = torch.Generator(device=DEVICE).manual_seed(number), cells // n
            key = torch.arange(n, device=DEVICE) * step + torch.randint(step, (n,), generator=g, device=DEVICE)
            row, rest = key // (MIDDLE * LAST), key % (MIDDLE * LAST)
            coords = torch.stack([row + number * ROWS, rest // LAST, rest % LAST])
            self._held = number, coords, torch.rand(n, generator=g, device=DEVICE) + 0.1
        return self._held[1:]

    def tensor(self, number: int) -> stc.SparseTensor:
        """A block as a tensor, of the shape of all."""
        return stc.SparseTensor(*self.block(number), self.shape)


def seconds(call: Callable[[], Any], runs: int = RUNS) -> float:
    """The median time of a call, to its end on the device."""
    times = []
    for _ in range(runs):
        sync()
        start = time.perf_counter()
        call()
        sync()
        times.append(time.perf_counter() - start)
    return sorted(times)[runs // 2]


def sync() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def copy_rate(buffers: list[torch.Tensor]) -> float:
    """Bytes a second of plain copies of these buffers to the device, one after the other, into two places in turn."""
    most, total = max(b.numel() for b in buffers), sum(b.numel() for b in buffers)
    places = [torch.empty(most, dtype=torch.uint8, device=DEVICE) for _ in range(2)]

    def run() -> None:
        for n, b in enumerate(buffers):
            places[n % 2][: b.numel()].copy_(b, non_blocking=True)

    run()
    return total / seconds(run)


def overlap(s: Stream) -> float:
    """The part of the kernels' time in which a copy was under way, in the last call."""
    times = s.timeline()
    copies, hidden, total = sorted(t.copy for t in times), 0.0, 0.0
    for one in times:
        begin, end = one.kernel
        total += end - begin
        hidden += sum(max(0.0, min(end, b) - max(begin, a)) for a, b in copies)
    return hidden / max(total, 1e-9)


def check(equation: str, blocks: Blocks, found: Any, dense: list[torch.Tensor]) -> float:
    """The relative error of the rows of one block."""
    number = len(blocks.sizes) // 2
    x, rows = blocks.tensor(number), slice(number * ROWS, (number + 1) * ROWS)
    if equation == MTTKRP:
        own = mttkrp_reference(x, [torch.empty(blocks.shape[0], RANK, device=DEVICE), *dense], 0)
        return relative_error(found[rows].to(DEVICE), own[rows])
    own = torch.zeros(ROWS * MIDDLE, dtype=torch.float64, device=DEVICE)
    at = (x.coords[0] - rows.start) * MIDDLE + x.coords[1]
    own.index_add_(0, at, x.values.double() * dense[0][x.coords[2]].double())
    inside = (found.coords[0] >= rows.start) & (found.coords[0] < rows.stop)
    coords, values = found.coords[:, inside].to(DEVICE), found.values[inside].to(DEVICE)
    return relative_error(values, own[(coords[0] - rows.start) * MIDDLE + coords[1]])


MTTKRP, TTV = "ijk,jr,kr->ir", "ijk,k->ij"


def operands(equation: str) -> list[torch.Tensor]:
    """Random dense operands."""
    g = torch.Generator(device=DEVICE).manual_seed(1)
    shapes = [(MIDDLE, RANK), (LAST, RANK)] if equation == MTTKRP else [(LAST,)]
    return [torch.rand(s, generator=g, device=DEVICE) for s in shapes]


def per_nonzero(equation: str, plan: str, size: int) -> float:
    """Bytes that a nonzero takes, as one block is packed."""
    blocks = Blocks([size])
    with stc.stream_kernel(equation, blocks, *operands(equation), plan=plan, device=DEVICE) as s:
        return s.nbytes / s.nnz


def made(equation: str, blocks: Blocks, plan: str, chunk: str, **given: Any) -> tuple[Stream, float, list[Any]]:
    """A stream of the blocks, the seconds that packing took, and its dense operands."""
    dense, start = operands(equation), time.perf_counter()
    s = stc.stream_kernel(equation, blocks, *dense, plan=plan, chunk_bytes=chunk, device=DEVICE, **given)
    return s, time.perf_counter() - start, dense


def measured(s: Stream, dense: list[Any], rate: float | None, **about: Any) -> dict[str, Any]:
    """A row of the record: the rate of one stream, after one call that compiles."""
    s(*dense)
    took = seconds(lambda: s(*dense))
    row = {
        **about,
        "order": s.options.order,
        "streams": s._budget.streams,
        "chunks": s.chunks,
        "nnz": s.nnz,
        "packed_gb": round(s.nbytes / 1e9, 3),
        "s": round(took, 5),
        "gb_s": round(s.nbytes / took / 1e9, 2),
        "of_copy_rate": rate and round(s.nbytes / took / rate, 3),
        "kernel_ms": round(sum(t.kernel[1] - t.kernel[0] for t in s.timeline()), 2),
        "kernels_hidden": round(overlap(s), 3),
    }
    print(row, flush=True)
    return row


def uniform(equation: str, gib: float, block: int, plan: str, chunk: str, rows: list[Any]) -> float:
    """1, 2 and 4 streams of blocks of one size; gives the rate of plain copies."""
    count = max(2, round(gib * 2**30 / (per_nonzero(equation, plan, block) * block)))
    blocks = Blocks([block] * count)
    s, packing, dense = made(equation, blocks, plan, chunk)
    with s:
        rate = copy_rate(s._store.buffers)
        error = check(equation, blocks, s(*dense), dense)
        print(f"{equation}: packed in {packing:.1f} s, copies {rate / 1e9:.2f} GB/s, error {error:.1e}", flush=True)
        if error > 1e-4:
            raise SystemExit(f"{equation}: wrong, error {error}")
        for streams in (1, 2, 3, 4):
            about = {"case": "uniform", "equation": equation, "plan": s.plan.name, "packing_s": round(packing, 1)}
            own = s.on(streams=streams)
            rows.append(measured(own, dense, rate, **about, copy_gb_s=round(rate / 1e9, 2), error=error))
            own._engine.close()
    return rate


def skewed(gib: float, block: int, plan: str, chunk: str, rows: list[Any]) -> None:
    """Chunks of sizes that fall as 1/n, dealt in no order: sorted by size, and as they come."""
    total = int(gib * 2**30 / per_nonzero(MTTKRP, plan, block))
    count = max(8, 4 * total // block)
    g = torch.Generator().manual_seed(0)
    weights = (1.0 / torch.arange(1, count + 1))[torch.randperm(count, generator=g)]
    sizes = (weights / weights.sum() * total).long().clamp(64, block).tolist()
    s, _, dense = made(MTTKRP, Blocks(sizes), plan, chunk)
    with s:
        rate = copy_rate(s._store.buffers)
        for streams in (2, 4):
            for order in ("given", "size"):
                own = s.on(streams=streams, order=order)
                rows.append(measured(own, dense, rate, case="skewed", equation=MTTKRP, plan=s.plan.name))
                own._engine.close()


def from_file(gib: float, block: int, plan: str, chunk: str, rows: list[Any]) -> None:
    """Chunks read from a file that the system has in memory already, as it was just written."""
    count = max(2, round(gib * 2**30 / (per_nonzero(TTV, plan, block) * block)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        s, packing, dense = made(TTV, Blocks([block] * count), plan, chunk, file=path)
        s.close()
        with stc.open_stream(path, device=DEVICE) as own:
            start = time.perf_counter()
            own(*dense)
            sync()
            first = time.perf_counter() - start
            checked = round(own.nbytes / first / 1e9, 2)
            about = {"equation": TTV, "packing_s": round(packing, 1), "checked_gb_s": checked}
            rows.append(measured(own, dense, None, case="file", **about))
            rows.append(from_disk(own, dense, path))


def from_disk(s: Stream, dense: list[torch.Tensor], path: Path) -> dict[str, Any]:
    """Calls that begin with nothing of the file in memory, beside plain reads of it that do, in turn."""

    def seconds(call: Callable[[], object]) -> float:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        call()
        sync()
        return time.perf_counter() - start

    size, buffers = path.stat().st_size, [bytearray(PIECE) for _ in range(READERS)]

    def plain() -> None:
        def read(number: int) -> None:
            for at in range(number * PIECE, size, READERS * PIECE):
                os.preadv(file.fileno(), [buffers[number]], at)

        with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, range(READERS)))

    times = sorted(((seconds(plain), seconds(lambda: s(*dense))) for _ in range(RUNS)), key=lambda pair: pair[1])
    read, streamed = sorted(pair[0] for pair in times)[RUNS // 2], times[RUNS // 2][1]
    rates = {"disk_gb_s": round(size / read / 1e9, 2), "gb_s": round(s.nbytes / streamed / 1e9, 2)}
    return {"case": "disk", "equation": TTV, **rates, "of_disk_rate": round(s.nbytes / size * read / streamed, 3)}


def back(gib: float, block: int, chunk: str, rows: list[Any]) -> None:
    """A result that is copied back: its rows are cut by chunks, since the memory limit is less than it takes."""
    count = max(2, round(gib * 2**30 / (8 * block)))
    equation, dense = "ijk,jr->ikr", [torch.rand(MIDDLE, 2, device=DEVICE)]
    limit = max(1 << 20, int(gib * 2**30) // 8)
    blocks, start = Blocks([block] * count), time.perf_counter()
    coords, values = (torch.cat(p, -1).cpu() for p in zip(*map(blocks.block, range(count)), strict=True))
    x = stc.SparseTensor(coords, values, blocks.shape)
    s = stc.stream_kernel(
        equation, x, *dense, plan="coo", chunk_bytes=chunk, device=DEVICE, memory_limit=limit, packed_on=DEVICE
    )
    with s:
        about = {"case": "copied back", "equation": equation, "packing_s": round(time.perf_counter() - start, 1)}
        rows.append({**measured(s, dense, None, **about), "memory_limit": limit, "resident": s.resident})


def main() -> None:
    """All cases, and the record."""
    p = argparse.ArgumentParser()
    p.add_argument("--gib", type=float, default=8.0, help="packed size of the uniform tensors")
    p.add_argument("--rest-gib", type=float, default=2.0, help="packed size of the skewed one, and of the file")
    p.add_argument("--chunk", default="64MiB")
    p.add_argument("--block", type=int, default=8_000_000, help="most nonzeros of a block")
    p.add_argument("--plan", default="auto")
    p.add_argument("--cases", default="mttkrp,ttv,skewed,file,back")
    a = p.parse_args()
    block = min(a.block, max(1000, int(a.gib * 2**30 / 8 / 4)))
    rows: list[Any] = []
    start, cases = time.perf_counter(), a.cases.split(",")
    for name, equation in (("mttkrp", MTTKRP), ("ttv", TTV)):
        if name in cases:
            uniform(equation, a.gib, block, a.plan, a.chunk, rows)
    if "skewed" in cases:
        skewed(a.rest_gib, block, a.plan, a.chunk, rows)
    if "file" in cases:
        from_file(a.rest_gib, block, a.plan, a.chunk, rows)
    if "back" in cases:
        back(min(a.rest_gib, 0.125), min(block, 1_000_000), a.chunk, rows)
    record("stream", rows, arguments=vars(a), seconds=round(time.perf_counter() - start, 1))


if __name__ == "__main__":
    main()
