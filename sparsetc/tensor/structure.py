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

from sparsetc.errors import CoordinateError, DtypeError, ShapeError
from sparsetc.support import memory
from sparsetc.support.compiled import native
from sparsetc.support.entry import entry_point
from sparsetc.tensor import coords as crd
from sparsetc.tensor import loops
from sparsetc.tensor.arithmetic import IN_PLACE, where_holds
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.coords import mode_of
from sparsetc.tensor.pattern import Labels, Pattern

if TYPE_CHECKING:
    from typing_extensions import Self

    from sparsetc.tensor.sparse_tensor import SparseTensor

SEARCHED = 16
"""How many times as many rows as are taken a matrix has for each to be searched for, and not all of them once."""
Taken = tuple[Pattern, torch.Tensor | None]
"""A pattern, and (n,) int64 which entries of another it has, in order; None for all as they are."""


def _converted(dtype: torch.dtype) -> Callable[[Any], SparseTensor]:
    """The method that converts values."""

    def converted(x: Any) -> SparseTensor:
        return x.to(dtype)  # type: ignore[no-any-return]

    converted.__doc__ = f"With values in {str(dtype).removeprefix('torch.')}."
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
        """With values of a dtype, or torch's old name of the values' type."""
        x: Any = self
        return x._values.type() if dtype is None else x.to(dtype)


