"""Files of packed chunks, .stcs: what a stream needs, so that it is opened without packing and read at the disk's rate.

In: a stream's parts. Out: a file; or the other way round. All numbers are little-endian::

    0 – 4,095        the header: magic, version, place of the description and its CRC-32, CRC-32 of the header
    from 4,096       chunks, each at a multiple of 4,096, as they are copied to a device; coordinates of result rows
    at the end       the description: JSON, with places, and a CRC-32 for each 4 MiB of what came before

Chunks are read straight into the buffers that devices copy from, by several threads, and compared with their checksums
when they are first read.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from operator import index
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import torch

from sparsetc.errors import FormatError, IOFormatError
from sparsetc.streaming.store import Chunk, Feed, Release, host_bytes

MAGIC = b"\x89STCS\r\n\x1a"
VERSION = 1
PAGE = 4096
BLOCK = 4 << 20
"""Bytes that a checksum covers, and that a thread reads at a time."""
THREADS = 8
"""Readers of a file: a core makes checksums of about a gigabyte a second, and disks give several."""
HEADER = struct.Struct("<8sHxxxxxxQQI")
"""Magic, version, offset and bytes of the description, its CRC-32."""
MOST = 1 << 32
"""Most bytes of a description."""


class Blob:
    """Bytes in a file, and the checksums of their blocks.

    Attributes:
        checked: whether all bytes were compared once.
    """

    def __init__(self, offset: int, nbytes: int, crcs: Sequence[int]) -> None:
        self.offset, self.nbytes, self.crcs = index(offset), index(nbytes), list(map(index, crcs))
        self.checked = False

    def known(self) -> list[Any]:
        """What a description says of them."""
        return [self.offset, self.nbytes, self.crcs]


class ChunkWriter:
    """Writes blobs one after the other into an empty file. It is a sink of `cut`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._at = file, PAGE
        self.blobs: list[Blob] = []
        self._scratch = host_bytes(0)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory for a blob, of which there is one at a time."""
        if self._scratch.numel() < nbytes:
            self._scratch = host_bytes(nbytes)
        return self._scratch[:nbytes]

    def put(self, buffer: torch.Tensor) -> None:
        """Write a blob."""
        data = memoryview(buffer.numpy().data)
        self._file.seek(self._at)
        self._file.write(data)
        crcs = [zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
        self.blobs.append(Blob(self._at, len(data), crcs))
        self._at = -(-(self._at + len(data)) // PAGE) * PAGE

    def finish(self, description: dict[str, Any]) -> None:
        """Write the description and the header."""
        text = json.dumps(description, separators=(",", ":")).encode()
        self._file.seek(self._at)
        self._file.write(text)
        head = HEADER.pack(MAGIC, VERSION, self._at, len(text), zlib.crc32(text)).ljust(PAGE - 4, b"\0")
        self._file.seek(0)
        self._file.write(head + struct.pack("<I", zlib.crc32(head)))


class ChunkFile:
    """An open file of packed chunks.

    Attributes:
        check: raises `FormatError` for the bytes of a chunk of which programs would read what is not there.
        passing: True, as the memory that chunks are in is read into again.
    """

    passing = True

    def __init__(self, path: str | os.PathLike[str], pinned: bool = False) -> None:
        """Open a file and read its description.

        Args:
            path: of the file.
            pinned: whether a GPU copies from the buffers that chunks are read into.

        Raises:
            IOFormatError: no such file of chunks, or a truncated or altered one.
            FileNotFoundError: no file.
        """
        self.path, self.pinned = Path(path), pinned
        self._ring: list[torch.Tensor] = []
        self.lock = Lock()
        self.check: Callable[[int, torch.Tensor], None] = nothing
        self._file = open(self.path, "rb", buffering=0, opener=_at_once)  # noqa: SIM115  # closed by `close`
        try:
            self.description = self._described()
            self.blobs = [Blob(*known) for known in self.description["blobs"]]
            end = self._described_at
            if any(not PAGE <= b.offset <= b.offset + b.nbytes <= end for b in self.blobs):
                raise self.fault("a chunk lies outside the file")
            if any(len(b.crcs) != -(-b.nbytes // BLOCK) for b in self.blobs):
                raise self.fault("a chunk has no checksum for each of its blocks")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            self._file.close()
            raise error if isinstance(error, IOFormatError) else self.fault("its description is none") from None
        except BaseException:
            self._file.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return self._file.closed

    def close(self) -> None:
        """Close the file, and free the buffers."""
        self._ring.clear()
        self._file.close()

    def fault(self, reason: str) -> IOFormatError:
        """The error that names the file."""
        return IOFormatError(f"{self.path}: {reason}")

    def _described(self) -> dict[str, Any]:
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise self.fault("a file of packed chunks is a file on disk, this is none")
        head = self._file.read(PAGE)
        if len(head) < PAGE or not head.startswith(MAGIC):
            raise self.fault("not a file of packed chunks (.stcs)")
        if zlib.crc32(head[:-4]) != struct.unpack("<I", head[-4:])[0]:
            raise self.fault("header: damaged, its checksum is another")
        _, version, offset, nbytes, crc = HEADER.unpack_from(head)
        if version != VERSION:
            raise self.fault(f"header: version {version}, this package reads {VERSION}; pack the tensor again")
        size = status.st_size
        if offset + nbytes != size or nbytes > MOST:
            raise self.fault(f"truncated or extended: {size:,} bytes, the header says {offset + nbytes:,}")
        self._described_at = offset
        text = os.pread(self._file.fileno(), nbytes, offset)
        if zlib.crc32(text) != crc:
            raise self.fault("description: damaged, its checksum is another")
        return json.loads(text)  # type: ignore[no-any-return]

    def accept(self, number: int, buffer: torch.Tensor) -> None:
        """Check a chunk that was read, once; its bytes are those that were written."""
        if not self.blobs[number].checked:
            try:
                self.check(number, buffer)
            except FormatError as error:
                raise self.fault(f"chunk {number}: {error}; pack the tensor again") from None
        self.blobs[number].checked = True

    def read(self, number: int, into: torch.Tensor) -> None:
        """The bytes of a blob, into (at least as many,) uint8, in this thread."""
        for at in range(0, self.blobs[number].nbytes, BLOCK):
            self._read_block(number, at, into)
        self.blobs[number].checked = True

    def _read_block(self, number: int, at: int, into: torch.Tensor) -> None:
        blob = self.blobs[number]
        view = memoryview(into.numpy().data)[at : min(at + BLOCK, blob.nbytes)]
        done = 0
        while done < len(view):
            got = os.preadv(self._file.fileno(), [view[done:]], blob.offset + at + done)
            if not got:
                raise self.fault(f"chunk {number}: the file was shortened while it was open")
            done += got
        if not blob.checked and zlib.crc32(view) != blob.crcs[at // BLOCK]:
            raise self.fault(f"chunk {number}: damaged, a checksum is another")

    @contextmanager
    def feed(self, chunks: Sequence[Chunk], order: Sequence[int], streams: int) -> Iterator[Feed]:
        """Chunks, read ahead by threads into a ring of buffers."""
        largest, ring = max((c.nbytes for c in chunks), default=0), min(len(order), streams + 2)
        if len(self._ring) < ring:  # kept, since programs are bound to them, and pinned memory is slow to get
            self._ring = [host_bytes(largest, self.pinned) for _ in range(ring)]
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="sparsetc-read")
        try:
            ahead = Ahead(self, order, self._ring[:ring], pool)
            yield ahead.get, ahead.release
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # none may write to a buffer that is freed


def _at_once(path: str, flags: int) -> int:
    """Open a file without waiting, as a pipe would have one do for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def nothing(number: int, buffer: torch.Tensor) -> None:
    """Nothing is checked of chunks that were packed here."""


