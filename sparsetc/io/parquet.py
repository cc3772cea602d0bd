"""Reading Parquet, a row group at a time.

In: a path. Out: a `Table` of any columns; or a `PackedFile`, from which any range of nonzeros can be read, or a whole
SparseTensor. What pyarrow gives is checked.
"""

from __future__ import annotations

import json
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import CoordinateError, IOFormatError
from sparsetc.io import bounds, memory, packed
from sparsetc.support import FilePath, Lock, cached_property
from sparsetc.tensor import coords as crd
from sparsetc.tensor.dtypes import SUMMED_IN
from sparsetc.tensor.pattern import Labels
from sparsetc.tensor.sparse_tensor import SparseTensor

PARSED = 60
"""Bytes of memory a character of parsed JSON takes at most: ``1,`` becomes a number and its place in a list."""


class Table:
    """An open Parquet file, read by row groups.

    Attributes:
        path: where the file is.
        names: of the columns that are read.
        starts: the number of the first row of each row group, and how many there are.
    """

    def __init__(self, path: FilePath) -> None:
        self._arrow = packed.library()
        self.path = Path(memory.text_of(path))
        self._lock = Lock()
        self._raw = memory.on_disk(self.path)
        try:
            with memory.of_file(f"{self.path}: its footer", Exception):
                self._read_footer()
        except BaseException:
            self.close()
            raise

    def _read_footer(self) -> None:
        self._file = self._arrow.parquet.ParquetFile(self._raw, page_checksum_verification=True)
        self.schema = self._file.schema_arrow
        self.names = list(self.schema.names)
        about = self._file.metadata
        if about.num_row_groups > bounds.GROUPS + about.num_rows // bounds.PER_GROUP:
            rule = f"beyond {bounds.GROUPS:,}, one may be had for {bounds.PER_GROUP} rows"
            raise ValueError(f"{about.num_row_groups:,} row groups of {about.num_rows:,} rows: {rule}")
        sizes = [about.row_group(group).num_rows for group in range(about.num_row_groups)]
        if min(sizes, default=0) < 0 or sum(sizes) != about.num_rows:
            raise ValueError(f"row groups of {sizes!s:.60} rows in a file of {about.num_rows:,}")
        self.starts = [0, *accumulate(sizes)]

    @property
    def nnz(self) -> int:
        """The number of rows, of a packed file that of nonzeros."""
        return self.starts[-1]

    def close(self) -> None:
        """Close the file; data read before stays valid."""
        self._raw.close()

    def blocks(self) -> Iterator[Any]:
        """Yield each row group as a table of pyarrow."""
        for group in range(len(self.starts) - 1):
            yield self._row_group(group, self.names)

    def group(self, group: int, names: Sequence[Any] | None = None) -> list[np.ndarray]:
        """Return the columns of one row group, or those named."""
        names = names or self.names
        row_group = self._row_group(group, names)
        return [row_group.column(name).to_numpy() for name in names]

    def _row_group(self, group: int, names: Sequence[Any]) -> Any:
        rows = self.starts[group + 1] - self.starts[group]
        memory.check(self.path, f"row group {group}", self._nbytes(group, names))
        # a lock, as a file object has one position
        with memory.of_file(f"{self.path}: row group {group}", Exception), self._lock.own:
            row_group = self._file.read_row_group(group, names)
            columns = [row_group.column(name) for name in names]
            if any(len(column) != rows for column in columns):
                raise ValueError(f"it has other than the {rows:,} rows that the footer says")
            if any(column.null_count for column in columns):
                raise ValueError("a coordinate or value is null")
            return row_group

    @property
    def largest_group(self) -> int:
        """Return the most bytes that reading a row group takes."""
        return max((self._nbytes(group, self.names) for group in range(len(self.starts) - 1)), default=0)

    def _nbytes(self, group: int, names: Sequence[str]) -> int:
        """Return the bytes of columns of a row group, unpacked and decoded."""
        with memory.of_file(f"{self.path}: row group {group}", Exception):
            chunks = map(self._file.metadata.row_group(group).column, range(self._file.metadata.num_columns))
            unpacked = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema in names)
        return max(0, unpacked) + 8 * len(names) * (self.starts[group + 1] - self.starts[group])

    def fault(self, reason: str) -> IOFormatError:
        """Return an error that names the file."""
        return IOFormatError(f"{self.path}: {reason}")

    @property
    def crc(self) -> int:
        """The checksum of the footer, which depends on places and sizes of pages, ranges of columns, and the shape."""
        with self._lock.own:
            self._raw.seek(-8, os.SEEK_END)
            size = int.from_bytes(self._raw.read(4), "little")
            self._raw.seek(-8 - size, os.SEEK_END)
            return zlib.crc32(self._raw.read(size))


