"""FROSTT's text format, .tns and .tns.gz: a line a nonzero, coordinates from 1, then the value.

In: a path. Out: a SparseTensor; or the other way round. ``#`` starts a comment. Before the first nonzero, a comment
``# shape: 4 5 6`` gives the sizes (write leaves one); so do two first lines that hold the order and the sizes, as some
tools write them; otherwise each size is the largest coordinate. The file is read in blocks of bounded size, with no
Python loop over lines.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch

from sparsetc.errors import DtypeError, IOFormatError, SparsetcError
from sparsetc.inputs import DTYPES
from sparsetc.io import atomic, digits, progress
from sparsetc.tensor import SparseTensor

# Large enough that the cost of a numpy call vanishes, small enough that a block and its columns stay in cache:
# 512 KB to 2 MB were equally fast, 128 KB half as fast, 4 MB a tenth slower (benchmarks/io_speed.py).
BLOCK = 512 * 1024
LINES = 50_000  # lines formatted at a time when writing
_HEAD = re.compile(rb"(?:\s*#[^\n]*\n)*")  # the comments before the first nonzero
_SHAPE = re.compile(rb"^[ \t]*#[ \t]*shape:((?:[ \t]+\d{1,19})+)[ \t\r]*$", re.MULTILINE)
_COMMENT = re.compile(rb"#[^\n]*")
GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)


@dataclass
class _Parsed:
    """What has been read so far."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None
    sizes_first: bool = False  # the first two lines were the order and the sizes
    fields: int = 0  # on a line, the value included; 0 until the first line is seen
    columns: list[list[np.ndarray]] = field(default_factory=list)  # [mode][block]
    values: list[np.ndarray] = field(default_factory=list)
    largest: list[int] = field(default_factory=list)


