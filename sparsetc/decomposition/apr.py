"""`cp_apr`: a nonnegative CP decomposition of counts, by alternating Poisson regression with multiplicative updates.

In: a sparse tensor of counts and a rank. Out: a `CP` model. Chi & Kolda 2012, algorithm CP-APR MU. All that meets the
tensor is two einsums: the model at its nonzeros, and an MTTKRP of their ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from sparsetc.decomposition import checks
from sparsetc.decomposition.initial import cp_factors
from sparsetc.decomposition.kernels import mode_kernels, model_kernel
from sparsetc.decomposition.linear import divisor, fit_of, normalized
from sparsetc.decomposition.loop import Rows, column, iterate, undisturbed
from sparsetc.decomposition.models import CP
from sparsetc.errors import FormatError
from sparsetc.options import Settings
from sparsetc.support.entry import entry_point


@entry_point
@undisturbed
def cp_apr(
    x: Any,
    rank: int,
    *,
    n_iter_max: int = 1000,
    n_inner_max: int = 10,
    tol: float | None = 1e-4,
    init: str | CP | Sequence[Any] = "random",
    epsilon: float = 1e-10,
    kappa: float = 0.01,
    kappa_tol: float = 1e-10,
    callback: Callable[[CP, float], Any] | None = None,
    progress: bool | None = None,
    random_state: int | torch.Generator | None = None,
    **settings: Unpack[Settings],
) -> CP:
    """Decompose a sparse tensor of counts into nonnegative components, by the likelihood of Poisson variables.

    Args:
        x: as of `cp_als`, no value below 0.
        rank: the number of components.
        n_iter_max: outer iterations, each over all modes, at most.
        n_inner_max: multiplicative updates of a mode in each, at most.
        tol: the violation of the KKT conditions below which the updates of a mode end. The run ends after an outer
            iteration in which every mode was below it at once; never for 0 or None. On a GPU this is looked at every 8
            outer iterations.
        init: ``"random"`` (uniform), or a nonnegative model to go on from, as of `cp_als`.
        epsilon: lower bound of the model's values at nonzeros, by which counts are divided.
        kappa: value for entries that are 0 although the likelihood rises there, as a share of their component.
        kappa_tol: the share of its component below which an entry counts as 0.
        callback: called as ``callback(model, error)`` after each outer iteration with a copy and ``1 - fit``; True
            stops.
        progress: a bar with the fit, by tqdm (extra ``progress``): True from the start, None on a terminal after two
            seconds, False never.
        random_state: a seed, or a `torch.Generator`; torch's own by default.
        settings: as for `einsum`.

    Returns:
        The model: columns that add up to 1, and weights. `CP.log_likelihoods` and `CP.fits` have a number each
        iteration. Stopped and continued as those of `cp_als`.

    Raises:
        DecompositionError, ShapeError, DtypeError, DeviceError, FormatError, OutOfMemoryError: before any iteration.

    Examples:
        >>> model = stc.decomposition.cp_apr(stc.full((3, 4, 5), 2.0), 1, random_state=0)
        >>> model.weights
        tensor([120.0000])
    """
    sparse = checks.tensor(x, single=True)
    if bool((sparse.values < 0).any()):
        raise FormatError("x has values below 0, which no counts are; see cp_als")
    rank = checks.number(rank, 1, "the rank")
    n_iter_max = checks.number(n_iter_max, 0, "n_iter_max")

    def model(rows: Rows, stopped: str) -> CP:
        return CP(weights.clone(), tuple(f.clone() for f in factors), column(rows, 0), stopped, column(rows, 1))

    checks.callback(callback)
    n_inner_max = checks.number(n_inner_max, 1, "n_inner_max")
    tol, epsilon = checks.level(tol, "tol"), checks.level(epsilon, "epsilon")
    kappa, kappa_tol = checks.level(kappa, "kappa"), checks.level(kappa_tol, "kappa_tol")
    modes = tuple(range(sparse.order))
    start = cp_factors(sparse, rank, init, checks.generator(random_state), modes, ("random",))
    checks.nonnegative(start)
    weights, factors = normalized(start, modes, p=1)
    norm = torch.linalg.vector_norm(sparse.values, dtype=torch.float64)
    kernels = mode_kernels(sparse, rank, modes, **settings)
    masked: Any = model_kernel(sparse.with_values(torch.ones_like(sparse.values)), rank, **settings)
    measures = torch.zeros(3, dtype=torch.float64, device=sparse.device)

    def at_nonzeros(*matrices: Tensor) -> Tensor:
        """(nnz,) the model, no less than epsilon."""
        entries: Tensor = masked(*matrices).values
        return entries.clamp(min=epsilon)

    def updated(mode: int, factor: Tensor) -> Tensor:
        """Update a factor and the weights in place; return how far the factor was from the KKT conditions before.

        Once they hold, the factor stays as it is. A GPU is not asked whether they do, but goes through all updates.
        """
        factor.mul_(weights)
        first = holds = torch.zeros((), dtype=torch.bool, device=factor.device)
        for number in range(n_inner_max):
            phi = kernels[mode](factors, sparse.values / at_nonzeros(*factors))
            violation = torch.linalg.vector_norm(torch.minimum(factor, 1 - phi), torch.inf)
            holds = holds | (violation < tol)
            if number == 0:
                first = violation
            if not factor.is_cuda and bool(holds):
                break
            if number == 0:
                # Entries that are 0 and at which the likelihood rises: no product would ever change them.
                stuck = (factor < kappa_tol * weights) & (phi > 1)
                changed = torch.where(stuck, kappa * weights, factor * phi)
                factor.copy_(torch.where(holds, factor, changed))
            else:
                factor.mul_(phi.masked_fill_(holds, 1))
        weights.copy_(factor.sum(0))
        factor.div_(divisor(weights))
        return first

    def sweep() -> None:
        """Every mode's updates, then the fit, the log-likelihood, and the worst violation that a mode began with."""
        worst = torch.zeros((), dtype=weights.dtype, device=weights.device)
        for mode, factor in enumerate(factors):
            worst = torch.maximum(worst, updated(mode, factor))
        entries = at_nonzeros(factors[0] * weights, *factors[1:])
        inner, sums = (sparse.values * entries).sum(dtype=torch.float64), weights.double()
        square = sums @ torch.stack([(f.T @ f).double() for f in factors]).prod(0) @ sums
        likelihood = torch.xlogy(sparse.values, entries).sum(dtype=torch.float64) - sums.sum()
        measures.copy_(torch.stack((fit_of(norm, inner, square), likelihood, worst.double())))

    title = f"CP-APR, rank {rank}"
    return iterate(sweep, measures, model, n_iter_max, lambda rows: rows[-1][2] < tol, callback, progress, title)
