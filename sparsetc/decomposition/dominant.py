"""Eigenvectors of the largest eigenvalues of a Gram matrix: all of them are computed only where fewer will not do.

In: a Gram matrix in float64, and vectors near those wanted, if there are any. Out: orthonormal columns, those of the
largest eigenvalues first. A sweep has the vectors of the last one, from which a few block Krylov steps go (Saad,
Numerical Methods for Large Eigenvalue Problems, 2011, chapter 6). What they find is taken where it is proven to be what
a full decomposition would give, to the rounding of the Gram matrix.
"""

from __future__ import annotations

import torch

from sparsetc.decomposition.linear import divisor

FULL = 128
"""The largest Gram matrix that is always decomposed in full. Not measured on a GPU."""
HOST = 32
"""The largest one that is decomposed by the host, which waits for a decomposition anyway. Not measured on a GPU."""
BLOCKS = 3
"""Blocks of a Krylov space: the vectors, and they times the square of the matrix, once and twice. (Uber, rank 8 in all
modes, float32, of 512 rows: 1 or 2 steps of three blocks, 2 to 6 of two; 9 to 13 ms of a CPU core, 8 of them for the
square, where a full decomposition takes 36.)"""
STEPS = 8
"""Steps after which all eigenvectors are computed: of the same in float64 the first took 7, and others 3 to 5."""
EXACT = 4
"""Rounding errors of the largest eigenvalue, of the dtype that the matrix was computed in, up to which a residual is 0;
beside those of float64, in which it is computed here, of as many elements."""
ROUNDING = 1e-12
"""What part of the sum of all fourth powers of eigenvalues is not known of what is left of it."""


def last_vectors(gram: torch.Tensor, count: int) -> torch.Tensor:
    """(n, count) eigenvectors of the largest eigenvalues of a symmetric (n, n) matrix, the largest first."""
    return _decomposed(gram)[1][:, -count:].flip(1)


def dominant(gram: torch.Tensor, start: torch.Tensor, eps: float) -> torch.Tensor:
    """(n, k) what `last_vectors` gives, found from vectors near to it.

    Args:
        gram: (n, n), symmetric and positive semidefinite, float64.
        start: (n, k) columns that span about the same space, or any; they need not be orthonormal.
        eps: the rounding of the dtype that the matrix was computed in.
    """
    n, count = start.shape
    found = None if n <= FULL or 2 * BLOCKS * count > n else _from(gram, start, eps)
    return last_vectors(gram, count) if found is None else found


def _from(gram: torch.Tensor, start: torch.Tensor, eps: float) -> torch.Tensor | None:
    """The vectors, where steps from a start find them and nothing larger is left; None elsewhere.

    Once the vectors are eigenvectors, the other eigenvalues are those of the matrix without them. The fourth powers of
    all add up to the square of the Frobenius norm of the matrix' square; so none of the others is above the fourth
    root of what the eigenvalues found lack of that.
    """
    square = gram @ gram
    whole = square.square().sum()
    vectors, count = start, start.shape[1]
    least = EXACT * (eps + len(gram) ** 0.5 * torch.finfo(gram.dtype).eps)
    for _ in range(STEPS):
        blocks = [_scaled(vectors)]
        while len(blocks) < BLOCKS:
            blocks.append(_scaled(square @ blocks[-1]))
        basis = torch.linalg.qr(torch.cat(blocks, 1)).Q
        product = gram @ basis
        values, turned = _decomposed(basis.T @ product)
        values, turned = values[-count:].flip(0), turned[:, -count:].flip(1)
        vectors = basis @ turned
        residual = torch.linalg.vector_norm(product @ turned - vectors * values, dim=0).max()
        left = (1 + ROUNDING) * whole - values.pow(4).sum()
        exact, largest = torch.stack((residual <= least * values[0], left <= values[-1].pow(4))).tolist()
        if exact:
            return vectors if largest else None
    return None


def _scaled(columns: torch.Tensor) -> torch.Tensor:
    """Columns of length 1, or 0."""
    return columns / divisor(torch.linalg.vector_norm(columns, dim=0))


def _decomposed(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues, rising, and eigenvectors of a symmetric matrix."""
    if matrix.is_cuda and matrix.shape[0] <= HOST:
        values, vectors = torch.linalg.eigh(matrix.cpu())
        return values.to(matrix.device), vectors.to(matrix.device)
    found = torch.linalg.eigh(matrix)
    return found.eigenvalues, found.eigenvectors
