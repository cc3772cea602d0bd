"""Input of a SparseTensor: a caller's data turned into checked tensors.

In: coordinates, values and a shape as tensors, ndarrays or sequences. Out: a pattern, a values tensor, and whether
anybody else has these; or an error that says which of them is wrong and how.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import DeviceError, DtypeError, FormatError, ShapeError
from sparsetc.support import Ints
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import Blocks
from sparsetc.tensor.dtypes import computable
from sparsetc.tensor.duplicates import coalesced
from sparsetc.tensor.pattern import Pattern, lasting, transforming
from sparsetc.tensor.readings import Unsorted, passing, read_together, reading, version_of

ArrayLike: TypeAlias = Any  # a torch tensor, an ndarray, or nested sequences of numbers
CONVERT = ".to(dtype) of torch, .astype(dtype) of numpy, scipy and tables"
"""The conversions of other objects to another dtype, for messages."""


def comes_from(obj: object, package: str) -> bool:
    """True if a class of ``obj`` is defined in ``package``; imports nothing."""
    return any(f"{cls.__module__}.".startswith(f"{package}.") for cls in type(obj).__mro__)


def not_plain(data: object) -> str:
    """Return in words the kind of a tensor without plain numbers (nested, masked, uninitialised), or nothing."""
    if type(data) is Tensor or type(data) is torch.nn.Parameter:  # asked for at each call
        return "a nested tensor" if data.is_nested else ""
    if isinstance(data, np.ma.MaskedArray):
        return "a masked array"
    if not isinstance(data, Tensor):
        return ""
    if torch.nn.parameter.is_lazy(data):  # type: ignore[no-untyped-call]
        return "an uninitialised parameter"
    if isinstance(data, torch.masked.MaskedTensor):
        return "a masked tensor"
    return "a nested tensor" if data.is_nested else ""


REMEDIES = {
    "a masked array": "fill it, as by .filled(0)",
    "an uninitialised parameter": "run the module that it belongs to once, or call .materialize(shape)",
    "a masked tensor": "fill it, as by .to_tensor(0)",
    "a nested tensor": "pad it, as by .to_padded_tensor(0), or take its parts one by one",
}


def check_plain(data: object, what: str) -> None:
    """Raise DtypeError if a tensor-like object has no plain numbers: it is nested, masked, or not initialised."""
    kind = not_plain(data)
    if kind:
        raise DtypeError(f"{what} is {kind}, which sparsetc cannot compute with; {REMEDIES[kind]}")


def not_sparse(operand: object, dense: str = "see SparseTensor.from_dense, or from_graph for edges") -> str:
    """Return the error text for an operand that is no sparse tensor; `dense` is the advice for non-files."""
    is_file = isinstance(operand, str | os.PathLike) or hasattr(operand, "block")
    of_file = "stc.read reads a file, and stc.stream takes a packed one for an einsum"
    return f"found {type(operand).__name__}; {of_file if is_file else dense}"


def as_dense(operand: Any, what: str) -> Any:
    """An ndarray as a tensor on the CPU, sharing its memory where it can, numpy's bool as Python's; else as it is.

    Raises:
        DtypeError: a dtype that torch has not, or an operand that `check_plain` refuses.
    """
    check_plain(operand, what)
    if isinstance(operand, np.bool_):  # which is no Number
        return bool(operand)
    return as_tensor(operand, what) if isinstance(operand, np.ndarray) else operand


def as_tensor(data: ArrayLike, what: str, refuse: Callable[[str], Exception] = DtypeError) -> Tensor:
    """Return a torch tensor, of the same memory where torch can take it. Raise ``refuse`` for what is no tensor."""
    check_plain(data, what)
    if isinstance(data, Tensor):
        return data
    try:
        if isinstance(data, np.ndarray) and (not data.flags.writeable or any(s < 0 for s in data.strides)):
            data = data.copy()  # torch has neither read-only nor backwards views
        if isinstance(data, np.ndarray) and not data.dtype.isnative:
            data = data.astype(data.dtype.newbyteorder("="))
        # not `as_tensor` of an ndarray, which goes to the default device in force
        return torch.from_numpy(data) if isinstance(data, np.ndarray) else torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        kind = data.dtype if isinstance(data, np.ndarray) else type(data).__name__
        raise refuse(f"{what} cannot be read as a tensor (found {kind}): {error}") from None


def as_values(values: ArrayLike) -> Tensor:
    """Return values as a strided tensor (nnz, *dense sizes); a supported dtype and the storage are kept."""
    vals = computable(as_tensor(values, "values"), values)
    if vals.layout != torch.strided:
        raise FormatError(f"values must be a strided tensor, found {vals.layout}; see SparseTensor.from_torch")
    if vals.ndim < 1:
        raise FormatError("values must have shape (nnz, *dense sizes), found a single number; write [value]")
    return vals


def as_coords(coords: ArrayLike, values: Tensor | None = None) -> Tensor:
    """Coordinates as a contiguous int64 tensor (sparse order, nnz), of ``values`` on their device; range unchecked.

    The tensor may be the caller's own.
    """
    if not isinstance(coords, Tensor | np.ndarray):
        coords = _from_sequences(coords)
    if isinstance(coords, np.ndarray) and coords.dtype == np.uint64:
        if coords.size and int(coords.max()) >= crd.INT64_SIZES:
            raise _outside_int64(int(coords.max()))
        coords = coords.astype(np.int64)
    is_tensor = isinstance(coords, Tensor)
    raw = as_tensor(coords, "coords", FormatError)
    if raw.dtype == torch.bool or raw.is_floating_point() or raw.is_complex():
        raise FormatError(f"coords must be integers, found {raw.dtype}")
    if raw.ndim != 2:
        raise FormatError(f"coords must be 2-D (sparse order x nnz), found shape {tuple(raw.shape)}")
    if raw.shape[0] == 0:
        raise FormatError("coords must have at least one mode (row); a tensor of order 0 is not sparse")
    values = raw[0] if values is None else values
    if raw.shape[1] != values.shape[0]:
        hint = "; coords are (order x nnz), so transpose them" if raw.shape[0] == values.shape[0] else ""
        raise FormatError(f"coords have {raw.shape[1]} columns but there are {values.shape[0]} values{hint}")
    if is_tensor and raw.device != values.device:
        raise DeviceError(f"coords are on {raw.device}, values on {values.device}; move one with .to()")
    if values.device.type == "meta":
        raise DeviceError("coords and values are on the meta device, which holds no numbers; make them on another")
    if raw.dtype == torch.int64 and raw.is_contiguous() and raw.device == values.device:
        return raw  # each conversion takes the time of a launch, also where there is nothing to convert
    return raw.detach().to(device=values.device, dtype=torch.int64).contiguous()


def _without_subclass(coords: ArrayLike) -> ArrayLike:
    """A subclass of torch.Tensor, as PyG's EdgeIndex, copied to a tensor; all else as it is."""
    if not isinstance(coords, Tensor) or type(coords) is Tensor:
        return coords
    check_plain(coords, "coords")
    plain = torch.empty(coords.shape, dtype=coords.dtype, device=coords.device)
    plain.copy_(coords)  # what it returns may be of the subclass
    return plain


