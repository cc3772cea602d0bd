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
from itertools import accumulate
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import DtypeError
from sparsetc.io import bounds, lines, memory, mtx, npy, npz
from sparsetc.io.atomic import replacing
from sparsetc.tensor.sparse_tensor import SparseTensor

HEAP = rb"GCOL\x01\0\0\0"
"""The first bytes of a heap of texts in HDF5."""
NAME = len(b"binsparse\0")
DESCRIPTION = re.compile(rb"([\1-\3])[\0-\3]\x0a\0(..)(..)[\0\1]?binsparse\0", re.DOTALL)
"""The attribute that describes a tensor, as an object header of HDF5 has it: a version, sizes, and the name."""
OVERLAP = 18
"""Bytes that consecutive blocks have in common in a search: one less than the text searched for."""
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
        coords, values, shape, structure = _parsed(library, arrays, dtype)
        if structure is not None:
            coords, values = _in_full(path, coords, values, str(structure))
        return memory.tensor_of(path, coords, values, shape)


def _parsed(library: Any, arrays: _Arrays, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, tuple[int, ...], Any]:
    """Coordinates, values, shape and structure; the library's arrays are gone when it returns."""
    container = library.NPZBinsparseContainer(arrays)
    header = container.read_header()
    count = int(header["number_of_stored_values"])
    arrays.take(f"{count:,} values", 16 * count)  # written out where the file has one for all, and then once more
    tensor = library.BinsparseTensor.parse(container, alias=False)
    if tensor.fill is True and tensor.fill_value != 0:
        raise ValueError(f"its fill value is {tensor.fill_value}; that of a sparse tensor is 0")
    if not 1 <= len(tensor.shape) <= bounds.ORDER:
        raise ValueError(f"a tensor of {len(tensor.shape)} modes; a file holds 1 to {bounds.ORDER}")
    coords, stored = _entries(arrays, tensor)
    return coords, npz.stored(stored, dtype), tensor.shape, header.get("structure")


class _Arrays:
    """Arrays by name, each checked as it is asked for; the descriptor, a JSON text, is one of them."""

    def __init__(
        self, path: str | os.PathLike[str], sized: Callable[[str], tuple[int, int]], get: Callable[[str], np.ndarray]
    ) -> None:
        """``sized`` gives the elements and bytes of an array, or says why it is not read; ``get`` reads it."""
        self._path = path
        self._sized = sized
        self._get = get
        self._bytes = dict[str, int]()

    def take(self, what: str, nbytes: int) -> None:
        """Raise `OutOfMemoryError` unless `nbytes` more fit beside all arrays requested so far."""
        memory.check(self._path, what, sum(self._bytes.values()) + nbytes)

    def __getitem__(self, name: str) -> np.ndarray:
        count, nbytes = self._sized(name)
        # narrow elements may be converted; Python takes up to 30 times the bytes of JSON
        converted = 8 * count if nbytes < 8 * count else 0
        self._bytes[name] = 30 * nbytes if name == "binsparse" else nbytes + converted
        self.take(f"array {name}", 0)
        return self._get(name)


@contextmanager
def _npz(path: str | os.PathLike[str]) -> Iterator[_Arrays]:
    with npy.opened(path) as archive:

        def sized(name: str) -> tuple[int, int]:
            header = archive.header(name)
            return header.count, header.nbytes

        yield _Arrays(path, sized, archive.array)


@contextmanager
def _hdf5(path: str | os.PathLike[str]) -> Iterator[_Arrays]:
    import h5py

    with npy.on_disk(path) as raw, memory.of_file(path, Exception), h5py.File(checked(raw), "r") as file:

        def sized(name: str) -> tuple[int, int]:
            if name == "binsparse":
                text = file.attrs.get_id(name)
                if not isinstance(text.get_type(), h5py.h5t.TypeStringID):  # HDF5 takes its bytes for addresses
                    raise ValueError(f"attribute {name} is no text")
                return 1, text.get_storage_size()
            data = file[name] if isinstance(file.get(name, getlink=True), h5py.HardLink) else None
            if not isinstance(data, h5py.Dataset) or data.ndim != 1 or data.dtype.kind not in "biuf":
                raise ValueError(f"{name} is no array of numbers of one dimension")
            if data.external or data.is_virtual:
                raise ValueError(f"{name} lies in other files, which are not read")
            return data.size, data.nbytes

        yield _Arrays(path, sized, lambda name: np.asarray(file.attrs[name] if name == "binsparse" else file[name][()]))


