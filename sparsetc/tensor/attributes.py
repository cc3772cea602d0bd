"""Attributes of a `SparseTensor` by torch's names, and the base class of its operations.

In: a SparseTensor. Out: sizes, coordinates, flags; the tensor on another memory, or with a gradient.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsetc.errors import DtypeError, ShapeError
from sparsetc.tensor.coords import mode_of
from sparsetc.tensor.pattern import Pattern

if TYPE_CHECKING:
    from typing_extensions import Self


IN_PLACE = "a SparseTensor is not changed in place, as {} would: take the result of an operation, or change x.values"
"""The message for operations that torch does in place."""


def _of_values(name: str) -> property:
    """The attribute or method of values, by its name."""
    return property(lambda x: getattr(x._values, name), doc=f"``values.{name}``.")


class Attributes:
    """torch's names for what a `SparseTensor` is: sizes, flags of its values, copies in other memory."""

    __slots__ = ()
    is_sparse = True

    if TYPE_CHECKING:
        _pattern: Pattern
        _values: Tensor

        @classmethod
        def _make(cls, pattern: Pattern, values: Tensor) -> Self: ...
        def coalesce(self) -> Self: ...
        def permute(self, *modes: Any) -> Self: ...

    # -- torch's names --------------------------------------------------------------------------------------------

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of mode ``dim``."""
        shape = torch.Size(untyped(self).shape)
        return shape if dim is None else shape[mode_of(len(shape), dim)]

    @property
    def ndim(self) -> int:
        """The number of modes, as `order`."""
        return len(untyped(self).shape)

    def dim(self) -> int:
        """The number of modes, as `order`."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of positions, most of which hold no entry."""
        return prod(untyped(self).shape)

    def __len__(self) -> int:
        return int(untyped(self).shape[0])

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

    is_floating_point, is_complex, is_signed, is_cuda, is_meta, is_leaf, is_shared, is_pinned, get_device = map(
        _of_values,
        (
            *("is_floating_point", "is_complex", "is_signed", "is_cuda", "is_meta", "is_leaf", "is_shared"),
            *("is_pinned", "get_device"),
        ),
    )
    grad_fn, register_hook, retain_grad, element_size = map(
        _of_values, ("grad_fn", "register_hook", "retain_grad", "element_size")
    )

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
        x, y = untyped(self), untyped(other)
        if y.shape != x.shape:
            raise ShapeError(f"copy_ takes a tensor of shape {x.shape}, found {y.shape}")
        y = y.to(x._values, non_blocking=non_blocking)
        old, new = self._pattern, y._pattern
        named = new.labels is not old.labels and (new.labels or old.labels)
        alike = new is old or (not named and new._blocks == old._blocks and torch.equal(new.coords, old.coords))
        if alike and y._values.shape == self._values.shape:
            self._values.copy_(y._values)
        else:
            x._set(new, y._values.clone())
        return self

    def share_memory_(self) -> Self:
        """Move coordinates and values to memory shared by processes. Return the tensor itself."""
        for tensor in (self._pattern.coords, self._values):
            tensor.share_memory_()
        return self

    def pin_memory(self) -> Self:
        """Return the tensor with coordinates and values in pinned memory, from which a GPU copies directly."""
        pattern = self._pattern.like(self._pattern.coords.pin_memory(), self._pattern._coalesced)
        return self._make(pattern, self._values.pin_memory())


def untyped(x: Any) -> Any:
    """Return the same tensor, untyped: the type checker does not know its other classes here."""
    return x


def is_sparse(x: Any) -> bool:
    return isinstance(x, Attributes)
