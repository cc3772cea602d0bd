"""numpy's .npz as a container of one sparse tensor: exact, compact, and readable without sparsetc.

In: a path. Out: a SparseTensor; or the other way round. The arrays are ``coords`` (sparse order x nnz, 0-based, the
smallest unsigned type that fits), ``values`` (nnz, dense sizes), ``shape`` and ``dtype``, the name of the values' dtype
(bfloat16, which numpy lacks, is stored as its bits in uint16). A tensor in blocks has ``coords`` of blocks, and
``values`` (nnz, sides, dense sizes). Files without ``dtype`` are read too, and so are those that ``save_npz`` of
scipy.sparse and of pydata/sparse write. No pickles.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from sparsetc.errors import DtypeError, IOFormatError
from sparsetc.io import bounds, foreign, memory, npy, numbers
from sparsetc.io.atomic import replacing
from sparsetc.tensor.blocks import inside_only
from sparsetc.tensor.coords import checked_shape
from sparsetc.tensor.inputs import DTYPES, dtype_name
from sparsetc.tensor.sparse_tensor import SparseTensor

_OURS = ("coords", "values", "shape")
_FOREIGN = ("shape", "data", "coords", "row", "col", "indices", "indptr", "offsets", "compressed_axes", "fill_value")


def read(path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> SparseTensor:
    """The tensor in a .npz file, in its own dtype unless ``dtype`` is given.

    Raises:
        IOFormatError: no such tensor, or values that ``dtype`` cannot hold.
        DtypeError: ``dtype`` is none that values may have.
        OutOfMemoryError: the tensor would pass the memory limit, or memory did not suffice.
        FileNotFoundError: no such file.
    """
    if dtype not in (None, *DTYPES):
        raise DtypeError(f"{path}: values cannot be read as {dtype}")
    footprint = "its arrays are larger than that"
    with memory.named(path, lambda: footprint), npy.opened(path) as archive:
        form, shape, nbytes = contents(archive)
        footprint = f"a tensor of {nbytes:,} bytes, and up to three times that meanwhile"
        memory.check(path, "the tensor", nbytes)
        coords, values = _entries(archive, form, shape)
        given = stored(values, dtype)
        made = SparseTensor.from_blocks if given.ndim > len(shape) else SparseTensor
        return made(coords, given if dtype is None else numbers.cast(given, dtype), shape)


def contents(archive: npy.Archive) -> tuple[str | None, tuple[int, ...], int]:
    """What the archive holds, by its headers and its smallest arrays.

    Returns:
        The form that `save_npz` of scipy or pydata/sparse names, or None for the arrays that `write` writes; the shape;
        and bytes of the tensor, or of the arrays as they are stored if that is more.

    Raises:
        ValueError, IOFormatError: its arrays are not those of a tensor.
    """
    form = _form(archive)
    wanted = _OURS if form is None else ("data", "shape")
    missing = [name for name in wanted if name not in archive.names]
    if missing:
        raise IOFormatError(f"{archive.path}: no array {', '.join(missing)} among {archive.listed or 'none'}")
    shape = archive.header("shape")
    if len(shape.shape) != 1 or shape.dtype.kind not in "iu":
        raise ValueError(f"shape must be 1-D, of integers, found {len(shape.shape)} dimensions of {shape.dtype}")
    if shape.count > bounds.ORDER:
        raise ValueError(f"a tensor of {shape.count} modes; a file holds at most {bounds.ORDER}")
    stored = [archive.header(name) for name in archive.names if name in (_OURS if form is None else _FOREIGN)]
    values = archive.header("values" if form is None else "data")
    # a nonzero has 8 bytes a coordinate; dense modes have none
    coordinates = archive.header("coords").count if form is None else values.count * shape.count
    nbytes = max(8 * coordinates + values.nbytes, sum(header.nbytes for header in stored) - shape.nbytes)
    return form, checked_shape(archive.array("shape").tolist()), nbytes


def _form(archive: npy.Archive) -> str | None:
    """The format of a file of scipy or pydata/sparse, which early versions of the latter did not name."""
    if "format" in archive.names:
        return _word(archive, "format")
    if "data" in archive.names and "values" not in archive.names:
        return "gcxs" if "compressed_axes" in archive.names else "coo"
    return None


def _word(archive: npy.Archive, name: str) -> str:
    """An array that is a single string, of text or of bytes."""
    header = archive.header(name)
    if header.shape or header.dtype.kind not in "SU" or header.nbytes > 256:
        raise ValueError(f"{name} is not a single word")
    word = archive.array(name).item()
    return word.decode("latin-1") if isinstance(word, bytes) else str(word)


def _entries(
    archive: npy.Archive, form: str | None, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray | torch.Tensor]:
    if form is not None:
        return foreign.entries(archive, form, shape)
    coords, values = (archive.header(name).shape for name in ("coords", "values"))
    if len(coords) != 2 or not values:
        raise ValueError(f"coords must be 2-D and values at least 1-D, found shapes {coords} and {values}")
    if coords[1] != values[0]:
        raise ValueError(f"coords have {coords[1]} columns, but there are {values[0]} values")
    if len(values) - 1 not in (len(shape) - coords[0], len(shape)):  # of blocks, which have all modes
        raise ValueError(
            f"shape has {len(shape)} modes, but coords have {coords[0]} and values {len(values) - 1} dense ones"
        )
    return archive.array("coords"), of_bits(archive.array("values"), in_bfloat16(archive))


def in_bfloat16(archive: npy.Archive) -> bool:
    """Whether values are bits of bfloat16, which numpy lacks."""
    return "dtype" in archive.names and _word(archive, "dtype") == "bfloat16"


def of_bits(bits: np.ndarray, bfloat16: bool) -> np.ndarray | torch.Tensor:
    """Values as they are stored, of bfloat16 as a tensor."""
    if not bfloat16:
        return bits
    if bits.dtype != np.uint16:
        raise ValueError(f"bfloat16 values must be stored as uint16, found {bits.dtype}")
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def stored(values: np.ndarray | torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Values as a tensor; unsigned integers and bools only on the way to another dtype."""
    if isinstance(values, torch.Tensor):
        return values
    if values.dtype.kind in "bu" and dtype is not None:
        if values.size and int(values.max()) >= 2**63:
            raise ValueError(f"the value {values.max()} does not fit int64")
        values = values.astype(np.int64)
    made = torch.from_numpy(values)
    if made.dtype not in DTYPES:
        raise ValueError(f"values are {values.dtype}; read them with dtype=, for example torch.float32")
    return made


def write(path: str | os.PathLike[str], x: SparseTensor) -> None:
    """All of ``x``, compressed; dense modes stay dense, and blocks blocks.

    The old file, if any, stays until the new one is complete.
    """
    name = dtype_name(x.dtype)
    values = x.values.detach()
    if x.pattern.blocks is not None:
        values = inside_only(values, x.pattern.blocks.masks(x.coords))
    values = values.resolve_conj().resolve_neg().cpu().contiguous()
    bits = values.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else values.numpy()
    coords = x.coords.cpu().numpy()
    largest = int(coords.max()) if coords.size else 0
    small = coords.astype(np.min_scalar_type(largest))
    with replacing(path) as file:
        np.savez_compressed(file, coords=small, values=bits, shape=np.array(x.shape, np.int64), dtype=np.array(name))
