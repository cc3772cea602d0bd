"""The pattern and the values of a `SparseTensor`, and the base class of its operations.

In: coordinates and values. Out: a checked tensor, its sizes and flags; the tensor with other values, in another memory,
or with a gradient.
"""

from __future__ import annotations

from math import prod
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from sparsetc.errors import DeviceError, DtypeError, ShapeError
from sparsetc.support.entry import entry_point
from sparsetc.tensor.coords import mode_of
from sparsetc.tensor.dtypes import INTEGERS, check_dtype
from sparsetc.tensor.duplicates import Merge, coalesced
from sparsetc.tensor.inputs import ArrayLike, as_values, constructed
from sparsetc.tensor.pattern import Pattern, lasting, once
from sparsetc.tensor.readings import Unsorted

IN_PLACE = "a SparseTensor is not changed in place, as {} would: take the result of an operation, or change x.values"
"""The message for operations that torch does in place."""
OF_VALUES = """
    is_floating_point is_complex is_signed is_cuda is_meta is_leaf is_shared is_pinned get_device grad_fn register_hook
    retain_grad element_size
""".split()  # noqa: SIM905 (a list of 13 quoted words is no easier to read)
"""Attributes and methods of the values that the tensor has too."""


@once
def merged(pattern: Pattern) -> tuple[Pattern, Merge | None]:
    """Return the coalesced pattern, and how values follow; made once."""
    coords, merge = coalesced(pattern.coords, pattern.shape)
    return pattern.like(coords), merge