def read(path: str | os.PathLike[str], dtype: torch.dtype | None = None, show: bool | None = None) -> SparseTensor:
    """The tensor in a .tns file, values of ``dtype`` (float32 by default), duplicates summed.

    Raises:
        IOFormatError: with file, line number and text, for whatever is not as described above.
        FileNotFoundError: no such file.
    """
    parsed = _Parsed(Path(path), dtype or torch.float32)
    if parsed.dtype not in DTYPES or parsed.dtype.is_complex:
        raise DtypeError(f"a .tns file holds real numbers; it cannot be read as {parsed.dtype}")
    try:
        for block in _blocks(parsed.path, show):
            _parse_block(parsed, block)
    except digits.BadToken as error:
        raise _located(parsed, str(error)) from None
    except GZIP_ERRORS as error:
        raise IOFormatError(f"{path}: truncated or damaged gzip file ({error})") from error
    return _assembled(parsed)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The text of the file, decompressed, and the file as it lies on disk."""
    with open(path, "rb") as raw:
        if path.name.lower().endswith(".gz"):
            with gzip.GzipFile(fileobj=raw) as text:
                yield cast(BinaryIO, text), raw
        else:
            yield raw, raw


def _blocks(path: Path, show: bool | None) -> Iterator[bytes]:
    """Whole lines, about BLOCK bytes at a time, each block ending in a newline."""
    with _opened(path) as (text, raw), progress.bar(path.stat().st_size, path.name, show) as at:
        rest: list[bytes] = []
        while chunk := text.read(BLOCK):
            cut = chunk.rfind(b"\n") + 1
            if cut:
                yield b"".join((*rest, chunk[:cut]))
                rest = []
            rest.append(chunk[cut:])
            at(raw.tell())
        last = b"".join(rest)
        if last:
            yield last + b"\n"


def _parse_block(parsed: _Parsed, block: bytes) -> None:
    if b"#" in block:
        head = _HEAD.match(block)
        if head and not parsed.fields and (found := _SHAPE.search(head[0])):
            parsed.shape = tuple(int(size) for size in found[1].split())
        block = _COMMENT.sub(b"", block)
    if not parsed.fields:
        block = _begin(parsed, block)
    text = digits.Text(block)
    start, end = text.tokens()
    if start.size == 0:
        return
    if start.size % parsed.fields or not digits.is_table(text, start, end, parsed.fields):
        raise digits.BadToken("wrong number of fields")
    order = parsed.fields - 1
    for mode in range(order):
        # in place of a copy of the column: every token of this mode, with its stride
        column = digits.coordinates(text, start[mode :: parsed.fields], end[mode :: parsed.fields])
        largest = int(column.max())
        if int(column.min()) < 1 or (parsed.shape is not None and largest > parsed.shape[mode]):
            raise digits.BadToken("coordinate out of range")
        parsed.largest[mode] = max(parsed.largest[mode], largest)
        column -= 1
        parsed.columns[mode].append(column.astype(np.int32) if largest < 2**31 else column)
    parsed.values.append(real_values(text, start[order :: parsed.fields], end[order :: parsed.fields], parsed.dtype))


def _begin(parsed: _Parsed, block: bytes) -> bytes:
    """The block without the two lines of order and sizes if it has them; learns the number of fields."""
    lines = block.lstrip().split(b"\n", 2)
    first = lines[0].split()
    if len(first) == 1 and re.fullmatch(rb"\d{1,3}", first[0]) and len(lines) > 1:
        sizes = lines[1].split()
        if len(sizes) == int(first[0]) and all(re.fullmatch(rb"\d{1,19}", size) for size in sizes):
            parsed.shape, parsed.sizes_first = tuple(int(size) for size in sizes), True
            block = lines[2] if len(lines) > 2 else b""
            first = [*sizes, b""]
    if first:
        parsed.fields = len(first)
        if parsed.fields < 2 or (parsed.shape is not None and len(parsed.shape) != parsed.fields - 1):
            raise digits.BadToken("wrong number of fields")
        parsed.columns = [[] for _ in range(parsed.fields - 1)]
        parsed.largest = [0] * (parsed.fields - 1)
    return block


def real_values(text: digits.Text, start: np.ndarray, end: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Tokens as float64 or float32 for a floating ``dtype``, else as int64 that fits it; BadToken otherwise."""
    if dtype.is_floating_point:
        return digits.floats(text, start, end, exact=dtype == torch.float64).astype(
            np.float64 if dtype == torch.float64 else np.float32
        )
    whole = digits.integers(text, start, end)
    limits = torch.iinfo(dtype)
    if int(whole.min()) < limits.min or int(whole.max()) > limits.max:
        raise digits.BadToken(f"does not fit {dtype}")
    return whole


def _assembled(parsed: _Parsed) -> SparseTensor:
    shape = parsed.shape
    if not parsed.fields and shape is None:
        raise IOFormatError(f"{parsed.path}: no nonzeros, and no '# shape: ...' comment that would give the sizes")
    order = parsed.fields - 1 if parsed.fields else len(shape or ())
    nnz = sum(block.size for block in parsed.values)
    coords = torch.empty((order, nnz), dtype=torch.int64)
    for mode in range(order if nnz else 0):
        np.concatenate(parsed.columns[mode], out=coords[mode].numpy())
        parsed.columns[mode].clear()  # memory never holds two copies of all modes
    values = torch.from_numpy(np.concatenate(parsed.values)) if nnz else torch.zeros(0)
    if shape is None:
        shape = tuple(parsed.largest)
    try:
        return SparseTensor(coords, values.to(parsed.dtype), shape, check=False)
    except SparsetcError as error:
        raise IOFormatError(f"{parsed.path}: {error}") from error


# ---- what is wrong, and where: slow, and only after something was found to be wrong -----------------------------


def _located(parsed: _Parsed, reason: str) -> IOFormatError:
    """The error for the first bad line of the file."""
    data_lines = 0
    try:
        with _opened(parsed.path) as (text, _):
            for number, line in enumerate(text, 1):
                tokens = _COMMENT.sub(b"", line).split()
                data_lines += bool(tokens)
                if not tokens or (parsed.sizes_first and data_lines <= 2):
                    continue
                if fault := _fault(parsed, [token.decode("latin-1") for token in tokens]):
                    shown = line.strip().decode("utf-8", "replace")
                    shown = shown if len(shown) <= 80 else shown[:77] + "..."
                    return IOFormatError(f"{parsed.path}, line {number}: {fault}: {shown!r}")
    except GZIP_ERRORS as error:
        return IOFormatError(f"{parsed.path}: truncated or damaged gzip file ({error})")
    return IOFormatError(f"{parsed.path}: {reason}")


