"""The start of a decomposition: random factors, leading vectors of the unfoldings, or a model.

In: a checked tensor and what the user gave as ``init``. Out: factors of the decomposition's own, all weights in them.

Leading left singular vectors, which a sweep of `tucker` asks for too, are orthonormal columns, by falling singular
values, each with its entry of the largest magnitude positive. They are eigenvectors of a Gram matrix in float64, or,
where both sides are long, of iterations on a subspace (Saad, Numerical Methods for Large Eigenvalue Problems, 2011,
chapter 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetc.api import compile, einsum
from sparsetc.decomposition import checks
from sparsetc.decomposition.linear import signs_of_largest
from sparsetc.errors import DecompositionError
from sparsetc.support.checks import check_memory
from sparsetc.tensor.coords import numbered, of_modes
from sparsetc.tensor.sparse_tensor import SparseTensor

STARTS = ("random", "nvecs")
"""Starts that have a name."""
GRAM = 1024
"""The largest Gram matrix that is made, a second of a CPU core to decompose in full; above, iterations serve."""
STEPS = 20
"""Iterations on a subspace, from a random start."""
WARM_STEPS = 3
"""Iterations from the vectors of an earlier sweep."""
SPARE = 8
"""Columns besides those wanted that make a random start converge."""


def begun(
    x: SparseTensor,
    ranks: Sequence[int],
    init: Any,
    random: torch.Generator | None,
    free: Sequence[int],
    kind: str,
    starts: Sequence[str] = STARTS,
    draw: Callable[..., Tensor] = torch.rand,
) -> tuple[Any, list[Tensor]]:
    """Return weights or a core (None if there are none) and copies of the factors, to be changed in place.

    Args:
        x: the tensor.
        ranks: columns of each factor; of ``"nvecs"`` there are no more than rows.
        init: as the user gave it.
        random: what draws.
        free: the modes whose factors may change.
        kind: of model.
        starts: those that it has.
        draw: torch's function for ``"random"``.

    Raises:
        DecompositionError, ShapeError, DtypeError, DeviceError, FormatError: of a start that is none.
    """
    if not isinstance(init, str):
        return checks.model(init, x, ranks, kind)
    if init not in starts:
        wanted = ", ".join((*map(repr, starts), f"a {kind} model or a list of factors"))
        raise DecompositionError(f"init must be {wanted}, found {init!r:.80}")
    if len(free) < x.order:
        raise DecompositionError(f"fixed_modes keeps factors of init, which must give them, found {init!r}")
    sizes = list(zip(x.shape, ranks, strict=True))
    if init == "random":
        return None, [drawn(draw, n, rank, x, random) for n, rank in sizes]
    return None, [leading_vectors(x, mode, min(rank, n), random) for mode, (n, rank) in enumerate(sizes)]


def cp_factors(
    x: SparseTensor, rank: int, init: Any, random: torch.Generator | None, free: Sequence[int], starts: Sequence[str]
) -> list[Tensor]:
    """Return (size, rank) factors to change in place; modes that are not `free` keep the factors given.

    Raises:
        DecompositionError, ShapeError, DtypeError, DeviceError, FormatError: of a start that is none.
        OutOfMemoryError: factors of this rank, and their float64 Gram matrices, would pass the memory limit.
    """
    nbytes = rank * (sum(x.shape) * x.dtype.itemsize + x.order * rank * 8)
    check_memory(f"factors of rank {rank:,}, and their Gram matrices,", nbytes, x.device)
    weights, factors = begun(x, [rank] * x.order, init, random, free, "CP", starts)
    for mode, vectors in enumerate(factors):  # a mode has no more leading vectors than its size
        size, count = vectors.shape
        if count < rank:  # random columns of about their length
            more = drawn(torch.rand, size, rank - count, x, random) / size**0.5
            factors[mode] = torch.cat((vectors, more), 1)
    if weights is not None:  # tensorly has None for ones
        scales = checks.matrix(weights, (rank,), x, "init's weights")
        lengths = torch.where(scales == 0, 1, scales.abs() ** (1 / len(free)))
        for mode in free:
            factors[mode].mul_(lengths)
        # A component that is 0 in one mode stays as it is in the others, from which a run goes on.
        zero = torch.stack([(factors[mode] == 0).all(0) for mode in free]).any(0)
        factors[free[0]].mul_(torch.where(zero, 1, scales.sign()))
    return factors


# -- leading vectors ---------------------------------------------------------------------------------------------------


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
    unfolded = _unfolded(x, mode)  # a plan that options name is for einsums of x, and may not apply to this
    size, columns = unfolded.shape
    if size <= GRAM:
        gram: Any = einsum("ij,kj->ik", unfolded, unfolded, output="dense", plan="auto")
        return signed(last_vectors(gram.double(), count).to(x.dtype))
    width = min(size, count + SPARE)
    start = drawn(torch.randn, size, width, x, random)
    # A few products take less time than to find out by which plan (H200, Uber: 0.85 s, without a record).
    back: Any = compile("ij,ir->jr", unfolded, start, plan="rows")
    forth: Any = compile("ij,jr->ir", unfolded, start.new_empty(columns, width), plan="rows")
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
