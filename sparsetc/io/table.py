"""Tables of coordinates and numbers in text, as .tns and .mtx files have them: parsed block by block, faults located.

In: a reader past the head of its file, and what each line should hold. Out: columns. A block that cannot be read is
halved until the first bad line is found, so what is refused, and which line is named, is decided by the same parser
that reads good files, and does not depend on where blocks are cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from sparsetc.errors import IOFormatError
from sparsetc.io import bounds, digits, memory, numbers
from sparsetc.io.lines import WASTE, LineReader, TextBlock
from sparsetc.tensor.inputs import NAMED


@dataclass(frozen=True)
class TableLayout:
    """What every line of a table holds: ``order`` coordinates from 1, then ``reals`` numbers of ``dtype``.

    Attributes:
        sizes: largest coordinate of each mode, where the head of the file says.
        rows: rows that the head of the file declares, which messages call entries; None where it says nothing.
        dtype_open: whether no dtype was asked for: what is read as float64 may be float32, and what would lose digits
            is refused.
    """

    order: int
    reals: int
    dtype: torch.dtype
    comment: bytes
    sizes: tuple[int, ...] | None = None
    rows: int | None = None
    dtype_open: bool = False

    @property
    def fields(self) -> int:
        """Fields on a line."""
        return self.order + self.reals

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes in a tensor: coordinates are int64."""
        return 8 * self.order + self.dtype.itemsize * max(self.reals, 1)


Describe = Callable[[Sequence[str], TableLayout], str | None]
"""What is wrong with the fields of one bad line, in the terms of the format, or None where it finds nothing."""

_DTYPE = re.compile(rb"^[ \t]*[#%][ \t]*dtype:[ \t]+(\w{1,20})[ \t]*$", re.MULTILINE)
_EMPTY = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class ParsedPart:
    """The columns of a block.

    Attributes:
        coords: from 0, (rows,) a mode, int32 where they fit and else int64.
        reals: numbers, (rows,) a column.
        largest: largest coordinate of each mode, from 1.
        lines: lines of text, those without fields included.
        single: whether float32 holds all digits of the numbers; known where the layout is open.
    """

    coords: list[np.ndarray]
    reals: list[torch.Tensor]
    largest: list[int]
    rows: int
    lines: int
    single: bool = True


_NOTHING = ParsedPart([], [], [], 0, 0)


@dataclass
class Table:
    """What has been read of a table.

    Attributes:
        largest: largest coordinate of each mode, from 1.
    """

    layout: TableLayout
    rows: int = 0
    largest: list[int] = field(default_factory=list)
    _parts: list[ParsedPart] = field(default_factory=list)

    def add(self, part: ParsedPart) -> None:
        """Append the rows of a block."""
        if not part.rows:
            return
        self.rows += part.rows
        self.largest = list(map(max, part.largest, self.largest)) if self._parts else part.largest
        self._parts.append(part)

    def coords(self) -> torch.Tensor:
        """Coordinates (order, rows), int64, from 0; to be called once, since blocks are let go on the way."""
        made = torch.empty((self.layout.order, self.rows), dtype=torch.int64)
        for mode in range(self.layout.order if self._parts else 0):
            np.concatenate([part.coords[mode] for part in self._parts], out=made[mode].numpy())
            for part in self._parts:
                part.coords[mode] = _EMPTY  # memory never holds two copies of all modes
        return made

    def reals(self) -> list[torch.Tensor]:
        """Columns of numbers, (rows,) each; where the layout is open float32 if that holds all their digits."""
        if self.layout.dtype_open and all(part.single for part in self._parts):
            self.layout = replace(self.layout, dtype=torch.float32)
            for part in self._parts:
                part.reals[:] = [column.float() for column in part.reals]
        empty = torch.zeros(0, dtype=self.layout.dtype)
        return [
            torch.cat([part.reals[at] for part in self._parts]) if self._parts else empty
            for at in range(self.layout.reals)
        ]

    @property
    def footprint(self) -> str:
        """What the rows read so far need, in words."""
        nbytes = self.rows * self.layout.row_bytes
        return f"{self.rows:,} nonzeros were read, which take {nbytes:,} bytes, and up to three times that meanwhile"


def read(reader: LineReader, table: Table, describe: Describe) -> None:
    """Fill ``table`` with the rest of the file.

    Raises:
        IOFormatError: a line that is not as the layout says, or more lines than it says.
        OutOfMemoryError: more rows than the memory limit allows.
    """
    limit = memory.limit()
    for part in parts(reader, table.layout, describe):
        table.add(part)
        _check(reader, table, limit)


def parts(reader: LineReader, layout: TableLayout, describe: Describe) -> Iterator[ParsedPart]:
    """The rest of the file a block at a time, those without rows included.

    While a part is with the caller, `reader.line` and `reader.numbers` are those before it.

    Raises:
        IOFormatError: a line that is not as the layout says, after the rows before it.
    """
    for block in reader.blocks():
        try:
            part = _parse(block, layout)
            bad = None
        except digits.BadToken:
            part, bad = _good_part(block, layout)
        yield part
        reader.line += part.lines
        reader.numbers += part.rows * layout.fields
        if bad:
            raise _fault(reader, bad, layout, describe)


