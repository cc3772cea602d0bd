"""Storage of packed chunks: in host memory, pinned if a GPU copies from it, or in a safetensors file.

In: buffers of chunks. Out: `ChunkMemory` or `ChunkFile`. Both have a lock, which a stream holds during a call, and
`feed`, which yields the buffers of chunks in the order of a run. Several threads read a file, straight into the
buffers that devices copy from; a chunk is compared with its checksum when it is first read. `writing` writes a file;
what its header says of chunks is in `contents`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparsetc.errors import FormatError, IOFormatError, PlanError, printable
from sparsetc.io import memory
from sparsetc.io.atomic import replacing
from sparsetc.support import FilePath, Ints

PAGE = 4096  # chunks begin at a multiple of so many bytes
RESERVED = 1 << 20
"""Bytes left for the header, which is known once all chunks are written: enough for about 1,500 chunks."""
MOST = 100_000_000
"""Bytes of the largest header that safetensors reads."""
BLOCK = 4 << 20
"""Bytes of a checksum's block, and of one read of a thread."""
THREADS = min(8, os.cpu_count() or 1)
"""Readers of a file: a core makes checksums of about a gigabyte a second, and disks give several."""
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError)
"""The exceptions that reading JSON of another shape than expected may raise."""


def host_bytes(nbytes: int, pinned: bool) -> Tensor:
    """Return (nbytes,) zeros of uint8 in host memory; a GPU copies from it at full speed where it is pinned."""
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


class ChunkMemory:
    """Chunks in memory, pinned where a GPU copies from it.

    Attributes:
        passing: True if buffers are filled anew once a run has copied them.
    """

    passing = False

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.closed, self.lock = False, Lock()

    def feed(
        self, order: Sequence[int], streams: int, copied: Sequence[Callable[[], object]]
    ) -> Generator[Tensor, None, None]:
        """Yield the chunks in an order; nothing need be waited for."""
        yield from [self.buffers[number] for number in order]

    def close(self) -> None:
        """Free the memory."""
        self.closed = True
        self.buffers.clear()


Put: TypeAlias = Callable[[Tensor], object]
"""A function that writes the buffer of the next chunk."""


