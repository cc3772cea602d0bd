"""Matrix Market, .mtx and .mtx.gz: a banner, a line of sizes, a line an entry, coordinates from 1.

In: a path. Out: a SparseTensor of order 2; or the other way round. Every field (real, integer, complex, pattern, whose
values are 1) and symmetry is read, symmetric ones in full; the dense ``array`` format is refused. What is written is
``coordinate``, ``general``.

scipy.io.mmread is not used: it allocates what a header declares before it reads an entry, and knows no memory limit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsetc.errors import DtypeError, ShapeError
from sparsetc.io import lines, memory, table
from sparsetc.support import FilePath
from sparsetc.tensor.dtypes import dtype_name
from sparsetc.tensor.sparse_tensor import SparseTensor

COMMENT = b"%"
_BANNER = re.compile(rb"%%MatrixMarket[ \t]+matrix[ \t]+coordinate[ \t]+(\w+)[ \t]+([\w-]+)[ \t]*$", re.I | re.M)
TRIANGLES = 5
"""Peak memory of `in_full`, as a multiple of one triangle: that one, the other twice, and both together."""
_NUMBERS = {"pattern": 0, "real": 1, "double": 1, "integer": 1, "complex": 2}
_SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")


def head(
    reader: lines.LineReader, dtype: torch.dtype | None, default: torch.dtype = torch.float64
) -> table.TableLayout:
    """Read the header. Return the layout of the lines after it, in ``dtype`` or in the dtype of a comment.

    A comment ``% dtype: float64`` says the dtype, which `write` leaves. Where nothing says it the layout is open, of
    dtype ``default``.

    Raises:
        IOFormatError: it is not the header of a sparse matrix.
        DtypeError: the file's numbers cannot be read as the dtype.
    """
    sizes = reader.peek() or []
    banner = _BANNER.match(reader.head)
    field, symmetry = (word.decode().lower() for word in banner.groups()) if banner else ("", "")
    if field not in _NUMBERS or symmetry not in _SYMMETRIES:
        dense = b"array" in reader.head.split(b"\n", 1)[0]
        raise reader.fault(
            "a dense matrix, for SparseTensor.from_dense(scipy.io.mmread(path))"
            if dense
            else f"expected the banner '%%MatrixMarket matrix coordinate FIELD SYMMETRY', FIELD one of "
            f"{', '.join(_NUMBERS)}, SYMMETRY one of {', '.join(_SYMMETRIES)}",
            1,
            (reader.head or reader.shown()).split(b"\n", 1)[0],
        )
    if len(sizes) != 3 or not all(re.fullmatch(rb"\d{1,19}", size) and int(size) < 2**63 for size in sizes):
        raise reader.fault(
            "no line of sizes from 0 to 2**63 - 1, 'rows columns entries', follows the banner and its comments"
        )
    reader.take()
    *shape, count = map(int, sizes)
    is_complex, reals = field == "complex", _NUMBERS[field]
    dtype = dtype or table.stated_dtype(reader)
    if dtype and is_complex and not dtype.is_complex:
        raise DtypeError(f"{reader.path} is of field {field}; it cannot be read as {dtype}")
    real = (dtype or (default if reals else torch.float32)).to_real()

    def entries(coords: Tensor, columns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        values = columns[0] if columns else torch.ones(coords.shape[1])
        if is_complex:
            values = torch.complex(*columns)
        if symmetry != "general":
            memory.check(reader.path, "both triangles", TRIANGLES * (coords.nbytes + values.nbytes))
        with memory.of_file(reader.path):  # an integer of which the dtype has no negative
            return in_full(coords, values.to(dtype or values.dtype), symmetry)

    kind = dtype or (real.to_complex() if is_complex else real)
    is_open = dtype is None and reals > 0
    return table.TableLayout(2, reals, real, tuple(shape), count, dtype_open=is_open, kind=kind, entries=entries)


def in_full(coords: Tensor, values: Tensor, symmetry: str) -> tuple[Tensor, Tensor]:
    """Return entries with those of the other triangle. Raise `DtypeError` for an integer that cannot be negated."""
    if symmetry == "general":
        return coords, values
    off = coords[0] != coords[1]
    mirrored = values[off]
    if symmetry == "skew-symmetric":
        lost = (mirrored == -mirrored) & (mirrored != 0)
        if bool(lost.any()):
            raise DtypeError(f"the negative of the value {mirrored[lost][0].item()} does not fit {values.dtype}")
        mirrored = -mirrored
    if symmetry == "hermitian":
        mirrored = mirrored.conj().resolve_conj()
    return torch.cat((coords, coords[:, off].flip(0)), dim=1), torch.cat((values, mirrored))


def write(path: FilePath, x: SparseTensor) -> None:
    """Write a matrix as ``coordinate general``, values with as many digits as read back the same; ``.gz`` compresses.

    ShapeError for any other order. The old file, if any, stays until the new one is complete.
    """
    if x.order != 2:
        raise ShapeError(f"a .mtx file holds a matrix; this tensor has shape {x.shape}: write .tns or .npz")
    x = x.expand_dense()
    field = "real" if x.dtype.is_floating_point else "integer"
    if x.dtype.is_complex:
        field = "complex"
    banner = f"%%MatrixMarket matrix coordinate {field} general\n% dtype: {dtype_name(x.dtype)}\n"
    table.write(path, f"{banner}{x.shape[0]} {x.shape[1]} {x.nnz}\n", x)
