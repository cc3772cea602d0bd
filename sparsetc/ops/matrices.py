"""Products of a sparse matrix: `spmm`, `sddmm`, and `min_plus` of another semiring."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from sparsetc.api import einsum, register_op
from sparsetc.contraction.operands import as_operand, check_operand
from sparsetc.contraction.request import Result
from sparsetc.errors import DtypeError, ShapeError
from sparsetc.ops.arguments import checked_table, found_shape, matrix_of
from sparsetc.options import Auto, ToDense, ToSparse
from sparsetc.support import memory
from sparsetc.tensor.blocks import without_blocks
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
    memory.check(f"the {sparse.nnz:,} rows of sums of min_plus", nbytes, table.device)
    sums = sparse.values.view(-1, *[1] * len(wide)) + table[columns]
    least = sparse.with_values(sums).amin(1, entries=True, output="sparse")
    extrema = sums.new_full((sparse.shape[0], *sums.shape[1:]), torch.inf)
    return extrema.index_copy(0, least.coords[0], least.values)
