"""Input of a SparseTensor: a caller's data turned into checked tensors, with duplicates summed.

In: coordinates, values and a shape as tensors, ndarrays or sequences. Out: a pattern, a values tensor, and whether
anybody else has these; or an error that says which of them is wrong and how.

Sparse tensors of torch and scipy may come again: their pattern is read, sorted and packed once. A reading is found by
the memory that holds the index arrays, also where the tensor around them was made anew, and goes with that memory. It
serves only while the arrays hold what they held. On a GPU torch's count of changes tells, since to compare would wait
for the device; elsewhere an ndarray may share the memory, so the arrays are compared at each call, which takes a
hundredth of the time of reading them again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sparsetc.errors import DeviceError, DtypeError, FormatError, ShapeError
from sparsetc.support import Ints
from sparsetc.support.entry import without_autocast
from sparsetc.support.lru import Lru, cached_property
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import Blocks
from sparsetc.tensor.pattern import Pattern, Uses, lasting, transforming
from sparsetc.tensor.sums import INTEGERS, exactly, in_order, summed_rows

ArrayLike: TypeAlias = Any  # a torch tensor, an ndarray, or nested sequences of numbers

FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
"""The dtypes that values may have."""

SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The dtypes that narrow dtypes are summed in: sums of theirs may overflow although no element is infinite."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that files and the command line have for a dtype: ``float32``."""
    return str(dtype).removeprefix("torch.")


NAMED = {dtype_name(dtype): dtype for dtype in DTYPES}
"""The dtypes of values, by name."""


CONVERT = ".to(dtype) of torch, .astype(dtype) of numpy, scipy and tables"
"""The conversions of other objects to another dtype, for messages."""


def comes_from(obj: object, package: str) -> bool:
    """True if a class of ``obj`` is defined in ``package``; imports nothing."""
    return any(f"{cls.__module__}.".startswith(f"{package}.") for cls in type(obj).__mro__)


WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
"""Unsigned integers, which torch stores and computes nothing with, each with the dtype that values of it become."""


def check_dtype(dtype: torch.dtype, given: object = None) -> None:
    """Raise DtypeError unless values may have ``dtype``; the message names the conversion for `given`."""
    if dtype not in DTYPES:
        other = dtype_name(WIDER.get(dtype, torch.float32))
        convert = f'.astype("{other}")' if isinstance(given, np.ndarray) else f".to(torch.{other})"
        raise DtypeError(f"values must be one of {', '.join(NAMED)}; found {dtype}; convert them first: {convert}")


def computable(values: Tensor, given: object = None) -> Tensor:
    """Return values unchanged, or unsigned integers of 16 bits or more in a signed dtype that holds them.

    Raises:
        DtypeError: a dtype that values cannot have, or an integer of 2**63 or more.
    """
    wider = WIDER.get(values.dtype)
    if wider is None:
        check_dtype(values.dtype, given)
        return values
    signed = values.to(wider)
    if values.dtype == torch.uint64 and bool((signed < 0).any()):
        raise DtypeError("values hold integers of 2**63 or more, which int64 cannot; convert them to float64 first")
    return signed


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


def as_coords(coords: ArrayLike, values: Tensor) -> Tensor:
    """Coordinates as a contiguous int64 tensor (sparse order, nnz) on the device of ``values``; range unchecked.

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
    if raw.shape[1] != values.shape[0]:
        hint = "; coords are (order x nnz), so transpose them" if raw.shape[0] == values.shape[0] else ""
        raise FormatError(f"coords have {raw.shape[1]} columns but there are {values.shape[0]} values{hint}")
    if is_tensor and raw.device != values.device:
        raise DeviceError(f"coords are on {raw.device}, values on {values.device}; move one with .to()")
    if values.device.type == "meta":
        raise DeviceError("coords and values are on the meta device, which holds no numbers; make them on another")
    return raw.detach().to(device=values.device, dtype=torch.int64).contiguous()


def _without_subclass(coords: ArrayLike) -> ArrayLike:
    """A subclass of torch.Tensor, as PyG's EdgeIndex, copied to a tensor; all else as it is."""
    check_plain(coords, "coords")
    if not isinstance(coords, Tensor) or type(coords) is Tensor:
        return coords
    plain = torch.empty(coords.shape, dtype=coords.dtype, device=coords.device)
    plain.copy_(coords)  # what it returns may be of the subclass
    return plain


