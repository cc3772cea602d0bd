"""`cp_als`: a CP decomposition by alternating least squares, of a whole tensor or of its observed entries.

In: a sparse tensor, a rank, and how to go about it. Out: a `CP` model. Kolda & Bader 2009, section 3.4; with a mask,
Tomasi & Bro 2005 without imputation (one least-squares problem a row).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sparsetc.decomposition import checks
from sparsetc.decomposition.als import Equations, Whole
from sparsetc.decomposition.completion import Observed, observed
from sparsetc.decomposition.context import undisturbed
from sparsetc.decomposition.fused import sweep_of
from sparsetc.decomposition.initial import cp_factors, is_model
from sparsetc.decomposition.linear import HALS, LEAST_SQUARES, ROWWISE, normalized
from sparsetc.decomposition.loop import Ended, Watch, asking, iterate, settled
from sparsetc.decomposition.models import CP
from sparsetc.support.entry import entry_point

NAME = "cp_als"


@entry_point
@undisturbed
def cp_als(
    x: Any,
    rank: int,
    *,
    n_iter_max: int = 100,
    tol: float | None = 1e-8,
    init: str | CP | Sequence[Any] = "random",
    normalize_factors: bool = True,
    nonnegative: bool = False,
    fixed_modes: Iterable[int] | None = None,
    mask: Any = None,
    l2_reg: float = 0.0,
    callback: Callable[[CP, float], Any] | None = None,
    progress: bool = False,
    random_state: int | torch.Generator | None = None,
    **settings: Any,
) -> CP:
    """Decompose a sparse tensor into a sum of `rank` outer products, by alternating least squares.

    Args:
        x: sparse, of any kind that `einsum` takes, two modes or more, float32 or float64; on the CPU or a GPU.
        rank: the number of components.
        n_iter_max: sweeps over the modes, at most.
        tol: stop when the fit changes by less than this in a sweep; 0 or None for never. What is less than the
            dtype's rounding counts as no change. On a GPU the fit is looked at every 8 sweeps.
        init: ``"random"`` (uniform), ``"nvecs"`` (leading vectors of the unfoldings, then random columns where a mode
            is smaller than the rank; without signs if `nonnegative`), or a model to go on from: a `CP`,
            ``(weights, factors)``, or factors.
        normalize_factors: give factors columns of unit length, and the rest as weights; otherwise weights are 1, and
            a component has one length in all modes.
        nonnegative: keep factors from 0 on, by hierarchical least squares; the model that `init` gives must be so.
        fixed_modes: modes whose factor `init` gives, and which stays as it is.
        mask: which entries are known, for completion: ``"observed"`` for x's own (explicit zeros among them), or a
            sparse or bool tensor of x's shape that is not 0 where an entry is. Others of x's values are not read.
        l2_reg: times the squares of all factors, added to what is minimised. Completion wants some.
        callback: called as ``callback(model, error)`` after each sweep with a copy and ``1 - fit``; True stops.
        progress: draw a bar with the fit; needs rich, the extra ``progress``.
        random_state: a seed, or a `torch.Generator`; torch's own by default.
        settings: as for `einsum`.

    Returns:
        The model after the last sweep. Ctrl-C ends a run after the sweep it falls into, with ``stopped`` set to
        ``"interrupted"``. ``init=result`` continues a run as if it had not ended.

    Raises:
        DecompositionError, ShapeError, DtypeError, DeviceError, FormatError, OutOfMemoryError: before any sweep.
    """
    sparse = checks.tensor(x, NAME, single=mask is not None, whole=mask is None)
    rank, free = checks.rank(rank, NAME), checks.free_modes(fixed_modes, sparse.order, NAME)
    n_iter_max = checks.number(n_iter_max, 0, f"{NAME}: n_iter_max")
    asked = asking(callback, lambda rows: made(Ended(rows, "")))
    tol, l2_reg = checks.level(tol, f"{NAME}: tol"), checks.level(l2_reg, f"{NAME}: l2_reg")
    seen = None if mask is None else observed(sparse, mask, NAME)
    random = checks.generator(random_state, NAME)
    factors = cp_factors(sparse if seen is None else seen.values, rank, init, random, free, NAME)
    if nonnegative and isinstance(init, str):
        factors = [f.abs_() for f in factors]
    elif nonnegative:
        checks.nonnegative(factors, NAME)
    equations: Equations
    if seen is None:
        equations = Whole(sparse, factors, free, **settings)
    else:
        equations = Observed(seen, factors, free, **settings)
    update = HALS if nonnegative else LEAST_SQUARES if seen is None else ROWWISE
    sweep = sweep_of(equations, factors, free, update, l2_reg)

    def made(ended: Ended) -> CP:
        kept = normalized(factors, free) if normalize_factors else (torch.ones_like(factors[0][0]), _copied(factors))
        return CP(*kept, ended.column(0), ended.stopped)

    if not bool(equations.norm > 0):
        factors[free[0]].zero_()
        return made(Ended([[1.0]], "converged"))
    if not is_model(init):
        sweep.fit_scale()
    watch = Watch(n_iter_max, settled(tol, sparse.dtype), asked, progress, f"CP, rank {rank}")
    return made(iterate(sweep, sweep.measures, watch))


def _copied(factors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(f.clone() for f in factors)
