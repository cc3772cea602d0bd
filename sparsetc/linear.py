"""Systems of linear equations with a sparse symmetric matrix, by conjugate gradients.

In: a SparseTensor and right sides. Out: the solutions, differentiable by the adjoint system. Other solvers are scipy's,
which take `SparseTensor.as_linear_operator`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from sparsetc.api import compile, einsum
from sparsetc.contraction.request import as_operand, check_operand
from sparsetc.errors import DtypeError, FormatError, ShapeError
from sparsetc.options import Settings
from sparsetc.support.checks import found_shape
from sparsetc.support.entry import warn
from sparsetc.tensor.sparse_tensor import SparseTensor

Steps = tuple[float, int, Any]
"""The stopping rule of conjugate gradients, tol and n_iter_max, and the settings of their products."""


def solve(
    a: Any, b: Tensor, *, tol: float = 1e-6, n_iter_max: int | None = None, **settings: Unpack[Settings]
) -> Tensor:
    """Solve ``a @ x = b`` by conjugate gradients, preconditioned by the diagonal (Jacobi).

    Differentiable in b and in the entries of a: the backward solves once more, with the gradient of x on the right.

    Args:
        a: sparse (n, n), symmetric or Hermitian, and positive definite. Symmetry is not checked; a warning is
            given if the result does not solve the system.
        b: (n,), or (n, k) for k right-hand sides, which are solved together.
        tol: stop when the residual's norm is below ``tol`` times the norm of b, in each column.
        n_iter_max: the most steps, 10 n by default. A warning says if they were not enough.
        settings: of `einsum`, for the products.

    Returns:
        x, of the shape of b.

    Raises:
        ShapeError: the matrix is not square, b does not fit, or tol or n_iter_max is negative.
        FormatError: the matrix turns out not to be positive definite.
        DtypeError: integers, or values of 16 bits.

    Examples:
        >>> stc.solve(2 * stc.eye(3), torch.tensor([2.0, 4.0, 6.0]))
        tensor([1., 2., 3.])
    """
    sparse = None if isinstance(a, Tensor) and a.layout == torch.strided else SparseTensor.coerce(a)
    if sparse is None or sparse.order != 2 or sparse.shape[0] != sparse.shape[1]:
        raise ShapeError(f"solve takes a sparse matrix with as many rows as columns, found {a!r:.200}")
    if sparse.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        raise DtypeError(f"solve takes float32, float64 and complex values, found {sparse.dtype}")
    right = as_operand(b, "solve: b")
    if not isinstance(right, Tensor) or right.ndim not in (1, 2) or right.shape[0] != sparse.shape[0]:
        rows = sparse.shape[0]
        raise ShapeError(f"solve: b must have shape ({rows},) or ({rows}, k), found {found_shape(right)}")
    check_operand(right, "solve: b", sparse.dtype, sparse.device)
    if not tol >= 0 or (n_iter_max is not None and not n_iter_max >= 0):
        raise ShapeError(f"solve takes tol and n_iter_max from 0 on, found {tol!r:.80} and {n_iter_max!r:.80}")
    sparse = sparse.expand_dense().coalesce()
    steps = tol, 10 * sparse.shape[0] if n_iter_max is None else n_iter_max, settings
    columns = right if right.ndim == 2 else right[:, None]
    solution: Tensor = _Solve.apply(sparse.values, columns, sparse.pattern, steps)  # type: ignore[no-untyped-call]
    return solution if right.ndim == 2 else solution[:, 0]


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor, b: Tensor, pattern: Any, steps: Steps) -> Tensor:  # type: ignore[override]
        return _conjugate_gradients(SparseTensor._make(pattern, values), b, steps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, _, ctx.pattern, ctx.steps = inputs
        ctx.save_for_backward(values, output)
        ctx.save_for_forward(values, output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], values: Tensor, b: Tensor, *others: Any) -> tuple[Tensor, int]:
        """Solve the systems of a batch one after the other, as each has a number of steps of its own."""
        inputs = [
            [tensor] * info.batch_size if dim is None else tensor.unbind(dim)
            for tensor, dim in zip((values, b), in_dims, strict=False)
        ]
        return torch.stack([_Solve.apply(*each, *others) for each in zip(*inputs, strict=True)]), 0

    @staticmethod
    def jvp(ctx: Any, of_values: Tensor, of_b: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        values, solution = ctx.saved_tensors
        moved: Any = einsum("ij,jk->ik", SparseTensor._make(ctx.pattern, of_values), solution, output="dense")
        return _Solve.apply(values, of_b - moved, ctx.pattern, ctx.steps)  # type: ignore[no-any-return, no-untyped-call]

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        values, solution = ctx.saved_tensors
        adjoint: Tensor = _Solve.apply(values, above, ctx.pattern, ctx.steps)  # type: ignore[no-untyped-call]
        of_values = None
        if ctx.needs_input_grad[0]:
            ones = SparseTensor._make(ctx.pattern, torch.ones_like(values))
            of_values = -einsum("ij,ik,jk->ij", ones, adjoint, solution.conj(), output="sparse").values
        return of_values, adjoint if ctx.needs_input_grad[1] else None, None, None


def _conjugate_gradients(a: SparseTensor, b: Tensor, steps: Steps) -> Tensor:
    """Solve for the columns of b together, each with step lengths of its own (Hestenes and Stiefel 1952)."""
    tol, n_iter_max, settings = steps
    diagonal = a.diagonal().to_dense().real[:, None]
    if not bool((diagonal > 0).all()):
        raise FormatError("solve takes a positive definite matrix, and this one's diagonal is not positive")
    if not b.numel():
        return torch.zeros_like(b)
    product: Any = compile("ij,jk->ik", a, b, output="dense", **settings)
    scale = b.abs().amax(0)  # squares of small numbers are 0
    b = b / scale.masked_fill(scale == 0, 1)
    solution, residual = torch.zeros_like(b), b.clone()
    direction = scaled = residual / diagonal
    goal = tol * torch.linalg.vector_norm(b, dim=0)
    inner = _inner(residual, scaled)
    for number in range(n_iter_max + 1):
        if number == n_iter_max or not bool((torch.linalg.vector_norm(residual, dim=0) > goal).any()):
            break
        image = product(direction)
        curvature = _inner(direction, image)
        if bool((curvature < 0).any()):
            raise FormatError("solve takes a positive definite matrix, and this one is not, or singular: x* a x < 0")
        length = inner / curvature.masked_fill(curvature == 0, 1)  # 0 of a column that is solved exactly
        solution = solution + length * direction
        residual = residual - length * image
        scaled = residual / diagonal
        before, inner = inner, _inner(residual, scaled)
        direction = scaled + inner / before.masked_fill(before == 0, 1) * direction
    carried = torch.linalg.vector_norm(residual, dim=0)
    left = torch.linalg.vector_norm(b - product(solution), dim=0) / torch.linalg.vector_norm(b, dim=0)
    far = left > 100 * max(tol, torch.finfo(left.dtype).eps)  # the two differ unless the matrix is symmetric
    if bool((far | (carried > goal)).any()):
        said = f"solve: after {number} steps the residual is {float(left.max()):.2g} of b, above tol"
        warn(f"{said}; take more, unless the matrix is not symmetric")
    return solution * scale


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """The inner product of each two columns, a real number here."""
    return (left.conj() * right).sum(0).real
