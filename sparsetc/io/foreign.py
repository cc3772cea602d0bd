"""Coordinates of the sparse arrays that scipy.sparse and pydata/sparse keep in .npz files; neither is needed for it.

In: an archive that ``save_npz`` wrote. Out: coordinates (order, nnz) and values, explicit zeros kept as scipy's own
``tocoo`` keeps them, and blocks of bsr as blocks. Sizes are compared before an array is unpacked; what contradicts
another is a ValueError.

Formats: coo, csr, csc, bsr and dia of scipy, where csr may have one mode and coo any number; coo and gcxs of
pydata/sparse. gcxs is csr of a matrix whose rows are some of the modes, folded into one, and its columns the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from sparsetc.io.npy import Archive

Entries: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Coordinates (order, nnz) and values (nnz,); of blocks (order, n) and (n, *sides)."""


def entries(archive: Archive, form: str, shape: tuple[int, ...]) -> Entries:
    """Coordinates and values of a tensor that is stored in one of `FORMATS`; ValueError for another."""
    if form not in FORMATS:
        raise ValueError(f"its format is {form!r}; known are {', '.join(FORMATS)}")
    check_fill(archive)
    return FORMATS[form](archive, shape)


def check_fill(archive: Archive) -> None:
    """ValueError where positions without a nonzero hold something other than 0."""
    if "fill_value" in archive.names:
        fill = archive.array("fill_value") if archive.header("fill_value").count == 1 else np.ones(1)
        if fill.dtype.kind not in "biufc" or fill.any():
            raise ValueError(f"its fill value is {fill.reshape(-1)[0].item()!r}; that of a sparse tensor is 0")


def _coo(archive: Archive, shape: tuple[int, ...]) -> Entries:
    (count,) = _sizes(archive, "data", 1)
    if "coords" not in archive.names:
        return np.stack([_line(archive, name, count) for name in ("row", "col")]), archive.array("data")
    if _sizes(archive, "coords", 2) != (len(shape), count):
        raise ValueError(
            f"coords have shape {archive.header('coords').shape}, for {count} values of {len(shape)} modes"
        )
    return archive.array("coords"), archive.array("data")


def _csr(archive: Archive, shape: tuple[int, ...]) -> Entries:
    if len(shape) > 2:
        raise ValueError(f"shape {shape} is not of a matrix")
    (count,) = _sizes(archive, "data", 1)
    columns = _line(archive, "indices", count)
    rows = _rows(archive, shape[0] if len(shape) == 2 else 1, count)
    return np.stack((rows, columns) if len(shape) == 2 else (columns,)), archive.array("data")


def _csc(archive: Archive, shape: tuple[int, ...]) -> Entries:
    transposed, data = _csr(archive, shape[::-1])
    return transposed[::-1].copy(), data


def _bsr(archive: Archive, shape: tuple[int, ...]) -> Entries:
    count, high, wide = _sizes(archive, "data", 3)
    if len(shape) != 2 or not high or not wide:
        raise ValueError(f"blocks of {high} x {wide} do not make up a tensor of shape {shape}")
    column = _line(archive, "indices", count)
    if count and not 0 <= int(column.min()) <= int(column.max()) < -(-shape[1] // wide):
        raise ValueError("a block lies outside the matrix")
    return np.stack((_rows(archive, -(-shape[0] // high), count), column)), archive.array("data")


def _dia(archive: Archive, shape: tuple[int, ...]) -> Entries:
    if len(shape) != 2:
        raise ValueError(f"shape {shape} is not of a matrix")
    count, _ = _sizes(archive, "data", 2)
    offsets, data = _line(archive, "offsets", count), archive.array("data")
    column = np.arange(data.shape[1])
    row = column - offsets[:, None]
    inside = (row >= 0) & (row < shape[0]) & (column < shape[1]) & (data != 0)
    return np.stack((row[inside], np.broadcast_to(column, data.shape)[inside])), data[inside]


def _gcxs(archive: Archive, shape: tuple[int, ...]) -> Entries:
    (count,) = _sizes(archive, "data", 1)
    folded = _sizes(archive, "compressed_axes", 1)[0]
    axes = _line(archive, "compressed_axes", min(folded, len(shape))).tolist()
    rest = [axis for axis in range(len(shape)) if axis not in axes]
    if sorted(axes + rest) != list(range(len(shape))):
        raise ValueError(f"compressed axes {axes} are not modes of shape {shape}")
    heights = [shape[axis] for axis in axes]
    coords = np.empty((len(shape), count), dtype=np.int64)
    coords[axes] = _unravelled(_rows(archive, math.prod(heights), count), heights) if axes else 0
    coords[rest] = _unravelled(_line(archive, "indices", count), [shape[axis] for axis in rest])
    return coords, archive.array("data")


FORMATS: dict[str, Callable[[Archive, tuple[int, ...]], Entries]] = {
    "coo": _coo,
    "csr": _csr,
    "csc": _csc,
    "bsr": _bsr,
    "dia": _dia,
    "gcxs": _gcxs,
}
"""What ``save_npz`` of scipy and of pydata/sparse write."""


def _sizes(archive: Archive, name: str, order: int) -> tuple[int, ...]:
    """Sizes of an array with ``order`` dimensions."""
    if name not in archive.names:
        raise ValueError(f"no array {name} among {archive.listed}")
    sizes = archive.header(name).shape
    if len(sizes) != order:
        raise ValueError(f"{name} should have {order} dimensions, found shape {sizes}")
    return sizes


def _line(archive: Archive, name: str, size: int) -> np.ndarray:
    """An array of ``size`` integers, int64."""
    if _sizes(archive, name, 1) != (size,):
        raise ValueError(f"{name} should have {size} elements, found {archive.header(name).count}")
    array = archive.array(name)
    if array.dtype.kind not in "iu" and size:
        raise ValueError(f"{name} should be integers, found {array.dtype}")
    return array.astype(np.int64)


def _rows(archive: Archive, rows: int, count: int) -> np.ndarray:
    """The row of each of ``count`` indices, from where the rows start."""
    starts = _line(archive, "indptr", rows + 1)
    if starts[0] != 0 or starts[-1] != count or (starts[1:] < starts[:-1]).any():
        raise ValueError(f"indptr does not deal {count} indices to {rows} rows")
    return np.repeat(np.arange(rows), np.diff(starts))


def _unravelled(linear: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Coordinates (modes, n) of row-major positions."""
    coords = np.empty((len(sizes), linear.size), dtype=np.int64)
    for mode in reversed(range(len(sizes))):
        linear, coords[mode] = np.divmod(linear, max(sizes[mode], 1))
    if linear.any():
        raise ValueError(f"an index lies outside sizes {tuple(sizes)}")
    return coords