def _fault(parsed: _Parsed, tokens: list[str]) -> str | None:
    """What is wrong with the fields of one line, or None."""
    order = parsed.fields - 1 if parsed.shape is None else len(parsed.shape)
    if order < 1:
        return "expected coordinates and a value, found 1 field"
    if len(tokens) != order + 1:
        hint = " (is the value missing?)" if len(tokens) == order else ""
        return f"expected {order + 1} fields, {order} coordinates and a value, found {len(tokens)}{hint}"
    for mode, token in enumerate(tokens[:-1]):
        if not re.fullmatch("[+-]?[0-9]{1,19}", token) or token[0] == "+":
            return f"coordinate {token[:30]!r} of mode {mode} is not a whole number that fits int64"
        if not 1 <= int(token) < 2**63:
            return f"coordinate {token} of mode {mode} is out of range; coordinates are int64 and start at 1"
        if parsed.shape is not None and int(token) > parsed.shape[mode]:
            return f"coordinate {token} of mode {mode} is beyond its size, {parsed.shape[mode]}"
    return value_fault(tokens[-1], parsed.dtype)


def value_fault(token: str, dtype: torch.dtype) -> str | None:
    """What is wrong with a token that should be a real number of ``dtype``, or None."""
    try:
        value = float(token.replace("_", "?"))
    except ValueError:
        return f"the value {token[:30]!r} is not a number"
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        if not (value.is_integer() and limits.min <= value <= limits.max):
            return f"the value {token[:30]!r} does not fit {dtype}"
    return None


# ---- writing ----------------------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], x: SparseTensor, comments: tuple[str, ...] = ()) -> None:
    """One line a nonzero in the order of ``x``, after ``comments`` and the shape; ``.gz`` at the end compresses.

    Values are written with the fewest digits that read back as the same number. Dense modes become coordinates.
    DtypeError for complex values. The old file, if any, stays until the new one is complete.
    """
    if x.dtype.is_complex:
        raise DtypeError(f"a .tns file holds real numbers, not {x.dtype}; write .npz")
    x = x.expand_dense()
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    coords = x.coords.cpu().numpy()
    values = x.values.detach().to("cpu", torch.float32 if narrow else x.dtype).numpy()
    head = [*comments, "shape: " + " ".join(map(str, x.shape))]
    with atomic.replacing(path) as file:
        zipped = os.fspath(path).lower().endswith(".gz")
        # no name and no time inside, so that equal tensors make equal files
        out = gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=9, mtime=0) if zipped else file
        out.write("".join(f"# {line}\n" for line in head).encode())
        for at in range(0, x.nnz, LINES):
            out.write(text_lines(coords[:, at : at + LINES], values[None, at : at + LINES]))
        if zipped:
            out.close()


def text_lines(coords: np.ndarray, values: np.ndarray) -> bytes:
    """A line a nonzero: coordinates (order, n) from 1, then values (fields, n), as short as reads back the same."""
    order, count = coords.shape
    fields = values.shape[0]
    whole = values.dtype.kind == "i" or (
        np.isfinite(values).all() and (values == np.rint(values)).all() and (np.abs(values) < 2**53).all()
    )
    if whole and not (np.signbit(values) & (values == 0)).any():  # -0.0 keeps its sign
        table = np.concatenate((coords + 1, values.astype(np.int64)))
        line = " ".join(["%d"] * (order + fields)) + "\n"
        return (line * count % tuple(table.T.ravel().tolist())).encode()
    table = np.empty((order + fields, count), dtype=object)
    table[:order] = coords + 1
    table[order:] = values.astype("U32")  # shortest repr of the dtype at hand
    line = " ".join(["%d"] * order + ["%s"] * fields) + "\n"
    return (line * count % tuple(table.T.ravel())).encode()
