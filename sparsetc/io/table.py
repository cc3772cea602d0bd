"""Tables of coordinates and numbers in text, as .tns and .mtx files have them: parsed block by block, and written.

In: a reader past the head of its file, and what each line should hold. Out: columns. Where a block cannot be read the
lines before its first bad one are read without it, so which line is named does not depend on where blocks are cut.

In: a tensor. Out: lines whose numbers have the fewest digits that read back the same, in a file that is compressed
where its name ends in ``.gz``.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsetc.io import digits, loops, memory, numbers
from sparsetc.io.atomic import replacing
from sparsetc.io.lines import LineReader
from sparsetc.support import FilePath
from sparsetc.support.compiled import native
from sparsetc.tensor.coords import INT32_MAX
from sparsetc.tensor.dtypes import NAMED
from sparsetc.tensor.sparse_tensor import SparseTensor

FROM_0 = "; of a file that counts from 0: t = numpy.loadtxt(path); SparseTensor(t[:, :-1].T.astype(int), t[:, -1])"
"""Advice for a file of coordinates that this reader does not take."""
LINES = 50_000
"""Lines formatted at a time."""
LONGEST = 24
"""Characters of a number, and of the blank behind it, at most."""


@dataclass(frozen=True)
class TableLayout:
    """The layout of every line of a table: ``order`` coordinates from 1, then ``reals`` numbers of ``dtype``.

    Attributes:
        sizes: largest coordinate of each mode, where the head of the file says.
        rows: rows that the head of the file declares, which messages call entries; None where it says nothing.
        dtype_open: whether no dtype was asked for: what is read as float64 may be float32, and what would lose digits
            is refused.
    """

    order: int
    reals: int
    dtype: torch.dtype
    sizes: tuple[int, ...] | None = None
    rows: int | None = None
    dtype_open: bool = False

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


Describe = Callable[[int, str], str]
"""A function that names the coordinate of a mode in messages, given the mode and its text."""

_DTYPE = re.compile(rb"^[ \t]*[#%][ \t]*dtype:[ \t]+(\w{1,20})[ \t]*$", re.MULTILINE)


def read(reader: LineReader, layout: TableLayout, describe: Describe) -> tuple[Tensor, list[Tensor]]:
    """Read the rest of the file.

    Returns:
        Coordinates (order, rows), int64, from 0; and columns of numbers, (rows,) each, where the layout is open of
        float32 if that holds all their digits.

    Raises:
        IOFormatError: a line that is not as the layout says, or more or fewer lines than it says.
        OutOfMemoryError: more rows than the memory limit allows.
    """
    read_parts = list[ParsedPart]()
    rows = 0
    held = 0
    for part in parts(reader, layout, describe):
        read_parts.append(part)
        rows += part.rows
        held += part.nbytes
        check_declared(reader, layout, rows)
        memory.check(reader.path, f"its first {rows:,} nonzeros", held + rows * layout.row_bytes)
    check_declared(reader, layout, rows, ended=True)
    dtype = torch.float32 if layout.dtype_open and all(part.single for part in read_parts) else layout.dtype
    columns = [[part.reals[at].to(dtype) for part in read_parts] for at in range(layout.reals)]
    coords = torch.empty((layout.order, rows), dtype=torch.int64)
    for mode in reversed(range(layout.order if read_parts else 0)):  # which never holds all modes twice
        np.concatenate([part.coords.pop() for part in read_parts], out=coords[mode].numpy())
    return coords, [torch.cat([torch.zeros(0, dtype=dtype), *column]) for column in columns]


def parts(reader: LineReader, layout: TableLayout, describe: Describe) -> Iterator[ParsedPart]:
    """Yield the rest of the file a block at a time, without blocks that have no rows.

    Raises:
        IOFormatError: a line that is not as the layout says, after the rows before it.
    """
    for block in reader.blocks():
        part, fault = _before_fault(block, layout)
        if part.rows:
            yield part
        reader.line += fault.line if fault else part.lines
        reader.numbers += part.rows * layout.fields
        if fault:
            line = block.split(b"\n")[fault.line]
            what = ""
            token = ""
            if fault.field is not None:
                token = line.split()[fault.field].decode("latin-1")
                token = repr(token if len(token) <= 30 else token[:27] + "...")
                what = describe(fault.field, token) if fault.field < layout.order else f"the value {token}"
            hint = FROM_0 if token == "'0'" else ""
            raise reader.fault(f"{what} {fault}{hint}".strip(), reader.line, line)


def stated_dtype(reader: LineReader) -> torch.dtype | None:
    """Return the dtype of a comment such as ``dtype: float64`` before the first number, or None."""
    stated = (NAMED.get(name.decode()) for name in _DTYPE.findall(reader.head))
    return next((dtype for dtype in stated if dtype), None)


def check_declared(reader: LineReader, layout: TableLayout, rows: int, ended: bool = False) -> None:
    """IOFormatError where a file that declares how many rows it has is found to have more or, once ended, fewer."""
    declared = rows if layout.rows is None else layout.rows
    if rows > declared or (ended and rows < declared):
        how, entries = ("too long", f"{declared + 1} or more") if rows > declared else ("truncated", rows)
        raise reader.fault(f"{how}: the header declares {declared} entries, the file has {entries}")


def _before_fault(block: bytes, layout: TableLayout) -> tuple[ParsedPart, digits.BadToken | None]:
    """The columns of a block up to its first line that cannot be read, and why not."""
    lines, fault = [block], None
    while True:  # columns are read one by one, so that another may have a fault in an earlier line
        try:
            return _parse(b"".join(lines), layout), fault
        except digits.BadToken as error:
            lines, fault = block.splitlines(keepends=True)[: error.line], error


def _parse_natively(block: bytes, layout: TableLayout) -> ParsedPart | None:
    """The columns of a block; None without native loops, and where any line holds anything but plain numbers."""
    read_table = native(loops.table, memory.CPU, len(block)) if layout.dtype.is_floating_point else None
    if read_table is None:
        return None
    most = len(block) // (2 * layout.fields) + 1  # a digit and a blank a field
    coords, reals = np.empty((layout.order, most), np.int32), np.empty((layout.reals, most))
    sizes = np.minimum(np.array(layout.sizes or [INT32_MAX] * layout.order), INT32_MAX)
    counted = np.zeros(2, np.int64)
    rows = read_table(np.frombuffer(block, np.uint8), sizes, coords, reals, digits.EXACT_POWERS, counted)
    lines, lost = counted.tolist()
    single = not (lost and layout.dtype_open)
    if rows < 0 or not (single or layout.dtype == torch.float64):
        return None
    columns = [torch.from_numpy(column[:rows]).to(layout.dtype) for column in reals]
    if layout.dtype == torch.float16 and any(bool(column.isinf().any()) for column in columns):
        return None
    return ParsedPart([row[:rows] for row in coords], columns, rows, single, lines)


def _parse(block: bytes, layout: TableLayout) -> ParsedPart:
    """The columns of a block; BadToken if any line is not as ``layout`` says."""
    if part := _parse_natively(block, layout):
        return part
    text = digits.Text(block)
    start, end = text.tokens()
    expected = f"{layout.order} coordinates and {('no value', 'a value', '2 values')[layout.reals]}"
    text.check_fields(start, end, layout.fields, f"expected {layout.fields} fields, {expected}")
    columns = [(start[at :: layout.fields], end[at :: layout.fields]) for at in range(layout.fields)]
    coords = []
    reals = []
    single = True
    for column, size in zip(columns, layout.sizes or [2**63 - 1] * layout.order, strict=False):
        coordinates = digits.coordinates(text, *column, size)
        coords.append(coordinates.astype(np.int32) if coordinates.max(initial=0) < 2**31 else coordinates)
    for column in columns[layout.order :]:
        if layout.dtype_open:
            real, narrow = numbers.unnamed(text, *column, layout.dtype)
            single &= narrow
        else:
            real = numbers.real(text, *column, layout.dtype)
        reals.append(real)
    return ParsedPart(coords, reals, columns[0][0].size, single, block.count(b"\n"))


def write(path: FilePath, head: str, x: SparseTensor) -> None:
    """Write ``head``, then a line a nonzero: coordinates from 1, and the value, or its real and imaginary part."""
    x = x.expand_dense()
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    coords, values, _ = (x.to(torch.float32) if narrow else x).to_numpy()  # exact, and numpy knows it
    columns = np.stack((values.real, values.imag) if x.dtype.is_complex else (values,))
    with replacing(path) as file:
        # no name and no time inside, so that equal tensors make equal files
        zipped = gzip.GzipFile("", "wb", 9, file, mtime=0) if os.fspath(path).lower().endswith(".gz") else None
        with zipped or nullcontext(file) as out:
            out.write(head.encode())
            for at in range(0, x.nnz, LINES):
                out.write(_formatted(coords[:, at : at + LINES], columns[:, at : at + LINES]))


def _formatted(coords: np.ndarray, values: np.ndarray) -> bytes:
    (order, count), fields = coords.shape, values.shape[0]
    with np.errstate(invalid="ignore"):  # of a NaN that signals
        wide = values.astype(np.float64)
    held = np.isfinite(wide).all() and (np.abs(wide) < 2**53).all()
    whole = values.dtype.kind == "i" or (held and (values == np.rint(values)).all())
    whole = bool(whole and not (np.signbit(values) & (values == 0)).any())  # -0.0 keeps its sign
    write_lines = native(loops.lines, memory.CPU, LONGEST * values.size)
    if write_lines is None or not (held if whole else values.dtype == np.float32):
        return _by_numpy(coords, values, whole)
    text, used = np.empty(count * LONGEST * (order + fields), np.uint8), np.zeros(1, np.int64)
    done, at = list[bytes](), 0
    while at < count:
        stopped = write_lines(at, coords, wide, whole, digits.EXACT_POWERS, text, used)
        line = slice(stopped, stopped + 1)
        done += [text[: used[0]].tobytes(), _by_numpy(coords[:, line], values[:, line], whole)]
        at = stopped + 1
    return b"".join(done)


def _by_numpy(coords: np.ndarray, values: np.ndarray, whole: bool) -> bytes:
    (order, count), fields = coords.shape, values.shape[0]
    if whole:
        table = np.concatenate((coords + 1, values.astype(np.int64)))
        line = " ".join(["%d"] * (order + fields)) + "\n"
        return (line * count % tuple(table.T.ravel().tolist())).encode()
    table = np.empty((order + fields, count), dtype=object)
    table[:order] = coords + 1
    table[order:] = values.astype("U32")  # shortest repr of the dtype at hand
    line = " ".join(["%d"] * order + ["%s"] * fields) + "\n"
    return (line * count % tuple(table.T.ravel())).encode()
