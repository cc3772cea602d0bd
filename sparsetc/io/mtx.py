"""Matrix Market, .mtx and .mtx.gz: a banner, a line of sizes, a line an entry, coordinates from 1.

In: a path. Out: a SparseTensor of order 2; or the other way round. Every field (real, integer, complex, pattern, whose
values are 1) and symmetry is read, symmetric ones in full; the dense ``array`` format is refused. What is written is
``coordinate``, ``general``.

scipy.io.mmread is not used: that of scipy 1.17 ends the process with a segmentation fault on some damaged files, for
example when the header declares fewer entries than there are.
"""

from __future__ import annotations

import gzip
import os
import re
from dataclasses import dataclass
from typing import BinaryIO, cast

import numpy as np
import torch

from sparsetc.errors import DtypeError, IOFormatError, ShapeError, SparsetcError
from sparsetc.inputs import DTYPES
from sparsetc.io import atomic, digits, tns
from sparsetc.tensor import SparseTensor

_BANNER = re.compile(rb"%%MatrixMarket[ \t]+matrix[ \t]+coordinate[ \t]+(\w+)[ \t]+([\w-]+)[ \t\r]*$", re.I | re.M)
_SKIPPED = re.compile(rb"(?:[ \t\r]*(?:%[^\n]*)?\n)*")
_SIZES = re.compile(rb"[ \t]*(\d{1,19})[ \t]+(\d{1,19})[ \t]+(\d{1,19})[ \t\r]*(?:\n|\Z)")
_COMMENT = re.compile(rb"%[^\n]*")
_NUMBERS = {"pattern": 0, "real": 1, "double": 1, "integer": 1, "complex": 2}
_SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")


@dataclass(frozen=True)
class _Header:
    field: str
    symmetry: str
    shape: tuple[int, int]
    entries: int
    end: int  # offset of the first entry

    @property
    def fields(self) -> int:
        """Numbers on a line."""
        return 2 + _NUMBERS[self.field]


