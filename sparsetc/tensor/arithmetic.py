"""Arithmetic of sparse tensors: operators, maps of entries, comparisons; and where the entries of two patterns meet.

In: a SparseTensor, and a number, a dense tensor or another SparseTensor. Out: a SparseTensor, differentiable with
respect to all values. Where entries of two patterns meet is kept with the first, once they meet again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from math import prod
from numbers import Number
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import DeviceError, DtypeError, ShapeError
from sparsetc.support.compiled import native
from sparsetc.support.entry import lacks_memory
from sparsetc.tensor import coords as crd
from sparsetc.tensor import loops
from sparsetc.tensor.blocks import inside_only, without_blocks
from sparsetc.tensor.inputs import as_dense
from sparsetc.tensor.pattern import Later, Pattern, check_labels, followed
from sparsetc.tensor.sums import INTEGERS, add_rows, exactly, multiplied

if TYPE_CHECKING:
    from typing_extensions import Self

    from sparsetc.tensor.sparse_tensor import SparseTensor

MERGED = 8
"""Two sorted runs are merged if the longer has at most this many times the numbers of the other; else searched."""
IN_PLACE = "a SparseTensor is not changed in place, as {} would: take the result of an operation, or change x.values"
"""The message for operations that torch does in place."""
Function = Callable[..., Tensor]
"""A function of torch, elementwise."""
Entries = Tensor
"""(n,) int64: which of an operand's entries, or of a result's."""


class Arithmetic:
    """Arithmetic operators of a `SparseTensor`.

    A result has the pattern of the operand, or of a product of two the entries that both have, and of a sum or a
    difference those that either has. What would make absent entries differ from 0 is refused.
    """

    __slots__ = ()
    _einsum_of: ClassVar[Callable[..., Any]]
    _compile_of: ClassVar[Callable[..., Any]]
    """`sparsetc.einsum` and `compile`, which stand levels above and are put here by their module."""

    if TYPE_CHECKING:
        _pattern: Pattern
        _values: Tensor

        @classmethod
        def _make(cls, pattern: Pattern, values: Tensor) -> SparseTensor: ...
        def coalesce(self) -> Self: ...

    # -- of entries alone -----------------------------------------------------------------------------------------

    def map(self, function: Callable[[Tensor], Tensor]) -> SparseTensor:
        """Apply a function to the values of entries; absent entries stay absent.

        Args:
            function: takes and returns a values tensor of the same shape. Duplicates are summed first.

        Raises:
            ShapeError: the function returns another shape.

        Examples:
            >>> stc.eye(2).map(torch.exp).values
            tensor([2.7183, 2.7183])
        """
        x = self.coalesce()
        blocks, values = x._pattern._blocks, x._values
        masks = x._pattern._once("inside", lambda: blocks.masks(x._pattern.coords)) if blocks and blocks.ragged else ()
        found = function(inside_only(values, masks, 1))  # past the end nothing is infinite, nor a gradient
        if not isinstance(found, Tensor) or found.shape != values.shape:
            what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ShapeError(f"a function of {tuple(values.shape)} values gave {what}")
        return self._make(x._pattern, inside_only(found, masks))

    def __neg__(self) -> SparseTensor:
        negative = partial(attempted, torch.neg)
        return self.map(lambda values: exactly(negative, values.dtype, "a negative integer", values))

    def __pos__(self) -> Self:
        return self

    def abs(self) -> SparseTensor:
        """Return the magnitude of each entry."""
        return self.map(lambda values: values if values.dtype == torch.bool else values.abs())

    __abs__ = abs

    def sign(self) -> SparseTensor:
        """Return the sign of each entry: -1, 0 or 1; for complex values a number of magnitude 1."""
        return self.map(torch.sgn)

    def sqrt(self) -> SparseTensor:
        """Return the square root of each entry."""
        return self.map(torch.sqrt)

    def clip(self, min: float | None = None, max: float | None = None) -> SparseTensor:
        """Limit entries to ``min`` .. ``max``, a range that contains 0; at least one limit is needed.

        Raises:
            DtypeError: limits that would change absent entries, or complex values.

        Examples:
            >>> stc.full((2,), 5.0).clip(max=3).values
            tensor([3., 3.])
        """
        _ordered(self)
        if (min, max) == (None, None):
            raise DtypeError("clip takes min=, max= or both")
        if not ((min is None or min <= 0) and (max is None or max >= 0)):
            raise DtypeError(f"clip to {min} .. {max} would change absent entries, which are 0: map(), or .to_dense()")

        def clipped(values: Tensor) -> Tensor:
            wide = holding(holding(values, min), max)
            result = wide.clamp(min, max)
            return result if wide is values or result.is_floating_point() else result.to(values.dtype)

        return self.map(clipped)

    clamp = clip

    def drop(self, tol: float = 0.0) -> SparseTensor:
        """Remove the entries of magnitude ``tol`` or less; by default the stored zeros. Waits for a GPU.

        A row of dense modes, or a block, stays if any of its values does.

        Examples:
            >>> stc.SparseTensor([[0, 1]], [0.0, 2.0]).drop().nnz
            1
        """
        x = self.coalesce()
        values = x._values.detach()
        # not by magnitude where there is a sign: that of the least integer is no integer of the dtype
        small = values.abs() <= tol if values.is_complex() else (values <= tol) & (values >= -float(tol))  # NaN is kept
        return only(x, (~small).reshape(x._pattern.nnz, prod(values.shape[1:])).any(1))

    # -- of two ---------------------------------------------------------------------------------------------------

    def __mul__(self, other: Any) -> SparseTensor:
        return _product(self, other, torch.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> SparseTensor:
        return _product(self, other, torch.true_divide, "/")

    def __floordiv__(self, other: Any) -> SparseTensor:
        return _product(self, other, torch.floor_divide, "//")

    def __mod__(self, other: Any) -> SparseTensor:
        return _product(self, other, torch.remainder, "%")

    def __rtruediv__(self, other: Any) -> NoReturn:
        raise DtypeError(f"{type(other).__name__} / sparse, // or %, divides by absent entries, 0: .to_dense()")

    __rfloordiv__ = __rmod__ = __rtruediv__

    def __rpow__(self, other: Any) -> NoReturn:
        raise DtypeError("a power with a sparse exponent is 1 where no entry is: use .to_dense(), or map()")

    def __pow__(self, exponent: Any) -> SparseTensor:
        number = _number(exponent)
        if not isinstance(number, Number) or isinstance(number, complex) or not number > 0:  # type: ignore[operator]
            raise DtypeError("sparse ** takes one number above 0, since 0 to the power of another is not 0: map()")
        return self.map(lambda values: _applied(torch.pow, values, exponent))

    def __add__(self, other: Any) -> SparseTensor:
        return _sum(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> SparseTensor:
        return _sum(self, other, -1)

    def __rsub__(self, other: Any) -> SparseTensor:
        return _sum(-self, other, 1)

    def __and__(self, other: Any) -> SparseTensor:
        return _product(self, other, torch.bitwise_and, "&")

    def __or__(self, other: Any) -> SparseTensor:
        return elementwise(self, other, operator.or_, "|")

    def __xor__(self, other: Any) -> SparseTensor:
        return elementwise(self, other, operator.xor, "^")

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self) -> NoReturn:
        raise DtypeError(
            "~ would hold at all positions without an entry: where(mask, 0, x) has the entries of x elsewhere, "
            "mask.map(torch.logical_not) inverts the entries alone"
        )

    def __matmul__(self, other: Any) -> Any:
        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return matmul(other, self)

    def __ne__(self, other: object) -> Any:
        compared = isinstance(_number(other), Number | Arithmetic)
        return self._compared(operator.ne, other) if compared else not self == other

    def __lt__(self, other: Any) -> SparseTensor:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> SparseTensor:
        return self._compared(operator.le, other)

    def __gt__(self, other: Any) -> SparseTensor:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> SparseTensor:
        return self._compared(operator.ge, other)

    def _compared(self, compare: Function, other: Any) -> SparseTensor:
        """A tensor of bools: where the comparison holds. Refused where 0, as absent entries are, does."""
        other = _number(other)
        if compare is not operator.ne:
            _ordered(self)
            if isinstance(other, complex):
                raise DtypeError(f"{other} has no order: compare magnitudes, .abs()")
        return elementwise(self, other, compare, f"the comparison {compare.__name__}")


def is_strided(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided


def is_sparse(x: Any) -> bool:
    return isinstance(x, Arithmetic)


def attempted(function: Function, *operands: Any, **settings: Any) -> Tensor:
    """Call a function of torch. Raise `DtypeError` if it does not support these values."""
    try:
        return function(*operands, **settings)
    except (RuntimeError, OverflowError) as error:
        if lacks_memory(error):
            raise
        raise DtypeError(f"torch's {function.__name__} takes no {operands[0].dtype}: {error}") from None


def elementwise(x: Any, other: Any, apply: Callable[[Any, Any], Any], name: str) -> SparseTensor:
    """Apply a function with f(0, 0) = 0 at the entries of either operand; if `other` is a number, at the entries of x.

    Raises:
        DtypeError: a number or a dense tensor, by which absent entries would change.
    """
    other = _number(as_dense(other, "the other operand"))
    if is_strided(other) or (isinstance(other, Number) and apply(0, other)):
        found = "a dense tensor" if is_strided(other) else repr(other)
        raise DtypeError(f"{name} of {found} would change absent entries, which are 0: take .values, or .to_dense()")
    if isinstance(other, Number):
        return x.map(lambda values: attempted(apply, holding(values, other), other))  # type: ignore[no-any-return]
    x, y = _alike(x, other, name)
    if apply(0, 0):
        raise DtypeError(f"{name} holds wherever neither has an entry: take .values of one pattern, or .to_dense()")
    pattern, left, right = _union(x._pattern, y._pattern)
    values = attempted(apply, _spread(x, left, pattern.nnz), _spread(y, right, pattern.nnz))
    return x._make(pattern, values)  # type: ignore[no-any-return]


def _spread(x: Any, entries: Entries | None, count: int) -> Tensor:
    """Return values of x at its `entries` among `count`; 0 at the others."""
    values = x._values
    if entries is None:
        return values  # type: ignore[no-any-return]
    return values.new_zeros((count, *values.shape[1:])).index_copy(0, entries, values)  # type: ignore[no-any-return]


def _number(x: Any) -> Any:
    """A tensor without modes as a number; anything else as it is."""
    return x.item() if isinstance(x, Tensor) and not x.ndim else x


def holding(values: Tensor, number: Any) -> Tensor:
    """Return integers as int64 if their dtype cannot hold an int, which torch would wrap around."""
    if values.dtype not in INTEGERS or not isinstance(number, int):
        return values
    limits = torch.iinfo(values.dtype)
    return values if limits.min <= number <= limits.max else values.long()


def _ordered(x: Any) -> None:
    """`DtypeError` for complex values."""
    if x.dtype.is_complex:
        raise DtypeError(f"{x.dtype} has no order: compare magnitudes, .abs()")


def only(x: Any, held: Tensor) -> SparseTensor:
    """The entries of a coalesced tensor for which (nnz,) bools hold."""
    kept = held.nonzero()[:, 0]
    return x._make(x._pattern.like(x._pattern.coords[:, kept], True), x._values.index_select(0, kept))  # type: ignore[no-any-return]


def where_holds(x: Any, condition: Any, wanted: bool) -> SparseTensor:
    """The entries at which a condition, dense or the pattern of a sparse one, holds or does not."""
    x = x.expand_dense().coalesce()
    if is_sparse(condition):
        if condition.shape != x.shape:
            raise ShapeError(f"where: the condition has shape {condition.shape}, an operand {x.shape}")
        return only(x, places(condition._pattern, x._pattern)[1] == wanted)
    return only(x, (at_entries(condition, x, "where: a condition") != 0) == wanted)


# -- with numbers and dense tensors ------------------------------------------------------------------------------------


def _product(x: Any, other: Any, apply: Function, sign: str = "*") -> SparseTensor:
    """A product of x and whatever the other is; or a quotient or a remainder by what is not sparse."""
    other = as_dense(other, "the other operand")
    if isinstance(other, Number):
        return x.map(lambda values: _applied(apply, values, other))  # type: ignore[no-any-return]
    if is_strided(other):
        return _with_dense(x, other, apply)
    x, y = _alike(x, other, sign)
    if sign not in "*&":
        raise DtypeError(f"sparse {sign} sparse divides 0 by 0 where neither has an entry: take .values of one pattern")
    pattern, left, right = _meeting(x._pattern, y._pattern)
    return x._make(pattern, _applied(apply, _taken(x, left), _taken(y, right)))  # type: ignore[no-any-return]


def _applied(apply: Function, values: Tensor, other: Any) -> Tensor:
    """A function of values and others; `DtypeError` for a product or power of integers that does not fit."""
    if apply not in (torch.mul, torch.pow) or values.dtype not in INTEGERS:
        return attempted(apply, holding(values, other), other)
    return multiplied(apply, torch.result_type(values, other), values, other)


def _with_dense(x: Any, other: Tensor, apply: Function) -> SparseTensor:
    """Apply a function to the entries of x and a dense tensor's elements at their places, broadcast."""
    if not other.ndim:
        return x.map(lambda values: _applied(apply, values, other))  # type: ignore[no-any-return]
    if other.device != x.device:
        raise DeviceError(f"the dense operand must be on {x.device} as the sparse one is, found {other.device}")
    shape = broadcast(x.shape, tuple(other.shape), "a dense operand")
    x = without_blocks(x if shape == x.shape else x.expand(shape))
    return x._make(x._pattern, _applied(apply, x._values, at_entries(other, x, "the dense operand")))  # type: ignore[no-any-return]


