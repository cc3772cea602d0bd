"""Files of sparse tensors: ``read`` and ``write``, by suffix.

In: a path. Out: a SparseTensor; or the other way round. One module a format: tns, mtx, npz.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from sparsetc.errors import FormatError, IOFormatError
from sparsetc.io import mtx, npz, tns
from sparsetc.options import current
from sparsetc.tensor import SparseTensor

__all__ = ["SUFFIXES", "read", "write"]

SUFFIXES = (".tns", ".tns.gz", ".mtx", ".mtx.gz", ".npz")
"""What ``read`` and ``write`` understand."""


def read(
    path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, progress: bool | None = None
) -> SparseTensor:
    """The sparse tensor in a file, coalesced, on the CPU unless ``options(device=)`` names another device.

    Args:
        path: ``.tns`` (FROSTT text), ``.mtx`` (Matrix Market), either with ``.gz``, or ``.npz``.
        dtype: of the values. By default text is read as float32 (complex64 if complex), .npz as it was stored.
        progress: a progress bar on stderr (.tns only): None for files over 64 MB when stderr is a terminal,
            True always, False never. Needs rich; without it there is none.

    Raises:
        IOFormatError: an unknown suffix, or a file that is not what its suffix promises (file, line, text).
        FileNotFoundError: no such file.
    """
    suffix = _suffix(path)
    if suffix.startswith(".tns"):
        found = tns.read(path, dtype, progress)
    else:
        found = mtx.read(path, dtype) if suffix.startswith(".mtx") else npz.read(path, dtype)
    device = current().device
    return (found if device is None else found.to(device))._sole()


def write(path: str | os.PathLike[str], x: Any) -> None:
    """Write a SparseTensor, or any sparse tensor that ``SparseTensor.coerce`` takes, in the format of the suffix.

    The file appears under its name only when it is complete. ``.npz`` is exact for every dtype; ``.tns`` holds real
    numbers, ``.mtx`` matrices.
    """
    suffix = _suffix(path)
    tensor = SparseTensor.coerce(x)
    if tensor is None:
        raise FormatError(f"write takes a sparse tensor, found {type(x).__name__}; see SparseTensor.from_dense")
    if suffix.startswith(".tns"):
        tns.write(path, tensor)
    elif suffix.startswith(".mtx"):
        mtx.write(path, tensor)
    else:
        npz.write(path, tensor)


def _suffix(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path).lower()
    # longest first, so that .tns.gz is not taken for an unknown .gz
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return suffix
    raise IOFormatError(f"{os.fspath(path)}: unknown suffix; known are {', '.join(SUFFIXES)}")
