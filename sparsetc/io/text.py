"""Writing lines of coordinates and numbers, as .tns and .mtx files have them.

In: a tensor. Out: text whose numbers have the fewest digits that read back the same, in a file that is compressed where
its name ends in ``.gz``.
"""

from __future__ import annotations

import gzip
import os
from contextlib import nullcontext

import numpy as np
import torch

from sparsetc.support.atomic import replacing
from sparsetc.tensor.sparse_tensor import SparseTensor

LINES = 50_000  # formatted at a time


def write(path: str | os.PathLike[str], head: str, x: SparseTensor) -> None:
    """Write ``head``, then a line a nonzero: coordinates from 1, and the value, or its real and imaginary part."""
    x = x.expand_dense()
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    coords, values, _ = (x.to(torch.float32) if narrow else x).to_numpy()  # exact, and numpy knows it
    columns = np.stack((values.real, values.imag) if x.dtype.is_complex else (values,))
    with replacing(path) as file:
        # no name and no time inside, so that equal tensors make equal files
        zipped = gzip.GzipFile("", "wb", 9, file, mtime=0) if os.fspath(path).lower().endswith(".gz") else None
        with zipped or nullcontext(file) as out:
            out.write(head.encode())
            for at in range(0, x.nnz, LINES):
                out.write(_formatted(coords[:, at : at + LINES], columns[:, at : at + LINES]))


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