def read(path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> SparseTensor:
    """The matrix in a Matrix Market file: float32, or complex64 for a complex one, unless ``dtype`` is given.

    IOFormatError with file, line and text; DtypeError for complex read as real.
    """
    text = _text(path)
    header = _header(path, text)
    complex_file = header.field == "complex"
    if dtype is None:
        dtype = torch.complex64 if complex_file else torch.float32
    if dtype not in DTYPES or (complex_file and not dtype.is_complex):
        raise DtypeError(f"{path} is of field {header.field}; it cannot be read as {dtype}")
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    try:
        blocks = [_parse(text[start:end], header, real) for start, end in _cuts(text, header.end)]
    except digits.BadToken as error:
        raise _located(path, text, header, real, str(error)) from None
    table = [np.concatenate(column) for column in zip(*blocks, strict=True)]
    found = table[0].size if table else 0
    if found != header.entries:
        kind = "truncated" if found < header.entries else "too long"
        raise IOFormatError(f"{path}: {kind}: the header declares {header.entries} entries, the file has {found}")
    coords = torch.from_numpy(np.stack(table[:2])) if table else torch.zeros(2, 0, dtype=torch.int64)
    numbers = [torch.from_numpy(column) for column in table[2:]]
    values = torch.complex(*numbers) if complex_file and numbers else numbers[0] if numbers else torch.ones(found)
    try:
        return SparseTensor(*_in_full(coords, values.to(dtype), header.symmetry), header.shape)
    except SparsetcError as error:
        raise IOFormatError(f"{path}: {error}") from error


def _text(path: str | os.PathLike[str]) -> bytes:
    with open(path, "rb") as file:
        raw = file.read()
    if not os.fspath(path).lower().endswith(".gz"):
        return raw
    try:
        return gzip.decompress(raw)
    except tns.GZIP_ERRORS as error:
        raise IOFormatError(f"{path}: truncated or damaged gzip file ({error})") from error


def _header(path: str | os.PathLike[str], text: bytes) -> _Header:
    banner = _BANNER.match(text)
    field, symmetry = (word.decode().lower() for word in banner.groups()) if banner else ("", "")
    if field not in _NUMBERS or symmetry not in _SYMMETRIES:
        first = _shown(text[:200].split(b"\n")[0])
        raise IOFormatError(
            f"{path}, line 1: expected the banner '%%MatrixMarket matrix coordinate FIELD SYMMETRY', FIELD one of "
            f"{', '.join(_NUMBERS)}, SYMMETRY one of {', '.join(_SYMMETRIES)}: {first}"
        )
    skipped = _SKIPPED.match(text)
    sizes = _SIZES.match(text, skipped.end() if skipped else 0)
    if not sizes:
        raise IOFormatError(f"{path}: no line of sizes, 'rows columns entries', follows the banner and its comments")
    rows, columns, entries = (int(size) for size in sizes.groups())
    return _Header(field, symmetry, (rows, columns), entries, sizes.end())


def _cuts(text: bytes, start: int) -> list[tuple[int, int]]:
    """Pieces of whole lines, so that the columns of one stay in cache."""
    cuts = []
    while start < len(text):
        end = text.find(b"\n", start + tns.BLOCK) + 1 or len(text)
        cuts.append((start, end))
        start = end
    return cuts


def _parse(block: bytes, header: _Header, dtype: torch.dtype) -> list[np.ndarray]:
    """Rows, columns (int64, from 0) and the numbers after them; BadToken if a line is not as the header says."""
    text = digits.Text(_COMMENT.sub(b"", block) + b"\n")
    start, end = text.tokens()
    if start.size % header.fields or not digits.is_table(text, start, end, header.fields):
        raise digits.BadToken("wrong number of fields")
    parsed = []
    for at in range(header.fields):
        column = start[at :: header.fields], end[at :: header.fields]
        if at >= 2:
            parsed.append(tns.real_values(text, *column, dtype) if start.size else np.zeros(0, np.float32))
            continue
        index = digits.coordinates(text, *column)
        if index.size and not 1 <= int(index.min()) <= int(index.max()) <= header.shape[at]:
            raise digits.BadToken("coordinate out of range")
        parsed.append(index - 1)
    return parsed


def _in_full(coords: torch.Tensor, values: torch.Tensor, symmetry: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of the other triangle added."""
    if symmetry == "general":
        return coords, values
    off = coords[0] != coords[1]
    mirrored = values[off]
    if symmetry == "skew-symmetric":
        mirrored = -mirrored
    if symmetry == "hermitian":
        mirrored = mirrored.conj().resolve_conj()
    return torch.cat((coords, coords[:, off].flip(0)), dim=1), torch.cat((values, mirrored))


def _located(
    path: str | os.PathLike[str], text: bytes, header: _Header, dtype: torch.dtype, reason: str
) -> IOFormatError:
    """The error for the first bad line; slow, and only when there is one."""
    first = text.count(b"\n", 0, header.end) + 1
    for number, line in enumerate(text[header.end :].split(b"\n"), first):
        tokens = [token.decode("latin-1") for token in _COMMENT.sub(b"", line).split()]
        if tokens and (fault := _fault(tokens, header, dtype)):
            return IOFormatError(f"{path}, line {number}: {fault}: {_shown(line)}")
    return IOFormatError(f"{path}: {reason}")


def _fault(tokens: list[str], header: _Header, dtype: torch.dtype) -> str | None:
    if len(tokens) != header.fields:
        return f"expected {header.fields} fields, found {len(tokens)}"
    for what, token, size in zip(("row", "column"), tokens, header.shape, strict=False):
        if not re.fullmatch("[0-9]{1,19}", token) or not 1 <= int(token) <= size:
            return f"{what} {token[:30]} is not a whole number from 1 to {size}"
    return next(filter(None, (tns.value_fault(token, dtype) for token in tokens[2:])), None)


def _shown(line: bytes) -> str:
    text = line.strip().decode("utf-8", "replace")
    return repr(text if len(text) <= 80 else text[:77] + "...")


def write(path: str | os.PathLike[str], x: SparseTensor) -> None:
    """A matrix as ``coordinate general``, values with as many digits as read back the same; ``.gz`` compresses.

    ShapeError for any other order. The old file, if any, stays until the new one is complete.
    """
    if x.order != 2:
        raise ShapeError(f"a .mtx file holds a matrix; this tensor has shape {x.shape}: write .tns or .npz")
    x = x.expand_dense().to("cpu")
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.to(torch.float32)  # exact, and numpy knows it
    field = "complex" if x.dtype.is_complex else "real" if x.dtype.is_floating_point else "integer"
    coords, values, _ = x.to_numpy()
    columns = np.stack((values.real, values.imag)) if x.dtype.is_complex else values[None]
    with atomic.replacing(path) as file:
        zipped = os.fspath(path).lower().endswith(".gz")
        out = gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) if zipped else file
        out = cast(BinaryIO, out)
        out.write(f"%%MatrixMarket matrix coordinate {field} general\n{x.shape[0]} {x.shape[1]} {x.nnz}\n".encode())
        for at in range(0, x.nnz, tns.LINES):
            out.write(tns.text_lines(coords[:, at : at + tns.LINES], columns[:, at : at + tns.LINES]))
        if zipped:
            out.close()
