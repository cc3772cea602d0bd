"""Functions of entries with a number, a dense tensor, or the entries of another sparse tensor.

In: a SparseTensor and another operand. Out: a SparseTensor, differentiable with respect to all values; an error
for what would make absent entries differ from 0. The union and the intersection of two patterns, and which entries of
either their entries are, are kept with the first pattern once the two meet again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.errors import DeviceError, DtypeError, ShapeError, SparsetcError
from sparsetc.support import Ints
from sparsetc.support.entry import lacks_memory
from sparsetc.support.files import native
from sparsetc.tensor import coords as crd
from sparsetc.tensor import loops
from sparsetc.tensor.attributes import is_sparse
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.dtypes import INTEGERS, add_rows, exactly, multiplied
from sparsetc.tensor.inputs import as_dense
from sparsetc.tensor.pattern import Pattern, check_labels, followed

Function = Callable[..., Tensor]
"""A function of torch, elementwise."""
MERGED = 8
"""Two sorted runs are merged if the longer has at most this many times the numbers of the other; else searched."""
Entries = Tensor
"""(n,) int64: which of an operand's entries, or of a result's."""


def is_strided(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided


def attempted(function: Function, *operands: Any, **settings: Any) -> Tensor:
    """Call a function of torch. Raise `DtypeError` if it does not support these values."""
    try:
        return function(*operands, **settings)
    except (RuntimeError, OverflowError, TypeError) as error:
        if isinstance(error, SparsetcError) or lacks_memory(error):
            raise
        raise DtypeError(f"torch's {function.__name__} takes no {operands[0].dtype}: {error}") from None


def elementwise(x: Any, other: Any, apply: Callable[[Any, Any], Any], name: str) -> Any:
    """Apply a function with f(0, 0) = 0 at the entries of either operand; if `other` is a number, at the entries of x.

    Raises:
        DtypeError: a number or a dense tensor, by which absent entries would change.
    """
    other = as_dense(other, "the other operand")
    number = as_number(other)
    plain = isinstance(number, Number)
    absent = torch.zeros((), dtype=x.dtype, device="cpu")
    if is_strided(number) or (plain and attempted(apply, holding(absent, number), number)):
        found = "a dense tensor" if is_strided(number) else repr(number)
        raise DtypeError(f"{name} of {found} would change absent entries, which are 0: take .values, or .to_dense()")
    if plain:  # a tensor without modes keeps its dtype and its gradient
        return x.map(lambda values: attempted(apply, holding(values, number), other))
    x, y = _alike(x, other, name)
    if apply(0, 0):
        raise DtypeError(f"{name} holds wherever neither has an entry: take .values of one pattern, or .to_dense()")
    pattern, left, right = union(x._pattern, y._pattern)
    values = attempted(apply, _spread(x, left, pattern.nnz), _spread(y, right, pattern.nnz))
    return x._make(pattern, values)


def _spread(x: Any, entries: Entries | None, count: int) -> Tensor:
    """Return values of x at its `entries` among `count`; 0 at the others."""
    values = x._values
    if entries is None:
        return values
    return values.new_zeros((count, *values.shape[1:])).index_copy(0, entries, values)


def as_number(x: Any) -> Any:
    """A tensor without modes as a number; anything else as it is."""
    return x.item() if isinstance(x, Tensor) and not x.ndim else x


def holding(values: Tensor, number: Any) -> Tensor:
    """Return integers as int64 if their dtype cannot hold an int, which torch would wrap around."""
    if values.dtype not in INTEGERS or not isinstance(number, int):
        return values
    limits = torch.iinfo(values.dtype)
    return values if limits.min <= number <= limits.max else values.long()


def check_ordered(x: Any) -> None:
    """`DtypeError` for complex values."""
    if x.dtype.is_complex:
        raise DtypeError(f"{x.dtype} has no order: compare magnitudes, .abs()")


def only(x: Any, held: Tensor) -> Any:
    """The entries of a coalesced tensor for which (nnz,) bools hold."""
    kept = held.nonzero()[:, 0]
    whole = kept.numel() == held.numel()
    pattern = x._pattern if whole else x._pattern.like(x._pattern.coords[:, kept])
    return x._make(pattern, x._values.index_select(0, kept))


def where_holds(x: Any, condition: Any, wanted: bool) -> Any:
    """The entries at which a condition, dense or the pattern of a sparse one, holds or does not."""
    x = x.expand_dense().coalesce()
    if is_sparse(condition):
        if condition.shape != x.shape:
            raise ShapeError(f"where: the condition has shape {condition.shape}, an operand {x.shape}")
        return only(x, lookup(condition._pattern, x._pattern)[1] == wanted)
    return only(x, (at_entries(condition, x, "where: a condition") != 0) == wanted)


# -- with numbers and dense tensors ------------------------------------------------------------------------------------


def product(x: Any, other: Any, apply: Function, sign: str = "*") -> Any:
    """A product of x and whatever the other is; or a quotient or a remainder by what is not sparse."""
    other = as_dense(other, "the other operand")
    if isinstance(other, Number):
        return x.map(lambda values: applied(apply, values, other))
    if is_strided(other):
        return _with_dense(x, other, apply)
    x, y = _alike(x, other, sign)
    if sign not in "*&":
        raise DtypeError(f"sparse {sign} sparse divides 0 by 0 where neither has an entry: take .values of one pattern")
    pattern, left, right = intersection(x._pattern, y._pattern)
    return x._make(pattern, applied(apply, crd.picked(x._values, left), crd.picked(y._values, right)))


def applied(apply: Function, values: Tensor, other: Any) -> Tensor:
    """A function of values and others; `DtypeError` for a product or power of integers that does not fit."""
    if apply not in (torch.mul, torch.pow) or values.dtype not in INTEGERS:
        return attempted(apply, holding(values, other), other)

    @wraps(apply)
    def whole(values: Tensor, other: Any) -> Tensor:
        return multiplied(apply, torch.result_type(values, other), values, other)

    return attempted(whole, values, other)


def _with_dense(x: Any, other: Tensor, apply: Function) -> Any:
    """Apply a function to the entries of x and a dense tensor's elements at their coordinates, broadcast."""
    if not other.ndim:
        return x.map(lambda values: applied(apply, values, other))
    if other.device != x.device:
        raise DeviceError(f"the dense operand must be on {x.device} as the sparse one is, found {other.device}")
    shape = broadcast(x.shape, tuple(other.shape), "a dense operand")
    x = without_blocks(x if shape == x.shape else x.expand(shape))
    return x._make(x._pattern, applied(apply, x._values, at_entries(other, x, "the dense operand")))


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


