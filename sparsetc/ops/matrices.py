"""Products of a sparse tensor and another: `spmm`, `sddmm`, `min_plus` of another semiring; `contract` over any modes.

To a contraction another tensor may be added (``alpha Z + beta input``: BCB-SpTC, formula (1)).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from sparsetc.api import einsum, register_op
from sparsetc.contraction.request import Result, as_operand, check_operand, narrowed
from sparsetc.errors import DistributedError, DtypeError, EquationError, ShapeError
from sparsetc.ops.arguments import checked_table, equation, letters_of, matrix_of, sparse_of
from sparsetc.options import Auto, ToDense, ToSparse
from sparsetc.support import Ints
from sparsetc.support.checks import check_memory, found_shape
from sparsetc.tensor.blocks import without_blocks
from sparsetc.tensor.dtypes import exactly, multiplied, summed_dtype
from sparsetc.tensor.functions import paired_modes
from sparsetc.tensor.sparse_tensor import SparseTensor


@overload
def spmm(a: Any, b: Tensor, **settings: Unpack[ToSparse]) -> SparseTensor: ...
@overload
def spmm(a: Any, b: Tensor, **settings: Unpack[Auto]) -> Tensor: ...
@register_op
def spmm(a: Any, b: Tensor, **settings: Any) -> Result:
    """Multiply a sparse matrix by a dense matrix, ``"ij,jr->ir"``, or by a vector, ``"ij,j->i"``.

    Args:
        a: sparse (rows, columns).
        b: (columns, width) or (columns,).
        settings: as for `einsum`.

    Returns:
        (rows, width) or (rows,), dense.

    Examples:
        >>> stc.spmm(stc.eye(2, 3), torch.ones(3, 4)).shape
        torch.Size([2, 4])
    """
    sparse = matrix_of(a, "spmm", b)
    b = as_operand(b, "spmm: b")
    if not isinstance(b, Tensor):
        raise ShapeError(f"spmm: b must be a dense tensor, found {type(b).__name__}; a @ b takes a sparse one too")
    if b.ndim not in (1, 2) or b.shape[0] != sparse.shape[1]:
        raise ShapeError(f"spmm: b must have {sparse.shape[1]} rows, as a has columns, found {found_shape(b)}")
    check_operand(b, "spmm: b", sparse.dtype, sparse.device)
    wide = "r" if b.ndim == 2 else ""
    return einsum(f"ij,j{wide}->i{wide}", sparse, b, **settings)


@overload
def sddmm(a: Any, left: Result, right: Result, **settings: Unpack[ToDense]) -> Tensor: ...
@overload
def sddmm(a: Any, left: Result, right: Result, **settings: Unpack[Auto]) -> SparseTensor: ...
@register_op
def sddmm(a: Any, left: Result, right: Result, **settings: Any) -> Result:
    """Compute a sampled dense-dense product: a's values times ``left @ right.T`` at a's nonzeros, ``"ij,ir,jr->ij"``.

    Args:
        a: sparse (rows, columns).
        left: (rows, rank).
        right: (columns, rank).
        settings: as for `einsum`.

    Returns:
        A `SparseTensor` with the pattern of a, coalesced. For several heads write
        ``einsum("ij,ihr,jhr->ijh", a, left, right)``.

    Examples:
        >>> stc.sddmm(stc.eye(3), torch.ones(3, 2), torch.ones(3, 2)).values
        tensor([2., 2., 2.])
    """
    sparse = matrix_of(a, "sddmm")
    left = checked_table(left, sparse, (sparse.shape[0], "rank"), "sddmm: left")
    right = checked_table(right, sparse, (sparse.shape[1], "rank"), "sddmm: right")
    if left.shape[1] != right.shape[1]:
        raise ShapeError(f"sddmm: left and right must have one rank, found {left.shape[1]} and {right.shape[1]}")
    return einsum("ij,ir,jr->ij", sparse, left, right, **settings)


@register_op
def min_plus(x: Any, y: Tensor) -> Tensor:
    """Multiply by a matrix in the min-plus semiring, as shortest paths: ``z[i, r] = min over j of x[i, j] + y[j, r]``.

    Args:
        x: sparse (rows, columns), of real values; an absent entry is an infinite distance.
        y: (columns, width) or (columns,).

    Returns:
        (rows, width) or (rows,), dense; infinity for a row without entries. It needs memory for a row of y at each
        entry.

    Examples:
        >>> far = torch.tensor([0.0, torch.inf, torch.inf])
        >>> edges = stc.SparseTensor([[1, 2, 2], [0, 0, 1]], [1.0, 5.0, 2.0], (3, 3))  # to, from
        >>> stc.min_plus(edges, torch.minimum(far, stc.min_plus(edges, far)))
        tensor([inf, 1., 3.])
    """
    sparse = matrix_of(x, "min_plus")
    wide = ("width",) if isinstance(y, Tensor) and y.ndim == 2 else ()
    table: Any = checked_table(y, sparse, (sparse.shape[1], *wide), "min_plus: y")
    if not sparse.dtype.is_floating_point or not isinstance(table, Tensor):
        raise DtypeError(
            f"min_plus takes floating point values and a dense y, found {sparse.dtype} and {type(y).__name__}"
        )
    sparse = without_blocks(sparse.coalesce())
    columns = sparse.coords[1]
    nbytes = 2 * sparse.nnz * table[:1].nbytes
    check_memory(f"the {sparse.nnz:,} rows of sums of min_plus", nbytes, table.device)
    sums = sparse.values.view(-1, *[1] * len(wide)) + table[columns]
    least = sparse.with_values(sums).amin(1, entries=True, output="sparse")
    extrema = sums.new_full((sparse.shape[0], *sums.shape[1:]), torch.inf)
    return extrema.index_copy(0, least.coords[0], least.values)


@register_op
def contract(
    x: Any,
    y: Any,
    modes: int | tuple[int | Sequence[int], int | Sequence[int]],
    *,
    input: Result | None = None,
    alpha: float | complex = 1,
    beta: float | complex = 0,
    **settings: Unpack[Auto],
) -> Result:
    """Sum over modes of a sparse tensor and another tensor, as `torch.tensordot`: ``"ijk,jkr->ir"`` for ``modes=2``.

    Args:
        x: sparse, of any order.
        y: sparse or dense, of any order.
        modes: a number n: the last n modes of x with the first n of y; or a pair (modes of x, modes of y).
        input: a tensor to add, sparse or dense, of the result's shape, dtype and device.
        alpha: factor of the contraction.
        beta: factor of `input`, which is not read if this is 0.
        settings: as for `einsum`, ``drop_zeros=True`` included.

    Returns:
        The tensor with x's other modes, then y's other modes. If y is dense, it is a `SparseTensor` when two or more
        of x's modes are left, with y's modes as dense modes, else dense. If y is sparse, it is a `SparseTensor` when
        any mode is left. With `input`, ``alpha * contraction + beta * input``, sparse if both are sparse. Integers are
        added in 64 bits; a sum that does not fit is refused.

    Examples:
        >>> stc.contract(stc.rand((4, 5, 6), nnz=9), torch.ones(5, 6, 2), 2).shape
        torch.Size([4, 2])
    """
    sparse = sparse_of(x, "contract", y)
    second = as_operand(y, "contract: y")
    if not isinstance(second, SparseTensor | Tensor):
        raise ShapeError(f"contract: y must be a dense torch tensor, or sparse, found {type(second).__name__}")
    check_operand(second, "contract: y", sparse.dtype, sparse.device)
    order = len(second.shape)
    left, right = paired_modes(modes, sparse.shape, second.shape, "contract")
    check_scalars(sparse.dtype, alpha=alpha, beta=beta)
    if beta != 0 and input is None:
        raise EquationError(f"contract: beta is {beta}, and there is no input for it to be times")
    letters, others = letters_of(sparse.order, order - len(right), "contract")
    paired, rest = dict(zip(right, left, strict=True)), iter(others)
    term = "".join(letters[paired[n]] if n in paired else next(rest) for n in range(order))
    kept = "".join(c for m, c in enumerate(letters) if m not in left) + others
    if input is not None:
        sizes = dict(zip(letters + term, (*sparse.shape, *second.shape), strict=True))
        check_accumulation(input, tuple(sizes[c] for c in kept), sparse.dtype, sparse.device)
    scaled = alpha != 1 or beta != 0
    if type(sparse) is not SparseTensor:
        if scaled:
            raise DistributedError("contract: alpha=, beta= and input= are of tensors of one process, and x is Sharded")
        return einsum(equation(letters, [term], kept), sparse, second, **settings)
    drop_zeros = settings.pop("drop_zeros", False)
    wide = summed_dtype(sparse.dtype) if scaled else sparse.dtype  # of integers only the sum need fit
    contraction = einsum(equation(letters, [term], kept), sparse.to(wide), second.to(wide), **settings)
    what = f"{alpha} times the result" + (f" and {beta} times input" if beta else "")
    result = narrowed(accumulated(contraction, input, alpha, beta), sparse.dtype, what)
    return result.drop() if drop_zeros and isinstance(result, SparseTensor) else result


def check_accumulation(out: Any, shape: Ints, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless `contract`'s input can be added to a result of this shape, dtype and device, before it is made."""
    if not isinstance(out, SparseTensor | Tensor):
        raise DtypeError(f"input must be a SparseTensor or a torch tensor, found {type(out).__name__}")
    if tuple(out.shape) != shape:
        raise ShapeError(f"input must have the result's shape {shape}, found {tuple(out.shape)}")
    check_operand(out, "input", dtype, device, "the result")


