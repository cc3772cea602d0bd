"""Files of sparse tensors: ``read`` and ``write``, by suffix; and ``pack``, of any size.

In: a path. Out: a SparseTensor; or the other way round. One module a format: tns, mtx, npz, binsparse, parquet. Text
goes through one reader (`lines`, `table`, `digits`), arrays through another (`npy`); `bounds` and `memory` have what a
file may cost. Packed files are Parquet, read by row groups too, and made of the others by `packing`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from sparsetc.errors import FormatError, IOFormatError, ShapeError
from sparsetc.io import binsparse, bounds, foreign, memory, mtx, npz, numbers, parquet, tns
from sparsetc.io.packing import pack
from sparsetc.io.parquet import PackedFile, open_packed
from sparsetc.options import current
from sparsetc.support.notices import warn
from sparsetc.tensor.inputs import not_sparse
from sparsetc.tensor.sparse_tensor import SparseTensor

__all__ = ["SUFFIXES", "PackedFile", "open_packed", "pack", "read", "write"]

SUFFIXES = (".tns", ".tns.gz", ".mtx", ".mtx.gz", ".npz", ".parquet", ".bsp.h5", ".bsp.npz")
"""What ``read`` and ``write`` understand."""
ZIPPED = tuple(f".{text}.{zipped}" for text in ("tns", "mtx") for zipped in ("bz2", "xz", "zst"))
LABELLED = (".npz", ".parquet")
"""What keeps labels."""
READ = (*SUFFIXES, *ZIPPED, *foreign.CSV, *foreign.READERS)
"""Suffixes that ``read`` understands."""


def read(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    columns: Sequence[str | None] | None = None,
    progress: bool | None = None,
) -> SparseTensor:
    """The sparse tensor in a file, coalesced, on the CPU unless ``options(device=)`` names another device.

    Args:
        path: ``.tns`` (FROSTT text), ``.mtx`` (Matrix Market), either with ``.gz``, or ``.npz``, also one that
            ``save_npz`` of scipy.sparse or pydata/sparse wrote (which read it), or ``.bsp.h5`` or ``.bsp.npz``
            (Binsparse), or ``.parquet``: a packed file, or with ``columns`` any table. Text may come through a pipe,
            and be compressed by bzip2, xz or zstd. Files of other programs are read by their libraries: a matrix of
            ``.h5ad``, 10x Genomics (``.h5`` or the folder), ``.mat``, Harwell-Boeing, ``.smtx`` or ``.pt``, and the
            two-electron integrals of an FCIDUMP.
        dtype: of the values. By default .npz, Binsparse and .parquet are read as they were stored, and text as a
            comment in it says, which `write` leaves; other text as float32 if that holds every digit, else as float64
            (complex64 or complex128). A finite number that a dtype cannot hold is an error, not an infinity; so is an
            integer of int64 beyond 2**53 that float64 does not hold, unless a dtype is named.
        columns: of a .parquet file of another program, or of ``.csv`` and ``.tsv`` (also ``.gz``, by pyarrow), the
            names of the columns of coordinates, which count from 0, a mode each, and then that of the values. Each size
            is the largest coordinate and one. Of text, coordinates may be labels, as `SparseTensor.from_table` numbers
            them, and None in place of the values counts rows.
        progress: a progress bar on stderr (.tns only): None for what takes longer than two seconds when stderr is a
            terminal, True always, False never. Needs rich; without it there is none.

    Raises:
        IOFormatError: an unknown suffix, or a file that is not what its suffix promises (file, line, text), or that
            passes a bound of `sparsetc.io.bounds`.
        OutOfMemoryError: the tensor would take more than ``options(memory_limit=)``, or than is available.
        FileNotFoundError: no such file.
        ImportError: the library that reads such a file is not installed.

    Examples:
        >>> stc.write("x.tns", stc.eye(4))
        >>> stc.read("x.tns")
        SparseTensor(shape=(4, 4), nnz=4, density=0.25, dtype=torch.float32, device=cpu)
    """
    path = foreign.matrix_of_folder(memory.text_of(path))
    suffix = _suffix(path, READ)
    parquet.check_columns(path, columns)
    cpu = torch.device("cpu")  # not the default device in force, on which no ndarray is
    with cpu, memory.named(path, lambda: "reading takes several times the bytes of the tensor"):
        if suffix.startswith(".tns"):
            found = tns.read(path, dtype, progress)
        elif suffix.startswith(".bsp"):
            found = binsparse.read(path, dtype)
        elif suffix == ".parquet":
            found = parquet.read(path, dtype, columns)
        elif suffix in foreign.CSV:
            found = foreign.csv_table(path, columns)
            found = found if dtype is None else found.with_values(numbers.cast(found.values, dtype))
        elif suffix in foreign.READERS:
            found = foreign.read(path, suffix, dtype)
        else:
            found = (npz if suffix == ".npz" else mtx).read(path, dtype)
    device = current().device
    return found if device is None else found.to(device)


def write(path: str | os.PathLike[str], x: Any) -> None:
    """Write a SparseTensor, or any sparse tensor that ``SparseTensor.coerce`` takes, in the format of the suffix.

    The file appears under its name only when it is complete, with the mode of the file that it replaces, or a new
    file's. ``.npz`` and ``.parquet`` are exact for every dtype; Binsparse has no float16 and bfloat16, ``.tns`` holds
    real numbers, ``.mtx`` matrices. Only ``.npz`` keeps dense modes and blocks, of which others have all values, and
    ``.npz`` and ``.parquet`` alone keep labels; a warning says where labels are left behind.

    Raises:
        IOFormatError: an unknown suffix.
        FormatError: ``x`` is not sparse.
        ShapeError: more than 64 modes, or more than two for ``.mtx``.
        DtypeError: complex values for ``.tns``, float16 and bfloat16 for Binsparse.
        OSError: the folder that is named cannot be written to.
        ImportError: the library that writes such a file is not installed.

    Examples:
        >>> stc.write("x.npz", stc.eye(3))
        >>> stc.read("x.npz").shape
        (3, 3)
    """
    path = memory.text_of(path)
    suffix = _suffix(path, SUFFIXES)
    tensor = SparseTensor.coerce(x)
    if tensor is None:
        raise FormatError(f"write takes a sparse tensor, {not_sparse(x)}")
    if tensor.labels and suffix not in LABELLED:
        warn(f"a {suffix} file holds no labels: write {' or '.join(LABELLED)}, or x.to_table() by a library of tables")
    if tensor.order > bounds.ORDER:
        raise ShapeError(f"a file holds a tensor of at most {bounds.ORDER} modes, this one has {tensor.order}")
    if suffix.startswith(".bsp"):
        binsparse.write(path, tensor)
    elif suffix.startswith(".tns"):
        tns.write(path, tensor)
    elif suffix.startswith(".mtx"):
        mtx.write(path, tensor)
    elif suffix == ".parquet":
        parquet.write(path, tensor)
    else:
        npz.write(path, tensor)


def _suffix(path: str, known: Sequence[str]) -> str:
    name = path.lower()
    # longest first, so that .tns.gz is not taken for an unknown .gz
    for suffix in sorted(known, key=len, reverse=True):
        if name.endswith(suffix):
            return suffix
    parquet.refuse_old(path)
    raise IOFormatError(f"{path}: unknown suffix; known are {', '.join(known)}")