class Structure:
    """How modes of a `SparseTensor` are taken, ordered, joined and split.

    Tensors in blocks are taken nonzero by nonzero, except where modes only change places. Duplicates are summed first.
    """

    __slots__ = ()
    is_sparse = True

    if TYPE_CHECKING:
        _pattern: Pattern
        _values: torch.Tensor

        @classmethod
        def _make(cls, pattern: Pattern, values: torch.Tensor) -> SparseTensor: ...
        def coalesce(self) -> SparseTensor: ...
        def permute(self, *modes: Any) -> SparseTensor: ...

    # -- torch's names --------------------------------------------------------------------------------------------

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one mode."""
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
        """The number of positions, most of which hold no entry."""
        return prod(_untyped(self).shape)

    def __len__(self) -> int:
        return int(_untyped(self).shape[0])

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

    def indices(self) -> torch.Tensor:
        """Coordinates, (sparse_order, nnz), as torch's sparse tensors have them."""
        return self._pattern.coords

    def nonzero(self) -> torch.Tensor:
        """Coordinates of the values that are not 0, (n, order)."""
        return _untyped(self).expand_dense().drop().coords.T  # type: ignore[no-any-return]

    def item(self) -> Any:
        """The one element of a tensor of one position; ShapeError for others."""
        if self.numel() != 1:
            raise ShapeError(f"item() is of a tensor of one position, found one of {self.numel():,}")
        return _untyped(self).to_dense().item()

    def clone(self) -> SparseTensor:
        """The same with values of its own; the pattern is shared, since nobody writes to it."""
        return self._make(self._pattern, self._values.clone())

    def detach(self) -> SparseTensor:
        """The same, whose values no gradient is followed to."""
        return self._make(self._pattern, self._values.detach())

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Have gradients of the values recorded, which must be a leaf of autograd's graph."""
        self._values.requires_grad_(requires_grad)
        return self

    def contiguous(self) -> Self:
        """The tensor itself."""
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
        """Gradients of the values, on the pattern; None before there are any."""
        found = self._values.grad
        return None if found is None else self._make(self._pattern, found)

    def copy_(self, other: SparseTensor, non_blocking: bool = False) -> Self:
        """Take the entries of another tensor of this shape, as `Module.load_state_dict` does; dtype and device stay.

        Values are written to the memory of these where the coordinates are the same. Nothing else is done in place.

        Raises:
            ShapeError: another shape.
            DtypeError: what is not sparse.
        """
        if not isinstance(other, Structure):
            raise DtypeError(f"copy_ takes a SparseTensor, found {type(other).__name__}")
        x, other = _untyped(self), _untyped(other)
        if other.shape != x.shape:
            raise ShapeError(f"copy_ takes a tensor of shape {x.shape}, found {other.shape}")
        other = other.to(x._values, non_blocking=non_blocking)
        old, new = self._pattern, other._pattern
        alike = new is old or (new._blocks == old._blocks and torch.equal(new.coords, old.coords))
        if alike and other._values.shape == self._values.shape:
            self._values.copy_(other._values)
        else:
            x._set(new, other._values.clone())
        return self

    def share_memory_(self) -> Self:
        """Coordinates and values moved to memory that processes share."""
        for tensor in (self._pattern.coords, self._values):
            tensor.share_memory_()
        return self

    def pin_memory(self) -> SparseTensor:
        """The same with coordinates and values in memory that a GPU copies from directly."""
        pattern = self._pattern.like(self._pattern.coords.pin_memory(), self._pattern._coalesced)
        return self._make(pattern, self._values.pin_memory())

    # -- orders of modes ------------------------------------------------------------------------------------------

    @property
    def T(self) -> SparseTensor:
        """Rows for columns; of any other order than 2, ShapeError, as `mT` and `permute` say what is meant."""
        if self.ndim != 2:
            raise ShapeError(f".T is of a matrix, found {self.ndim} modes: take .mT, or permute(…)")
        return self.transpose(0, 1)

    @property
    def mT(self) -> SparseTensor:
        """The last two modes for one another."""
        return self.transpose(-2, -1)

    def t(self) -> SparseTensor:
        """Rows for columns of a matrix."""
        return self.T

    def transpose(self, dim0: int, dim1: int) -> SparseTensor:
        """Two modes for one another, as `permute` exchanges them."""
        first, second = (mode_of(self.ndim, d) for d in (dim0, dim1))
        modes = list(range(self.ndim))
        modes[first], modes[second] = second, first
        return self.permute(modes)

    def movedim(self, source: Any, destination: Any) -> SparseTensor:
        """Modes taken to other places, the others in their order."""
        sources, places = ([s] if isinstance(s, int) else list(s) for s in (source, destination))
        moved = {mode_of(self.ndim, p): mode_of(self.ndim, s) for s, p in zip(sources, places, strict=True)}
        others = iter([m for m in range(self.ndim) if m not in moved.values()])
        return self.permute([moved[p] if p in moved else next(others) for p in range(self.ndim)])

    # -- shapes ---------------------------------------------------------------------------------------------------

    def reshape(self, *shape: Any) -> SparseTensor:
        """The same elements in row-major order, in another shape; one size may be -1.

        Sparse modes are joined and split among themselves, as are dense ones; where a size would take of both, dense
        modes become sparse.

        Raises:
            ShapeError: another number of elements, or a size past 2**63 - 1.
        """
        x, given = without_blocks(_untyped(self)), _flat(shape)
        count, known = prod(x.shape), prod(n for n in given if n != -1)
        wanted = [count // known if n == -1 and known else n for n in given]
        if given.count(-1) > 1 or not wanted or prod(wanted) != count:
            raise ShapeError(f"a tensor of shape {x.shape} cannot take the shape {tuple(given)}")
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
        """Neighbouring modes joined to one."""
        first, last, shape = mode_of(self.ndim, start_dim), mode_of(self.ndim, end_dim), _untyped(self).shape
        if first > last:
            raise ShapeError(f"flatten joins modes from one to a later one, found {start_dim} to {end_dim}")
        return self.reshape(*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :])

    def matricize(self, mode: int) -> SparseTensor:
        """The matrix with a row an index of a mode, and columns for those of all others, in row-major order."""
        mode, x = mode_of(self.ndim, mode), _untyped(self).expand_dense()
        others = [m for m in range(self.ndim) if m != mode]
        return x.permute(mode, *others).reshape(x.shape[mode], prod(x.shape[m] for m in others))  # type: ignore[no-any-return]

    def unsqueeze(self, dim: int) -> SparseTensor:
        """One more mode, of size 1, before the mode ``dim``."""
        at = mode_of(self.ndim + 1, dim)
        return self[tuple([slice(None)] * at + [None])]  # type: ignore[no-any-return]

    def squeeze(self, dim: int | Sequence[int] | None = None) -> Any:
        """Without modes of size 1: all of them, or those named, of which others stay."""
        shape = _untyped(self).shape
        modes = (
            range(self.ndim)
            if dim is None
            else [mode_of(self.ndim, d) for d in ([dim] if isinstance(dim, int) else dim)]
        )
        return self[tuple(0 if m in modes and shape[m] == 1 else slice(None) for m in range(self.ndim))]

    def expand(self, *sizes: Any) -> SparseTensor:
        """Modes of size 1, and new ones in front, repeated to these sizes; -1 leaves a size as it is.

        Raises:
            ShapeError: sizes that the shape cannot be broadcast to.
            OutOfMemoryError: more entries than the memory limit allows.
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
        """Elements, as torch and numpy index: ints, slices, ``...``, None, and index tensors or masks of modes.

        Args:
            key: of one mode, or a tuple. Several index tensors have one length and pick positions together; these
                become one mode, in their place where they are neighbours, else the first. A mask is of one mode, or a
                SparseTensor of this shape: entries are taken where it has one that is not 0, as `where` does. Texts
                are labels: ``x["ann"]``, ``x[:, ["tea", "milk"]]``.

        Returns:
            A SparseTensor while a mode with coordinates is left; else a dense tensor, or one element. Index tensors for
            all modes give the elements that they name, as a dense tensor of one mode.

        Raises:
            CoordinateError: an index past a mode, or a label that it has not.
            ShapeError: a mask of another length, more indices than modes, or what is no index.
        """
        if isinstance(key, Structure):
            return where_holds(self, _untyped(key).expand_dense().drop(), True)
        return _indexed(without_blocks(_untyped(self)), list(key) if isinstance(key, tuple) else [key])

    def index_select(self, dim: int, index: torch.Tensor) -> Any:
        """The positions of a mode that an index tensor names, in its order, with repeats."""
        return self[tuple([slice(None)] * mode_of(self.ndim, dim) + [index])]

    def narrow(self, dim: int, start: int, length: int) -> Any:
        """So many positions of a mode, from one on."""
        mode, size = mode_of(self.ndim, dim), _untyped(self).shape[dim]
        first = start + size if start < 0 else start
        if not 0 <= first <= first + length <= size:
            raise CoordinateError(f"narrow: {length} positions from {start} on are not in mode {mode} of size {size}")
        return self[tuple([slice(None)] * mode + [slice(first, first + length)])]

    def select(self, dim: int, index: int) -> Any:
        """One position of a mode, which goes."""
        return self[tuple([slice(None)] * mode_of(self.ndim, dim) + [index])]

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """All positions of a mode, each by itself."""
        return tuple(self.select(dim, n) for n in range(self.size(dim)))

    def split(self, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Any, ...]:
        """Parts of a mode, of one length but the last, or of these lengths."""
        size, each = self.size(dim), split_size_or_sections
        lengths = [min(each, size - n) for n in range(0, size, each)] if isinstance(each, int) else list(each)
        if sum(lengths) != size:
            raise ShapeError(f"parts of {lengths} are not those of a mode of size {size}")
        return tuple(self.narrow(dim, sum(lengths[:n]), length) for n, length in enumerate(lengths))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        """So many parts of a mode, or fewer."""
        return self.split(max(1, -(-self.size(dim) // chunks)), dim)

    def flip(self, *dims: Any) -> SparseTensor:
        """Modes in reverse order."""
        modes = [mode_of(self.ndim, d) for d in _flat(dims)]
        return self[tuple(slice(None, None, -1 if m in modes else 1) for m in range(self.ndim))]  # type: ignore[no-any-return]

    def roll(self, shifts: Any, dims: Any = None) -> SparseTensor:
        """Positions of modes moved on, and from the end to the beginning; without modes all elements in one row."""
        if dims is None:
            return self.reshape(-1).roll(shifts, 0).reshape(self.size())
        x: Any = self
        for shift, dim in zip(*([one] if isinstance(one, int) else one for one in (shifts, dims)), strict=True):
            size = x.shape[mode_of(x.ndim, dim)]
            order = (torch.arange(size, device=x.device) - shift) % max(1, size)
            x = x.index_select(dim, order)
        return x  # type: ignore[no-any-return]

    def trace(self) -> torch.Tensor:
        """The sum of the diagonal of a matrix."""
        if self.ndim != 2:
            raise ShapeError(f"a trace is of a matrix, found {self.ndim} modes")
        return self.diagonal().sum()  # type: ignore[no-any-return]

    def diag(self, diagonal: int = 0) -> SparseTensor:
        """The diagonal of a matrix, or the matrix with a vector on its diagonal."""
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
        """The elements whose indices of two modes differ by ``offset``; that becomes the last mode.

        Returns:
            A SparseTensor; of a matrix with one mode.
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
            return _sorted(rows, (*(x.shape[m] for m in others), size), on)

        return _with_entries(x, *x._pattern._once(("diagonal", offset, first, second), made))

    def tril(self, diagonal: int = 0) -> SparseTensor:
        """The entries of the last two modes on and below a diagonal."""
        return self._triangle(diagonal, operator.le)

    def triu(self, diagonal: int = 0) -> SparseTensor:
        """The entries of the last two modes on and above a diagonal."""
        return self._triangle(diagonal, operator.ge)

    def _triangle(self, diagonal: int, compare: Callable[[Any, Any], torch.Tensor]) -> SparseTensor:
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


