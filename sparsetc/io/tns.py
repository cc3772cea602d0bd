"""FROSTT's text format, .tns, also compressed: a line a nonzero, coordinates from 1, then the value.

In: a path. Out: a SparseTensor; or the other way round. ``#`` starts a comment. Before the first nonzero, a comment
line ``# shape: 4 5 6`` gives the sizes (write leaves one); so do two first lines that hold the order and the sizes, as
some tools write them, with the number of nonzeros in extended FROSTT and in the text of the Tensor Toolbox and pyttb.
What says them twice must agree. Otherwise each size is the largest coordinate.
"""

from __future__ import annotations

import re

import torch

from sparsetc.errors import DtypeError
from sparsetc.io import bounds, lines, table
from sparsetc.support import FilePath, Ints
from sparsetc.tensor.dtypes import dtype_name
from sparsetc.tensor.sparse_tensor import SparseTensor

COMMENT = b"#"
_SHAPE = re.compile(rb"^[ \t]*#[ \t]*shape:((?:[ \t]+\d{1,19})+)[ \t]*$", re.MULTILINE)
_EXTENDED = re.compile(rb"^[ \t]*#.*extended FROSTT format", re.MULTILINE | re.IGNORECASE)
_ONE_FIELD = "expected coordinates and a value, found 1 field that is not the order of as many sizes on the next line"


def head(
    reader: lines.LineReader, dtype: torch.dtype | None, default: torch.dtype = torch.float64
) -> table.TableLayout:
    """Read the comments before the first nonzero. Return the layout of the lines, with the sizes and dtype they state.

    A comment ``# dtype: float64`` says the dtype, which `write` leaves. Where nothing says it the layout is open, of
    dtype ``default``.

    Raises:
        IOFormatError: with file, line number and text, for whatever is not as described above.
        DtypeError: complex numbers, asked for by ``dtype`` or that comment.
    """
    declared, rows = _declared(reader)
    first = reader.peek()
    sizes = _commented(reader, declared)
    if first is None and sizes is None:
        raise reader.fault("no nonzeros, and no '# shape: ...' comment that would give the sizes")
    order = len(sizes) if sizes else len(first or ()) - 1
    if order > bounds.ORDER:
        reason = f"a tensor of {order} modes; a file holds at most {bounds.ORDER}"
        raise reader.fault(reason, reader.line, reader.shown())
    dtype = dtype or table.stated_dtype(reader)
    if dtype and dtype.is_complex:
        raise DtypeError(f"{reader.path}: a .tns file holds real numbers; it cannot be read as {dtype}")
    return table.TableLayout(order, 1, dtype or default, sizes, rows, dtype_open=dtype is None)


def _declared(reader: lines.LineReader) -> tuple[Ints | None, int | None]:
    """The sizes and the number of nonzeros, as far as lines before the first nonzero say them.

    Lines of the order and of the sizes; of the order and the number, and of the sizes (extended FROSTT); or the Tensor
    Toolbox's ``sptensor``, the order, the sizes, the number.
    """
    of_toolbox = reader.peek() == [b"sptensor"]
    if of_toolbox:
        reader.take()
    first = reader.peek() or []
    extended = len(first) == 2 and _EXTENDED.search(reader.head) is not None
    if len(first) != 1 and not extended:
        return None, None
    fault = reader.fault(_ONE_FIELD, reader.line, reader.shown())
    order, *count = reader.take()
    sizes = reader.take()
    if not sizes or order != b"%d" % len(sizes) or not all(re.fullmatch(rb"\d{1,19}", size) for size in sizes):
        raise fault
    if of_toolbox:
        count = reader.peek() or [b""]
        fault = reader.fault("expected the number of nonzeros", reader.line, reader.shown())
        reader.take()
    if count and not (len(count) == 1 and re.fullmatch(rb"\d{1,19}", count[0])):
        raise fault
    return tuple(map(int, sizes)), int(count[0]) if count else None


def _commented(reader: lines.LineReader, sizes: Ints | None) -> Ints | None:
    """Return the sizes of ``# shape:`` comments, or ``sizes`` without one. Raise IOFormatError if two disagree."""
    for match in _SHAPE.finditer(reader.head):
        stated = tuple(map(int, match[1].split()))
        if sizes not in (None, stated):
            line = 1 + reader.head.count(b"\n", 0, match.start())
            raise reader.fault(f"other sizes than were given before, {_spaced(sizes)}", line, match[0])
        sizes = stated
    return sizes


def _spaced(sizes: Ints | None) -> str:
    return " ".join(map(str, sizes or ()))


def write(path: FilePath, x: SparseTensor) -> None:
    """Write one line a nonzero in the order of ``x``, after the shape; ``.gz`` at the end compresses.

    Values are written with the fewest digits that read back as the same number. Dense modes become coordinates.
    DtypeError for complex values. The old file, if any, stays until the new one is complete.
    """
    if x.dtype.is_complex:
        raise DtypeError(f"a .tns file holds real numbers, not {x.dtype}; write .npz")
    comments = f"# shape: {_spaced(x.shape)}\n# dtype: {dtype_name(x.dtype)}\n"
    table.write(path, comments, x)
