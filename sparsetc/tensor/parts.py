"""Parts of sparse tensors: indices, slices, parts of a mode, shifts, diagonals and triangles.

In: a SparseTensor. Out: one with fewer entries, or with entries at other places, differentiable; which entries are
taken, and where they lie, is found once for a pattern where it does not depend on an index tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from sparsetc.errors import CoordinateError, DtypeError, ShapeError
from sparsetc.tensor import convert
from sparsetc.tensor.attributes import IN_PLACE, Attributes, Sparse, untyped
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.coords import mode_of, offset_of, picked
from sparsetc.tensor.elementwise import where_holds
from sparsetc.tensor.indexing import Taken, indexed, sorted_pattern
from sparsetc.tensor.pattern import Pattern


class Parts(Attributes):
    """Indexing and splitting the modes of a `SparseTensor`.

    Tensors in blocks are taken nonzero by nonzero. Duplicates are summed first.
    """

    __slots__ = ()
    permute = convert.permute
    expand_dense = convert.expand_dense

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
            return sorted_pattern(rows, (*(x.shape[m] for m in others), size), on)

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
            return x._pattern.like(c[:, kept], True), kept

        return _with_entries(x, *x._pattern._once(("triangle", diagonal, compare.__name__), made))


def flat(shape: Sequence[Any]) -> list[Any]:
    return list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)


def _with_entries(x: Sparse, pattern: Pattern, entries: Tensor | None) -> Sparse:
    """The tensor of a pattern with the values of entries of x."""
    return x._make(pattern, picked(x._values, entries))
