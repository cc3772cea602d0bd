"""Binsparse, .bsp.h5 and .bsp.npz: levels, dense or sparse, in arrays of HDF5 or NumPy that a JSON text describes.

In: a path. Out: a SparseTensor; or the other way round. The package ``binsparse`` reads and writes every format of
version 0.1 of the specification (https://binsparse.org). Arrays are compared with the memory limit before it reads
them, and what they say with each other after. What is written is ``CVEC``, ``COO`` or one sparse level of all modes.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import torch

from sparsetc.errors import DtypeError
from sparsetc.io import bounds, lines, memory, mtx, npy, npz
from sparsetc.io.atomic import replacing
from sparsetc.tensor.sparse_tensor import SparseTensor

HEAP = rb"GCOL\x01\0\0\0"
"""How a heap of texts begins in HDF5."""
_SYMMETRIES = {"symmetric": "symmetric", "skew_symmetric": "skew-symmetric", "hermitian": "hermitian"}


def read(path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> SparseTensor:
    """Return the tensor in a Binsparse file, in its own dtype unless ``dtype`` is given; stored zeros are kept.

    Raises:
        IOFormatError: no such tensor, a fill value other than 0, or values that ``dtype`` cannot hold.
        OutOfMemoryError: the tensor would pass the memory limit, or memory did not suffice.
        FileNotFoundError: no such file.
        ImportError: binsparse or h5py is not installed.
    """
    library = _imported()
    opened = _npz if os.fspath(path).lower().endswith(".npz") else _hdf5
    with opened(path) as arrays:
        container = library.NPZBinsparseContainer(arrays)
        tensor = library.BinsparseTensor.parse(container, alias=False)
        if tensor.fill is True and tensor.fill_value != 0:
            raise ValueError(f"its fill value is {tensor.fill_value}; that of a sparse tensor is 0")
        if not 1 <= len(tensor.shape) <= bounds.ORDER:
            raise ValueError(f"a tensor of {len(tensor.shape)} modes; a file holds 1 to {bounds.ORDER}")
        coords, stored = _entries(path, tensor)
        values = npz.stored(stored, dtype)
        structure = container.read_header().get("structure")
        if structure is not None:
            coords, values = _in_full(path, coords, values, str(structure))
        return SparseTensor(coords, values, tensor.shape)


class _Arrays:
    """Arrays by name, each checked as it is asked for; the descriptor, a JSON text, is one of them."""

    def __init__(self, get: Callable[[str], np.ndarray]) -> None:
        self._get = get

    def __getitem__(self, name: str) -> np.ndarray:
        return self._get(name)


@contextmanager
def _npz(path: str | os.PathLike[str]) -> Iterator[_Arrays]:
    with npy.opened(path) as archive:

        def get(name: str) -> np.ndarray:
            memory.check(path, f"array {name}", archive.header(name).nbytes)
            return archive.array(name)

        yield _Arrays(get)


@contextmanager
def _hdf5(path: str | os.PathLike[str]) -> Iterator[_Arrays]:
    import h5py

    with npy.on_disk(path) as raw, memory.of_file(path, Exception), h5py.File(_checked(raw), "r") as file:

        def get(name: str) -> np.ndarray:
            if name == "binsparse":
                return np.asarray(file.attrs[name])
            data = file[name] if isinstance(file.get(name, getlink=True), h5py.HardLink) else None
            if not isinstance(data, h5py.Dataset) or data.ndim != 1 or data.dtype.kind not in "biuf":
                raise ValueError(f"{name} is no array of numbers of one dimension")
            if data.external or data.is_virtual:
                raise ValueError(f"{name} lies in other files, which are not read")
            memory.check(path, f"array {name}", data.nbytes)
            return np.asarray(data[()])

        yield _Arrays(get)


def _checked(raw: IO[bytes]) -> IO[bytes]:
    """Return the file; ValueError for a heap with an object of no bytes, in front of which HDF5 stays for ever."""
    begin, seen = 0, set[int]()
    while len(text := raw.read(lines.BLOCK)) >= len(HEAP):
        for heap in re.finditer(HEAP, text):
            raw.seek(begin + heap.start() + 8)
            end = begin + heap.start() + int.from_bytes(raw.read(8), "little")
            at = begin + heap.start() + 16
            while at + 16 <= end and at not in seen:
                seen.add(at)
                raw.seek(at)
                number, size = struct.unpack("<H6xQ", raw.read(16).ljust(16, b"\1"))
                step = (size + 23) // 8 * 8 % 2**64 if number else size  # number 0 is what is free
                if step == 0:
                    raise ValueError("a damaged heap of HDF5")
                at += step
        begin += len(text) - len(HEAP) + 1
        raw.seek(begin)
    raw.seek(0)
    return raw


def _entries(path: str | os.PathLike[str], tensor: Any) -> tuple[torch.Tensor, np.ndarray]:
    """Coordinates (order, n) and values of what is stored, level by level from the outermost."""
    order, transpose = len(tensor.shape), tensor.transpose or range(len(tensor.shape))
    stored, level = np.zeros((0, 1), np.int64), tensor.level
    while level.rank:
        if level.level_desc == "dense":
            sizes = [tensor.shape[transpose[mode]] for mode in range(len(stored), len(stored) + level.rank)]
            each: Any = math.prod(sizes)
            memory.check(path, "the tensor", 8 * order * stored.shape[1] * each)
            inner = np.tile(np.indices(sizes).reshape(level.rank, -1), stored.shape[1])
        else:
            inner = np.stack([_integers(index) for index in level.indices])
            ends = level.pointers_to_next
            ends = np.array([0, inner.shape[1]]) if ends is None else _integers(ends)
            if ends.size != stored.shape[1] + 1 or ends[0] != 0 or ends[-1] != inner.shape[1]:
                raise ValueError(f"pointers to level {len(stored)} do not deal its {inner.shape[1]} indices")
            each = np.diff(ends)
            memory.check(path, "the tensor", 8 * order * inner.shape[1])
        stored, level = np.concatenate((np.repeat(stored, each, axis=1), inner)), level.level
    if level.values.shape != stored.shape[1:]:
        raise ValueError(f"{stored.shape[1]} values should be stored, found {level.values.size}")
    coords = np.empty_like(stored)
    coords[list(transpose)] = stored
    return torch.from_numpy(coords), np.require(level.values, requirements=("C", "W"))


def _integers(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "iu" or (array.size and array.max() >= 2**63):
        raise ValueError(f"indices and pointers should be integers of int64, found {array.dtype}")
    return array.astype(np.int64)


def _in_full(
    path: str | os.PathLike[str], coords: torch.Tensor, values: torch.Tensor, structure: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both triangles of a matrix of which one is stored."""
    kind, _, triangle = structure.rpartition("_")
    if kind not in _SYMMETRIES or triangle not in ("lower", "upper") or len(coords) != 2:
        raise ValueError(f"structure {structure} of a tensor of order {len(coords)}")
    if bool((coords[0] < coords[1] if triangle == "lower" else coords[1] < coords[0]).any()):
        raise ValueError(f"entries in the other triangle of a matrix of structure {structure}")
    memory.check(path, "both triangles", 2 * (coords.nbytes + values.nbytes))
    return mtx.in_full(coords, values, _SYMMETRIES[kind])


