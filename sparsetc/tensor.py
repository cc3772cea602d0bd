"""SparseTensor: coordinates, values and a shape. What every level takes as its sparse operand.

In: coordinates and values, or a sparse tensor of torch, scipy or pydata. Out: one checked, coalesced COO tensor on
one device, differentiable with respect to its values. Packed plans are cached on it by the levels above.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from sparsetc import convert
from sparsetc import coords as crd
from sparsetc.errors import DeviceError, ShapeError
from sparsetc.inputs import ArrayLike, as_coords, as_shape, as_values, check_dtype, coalesce_sum


class SparseTensor:
    """A sparse tensor in coordinate form, immutable by convention.

    Args:
        coords: (sparse_order, nnz) integers, 0-based; torch tensor, ndarray or nested sequence. Kept as int64.
        values: (nnz,) or, with trailing dense modes ("semi-sparse", as torch's hybrid COO), (nnz, *dense sizes).
            float64/32/16, bfloat16, complex64/128 or int8..int64; the dtype is kept. NaN and infinities are
            allowed and treated as values; so are explicit zeros.
        shape: sizes of all modes, the dense ones last. Without it, largest coordinate + 1 and the dense sizes.
            The product of sizes may pass 2**63. A size of 0 is legal when there are no nonzeros.
        coalesce: sort lexicographically and sum duplicates (the default). float16 and bfloat16 are summed in
            float32. Coordinates already sorted and unique are recognised, and then ``values`` is kept as it is,
            the same storage. With False, order and duplicates stay as given, meaning the sum of the duplicates.
        check: check that coordinates are in range (one transfer from a GPU). Structure is always checked.

    Raises:
        FormatError: coords are not integers, not 2-D, or do not match values.
        CoordinateError: a coordinate outside its mode.
        ShapeError: a shape that is no shape, or dense modes that do not match.
        DtypeError: values of a dtype not listed above, or integer duplicates whose sum does not fit theirs.
        DeviceError: coords and values on different devices.
    """

    __slots__ = ("__weakref__", "_coalesced", "_coords", "_packed", "_pattern_key", "_shape", "_values")

    _coords: torch.Tensor
    _values: torch.Tensor
    _shape: tuple[int, ...]
    _coalesced: bool
    _packed: dict[Any, Any]
    _pattern_key: object

    def __init__(
        self,
        coords: ArrayLike,
        values: ArrayLike,
        shape: Any = None,
        *,
        coalesce: bool = True,
        check: bool = True,
    ) -> None:
        vals = as_values(values)
        crds = as_coords(coords, vals)
        sizes = as_shape(shape, crds, vals)
        if check:
            crd.check_range(crds, sizes[: crds.shape[0]])
        if coalesce:
            crds, vals = coalesce_sum(crds, vals, sizes)
        self._set(crds, vals, sizes, coalesce)

    def _set(self, coords: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool) -> None:
        self._coords = coords
        self._values = values
        self._shape = shape
        self._coalesced = coalesced
        self._packed = {}
        self._pattern_key = object()

    @classmethod
    def _make(cls, coords: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool) -> SparseTensor:
        """The constructor without any check: int64 contiguous coords, and ``coalesced`` is believed."""
        self = cls.__new__(cls)
        self._set(coords, values, shape, coalesced)
        return self

    # ---- what it is -------------------------------------------------------------------------------------------

    @property
    def coords(self) -> torch.Tensor:
        """(sparse_order, nnz) int64, contiguous, 0-based."""
        return self._coords

    @property
    def values(self) -> torch.Tensor:
        """(nnz, *dense sizes)."""
        return self._values

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all modes, dense ones last."""
        return self._shape

    @property
    def order(self) -> int:
        """The number of modes, dense ones included."""
        return len(self._shape)

    @property
    def sparse_order(self) -> int:
        """The number of modes with coordinates, at least 1."""
        return self._coords.shape[0]

    @property
    def dense_order(self) -> int:
        """The number of trailing dense modes, mostly 0."""
        return self._values.ndim - 1

    @property
    def nnz(self) -> int:
        """The number of stored nonzeros (columns of coords), explicit zeros and duplicates included."""
        return self._coords.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Where coords and values live."""
        return self._values.device

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows the values."""
        return self._values.requires_grad

    @property
    def is_coalesced(self) -> bool:
        """Whether the nonzeros are known to be lexicographically sorted and unique."""
        return self._coalesced

    @property
    def density(self) -> float:
        """Stored nonzeros over positions of the sparse modes; 0 for an empty shape."""
        positions = math.prod(self._shape[: self.sparse_order])
        return self.nnz / positions if positions else 0.0

    @property
    def pattern_key(self) -> object:
        """A token shared by exactly the tensors that share this pattern through with_values; compare with ``is``."""
        return self._pattern_key

    def __repr__(self) -> str:
        dense = f", dense_order={self.dense_order}" if self.dense_order else ""
        return (
            f"SparseTensor(shape={self._shape}, nnz={self.nnz}{dense}, density={self.density:.3g}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    # ---- the same tensor, otherwise ---------------------------------------------------------------------------

    def coalesce(self) -> SparseTensor:
        """Sorted and without duplicates; itself when it is already known to be."""
        if self._coalesced:
            return self
        return SparseTensor._make(*coalesce_sum(self._coords, self._values, self._shape), self._shape, True)

    def with_values(self, values: ArrayLike) -> SparseTensor:
        """The same pattern with new values of the same size and device (the dtype may differ).

        Shares coordinates, ``pattern_key`` and the cache of packed plans, whose keys must therefore hold the dtype
        wherever it matters.
        """
        new = as_values(values)
        if new.shape != self._values.shape:
            raise ShapeError(f"values must have shape {tuple(self._values.shape)}, found {tuple(new.shape)}")
        if new.device != self.device:
            raise DeviceError(f"values must be on {self.device} as the pattern is, found {new.device}")
        other = SparseTensor._make(self._coords, new, self._shape, self._coalesced)
        other._packed, other._pattern_key = self._packed, self._pattern_key
        return other

    def to(self, *args: Any, **kwargs: Any) -> SparseTensor:
        """As torch's: ``to(device)``, ``to(dtype)``, ``to(device, dtype)``, ``to(other)``, ``non_blocking=``.

        Returns itself when nothing changes; on the same device the pattern and its cache are shared.
        """
        plain: Any = [a.values if isinstance(a, SparseTensor) else a for a in args]
        values = self._values.to(*plain, **kwargs)
        if values is self._values:
            return self
        if values.device == self.device:
            return self.with_values(values)
        check_dtype(values.dtype)
        coords = self._coords.to(values.device, non_blocking=bool(kwargs.get("non_blocking", False)))
        return SparseTensor._make(coords, values, self._shape, self._coalesced)

    def cuda(self, device: int | torch.device | str | None = None) -> SparseTensor:
        """On the given, or the current, CUDA device; an int is its number."""
        if isinstance(device, int):
            device = torch.device("cuda", device)
        return self.to("cuda" if device is None else device)

    def cpu(self) -> SparseTensor:
        """In the memory of the host."""
        return self.to("cpu")

    def permute(self, *modes: int | tuple[int, ...] | list[int]) -> SparseTensor:
        """Modes in another order, ``shape[n] = old.shape[modes[n]]``; nonzeros are sorted again if they were.

        Dense modes may change places among themselves only; call ``expand_dense()`` first to move them further.
        """
        raw: Any = modes[0] if len(modes) == 1 and isinstance(modes[0], tuple | list) else modes
        wanted = tuple(m + self.order if m < 0 else m for m in raw)
        if sorted(wanted) != list(range(self.order)):
            raise ShapeError(f"permute needs each of the modes 0..{self.order - 1} once, found {tuple(raw)}")
        if wanted == tuple(range(self.order)):
            return self
        split = self.sparse_order
        if any(m >= split for m in wanted[:split]):
            raise ShapeError(
                f"permute{wanted} would move a dense mode ({split}..{self.order - 1}) before a sparse one; "
                "call expand_dense() first"
            )
        coords = self._coords[list(wanted[:split])]
        values = self._values.permute(0, *(m - split + 1 for m in wanted[split:]))
        shape = tuple(self._shape[m] for m in wanted)
        if self._coalesced:
            coords, values = coalesce_sum(coords, values, shape)
        return SparseTensor._make(coords, values, shape, self._coalesced)

    def expand_dense(self) -> SparseTensor:
        """Dense modes turned into coordinates: nnz * (dense positions) nonzeros, zeros kept; differentiable."""
        if not self.dense_order:
            return self
        sizes = self._values.shape[1:]
        each = math.prod(sizes)
        grids = torch.cartesian_prod(*(torch.arange(s, device=self.device) for s in sizes)).reshape(each, len(sizes))
        coords = torch.cat((self._coords.repeat_interleave(each, dim=1), grids.T.repeat(1, self.nnz)))
        return SparseTensor._make(coords.contiguous(), self._values.reshape(-1), self._shape, self._coalesced)

    # ---- to and from others -----------------------------------------------------------------------------------

    def to_dense(self, memory_limit: int | str | None = None) -> torch.Tensor:
        """Strided tensor of ``shape``; differentiable. OutOfMemoryError when it needs more than ``memory_limit`` bytes.

        The limit is a number or text like ``"8GB"``; without one, the memory available now on the tensor's device.
        """
        return convert.to_dense(self, memory_limit)

    def to_torch(
        self, layout: torch.layout = torch.sparse_coo, blocksize: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """A torch.sparse tensor: COO of any order (hybrid if semi-sparse); CSR, CSC, BSR, BSC of order 2."""
        return convert.to_torch(self, layout, blocksize)

    def to_scipy(self) -> Any:
        """A ``scipy.sparse.coo_array``; order 2, on the CPU, of a dtype that scipy has (not float16, bfloat16)."""
        return convert.to_scipy(self)

    def to_numpy(self) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """``(coords, values, shape)``, copied from the GPU if need be; DtypeError for bfloat16, which numpy lacks."""
        return convert.to_numpy(self)

    def to_pydata(self) -> Any:
        """A ``sparse.COO`` of pydata/sparse."""
        return convert.to_pydata(self)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> SparseTensor:
        """From torch.sparse_coo (hybrid too), csr, csc, bsr, bsc, or a strided tensor (see from_dense)."""
        return convert.from_torch(tensor)

    @classmethod
    def from_dense(cls, tensor: ArrayLike) -> SparseTensor:
        """The nonzeros (NaN included) of a strided tensor or ndarray of order >= 1; differentiable."""
        return convert.from_dense(tensor)

    @classmethod
    def from_scipy(cls, matrix: Any) -> SparseTensor:
        """From any scipy.sparse matrix or array, 1-D and N-D coo_array included; explicit zeros are kept."""
        return convert.from_scipy(matrix)

    @classmethod
    def from_pydata(cls, array: Any) -> SparseTensor:
        """From a pydata/sparse COO, GCXS or DOK whose fill value is 0; FormatError otherwise."""
        return convert.from_pydata(array)

    @classmethod
    def from_numpy(cls, coords: np.ndarray, values: np.ndarray, shape: Any = None) -> SparseTensor:
        """From ndarrays: coords (sparse_order, nnz), values (nnz, *dense sizes)."""
        return cls(np.asarray(coords), np.asarray(values), shape)

    @staticmethod
    def coerce(obj: object) -> SparseTensor | None:
        """``obj`` as a SparseTensor if it is one, or any sparse tensor named above; None when it is not sparse."""
        return convert.coerce(obj)