def _check(reader: LineReader, table: Table, limit: int) -> None:
    """Refuse more rows than were declared, or than memory holds, whichever comes first in the file."""
    declared, held = table.layout.rows, limit // table.layout.row_bytes
    if declared is not None and declared <= held:
        check_declared(reader, table.layout, table.rows)
    if table.rows > held:
        nbytes = (held + 1) * table.layout.row_bytes
        raise memory.refused(reader.path, f"its first {held + 1:,} nonzeros", nbytes, limit)


def stated_dtype(reader: LineReader) -> torch.dtype | None:
    """What a comment ``dtype: float64`` before the first number says; None where none does, or no known dtype."""
    said = [match[1].decode() for _, comments in reader.comments if (match := _DTYPE.search(comments))]
    return next((dtype for name, dtype in NAMED.items() if name in said), None)


def check_declared(reader: LineReader, layout: TableLayout, rows: int, ended: bool = False) -> None:
    """IOFormatError where a file that declares how many rows it has is found to have more or, once ended, fewer."""
    if layout.rows is None:
        return
    if rows > layout.rows:
        raise reader.fault(
            f"too long: the header declares {layout.rows} entries, the file has {layout.rows + 1} or more"
        )
    if ended and rows < layout.rows:
        raise reader.fault(f"truncated: the header declares {layout.rows} entries, the file has {rows}")


def _parse(block: TextBlock, layout: TableLayout) -> ParsedPart:
    """The columns of a block; BadToken if any line is not as ``layout`` says."""
    stripped = digits.without(layout.comment, block.text)
    text = digits.Text(stripped)
    start, end = text.tokens()
    if block.read + len(block.text) > bounds.SLACK + bounds.PER_NUMBER * block.numbers:
        _check_waste(block, layout)
    if start.size == 0:
        return replace(_NOTHING, lines=text.lines)
    if start.size % layout.fields or not digits.is_table(text, start, end, layout.fields):
        raise digits.BadToken("wrong number of fields")
    columns = [(start[at :: layout.fields], end[at :: layout.fields]) for at in range(layout.fields)]
    coords, largest = [], []
    for mode in range(layout.order):
        column = digits.coordinates(text, *columns[mode])
        high = int(column.max())
        if int(column.min()) < 1 or (layout.sizes is not None and high > layout.sizes[mode]):
            raise digits.BadToken("coordinate out of range")
        column -= 1
        coords.append(column.astype(np.int32) if high < 2**31 else column)
        largest.append(high)
    kind, written = torch.float64 if layout.dtype_open else layout.dtype, columns[layout.order :]
    reals = [numbers.real(text, *column, kind) for column in written]
    single = not layout.dtype_open or min(numbers.single(text, *w, r) for w, r in zip(written, reals, strict=True))
    if not single and layout.dtype != kind:
        raise digits.BadToken(f"a number with more digits than {layout.dtype} holds; name the dtype to read it as")
    reals = [column.to(layout.dtype) for column in reals]
    return ParsedPart(coords, reals, largest, start.size // layout.fields, text.lines, single)


def _check_waste(block: TextBlock, layout: TableLayout) -> None:
    """BadToken where, up to any number or to the end of the block, text is more than its numbers may take."""
    start, _ = digits.Text(digits.without(layout.comment, block.text, keep_length=True)).tokens()
    before = np.arange(start.size + 1)
    passed = np.append(start, len(block.text)) - bounds.PER_NUMBER * before
    if block.read + int(passed.max()) > bounds.SLACK + bounds.PER_NUMBER * block.numbers:
        raise digits.BadToken(WASTE)


def _good_part(block: TextBlock, layout: TableLayout) -> tuple[ParsedPart, TextBlock]:
    """The columns of the lines before the first bad one, and that line, of a block that has one."""
    ends = np.flatnonzero(np.frombuffer(block.text, dtype=np.uint8) == 10) + 1
    cuts = [0, *ends.tolist()]
    good, bad = 0, len(cuts) - 1  # numbers of lines: so many are good, so many are not
    part = _NOTHING
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            part = _parse(block.part(0, cuts[middle], 0, 0), layout)
            good = middle
        except digits.BadToken:
            bad = middle
    return part, block.part(cuts[good], cuts[bad], good, part.rows * layout.fields)


def _fault(reader: LineReader, bad: TextBlock, layout: TableLayout, describe: Describe) -> IOFormatError:
    """The error for a bad line."""
    reason = ""
    try:
        _parse(bad, layout)
    except digits.BadToken as error:
        reason = str(error)
    fields = digits.without(layout.comment, bad.text).split()
    described = describe([field.decode("latin-1") for field in fields], layout) if fields and reason != WASTE else None
    return reader.fault(described or reason, bad.line, bad.text)
