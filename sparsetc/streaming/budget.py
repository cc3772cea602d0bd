"""Options of a stream, and the cut that fits them and the device's memory.

In: keyword arguments, an einsum, the memory limit. Out: `StreamOptions`, checked; `Budget`, which says how to cut
before anything is packed, and where the result goes once chunks are known; or `OutOfMemoryError`, with the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch

from sparsetc.errors import DeviceError, KeywordError, OutOfMemoryError, PlanError
from sparsetc.options import Options, of_call
from sparsetc.streaming.compiler import Compiler
from sparsetc.streaming.cutting import StreamCut
from sparsetc.support import FilePath, outside
from sparsetc.support.checks import as_bytes, refused
from sparsetc.tensor.dtypes import accumulator
from sparsetc.tensor.sparse_tensor import SparseTensor

CHUNK = 64 << 20
"""The default bytes of a chunk: over PCIe of 50 GB/s a copy of 1.3 ms, a hundred times the cost of starting one; and a
power of two, to which torch rounds pinned memory."""
SMALLEST = 4096
"""Bytes of the smallest chunk."""
MOST_STREAMS = 64
BLOCK = 1 << 20
"""Bytes that a tensor larger than this may take more on a GPU: torch gives it a whole block."""
COPIES_SHARE = 8
"""Copies of a result that is added to in no order take at most this part of the memory left free beside it."""


@dataclass(frozen=True)
class StreamOptions:
    """Options by which a tensor is cut, packed and streamed.

    Attributes:
        chunk_bytes: most bytes of a chunk, a number or text as in ``"32MiB"``; fewer are taken where memory is short.
        streams: CUDA streams, each with a chunk of its own on the device. With one nothing overlaps; plain copies on an
            H200 reached 98 % with 2 and 96 with 3 (`benchmarks/results/stream.json`). Ignored on the CPU.
        order: ``"size"`` runs chunks from most to fewest nonzeros (Chen et al., SpTV), ``"given"`` as they were cut.
        device: where chunks are run; by default the GPU of a dense operand, or the one that there is, or the CPU.
        file: write the packed chunks to this path as they are packed, and stream them from there: for tensors that are
            larger than the host's memory too. It is a file of `Stream.save`, and stays.
        packed_on: the device that packs chunks; by default the one that runs them, or, where ``memory_limit=`` is
            given, the CPU: packing takes more memory than running does.
        output: as of `einsum`.
        drop_zeros: as of `einsum`.
        progress: a bar on stderr: None for long work when stderr is a terminal, True always, False never.
    """

    chunk_bytes: int | str = CHUNK
    streams: int = 2
    order: str = "size"
    device: torch.device | str | None = None
    file: FilePath | None = None
    packed_on: torch.device | str | None = None
    output: str = "auto"
    drop_zeros: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.chunk < SMALLEST:
            raise PlanError(
                f"chunk_bytes must be a number of bytes, {SMALLEST} or more, found {self.chunk_bytes!r:.80}"
            )
        if type(self.streams) is not int or not 1 <= self.streams <= MOST_STREAMS:
            raise PlanError(f"streams must be a whole number from 1 to {MOST_STREAMS}, found {self.streams!r:.80}")
        if self.order not in ("size", "given"):
            raise PlanError(f'order must be "size" or "given", found {self.order!r:.80}')

    @classmethod
    def of_call(cls, arguments: dict[str, Any]) -> tuple[StreamOptions, Options]:
        """Return what keyword arguments say of a stream, None for a default, and the other settings of the call.

        Raises:
            PlanError: a size, a number of streams, an order or a setting that is not valid.
            KeywordError: an argument that is not known.
        """
        names = [f.name for f in fields(cls)]
        stream_options = cls(**{name: arguments[name] for name in names if arguments.get(name) is not None})
        allowed = list(dict.fromkeys((*names, *Options.__dataclass_fields__)))
        if unknown := outside(arguments, allowed):
            raise KeywordError(refused(unknown, allowed))
        settings = of_call({name: value for name, value in arguments.items() if name not in names})
        return stream_options, replace(settings, precision=settings.effective_precision())

    @property
    def chunk(self) -> int:
        """Most bytes of a chunk."""
        return as_bytes(self.chunk_bytes, "chunk_bytes")

    def stream_count(self, target: torch.device) -> int:
        """Return the number of chunks that are on a device at once."""
        return self.streams if target.type == "cuda" else 1

    def target(self, operands: Sequence[Any]) -> torch.device:
        """Return the device that chunks are run on.

        Raises:
            DeviceError: what was asked for is no device, none that chunks are run on, or not there.
        """
        if self.device is not None:
            return named_device(self.device)
        devices = [o.device for o in operands if isinstance(o, torch.Tensor | SparseTensor)]
        gpu = next((d for d in devices if d.type == "cuda"), None)
        return named_device(gpu or ("cuda" if torch.cuda.is_available() else "cpu"))


def named_device(name: Any) -> torch.device:
    """Return the CPU or an existing GPU by name. Raise `DeviceError` for anything else."""
    device = None
    with suppress(RuntimeError, TypeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise DeviceError(f"chunks are streamed to the CPU or a CUDA device, found {name!r:.80}")
    if device.type == "cpu":
        return torch.device("cpu")  # "cpu:0" is the same, and compares as another
    if (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"there is no device {device}; torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


@dataclass(frozen=True)
class Budget:
    """Bytes of the device, and what an einsum takes of them.

    Attributes:
        text: the equation and the device, for messages.
        total: bytes that the device may be asked for.
        tensors: on a GPU, how many tensors there are beside chunks, each of which may take a `BLOCK` more; else 0.
        streams: each of which holds a chunk.
        dense: bytes of dense operands, and of the tables made of them.
        row: bytes of a row of the result, as it is summed.
        finished: bytes of a row of a whole result: sums, what is made of them at the end, coordinates.
    """

    text: str
    total: int
    tensors: int
    streams: int
    dense: int
    row: int
    finished: int

    @classmethod
    def of(cls, compiler: Compiler, total: int, streams: int, drop_zeros: bool) -> Budget:
        """Return the budget of an einsum.

        Args:
            compiler: of the einsum, for the result as the caller wants it.
            total: bytes that the device may be asked for.
            streams: each of which holds a chunk.
            drop_zeros: whether a sparse result is copied without zeros.
        """
        template, dtype = compiler.template, compiler.dtype
        output = template.output
        operand_bytes = [prod(shape) * dtype.itemsize for shape in compiler.bound.dense_shapes]
        elements, wide = sum(map(prod, template.bound.dense_shapes)), accumulator(dtype).itemsize
        copied = [order for _, order, strided in compiler.problem.readings if not strided]
        moved = any(copied) or any(change for change, _ in compiler.pull.beside)
        widened = compiler.backend.widens and wide != dtype.itemsize
        dense = sum(operand_bytes)
        if widened or moved:
            dense += elements * (wide if widened else dtype.itemsize)
        if compiler.settings.effective_precision() == "medium" and compiler.backend.tensor_cores:
            dense += elements * 2 * streams  # as many launches may round tables at once
        row, changed = output.width * wide, output.permutation is not None or wide != dtype.itemsize
        finished = row * (1 + changed + 2 * drop_zeros)  # converted or in another order, and what is left of it
        if output.sparse:  # coordinates; in another order those of all elements, and their numbers
            letters = len(output.kept_shape) + len(output.width_shape)
            coordinates = 8 * (output.width * (letters + 1) if output.permutation else len(output.kept_shape))
            finished += coordinates * (1 + drop_zeros) + 8 * drop_zeros
        text = f'"{compiler.bound.einsum.text}" on {compiler.target}'
        tensors = 2 * len(operand_bytes) + 4 if compiler.target.type == "cuda" else 0
        return cls(text, total, tensors, streams, dense, row, finished)

    @property
    def limit(self) -> int:
        """Bytes that tensors may take; of a GPU a share stays for blocks larger than their tensors, and small ones."""
        blocks = min(self.total // 2, (self.tensors + self.streams) * BLOCK) + BLOCK // 16
        return self.total - blocks if self.tensors else self.total

    def result(self, rows: int, copies: int = 1) -> int:
        """Return the bytes of a whole result, with the temporary memory of finishing it."""
        return rows * (self.finished + (self.row * copies if copies > 1 else 0))

    def cut(self, rows: int | None, wanted: int, keeps: bool) -> tuple[int, int | None]:
        """Return the most bytes of a chunk, and the most rows that it may number (None if it numbers none).

        Args:
            rows: of a dense result; None of a sparse one, whose rows chunks number.
            wanted: bytes of a chunk.
            keeps: whether the result keeps modes, so that chunks can number its rows.

        Raises:
            OutOfMemoryError: it cannot be run in this memory.
        """
        free = self.limit - self.dense
        room = free - self.result(rows or 0)
        if rows is not None and room >= self.streams * SMALLEST:
            return min(wanted, room // self.streams // SMALLEST * SMALLEST), None
        if not keeps or free < self.streams * (SMALLEST + self.row):
            self._refuse(SMALLEST, self.row if keeps else self.result(rows or 0), "take fewer columns at a time")
        chunk = max(SMALLEST, min(wanted, free // 2 // self.streams // SMALLEST * SMALLEST))
        return chunk, max(1, (free // self.streams - chunk) // max(1, self.row))

    def keeps(self, chunks: StreamCut, rows: int, whole: bool = True) -> bool:
        """Return True if the result of packed chunks stays on the device, False if it is copied back chunk by chunk.

        Args:
            chunks: the chunks.
            rows: of the result.
            whole: whether it may stay there: of a dense result the rows without nonzeros are made on the host.

        Raises:
            OutOfMemoryError: it can be neither.
        """
        if whole and self.bytes(chunks, rows, True) <= self.limit:
            return True
        if not chunks.window or self.bytes(chunks, rows, False) > self.limit:
            self._refuse(chunks.largest, self.result(rows), "pack the tensor again in smaller chunks")
        return False

    def bytes(self, chunks: StreamCut, rows: int, kept: bool) -> int:
        """Return the bytes of a call, with its result kept on the device or not."""
        held = self.dense + self.streams * chunks.largest
        if kept:
            return held + self.result(rows + chunks.window, chunks.copies)
        return held + self.streams * chunks.window * self.row

    def _refuse(self, chunk: int, result: int, instead: str) -> None:
        raise OutOfMemoryError(
            f"{self.text}: the dense operands take {self.dense:,} bytes, {self.streams} chunks "
            f"{self.streams * chunk:,}, and the result, or a row of it, {result:,}; the limit is {self.limit:,}"
            f"{f' of {self.total:,}' if self.tensors else ''}. Raise memory_limit=, take fewer streams, or {instead}"
        )

    def copies(self, rows: int, chunk: int) -> int:
        """Return how many copies of a result on the device programs may add to, a power of two."""
        free = self.limit - self.dense - self.result(rows) - self.streams * chunk
        most = free // COPIES_SHARE // max(1, rows * self.row)
        return 1 << (most.bit_length() - 1) if most > 1 else 1