def at_entries(dense: Tensor, x: Any, what: str) -> Tensor:
    """Return the elements (nnz, *dense sizes) of a dense tensor, broadcast to the shape of x, at the entries of x.

    Torch cannot broadcast to 2**63 positions, so modes of size 1 are read at 0. `ShapeError` where they do not fit.
    """
    shape, first = x.shape, x.order - dense.ndim
    if first < 0 or any(n not in (1, m) for n, m in zip(dense.shape, shape[max(0, first) :], strict=True)):
        raise ShapeError(f"{what} of shape {tuple(dense.shape)} cannot be broadcast to {shape}")
    dense = dense.reshape([1] * first + list(dense.shape)).expand([-1] * x.sparse_order + list(shape[x.sparse_order :]))
    rows = [0 if n == 1 else row for row, n in zip(x._pattern.coords, dense.shape, strict=False)]
    return dense[tuple(rows)].expand(x._values.shape)


# -- of two patterns ---------------------------------------------------------------------------------------------------


def _sum(x: Any, other: Any, sign: int) -> SparseTensor:
    """``x + sign * other``."""
    other = as_dense(other, "the other operand")
    if isinstance(other, Number) and other == 0:
        return x  # type: ignore[no-any-return]
    if isinstance(other, Number) or (is_strided(other)):
        raise DtypeError("a sum with a number or a dense tensor is dense: .to_dense() + …, or map() for entries alone")
    x, y = _alike(x, other, "+" if sign > 0 else "-")
    dtype = torch.result_type(x._values, y._values)
    pattern, left, right = _union(x._pattern, y._pattern)

    def added(a: Tensor, b: Tensor) -> Tensor:
        b = b if sign > 0 else attempted(torch.neg, b)
        if left is None or right is None:
            return a + b
        out = a.new_zeros((pattern.nnz, *a.shape[1:]))
        plain = a.ndim == 1 and a.dtype in (torch.float32, torch.float64) and not followed([a, b])
        if plain and (add := native(loops.add, a.device, pattern.nnz)):
            add(left, right, a, b, out)
            return out
        return add_rows(add_rows(out, left, a), right, b)

    values = exactly(added, dtype, "a sum of integers", x._values.to(dtype), y._values.to(dtype))
    return x._make(pattern, values)  # type: ignore[no-any-return]