def shares_memory(tensor: Tensor, data: ArrayLike) -> bool:
    """True if a tensor made of ``data`` may still be the caller's memory; one made of sequences is not."""
    if transforming():  # whose tensors do not say where they are
        return True
    if isinstance(data, Tensor):
        return tensor.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
    if isinstance(data, np.ndarray):
        return tensor.data_ptr() == data.ctypes.data
    return not isinstance(data, list | tuple) and tensor.device.type == "cpu"


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
    vals, coords = as_values(values), _without_subclass(coords)
    comes_again = type(coords) is Tensor and not transforming()
    with lasting():
        raw = as_coords(coords, vals)
        blocks = _as_blocks(shape, raw.shape[0], tuple(vals.shape[1:])) if in_blocks else None
        sizes = as_shape(shape, raw, vals)[: raw.shape[0]] if blocks is None else blocks.grid
        if coalesce and check and comes_again:
            kind = torch.sparse_coo if blocks is None else blocks
            coordinates = reading(kind, sizes, [coords], [coords.untyped_storage()], _of_coordinates, blocks)
            unsorted = (raw.shape[0], vals.dtype, vals.device) in passing and vals.ndim == 1 and coordinates.unsorted
            pattern, merge = (None, None) if unsorted else (coordinates.pattern, coordinates.merge)
        else:
            if check:
                crd.check_range(raw, sizes, "nonzero" if blocks is None else "block")
            crds, merge = coalesced(raw, sizes) if coalesce else (raw, None)
            if crds is raw and shares_memory(raw, coords):
                crds = raw.clone()
            pattern = Pattern(crds, sizes, coalesce, blocks)
        if check and blocks is not None:
            blocks.check_end(raw, vals)
    if pattern is None:
        return Unsorted(coordinates, vals, vals.clone(), _version(vals))
    return pattern, vals if merge is None else merge.values(vals)


def _of_coordinates(own: tuple[Tensor, ...]) -> tuple[Tensor, None]:
    return own[0].to(torch.int64).contiguous(), None


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


@dataclass(frozen=True)
class Merge:
    """The map from nonzeros as given to sorted and unique ones.

    Attributes:
        order: (given,) the nonzeros in lexicographic order.
        run: (given,) which of the unique ones each of those adds to; None when there are no duplicates.
        count: how many unique ones there are.
    """

    order: Tensor
    run: Tensor | None
    count: int

    def values(self, values: Tensor) -> Tensor:
        """(count, ...) values, of (given, ...) values; differentiable."""
        values = values.index_select(0, self.order)
        if self.run is None:
            return values
        added = partial(summed_rows, owner=self.run, count=self.count)
        with in_order(True), without_autocast(values.device):
            return exactly(added, values.dtype, "a sum of duplicates", values)


