"""numpy's .npz as a container of one sparse tensor: exact, compact, and readable without sparsetc.

In: a path. Out: a SparseTensor; or the other way round. The arrays are ``coords`` (sparse order x nnz, 0-based, the
smallest unsigned type that fits), ``values`` (nnz, dense sizes), ``shape`` and ``dtype``, the name of the values' dtype
(bfloat16, which numpy lacks, is stored as its bits in uint16). A tensor in blocks has ``coords`` of blocks, and
``values`` (nnz, sides, dense sizes). Files without ``dtype`` are read too. What ``save_npz`` of scipy.sparse and of
pydata/sparse wrote is read by these libraries. No pickles.
"""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sparsetc.io import bounds, memory
from sparsetc.io.atomic import replacing
from sparsetc.support import FilePath, required
from sparsetc.tensor.blocks import inside_only
from sparsetc.tensor.dtypes import dtype_name, resolved
from sparsetc.tensor.inputs import as_values
from sparsetc.tensor.sparse_tensor import SparseTensor

_HEADER = 1 << 14  # bytes that hold the longest header that numpy reads
_DEFLATED_TIMES = 1032  # bytes that a byte of deflate can stand for at most
_INDICES = ("coords", "row", "col", "indices", "indptr", "offsets", "compressed_axes", "shape")
_SMALL = ("modes", "shape", "format", "compressed_axes", "fill_value", "_is_array", "dtype")
"""Arrays of at most an element a mode."""


def names_of(archive: zipfile.ZipFile) -> dict[str, None]:
    """Return the names of the arrays of an open .npz file, each once."""
    return dict.fromkeys(name.removesuffix(".npy") for name in archive.namelist())


