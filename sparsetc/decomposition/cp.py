"""`cp_als`: a CP decomposition by alternating least squares, of a whole tensor or of its observed entries.

In: a sparse tensor, a rank, and how to go about it. Out: a `CP` model. Kolda & Bader 2009, section 3.4; with a mask,
Tomasi & Bro 2005 without imputation (one least-squares problem a row).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from sparsetc.decomposition import checks
from sparsetc.decomposition.als import Equations, Observed, observed
from sparsetc.decomposition.initial import STARTS, cp_factors
from sparsetc.decomposition.linear import (
    Update,
    balancing,
    fit_of,
    hals,
    least_squares,
    least_squares_by_row,
    normalized,
)
from sparsetc.decomposition.loop import Rows, column, convergence_test, iterate, undisturbed
from sparsetc.decomposition.models import CP
from sparsetc.options import Settings
from sparsetc.support.entry import entry_point
from sparsetc.tensor.sparse_tensor import SparseTensor


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
    progress: bool | None = None,
    random_state: int | torch.Generator | None = None,
    **settings: Unpack[Settings],
) -> CP:
    """Decompose a sparse tensor into a sum of `rank` outer products, by alternating least squares.

    The tensor may also be a table of pandas or polars: a column of coordinates for each mode, then one of values.
    Integers become torch's default dtype.

    Args:
        x: sparse, of any kind that `einsum` takes, two modes or more, float32 or float64; on the CPU or a GPU. A
            `distributed.Sharded` one is decomposed by all its processes together, of which each gets the whole model;
            there is no `mask` of it and no ``"nvecs"``, and `init` and a generator are those of rank 0.
        rank: the number of components.
        n_iter_max: sweeps over the modes, at most.
        tol: stop when the fit changes by less than this in a sweep; 0 or None for never. What is less than the
            dtype's rounding counts as no change. On a GPU the fit is looked at every 8 sweeps.
        init: ``"random"`` (uniform), ``"nvecs"`` (leading vectors of the unfoldings, then random columns where a mode
            is smaller than the rank; without signs if `nonnegative`), or a model to go on from: a `CP`, a CPTensor of
            tensorly, a ktensor of pyttb, ``(weights, factors)``, or factors.
        normalize_factors: give factors columns of unit length, and the rest as weights; otherwise weights are 1, and
            a component has one length in all modes.
        nonnegative: keep factors from 0 on, by hierarchical least squares; the model that `init` gives must be so.
        fixed_modes: modes whose factor `init` gives, and which stays as it is.
        mask: which entries are known, for completion: ``"observed"`` for x's own (explicit zeros among them), or a
            sparse or bool tensor of x's shape that is not 0 where an entry is. Others of x's values are not read.
        l2_reg: times the squares of all factors, added to what is minimised. Completion wants some.
        callback: called as ``callback(model, error)`` after each sweep with a copy and ``1 - fit``; True stops.
        progress: a bar with the fit, by tqdm (extra ``progress``): True from the start, None on a terminal after two
            seconds, False never.
        random_state: a seed, or a `torch.Generator`; torch's own by default.
        settings: as for `einsum`.

    Returns:
        The model after the last sweep. Ctrl-C ends a run after the sweep it falls into, with ``stopped`` set to
        ``"interrupted"``. ``init=result`` continues a run as if it had not ended.

    Raises:
        DecompositionError, ShapeError, DtypeError, DeviceError, FormatError, OutOfMemoryError: before any sweep.

    Examples:
        >>> model = stc.decomposition.cp_als(stc.full((3, 4, 5), 2.0), 1, random_state=0)
        >>> model.shape, round(model.fit, 3)
        ((3, 4, 5), 1.0)
    """
    wanted = Wanted(
        rank,
        n_iter_max,
        tol,
        init,
        normalize_factors,
        nonnegative,
        fixed_modes,
        mask,
        l2_reg,
        callback,
        progress,
        random_state,
    )
    if hasattr(x, "_cp_als"):  # a tensor of several processes
        return x._cp_als(wanted, settings)
    sparse = checks.tensor(x, single=mask is not None, whole=mask is None)
    wanted = wanted.checked(sparse.order)
    entries = sparse if mask is None else observed(sparse, mask)
    factors = start(entries, wanted)
    equations = (Equations if mask is None else Observed)(entries, factors, wanted.free, **settings)
    update = least_squares if mask is None else least_squares_by_row
    if nonnegative:
        update = hals
    return run(equations, factors, update, wanted, lambda: factors)


@dataclass(frozen=True)
class Wanted:
    """The arguments of a run of `cp_als`, but for the tensor and what kernels are compiled with.

    Attributes:
        free: the modes that are not fixed, once arguments were checked.
    """

    rank: int
    n_iter_max: int
    tol: Any
    init: Any
    normalize_factors: bool
    nonnegative: bool
    fixed_modes: Any
    mask: Any
    l2_reg: float
    callback: Any
    progress: bool | None
    random_state: Any
    free: tuple[int, ...] = ()

    def checked(self, order: int) -> Wanted:
        """Return the settings checked for a tensor of `order` modes. Raise `DecompositionError` if they do not fit."""
        checks.callback(self.callback)
        return replace(
            self,
            rank=checks.number(self.rank, 1, "the rank"),
            free=checks.free_modes(self.fixed_modes, order),
            n_iter_max=checks.number(self.n_iter_max, 0, "n_iter_max"),
            tol=checks.level(self.tol, "tol"),
            l2_reg=checks.level(self.l2_reg, "l2_reg"),
        )


def start(x: SparseTensor, wanted: Wanted, starts: Sequence[str] = STARTS) -> list[Tensor]:
    """The factors that a run starts from."""
    random = checks.generator(wanted.random_state)
    factors = cp_factors(x, wanted.rank, wanted.init, random, wanted.free, starts)
    if wanted.nonnegative and isinstance(wanted.init, str):
        return [f.abs_() for f in factors]
    if wanted.nonnegative:
        checks.nonnegative(factors)
    return factors


def run(
    equations: Equations,
    factors: Sequence[Tensor],
    update: Update,
    wanted: Wanted,
    gather: Callable[[], Sequence[Tensor]],
    **looks: Any,
) -> CP:
    """Alternating least squares, whatever the equations are and wherever the factors lie.

    Columns are brought to one length in all free modes after each sweep. Scaled so, a model is determined by its
    components alone: whoever starts from a result, in whatever form, goes on as the run would have. The sum of the
    squares of the factors, which `l2_reg` weights, is then the least for them.

    Args:
        equations: of the model.
        factors: changed in place: the model's, or this process's rows of them.
        update: how a factor is made of its equations.
        wanted: what the user asked for.
        gather: returns the model's factors as they are.
        looks: settings of `iterate` that are not the user's.
    """
    free, norm = wanted.free, equations.norm
    penalty = wanted.l2_reg * torch.eye(factors[0].shape[1]).to(norm) if wanted.l2_reg else None
    shares = norm.new_tensor([[float(mode in free) / len(free)] for mode in range(len(factors))])
    measures = norm.new_zeros(1)

    def sweep() -> None:
        """Update each free mode, measure the fit, and balance components."""
        for mode in free:
            gram = equations.gram(mode)
            penalised = gram if penalty is None else gram + penalty.to(gram.dtype)
            rhs = equations.rhs(mode)
            update(factors[mode], penalised, rhs)
            equations.updated(mode)
        measures.copy_(fit_of(norm, equations.inner(mode, rhs), equations.model_square(mode, gram)))
        balance()

    def balance() -> None:
        scales = balancing(equations.norms(), shares)
        for mode in free:
            factors[mode].mul_(scales[mode])
        equations.scaled(scales)

    def fit_scale() -> None:
        """Scale a start to its best fit; if a larger model fits worse, scale it to the norm of X.

        Nonnegative columns that are too long would be cut to 0, and of components that are too long, in a system that
        says little of them, most would stay and cancel.
        """
        mode = free[0]
        rhs, gram = equations.rhs(mode), equations.gram(mode)
        equations.updated(mode)
        inner, square = equations.inner(mode, rhs), equations.model_square(mode, gram)
        fitting = torch.where(inner > 0, inner / square, norm / square.sqrt())
        factors[mode].mul_(fitting.to(factors[mode].dtype).nan_to_num(1, 1, 1))
        equations.updated(mode)
        balance()

    def model(rows: Rows, stopped: str) -> CP:
        now = gather()
        if wanted.normalize_factors:
            weights, matrices = normalized(now, free)
        else:
            weights, matrices = torch.ones_like(now[0][0]), tuple(f.clone() for f in now)
        return CP(weights, matrices, column(rows, 0), stopped)

    if not bool(norm > 0):
        factors[free[0]].zero_()
        return model([[1.0]], "converged")
    if checks.model_parts(wanted.init) is None:
        fit_scale()
    converged = convergence_test(wanted.tol, factors[0].dtype)
    title = f"CP, rank {wanted.rank}"
    return iterate(
        sweep, measures, model, wanted.n_iter_max, converged, wanted.callback, wanted.progress, title, **looks
    )