def _from_sequences(coords: ArrayLike) -> ArrayLike:
    """Nested sequences as an ndarray; empty ones, which numpy would call float, as integers."""
    if isinstance(coords, list | tuple) and any(isinstance(row, Tensor) for row in coords):
        coords = [row if isinstance(row, Tensor) else torch.as_tensor(row) for row in coords]
        if len({row.shape for row in coords}) > 1:
            raise FormatError(f"coords must be a rectangle of integers, found rows of {[*map(len, coords)]!s:.80}")
        return torch.stack(coords)
    try:
        array = np.asarray(coords)
    except ValueError as error:
        raise FormatError(f"coords must be a rectangle of integers (order x nnz): {error}") from None
    if array.dtype.kind in "fO":  # what numpy makes of integers of which int64 does not hold all
        for number in np.asarray(coords, dtype=object).flat:
            if isinstance(number, int) and not -crd.INT64_SIZES <= number < crd.INT64_SIZES:
                raise _outside_int64(number)
    return array.astype(np.int64) if array.size == 0 else array


def _outside_int64(coordinate: int) -> FormatError:
    return FormatError(f"coordinates must be from 0 to 2**63 - 1, found {coordinate}")


def as_shape(shape: Any, coords: Tensor, values: Tensor) -> Ints:
    """``shape`` checked against coords and values, or inferred as the largest coordinate + 1."""
    dense = tuple(values.shape[1:])
    if shape is None:
        if coords.shape[1] == 0:
            raise ShapeError("the shape of a tensor with no nonzeros cannot be inferred; give shape=")
        return crd.checked_shape(c + 1 for c in torch.clamp(coords.amax(dim=1), min=-1).tolist()) + dense
    sizes = crd.checked_shape(shape)
    order = coords.shape[0] + len(dense)
    if len(sizes) != order:
        raise ShapeError(
            f"shape {sizes} has {len(sizes)} modes, but coords have {coords.shape[0]} rows and values {len(dense)} "
            f"dense modes, which makes {order}"
        )
    if sizes[coords.shape[0] :] != dense:
        raise ShapeError(f"shape {sizes} must end in the sizes of the dense modes of values, {dense}")
    return sizes


