"""`tucker`: a Tucker decomposition by higher-order orthogonal iteration (HOOI).

In: a sparse tensor and a rank a mode. Out: a `Tucker` model. De Lathauwer, De Moor & Vandewalle 2000; each factor is
the leading left singular vectors of a TTM chain, which is one einsum, and the core what the last of them leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from sparsetc.decomposition import checks
from sparsetc.decomposition.initial import begun, leading
from sparsetc.decomposition.kernels import chain_kernels
from sparsetc.decomposition.linear import divisor
from sparsetc.decomposition.loop import Rows, column, convergence_test, iterate, undisturbed
from sparsetc.decomposition.models import Tucker
from sparsetc.errors import DecompositionError
from sparsetc.options import Settings
from sparsetc.support import Ints
from sparsetc.support.checks import check_memory
from sparsetc.support.entry import entry_point
from sparsetc.tensor.sparse_tensor import SparseTensor


@entry_point
@undisturbed
def tucker(
    x: Any,
    ranks: int | Sequence[int],
    *,
    n_iter_max: int = 100,
    tol: float | None = 1e-8,
    init: str | Tucker | Sequence[Any] = "nvecs",
    fixed_modes: Iterable[int] | None = None,
    callback: Callable[[Tucker, float], Any] | None = None,
    progress: bool | None = None,
    random_state: int | torch.Generator | None = None,
    **settings: Unpack[Settings],
) -> Tucker:
    """Decompose a sparse tensor into a core and a matrix of orthonormal columns a mode, by orthogonal iteration.

    Args:
        x: as of `cp_als`.
        ranks: sizes of the core, one a mode or one for all; none above the mode's size or the product of the others.
        n_iter_max: sweeps over the modes, at most.
        tol: as of `cp_als`.
        init: ``"nvecs"`` (leading vectors of the unfoldings: HOSVD), ``"random"``, or a model to go on from: a
            `Tucker`, a TuckerTensor of tensorly, a ttensor of pyttb or ``(core, factors)``, of which the core is not
            read, or factors.
        fixed_modes: modes whose factor `init` gives, of orthonormal columns, and which stays as it is.
        callback: called as ``callback(model, error)`` after each sweep with a copy and ``1 - fit``; True stops.
        progress: a bar with the fit, by tqdm (extra ``progress``): True from the start, None on a terminal after two
            seconds, False never.
        random_state: a seed, or a `torch.Generator`; torch's own by default.
        settings: as for `einsum`.

    Returns:
        The model after the last sweep; stopped and continued as those of `cp_als`. `torch.linalg.eigh` synchronises
        with the host, so each mode of a sweep waits for the GPU once.

    Raises:
        DecompositionError, ShapeError, DtypeError, DeviceError, FormatError, OutOfMemoryError: before any sweep, or,
            of a chain that would not fit in memory, in the first.

    Examples:
        >>> model = stc.decomposition.tucker(stc.full((3, 4, 5), 2.0), 1)
        >>> model.core.shape, round(model.fit, 3)
        (torch.Size([1, 1, 1]), 1.0)
    """
    sparse = checks.tensor(x)
    sizes, free = _ranks(ranks, sparse), checks.free_modes(fixed_modes, sparse.order)
    n_iter_max = checks.number(n_iter_max, 0, "n_iter_max")
    numbers = sum(n * rank for n, rank in zip(sparse.shape, sizes, strict=True)) + 2 * prod(sizes)
    check_memory(f"factors and a core of ranks {sizes}", numbers * sparse.dtype.itemsize, sparse.device)

    def model(rows: Rows, stopped: str) -> Tucker:
        if not rows:
            project(chain(free[-1]))
        return Tucker(core.clone(), tuple(f.clone() for f in factors), column(rows, 0), stopped)

    checks.callback(callback)
    tol = checks.level(tol, "tol")
    factors = _start(sparse, sizes, init, checks.generator(random_state), free)
    chains = chain_kernels(sparse, sizes, free, **settings)
    norm = torch.linalg.vector_norm(sparse.values, dtype=torch.float64)
    core = sparse.values.new_zeros(sizes)
    measures = torch.zeros(1, dtype=torch.float64, device=sparse.device)

    def chain(mode: int) -> Tensor:
        """Return (size, product of the other ranks): x times the factors of all other modes, unfolded along `mode`."""
        return chains[mode](factors).flatten(1)

    def project(unfolded: Tensor) -> None:
        """The core, from the last free mode's chain, and the fit: of orthonormal factors, |M| is the core's norm."""
        mode = free[-1]
        others = [r for m, r in enumerate(sizes) if m != mode]
        core.copy_((factors[mode].T @ unfolded).reshape(-1, *others).movedim(0, mode))
        square = norm.square() - core.square().sum(dtype=torch.float64)
        measures.copy_(1 - square.clamp(min=0).sqrt() / divisor(norm))

    def sweep() -> None:
        """Update each free mode by the leading vectors of its chain, then the core and the fit."""
        for mode in free:
            unfolded = chain(mode)
            factors[mode].copy_(leading(unfolded, factors[mode]))
        project(unfolded)

    title = f"Tucker, rank {' x '.join(map(str, sizes))}"
    converged = convergence_test(tol, sparse.dtype)
    return iterate(sweep, measures, model, n_iter_max, converged, callback, progress, title, capture=False)


def _ranks(rank: Any, x: SparseTensor) -> Ints:
    listed = list(rank) if isinstance(rank, Iterable) else [rank] * x.order
    if len(listed) != x.order:
        raise DecompositionError(f"ranks must be an integer or {x.order} of them, one a mode, found {rank!r:.80}")
    ranks = tuple(checks.number(r, 1, f"the rank of mode {m}") for m, r in enumerate(listed))
    for mode, (r, size) in enumerate(zip(ranks, x.shape, strict=True)):
        others = prod(ranks) // r
        if r > size:
            raise DecompositionError(f"the rank of mode {mode} is {r}, above its size {size}")
        if r > others:
            raise DecompositionError(
                f"the rank of mode {mode} is {r}, above the product {others} of the others, so part of the "
                "core would be 0"
            )
    return ranks


def _start(
    x: SparseTensor, ranks: Sequence[int], init: Any, random: torch.Generator | None, free: Sequence[int]
) -> list[Tensor]:
    """(size, rank) factors of orthonormal columns, to be changed in place."""
    _, factors = begun(x, ranks, init, random, free, "Tucker", draw=torch.randn)
    if isinstance(init, str) and init == "nvecs":
        return factors
    for mode, factor in enumerate(factors):
        if mode in free:
            factors[mode] = torch.linalg.qr(factor).Q
        else:
            gram = factor.T @ factor
            off = (gram - torch.eye(factor.shape[1]).to(gram)).abs().max()
            if not bool(off < torch.finfo(factor.dtype).eps ** 0.5):
                raise DecompositionError(
                    f"init's factor of mode {mode} is fixed, so its columns must be orthonormal (torch.linalg.qr)"
                )
    return factors
