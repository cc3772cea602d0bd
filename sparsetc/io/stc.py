"""Packed files, .stc: sorted nonzeros in one array a mode, read block by block, every block checked.

In: a path. Out: a `PackedFile`, from which any range of nonzeros can be read, or a whole SparseTensor; or a file of a
SparseTensor. What a byte means is in `stc_layout`. Nothing is believed that a checksum does not cover, and nothing is
given that was not checked: blocks are copied out of the mapped file, and the copy is compared with its checksum.
"""

from __future__ import annotations

import mmap
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from sparsetc.errors import DtypeError, IOFormatError
from sparsetc.io import memory, numbers
from sparsetc.io.atomic import replacing
from sparsetc.io.stc_layout import BLOCK, PAGE, Array, FileLayout, parsed
from sparsetc.io.stc_writer import PackedWriter
from sparsetc.tensor import coords as crd
from sparsetc.tensor.inputs import DTYPES
from sparsetc.tensor.sparse_tensor import SparseTensor

Copy = Callable[[int, int], bytes]
"""Gives bytes of a file from one offset to another."""


class PackedFile:
    """The nonzeros of an open packed file, in lexicographic order; `sparsetc.open_packed` opens one.

    It may be read by several threads, and is closed by `close` or at the end of a ``with`` block. The file must not be
    shortened while it is open: it is mapped, and the system ends a program that reads past the end of a mapped file.

    Raises:
        IOFormatError: a file that is no packed file, is truncated or altered; the message names header, array or block.
        OSError: there is no such file, or it may not be read.

    Attributes:
        path: where the file is.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not stat.S_ISREG(os.stat(path).st_mode) and not self.path.is_dir():
            raise IOFormatError(f"{path}: a packed file is mapped, so it must be a file on disk")
        self._file = open(path, "rb")  # noqa: SIM115  # closed by `close`
        try:
            self._layout, table_crc, self._crc = self._read_header()
            self._checks = self._read_checks(table_crc)
        except BaseException:
            self._file.close()
            raise

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all modes."""
        return self._layout.shape

    @property
    def order(self) -> int:
        """The number of modes."""
        return len(self._layout.shape)

    @property
    def nnz(self) -> int:
        """The number of nonzeros."""
        return self._layout.nnz

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self._layout.dtype

    @property
    def layout(self) -> FileLayout:
        """Where the arrays lie, and how many nonzeros a checksum covers."""
        return self._layout

    @property
    def crc(self) -> int:
        """The header's checksum, which depends on every byte of the file."""
        return self._crc

    def __repr__(self) -> str:
        return f"PackedFile({str(self.path)!r}, shape={self.shape}, nnz={self.nnz}, dtype={self.dtype})"

    def __enter__(self) -> PackedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was read of it stays."""
        self._file.close()

    def block(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Nonzeros ``start`` to ``stop``: (order, n) int64 coordinates and (n,) values, in memory of their own.

        Whole blocks are checked, so a range that begins and ends at multiples of ``layout.block`` is read once.

        Raises:
            IndexError: the range is not one of the file's.
            IOFormatError: a block that was altered, or coordinates outside the shape.
        """
        if not 0 <= start <= stop <= self.nnz:
            raise IndexError(f"nonzeros {start} to {stop} of {self.nnz}")
        coords = torch.empty((self.order, stop - start), dtype=torch.int64, device="cpu")
        values = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        bits = values.view(torch.int16).numpy() if self.dtype == torch.bfloat16 else values.numpy()
        for number, into in enumerate((*coords.numpy(), bits)):
            self._fill(number, start, stop, into)
        return coords, values

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Nonzeros whose coordinate of mode 0 is from ``first`` to below ``last``, as `block` gives them.

        Raises:
            IndexError: the range is not within mode 0.
            IOFormatError: as of `block`.
        """
        if not 0 <= first <= last <= self.shape[0]:
            raise IndexError(f"rows {first} to {last} of {self.shape[0]}")
        return self.block(self._first_from(first), self._first_from(last))

    def verify(self) -> None:
        """Check every byte: all blocks, their order, and that nothing stands between arrays.

        Raises:
            IOFormatError: what is wrong, and where.
        """
        self._check_gaps()
        last = torch.empty((self.order, 0), dtype=torch.int64, device="cpu")
        step = -(-BLOCK // self._layout.block) * self._layout.block  # whole blocks, many where they are small
        for start in range(0, self.nnz, step):
            coords, _ = self.block(start, min(start + step, self.nnz))
            self._check_order(torch.cat((last, coords), 1), f"blocks from {start // self._layout.block} on")
            last = coords[:, -1:]

    def tensor(self) -> SparseTensor:
        """All nonzeros as a SparseTensor, every byte checked.

        Raises:
            IOFormatError: as of `verify`.
            OutOfMemoryError: it would take more than the memory limit.
        """
        memory.check(self.path, "the tensor", self.nnz * self._layout.row_bytes)
        self._check_gaps()
        coords, values = self.block(0, self.nnz)
        self._check_order(coords, "the order of blocks")
        if not self._layout.coalesced:
            return SparseTensor(coords, values, self.shape, check=False)
        return SparseTensor._of(coords, values, self.shape, True)

    # ---- bytes ------------------------------------------------------------------------------------------------

    def _fault(self, reason: str) -> IOFormatError:
        return IOFormatError(f"{self.path}: {reason}")

    def _read_header(self) -> tuple[FileLayout, int, int]:
        try:
            return parsed(self._file.read(PAGE), os.fstat(self._file.fileno()).st_size)
        except ValueError as error:
            raise self._fault(str(error)) from None

    def _read_checks(self, crc: int) -> np.ndarray:
        place = self._layout.checks
        memory.check(self.path, "its checksums", place.nbytes)
        data = self._copied(place.offset, place.end, place.name)
        if zlib.crc32(data) != crc:
            raise self._fault("checksums: the table of checksums is damaged")
        return np.frombuffer(data, place.dtype).reshape(len(self._layout.arrays), self._layout.blocks)

    @contextmanager
    def _mapped(self, start: int, end: int, what: str) -> Iterator[Copy]:
        """What copies bytes ``start`` to ``end`` of the file, which are mapped for no longer than the block."""
        base = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._check_size(what)
        with mmap.mmap(self._file.fileno(), end - base, access=mmap.ACCESS_READ, offset=base) as mapped:

            def copied(start: int, end: int) -> bytes:
                self._check_size(what)
                return mapped[start - base : end - base]

            yield copied

    def _check_size(self, what: str) -> None:
        if os.fstat(self._file.fileno()).st_size < self._layout.size:
            raise self._fault(f"{what}: the file was shortened while it was open")

    def _copied(self, start: int, end: int, what: str) -> bytes:
        """Bytes of the file."""
        if start == end:
            return b""
        with self._mapped(start, end, what) as copied:
            return copied(start, end)

    def _fill(self, number: int, start: int, stop: int, into: np.ndarray) -> None:
        """Nonzeros ``start`` to ``stop`` of one array, block by block."""
        if start == stop:
            return
        place, rows = self._layout.arrays[number], self._layout.block
        first, last = start // rows, -(-stop // rows)
        with self._mapped(self._range(place, first)[0], self._range(place, last - 1)[1], place.name) as copied:
            for block in range(first, last):
                held = self._checked(number, block, copied(*self._range(place, block)))
                low, high = max(start, block * rows), min(stop, (block + 1) * rows)
                into[low - start : high - start] = held[low - block * rows : high - block * rows]

    def _range(self, place: Array, block: int) -> tuple[int, int]:
        """Offsets of the bytes of one block."""
        nbytes = self._layout.block * place.dtype.itemsize
        start = place.offset + block * nbytes
        return start, min(start + nbytes, place.end)

    def _block_of(self, number: int, block: int) -> np.ndarray:
        """One block of one array, checked."""
        place = self._layout.arrays[number]
        return self._checked(number, block, self._copied(*self._range(place, block), place.name))

    def _checked(self, number: int, block: int, data: bytes) -> np.ndarray:
        """The elements of one block, if its bytes agree with their checksum and its coordinates with the size."""
        place = self._layout.arrays[number]
        if zlib.crc32(data) != int(self._checks[number, block]):
            raise self._fault(f"{place.name}, block {block}: damaged, its checksum is another")
        found = np.frombuffer(data, place.dtype)
        if number < self.order and not 0 <= int(found.min()) <= int(found.max()) < self.shape[number]:
            raise self._fault(f"{place.name}, block {block}: a coordinate outside its size, {self.shape[number]}")
        return found

    def _first_from(self, row: int) -> int:
        """The number of the first nonzero whose coordinate of mode 0 is at least ``row``."""
        if not self._layout.coalesced:
            raise self._fault("its nonzeros are in no order, so rows cannot be found")
        low, high = 0, self._layout.blocks  # blocks before low begin below row, those from high on do not
        while low < high:
            middle = (low + high) // 2
            if int(self._block_of(0, middle)[0]) < row:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return 0
        block = self._block_of(0, low - 1)
        return (low - 1) * self._layout.block + int(np.searchsorted(block, row))

    def _check_order(self, coords: torch.Tensor, where: str) -> None:
        if self._layout.coalesced and not crd.is_sorted_unique(crd.sort_keys(coords, self.shape)):
            raise self._fault(f"{where}: nonzeros that are not in lexicographic order, or not unique")

    def _check_gaps(self) -> None:
        arrays: tuple[Array, ...] = (*self._layout.arrays, self._layout.checks)
        for before, after in pairwise(arrays):
            if self._copied(before.end, after.offset, before.name).strip(b"\0"):
                raise self._fault(f"{before.name}: bytes that are not zero after its end")


def open_packed(path: str | os.PathLike[str]) -> PackedFile:
    """A packed file (.stc) opened for reading in blocks; only its header and checksums are read now.

    Raises:
        IOFormatError: not a packed file, or a truncated or altered one.
        FileNotFoundError: no such file.
    """
    return PackedFile(path)


def read(path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> SparseTensor:
    """The tensor in a packed file, in its own dtype unless ``dtype`` is given.

    Raises:
        IOFormatError: not a packed file, a damaged one, or values that ``dtype`` cannot hold.
        DtypeError: ``dtype`` is none that values may have.
        OutOfMemoryError: the tensor would pass the memory limit, or memory did not suffice.
        FileNotFoundError: no such file.
    """
    if dtype not in (None, *DTYPES):
        raise DtypeError(f"{path}: values cannot be read as {dtype}")
    with memory.named(path, lambda: "a tensor, and its blocks as they are stored"), PackedFile(path) as file:
        try:
            x = file.tensor()
            return x if dtype is None else x.with_values(numbers.cast(x.values, dtype))
        except (ValueError, DtypeError) as error:
            raise IOFormatError(f"{path}: {error}") from error


def write(path: str | os.PathLike[str], x: SparseTensor) -> None:
    """All nonzeros of ``x``, sorted, duplicates summed; dense modes become coordinates.

    The old file, if any, stays until the new one is complete.
    """
    x = x.expand_dense().coalesce().to("cpu")
    with replacing(path) as file:
        writer = PackedWriter(file, FileLayout(x.shape, x.nnz, x.dtype))
        for start in range(0, x.nnz, BLOCK):
            writer.append(list(x.coords[:, start : start + BLOCK]), x.values[start : start + BLOCK])
        writer.finish()
