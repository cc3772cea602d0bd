"""Writing a packed file from nonzeros that come some at a time.

In: an open file, and blocks of nonzeros. Out: the bytes of `stc_layout`. Only the largest number of nonzeros need be
known before: where duplicates made fewer of them, arrays are moved together at the end, within the file. Nothing is
held but a checksum a block.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO

import numpy as np
import torch

from sparsetc.io.stc_layout import PAGE, Array, FileLayout

MOVED = 1 << 20
"""Bytes that are moved at a time."""


class PackedWriter:
    """Appends nonzeros to an empty file; `finish` makes it a packed file.

    Attributes:
        nnz: nonzeros written so far.
    """

    def __init__(self, file: BinaryIO, most: FileLayout) -> None:
        """``most`` is the layout of as many nonzeros as may come."""
        self.nnz = 0
        self._file, self._most = file, most
        self._columns = [_Column(file, found, most.block) for found in most.arrays]

    def append(self, coords: Sequence[torch.Tensor], values: torch.Tensor) -> None:
        """Nonzeros that follow those before: coordinates below the sizes, (n,) a mode, and (n,) values."""
        for column, row in zip(self._columns, coords, strict=False):
            column.write(row.numpy())
        self._columns[-1].write(bits(values))
        self.nnz += values.shape[0]

    def finish(self) -> FileLayout:
        """Write what is left: arrays moved together, checksums and header."""
        layout = replace(self._most, nnz=self.nnz)
        for column, found in zip(self._columns, layout.arrays, strict=True):
            column.move(found)
        table = b"".join(column.finished() for column in self._columns)
        self._file.seek(layout.checks.offset)
        self._file.write(table)
        self._file.truncate(layout.size)
        _blank(self._file, layout)
        self._file.seek(0)
        self._file.write(layout.header(table))
        return layout


def bits(values: torch.Tensor) -> np.ndarray:
    """Values as numpy has them; of bfloat16 the bits."""
    values = values.detach().resolve_conj().resolve_neg().contiguous()
    return values.view(torch.int16).numpy() if values.dtype == torch.bfloat16 else values.numpy()


def _blank(file: BinaryIO, layout: FileLayout) -> None:
    """Zeros between arrays, where others may have been written before they were moved."""
    following = [found.offset for found in (*layout.arrays[1:], layout.checks)]
    for found, until in zip(layout.arrays, following, strict=True):
        if until - found.end:
            file.seek(found.end)
            file.write(b"\0" * (until - found.end))


class _Column:
    """One array of the file, and the checksums of its blocks."""

    def __init__(self, file: BinaryIO, place: Array, block: int) -> None:
        self._file, self._place, self._block = file, place, block * place.dtype.itemsize
        self._written, self._crc = 0, 0
        self._crcs = array("I")

    def write(self, elements: np.ndarray) -> None:
        data = memoryview(np.ascontiguousarray(elements, dtype=self._place.dtype).view(np.uint8).data)
        self._file.seek(self._place.offset + self._written)
        self._file.write(data)
        while len(data):
            part = data[: self._block - self._written % self._block]
            self._crc = zlib.crc32(part, self._crc)
            self._written += len(part)
            data = data[len(part) :]
            if self._written % self._block == 0:
                self._end_block()

    def move(self, place: Array) -> None:
        """To where fewer nonzeros have it, which is never further on."""
        if place.offset == self._place.offset:
            return
        for at in range(0, self._written, MOVED):
            self._file.seek(self._place.offset + at)
            part = self._file.read(min(MOVED, self._written - at))
            self._file.seek(place.offset + at)
            self._file.write(part)

    def finished(self) -> bytes:
        """The checksums, little-endian."""
        if self._written % self._block:
            self._end_block()
        return np.array(self._crcs, dtype="<u4").tobytes()

    def _end_block(self) -> None:
        self._crcs.append(self._crc)
        self._crc = 0


assert MOVED % PAGE == 0
