"""Nonzeros of a file, a block at a time, from any block on: what is packed.

In: a path, and how far it was read before. Out: a `PackingSource` that gives its blocks in the order of the file. A
block is the same however much memory there is.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsetc.errors import IOFormatError
from sparsetc.io import foreign, lines, mtx, npy, npz, numbers, table, tns
from sparsetc.io.packing.folder import RunsPlace
from sparsetc.options import options
from sparsetc.tensor import coords as crd
from sparsetc.tensor.inputs import DTYPES, check_dtype
from sparsetc.tensor.sparse_tensor import SparseTensor

ROWS = 1 << 16
"""Nonzeros of a block that is not of text."""
HEAD = 1 << 20
"""Bytes of a file by whose hash it is known again, beside its size and time."""
WHOLE = 4
"""A tensor that is not read in blocks may take the limit over this: reading takes up to three times as much."""


@dataclass(frozen=True)
class Piece:
    """Nonzeros of one block.

    Attributes:
        coords: (n,) a mode, int32 or int64, from 0 and below the sizes.
        place: where the next block begins.
    """

    coords: list[torch.Tensor]
    values: torch.Tensor
    place: RunsPlace


@dataclass(frozen=True)
class PackingSource:
    """An open file.

    Attributes:
        shape: None where each size is the largest coordinate and one.
        pieces: the blocks from a place on; to be called once.
    """

    order: int
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    pieces: Callable[[RunsPlace], Iterator[Piece]]


@contextmanager
def opened(
    path: str | os.PathLike[str], dtype: torch.dtype | None, limit: int, show: bool | None
) -> Iterator[PackingSource]:
    """A source of the suffix of ``path``.

    Raises:
        IOFormatError: an unknown suffix, or a file that is not what its suffix promises; or no file on disk.
        DtypeError: values that cannot be read as ``dtype``.
    """
    if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
        raise IOFormatError(f"{os.fspath(path)}: what is packed must be a file on disk, which can be read again")
    if dtype is not None:
        check_dtype(dtype)
    name = os.fspath(path).lower().removesuffix(".gz")
    kinds = {".tns": _tns, ".mtx": _mtx, ".npz": _npz}
    kind = kinds.get(Path(name).suffix)
    if kind is None or (kind is _npz and name != os.fspath(path).lower()):
        raise IOFormatError(f"{os.fspath(path)}: unknown suffix; .tns, .tns.gz, .mtx, .mtx.gz and .npz can be packed")
    with ExitStack() as stack:
        yield kind(stack, path, dtype, limit, show)


def identity(path: str | os.PathLike[str], source: PackingSource) -> dict[str, Any]:
    """What runs of a source depend on, to be compared with that of another call."""
    with open(path, "rb") as file:
        status, head = os.fstat(file.fileno()), file.read(HEAD)
    found = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "head": hashlib.sha256(head).hexdigest()}
    return {**found, "dtype": str(source.dtype), "text_block": lines.BLOCK, "rows": ROWS}


# -- text -------------------------------------------------------------------------------------------------------------


def _tns(stack: ExitStack, path: Any, dtype: torch.dtype | None, limit: int, show: bool | None) -> PackingSource:
    reader = stack.enter_context(lines.opened(path, tns.COMMENT, show))
    layout = tns.head(reader, dtype, torch.float32)
    return PackingSource(
        layout.order,
        layout.dtype,
        layout.sizes,
        lambda place: _text(reader, layout, tns.fault, place, lambda coords, reals: (coords, reals[0])),
    )


def _mtx(stack: ExitStack, path: Any, dtype: torch.dtype | None, limit: int, show: bool | None) -> PackingSource:
    reader = stack.enter_context(lines.opened(path, mtx.COMMENT, show))
    header = mtx.head(reader)
    header.check(dtype or header.stated)
    layout = header.layout(dtype, torch.float32)
    dtype = dtype or header.stated or (torch.complex64 if header.field == "complex" else torch.float32)

    def entries(coords: list[torch.Tensor], reals: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        found, values = header.entries_of(torch.stack([row.long() for row in coords]), reals, dtype)
        return list(found), values

    return PackingSource(2, dtype, header.shape, lambda place: _text(reader, layout, mtx.fault, place, entries))


def _text(
    reader: lines.LineReader,
    layout: table.TableLayout,
    describe: table.Describe,
    place: RunsPlace,
    entries: Callable[[list[torch.Tensor], list[torch.Tensor]], tuple[list[torch.Tensor], torch.Tensor]],
) -> Iterator[Piece]:
    if place.blocks:
        reader.skip(place.blocks, place.line, place.numbers)
    blocks, rows = place.blocks, place.rows
    for part in table.parts(reader, layout, describe):
        blocks, rows = blocks + 1, rows + part.rows
        table.check_declared(reader, layout, rows)
        after = RunsPlace(blocks, rows, reader.line + part.lines, reader.numbers + part.rows * layout.fields)
        if part.rows:
            yield Piece(*entries([torch.from_numpy(column) for column in part.coords], part.reals), after)
    table.check_declared(reader, layout, rows, ended=True)


# -- arrays -----------------------------------------------------------------------------------------------------------


def _npz(stack: ExitStack, path: Any, dtype: torch.dtype | None, limit: int, show: bool | None) -> PackingSource:
    archive = stack.enter_context(npy.opened(path))
    form, shape, _ = npz.contents(archive)
    names = _names(archive, form, shape)
    if names is None:
        with options(memory_limit=max(limit // WHOLE, 1)):
            x = npz.read(path, dtype).expand_dense()
        return PackingSource(x.order, x.dtype, x.shape, lambda place: _of_tensor(x, place))
    if form is not None:
        foreign.check_fill(archive)
    header = archive.header(names[-1])
    nothing = npz.stored(npz.of_bits(np.zeros(0, header.dtype), npz.in_bfloat16(archive)), dtype)
    kept = dtype or nothing.dtype
    assert kept in DTYPES
    return PackingSource(
        len(shape), kept, shape, lambda place: _arrays(archive, names, shape, dtype, header.count, place)
    )


def _names(archive: npy.Archive, form: str | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """The arrays of coordinates, all in one or one a mode, and of values, if nonzeros lie in them as they come."""
    own = ("coords", "values") if form is None else ("coords", "data")
    names = own if "coords" in archive.names else ("row", "col", "data")
    if form not in (None, "coo") or not shape or any(name not in archive.names for name in names):
        return None
    *coords, values = [archive.header(name) for name in names]
    count, order = values.count, len(shape)
    shapes = [(order, count)] if len(coords) == 1 else [(count,)] * order
    plain = all(header.dtype.kind in "iu" and (header.order == "C" or len(header.shape) == 1) for header in coords)
    return names if plain and values.shape == (count,) and [header.shape for header in coords] == shapes else None


def _arrays(
    archive: npy.Archive,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    count: int,
    place: RunsPlace,
) -> Iterator[Piece]:
    together = names[0] == "coords"
    streams = [
        archive.stream(names[0 if together else mode], place.rows + (mode * count if together else 0))
        for mode in range(len(shape))
    ]
    values, bfloat16 = archive.stream(names[-1], place.rows), npz.in_bfloat16(archive)
    for start in range(place.rows, count, ROWS):
        n = min(ROWS, count - start)
        coords = [torch.from_numpy(take(n).astype(np.int64)) for take in streams]
        crd.check_range(torch.stack(coords), shape)
        given = npz.stored(npz.of_bits(values(n), bfloat16), dtype)
        yield Piece(coords, given if dtype is None else numbers.cast(given, dtype), RunsPlace(0, start + n))


def _of_tensor(x: SparseTensor, place: RunsPlace) -> Iterator[Piece]:
    for start in range(place.rows, x.nnz, ROWS):
        stop = min(start + ROWS, x.nnz)
        yield Piece(list(x.coords[:, start:stop]), x.values[start:stop], RunsPlace(0, stop))
