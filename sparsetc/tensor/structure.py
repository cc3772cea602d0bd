"""Modes of sparse tensors: their order and the shape.

In: a SparseTensor. Out: one with the same elements in other modes, differentiable; where entries lie then is found once
for a pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from sparsetc.errors import ShapeError
from sparsetc.support import Ints, outside, volume
from sparsetc.support.checks import check_memory
from sparsetc.tensor import coords as crd
from sparsetc.tensor.attributes import untyped
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.coords import mode_of
from sparsetc.tensor.parts import Parts, flat
from sparsetc.tensor.pattern import Pattern, once


class Structure(Parts):
    """Permuting, joining, splitting and repeating the modes of a `SparseTensor`.

    Tensors in blocks are taken nonzero by nonzero, except where modes only change places. Duplicates are summed first.
    """

    __slots__ = ()

    # -- orders of modes ------------------------------------------------------------------------------------------

    @property
    def T(self) -> Self:
        """The transpose of a matrix.

        Raises:
            ShapeError: the order is not 2; use `mT` or `permute`.
        """
        if self.ndim != 2:
            raise ShapeError(f".T is of a matrix, found {self.ndim} modes: take .mT, or permute(…)")
        return self.transpose(0, 1)

    @property
    def mT(self) -> Self:
        """The tensor with its last two modes exchanged."""
        return self.transpose(-2, -1)

    def t(self) -> Self:
        """Transpose a matrix."""
        return self.T

    def transpose(self, dim0: int, dim1: int) -> Self:
        """Exchange two modes.

        Examples:
            >>> stc.zeros(2, 3, 4).transpose(0, 2).shape
            (4, 3, 2)
        """
        first, second = (mode_of(self.ndim, d) for d in (dim0, dim1))
        modes = list(range(self.ndim))
        modes[first], modes[second] = second, first
        return self.permute(modes)

    def movedim(self, source: Any, destination: Any) -> Self:
        """Move modes to other places; the others keep their order.

        Examples:
            >>> stc.zeros(2, 3, 4).movedim(0, -1).shape
            (3, 4, 2)
        """
        sources, targets = ([s] if isinstance(s, int) else list(s) for s in (source, destination))
        moved = {mode_of(self.ndim, p): mode_of(self.ndim, s) for s, p in zip(sources, targets, strict=True)}
        others = iter(outside(range(self.ndim), {*moved.values()}))
        return self.permute([moved[p] if p in moved else next(others) for p in range(self.ndim)])

    # -- shapes ---------------------------------------------------------------------------------------------------

    def reshape(self, *shape: Any) -> Self:
        """Return the same elements in row-major order, in another shape.

        Sparse modes are joined and split among themselves, and dense modes among themselves. If a new mode would join
        both kinds, the dense modes become sparse first.

        Args:
            shape: sizes, as numbers or as one tuple; one may be -1.

        Raises:
            ShapeError: another number of elements, or a size past 2**63 - 1.

        Examples:
            >>> stc.eye(2).reshape(4).to_dense()
            tensor([1., 0., 0., 1.])
        """
        x, sizes = without_blocks(self), flat(shape)
        count, others = prod(x.shape), prod(n for n in sizes if n != -1)
        wanted = [count // others if n == -1 and others else n for n in sizes]
        if sizes.count(-1) > 1 or not wanted or prod(wanted) != count:
            raise ShapeError(f"a tensor of shape {x.shape} cannot take the shape {tuple(sizes)}")
        wanted = list(crd.checked_shape(wanted))
        if x.dense_order:
            rows = prod(x._pattern.shape)
            cut = next((n for n in range(1, len(wanted) + 1) if prod(wanted[:n]) == rows), 0)
            if not cut or not rows:
                return x.expand_dense().reshape(wanted)
            values = x._values.reshape(x.nnz, *wanted[cut:])
            return x._make(reshaped(x._pattern, tuple(wanted[:cut])), values)
        return x._make(reshaped(x._pattern, tuple(wanted)), x._values)

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Join the modes from ``start_dim`` to ``end_dim`` to one.

        Examples:
            >>> stc.zeros(2, 3, 4).flatten(1).shape
            (2, 12)
        """
        first = mode_of(self.ndim, start_dim)
        last = mode_of(self.ndim, end_dim)
        shape = self.shape
        if first > last:
            raise ShapeError(f"flatten joins modes from one to a later one, found {start_dim} to {end_dim}")
        return self.reshape(*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :])

    def matricize(self, mode: int) -> Self:
        """Unfold the tensor to a matrix: rows are indices of ``mode``, columns the other modes in row-major order.

        Examples:
            >>> stc.zeros(2, 3, 4).matricize(1).shape
            (3, 8)
        """
        mode, x = mode_of(self.ndim, mode), self.expand_dense()
        others = [m for m in range(self.ndim) if m != mode]
        return x.permute(mode, *others).reshape(x.shape[mode], volume(x.shape, others))

    def unsqueeze(self, dim: int) -> Self:
        """Insert a mode of size 1 before mode ``dim``.

        Examples:
            >>> stc.eye(2).unsqueeze(0).shape
            (1, 2, 2)
        """
        at = mode_of(self.ndim + 1, dim)
        return self[tuple([slice(None)] * at + [None])]

    def squeeze(self, dim: int | Sequence[int] | None = None) -> Any:
        """Remove modes of size 1: all, or those of ``dim`` that have this size.

        Examples:
            >>> stc.zeros(1, 2, 1).squeeze(0).shape
            (2, 1)
        """
        shape = self.shape
        modes = list(range(self.ndim))
        if dim is not None:
            modes = [mode_of(self.ndim, d) for d in ([dim] if isinstance(dim, int) else dim)]
        return self[tuple(0 if m in modes and shape[m] == 1 else slice(None) for m in range(self.ndim))]

    def expand(self, *sizes: Any) -> Self:
        """Repeat modes of size 1, and new modes in front, to these sizes; -1 keeps a size.

        Raises:
            ShapeError: the shape cannot be broadcast to these sizes.
            OutOfMemoryError: the entries would pass the memory limit.

        Examples:
            >>> stc.full((1, 2), 1.0).expand(3, -1).nnz
            6
        """
        x, wanted = untyped(self), flat(sizes)
        shape = [1] * (len(wanted) - x.ndim) + list(x.shape)
        if len(shape) != len(wanted) or any(new not in (-1, n) for n, new in zip(shape, wanted, strict=True) if n != 1):
            raise ShapeError(f"a tensor of shape {x.shape} cannot be expanded to {tuple(wanted)}")
        times = prod(new for n, new in zip(shape, wanted, strict=True) if n == 1 and new != -1)
        nbytes = times * x._values.numel() * (32 + 8 * len(wanted) + x.dtype.itemsize)
        check_memory(f"the entries of shape {x.shape} at all positions of {tuple(wanted)}", nbytes, x.device)
        x = x.reshape(shape) if len(shape) > x.ndim else x
        for mode, (size, new) in enumerate(zip(shape, wanted, strict=True)):
            if new not in (-1, size):
                x = x.index_select(mode, torch.zeros(new, dtype=torch.int64, device=x.device))
        return x


@once
def reshaped(pattern: Pattern, shape: Ints) -> Pattern:
    """Return the pattern in another shape with as many positions, in the same order; made once.

    Modes are joined only until they end where new ones do, so that no number passes what the sizes make necessary.
    """
    if not pattern.nnz:
        return Pattern(pattern.coords.new_empty(len(shape), 0), shape, True)
    old, rows = zip(pattern.coords, pattern.shape, strict=True), list[Tensor]()
    key, size = torch.zeros_like(pattern.coords[0]), 1  # what is left of the modes that were joined
    for new in shape:
        while size % new:
            row, n = next(old)
            key, size = key * n + row, size * n
            if size > crd.INT64_SIZES:
                raise ShapeError(f"sizes of {pattern.shape} and {shape} meet past 2**63 only")
        size //= new
        rows.append(key // size)
        key = key % size
    return Pattern(torch.stack(rows), shape, True)
