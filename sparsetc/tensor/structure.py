"""Modes of sparse tensors: their order, the shape, and parts of it: indices, slices, shifts, diagonals and triangles.

In: a SparseTensor. Out: one with the same elements in other modes, or some of them, differentiable. Which entries are
taken, and where they lie then, is found once for a pattern where it does not depend on an index tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from sparsetc.errors import CoordinateError, DtypeError, ShapeError
from sparsetc.support import Ints, outside, volume
from sparsetc.support.checks import check_memory
from sparsetc.tensor import convert
from sparsetc.tensor import coords as crd
from sparsetc.tensor.attributes import IN_PLACE, Attributes, Sparse, untyped
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.coords import flat, integer, mode_of, offset_of, picked
from sparsetc.tensor.elementwise import where_holds
from sparsetc.tensor.indexing import Taken, indexed, sorted_pattern
from sparsetc.tensor.pattern import Pattern, once


class Structure(Attributes):
    """Permuting, joining, splitting, repeating and indexing the modes of a `SparseTensor`.

    Tensors in blocks are taken nonzero by nonzero, except where modes only change places. Duplicates are summed first.
    """

    __slots__ = ()
    permute = convert.permute
    expand_dense = convert.expand_dense

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
        sources, targets = flat((source,)), flat((destination,))
        if len(sources) != len(targets):
            raise ShapeError(f"movedim takes a place for each mode, found {sources} and {targets}")
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
        x, sizes = without_blocks(self), [integer(size, "a size") for size in flat(shape)]
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
        x: Any = without_blocks(self)
        at, order = mode_of(x.ndim + 1, dim), x.sparse_order
        if at >= order:
            return x._make(x._pattern, x._values.unsqueeze(at - order + 1))  # type: ignore[no-any-return]
        sizes = x._pattern.shape
        return x._make(reshaped(x._pattern, (*sizes[:at], 1, *sizes[at:])), x._values)  # type: ignore[no-any-return]

    def squeeze(self, dim: int | Sequence[int] | None = None) -> Any:
        """Remove modes of size 1: all, or those of ``dim`` that have this size.

        Examples:
            >>> stc.zeros(1, 2, 1).squeeze(0).shape
            (2, 1)
        """
        shape = self.shape
        modes = list(range(self.ndim))
        if dim is not None:
            modes = [mode_of(self.ndim, d) for d in flat((dim,))]
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

    # -- parts ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

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
        if isinstance(key, Attributes):
            return where_holds(self, untyped(key).expand_dense().drop(), True)
        return indexed(without_blocks(self), list(key) if isinstance(key, tuple) else [key])

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
        mode, size = mode_of(self.ndim, dim), self.shape[dim]
        start, length = integer(start, "narrow: the start"), integer(length, "narrow: the length")
        first = start + size if start < 0 else start
        if not 0 <= first <= first + length <= size:
            raise CoordinateError(f"narrow: {length} positions from {start} on are not in mode {mode} of size {size}")
        return self.index_select(mode, slice(first, first + length))  # type: ignore[arg-type]

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
        size = self.size(dim)
        lengths = [integer(length, "the length of a part") for length in flat((split_size_or_sections,))]
        if not hasattr(split_size_or_sections, "__iter__"):
            (length,) = lengths
            if length < 1:
                raise ShapeError(f"parts of a mode of size {size} must be 1 or longer, found {length}")
            lengths = [min(length, size - n) for n in range(0, max(size, 1), length)]
        if sum(lengths) != size:
            raise ShapeError(f"parts of {[*lengths]} are not those of a mode of size {size}")
        return tuple(self.narrow(dim, sum(lengths[:n]), length) for n, length in enumerate(lengths))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        """Split a mode into ``chunks`` parts, or fewer.

        Examples:
            >>> [part.shape for part in stc.eye(4).chunk(2)]
            [(2, 4), (2, 4)]
        """
        if integer(chunks, "a number of parts") < 1:
            raise ShapeError(f"a mode is split into 1 part or more, found {chunks}")
        size = self.size(dim)
        return self.split(-(-size // chunks) if size else [0] * chunks, dim)

    def flip(self, *dims: Any) -> Self:
        """Reverse the order of positions in modes.

        Examples:
            >>> stc.eye(2).flip(0).to_dense()
            tensor([[0., 1.],
                    [1., 0.]])
        """
        modes = [mode_of(self.ndim, d) for d in flat(dims)]
        return self[tuple(slice(None, None, -1 if m in modes else 1) for m in range(self.ndim))]

    def roll(self, shifts: Any, dims: Any = None) -> Self:
        """Shift positions of modes, from the end to the beginning; without modes, of all elements row-major.

        Examples:
            >>> stc.SparseTensor([[0]], [1.0], (3,)).roll(1).to_dense()
            tensor([0., 1., 0.])
        """
        if dims is None:
            return untyped(self).reshape(-1).roll(shifts, 0).reshape(self.size())
        x = without_blocks(self)
        shifts, dims = [integer(shift, "a shift") for shift in flat((shifts,))], flat((dims,))
        if len(shifts) != len(dims):
            raise ShapeError(f"roll takes a shift for each mode, found {shifts} and {dims}")
        for shift, dim in zip(shifts, dims, strict=True):
            mode = mode_of(x.ndim, dim)
            size = x.shape[mode]
            shift %= max(1, size)
            if mode >= x.sparse_order:
                x = x._make(x._pattern, x._values.roll(shift, mode - x.sparse_order + 1))
                continue
            coords = x._pattern.coords.clone()
            coords[mode] -= size - shift  # and not plus the shift, which may pass int64
            coords[mode] += (coords[mode] < 0) * size
            pattern, order = sorted_pattern(coords, x._pattern.shape)
            of_modes = enumerate(x._pattern.labels.items())
            pattern.labels = {
                name: np.roll(of, shift) if n == mode and of is not None else of for n, (name, of) in of_modes
            }
            x = x._make(pattern, picked(x._values, order))
        return x

    def trace(self) -> Tensor:
        """Sum the diagonal of a matrix.

        Examples:
            >>> stc.eye(3).trace()
            tensor(3.)
        """
        if self.ndim != 2:
            raise ShapeError(f"a trace is of a matrix, found {self.ndim} modes")
        return self.diagonal().sum()

    def diag(self, diagonal: int = 0) -> Self:
        """Return the diagonal of a matrix, or the matrix with a vector on its diagonal.

        Examples:
            >>> stc.eye(2).diag().to_dense()
            tensor([1., 1.])
        """
        if self.ndim == 2:
            return self.diagonal(diagonal)
        x = self.expand_dense().coalesce()
        if x.ndim != 1:
            raise ShapeError(f"diag is of a vector or a matrix, found {x.ndim} modes")
        offset = offset_of(diagonal)
        coords = torch.stack((x._pattern.coords[0] + max(0, -offset), x._pattern.coords[0] + max(0, offset)))
        size = x.shape[0] + abs(offset)
        return x._make(Pattern(coords, (size, size), True), x._values)

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
        x = self.expand_dense().coalesce()
        first, second = (mode_of(x.ndim, d) for d in (dim1, dim2))
        if first == second:
            raise ShapeError(f"diagonal takes two modes, found {dim1} and {dim2}")
        offset = offset_of(offset)
        up, down = max(0, offset), max(0, -offset)
        size = max(0, min(x.shape[first] - down, x.shape[second] - up))
        others = [m for m in range(x.ndim) if m not in (first, second)]

        def made() -> Taken:
            c = x._pattern.coords
            on = (c[second] - c[first] == offset).nonzero()[:, 0]
            rows = torch.cat((c[others][:, on], c[first][on].unsqueeze(0) - down))
            pattern, order = sorted_pattern(rows, (*(x.shape[m] for m in others), size))
            return pattern, picked(on, order)

        return _with_entries(x, *x._pattern._once(("diagonal", offset, first, second), made))

    def tril(self, diagonal: int = 0) -> Self:
        """Return the entries of the last two modes on and below a diagonal; others are dropped.

        Examples:
            >>> stc.full((2, 2), 1.0).tril().nnz
            3
        """
        return self._triangle(diagonal, operator.le)

    def triu(self, diagonal: int = 0) -> Self:
        """Return the entries of the last two modes on and above a diagonal; others are dropped.

        Examples:
            >>> stc.full((2, 2), 1.0).triu(1).nnz
            1
        """
        return self._triangle(diagonal, operator.ge)

    def _triangle(self, diagonal: int, compare: Callable[[Any, Any], Tensor]) -> Self:
        x = self.expand_dense().coalesce()
        if x.ndim < 2:
            raise ShapeError("a triangle is of two modes, found one")
        diagonal = offset_of(diagonal)

        def made() -> Taken:
            c = x._pattern.coords
            kept = compare(c[-1] - c[-2], diagonal).nonzero()[:, 0]
            return x._pattern.like(c[:, kept]), kept

        return _with_entries(x, *x._pattern._once(("triangle", diagonal, compare.__name__), made))


def _with_entries(x: Sparse, pattern: Pattern, entries: Tensor | None) -> Sparse:
    """The tensor of a pattern with the values of entries of x."""
    return x._make(pattern, picked(x._values, entries))


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
        rows.append(key if size == 1 else key // size)
        key = torch.zeros_like(key) if size == 1 else key % size
    return Pattern(torch.stack(rows), shape, True)
