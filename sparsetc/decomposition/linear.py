"""The small linear algebra of alternating least squares: a factor from its normal equations, and its columns' scales.

In: a factor A (n, R), the right-hand side B (n, R) and the Gram matrix H of ``A H = B``, (R, R) for all rows or
(n, R, R), one a row. Out: the factor changed in place. Nothing here waits for a GPU, so a CUDA graph can hold it: no
scalar is given to `torch.where` either, which copies it from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from sparsetc.codegen.launch import FUSED

INVERSE_RANK = 64
"""The largest rank of which one program inverts a matrix in registers."""
KERNEL_RANK = 256
"""The largest rank of which a program of the HALS kernel keeps rows in registers."""
KERNEL_ELEMENTS = 1024
"""Elements of a factor that such a program has, eight a thread. Not measured."""
HALS_PASSES = 3
"""Passes over the columns of a nonnegative factor in a sweep: fewer take more sweeps, whose MTTKRPs are dear."""


def least_squares(factor: Tensor, gram: Tensor, rhs: Tensor) -> None:
    """One least-squares update in place, ``A += (B - A H) (H + D)^-1``, with one H for all rows.

    D is a few rounding errors of H, as a share of its diagonal. H is inverted in float64, being squared in condition.
    So a rank-deficient H is no special case, for which a pseudo-inverse would have the host wait: what H says nothing
    of stays as it was (a proximal step, of which the exact solution is the fixed point, and which never increases the
    error).
    """
    by_kernel = gram.is_cuda and gram.shape[0] <= INVERSE_RANK
    inverse = (inverse_by_kernel if by_kernel else inverse_by_torch)(gram, factor.dtype)
    residual = torch.addmm(rhs, factor, gram.to(factor.dtype), alpha=-1)
    factor.addmm_(residual, inverse)


def inverse_by_kernel(gram: Tensor, dtype: torch.dtype) -> Tensor:
    """(H + D)^-1 of a dtype by Triton's kernel: 11 us where torch's way takes 44.

    (H200, rank 32, `benchmarks/results/als_parts.json`.)
    """
    from sparsetc.decomposition.linear_kernels import invert

    rank = gram.shape[0]
    width = width_of(rank)
    inverse, pivots = torch.empty_like(gram, dtype=dtype), gram.new_empty(rank + 1, width)
    with torch.cuda.device_of(gram):
        invert[(1,)](
            gram, inverse, pivots, rank, _share(rank, dtype), width, least(dtype),
            num_warps=8 if width > 32 else 4, **FUSED,
        )  # fmt: skip
    return inverse


def inverse_by_torch(gram: Tensor, dtype: torch.dtype) -> Tensor:
    """(H + D)^-1 of a dtype by a Cholesky factorization.

    Where that fails, as of products in less than float32, the inverse of a diagonal larger than H, with which a step
    still descends.
    """
    damped = _damped(gram, dtype)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if not gram.is_cuda and not failed:  # which a CPU knows without waiting
        return torch.cholesky_inverse(lower).to(dtype)
    half = torch.linalg.solve_triangular(lower, torch.eye(len(gram), dtype=gram.dtype, device=gram.device), upper=False)
    return torch.where(failed == 0, half.mT @ half, torch.diag(1 / damped.abs().sum(-1))).to(dtype)


def least_squares_by_row(factor: Tensor, grams: Tensor, rhs: Tensor) -> None:
    """Solve each row's least squares in place, ``A[i] = B[i] (H[i] + D[i])^-1``; of minimal norm if H[i] is singular.

    D is as in `least_squares`. A row without observations becomes 0.
    """
    damped = _damped(grams, factor.dtype)
    lower, failed = torch.linalg.cholesky_ex(damped)
    half = torch.linalg.solve_triangular(lower, rhs[..., None], upper=False)
    solved = torch.linalg.solve_triangular(lower.mT, half, upper=True)[..., 0]
    factor.copy_(torch.where(failed[:, None] == 0, solved, rhs / damped.abs().sum(-1)))


def hals(factor: Tensor, gram: Tensor, rhs: Tensor) -> None:
    """A nonnegative update in place, a column at a time (hierarchical alternating least squares); H of either kind.

    Each column is the best nonnegative one for the others as they are, so the error never rises; a column of which H
    says nothing stays as it was. Cichocki & Phan 2009. On a GPU it is one launch.
    """
    by_kernel = factor.is_cuda and factor.shape[1] <= KERNEL_RANK
    (hals_by_kernel if by_kernel else hals_by_columns)(factor, rhs, gram.to(factor.dtype))


Update: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]
"""A change of a factor in place, by its H and its B."""


def hals_by_kernel(factor: Tensor, rhs: Tensor, gram: Tensor) -> None:
    """`hals` of a contiguous factor by Triton's kernel."""
    from sparsetc.decomposition.linear_kernels import update

    rows, rank = factor.shape
    width = width_of(rank)
    block = max(1, KERNEL_ELEMENTS // width)
    grid = (-(-rows // block),)
    with torch.cuda.device_of(factor):
        update[grid](
            factor, rhs.contiguous(), gram.contiguous(), rows, rank, HALS_PASSES,
            width, block, gram.ndim == 3, least(factor.dtype), **FUSED,
        )  # fmt: skip


def hals_by_columns(factor: Tensor, rhs: Tensor, gram: Tensor) -> None:
    """`hals` by torch, the factor and B transposed meanwhile so that a column is contiguous."""
    rows = gram
    columns, wanted = factor.T.contiguous(), rhs.T.contiguous()
    if rows.ndim == 3:
        rows = rows.permute(1, 2, 0).contiguous()
    diagonal = rows.diagonal(dim1=0, dim2=1)  # (rank,) or, one a row, (n, rank)
    step = (1 / diagonal).masked_fill(diagonal <= least(factor.dtype), 0).movedim(-1, 0)
    for _ in range(HALS_PASSES):
        for r in range(columns.shape[0]):
            met = rows[r] @ columns if rows.ndim == 2 else (rows[r] * columns).sum(0)
            columns[r].add_((wanted[r] - met) * step[r]).clamp_(min=0)
    factor.copy_(columns.T)


def fit_of(norm: Tensor, inner: Tensor, square: Tensor) -> Tensor:
    """``1 - |X - M| / |X|`` of the length of X, its inner product with a model M, and the square of M's length."""
    error = norm.square() - 2 * inner + square
    # Of a tensor of zeros the norm is 0, and the fit 1 less that of the model.
    return 1 - error.clamp(min=0).sqrt() / divisor(norm)


def balancing(norms: Tensor, shares: Tensor) -> Tensor:
    """Return (order, rank) multipliers by which a component's columns get the same norm in every free mode.

    Args:
        norms: (order, rank) float64, of the columns.
        shares: (order, 1) float64: 1 over the number of modes that may change for each of these, 0 for others.

    A component that is zero in a mode that may change is left alone.
    """
    mean = torch.xlogy(shares, norms).sum(0).exp()
    return (mean / norms).masked_fill(shares * mean == 0, 1)


def normalized(factors: Sequence[Tensor], free: Sequence[int], p: int = 2) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(weights, factors): columns of the free modes of length 1 in the p-norm, their lengths' products as weights."""
    weights, out = factors[0].new_ones(factors[0].shape[1]), list(factors)
    for mode in free:
        norms = torch.linalg.vector_norm(factors[mode], p, dim=0)
        weights = weights * norms
        out[mode] = factors[mode] / divisor(norms)
    return weights, tuple(out)


def signs_of_largest(columns: Tensor) -> Tensor:
    """(k,) the sign, 1 or -1, of the entry of the largest magnitude in each column of (n, k); 1 where n is 0."""
    if not columns.shape[0]:
        return columns.new_ones(columns.shape[1])
    largest = columns.gather(0, columns.abs().argmax(0, keepdim=True))[0]
    return torch.where(largest < 0, -1, 1).to(columns.dtype)


def divisor(lengths: Tensor) -> Tensor:
    """Lengths to divide by: 1 instead of 0."""
    return lengths.masked_fill(lengths == 0, 1)


def least(dtype: torch.dtype) -> float:
    """Return the squared norm of a component below which its inverse in H may not be a number of the dtype."""
    return 16 * torch.finfo(dtype).tiny


def width_of(rank: int) -> int:
    """The power of two that a kernel pads a rank to."""
    return max(16, 1 << (rank - 1).bit_length())


def _damped(gram: Tensor, dtype: torch.dtype) -> Tensor:
    """A Gram matrix made positive definite, whatever the rounding errors of a dtype in it."""
    damped = gram.clone()
    damped.diagonal(dim1=-2, dim2=-1).mul_(1 + _share(gram.shape[-1], dtype)).clamp_(min=least(dtype))
    return damped


def _share(rank: int, dtype: torch.dtype) -> float:
    """Return the largest share of its diagonal that H can lack to be positive definite, by rounding errors.

    By its own, of the dtype, and by those of inverting it in float64, which steps without exchanges let grow.
    """
    return 4 * rank * max(torch.finfo(dtype).eps, 1e-13)