@contextmanager
def writing(path: FilePath) -> Iterator[tuple[Put, list[Ints], dict[str, Any]]]:
    """Write a file of buffers, one after the other; it appears once it is whole.

    The header is written at the end of the block, into the bytes left for it; if it needs more, all buffers are moved.

    Yields:
        A function that writes a buffer; a list of the buffers written so far, as the CRC-32 of each block; and the
        header, to be filled in.

    Raises:
        PlanError: safetensors reads no header of this size.
    """
    checksums: list[Ints] = []
    header: dict[str, Any] = {}
    with replacing(path) as file:
        file.seek(RESERVED)

        def put(buffer: Tensor) -> None:
            data = buffer.numpy().data
            file.write(data)
            checksums.append(tuple([zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]))

        yield put, checksums, header
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > MOST - PAGE:
            raise PlanError("a file cannot list so many chunks: make fewer, by a larger chunk_bytes=")
        begin, end = max(RESERVED, -(-(len(text) + 8) // PAGE) * PAGE), file.tell()
        for at in reversed(range(RESERVED, end, BLOCK) if begin > RESERVED else ()):
            file.seek(at)
            moved = file.read(min(BLOCK, end - at))
            file.seek(at - RESERVED + begin)
            file.write(moved)
        file.seek(0)
        file.write((begin - 8).to_bytes(8, "little") + text.ljust(begin - 8))


class ChunkFile:
    """An open file of packed chunks.

    Attributes:
        arrays: the header: dtype, shape and place of each array by name.
        stream: what its metadata says of the stream.
        nbytes: bytes of all arrays.
        check: raises `FormatError` for the bytes of a chunk by which programs would reach outside of their arrays.
        passing: True, as the buffers that chunks are read into are filled again.
    """

    passing = True

    def __init__(self, path: FilePath, pinned: bool, parse: Callable[[str], Any]) -> None:
        """Open a file and read its header.

        Args:
            path: of the file.
            pinned: whether a GPU copies from the buffers that chunks are read into.
            parse: makes `stream` of the text that the metadata has of it.

        Raises:
            IOFormatError: no file of chunks, or a truncated or altered one.
            FileNotFoundError: no file.
        """
        self.path = Path(path)
        self.pinned = pinned
        self.lock = Lock()
        self.closed = False
        self.check: Callable[[int, Tensor], None]
        self._ring: list[Tensor] = []
        self._checked: set[int] = set()
        self._file = memory.on_disk(path)
        try:
            size = os.fstat(self._file.fileno()).st_size
            head = os.pread(self._file.fileno(), 8, 0)
            length = int.from_bytes(head, "little")
            self._begin, self.nbytes = 8 + length, size - 8 - length
            if len(head) < 8 or length > MOST or self.nbytes < 0:
                raise self.fault("not a safetensors file, or a truncated one")
            self.arrays: dict[str, Any] = json.loads(os.pread(self._file.fileno(), length, 8))
            metadata = self.arrays.pop("__metadata__")
            if zlib.crc32(metadata["stream"].encode()) != int(metadata["crc32"]):
                raise ValueError("its checksum is another")
            self.stream = parse(metadata["stream"])
        except BaseException as error:
            self.close()
            if isinstance(error, MALFORMED) and not isinstance(error, IOFormatError):
                raise self.fault(f"no file of packed chunks, or a damaged one ({error!s:.80})") from None
            raise

    def expect(self, sizes: Sequence[int], checksums: Sequence[Sequence[int]]) -> None:
        """Set sizes and checksums of the buffers. Raise `ValueError` unless the file consists of them."""
        if sum(sizes) != self.nbytes or [len(sums) for sums in checksums] != [-(-n // BLOCK) for n in sizes]:
            raise ValueError(f"truncated or extended: {self.nbytes:,} bytes, its arrays take {sum(sizes):,}")
        self._sizes, self._checksums = sizes, checksums
        self._begins = list(accumulate(sizes, initial=self._begin))

    def close(self) -> None:
        """Close the file, and free the buffers."""
        self.closed = True
        self._ring.clear()
        self._file.close()

    def fault(self, reason: str) -> IOFormatError:
        """Return the error that names the file."""
        return IOFormatError(f"{self.path}: {printable(reason)}")

    def read(self, number: int, into: Tensor) -> None:
        """Read a buffer into (as many or more,) uint8, in this thread."""
        for begin in range(0, self._sizes[number], BLOCK):
            self._read_block(number, begin, into)

    def _read_block(self, number: int, begin: int, into: Tensor) -> None:
        """Read a block of a buffer, and compare it with its checksum where the buffer was not read before."""
        block = memoryview(into.numpy().data)[begin : min(begin + BLOCK, self._sizes[number])]
        at, view = self._begins[number] + begin, block
        while len(view):
            got = os.preadv(self._file.fileno(), [view], at + len(block) - len(view))
            if not got:
                raise self.fault(f"chunk {number}: the file was shortened while it was open")
            view = view[got:]
        if number not in self._checked and zlib.crc32(block) != self._checksums[number][begin // BLOCK]:
            raise self.fault(f"chunk {number}: damaged, its checksum is another")

    def feed(
        self, order: Sequence[int], streams: int, copied: Sequence[Callable[[], object]]
    ) -> Generator[Tensor, None, None]:
        """Yield the chunks in an order, read ahead by threads into a ring of buffers.

        Args:
            order: of the chunks, by number.
            streams: that copy from the buffers at once.
            copied: waits for each chunk yielded before to be copied, as the caller appends them.
        """
        ring = min(len(order), streams + 2)
        if len(self._ring) < ring:  # kept, since programs are bound to them, and pinned memory is slow to get
            self._ring = [host_bytes(max(self._sizes), self.pinned) for _ in range(ring)]
        reads: list[list[Future[None]]] = []
        with ThreadPoolExecutor(THREADS, thread_name_prefix="sparsetc-read") as pool:
            for position, number in enumerate(order):
                # One buffer is left as it is: the copy of the chunk before has only just begun.
                for ahead in range(len(reads), min(len(order), position + max(1, ring - 1))):
                    if ahead >= ring:
                        copied[ahead - ring]()
                    at, into = order[ahead], self._ring[ahead % ring]
                    blocks = range(0, self._sizes[at], BLOCK)
                    reads.append([pool.submit(self._read_block, at, begin, into) for begin in blocks])
                for block in reads[position]:
                    block.result()
                buffer = self._ring[position % ring]
                if number not in self._checked:
                    try:
                        self.check(number, buffer)
                    except FormatError as error:
                        raise self.fault(f"chunk {number}: {error}; pack the tensor again") from None
                    self._checked.add(number)
                yield buffer