def checked(raw: IO[bytes]) -> IO[bytes]:
    """Return the file; ValueError for a heap with an object of no bytes, in front of which HDF5 stays for ever.

    Likewise for a description that is longer than the file, for which HDF5 takes memory before it looks for it.
    """
    begin, seen = 0, set[int]()
    while text := raw.read(lines.BLOCK):
        for header in DESCRIPTION.finditer(text):
            _check_length(raw, begin + header.end() - NAME, *header.groups())
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
        begin += len(text) - (OVERLAP if len(text) == lines.BLOCK else 0)
        raw.seek(begin)
    raw.seek(0)
    return raw


def _check_length(raw: IO[bytes], name: int, version: bytes, type_size: bytes, space_size: bytes) -> None:
    """Raise ValueError if an attribute's text claims to be longer than the file; `name` is the place of its name.

    The name, the type, the dataspace and the value follow one another, padded to 8 bytes in version 1 of the message.
    """
    unit = 8 if version == b"\1" else 1
    sizes = NAME, int.from_bytes(type_size, "little"), int.from_bytes(space_size, "little")
    after_name, _, after_space = accumulate(-(-size // unit) * unit for size in sizes)
    raw.seek(name + after_name)
    of_any_length = int.from_bytes(raw.read(1), "little") & 15 == 9  # the class of the type
    raw.seek(name + after_space)
    if of_any_length and int.from_bytes(raw.read(4), "little") > os.fstat(raw.fileno()).st_size:
        raise ValueError("a description longer than the file")


def _entries(arrays: _Arrays, tensor: Any) -> tuple[Tensor, np.ndarray]:
    """Coordinates (order, n) and values of what is stored, level by level from the outermost."""
    order, transpose = len(tensor.shape), list(tensor.transpose or range(len(tensor.shape)))
    rows = list[np.ndarray]()
    count = 1
    level = tensor.level
    while level.rank:
        modes = range(len(rows), len(rows) + level.rank)
        sizes = [tensor.shape[transpose[mode]] for mode in modes]
        total = count * math.prod(sizes) if level.level_desc == "dense" else level.indices[0].size
        # the rows before and after, a number for each entry and what becomes of it, and at last all coordinates
        arrays.take("the tensor", 8 * (len(rows) * count + (modes.stop + 3) * total))
        if level.level_desc == "dense":
            sizes = sizes if total else [0] * level.rank  # which may pass int64
            each, numbers = math.prod(sizes), np.arange(total)
            inner = [numbers // math.prod(sizes[at + 1 :]) % size for at, size in enumerate(sizes)]
        else:
            inner, ends = [_integers(index) for index in level.indices], level.pointers_to_next
            ends = np.array([0, total]) if ends is None else _integers(ends)
            if ends.size != count + 1 or ends[0] != 0 or ends[-1] != total or any(one.size != total for one in inner):
                raise ValueError(f"pointers to level {len(rows)} do not divide its {total} indices")
            each = np.diff(ends)
        rows = [*(np.repeat(row, each) for row in rows), *inner]
        count = total
        level = level.level
    if level.values.shape != (count,):
        raise ValueError(f"{count} values should be stored, found {level.values.size}")
    arrays.take("the tensor", 8 * (2 * order + 1) * count)
    coords = torch.empty((order, count), dtype=torch.int64)
    for mode in reversed(range(order)):
        coords[transpose[mode]] = torch.from_numpy(rows.pop())
    return coords, np.require(level.values, requirements=("C", "W"))


def _integers(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "iu" or (array.size and array.max() >= 2**63):
        raise ValueError(f"indices and pointers should be integers of int64, found {array.dtype}")
    return array.astype(np.int64, copy=False)


def _in_full(path: str | os.PathLike[str], coords: Tensor, values: Tensor, structure: str) -> tuple[Tensor, Tensor]:
    """Return both triangles of a matrix that stores one."""
    kind, _, triangle = structure.rpartition("_")
    if kind not in _SYMMETRIES or triangle not in ("lower", "upper") or len(coords) != 2:
        raise ValueError(f"structure {structure} of a tensor of order {len(coords)}")
    if bool((coords[0] < coords[1] if triangle == "lower" else coords[1] < coords[0]).any()):
        raise ValueError(f"entries in the other triangle of a matrix of structure {structure}")
    memory.check(path, "both triangles", mtx.TRIANGLES * (coords.nbytes + values.nbytes))
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

            with h5py.File(file, "w") as target:
                tensor.serialize(library.HDF5BinsparseContainer(target), alias=True)


def _imported() -> Any:
    """The package, which needs h5py."""
    try:
        import binsparse
        import h5py  # noqa: F401
    except ImportError as error:
        raise ImportError('Binsparse files need binsparse and h5py: pip install "sparsetc[binsparse]"') from error
    return binsparse
