"""Arithmetic of sparse tensors: operators, maps of entries, comparisons.

In: a SparseTensor, and a number, a dense tensor or another SparseTensor. Out: a SparseTensor, differentiable with
respect to all values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from math import prod
from numbers import Number
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import Self

from sparsetc.errors import DtypeError, ShapeError
from sparsetc.support import later
from sparsetc.support.checks import found_shape
from sparsetc.tensor.attributes import Attributes, Sparse
from sparsetc.tensor.blocks import inside_only
from sparsetc.tensor.dtypes import check_dtype, exactly
from sparsetc.tensor.elementwise import (
    Function,
    applied,
    as_number,
    attempted,
    check_ordered,
    elementwise,
    holding,
    only,
    product,
    signed_sum,
)

einsum = later("api", "einsum")


def _operator(function: Callable[..., Any], *settings: Any) -> Callable[[Sparse, Any], Sparse]:
    """Return an operator: a function of both operands and of settings."""
    return lambda x, other: function(x, other, *settings)  # type: ignore[no-any-return]


def _compared(x: Any, other: Any, compare: Function) -> Any:
    """A tensor of bools: where the comparison holds. Refused where 0, as absent entries are, does."""
    other = as_number(other)
    if compare is not operator.ne:
        check_ordered(x)
        if isinstance(other, complex):
            raise DtypeError(f"{other} has no order: compare magnitudes, .abs()")
    return elementwise(x, other, compare, f"the comparison {compare.__name__}")


class Arithmetic(Attributes):
    """Arithmetic operators of a `SparseTensor`.

    A result has the pattern of the operand, or of a product of two the entries that both have, and of a sum or a
    difference those that either has. What would make absent entries differ from 0 is refused.
    """

    __slots__ = ()

    # -- of entries alone -----------------------------------------------------------------------------------------

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to the values of entries; absent entries stay absent.

        Args:
            function: takes and returns a values tensor of the same shape. Duplicates are summed first.

        Raises:
            ShapeError: the function returns another shape.
            DtypeError: the function returns values of a dtype that a tensor may not have.

        Examples:
            >>> stc.eye(2).map(torch.exp).values
            tensor([2.7183, 2.7183])
        """
        x = self.coalesce()
        blocks, values = x._pattern.blocks, x._values
        masks = x._pattern._once("inside", lambda: blocks.masks(x._pattern.coords)) if blocks and blocks.ragged else ()
        result = function(inside_only(values, masks, 1))  # past the end nothing is infinite, nor a gradient
        if not isinstance(result, Tensor) or result.shape != values.shape:
            raise ShapeError(f"a function of {tuple(values.shape)} values gave {found_shape(result)}")
        check_dtype(result.dtype)
        return self._make(x._pattern, inside_only(result, masks))

    def __neg__(self) -> Self:
        negative = partial(attempted, torch.neg)
        return self.map(lambda values: exactly(negative, values.dtype, "a negative integer", values))

    def __pos__(self) -> Self:
        return self

    def abs(self) -> Self:
        """Return the magnitude of each entry."""
        return self.map(lambda values: values if values.dtype == torch.bool else values.abs())

    __abs__ = abs

    def sign(self) -> Self:
        """Return the sign of each entry: -1, 0 or 1; for complex values a number of magnitude 1."""
        return self.map(torch.sgn)

    def sqrt(self) -> Self:
        """Return the square root of each entry."""
        return self.map(torch.sqrt)

    def clip(self, min: float | None = None, max: float | None = None) -> Self:
        """Limit entries to ``min`` .. ``max``, a range that contains 0; at least one limit is needed.

        Raises:
            DtypeError: limits that would change absent entries, or complex values.

        Examples:
            >>> stc.full((2,), 5.0).clip(max=3).values
            tensor([3., 3.])
        """
        check_ordered(self)
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

    def drop(self, tol: float = 0.0) -> Self:
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

    __mul__ = __rmul__ = _operator(product, torch.mul)
    __truediv__ = _operator(product, torch.true_divide, "/")
    __floordiv__ = _operator(product, torch.floor_divide, "//")
    __mod__ = _operator(product, torch.remainder, "%")
    __add__ = __radd__ = _operator(signed_sum, 1)
    __sub__ = _operator(signed_sum, -1)
    __and__ = __rand__ = _operator(product, torch.bitwise_and, "&")
    __or__ = __ror__ = _operator(elementwise, operator.or_, "|")
    __xor__ = __rxor__ = _operator(elementwise, operator.xor, "^")
    __lt__, __le__, __gt__, __ge__ = (
        _operator(_compared, compare) for compare in (operator.lt, operator.le, operator.gt, operator.ge)
    )

    def __rtruediv__(self, other: Any) -> NoReturn:
        raise DtypeError(f"{type(other).__name__} / sparse, // or %, divides by absent entries, 0: .to_dense()")

    __rfloordiv__ = __rmod__ = __rtruediv__

    def __rpow__(self, other: Any) -> NoReturn:
        raise DtypeError("a power with a sparse exponent is 1 where no entry is: use .to_dense(), or map()")

    def __pow__(self, exponent: Any) -> Self:
        number = as_number(exponent)
        if not isinstance(number, Number) or isinstance(number, complex) or not number > 0:  # type: ignore[operator]
            raise DtypeError("sparse ** takes one number above 0, since 0 to the power of another is not 0: map()")
        return self.map(lambda values: applied(torch.pow, values, exponent))

    def __rsub__(self, other: Any) -> Self:
        return signed_sum(-self, other, 1)

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
        compared = isinstance(as_number(other), Number | Arithmetic)
        return _compared(self, other, operator.ne) if compared else not self == other


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
    return einsum(f"{first},{second}->{result}", left, right)