class Ahead:
    """Chunks of a file, a ring of buffers ahead of the one that is asked for."""

    def __init__(
        self, file: ChunkFile, order: Sequence[int], buffers: Sequence[torch.Tensor], pool: ThreadPoolExecutor
    ) -> None:
        self._file, self._order, self._buffers, self._pool = file, order, buffers, pool
        self._waits: dict[int, Release] = {}
        self._under_way: dict[int, list[Future[None]]] = {}
        self._next = 0

    def get(self, position: int) -> torch.Tensor:
        """The chunk, once it is read; those after it are asked for."""
        ring = len(self._buffers)
        # One buffer is left as it is: the copy of the chunk before has only just begun.
        until = min(len(self._order), position + max(1, ring - 1))
        while self._next < until:
            if self._next >= ring:
                self._waits.pop(self._next - ring)()
            self._start(self._next)
            self._next += 1
        for future in self._under_way.pop(position):
            future.result()
        self._file.accept(self._order[position], self._buffers[position % ring])
        return self._buffers[position % ring]

    def _start(self, position: int) -> None:
        number, into = self._order[position], self._buffers[position % len(self._buffers)]
        starts = range(0, self._file.blobs[number].nbytes, BLOCK)
        self._under_way[position] = [self._pool.submit(self._file._read_block, number, at, into) for at in starts]

    def release(self, position: int, wait: Release) -> None:
        """Its buffer may be overwritten once `wait` returns."""
        self._waits[position] = wait
