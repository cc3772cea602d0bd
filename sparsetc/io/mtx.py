"""Matrix Market, .mtx and .mtx.gz: a banner, a line of sizes, a line an entry, coordinates from 1.

In: a path. Out: a SparseTensor of order 2; or the other way round. Every field (real, integer, complex, pattern, whose
values are 1) and symmetry is read, symmetric ones in full; the dense ``array`` format is refused. What is written is
``coordinate``, ``general``.

scipy.io.mmread is not used: it allocates what a header declares before it reads an entry, and knows no memory limit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparsetc.errors import DtypeError, ShapeError
from sparsetc.io import lines, memory, table
from sparsetc.support import FilePath
from sparsetc.tensor.dtypes import DTYPES, dtype_name
from sparsetc.tensor.sparse_tensor import SparseTensor

COMMENT = b"%"
_BANNER = re.compile(rb"%%MatrixMarket[ \t]+matrix[ \t]+coordinate[ \t]+(\w+)[ \t]+([\w-]+)[ \t]*$", re.I | re.M)
TRIANGLES = 5
"""Peak memory of `in_full`, as a multiple of one triangle: that one, the other twice, and both together."""
_NUMBERS = {"pattern": 0, "real": 1, "double": 1, "integer": 1, "complex": 2}
_SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")


@dataclass(frozen=True)
class MatrixHeader:
    """The banner and the line of sizes.

    Attributes:
        stated: the dtype that a comment says.
    """

    field: str
    symmetry: str
    shape: tuple[int, int]
    entries: int
    path: Path
    stated: torch.dtype | None = None

    def check(self, dtype: torch.dtype | None) -> None:
        """Raise `DtypeError` if the file's numbers cannot be read as this dtype."""
        if dtype and (dtype not in DTYPES or (self.field == "complex" and not dtype.is_complex)):
            raise DtypeError(f"{self.path} is of field {self.field}; it cannot be read as {dtype}")

    def entries_of(self, coords: Tensor, reals: Sequence[Tensor], dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """Return (2, n) coordinates and (n,) values of rows of the table, with the entries of the other triangle.

        Raises:
            IOFormatError: an integer in a skew-symmetric matrix, of which ``dtype`` has no negative.
        """
        values = reals[0] if reals else torch.ones(coords.shape[1])
        if len(reals) == 2:
            values = torch.complex(*reals)
        with memory.of_file(self.path):
            return in_full(coords, values.to(dtype or values.dtype), self.symmetry)

    def layout(self, dtype: torch.dtype | None, default: torch.dtype = torch.float64) -> table.TableLayout:
        """Return the layout of the lines that follow, in ``dtype``; None takes float32 if it holds all digits."""
        dtype, reals = dtype or self.stated, _NUMBERS[self.field]
        real = (dtype or (default if reals else torch.float32)).to_real()
        return table.TableLayout(
            2, reals, real, _described, self.shape, self.entries, dtype_open=not dtype and reals > 0
        )


def read(path: FilePath, dtype: torch.dtype | None = None) -> SparseTensor:
    """Return the matrix in a Matrix Market file: of ``dtype``, else as a comment ``% dtype: float64`` says.

    `write` leaves one. Where there is none, float32 (complex64 for a complex one) if that holds all digits of all
    values, else float64 (complex128).

    Raises:
        IOFormatError: with file, line number and text, for whatever is not Matrix Market.
        DtypeError: complex numbers read as real.
        OutOfMemoryError: the tensor would pass the memory limit, or memory did not suffice.
        FileNotFoundError: no such file.
    """
    with lines.opened(path, COMMENT, show=False) as reader:
        header = head(reader)
        dtype = dtype or header.stated
        header.check(dtype)
        coords, reals = table.read(reader, header.layout(dtype))
    if header.symmetry != "general":
        memory.check(path, "both triangles", TRIANGLES * sum(column.nbytes for column in (coords, *reals)))
    coords, values = header.entries_of(coords, reals, dtype)
    return memory.tensor_of(path, coords, values, header.shape)


def head(reader: lines.LineReader) -> MatrixHeader:
    """Read the header. Raise IOFormatError if it is not the header of a sparse matrix."""
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
    rows, columns, entries = map(int, sizes)
    return MatrixHeader(field, symmetry, (rows, columns), entries, reader.path, table.stated_dtype(reader))


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


def _described(mode: int, text: str) -> str:
    return f"{('row', 'column')[mode]} {text}"


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