def _alike(x: Any, other: Any, sign: str) -> tuple[Any, Any]:
    """Return both as coalesced tensors of one shape, with the same blocks and dense modes."""
    y = type(x).coerce(other)
    if y is None:
        raise DtypeError(
            f"sparse {sign} takes a number, a torch tensor or a sparse tensor, found {type(other).__name__}"
        )
    if x.shape != y.shape:
        shape = broadcast(x.shape, y.shape, f"sparse {sign} sparse")
        x, y = (one if one.shape == shape else one.expand(shape) for one in (x, y))
    for (name, ours), theirs in zip(x._pattern.labels.items(), y._pattern.labels.values(), strict=False):
        check_labels(name, ours, theirs)
    if x.device != y.device:
        raise DeviceError(f"sparse {sign} sparse takes tensors on one device, found {x.device} and {y.device}")
    if (x.sparse_order, x.blocksize) != (y.sparse_order, y.blocksize):
        x, y = x.expand_dense(), y.expand_dense()
    return x.coalesce(), y.coalesce()


def broadcast(first: tuple[int, ...], second: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Return the shape that two shapes broadcast to, by torch's rules. Raise `ShapeError` if they do not fit."""
    order = max(len(first), len(second))
    pairs = list(zip(*((1,) * (order - len(shape)) + tuple(shape) for shape in (first, second)), strict=True))
    if any(n != m and 1 not in (n, m) for n, m in pairs):
        raise ShapeError(f"{name}: shapes {first} and {second} cannot be broadcast to one")
    return tuple(m if n == 1 else n for n, m in pairs)


def _taken(x: Any, entries: Entries | None) -> Tensor:
    return crd.picked(x._values, entries)  # type: ignore[no-any-return]


def _meeting(x: Pattern, y: Pattern) -> tuple[Pattern, Entries | None, Entries | None]:
    """Return the pattern of the common entries, and their numbers in x and in y; None for all in order."""
    if x is y:
        return x, None, None

    def made() -> tuple[Pattern, Entries, Entries]:
        if merge := native(loops.intersection, x.device, x.nnz + y.nnz):
            left, right = (x.coords.new_empty(min(x.nnz, y.nnz)) for _ in "xy")
            count = merge(*_ranks(x, y), left, right)
            left, right = left[:count], right[:count]
        else:
            here, there = places(x, y)
            right = there.nonzero()[:, 0]
            left = here[right]
        later = Later(partial(torch.index_select, x.coords, 1, left), len(left), x.device)
        return x.like(later, True), left, right

    return x._again(("meeting", y.number), made)


def _union(x: Pattern, y: Pattern) -> tuple[Pattern, Entries | None, Entries | None]:
    """Return the pattern of entries of either, and the places in it of x's and y's (None for all in order)."""
    if x is y:
        return x, None, None

    def made() -> tuple[Pattern, Entries, Entries]:
        merge, interleave = (native(loop, x.device, x.nnz + y.nnz) for loop in (loops.union, loops.interleave))
        if merge and interleave:
            left, right = x.coords.new_empty(x.nnz), x.coords.new_empty(y.nnz)
            count = merge(*_ranks(x, y), left, right)
            make = partial(_interleaved, interleave, left, right, x.coords, y.coords, count)
            return x.like(Later(make, count, x.device), True), left, right
        here, there = places(x, y)
        added = ~there  # an entry comes behind those of x before it, and those of y before it that x has not
        right = here + added.cumsum(0) - added.to(torch.int64)
        before = here.new_zeros(x.nnz + 1).index_add_(0, here, added.to(torch.int64)).cumsum(0)
        left = torch.arange(x.nnz, device=x.device) + before[:-1]
        coords = x.coords.new_empty(x.order, x.nnz + int(before[-1]))
        for row, of_x, of_y in zip(coords, x.coords, y.coords, strict=True):  # scatter_ along rows is twice as fast
            row.scatter_(0, right, of_y).scatter_(0, left, of_x)
        return x.like(coords, True), left, right

    return x._again(("union", y.number), made)


def _interleaved(interleave: Callable[..., Any], left: Entries, right: Entries, x: Tensor, y: Tensor, n: int) -> Tensor:
    """Return the coordinates of a union of n entries."""
    coords = x.new_empty(len(x), n)
    interleave(left, right, x, y, coords)
    return coords


def places(x: Pattern, y: Pattern) -> tuple[Entries, Tensor]:
    """For each entry of y, return the first entry of x that is not before it, and True if the two are equal."""
    of_x, of_y = _ranks(x, y)
    here = _before(of_x, of_y)
    equal = (
        of_x.index_select(0, here.clamp(max=max(0, x.nnz - 1))) == of_y
        if x.nnz
        else torch.zeros_like(of_y, dtype=torch.bool)
    )
    return here, equal


def _ranks(x: Pattern, y: Pattern) -> list[Tensor]:
    """Numbers for the entries of both, equal and ordered across both as coordinates are."""
    keys = [crd.sort_keys(one.coords, x.shape) for one in (x, y)]
    if len(keys[0]) == 1:
        return [key for (key,) in keys]
    rank = crd.numbered([*torch.cat((x.coords, y.coords), 1)], x.shape, x.nnz + y.nnz, x.coords[0]).rank
    return [rank[: x.nnz], rank[x.nnz :]]


def _before(of_x: Tensor, of_y: Tensor) -> Entries:
    """For each of some ascending numbers, count the smaller ones among other ascending numbers.

    On a CPU two runs of like length are merged, as a stable sort of numpy does: half of a search's time.
    """
    if of_x.is_cuda or MERGED * len(of_y) < len(of_x):
        return torch.searchsorted(of_x, of_y)
    order = np.argsort(np.concatenate((of_y.numpy(), of_x.numpy())), kind="stable")
    places = np.flatnonzero(order < len(of_y))
    return torch.from_numpy(places - np.arange(len(of_y)))


def matmul(left: Any, right: Any) -> Any:
    """``left @ right`` of which one is sparse, at least: matrices, vectors, and batches of matrices in front.

    By `einsum`'s rule a batch of sparse matrices times a dense one is sparse, as it keeps two of their modes.
    """
    shapes = [tuple(getattr(x, "shape", ())) for x in (left, right)]
    a, b = map(len, shapes)
    if not a or not b:
        named = [shape or type(x).__name__ for shape, x in zip(shapes, (left, right), strict=True)]
        raise ShapeError(f"@ takes vectors and matrices, found {named[0]} and {named[1]}")
    if shapes[0][-1] != shapes[1][-2:][0]:
        raise ShapeError(f"@ sums columns of the first with rows of the second, found {shapes[0]} and {shapes[1]}")
    batch = "abcdefgh"[: max(a, b, 2) - 2]
    first = (batch[len(batch) - a + 2 :] + "ij") if a > 1 else "j"
    second = (batch[len(batch) - b + 2 :] + "jk") if b > 1 else "j"
    result = batch + ("i" if a > 1 else "") + ("k" if b > 1 else "")
    return Arithmetic._einsum_of(f"{first},{second}->{result}", left, right)