def constructed(
    coords: ArrayLike, values: ArrayLike, shape: Any, coalesce: bool, check: bool, in_blocks: bool = False
) -> tuple[Pattern, Tensor] | Unsorted:
    """Return a pattern, and values on it, of arguments of SparseTensor or `from_blocks`.

    Of coordinates that are in no order, and that may be used once and no more, these are `Unsorted`.
    """
    if coalesce and check and not in_blocks and (entries := read_together(shape, coords, values)):
        return entries
    vals, coords = as_values(values), _without_subclass(coords)
    comes_again = type(coords) is Tensor and not transforming()
    with lasting():
        raw = as_coords(coords, vals)
        blocks = _as_blocks(shape, raw.shape[0], tuple(vals.shape[1:])) if in_blocks else None
        sizes = as_shape(shape, raw, vals)[: raw.shape[0]] if blocks is None else blocks.grid
        if coalesce and check and comes_again:
            kind = torch.sparse_coo if blocks is None else blocks
            loose = (raw.shape[0], vals.dtype, vals.device) in passing and vals.ndim == 1 and blocks is None
            coordinates = reading(kind, sizes, [coords], lambda own: own[0].long().contiguous(), blocks)
            loose = loose and coordinates.unsorted
            pattern, merge = (None, None) if loose else (coordinates.pattern, coordinates.merge)
        else:
            if check:
                crd.check_range(raw, sizes, "nonzero" if blocks is None else "block")
            crds, merge = coalesced(raw, sizes) if coalesce else (raw, None)
            pattern = Pattern(raw.clone() if crds is raw else crds, sizes, coalesce, blocks)  # raw may be the caller's
        if check and blocks is not None:
            blocks.check_end(raw, vals)
    if pattern is None:
        return Unsorted(coordinates, vals, vals.clone(), version_of(vals))
    return pattern, vals if merge is None else merge.values(vals)


def _as_blocks(shape: Any, order: int, block: Ints) -> Blocks:
    """Return the blocks of `order` modes from the tensor's shape and a block's shape, both with dense modes."""
    if len(block) < order or 0 in block[:order]:
        raise FormatError(
            f"blocks must have shape (n, a side of 1 or more for each of {order} modes, *dense sizes), found (n, "
            f"{', '.join(map(str, block))})"
        )
    sizes = crd.checked_shape(shape)
    if len(sizes) != len(block):
        raise ShapeError(f"shape {sizes} has {len(sizes)} modes, but a block has {len(block)}, {block}")
    if sizes[order:] != block[order:]:
        raise ShapeError(f"shape {sizes} must end in the sizes of the dense modes of blocks, {block[order:]}")
    return Blocks(block[:order], sizes[:order])