def write(path: str | os.PathLike[str], x: SparseTensor) -> None:
    """Write the nonzeros of ``x`` in order; dense modes become coordinates.

    DtypeError for float16 and bfloat16, which Binsparse lacks. The old file, if any, stays until the new one is
    complete.
    """
    if x.dtype in (torch.float16, torch.bfloat16):
        raise DtypeError(f"Binsparse has no {x.dtype}; convert with .to(torch.float32) first")
    library = _imported()
    coords, values, shape = x.expand_dense().coalesce().to_numpy()
    level = library.SparseLevel(len(shape), library.ElementLevel(values), tuple(coords))
    tensor = library.CustomTensor(shape, len(values), level=level)
    with replacing(path) as file:
        if os.fspath(path).lower().endswith(".npz"):
            arrays: dict[str, np.ndarray] = {}
            tensor.serialize(library.NPZBinsparseContainer(arrays), alias=True)
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        else:
            import h5py

            with h5py.File(file, "w") as made:
                tensor.serialize(library.HDF5BinsparseContainer(made), alias=True)


def _imported() -> Any:
    """The package, which needs h5py."""
    try:
        import binsparse
        import h5py  # noqa: F401
    except ImportError as error:
        raise ImportError('Binsparse files need binsparse and h5py: pip install "sparsetc[binsparse]"') from error
    return binsparse
