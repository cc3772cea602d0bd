"""Tables of coordinates and numbers in text, as .tns and .mtx files have them: parsed block by block, and written.

In: a reader past the head of its file, and what each line should hold. Out: columns. Where a block cannot be read the
lines before its first bad one are read without it, so which line is named does not depend on where blocks are cut.

In: a tensor. Out: lines whose numbers have the fewest digits that read back the same, in a file that is compressed
where its name ends in ``.gz``.
"""

from __future__ import annotations

import gzip
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.io import lines, loops, memory, numbers, packed
from sparsetc.io.atomic import replacing
from sparsetc.io.lines import LineReader
from sparsetc.support import FilePath, Ints
from sparsetc.support.files import native
from sparsetc.tensor.coords import INT32_MAX
from sparsetc.tensor.dtypes import NAMED
from sparsetc.tensor.sparse_tensor import SparseTensor

FROM_0 = "; of a file that counts from 0: t = numpy.loadtxt(path); SparseTensor(t[:, :-1].T.astype(int), t[:, -1])"
"""Advice for a file of coordinates that this reader does not take."""
LINES = 50_000
"""Lines formatted at a time."""
MANY = 4096
"""Nonzeros of a tensor for which pyarrow is imported to write them."""


@dataclass(frozen=True)
class TableLayout:
    """The layout of every line of a table: ``order`` coordinates from 1, then ``reals`` numbers of ``dtype``.

    Attributes:
        sizes: largest coordinate of each mode, where the head of the file says.
        rows: rows that the head of the file declares, which messages call entries; None where it says nothing.
        dtype_open: whether no dtype was asked for: what is read as float64 may be float32, and what would lose digits
            is refused.
        kind: dtype of the values that are made of the numbers of a block; that of the numbers by default.
        entries: makes coordinates and values of the columns of a part.
    """

    order: int
    reals: int
    dtype: torch.dtype
    sizes: Ints | None = None
    rows: int | None = None
    dtype_open: bool = False
    kind: torch.dtype | None = None
    entries: Callable[[Tensor, list[Tensor]], tuple[Tensor, Tensor]] = lambda coords, reals: (coords, reals[0])

    @property
    def fields(self) -> int:
        """Fields on a line."""
        return self.order + self.reals

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes at most where parts become a tensor, beside them: values are copied once."""
        return 8 * self.order + 2 * self.dtype.itemsize * max(self.reals, 1) + memory.SORTED


@dataclass(frozen=True)
class ParsedPart:
    """The columns of a block.

    Attributes:
        coords: from 0, (rows,) a mode, int32 where they fit and else int64.
        reals: numbers, (rows,) a column.
        single: whether float32 holds all digits of the numbers; known where the layout is open.
        lines: of the text, blank ones too.
    """

    coords: list[np.ndarray]
    reals: list[Tensor]
    rows: int
    single: bool
    lines: int

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(c.nbytes for c in self.coords) + sum(real.nbytes for real in self.reals)


Fault = tuple[int, int | None, str]
"""The fault of a line of a block: how many lines are before it; how many fields of the line are before the one at
fault, None where the line is; and what is wrong."""
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1f]")
_DTYPE = re.compile(rb"^[ \t]*[#%][ \t]*dtype:[ \t]+(\w{1,20})[ \t]*$", re.MULTILINE)


def read(path: FilePath, comment: bytes, head: Callable[[LineReader], TableLayout], show: bool | None) -> SparseTensor:
    """Read a file as a tensor; where the layout is open, of float32 if that holds all digits of its numbers.

    Args:
        path: of the file.
        comment: the character that starts a comment.
        head: reads the head of the file.
        show: as in `lines.opened`.

    Raises:
        IOFormatError: a line that is not as the layout says, or more or fewer lines than it says.
        OutOfMemoryError: more rows than the memory limit allows.
    """
    with lines.opened(path, comment, show) as reader:
        layout = head(reader)
        coords, values = layout.entries(*_columns(reader, layout))
    return memory.tensor_of(path, coords, values, layout.sizes)


def _columns(reader: LineReader, layout: TableLayout) -> tuple[Tensor, list[Tensor]]:
    """Return coordinates (order, rows), int64, from 0; and columns of numbers, (rows,) each."""
    read_parts = list[ParsedPart]()
    rows = 0
    held = 0
    for part in parts(reader, layout):
        read_parts.append(part)
        rows += part.rows
        held += part.nbytes
        memory.check(reader.path, f"its first {rows:,} nonzeros", held + rows * layout.row_bytes)
    dtype = torch.float32 if layout.dtype_open and all(part.single for part in read_parts) else layout.dtype
    columns = [[part.reals[at].to(dtype) for part in read_parts] for at in range(layout.reals)]
    coords = torch.empty((layout.order, rows), dtype=torch.int64)
    for mode in reversed(range(layout.order if read_parts else 0)):  # which never holds all modes twice
        np.concatenate([part.coords.pop() for part in read_parts], out=coords[mode].numpy())
    return coords, [torch.cat([torch.zeros(0, dtype=dtype), *column]) for column in columns]


def parts(reader: LineReader, layout: TableLayout) -> Iterator[ParsedPart]:
    """Yield the rest of the file a block at a time, without blocks that have no rows.

    Raises:
        IOFormatError: a line that is not as the layout says, after the rows before it; more or fewer rows than it says.
    """
    rows = 0
    declares = f"the header declares {layout.rows} entries, the file has"
    for block in reader.blocks():
        part, fault = _parse(block, layout)
        rows += part.rows
        if layout.rows is not None and rows > layout.rows:
            raise reader.fault(f"too long: {declares} {layout.rows + 1} or more")
        if part.rows:
            yield part
        number, field, reason = fault or (part.lines, None, "")
        reader.line += number
        reader.numbers += part.rows * layout.fields
        if fault:
            line = block.split(b"\n")[number]
            if field is not None:
                token = line.split()[field].decode("latin-1")
                token = repr(token if len(token) <= 30 else token[:27] + "...")
                what = f"coordinate {token} of mode {field}" if field < layout.order else f"the value {token}"
                reason = f"{what} {reason}{FROM_0 if token == repr('0') else ''}"
            raise reader.fault(reason, reader.line, line)
    if layout.rows is not None and rows < layout.rows:
        raise reader.fault(f"truncated: {declares} {rows}")


def stated_dtype(reader: LineReader) -> torch.dtype | None:
    """Return the dtype of a comment such as ``dtype: float64`` before the first number, or None."""
    stated = (NAMED.get(name.decode()) for name in _DTYPE.findall(reader.head))
    return next((dtype for dtype in stated if dtype), None)


def _parse_natively(block: bytes, layout: TableLayout) -> ParsedPart | None:
    """The columns of a block; None without native loops, and for a block with a fault."""
    read_table = native(loops.table, memory.CPU, len(block))
    if read_table is None:
        return None
    most = len(block) // (2 * layout.fields) + 1  # a digit and a blank a field
    coords, reals = np.empty((layout.order, most), np.int32), np.empty((layout.reals, most))
    sizes = np.minimum(np.array(layout.sizes or [INT32_MAX] * layout.order), INT32_MAX)
    counted, ends = np.zeros(2, np.int64), np.zeros((layout.reals, most), np.int64)
    rows = read_table(np.frombuffer(block, np.uint8), sizes, coords, reals, ends, loops.POWERS, counted)
    lines, lost = counted.tolist()
    single = not (lost and layout.dtype_open)
    columns = []
    for real, end in zip(reals[:, : max(rows, 0)], ends, strict=True):
        at = end[: len(real)].nonzero()[0]
        tokens = [
            block[first:last] for first, last in zip(real[at].astype(int).tolist(), end[at].tolist(), strict=True)
        ]
        others, short, fault = numbers.column(tokens, layout.dtype, layout.dtype_open)
        real[at] = 0
        column, unfit = numbers.converted(torch.from_numpy(real), layout.dtype)
        if fault or bool(unfit.any()):
            return None
        column[torch.from_numpy(at)] = others
        columns.append(column)
        single &= short
    if rows < 0 or not (single or layout.dtype == torch.float64):
        return None
    return ParsedPart([row[:rows] for row in coords], columns, rows, single, lines)


def _parse(block: bytes, layout: TableLayout) -> tuple[ParsedPart, Fault | None]:
    """The columns of a block up to its first line that cannot be read, and why not."""
    if part := _parse_natively(block, layout):
        return part, None
    lines = block.split(b"\n")
    counts = [len(line.split()) for line in lines]
    control = _CONTROL.search(block)
    end = len(lines) if control is None else block.count(b"\n", 0, control.start())
    fault: Fault | None = None if control is None else (end, None, "a control character")
    wrong = next((number for number, count in enumerate(counts[:end]) if count not in (0, layout.fields)), None)
    if wrong is not None:
        values = ("no value", "a value", "2 values")[layout.reals]
        expected = f"expected {layout.fields} fields, {layout.order} coordinates and {values}"
        end, fault = wrong, (wrong, None, f"{expected}, found {counts[wrong]}")
    tokens, columns = b"\n".join(lines[:end]).split(), list[Tensor]()
    single = True
    for field in range(layout.fields):
        of_field = tokens[field :: layout.fields]
        if field < layout.order:
            column, reason = _coordinates(of_field, layout.sizes[field] if layout.sizes else 2**63 - 1)
        else:
            column, short, reason = numbers.column(of_field, layout.dtype, layout.dtype_open)
            single &= short
        columns.append(column)
        if reason:
            fault = [number for number, count in enumerate(counts) if count][len(column)], field, reason
            del tokens[len(column) * layout.fields :]
    rows = len(tokens) // layout.fields
    coords = [column[:rows].numpy() for column in columns[: layout.order]]
    reals = [column[:rows] for column in columns[layout.order :]]
    return ParsedPart(coords, reals, rows, single, len(lines) - 1), fault


def _coordinates(tokens: Sequence[bytes], size: int) -> tuple[Tensor, str]:
    """Return coordinates from 0, int32 if they fit, and the fault of the first token after them."""
    coords = list[int]()
    with suppress(ValueError):  # of more digits than Python converts
        coords.extend(takewhile(range(1, size + 1).__contains__, map(int, takewhile(bytes.isdigit, tokens))))
    dtype = np.int32 if max(coords, default=0) <= INT32_MAX else np.int64
    fault = f"is not a whole number from 1 to {'2**63 - 1' if size == 2**63 - 1 else size}"
    return torch.from_numpy(np.array(coords, dtype) - dtype(1)), fault if len(coords) < len(tokens) else ""


def write(path: FilePath, head: str, x: SparseTensor) -> None:
    """Write ``head``, then a line a nonzero: coordinates from 1, and the value, or its real and imaginary part."""
    x = x.expand_dense()
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    coords, values, _ = (x.to(torch.float32) if narrow else x).to_numpy()  # exact, and numpy knows it
    values = values.astype(np.uint8) if values.dtype == bool else values
    columns = np.stack((values.real, values.imag) if x.dtype.is_complex else (values,))
    csv = None
    if x.nnz >= MANY:
        with suppress(ImportError):
            csv = import_module("pyarrow.csv")
    with replacing(path) as file:
        # no name and no time inside, so that equal tensors make equal files
        zipped = gzip.GzipFile("", "wb", 9, file, mtime=0) if os.fspath(path).lower().endswith(".gz") else None
        with zipped or nullcontext(file) as out:
            out.write(head.encode())
            for at in range(0, x.nnz, LINES):
                out.write(_formatted(coords[:, at : at + LINES], columns[:, at : at + LINES], csv))


def _formatted(coords: np.ndarray, values: np.ndarray, csv: Any) -> bytes:
    """Return the text of lines, by pyarrow's module ``csv`` or, in five times the time, without it."""
    columns = [*(coords + 1), *values]
    if csv is None:
        lines = zip(
            *(column.astype("U32").tolist() for column in columns), strict=True
        )  # the fewest digits of the dtype
        return "".join(f"{' '.join(line)}\n" for line in lines).encode()
    text = io.BytesIO()
    options = csv.WriteOptions(include_header=False, delimiter=" ", quoting_style="none")
    csv.write_csv(packed.library().table(columns, list(map(str, range(len(columns))))), text, options)
    return text.getvalue()
