"""Writing lines of coordinates and numbers, as .tns and .mtx files have them.

In: coordinates from 0 and values. Out: text whose numbers have the fewest digits that read back the same, and the file
it goes to, compressed where its name ends in ``.gz``.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

import numpy as np

from sparsetc.io.atomic import replacing

LINES = 50_000  # formatted at a time


@contextmanager
def created(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write text to, which takes the place of ``path`` once the block is done."""
    with replacing(path) as file:
        if not os.fspath(path).lower().endswith(".gz"):
            yield file
            return
        # no name and no time inside, so that equal tensors make equal files
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=9, mtime=0) as zipped:
            yield cast(BinaryIO, zipped)


def write_lines(out: BinaryIO, coords: np.ndarray, values: np.ndarray) -> None:
    """A line a nonzero: coordinates (order, nnz) from 0, written from 1, then values (numbers a line, nnz)."""
    for at in range(0, coords.shape[1], LINES):
        out.write(_formatted(coords[:, at : at + LINES], values[:, at : at + LINES]))


def _formatted(coords: np.ndarray, values: np.ndarray) -> bytes:
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