def coalescing_bytes(shape: Sequence[int], n: int, values: Tensor) -> int:
    """Return the most bytes that `coalesced` and `Merge.values` take beyond the n unordered nonzeros themselves.

    Args:
        shape: sizes of the sparse modes; where they multiply to more than 2**63 there are several keys.
        n: how many nonzeros.
        values: of these, or of others of the same dtype and dense modes.
    """
    width = math.prod(values.shape[1:])
    sums = 80 * width if values.dtype in INTEGERS else 3 * width * values.dtype.itemsize
    return n * (8 * len(shape) + 64 + 16 * (math.prod(shape).bit_length() // 48) + sums)


def coalesced(coords: Tensor, shape: Ints) -> tuple[Tensor, Merge | None]:
    """Coordinates sorted and unique, and how values follow; themselves and None if they are so already."""
    keys = crd.sort_keys(coords, shape[: coords.shape[0]])
    if len(keys) == 1:
        keys = [crd.narrowed(keys[0], math.prod(shape[: coords.shape[0]]))]
    if crd.is_sorted_unique(keys):
        return coords, None
    order, fresh = crd.sorted_runs(keys)
    del keys
    kept = torch.nonzero(fresh).squeeze(1)
    if kept.shape[0] == order.shape[0]:
        return coords.index_select(1, order), Merge(order, None, order.shape[0])
    run = torch.cumsum(fresh, 0).sub_(1)
    return coords.index_select(1, order[kept]), Merge(order, run, kept.shape[0])


# -- tensors of torch and scipy that come again -----------------------------------------------------------------------
READINGS = 64
"""Readings kept; each holds coordinates, and whatever is packed of them."""

Numbered = Callable[[tuple[Tensor, ...]], tuple[Tensor, Tensor | None]]
"""A reader of index arrays: (coordinates (order, n) int64, which value each is; None for one after the other)."""

readings: Lru[Any, Reading] = Lru(READINGS)
"""Those of index arrays that live."""
passing: set[tuple[int, torch.dtype, torch.device]] = set()
"""Sparse orders, dtypes and devices of tensors whose patterns come and go, as einsums saw them: coordinates of such a
tensor are not sorted before somebody asks for its pattern."""


@dataclass(frozen=True)
class Reading:
    """A pattern, and how the library's values become values on it; both are made when they are first asked for.

    Attributes:
        indices: the index arrays as they were when they were read.
        versions: torch's counts of changes of the arrays at that time, where they are believed.
        coords: (order, n) int64, in range, in the order of the arrays.
        number: (n,) which of the library's values each is; None for one after the other.
        sizes: of the sparse modes, or of the grid of `blocks`.
        blocks: those that the coordinates are of.
        uses: how often einsums used the coordinates as they are.
    """

    indices: tuple[Tensor, ...]
    versions: tuple[int | None, ...]
    coords: Tensor
    number: Tensor | None
    sizes: Ints
    blocks: Blocks | None
    uses: Uses = field(default_factory=Uses)

    @property
    def unsorted(self) -> bool:
        """True if the pattern is still to be made and may need a sort; a GPU is not waited for."""
        plain = self.number is None and self.blocks is None and "_sorted" not in vars(self)
        return plain and (self.coords.is_cuda or not crd.is_sorted_unique(crd.sort_keys(self.coords, self.sizes)))

    @property
    def pattern(self) -> Pattern:
        """The coalesced pattern of the values."""
        return self._sorted[0]

    @property
    def merge(self) -> Merge | None:
        """The map from the library's values to values on the pattern; None if they are the same."""
        return self._sorted[1]

    @cached_property
    def _sorted(self) -> tuple[Pattern, Merge | None]:
        with lasting():
            coords, merge = coalesced(self.coords, self.sizes)
            number = self.number
            if number is not None:
                order = number if merge is None else number.index_select(0, merge.order)
                same = merge is None and torch.equal(order, torch.arange(order.numel(), device=order.device))
                run, count = (None, order.numel()) if merge is None else (merge.run, merge.count)
                merge = None if same else Merge(order, run, count)
            return Pattern(coords, self.sizes, True, self.blocks, self.uses), merge

    def values(self, values: Tensor) -> Tensor:
        """Return values on the pattern from the library's values in its own order."""
        values = computable(values)
        return values if self.merge is None else self.merge.values(values)

    def serves(self, indices: Sequence[Tensor]) -> bool:
        """True if these arrays, in the memory that was read before, still hold the same numbers."""
        versions = _versions(indices)
        if None not in versions and versions == self.versions:
            return True
        return all(torch.equal(now, then) for now, then in zip(indices, self.indices, strict=True))


def reading(
    kind: object,
    shape: Ints,
    indices: Sequence[Tensor],
    memory: Sequence[object],
    numbered: Numbered,
    blocks: Blocks | None = None,
) -> Reading:
    """Return the reading of these index arrays, known or new.

    Args:
        kind: what else the pattern depends on, as the layout.
        shape: sizes of all modes, the dense ones last.
        indices: the index arrays.
        memory: the objects that own their memory; a reading lives no longer than these.
        numbered: reads copies of the arrays.
        blocks: those that the coordinates are of, which `kind` must tell apart.
    """
    places = tuple((i.storage_offset(), i.shape, i.stride(), i.dtype) for i in indices)
    key = (kind, shape, places, *map(id, memory))
    kept = readings.get(key)
    if kept is not None:
        if kept.serves(indices):
            return kept
        readings.pop(key)
    with lasting():
        return readings.put(key, _read(indices, shape, numbered, blocks), memory)


def _versions(indices: Sequence[Tensor]) -> tuple[int | None, ...]:
    return tuple(_version(i) if i.is_cuda else None for i in indices)


def _version(tensor: Tensor) -> int | None:
    """Return torch's version count of a tensor, or None."""
    return None if tensor.is_inference() else tensor._version


def _read(given: Sequence[Tensor], shape: Ints, numbered: Numbered, blocks: Blocks | None) -> Reading:
    versions, indices = _versions(given), tuple(i.detach().clone() for i in given)
    coords, number = numbered(indices)
    sizes = shape[: coords.shape[0]] if blocks is None else blocks.grid
    crd.check_range(coords, sizes, "nonzero" if blocks is None else "block")
    return Reading(indices, versions, coords, number, sizes, blocks)


@dataclass(frozen=True)
class Unsorted:
    """A tensor's values beside coordinates that may be in no order, until somebody asks for its pattern.

    Attributes:
        given: the values as they are now, which are those of sorted coordinates.
        values: as they were, which are those of all others.
        version: torch's count of changes of those given, at that time.
    """

    reading: Reading
    given: Tensor
    values: Tensor
    version: int | None

    @property
    def unchanged(self) -> bool:
        """True if the values were not changed since they were read."""
        return self.version is not None and self.version == self.given._version

    def coalesced(self) -> tuple[Pattern, Tensor]:
        """The pattern and values on it, differentiable wherever the values are."""
        if self.reading.merge is None:
            return self.reading.pattern, self.given
        with _disable_current_modes(), torch.set_grad_enabled(self.values.requires_grad):
            return self.reading.pattern, self.reading.values(self.values)