class PackedFile(Table):
    """The nonzeros of an open packed file, in lexicographic order; `sparsetc.open_packed` opens one.

    It may be read by several threads, and is closed by `close` or at the end of a ``with`` block. If a range ends in a
    row group, that group stays in memory for the next range. A copied or unpickled object opens the file again.

    Raises:
        IOFormatError: a file that is no packed file, is truncated or altered; the message names footer or row group.
        OSError: there is no such file, or it may not be read.

    Attributes:
        shape: sizes of all modes.
        dtype: of the values.
        labels: names of the modes and of their indices.

    Examples:
        >>> stc.write("x.parquet", stc.eye(4))
        >>> with stc.open_packed("x.parquet") as file:
        ...     file.rows(1, 3)[0]
        tensor([[1, 2],
                [1, 2]])
    """

    def _read_footer(self) -> None:
        super()._read_footer()
        self.shape, self.dtype = packed.header_of(self._file.metadata.metadata)
        if not self.schema.equals(packed.schema_of(self.shape, self.dtype)):
            raise ValueError("columns that do not follow from its shape and dtype")
        if len({*self.starts}) < len(self.starts):
            raise ValueError("a row group without rows")
        self._opened = os.path.abspath(self.path)  # wherever the current folder is later
        self._held = (-1, [np.empty(0)])

    @property
    def order(self) -> int:
        """The number of modes."""
        return len(self.shape)

    @property
    def row_bytes(self) -> int:
        """The bytes of a nonzero in a SparseTensor."""
        return 8 * self.order + self.dtype.itemsize

    def __repr__(self) -> str:
        return f"PackedFile({str(self.path)!r}, shape={self.shape}, nnz={self.nnz}, dtype={self.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        return open_packed, (self._opened,)

    def __enter__(self) -> PackedFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Read nonzeros ``start`` to ``stop``: (order, n) int64 coordinates and (n,) values, in new memory.

        Raises:
            CoordinateError: the range is outside the file.
            IOFormatError: a row group was altered, coordinates lie outside the shape, or the file was closed.
        """
        self._check_range(start, stop, self.nnz, "nonzeros")
        coords = torch.empty((self.order, stop - start), dtype=torch.int64, device="cpu")
        values = torch.empty(stop - start, dtype=SUMMED_IN.get(self.dtype, self.dtype), device="cpu")
        into, at = [*coords.numpy(), *packed.columns(values)], start
        while at < stop:
            group = bisect_right(self.starts, at) - 1
            first, end = self.starts[group], min(stop, self.starts[group + 1])
            for column, part in zip(into, self._group(group, keep=end == stop), strict=True):
                column[at - start : end - start] = part[at - first : end - first]
            at = end
        return coords, values.to(self.dtype)

    take = block
    """The name of `block` in the interface of a stream's sources."""

    def rows(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Read the nonzeros whose coordinate of mode 0 is in ``first`` to below ``last``, as `block` returns them.

        Raises:
            CoordinateError: the range is not within mode 0.
            IOFormatError: as of `block`.
        """
        self._check_range(first, last, self.shape[0], "rows")
        start, stop = self._first_from(first), self._first_from(last)
        if start > stop:
            raise self.fault("nonzeros that are not in lexicographic order")
        return self.block(start, stop)

    def verify(self) -> None:
        """Check the whole file: checksums of pages, ranges of coordinates, and their order.

        Raises:
            IOFormatError: what is wrong, and where.
        """
        last, self._held = torch.empty((self.order, 0), dtype=torch.int64, device="cpu"), (-1, [])
        for start, stop in zip(self.starts, self.starts[1:], strict=False):
            coords, _ = self.block(start, stop)
            self._check_order(torch.cat((last, coords), 1))
            last = coords[:, -1:]

    def tensor(self) -> SparseTensor:
        """Read all nonzeros as a SparseTensor, checked as by `verify`.

        Raises:
            IOFormatError: as of `verify`.
            OutOfMemoryError: it would take more than the memory limit.
        """
        row = self.row_bytes + self.dtype.itemsize + memory.SORTED
        memory.check(self.path, "the tensor", self.nnz * row + self.largest_group)
        coords, values = self.block(0, self.nnz)
        self._check_order(coords)
        x = SparseTensor._of(coords, values, self.shape, True)
        return x.with_labels(self.labels) if self.labels else x

    @cached_property
    def labels(self) -> Labels:
        """Names of the modes and of their indices, as `SparseTensor.labels`; empty if the file has none.

        Raises:
            IOFormatError: the file's labels do not fit this tensor.
            OutOfMemoryError: they would take more than the memory limit.
        """
        text = (self._file.metadata.metadata or {}).get(packed.LABELS, b"[]")
        memory.check(self.path, "the labels", PARSED * len(text))
        try:
            named = [(str(name), of) for name, of in json.loads(text)]
            labels: Labels = dict.fromkeys(name for name, _ in named)
            if len(labels) < len(named):
                raise ValueError("two modes of one name")
            for (name, of), size in zip(named, self.shape, strict=bool(named)):
                kinds = {type(label) for label in of or ()}
                if of is not None and (len(of) != size or len(kinds) > 1 or not kinds <= {str, int, float}):
                    raise ValueError(f"those of {name[:40]!r} are not {size} texts or {size} numbers")
                if str in kinds:
                    memory.check(self.path, "the labels", 4 * len(of) * max(map(len, of)))
                labels[name] = None if of is None else np.array(of)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise self.fault(f"its labels: {error}"[:200]) from None
        return labels

    def _check_range(self, start: int, stop: int, size: int, what: str) -> None:
        if self._raw.closed:
            raise self.fault("the file was closed")
        if not all(isinstance(n, int | np.integer) for n in (start, stop)) or not 0 <= start <= stop <= size:
            raise CoordinateError(f"{self.path}: {what} {start!r:.40} to {stop!r:.40} of {size:,}")

    def _group(self, group: int, keep: bool) -> list[np.ndarray]:
        """The columns of a row group, their coordinates within the sizes."""
        number, columns = self._held
        if number != group:
            columns = self.group(group)
            for mode, (column, size) in enumerate(zip(columns, self.shape, strict=False)):
                if column.size and not 0 <= int(column.min()) <= int(column.max()) < size:
                    raise self.fault(f"row group {group}: a coordinate of mode {mode} outside its size, {size}")
        self._held = (group, columns) if keep else (-1, [])
        return columns

    def _first_from(self, row: int) -> int:
        """The number of the first nonzero whose coordinate of mode 0 is at least ``row``."""

        def leading(group: int) -> np.ndarray:
            return self.group(group, self.names[:1])[0]

        # of the row groups those before `low` begin below the row
        low = bisect_left(range(len(self.starts) - 1), row, key=lambda group: int(leading(group)[0]))
        return self.starts[low - 1] + int(np.searchsorted(leading(low - 1), row)) if low else 0

    def _check_order(self, coords: Tensor) -> None:
        if not crd.is_coalesced(coords, self.shape):
            raise self.fault("nonzeros that are not in lexicographic order, or not unique")


def open_packed(path: FilePath) -> PackedFile:
    """Open a packed file (.parquet of `write` or `pack`) for reading in row groups; only its footer is read now.

    Raises:
        IOFormatError: not a packed file, or a truncated or altered one.
        FileNotFoundError: no such file.
        ImportError: pyarrow is not installed.

    Examples:
        >>> stc.write("x.parquet", stc.eye(4))
        >>> with stc.open_packed("x.parquet") as file:
        ...     file.shape, file.nnz
        ((4, 4), 4)
    """
    return PackedFile(path)


def read(path: FilePath) -> SparseTensor:
    """Return the tensor in a packed file. Errors are those of `foreign.read`."""
    with closing(PackedFile(path)) as file:
        return file.tensor()