def _info(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """Return what the archive says of an array. Raise ValueError if there is none of this name."""
    info = archive.NameToInfo.get(f"{name}.npy") or archive.NameToInfo.get(name)
    if info is None:
        raise ValueError(f"no array {name} among {', '.join(names_of(archive))[:200] or 'none'}")
    return info


def array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Return an array, in the machine's byte order."""
    header(archive, name)
    with archive.open(_info(archive, name)) as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
    return array if array.dtype.isnative else array.byteswap(inplace=True).view(array.dtype.newbyteorder("="))


def header(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Return an array of the shape and dtype of one here, whose elements are one in memory.

    Raises:
        ValueError: it is no plain array, or its header contradicts the archive.
    """
    info = _info(archive, name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed in another way than numpy does")
    if info.file_size > _DEFLATED_TIMES * os.path.getsize(archive.filename or ""):
        raise ValueError(f"{name} cannot have the {info.file_size:,} bytes that the archive claims")
    with archive.open(info) as member:
        begin = io.BytesIO(member.read(_HEADER))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is Python's in a header
        try:
            major, _ = np.lib.format.read_magic(begin)
            reads = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
            shape, _, dtype = reads(begin)
            array = np.broadcast_to(np.empty((), dtype), shape)
        except Exception as error:  # whatever it is that the header makes Python's parser raise
            raise ValueError(f"{name} is no plain array: {error}") from None
    start = begin.tell()
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, as a pickle, which is not read")
    if dtype.kind not in "biufcSU" or not dtype.itemsize:
        raise ValueError(f"{name} is no plain array: {dtype} of shape {shape}")
    if start + array.nbytes != info.file_size:
        raise ValueError(
            f"{name} should have {array.nbytes:,} bytes by its header, the archive has {info.file_size - start:,}"
        )
    return array


@contextmanager
def opened(path: FilePath) -> Iterator[zipfile.ZipFile]:
    """The arrays of a .npz file; whatever is wrong with it, found in the block too, becomes an IOFormatError."""
    with memory.on_disk(path) as file, memory.of_file(path, Exception):
        if file.read(6) == b"\x93NUMPY":
            raise ValueError("a single array, not coords, values and shape")
        yield zipfile.ZipFile(file)


def read(path: FilePath) -> SparseTensor:
    """Return the tensor in a .npz file. Errors are those of `foreign.read`."""
    with opened(path) as archive:
        names = names_of(archive)
        foreign = "data" in names and "values" not in names
        _check(path, archive, "data" if foreign else "values")
        if foreign:
            load = _scipy
            if "fill_value" in names:
                load = required(
                    "sparse", f"{path} is a file of pydata/sparse, which reads it: pip install sparse"
                ).load_npz
            x = SparseTensor.coerce(load(path))
            assert x is not None
            return x
        values: Any = array(archive, "values")
        if "dtype" in names and array(archive, "dtype") == "bfloat16":
            if values.dtype != np.uint16:
                raise ValueError(f"bfloat16 values must be stored as uint16, found {values.dtype}")
            values = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        values, shape = as_values(values), array(archive, "shape").tolist()
        if values.ndim > len(shape):
            x = SparseTensor.from_blocks(array(archive, "coords"), values, shape)
        else:
            x = memory.tensor_of(path, array(archive, "coords"), values, shape)
        return x.with_labels(_labels(path, archive)) if "modes" in names else x


def _labels(path: FilePath, archive: zipfile.ZipFile) -> dict[str, Any]:
    held = {name: header(archive, name).nbytes for name in names_of(archive) if name.startswith("labels")}
    memory.check(path, "the labels", 2 * sum(held.values()))
    named = enumerate(array(archive, "modes").tolist())
    return {str(name): array(archive, f"labels{at}") if f"labels{at}" in held else None for at, name in named}


def _check(path: FilePath, archive: zipfile.ZipFile, values: str) -> None:
    """Refuse arrays that pass the memory limit or cannot be of a tensor, by their headers alone."""
    headers = {name: header(archive, name) for name in names_of(archive) if name in (*_INDICES, *_SMALL)}
    headers[values], shape = header(archive, values), header(archive, "shape")
    if shape.ndim != 1 or shape.size > bounds.ORDER:
        raise ValueError(f"shape should have a size for each of at most {bounds.ORDER} modes, found {shape.shape}")
    for name, one in headers.items():
        if name in _INDICES and one.dtype.kind not in "iu" and one.size:
            raise ValueError(f"{name} should be integers, found {one.dtype}")
        if name in _SMALL and one.size > bounds.ORDER:
            raise ValueError(f"{name} has {one.size:,} elements, more than modes")
    stored, coords = headers[values], headers.get("coords")
    nonzeros, nbytes = stored.shape[0] if stored.shape else 0, sum(one.nbytes for one in headers.values())
    if values == "data" or coords is None:  # what other libraries make of it is their affair, up to three copies
        nbytes = 3 * nbytes + stored.size * (16 * shape.size + 64)
    elif coords.dtype != np.int64 or stored.ndim > shape.size:  # those of blocks are copied
        nbytes += 8 * coords.size
    if stored.ndim > shape.size:  # blocks are put in order, and looked at past the end
        nbytes += stored.nbytes + 2 * stored.size + 64 * nonzeros
    memory.check(path, "the tensor", nbytes + memory.SORTED * nonzeros)


def _scipy(path: FilePath) -> Any:
    scipy = required("scipy.sparse", f'{path} is a file of scipy.sparse, which reads it: pip install "sparsetc[io]"')
    matrix = scipy.load_npz(path)
    if hasattr(matrix, "indptr"):  # one that is not in order ends the process later, also where there are no nonzeros
        matrix.check_format(full_check=True)
        if (np.diff(matrix.indptr) < 0).any():
            raise ValueError("indptr must be a non-decreasing sequence")
    if matrix.format == "dia":  # which becomes rows on the way, however few diagonals there are
        memory.check(path, "the rows of diagonals", 16 * max(matrix.shape))
    return matrix


def write(path: FilePath, x: SparseTensor) -> None:
    """Write all of ``x``, compressed; dense modes stay dense, and blocks blocks.

    The old file, if any, stays until the new one is complete.
    """
    name = dtype_name(x.dtype)
    values = x.values.detach()
    if x.pattern.blocks is not None:
        values = inside_only(values, x.pattern.blocks.masks(x.coords))
    values = resolved(values).cpu().contiguous()
    bits = values.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else values.numpy()
    coords = x.coords.cpu().numpy()
    largest = int(coords.max()) if coords.size else 0
    small = coords.astype(np.min_scalar_type(largest))
    with replacing(path) as file:
        labels = {f"labels{at}": of for at, of in enumerate(x.labels.values()) if of is not None}
        labels |= {"modes": np.array([*x.labels], str)} if x.labels else {}
        sizes = np.array(x.shape, np.int64)
        np.savez_compressed(file, **labels, coords=small, values=bits, shape=sizes, dtype=np.array(name))