def check_scalars(dtype: torch.dtype, **scalars: Any) -> None:
    """Raise DtypeError unless each scalar can multiply values of this dtype and give the same dtype."""
    for name, value in scalars.items():
        whole = isinstance(value, int) and -(2**63) <= value < 2**63
        fits = whole or (isinstance(value, float) and (dtype.is_floating_point or dtype.is_complex))
        if not fits and not (isinstance(value, complex) and dtype.is_complex):
            raise DtypeError(f"{name} must be a number that {dtype} can be multiplied by, found {value!r}")


def accumulated(result: Result, out: Result | None, alpha: Any, beta: Any) -> Result:
    """``alpha * result + beta * out``: on the union of both patterns if both are sparse, dense if either is.

    With ``beta=0`` `out` is not read, as in BLAS. Integers are int64, and refused where they pass it.
    """
    scaled = _times(result, alpha)
    if out is None or beta == 0:
        return scaled
    other = _times(out.to(result.dtype), beta)
    if isinstance(scaled, SparseTensor) and isinstance(other, SparseTensor):
        return scaled + other
    terms = (t.to_dense() if isinstance(t, SparseTensor) else t for t in (scaled, other))
    return exactly(torch.add, scaled.dtype, "alpha times the result and beta times input", *terms)


def _times(z: Any, factor: Any) -> Any:
    if factor == 1:
        return z
    return z * factor if isinstance(z, SparseTensor) else multiplied(torch.mul, z.dtype, z, factor)
