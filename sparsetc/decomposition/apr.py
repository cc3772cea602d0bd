"""`cp_apr`: a nonnegative CP decomposition of counts, by alternating Poisson regression with multiplicative updates.

In: a sparse tensor of counts and a rank. Out: a `CP` model. Chi & Kolda 2012, algorithm CP-APR MU. All that meets the
tensor is two einsums: the model at its nonzeros, and an MTTKRP of their ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparsetc.decomposition import checks
from sparsetc.decomposition.initial import cp_factors
from sparsetc.decomposition.kernels import mode_kernels, model_kernel
from sparsetc.decomposition.linear import divisor, hadamard, normalized
from sparsetc.decomposition.loop import Ended, Watch, asking, iterate, undisturbed
from sparsetc.decomposition.models import CP
from sparsetc.errors import FormatError
from sparsetc.support.entry import entry_point
from sparsetc.tensor.sparse_tensor import SparseTensor

NAME = "cp_apr"


@dataclass(frozen=True)
class _Limits:
    """The numbers that `cp_apr` is given."""

    n_inner_max: int
    tol: float
    epsilon: float
    kappa: float
    kappa_tol: float


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
    progress: bool = False,
    random_state: int | torch.Generator | None = None,
    **settings: Any,
) -> CP:
    """Decompose a sparse tensor of counts into nonnegative components, by the likelihood of Poisson variables.

    Args:
        x: sparse, of any kind that `einsum` takes, two modes or more, float32 or float64, no value below 0.
        rank: the number of components.
        n_iter_max: outer iterations, each over all modes, at most.
        n_inner_max: multiplicative updates of a mode in each, at most.
        tol: how far from the conditions of a maximum (KKT) a mode may be when its updates end; the run ends when all
            modes begin so. 0 or None for never. On a GPU this is looked at every 8 outer iterations.
        init: ``"random"`` (uniform), or a nonnegative model to go on from: a `CP`, ``(weights, factors)``, or factors.
        epsilon: the least that counts are divided by.
        kappa: what an entry is set to that came to 0 and should not have, as a share of its component.
        kappa_tol: the share of its component below which an entry counts as 0.
        callback: called as ``callback(model, error)`` after each outer iteration with a copy and ``1 - fit``; True
            stops.
        progress: draw a bar with the fit; needs rich, the extra ``progress``.
        random_state: a seed, or a `torch.Generator`; torch's own by default.
        settings: as for `einsum`.

    Returns:
        The model: columns that add up to 1, and weights. `CP.log_likelihoods` and `CP.fits` have a number each
        iteration. Stopped and continued as those of `cp_als`.

    Raises:
        DecompositionError, ShapeError, DtypeError, DeviceError, FormatError, OutOfMemoryError: before any iteration.
    """
    sparse = checks.tensor(x, NAME, single=True)
    if bool((sparse.values < 0).any()):
        raise FormatError(f"{NAME}: x has values below 0, which no counts are; see cp_als")
    rank = checks.rank(rank, NAME)
    n_iter_max = checks.number(n_iter_max, 0, f"{NAME}: n_iter_max")
    asked = asking(callback, lambda rows: made(Ended(rows, "")))
    limits = _Limits(
        checks.number(n_inner_max, 1, f"{NAME}: n_inner_max"),
        checks.level(tol, f"{NAME}: tol"),
        checks.level(epsilon, f"{NAME}: epsilon"),
        checks.level(kappa, f"{NAME}: kappa"),
        checks.level(kappa_tol, f"{NAME}: kappa_tol"),
    )
    modes = tuple(range(sparse.order))
    start = cp_factors(sparse, rank, init, checks.generator(random_state, NAME), modes, NAME, ("random",))
    checks.nonnegative(start, NAME)
    sweep = _PoissonSweep(sparse, start, limits, **settings)

    def made(ended: Ended) -> CP:
        copies = tuple(f.clone() for f in sweep.factors)
        return CP(sweep.weights.clone(), copies, ended.column(0), ended.stopped, ended.column(1))

    title = f"CP-APR, rank {rank}"
    watch = Watch(n_iter_max, lambda rows: rows[-1][2] < limits.tol, asked, progress, title)
    return made(iterate(sweep, sweep.measures, watch))


class _PoissonSweep:
    """An outer iteration over static buffers: every mode's multiplicative updates, then the likelihood and the fit.

    Attributes:
        measures: the fit, the log-likelihood, and the worst violation of the KKT conditions that a mode began with.
    """

    def __init__(self, x: SparseTensor, start: Sequence[torch.Tensor], limits: _Limits, **settings: Any) -> None:
        rank, modes = start[0].shape[1], range(x.order)
        self.weights, self.factors = normalized(start, modes, p=1)
        self._limits, self._values = limits, x.values
        self._norm = torch.linalg.vector_norm(x.values, dtype=torch.float64)
        self._kernels = mode_kernels(x, rank, modes, **settings)
        self._model = model_kernel(x.with_values(torch.ones_like(x.values)), rank, **settings)
        self.measures = torch.zeros(3, dtype=torch.float64, device=x.device)

    def __call__(self) -> None:
        worst = torch.zeros((), dtype=self.weights.dtype, device=self.weights.device)
        for mode in range(len(self.factors)):
            worst = torch.maximum(worst, self._update(mode))
        self._measure(worst)

    def _update(self, mode: int) -> torch.Tensor:
        """The multiplicative updates of a mode; how far it was from the KKT conditions before them.

        Once they hold, the factor stays as it is. A GPU is not asked whether they do, but goes through all updates.
        """
        factor, limits = self.factors[mode], self._limits
        factor.mul_(self.weights)
        first = holds = torch.zeros((), dtype=torch.bool, device=factor.device)
        for number in range(limits.n_inner_max):
            phi = self._phi(mode)
            violation = torch.linalg.vector_norm(torch.minimum(factor, 1 - phi), torch.inf)
            holds = holds | (violation < limits.tol)
            if number == 0:
                first = violation
            if not factor.is_cuda and bool(holds):
                break
            if number == 0:
                # Entries that are 0 and at which the likelihood rises: no product would ever change them.
                stuck = (factor < limits.kappa_tol * self.weights) & (phi > 1)
                updated = torch.where(stuck, limits.kappa * self.weights, factor * phi)
                factor.copy_(torch.where(holds, factor, updated))
            else:
                factor.mul_(phi.masked_fill_(holds, 1))
        self.weights.copy_(factor.sum(0))
        factor.div_(divisor(self.weights))
        return first

    def _phi(self, mode: int) -> torch.Tensor:
        """(size, rank) what the factor of a mode, which has the weights, is multiplied by."""
        ratios = self._values / self._at_nonzeros(self.factors)
        return self._kernels[mode](self.factors, ratios)

    def _at_nonzeros(self, factors: Sequence[torch.Tensor]) -> torch.Tensor:
        """(nnz,) the model, no less than epsilon."""
        found = self._model(*factors)
        assert isinstance(found, SparseTensor)
        return found.values.clamp(min=self._limits.epsilon)

    def _measure(self, worst: torch.Tensor) -> None:
        first, *others = self.factors
        model = self._at_nonzeros((first * self.weights, *others))
        inner = (self._values * model).sum(dtype=torch.float64)
        weights = self.weights.double()
        square = weights @ hadamard(torch.stack([(f.T @ f).double() for f in self.factors])) @ weights
        error = (self._norm.square() - 2 * inner + square).clamp(min=0).sqrt()
        likelihood = torch.xlogy(self._values, model).sum(dtype=torch.float64)
        fit = 1 - error / divisor(self._norm)
        self.measures.copy_(torch.stack((fit, likelihood - weights.sum(), worst.double())))
