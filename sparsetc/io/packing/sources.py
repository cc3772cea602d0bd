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

import torch

from sparsetc.errors import IOFormatError
from sparsetc.io import lines, mtx, npz, table, tns
from sparsetc.io.packing.folder import RunsPlace
from sparsetc.options import options
from sparsetc.tensor.inputs import check_dtype
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
    blocks, rows = 0, 0
    for part in table.parts(reader, layout, describe):
        blocks, rows = blocks + 1, rows + part.rows
        table.check_declared(reader, layout, rows)
        if blocks > place.blocks:
            columns = [torch.from_numpy(column) for column in part.coords]
            yield Piece(*entries(columns, part.reals), RunsPlace(blocks, rows))
    table.check_declared(reader, layout, rows, ended=True)


# -- arrays -----------------------------------------------------------------------------------------------------------


def _npz(stack: ExitStack, path: Any, dtype: torch.dtype | None, limit: int, show: bool | None) -> PackingSource:
    with options(memory_limit=max(limit // WHOLE, 1)):
        x = npz.read(path, dtype).expand_dense()
    return PackingSource(x.order, x.dtype, x.shape, lambda place: _of_tensor(x, place))


def _of_tensor(x: SparseTensor, place: RunsPlace) -> Iterator[Piece]:
    for start in range(place.rows, x.nnz, ROWS):
        stop = min(start + ROWS, x.nnz)
        yield Piece(list(x.coords[:, start:stop]), x.values[start:stop], RunsPlace(0, stop))
