"""Leading left singular vectors: of a matrix with many columns, and of a sparse tensor's unfoldings.

In: a dense matrix, or a sparse tensor and a mode. Out: orthonormal columns, those of the largest singular values first,
each with its entry of the largest magnitude positive.

They are eigenvectors of a Gram matrix in float64, all of which are computed only where fewer will not do. A sweep has
the vectors of the last one, from which a few block Krylov steps go (Saad, Numerical Methods for Large Eigenvalue
Problems, 2011, chapter 6). What they find is taken where it is proven to be what a full decomposition would give, to
the rounding of the Gram matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparsetc.api import compile, einsum
from sparsetc.decomposition.linear import divisor, signs_of_largest
from sparsetc.tensor.coords import numbered
from sparsetc.tensor.sparse_tensor import SparseTensor

GRAM = 1024
"""The largest Gram matrix that is made, a second of a CPU core to decompose in full; above, iterations serve."""
STEPS = 20
"""Such iterations from a random start."""
WARM_STEPS = 3
"""Such iterations from the vectors of an earlier sweep."""
SPARE = 8
"""Columns besides those wanted that make a random start converge."""
FULL = 128
"""The largest Gram matrix that is always decomposed in full. Not measured on a GPU."""
HOST = 32
"""The largest one that is decomposed by the host, which waits for a decomposition anyway. Not measured on a GPU."""
BLOCKS = 3
"""Blocks of a Krylov space: the vectors, and they times the square of the matrix, once and twice. (Uber, rank 8 in all
modes, float32, of 512 rows: 1 or 2 steps of three blocks, 2 to 6 of two; 9 to 13 ms of a CPU core, 8 of them for the
square, where a full decomposition takes 36.)"""
KRYLOV_STEPS = 8
"""Steps after which all eigenvectors are computed: of the same in float64 the first took 7, and others 3 to 5."""
EXACT = 4
"""Rounding errors of the largest eigenvalue, of the dtype that the matrix was computed in, up to which a residual is 0;
beside those of float64, in which it is computed here, of as many elements."""
ROUNDING = 1e-12
"""What part of the sum of all fourth powers of eigenvalues is not known of what is left of it."""

AUTO, ROWS = "auto", "rows"
"""Plans of einsums of unfoldings; one that options name is for those of the tensor, and may not apply to these. A few
products take less time than to find out by which plan they take least (H200, Uber: 0.85 s, without a record)."""


def leading(matrix: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """(n, k) leading left singular vectors of a dense (n, p) matrix, p >= k.

    Args:
        matrix: of float32 or float64.
        start: (n, k) orthonormal columns, best near to the vectors; where both sides are long, these are found by
            iterations from them, which take the model no worse than it was.
    """
    rows, columns = matrix.shape
    eps = torch.finfo(matrix.dtype).eps
    if rows <= min(columns, GRAM):
        return signed(dominant((matrix @ matrix.T).double(), start.double(), eps).to(matrix.dtype))
    if columns <= GRAM:
        inside = dominant((matrix.T @ matrix).double(), (matrix.T @ start).double(), eps).to(matrix.dtype)
        return signed(torch.linalg.qr(matrix @ inside).Q)
    return signed(_iterated(lambda u: matrix @ (matrix.T @ u), start, WARM_STEPS))


def leading_vectors(x: SparseTensor, mode: int, count: int, random: torch.Generator | None) -> torch.Tensor:
    """(size, count) leading left singular vectors of x unfolded along a mode: a sparse matrix with a column a fiber."""
    unfolded = _unfolded(x, mode)
    size, columns = unfolded.shape
    if size <= GRAM:
        gram = einsum("ij,kj->ik", unfolded, unfolded, output="dense", plan=AUTO)
        assert isinstance(gram, torch.Tensor)
        return signed(last_vectors(gram.double(), count).to(x.dtype))
    width = min(size, count + SPARE)
    device = "cpu" if random is None else random.device
    start = torch.randn(size, width, generator=random, dtype=x.dtype, device=device).to(x.device)
    back = compile("ij,ir->jr", unfolded, start, plan=ROWS)
    forth = compile("ij,jr->ir", unfolded, start.new_empty(columns, width), plan=ROWS)

    def product(basis: torch.Tensor) -> torch.Tensor:
        folded = back(basis)
        assert isinstance(folded, torch.Tensor)
        found = forth(folded)
        assert isinstance(found, torch.Tensor)
        return found

    return signed(_iterated(product, torch.linalg.qr(start).Q, STEPS)[:, :count])


def signed(vectors: torch.Tensor) -> torch.Tensor:
    """Columns whose entry of the largest magnitude is positive."""
    return vectors * signs_of_largest(vectors)


def _iterated(product: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor, steps: int) -> torch.Tensor:
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
    found = numbered([x.coords[m] for m in others], [x.shape[m] for m in others], x.nnz, x.coords[0])
    coords = torch.stack((x.coords[mode], found.rank))
    return SparseTensor(coords, x.values, (x.shape[mode], max(1, found.count)), check=False)


# -- eigenvectors of a Gram matrix ------------------------------------------------------------------------------------


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
    for _ in range(KRYLOV_STEPS):
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
