"""Leading left singular vectors: of a matrix with many columns, and of a sparse tensor's unfoldings.

In: a dense matrix, or a sparse tensor and a mode. Out: orthonormal columns, those of the largest singular values first,
each with its entry of the largest magnitude positive.

They are eigenvectors of a Gram matrix in float64, or, where both sides are long, of iterations on a subspace (Saad,
Numerical Methods for Large Eigenvalue Problems, 2011, chapter 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsetc.api import compile, einsum
from sparsetc.decomposition.linear import signs_of_largest
from sparsetc.tensor.coords import numbered, of_modes
from sparsetc.tensor.sparse_tensor import SparseTensor

GRAM = 1024
"""The largest Gram matrix that is made, a second of a CPU core to decompose in full; above, iterations serve."""
STEPS = 20
"""Such iterations from a random start."""
WARM_STEPS = 3
"""Such iterations from the vectors of an earlier sweep."""
SPARE = 8
"""Columns besides those wanted that make a random start converge."""
AUTO, ROWS = "auto", "rows"
"""Plans of einsums of unfoldings; one that options name is for those of the tensor, and may not apply to these. A few
products take less time than to find out by which plan they take least (H200, Uber: 0.85 s, without a record)."""


def leading(matrix: Tensor, start: Tensor) -> Tensor:
    """(n, k) leading left singular vectors of a dense (n, p) matrix, p >= k.

    Args:
        matrix: of float32 or float64.
        start: (n, k) orthonormal columns, from which iterations go where both sides are long; these take the model no
            worse than it was.
    """
    rows, columns = matrix.shape
    if rows <= min(columns, GRAM):
        return signed(last_vectors((matrix @ matrix.T).double(), start.shape[1]).to(matrix.dtype))
    if columns <= GRAM:
        inside = last_vectors((matrix.T @ matrix).double(), start.shape[1]).to(matrix.dtype)
        return signed(torch.linalg.qr(matrix @ inside).Q)
    return signed(_iterated(lambda u: matrix @ (matrix.T @ u), start, WARM_STEPS))


def leading_vectors(x: SparseTensor, mode: int, count: int, random: torch.Generator | None) -> Tensor:
    """(size, count) leading left singular vectors of x unfolded along a mode: a sparse matrix with a column a fiber."""
    unfolded = _unfolded(x, mode)
    size, columns = unfolded.shape
    if size <= GRAM:
        gram: Any = einsum("ij,kj->ik", unfolded, unfolded, output="dense", plan=AUTO)
        return signed(last_vectors(gram.double(), count).to(x.dtype))
    width = min(size, count + SPARE)
    start = drawn(torch.randn, size, width, x, random)
    back: Any = compile("ij,ir->jr", unfolded, start, plan=ROWS)
    forth: Any = compile("ij,jr->ir", unfolded, start.new_empty(columns, width), plan=ROWS)
    return signed(_iterated(lambda basis: forth(back(basis)), torch.linalg.qr(start).Q, STEPS)[:, :count])


def drawn(draw: Callable[..., Tensor], size: int, rank: int, x: SparseTensor, random: torch.Generator | None) -> Tensor:
    """(size, rank) of x's dtype and device, by torch's function: on the generator's device, the CPU without one.

    So a seed gives one start wherever the tensor is.
    """
    device = "cpu" if random is None else random.device
    return draw(size, rank, generator=random, dtype=x.dtype, device=device).to(x.device)


def signed(vectors: Tensor) -> Tensor:
    """Columns whose entry of the largest magnitude is positive."""
    return vectors * signs_of_largest(vectors)


def _iterated(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """Subspace iterations on a symmetric product, then the eigenvectors within the subspace (Rayleigh-Ritz)."""
    basis = start
    for _ in range(steps):
        basis = torch.linalg.qr(product(basis)).Q
    within = (basis.T @ product(basis)).double()
    turned = last_vectors((within + within.T) / 2, basis.shape[1]).to(basis.dtype)
    return basis @ turned


def _unfolded(x: SparseTensor, mode: int) -> SparseTensor:
    """(size, distinct fibers) with x's values, the other modes' coordinates numbered."""
    x = x.expand_dense() if x.dense_order else x
    others = [m for m in range(x.order) if m != mode]
    fibers = numbered(*of_modes(x.coords, x.shape, others), x.nnz, x.coords[0])
    coords = torch.stack((x.coords[mode], fibers.rank))
    return SparseTensor(coords, x.values, (x.shape[mode], max(1, fibers.count)), check=False)


def last_vectors(gram: Tensor, count: int) -> Tensor:
    """(n, count) eigenvectors of the largest eigenvalues of a symmetric (n, n) matrix, the largest first."""
    return torch.linalg.eigh(gram).eigenvectors[:, -count:].flip(1)