def _with_entries(x: Any, pattern: Pattern, entries: torch.Tensor) -> Any:
    """The tensor of a pattern with the values of entries of x."""
    return x._make(pattern, x._values.index_select(0, entries))


def _sorted(rows: torch.Tensor, shape: tuple[int, ...], entries: torch.Tensor | None) -> Taken:
    """The coalesced pattern of unique coordinates in any order, and the entries in its order."""
    if not crd.is_sorted_unique(crd.sort_keys(rows, shape)):
        order = crd.lexsort(rows, shape)
        rows, entries = rows[:, order], order if entries is None else entries[order]
    return Pattern(rows.contiguous(), shape, True), entries


def _reshaped(pattern: Pattern, shape: tuple[int, ...]) -> Pattern:
    """The pattern in another shape of as many positions, in the same order.

    Modes are joined only until they end where new ones do, so that no number passes what the sizes make necessary.
    """

    def made() -> Pattern:
        if not pattern.nnz:
            return Pattern(pattern.coords.new_empty(len(shape), 0), shape, True)
        old, rows = zip(pattern.coords, pattern.shape, strict=True), list[torch.Tensor]()
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


# -- indexing ----------------------------------------------------------------------------------------------------------


def _indexed(x: Any, keys: list[Any]) -> Any:
    """Elements by a list of indices; see `Structure.__getitem__`."""
    keys = [_index(key, x) for key in keys]
    count = sum(key is not None and key is not Ellipsis for key in keys)
    if count > x.ndim or sum(key is Ellipsis for key in keys) > 1:
        raise ShapeError(f"{count} indices, and {sum(key is Ellipsis for key in keys)} of …, for {x.ndim} modes")
    at = next((n for n, key in enumerate(keys) if key is Ellipsis), len(keys))
    keys[at : at + 1] = [slice(None)] * (x.ndim - count)
    modes = iter(enumerate(x.shape))
    labels = x._pattern.labels
    keys = [key if key is None else _within(key, *next(modes), labels) for key in keys]
    picked = [n for n, key in enumerate(k for k in keys if k is not None) if isinstance(key, torch.Tensor)]
    if len(picked) > 1:
        return _picked(x, keys, picked)
    coords, shape, rows = x._pattern.coords, list[int](), list[torch.Tensor]()
    values, axis, mode = x._values, 1, 0
    kept: torch.Tensor | None = None  # which of the entries that are left, in order
    in_order = True
    if isinstance(keys[0], slice) and keys[0].step not in (None, 1):
        indices = keys[0].indices(x.shape[0])
        if len(range(*indices)) <= x.nnz:
            keys[0] = torch.from_numpy(np.arange(*indices)).to(x.device)
    if isinstance(keys[0], torch.Tensor):
        kept, row = _runs(x._pattern, keys[0])
        rows, shape, mode = [row], [keys[0].numel()], 1
    else:
        range_of_rows = slice(*_range(coords[0], keys[0], x.shape[0]))
        coords, values = coords[:, range_of_rows], values[range_of_rows]
    for key in keys[mode:]:
        dense = mode >= x.sparse_order
        if key is None:
            if dense:
                values, axis = values.unsqueeze(axis), axis + 1
            else:
                rows.append(torch.zeros_like(_at(coords[0], kept)))
                shape.append(1)
            continue
        size = x.shape[mode]
        if dense:
            values, axis = _of_dense(values, axis, key, size)
        else:
            row, n = _at(coords[mode], kept), size
            if isinstance(key, torch.Tensor):
                kept = torch.arange(row.numel(), device=row.device) if kept is None else kept
                kept, row, n = _selected(kept, row, key, size, rows)
                in_order = False
            elif key != slice(None):
                inside, row, n = _sliced(row, key, size, mode == 0)
                in_order &= isinstance(key, int) or key.step is None or key.step > 0
                if inside is not None and not bool(inside.all()):
                    inside = inside.nonzero()[:, 0]
                    kept = inside if kept is None else kept.index_select(0, inside)
                    row, *rows = (r.index_select(0, inside) for r in (row, *rows))
            if not isinstance(key, int):
                rows.append(row)
                shape.append(n)
        mode += 1
    values = values.clone() if kept is None else values.index_select(0, kept)
    if not rows:
        return values.sum(0, dtype=values.dtype)  # of one, or of none
    taken = torch.stack(rows)
    pattern, order = (Pattern(taken, tuple(shape), True), None) if in_order else _sorted(taken, tuple(shape), None)
    pattern.labels = _labels_at(x._pattern.labels, keys)
    return x._make(pattern, values if order is None else values.index_select(0, order))


