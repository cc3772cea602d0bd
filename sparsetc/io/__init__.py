"""Files of sparse tensors: ``read`` and ``write``, by suffix; and ``pack``, of any size.

In: a path. Out: a SparseTensor; or the other way round. One module a format: tns, mtx, npz, parquet. Text
goes through one reader (`lines`, `table`, `loops`), tables with named columns through
`columns`; `bounds` and `memory` have what a file may cost. Packed files (`packed`) are Parquet, read by row groups too,
and made of the others by `packing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from sparsetc.errors import FormatError, ShapeError
from sparsetc.io import bounds, foreign, memory, mtx, npz, numbers, packed, table, tns
from sparsetc.io import columns as tables
from sparsetc.io.packing import READ, SUFFIXES, TEXT, pack
from sparsetc.io.parquet import PackedFile, open_packed
from sparsetc.options import current
from sparsetc.support import FilePath
from sparsetc.support.entry import warn
from sparsetc.tensor.inputs import not_sparse
from sparsetc.tensor.sparse_tensor import SparseTensor

__all__ = ["SUFFIXES", "PackedFile", "open_packed", "pack", "read", "write"]

LABELLED = (".npz", ".parquet")
"""Suffixes of files that keep labels."""


def read(
    path: FilePath,
    *,
    dtype: torch.dtype | None = None,
    columns: Sequence[str | None] | None = None,
    progress: bool | None = None,
) -> SparseTensor:
    """Read a sparse tensor from a file; coalesced, on the CPU unless ``options(device=)`` names another device.

    Args:
        path: a file; its suffix says the kind. ``.tns`` (FROSTT text) and ``.mtx`` (Matrix Market), also compressed by
            gzip, bzip2, xz or zstd, and through a pipe; ``.npz`` of `write`, of scipy.sparse or of pydata/sparse;
            ``.parquet``, a packed file or, with ``columns``, any table;
            ``.csv`` and ``.tsv`` with ``columns``. Files of other programs need their libraries: ``.h5ad``, 10x
            Genomics (``.h5`` or the folder), ``.mat``, Harwell-Boeing, ``.smtx``, ``.pt``, and the two-electron
            integrals of an FCIDUMP.
        dtype: of the values. By default the stored dtype; for text the dtype of a comment that `write` leaves, else
            float32 if it holds every digit, else float64 (complex64 or complex128). A finite number that the dtype
            cannot hold is an error; so is an int64 beyond 2**53 that float64 does not hold, unless a dtype is named.
        columns: of a table: the names of the columns of coordinates or labels, one a mode, then that of the values, as
            in `SparseTensor.from_table`; None as the last name counts rows. Coordinates count from 0, and sizes are the
            largest coordinate + 1.
        progress: show a progress bar on stderr (.tns and .mtx): None if reading takes longer than two seconds and
            stderr is a terminal, True always, False never.

    Raises:
        IOFormatError: an unknown suffix, a file with other contents than its suffix says (with file, line and text),
            or one that passes a bound of `sparsetc.io.bounds`.
        OutOfMemoryError: the tensor would take more than ``options(memory_limit=)``, or than is free.
        FileNotFoundError: no such file.
        ImportError: the library that reads such a file is not installed.

    Examples:
        >>> stc.write("x.tns", stc.eye(4))
        >>> stc.read("x.tns")
        SparseTensor(shape=(4, 4), nnz=4, density=0.25, dtype=torch.float32, device=cpu)
    """
    path = foreign.matrix_of_folder(memory.text_of(path))
    suffix = memory.suffix_of(path, READ)
    by_columns = tables.is_table(path, columns)
    numbers.check_dtype(path, dtype)
    # not on the default device in force, on which no ndarray is
    with memory.CPU, memory.named(path, "reading takes several times the bytes of the tensor"):
        if by_columns:
            tensor = tables.read(path, columns, dtype)
        elif text := TEXT.get(suffix):
            tensor = table.read(path, text.COMMENT, partial(text.head, dtype=dtype), progress)
        else:
            tensor = foreign.read(path, suffix, dtype)
    device = current().device
    return tensor if device is None else tensor.to(device)


def write(path: FilePath, x: Any) -> None:
    """Write a SparseTensor, or any sparse tensor that `SparseTensor.coerce` takes, in the format of the suffix.

    The file appears under its name only when it is complete, with the mode of the file it replaces. ``.npz`` and
    ``.parquet`` are exact for every dtype; ``.tns`` holds real numbers,
    ``.mtx`` matrices. Only ``.npz`` keeps dense modes and blocks; the others store all of their values as nonzeros.
    Only ``.npz`` and ``.parquet`` keep labels; others warn that labels are lost.

    Args:
        path: where to write; ``.tns``, ``.mtx`` (also ``.gz``), ``.npz`` or ``.parquet``.
        x: the tensor.

    Raises:
        IOFormatError: an unknown suffix.
        FormatError: ``x`` is not sparse.
        ShapeError: more than 64 modes, or more than two for ``.mtx``.
        DtypeError: complex values for ``.tns``.
        OSError: the folder cannot be written to.
        ImportError: the library that writes such a file is not installed.

    Examples:
        >>> stc.write("x.npz", stc.eye(3))
        >>> stc.read("x.npz").shape
        (3, 3)
    """
    path = memory.text_of(path)
    suffix = memory.suffix_of(path, SUFFIXES)
    tensor = SparseTensor.coerce(x)
    if tensor is None:
        raise FormatError(f"write takes a sparse tensor, {not_sparse(x)}")
    if tensor.labels and suffix not in LABELLED:
        warn(f"a {suffix} file holds no labels: write {' or '.join(LABELLED)}, or x.to_table() by a library of tables")
    if tensor.order > bounds.ORDER:
        raise ShapeError(f"a file holds a tensor of at most {bounds.ORDER} modes, this one has {tensor.order}")
    module: Any = {"tns": tns, "mtx": mtx, "npz": npz, "parquet": packed}[suffix.split(".")[1]]
    module.write(path, tensor)