def signed_sum(x: Any, other: Any, sign: int) -> Any:
    """``x + sign * other``."""
    other = as_dense(other, "the other operand")
    plain = isinstance(other, Number)
    if plain and other == 0 and (sign > 0 or x.dtype != torch.bool):
        return x.to(torch.result_type(x._values, other))  # as `sum` of masks, which counts
    if plain or is_strided(other):
        raise DtypeError("a sum with a number or a dense tensor is dense: .to_dense() + …, or map() for entries alone")
    x, y = _alike(x, other, "+" if sign > 0 else "-")
    if sign < 0 and torch.bool in (x.dtype, y.dtype):
        raise DtypeError("sparse - takes no bools, as torch: ^ is true where one of two is, .to(dtype) makes numbers")
    dtype = torch.result_type(x._values, y._values)
    pattern, left, right = union(x._pattern, y._pattern)

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
    return x._make(pattern, values)


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


def broadcast(first: Ints, second: Ints, name: str) -> Ints:
    """Return the shape that two shapes broadcast to, by torch's rules. Raise `ShapeError` if they do not fit."""
    order = max(len(first), len(second))
    pairs = list(zip(*((1,) * (order - len(shape)) + tuple(shape) for shape in (first, second)), strict=True))
    if any(n != m and 1 not in (n, m) for n, m in pairs):  # torch.broadcast_shapes imports sympy, which takes .4 s
        raise ShapeError(f"{name}: shapes {first} and {second} cannot be broadcast to one")
    return tuple(m if n == 1 else n for n, m in pairs)


# -- where two coalesced patterns of one shape meet -------------------------------------------------------------------


Met = tuple[Pattern, Entries | None, Entries | None]
"""A pattern made of two, and the numbers of entries of both; None for all in order."""


def _of_two(make: Callable[[Pattern, Pattern], Met]) -> Callable[[Pattern, Pattern], Met]:
    """Decorate what is made of two patterns: one with itself is itself, and others are kept once they meet again."""

    @wraps(make)
    def met(x: Pattern, y: Pattern) -> Met:
        return (x, None, None) if x is y else x._again((make.__name__, y.number), lambda: make(x, y))

    return met


@_of_two
def intersection(x: Pattern, y: Pattern) -> Met:
    """Return the pattern of the common entries, and their numbers in x and in y; None for all in order."""
    if merge := native(loops.intersection, x.device, x.nnz + y.nnz):
        left, right = (x.coords.new_empty(min(x.nnz, y.nnz)) for _ in "xy")
        count = merge(*_ranks(x, y), left, right)
        left, right = left[:count], right[:count]
    else:
        here, there = lookup(x, y)
        right = there.nonzero()[:, 0]
        left = here[right]
    make = partial(torch.index_select, x.coords, 1, left)
    return x.like(make, later=(len(left), x.device)), left, right


@_of_two
def union(x: Pattern, y: Pattern) -> Met:
    """Return the pattern of entries of either, and the numbers in it of x's and y's entries (None for all in order)."""
    if merge := native(loops.union, x.device, x.nnz + y.nnz):
        left, right = x.coords.new_empty(x.nnz), x.coords.new_empty(y.nnz)
        count = merge(*_ranks(x, y), left, right)
    else:
        here, there = lookup(x, y)
        added = ~there  # an entry comes behind those of x before it, and those of y before it that x has not
        right = here + added.cumsum(0) - added.to(torch.int64)
        before = here.new_zeros(x.nnz + 1).index_add_(0, here, added.to(torch.int64)).cumsum(0)
        left = torch.arange(x.nnz, device=x.device) + before[:-1]
        count = x.nnz + int(before[-1])
    rows = [*zip(x.coords, y.coords, strict=True)]

    def make() -> Tensor:
        coords = left.new_empty(len(rows), count)
        for row, (of_x, of_y) in zip(coords, rows, strict=True):  # scatter_ along rows is twice as fast
            row.scatter_(0, right, of_y).scatter_(0, left, of_x)
        return coords

    return x.like(make, later=(count, x.device)), left, right


def lookup(x: Pattern, y: Pattern) -> tuple[Entries, Tensor]:
    """For each entry of y, return the first entry of x that is not before it, and True if the two are equal."""
    of_x, of_y = _ranks(x, y)
    here = _before(of_x, of_y)
    return here, torch.cat((of_x, of_x.new_full((1,), -1))).index_select(0, here) == of_y  # no number is -1


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
    positions = np.flatnonzero(order < len(of_y))
    return torch.from_numpy(positions - np.arange(len(of_y)))
