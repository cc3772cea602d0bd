"""Errors of readers: they name the file, and blame it for an invalid tensor.

Readers ask by `sparsetc.support.checks.check_memory` for all the memory that they take at their peak, before they do.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from errno import EINVAL
from typing import IO, Any

import torch

from sparsetc.errors import IOFormatError, OutOfMemoryError, SparsetcError
from sparsetc.support import FilePath
from sparsetc.support.checks import check_memory
from sparsetc.support.entry import lacks_memory
from sparsetc.tensor import coords as crd
from sparsetc.tensor.duplicates import coalescing_bytes
from sparsetc.tensor.inputs import as_coords, as_shape, as_values
from sparsetc.tensor.sparse_tensor import SparseTensor

CPU = torch.device("cpu")
SORTED = 24
"""Bytes a nonzero for checking the order: at most two keys, and their comparison."""


def text_of(path: FilePath) -> str:
    """Return a path as text; `IOFormatError` for what names no file."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise IOFormatError(f"a path of a file is a str or an os.PathLike, found {type(path).__name__}")
    text = os.fsdecode(path)
    if "\0" in text:
        raise IOFormatError(f"{text!r} names no file: it has a NUL")
    return text


def suffix_of(path: str, known: Iterable[str]) -> str:
    """Return the longest of the known suffixes that a path has. Raise `IOFormatError` if it has none."""
    found = [suffix for suffix in known if path.lower().endswith(suffix)]
    if not found:
        raise IOFormatError(f"{path}: unknown suffix; known are {', '.join(known)}")
    return max(found, key=len)


def on_disk(path: FilePath) -> IO[bytes]:
    """Open a file that is not read from first to last; raises IOFormatError for a pipe."""
    if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
        raise IOFormatError(f"{os.fspath(path)}: it is read in any order, so it must be a file on disk, not a pipe")
    return open(path, "rb")


def check(path: FilePath, what: str, nbytes: int) -> None:
    """Raise `OutOfMemoryError`, naming the file, unless the memory limit allows `nbytes` on the host."""
    check_memory(f"{os.fspath(path)}: {what}", nbytes, CPU)


def tensor_of(path: FilePath, coords: Any, values: Any, shape: Sequence[int] | None) -> SparseTensor:
    """Return the tensor of the nonzeros of a file, in any order, whose coordinates and values nobody else has.

    Raises:
        IOFormatError: coordinates, values and shape that are those of no tensor.
        OutOfMemoryError: the nonzeros are in no order, and the memory limit does not allow for putting them in order.
    """
    with of_file(path):
        values = as_values(values)
        coords = as_coords(coords, values)
        sizes = as_shape(shape, coords, values)
        order = coords.shape[0]
        crd.check_range(coords, sizes[:order])
        in_order = crd.is_coalesced(coords, sizes[:order])
        if not in_order:
            nbytes = coalescing_bytes(sizes[:order], values.shape[0], values)
            check(path, "putting its nonzeros in order", coords.nbytes + values.nbytes + nbytes)
        return SparseTensor._of(coords, values, sizes, in_order).coalesce()


@contextmanager
def named(path: FilePath, needed: str) -> Iterator[None]:
    """Turn a failed allocation in this block into an `OutOfMemoryError` with the path and the text ``needed``."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if os.fspath(path) in str(error) or not (lacks_memory(error) or isinstance(error, OutOfMemoryError)):
            raise
        raise OutOfMemoryError(f"{os.fspath(path)}: out of memory: {needed}") from error


@contextmanager
def of_file(path: FilePath, kinds: type[Exception] = SparsetcError) -> Iterator[None]:
    """Turn errors of ``kinds`` about what was read from a file into an IOFormatError; the system's stay as they are."""
    try:
        yield
    except (IOFormatError, OutOfMemoryError, ImportError):
        raise
    except kinds as error:
        lacking = isinstance(error, (MemoryError, RuntimeError)) and lacks_memory(error)
        if lacking or getattr(error, "errno", None) not in (None, EINVAL):  # as of a place that no file has
            raise
        said = f"it has no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0][:300]
        ours = isinstance(error, SparsetcError | KeyError) or type(error) is ValueError
        raise IOFormatError(f"{os.fspath(path)}: {'' if ours else 'damaged: '}{said}") from error