def _labels_at(labels: Labels, keys: Sequence[Any]) -> Labels:
    """Labels of what indices take; none where there is a new mode, which has no name."""
    if not labels or any(key is None for key in keys):  # a GPU is not asked where there are none
        return {}
    places = [key.cpu().numpy() if isinstance(key, torch.Tensor) else key for key in keys]
    named = zip(labels.items(), places, strict=False)
    return {name: of if of is None else of[key] for (name, of), key in named if not isinstance(key, int)}


def _at(row: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    return row if kept is None else row.index_select(0, kept)


def _range(row: torch.Tensor, key: Any, size: int) -> tuple[int, int]:
    """The first of the entries, in order, that an int or a slice of the first mode can take, and the end of them."""
    if isinstance(key, int):
        key = slice(key, key + 1)
    if not isinstance(key, slice) or key == slice(None):
        return 0, row.numel()
    taken = range(*key.indices(size))
    low, high = (min(taken[0], taken[-1]), max(taken[0], taken[-1]) + 1) if taken else (0, 0)
    first, end = torch.searchsorted(row, row.new_tensor([low, high])).tolist()
    return first, max(first, end)


def _index(key: Any, x: Any) -> Any:
    """An index as an int, a slice, None, Ellipsis, an int64 tensor, or a mask."""
    if isinstance(key, slice):
        if key.step == 0 or not all(n is None or hasattr(n, "__index__") for n in (key.start, key.stop, key.step)):
            raise ShapeError(f"a slice is of integers, with a step that is not 0, found {key}")
        return key
    if key is None or key is Ellipsis:
        return key
    if isinstance(key, str) or (isinstance(key, list | np.ndarray) and np.asarray(key).dtype.kind == "U"):
        return np.asarray(key)
    if isinstance(key, list | tuple | np.ndarray):
        key = torch.as_tensor(key) if len(key) else torch.zeros(0, dtype=torch.int64)
    if isinstance(key, torch.Tensor) and key.ndim:
        if key.ndim > 1 or key.is_floating_point() or key.is_complex():
            raise ShapeError(
                f"an index tensor has one mode and integers or bools, found {tuple(key.shape)} {key.dtype}"
            )
        return (key.bool() if key.dtype in (torch.bool, torch.uint8) else key.long()).to(x.device)
    try:
        if isinstance(key, bool | np.bool_) or getattr(key, "dtype", None) == torch.bool:
            raise TypeError
        return operator.index(key)
    except TypeError:
        raise ShapeError(f"indices are ints, slices, …, None, tensors and masks, found {type(key).__name__}") from None


def _places_of(names: np.ndarray, mode: int, labels: Labels) -> Any:
    """The index of a label of a mode, or an index tensor of several."""
    name, known = [*labels.items()][mode] if mode < len(labels) else ("", None)
    if known is None or known.dtype.kind != "U":
        raise ShapeError(f"mode {mode} has no labels of text, found {str(names)[:60]!r} as an index")
    places = {label: place for place, label in reversed([*enumerate(known.tolist())])}
    try:
        found = [places[label] for label in names.ravel().tolist()]
    except KeyError as error:
        raise CoordinateError(f"mode {name!r} has no label {str(error.args[0])[:60]!r}") from None
    return torch.tensor(found, dtype=torch.int64) if names.ndim else found[0]


def _within(index: Any, mode: int, size: int, labels: Labels) -> Any:
    """An index of a mode, counted from 0, of a mask the positions where it holds; an error past the mode."""
    if isinstance(index, np.ndarray):
        index = _places_of(index, mode, labels)
    if isinstance(index, slice) or (isinstance(index, torch.Tensor) and index.dtype != torch.bool and not len(index)):
        return index
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        if len(index) != size:
            raise ShapeError(f"a mask of {len(index)} elements is not one of mode {mode}, of size {size}")
        return index.nonzero()[:, 0]
    low, high = (int(index.min()), int(index.max())) if isinstance(index, torch.Tensor) else (index, index)
    if low < -size or high >= size:
        raise CoordinateError(f"index {low if low < -size else high} is out of range for mode {mode} of size {size}")
    if isinstance(index, torch.Tensor):
        return torch.where(index < 0, index + size, index)
    return index % size


def _sliced(row: torch.Tensor, key: Any, size: int, within: bool) -> tuple[torch.Tensor | None, torch.Tensor, int]:
    """Which coordinates an int or a slice takes, None for all, their new values, and the new size.

    Args:
        row: the coordinates of a mode.
        key: the int or the slice.
        size: of the mode.
        within: whether no coordinate is before or behind what is taken.
    """
    if isinstance(key, int):
        return None if within else row == key, row, 1
    start, stop, step = key.indices(size)
    n = len(range(start, stop, step))
    place = row - start
    if within and step == 1:
        return None, place, n
    inside = torch.ones_like(row, dtype=torch.bool) if step == 1 else place % step == 0
    place = place if step == 1 else torch.div(place, step, rounding_mode="floor")
    return inside & (place >= 0) & (place < n), place, n


@entry_point
def _runs(pattern: Pattern, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries at the places of the first mode that an index names, in its order, and its position for each."""
    row, size = pattern.coords[0], pattern.shape[0]
    if size > SEARCHED * index.numel():
        first, end = (torch.searchsorted(row, index, right=right) for right in (False, True))
    else:
        begins = pattern._once("begins", lambda: torch.searchsorted(row, torch.arange(size + 1, device=row.device)))
        first, end = begins.index_select(0, index), begins.index_select(0, index + 1)
    times = end - first
    ends = torch.cumsum(times, 0)
    if enumerate_runs := native(loops.runs, row.device, row.numel()):
        count = int(ends[-1]) if len(ends) else 0
        entries, position = row.new_empty(count), row.new_empty(count)
        enumerate_runs(first, times, entries, position)
        return entries, position
    position = torch.repeat_interleave(times)
    ahead = first - (ends - times)  # of an entry's number among all that are taken
    return ahead.index_select(0, position).add_(torch.arange(position.numel(), device=row.device)), position


def _selected(
    kept: torch.Tensor, row: torch.Tensor, index: torch.Tensor, size: int, rows: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The entries at the places that an index names, once for each time that it does; rows so far follow."""
    order = torch.sort(index, stable=True)
    if size <= row.numel() + index.numel():
        counts = torch.bincount(index, minlength=size)
        first, times = torch.cumsum(counts, 0) - counts, counts.index_select(0, row)
        taken = times.nonzero()[:, 0]
        times, row, kept, *rows[:] = (r.index_select(0, taken) for r in (times, row, kept, *rows))
        first = first.index_select(0, row)
    else:
        first, last = (torch.searchsorted(order.values, row, right=right) for right in (False, True))
        times = last - first
    which = torch.repeat_interleave(times)
    before = torch.cumsum(times, 0) - times
    number = torch.arange(which.numel(), device=row.device) - before[which] + first[which]
    rows[:] = [r[which] for r in rows]
    return kept[which], order.indices[number], index.numel()


def _of_dense(values: torch.Tensor, axis: int, key: Any, size: int) -> tuple[torch.Tensor, int]:
    """Values with one of their dense modes indexed, and the axis of the next."""
    if isinstance(key, int):
        return values.select(axis, key), axis
    if not isinstance(key, torch.Tensor):
        key = torch.tensor(range(*key.indices(size)), dtype=torch.int64, device=values.device)
    return values.index_select(axis, key), axis + 1


def _picked(x: Any, keys: list[Any], picked: list[int]) -> Any:
    """Positions that several index tensors of one length name together, as one mode; see `Structure.__getitem__`."""
    if any(key is None or isinstance(key, int) for key in keys):
        raise ShapeError("several index tensors go with slices alone: take ints and None in a step of their own")
    x = x.expand_dense()
    index = [keys[m] for m in picked]
    if len({i.numel() for i in index}) > 1:
        raise ShapeError(f"index tensors pick together and have one length, found {[i.numel() for i in index]}")
    others = [m for m in range(x.ndim) if m not in picked]
    x = x.permute(*picked, *others)
    sizes = x.shape[: len(picked)]
    keys_of = crd.numbered(
        [torch.cat((row, i)) for row, i in zip(x._pattern.coords, index, strict=False)],
        sizes,
        x._pattern.nnz + index[0].numel(),
        x._pattern.coords[0],
    )
    joined = torch.cat((keys_of.rank[: x._pattern.nnz].unsqueeze(0), x._pattern.coords[len(picked) :]))
    shape = (max(1, keys_of.count), *x.shape[len(picked) :])
    found = _indexed(
        x._make(Pattern(joined, shape, True), x._values), [keys_of.rank[x._pattern.nnz :], *(keys[m] for m in others)]
    )
    if not others:
        return found.to_dense()
    at = picked[0] if picked[-1] - picked[0] == len(picked) - 1 else 0
    return found.permute(*range(1, at + 1), 0, *range(at + 1, found.ndim))
