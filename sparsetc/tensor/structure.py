"""Modes of sparse tensors: indexing, shapes, orders and parts, and torch's names for what a tensor is.

In: a SparseTensor. Out: one with other modes or fewer entries, differentiable; which entries are taken, and where they
lie, is found once for a pattern where it does not depend on an index tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import CoordinateError, DtypeError, ShapeError
from sparsetc.support import memory, outside, volume
from sparsetc.tensor import coords as crd
from sparsetc.tensor.arithmetic import IN_PLACE, where_holds
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.coords import mode_of
from sparsetc.tensor.indexing import Taken, indexed, sorted_pattern
from sparsetc.tensor.pattern import Pattern

if TYPE_CHECKING:
    from typing_extensions import Self

    from sparsetc.tensor.sparse_tensor import SparseTensor


def _converted(dtype: torch.dtype) -> Callable[[Any], SparseTensor]:
    """The method that converts values."""

    def converted(x: Any) -> SparseTensor:
        return x.to(dtype)  # type: ignore[no-any-return]

    converted.__doc__ = f"Return the tensor with values cast to {str(dtype).removeprefix('torch.')}."
    return converted


def _of_values(name: str) -> property:
    """The attribute or method of values, by its name."""
    return property(lambda x: getattr(x._values, name), doc=f"``values.{name}``.")


class Typed:
    """torch's names for conversions, in a class of their own: annotations elsewhere mean Python's types by them."""

    __slots__ = ()
    float, double, half = map(_converted, (torch.float32, torch.float64, torch.float16))
    bfloat16, int, long, bool = map(_converted, (torch.bfloat16, torch.int32, torch.int64, torch.bool))

    def type(self, dtype: Any = None) -> Any:
        """Convert values to a dtype. Without one, return torch's old name of the values' type."""
        x: Any = self
        return x._values.type() if dtype is None else x.to(dtype)


class Structure:
    """Indexing, permuting, joining and splitting the modes of a `SparseTensor`.

    Tensors in blocks are taken nonzero by nonzero, except where modes only change places. Duplicates are summed first.
    """

    __slots__ = ()
    is_sparse = True

    if TYPE_CHECKING:
        _pattern: Pattern
        _values: Tensor

        @classmethod
        def _make(cls, pattern: Pattern, values: Tensor) -> SparseTensor: ...
        def coalesce(self) -> SparseTensor: ...
        def permute(self, *modes: Any) -> SparseTensor: ...

    # -- torch's names --------------------------------------------------------------------------------------------

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of mode ``dim``."""
        shape = torch.Size(_untyped(self).shape)
        return shape if dim is None else shape[mode_of(len(shape), dim)]

    @property
    def ndim(self) -> int:
        """The number of modes, as `order`."""
        return len(_untyped(self).shape)

    def dim(self) -> int:
        """The number of modes, as `order`."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of positions, most of which hold no entry."""
        return prod(_untyped(self).shape)

    def __len__(self) -> int:
        return int(_untyped(self).shape[0])

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

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
        return _untyped(self).expand_dense().drop().coords.T  # type: ignore[no-any-return]

    def item(self) -> Any:
        """Return the element of a tensor with one position as a Python number.

        Raises:
            ShapeError: the tensor has another number of positions.
        """
        if self.numel() != 1:
            raise ShapeError(f"item() is of a tensor of one position, found one of {self.numel():,}")
        return _untyped(self).to_dense().item()

    def clone(self) -> SparseTensor:
        """Return a tensor with a copy of the values; the pattern is shared, since it is never written to."""
        return self._make(self._pattern, self._values.clone())

    def detach(self) -> SparseTensor:
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
    def grad(self) -> SparseTensor | None:
        """The gradient of the values, on the same pattern; None before there is one."""
        gradient = self._values.grad
        return None if gradient is None else self._make(self._pattern, gradient)

    def copy_(self, other: SparseTensor, non_blocking: bool = False) -> Self:
        """Copy the entries of another tensor of this shape into this one, as `Module.load_state_dict` does.

        Dtype and device stay. If both have the same coordinates, the values are written in place; no other method works
        in place.

        Raises:
            ShapeError: `other` has another shape.
            DtypeError: `other` is not sparse.
        """
        if not isinstance(other, Structure):
            raise DtypeError(f"copy_ takes a SparseTensor, found {type(other).__name__}")
        x, other = _untyped(self), _untyped(other)
        if other.shape != x.shape:
            raise ShapeError(f"copy_ takes a tensor of shape {x.shape}, found {other.shape}")
        other = other.to(x._values, non_blocking=non_blocking)
        old, new = self._pattern, other._pattern
        named = new.labels is not old.labels and (new.labels or old.labels)
        alike = new is old or (not named and new._blocks == old._blocks and torch.equal(new.coords, old.coords))
        if alike and other._values.shape == self._values.shape:
            self._values.copy_(other._values)
        else:
            x._set(new, other._values.clone())
        return self

    def share_memory_(self) -> Self:
        """Move coordinates and values to memory shared by processes. Return the tensor itself."""
        for tensor in (self._pattern.coords, self._values):
            tensor.share_memory_()
        return self

    def pin_memory(self) -> SparseTensor:
        """Return the tensor with coordinates and values in pinned memory, from which a GPU copies directly."""
        pattern = self._pattern.like(self._pattern.coords.pin_memory(), self._pattern._coalesced)
        return self._make(pattern, self._values.pin_memory())

    # -- orders of modes ------------------------------------------------------------------------------------------

    @property
    def T(self) -> SparseTensor:
        """The transpose of a matrix.

        Raises:
            ShapeError: the order is not 2; use `mT` or `permute`.
        """
        if self.ndim != 2:
            raise ShapeError(f".T is of a matrix, found {self.ndim} modes: take .mT, or permute(…)")
        return self.transpose(0, 1)

    @property
    def mT(self) -> SparseTensor:
        """The tensor with its last two modes exchanged."""
        return self.transpose(-2, -1)

    def t(self) -> SparseTensor:
        """Transpose a matrix."""
        return self.T

    def transpose(self, dim0: int, dim1: int) -> SparseTensor:
        """Exchange two modes.

        Examples:
            >>> stc.zeros(2, 3, 4).transpose(0, 2).shape
            (4, 3, 2)
        """
        first, second = (mode_of(self.ndim, d) for d in (dim0, dim1))
        modes = list(range(self.ndim))
        modes[first], modes[second] = second, first
        return self.permute(modes)

    def movedim(self, source: Any, destination: Any) -> SparseTensor:
        """Move modes to other places; the others keep their order.

        Examples:
            >>> stc.zeros(2, 3, 4).movedim(0, -1).shape
            (3, 4, 2)
        """
        sources, places = ([s] if isinstance(s, int) else list(s) for s in (source, destination))
        moved = {mode_of(self.ndim, p): mode_of(self.ndim, s) for s, p in zip(sources, places, strict=True)}
        others = iter(outside(range(self.ndim), {*moved.values()}))
        return self.permute([moved[p] if p in moved else next(others) for p in range(self.ndim)])

    # -- shapes ---------------------------------------------------------------------------------------------------

    def reshape(self, *shape: Any) -> SparseTensor:
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
        x, sizes = without_blocks(_untyped(self)), _flat(shape)
        count, known = prod(x.shape), prod(n for n in sizes if n != -1)
        wanted = [count // known if n == -1 and known else n for n in sizes]
        if sizes.count(-1) > 1 or not wanted or prod(wanted) != count:
            raise ShapeError(f"a tensor of shape {x.shape} cannot take the shape {tuple(sizes)}")
        wanted = list(crd.checked_shape(wanted))
        if x.dense_order:
            rows = prod(x._pattern.shape)
            cut = next((n for n in range(1, len(wanted) + 1) if prod(wanted[:n]) == rows), 0)
            if not cut or not rows:
                return x.expand_dense().reshape(wanted)  # type: ignore[no-any-return]
            values = x._values.reshape(x.nnz, *wanted[cut:])
            return x._make(_reshaped(x._pattern, tuple(wanted[:cut])), values)  # type: ignore[no-any-return]
        return x._make(_reshaped(x._pattern, tuple(wanted)), x._values)  # type: ignore[no-any-return]

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> SparseTensor:
        """Join the modes from ``start_dim`` to ``end_dim`` to one.

        Examples:
            >>> stc.zeros(2, 3, 4).flatten(1).shape
            (2, 12)
        """
        first = mode_of(self.ndim, start_dim)
        last = mode_of(self.ndim, end_dim)
        shape = _untyped(self).shape
        if first > last:
            raise ShapeError(f"flatten joins modes from one to a later one, found {start_dim} to {end_dim}")
        return self.reshape(*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :])

    def matricize(self, mode: int) -> SparseTensor:
        """Unfold the tensor to a matrix: rows are indices of ``mode``, columns the other modes in row-major order.

        Examples:
            >>> stc.zeros(2, 3, 4).matricize(1).shape
            (3, 8)
        """
        mode, x = mode_of(self.ndim, mode), _untyped(self).expand_dense()
        others = [m for m in range(self.ndim) if m != mode]
        return x.permute(mode, *others).reshape(x.shape[mode], volume(x.shape, others))  # type: ignore[no-any-return]

    def unsqueeze(self, dim: int) -> SparseTensor:
        """Insert a mode of size 1 before mode ``dim``.

        Examples:
            >>> stc.eye(2).unsqueeze(0).shape
            (1, 2, 2)
        """
        at = mode_of(self.ndim + 1, dim)
        return self[tuple([slice(None)] * at + [None])]  # type: ignore[no-any-return]

    def squeeze(self, dim: int | Sequence[int] | None = None) -> Any:
        """Remove modes of size 1: all, or those of ``dim`` that have this size.

        Examples:
            >>> stc.zeros(1, 2, 1).squeeze(0).shape
            (2, 1)
        """
        shape = _untyped(self).shape
        modes = list(range(self.ndim))
        if dim is not None:
            modes = [mode_of(self.ndim, d) for d in ([dim] if isinstance(dim, int) else dim)]
        return self[tuple(0 if m in modes and shape[m] == 1 else slice(None) for m in range(self.ndim))]

    def expand(self, *sizes: Any) -> SparseTensor:
        """Repeat modes of size 1, and new modes in front, to these sizes; -1 keeps a size.

        Raises:
            ShapeError: the shape cannot be broadcast to these sizes.
            OutOfMemoryError: the entries would pass the memory limit.

        Examples:
            >>> stc.full((1, 2), 1.0).expand(3, -1).nnz
            6
        """
        x, wanted = _untyped(self), _flat(sizes)
        shape = [1] * (len(wanted) - x.ndim) + list(x.shape)
        if len(shape) != len(wanted) or any(new not in (-1, n) for n, new in zip(shape, wanted, strict=True) if n != 1):
            raise ShapeError(f"a tensor of shape {x.shape} cannot be expanded to {tuple(wanted)}")
        times = prod(new for n, new in zip(shape, wanted, strict=True) if n == 1 and new != -1)
        nbytes = times * x._values.numel() * (32 + 8 * len(wanted) + x.dtype.itemsize)
        memory.check(f"the entries of shape {x.shape} at all positions of {tuple(wanted)}", nbytes, x.device)
        x = x.reshape(shape) if len(shape) > x.ndim else x
        for mode, (size, new) in enumerate(zip(shape, wanted, strict=True)):
            if new not in (-1, size):
                x = x.index_select(mode, torch.zeros(new, dtype=torch.int64, device=x.device))
        return x  # type: ignore[no-any-return]

    # -- parts ----------------------------------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise DtypeError(IN_PLACE.format("x[…] = …"))

    def __getitem__(self, key: Any) -> Any:
        """Return elements, indexed as in torch and numpy: ints, slices, ``...``, None, index tensors, masks and labels.

        Args:
            key: an index of the first mode, or a tuple with one for each mode. Index tensors must have equal lengths;
                they pick positions together and become one mode, which stands where they do if they are neighbours,
                else first. A mask has the length of its mode. A SparseTensor of this shape, as the only index, picks
                the entries at its nonzeros, as `where` does. Texts are labels: ``x["ann"]``, ``x[:, ["tea", "milk"]]``.

        Returns:
            A SparseTensor if a mode with coordinates is left, else a dense tensor or one element. Index tensors for all
            modes give the named elements as a dense tensor of one mode.

        Raises:
            CoordinateError: an index is past the end of its mode, or the mode has no such label.
            ShapeError: a mask has another length, there are more indices than modes, or an index has no valid type.
        """
        if isinstance(key, Structure):
            return where_holds(self, _untyped(key).expand_dense().drop(), True)
        return indexed(without_blocks(_untyped(self)), list(key) if isinstance(key, tuple) else [key])

    def index_select(self, dim: int, index: Tensor) -> Any:
        """Select positions of a mode by an index tensor, in its order, with repeats.

        Examples:
            >>> stc.eye(3).index_select(0, torch.tensor([2, 2])).to_dense()
            tensor([[0., 0., 1.],
                    [0., 0., 1.]])
        """
        return self[tuple([slice(None)] * mode_of(self.ndim, dim) + [index])]

    def narrow(self, dim: int, start: int, length: int) -> Any:
        """Select ``length`` positions of mode ``dim`` from ``start`` on.

        Examples:
            >>> stc.eye(3).narrow(0, 1, 2).shape
            (2, 3)
        """
        mode, size = mode_of(self.ndim, dim), _untyped(self).shape[dim]
        first = start + size if start < 0 else start
        if not 0 <= first <= first + length <= size:
            raise CoordinateError(f"narrow: {length} positions from {start} on are not in mode {mode} of size {size}")
        return self[tuple([slice(None)] * mode + [slice(first, first + length)])]

    def select(self, dim: int, index: int) -> Any:
        """Select one position of a mode, and remove the mode.

        Examples:
            >>> stc.eye(3).select(0, 1).to_dense()
            tensor([0., 1., 0.])
        """
        return self.index_select(dim, index)  # type: ignore[arg-type]

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return a tuple of the tensors at each position of a mode.

        Examples:
            >>> len(stc.eye(3).unbind())
            3
        """
        return tuple(self.select(dim, n) for n in range(self.size(dim)))

    def split(self, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Any, ...]:
        """Split a mode into parts of one length (the last may be shorter), or of the lengths given.

        Examples:
            >>> [part.shape for part in stc.eye(3).split(2)]
            [(2, 3), (1, 3)]
        """
        size, lengths = self.size(dim), split_size_or_sections
        if isinstance(lengths, int):
            if lengths < 1:
                raise ShapeError(f"parts of a mode of size {size} must be 1 or longer, found {lengths}")
            lengths = [min(lengths, size - n) for n in range(0, max(size, 1), lengths)]
        if sum(lengths) != size:
            raise ShapeError(f"parts of {[*lengths]} are not those of a mode of size {size}")
        return tuple(self.narrow(dim, sum(lengths[:n]), length) for n, length in enumerate(lengths))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        """Split a mode into ``chunks`` parts, or fewer.

        Examples:
            >>> [part.shape for part in stc.eye(4).chunk(2)]
            [(2, 4), (2, 4)]
        """
        if chunks < 1:
            raise ShapeError(f"a mode is split into 1 part or more, found {chunks}")
        size = self.size(dim)
        return self.split(-(-size // chunks) if size else [0] * chunks, dim)

    def flip(self, *dims: Any) -> SparseTensor:
        """Reverse the order of positions in modes.

        Examples:
            >>> stc.eye(2).flip(0).to_dense()
            tensor([[0., 1.],
                    [1., 0.]])
        """
        modes = [mode_of(self.ndim, d) for d in _flat(dims)]
        return self[tuple(slice(None, None, -1 if m in modes else 1) for m in range(self.ndim))]  # type: ignore[no-any-return]

    def roll(self, shifts: Any, dims: Any = None) -> SparseTensor:
        """Shift positions of modes, from the end to the beginning; without modes, of all elements row-major.

        Examples:
            >>> stc.SparseTensor([[0]], [1.0], (3,)).roll(1).to_dense()
            tensor([0., 1., 0.])
        """
        if dims is None:
            return self.reshape(-1).roll(shifts, 0).reshape(self.size())
        x = without_blocks(_untyped(self))
        shifts, dims = ([one] if isinstance(one, int) else list(one) for one in (shifts, dims))
        if len(shifts) != len(dims):
            raise ShapeError(f"roll takes a shift for each mode, found {shifts} and {dims}")
        for shift, dim in zip(shifts, dims, strict=True):
            mode = mode_of(x.ndim, dim)
            size = x.shape[mode]
            shift %= max(1, size)
            if mode >= x.sparse_order:
                x = x._make(x._pattern, x._values.roll(shift, mode - x.sparse_order + 1))
                continue
            x = x.coalesce()
            coords = x._pattern.coords.clone()
            coords[mode] -= size - shift  # and not plus the shift, which may pass int64
            coords[mode] += (coords[mode] < 0) * size
            pattern, order = sorted_pattern(coords, x._pattern.shape, None)
            of_modes = enumerate(x._pattern.labels.items())
            pattern.labels = {
                name: np.roll(of, shift) if n == mode and of is not None else of for n, (name, of) in of_modes
            }
            x = x._make(pattern, crd.picked(x._values, order))
        return x  # type: ignore[no-any-return]

    def trace(self) -> Tensor:
        """Sum the diagonal of a matrix.

        Examples:
            >>> stc.eye(3).trace()
            tensor(3.)
        """
        if self.ndim != 2:
            raise ShapeError(f"a trace is of a matrix, found {self.ndim} modes")
        return self.diagonal().sum()  # type: ignore[no-any-return]

    def diag(self, diagonal: int = 0) -> SparseTensor:
        """Return the diagonal of a matrix, or the matrix with a vector on its diagonal.

        Examples:
            >>> stc.eye(2).diag().to_dense()
            tensor([1., 1.])
        """
        if self.ndim == 2:
            return self.diagonal(diagonal)  # type: ignore[no-any-return]
        x = _untyped(self).expand_dense().coalesce()
        if x.ndim != 1:
            raise ShapeError(f"diag is of a vector or a matrix, found {x.ndim} modes")
        offset = crd.offset_of(diagonal)
        coords = torch.stack((x._pattern.coords[0] + max(0, -offset), x._pattern.coords[0] + max(0, offset)))
        size = x.shape[0] + abs(offset)
        return x._make(Pattern(coords, (size, size), True), x._values)  # type: ignore[no-any-return]

    def diagonal(self, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
        """Return the elements whose indices in two modes differ by ``offset``.

        Args:
            offset: index in ``dim2`` less index in ``dim1``.
            dim1: a mode.
            dim2: another mode.

        Returns:
            A SparseTensor without the two modes, with the diagonal as its last mode.

        Examples:
            >>> stc.full((2, 3), 1.0).diagonal(1).shape
            (2,)
        """
        x = _untyped(self).expand_dense().coalesce()
        first, second = (mode_of(x.ndim, d) for d in (dim1, dim2))
        if first == second:
            raise ShapeError(f"diagonal takes two modes, found {dim1} and {dim2}")
        offset = crd.offset_of(offset)
        up, down = max(0, offset), max(0, -offset)
        size = max(0, min(x.shape[first] - down, x.shape[second] - up))
        others = [m for m in range(x.ndim) if m not in (first, second)]

        def made() -> Taken:
            c = x._pattern.coords
            on = (c[second] - c[first] == offset).nonzero()[:, 0]
            rows = torch.cat((c[others][:, on], c[first][on].unsqueeze(0) - down))
            return sorted_pattern(rows, (*(x.shape[m] for m in others), size), on)

        return _with_entries(x, *x._pattern._once(("diagonal", offset, first, second), made))

    def tril(self, diagonal: int = 0) -> SparseTensor:
        """Return the entries of the last two modes on and below a diagonal; others are dropped.

        Examples:
            >>> stc.full((2, 2), 1.0).tril().nnz
            3
        """
        return self._triangle(diagonal, operator.le)

    def triu(self, diagonal: int = 0) -> SparseTensor:
        """Return the entries of the last two modes on and above a diagonal; others are dropped.

        Examples:
            >>> stc.full((2, 2), 1.0).triu(1).nnz
            1
        """
        return self._triangle(diagonal, operator.ge)

    def _triangle(self, diagonal: int, compare: Callable[[Any, Any], Tensor]) -> SparseTensor:
        x = _untyped(self).expand_dense().coalesce()
        if x.ndim < 2:
            raise ShapeError("a triangle is of two modes, found one")
        diagonal = crd.offset_of(diagonal)

        def made() -> Taken:
            c = x._pattern.coords
            kept = compare(c[-1] - c[-2], diagonal).nonzero()[:, 0]
            return x._pattern.like(c[:, kept], True), kept

        return _with_entries(x, *x._pattern._once(("triangle", diagonal, compare.__name__), made))


def _untyped(x: Any) -> Any:
    """Return the same tensor, untyped: the type checker does not know its other classes here."""
    return x


def _flat(shape: Sequence[Any]) -> list[Any]:
    return list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)


def _with_entries(x: Any, pattern: Pattern, entries: Tensor) -> Any:
    """The tensor of a pattern with the values of entries of x."""
    return x._make(pattern, x._values.index_select(0, entries))


def _reshaped(pattern: Pattern, shape: tuple[int, ...]) -> Pattern:
    """Return the pattern in another shape with as many positions, in the same order.

    Modes are joined only until they end where new ones do, so that no number passes what the sizes make necessary.
    """

    def made() -> Pattern:
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

    return pattern._once(("reshaped", shape), made)