class Attributes:
    """The pattern and the values of a `SparseTensor`, and torch's names for what it is; the base of its operations."""

    __slots__ = ("__weakref__", "_ddp_ignored", "_pattern", "_unsorted", "_values")
    # torch's DistributedDataParallel sets the second one of buffers that it leaves alone
    is_sparse = True

    _pattern: Pattern
    _values: Tensor
    _unsorted: Unsorted | None  # where the other two are not made yet

    @entry_point
    def __init__(
        self, coords: ArrayLike, values: ArrayLike, shape: Any = None, *, coalesce: bool = True, check: bool = True
    ) -> None:
        checked = constructed(coords, values, shape, coalesce, check)
        if isinstance(checked, Unsorted):
            self._unsorted = checked
        else:
            self._set(*checked)

    def _set(self, pattern: Pattern, values: Tensor) -> None:
        self._pattern = pattern
        self._values = values
        self._unsorted = None

    @classmethod
    def _make(cls, pattern: Pattern, values: Tensor) -> Self:
        """The constructor without any check: (nnz, *dense sizes) values on a pattern that is believed."""
        self = cls.__new__(cls)
        self._set(pattern, values)
        return self

    @classmethod
    def _of(cls, coords: Tensor, values: Tensor, shape: tuple[int, ...], coalesced: bool) -> Self:
        """The constructor without any check, on a new pattern."""
        return cls._make(Pattern(coords, shape[: coords.shape[0]], coalesced), values)

    def _bare(self) -> Self:
        """The pattern with no values to speak of and nothing kept: what is kept for a pattern may refer to it."""
        with lasting():  # nothing of the values, which a transform may follow
            none = torch.zeros((), dtype=self.dtype, device=self.device).expand(self._values.shape)
        return self._make(self._pattern.bare(), none)

    def __copy__(self) -> Self:
        return self.with_values(self.values)

    @property
    def pattern(self) -> Pattern:
        """The coordinates and sizes of the sparse modes, shared by all tensors of this pattern; compare with ``is``."""
        return self._pattern

    @property
    def coords(self) -> Tensor:
        """The coordinates, (sparse_order, nnz) int64, contiguous, 0-based."""
        return self._pattern.coords

    @property
    def values(self) -> Tensor:
        """The values, (nnz, *dense sizes), or (nnz, *blocksize, *dense sizes) of a tensor in blocks.

        They may be changed in place: `einsum` packs them again where they changed.
        """
        return self._values

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of all modes, dense ones last."""
        unsorted = self._unsorted
        if unsorted is not None:
            return unsorted.reading.sizes
        blocks = self._pattern.blocks
        if blocks is not None:
            return blocks.shape + tuple(self._values.shape[1 + len(blocks.shape) :])
        shape = self._pattern.shape
        return shape if self._values.ndim == 1 else shape + tuple(self._values.shape[1:])

    @property
    def blocksize(self) -> tuple[int, ...]:
        """The side of blocks along each sparse mode; empty for a tensor of single nonzeros."""
        blocks = self._pattern.blocks
        return () if blocks is None else blocks.sides

    @property
    def order(self) -> int:
        """The number of modes, dense ones included."""
        return len(self.shape)

    @property
    def sparse_order(self) -> int:
        """The number of modes with coordinates, at least 1."""
        return self._pattern.order

    @property
    def dense_order(self) -> int:
        """The number of trailing dense modes, usually 0."""
        return self._values.ndim - 1 - len(self.blocksize)

    @property
    def nnz(self) -> int:
        """The number of stored nonzeros or blocks (columns of coords), explicit zeros and duplicates included."""
        return self._pattern.nnz

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._given.dtype

    @property
    def device(self) -> torch.device:
        """The device of coordinates and values."""
        return self._given.device

    @property
    def requires_grad(self) -> bool:
        """True if autograd follows the values."""
        return self._given.requires_grad

    @property
    def _given(self) -> Tensor:
        """The values, unsorted until somebody asks for the pattern."""
        unsorted = self._unsorted
        return self._values if unsorted is None else unsorted.values

    @property
    def is_coalesced(self) -> bool:
        """True if the nonzeros are known to be lexicographically sorted and unique."""
        return self._pattern.is_coalesced

    @property
    def density(self) -> float:
        """The number of stored nonzeros or blocks over the number of possible positions; 0 for an empty shape."""
        positions = prod(self._pattern.shape)
        return self.nnz / positions if positions else 0.0

    def coalesce(self) -> Self:
        """Sort entries lexicographically and sum duplicates. Return the tensor itself if it is known to be coalesced.

        Examples:
            >>> stc.SparseTensor([[1, 0, 1]], [1.0, 2.0, 3.0], coalesce=False).coalesce().values
            tensor([2., 4.])
        """
        if self.is_coalesced:
            return self
        pattern, merge = merged(self._pattern)
        return self._make(pattern, self._values if merge is None else merge.values(self._values))

    def with_values(self, values: ArrayLike) -> Self:
        """Return a tensor of this pattern with new values, on the same device; dtype and dense modes may differ.

        The pattern is shared with everything kept for it, so an einsum compiled for values of this shape is not
        planned again. Values of blocks past the end of the shape are never read.

        Args:
            values: (nnz, *dense sizes), or (nnz, *blocksize, *dense sizes) for a tensor in blocks. The dense sizes
                (there may be none) become the last modes of the shape: values (nnz, heads) on an (n, n) pattern make a
                tensor (n, n, heads).

        Raises:
            ShapeError: another number of values than nonzeros, or other block sizes.

        Examples:
            >>> stc.eye(2).with_values([3.0, 4.0]).to_dense()
            tensor([[3., 0.],
                    [0., 4.]])
        """
        new, entries = as_values(values), self._pattern.values_shape(())
        if new.shape[: len(entries)] != entries:
            raise ShapeError(f"values must have shape {entries}, dense modes may follow; found {tuple(new.shape)}")
        if new.device != self.device:
            raise DeviceError(f"values must be on {self.device} as the pattern is, found {new.device}")
        return self._make(self._pattern, new)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast: ``to(device)``, ``to(dtype)``, ``to(device, dtype)``, ``to(other)``, ``non_blocking=``.

        Returns the tensor itself if nothing changes. On the same device, pattern and cache are shared.

        Examples:
            >>> stc.eye(2).to(torch.float64).dtype
            torch.float64
        """
        plain: Any = [a._values if isinstance(a, Attributes) else a for a in args]
        values = self._values.to(*plain, **kwargs)
        if values is self._values:
            return self
        check_dtype(values.dtype)
        of_sums = values.dtype in INTEGERS and self.dtype not in INTEGERS  # of the sum alone
        if not self.is_coalesced and (of_sums or torch.bool in (values.dtype, self.dtype)):
            return self.coalesce().to(*args, **kwargs)
        if values.device == self.device:
            return self.with_values(values)
        coords = self.coords.to(values.device, non_blocking=bool(kwargs.get("non_blocking", False)))
        return self._make(self._pattern.like(coords, self.is_coalesced), values)

    @classmethod
    def from_blocks(
        cls, coords: ArrayLike, blocks: ArrayLike, shape: Any, *, coalesce: bool = True, check: bool = True
    ) -> Self:
        """Make a tensor of dense blocks, all of one shape, on a grid that begins at 0.

        Args:
            coords: (order, n) integers, coordinates of blocks: coordinate c in a mode of side s stands for elements
                ``c * s .. c * s + s - 1``.
            blocks: (n, *sides), or (n, *sides, *dense sizes); the sides become `blocksize`.
            shape: sizes of all modes, in elements. They need not be multiples of the sides: values of blocks past the
                end must be zero.
            coalesce: sort blocks and sum duplicates, as the constructor does nonzeros.
            check: check that blocks are in range, and zero past the end.

        Raises:
            FormatError, CoordinateError, ShapeError, DtypeError, DeviceError: as the constructor.

        Examples:
            >>> stc.SparseTensor.from_blocks([[0], [1]], torch.ones(1, 2, 2), (4, 4)).to_dense()
            tensor([[0., 0., 1., 1.],
                    [0., 0., 1., 1.],
                    [0., 0., 0., 0.],
                    [0., 0., 0., 0.]])
        """
        checked = constructed(coords, blocks, shape, coalesce, check, in_blocks=True)
        assert not isinstance(checked, Unsorted)
        return cls._make(*checked)

    # -- torch's names --------------------------------------------------------------------------------------------

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of mode ``dim``."""
        shape = torch.Size(self.shape)
        return shape if dim is None else shape[mode_of(len(shape), dim)]

    @property
    def ndim(self) -> int:
        """The number of modes, as `order`."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of modes, as `order`."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of positions, most of which hold no entry."""
        return prod(self.shape)

    def __len__(self) -> int:
        return int(self.shape[0])

    def indices(self) -> Tensor:
        """Return coordinates, (sparse_order, nnz), as torch's sparse tensors do."""
        return self._pattern.coords

    def nonzero(self) -> Tensor:
        """Return the coordinates of the values that are not 0, (n, order).

        Examples:
            >>> stc.eye(2).nonzero()
            tensor([[0, 0],
                    [1, 1]])
        """
        return untyped(self).expand_dense().drop().coords.T

    def item(self) -> Any:
        """Return the element of a tensor with one position as a Python number.

        Raises:
            ShapeError: the tensor has another number of positions.
        """
        if self.numel() != 1:
            raise ShapeError(f"item() is of a tensor of one position, found one of {self.numel():,}")
        return untyped(self).to_dense().item()

    def clone(self) -> Self:
        """Return a tensor with a copy of the values; the pattern is shared, since it is never written to."""
        return self._make(self._pattern, self._values.clone())

    def detach(self) -> Self:
        """Return the tensor without a gradient of its values."""
        return self._make(self._pattern, self._values.detach())

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether autograd records gradients of the values, which must be a leaf. Return the tensor itself."""
        self._values.requires_grad_(requires_grad)
        return self

    def contiguous(self) -> Self:
        """Return the tensor itself; it is always contiguous."""
        return self

    # -- what torch.nn.Module, DataLoader and hooks ask of a tensor, as it may be a buffer of a module --------------
    # (and attributes of `OF_VALUES`)

    @property
    def grad(self) -> Self | None:
        """The gradient of the values, on the same pattern; None before there is one."""
        gradient = self._values.grad
        return None if gradient is None else self._make(self._pattern, gradient)

    def copy_(self, other: Self, non_blocking: bool = False) -> Self:
        """Copy the entries of another tensor of this shape into this one, as `Module.load_state_dict` does.

        Dtype and device stay. If both have the same coordinates, the values are written in place; no other method works
        in place.

        Raises:
            ShapeError: `other` has another shape.
            DtypeError: `other` is not sparse.
        """
        if not isinstance(other, Attributes):
            raise DtypeError(f"copy_ takes a SparseTensor, found {type(other).__name__}")
        if other.shape != self.shape:
            raise ShapeError(f"copy_ takes a tensor of shape {self.shape}, found {other.shape}")
        y = other.to(self._values, non_blocking=non_blocking)
        old, new = self._pattern, y._pattern
        named = new.labels is not old.labels and (new.labels or old.labels)
        alike = new is old or (not named and new.blocks == old.blocks and torch.equal(new.coords, old.coords))
        if alike and y._values.shape == self._values.shape:
            self._values.copy_(y._values)
        else:
            self._set(new, y._values.clone())
        return self

    def share_memory_(self) -> Self:
        """Move coordinates and values to memory shared by processes. Return the tensor itself."""
        for tensor in (self._pattern.coords, self._values):
            tensor.share_memory_()
        return self

    def pin_memory(self) -> Self:
        """Return the tensor with coordinates and values in pinned memory, from which a GPU copies directly."""
        pattern = self._pattern.like(self._pattern.coords.pin_memory(), self._pattern.is_coalesced)
        return self._make(pattern, self._values.pin_memory())


for _name in OF_VALUES:
    setattr(Attributes, _name, property(attrgetter(f"_values.{_name}"), doc=f"``values.{_name}``."))

Sparse = TypeVar("Sparse", bound=Attributes)
"""The class of a tensor, and of what is made of it."""


def untyped(x: Any) -> Any:
    """Return the same tensor, untyped: the type checker does not know its other classes here."""
    return x


def is_sparse(x: Any) -> bool:
    return isinstance(x, Attributes)
