"""numpy's .npz as a container of one sparse tensor: exact, compact, and readable without sparsetc.

In: a path. Out: a SparseTensor; or the other way round. The arrays are ``coords`` (sparse order x nnz, 0-based, the
smallest unsigned type that fits), ``values`` (nnz, dense sizes), ``shape`` and ``dtype``, the name of the values' dtype
(bfloat16, which numpy lacks, is stored as its bits in uint16). Files without ``dtype`` are read too. No pickles.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib

import numpy as np
import torch

from sparsetc.errors import IOFormatError, SparsetcError
from sparsetc.io import atomic
from sparsetc.tensor import SparseTensor

# what zipfile, zlib and numpy raise over a damaged file; MemoryError is for a header that asks for the impossible
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, KeyError, TypeError),
    *(NotImplementedError, RuntimeError, MemoryError),
)
_NEEDED = ("coords", "values", "shape")


def read(path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> SparseTensor:
    """The tensor in a .npz file, in its own dtype unless ``dtype`` is given; IOFormatError if it is not one."""
    arrays = _arrays(path)
    missing = [name for name in _NEEDED if name not in arrays]
    if missing:
        raise IOFormatError(f"{path}: no array {', '.join(missing)} among {', '.join(arrays) or 'none'}")
    coords, values, shape = (arrays[name] for name in _NEEDED)
    if shape.ndim != 1:
        raise IOFormatError(f"{path}: shape must be 1-D, found {shape.ndim} dimensions")
    stored: np.ndarray | torch.Tensor = values
    if str(arrays.get("dtype")) == "bfloat16":
        if values.dtype != np.uint16:
            raise IOFormatError(f"{path}: bfloat16 values must be stored as uint16, found {values.dtype}")
        stored = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    try:
        x = SparseTensor(coords, stored, tuple(shape.tolist()))
    except SparsetcError as error:
        raise IOFormatError(f"{path}: {error}") from error
    return x if dtype is None else x.to(dtype)


def _arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of ours in the file; whatever numpy or zipfile has against it becomes an IOFormatError."""
    with open(path, "rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("a single array, not coords, values and shape")
            with archive:
                return {name: archive[name] for name in (*_NEEDED, "dtype") if name in archive.files}
        except _DAMAGE as error:
            raise IOFormatError(f"{path}: not a readable .npz file ({str(error)[:200]})") from error


def write(path: str | os.PathLike[str], x: SparseTensor) -> None:
    """All of ``x``, compressed; dense modes stay dense. The old file, if any, stays until the new one is complete."""
    name = str(x.dtype).removeprefix("torch.")
    values = x.values.detach().resolve_conj().resolve_neg().cpu().contiguous()
    bits = values.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else values.numpy()
    coords = x.coords.cpu().numpy()
    largest = int(coords.max()) if coords.size else 0
    small = coords.astype(np.min_scalar_type(largest))
    with atomic.replacing(path) as file:
        np.savez_compressed(file, coords=small, values=bits, shape=np.array(x.shape, np.int64), dtype=np.array(name))
