"""`cp_als` of a sharded tensor: the loop of `sparsetc.decomposition.cp_als`, each rank updating its rows.

In: a `Sharded`, a rank, and how to go about it. Out: on every rank, the model that one process would find, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sparsetc.decomposition import checks
from sparsetc.decomposition.cp import NAME, Wanted, run, start
from sparsetc.decomposition.initial import is_model
from sparsetc.decomposition.linear import HALS, LEAST_SQUARES
from sparsetc.decomposition.loop import undisturbed
from sparsetc.decomposition.models import CP
from sparsetc.distributed.agree import agreed, alike
from sparsetc.distributed.equations import prepared
from sparsetc.distributed.shard import Sharded
from sparsetc.errors import DecompositionError, DtypeError
from sparsetc.support.entry import entry_point
from sparsetc.tensor.sparse_tensor import SparseTensor

ENDS = ("", "converged", "callback", "diverged", "interrupted")
"""Why a rank stops; of several reasons the last one here is that of all."""


@entry_point
@undisturbed
def cp_als(
    x: Sharded,
    rank: int,
    *,
    n_iter_max: int = 100,
    tol: float | None = 1e-8,
    init: str | CP | Sequence[Any] = "random",
    normalize_factors: bool = True,
    nonnegative: bool = False,
    fixed_modes: Iterable[int] | None = None,
    l2_reg: float = 0.0,
    callback: Callable[[CP, float], Any] | None = None,
    progress: bool = False,
    random_state: int | torch.Generator | None = None,
    **settings: Any,
) -> CP:
    """Decompose a sharded tensor into a sum of `rank` outer products; collective, `sparsetc.decomposition.cp_als` else.

    Args:
        x: of two modes or more, float32 or float64; cut in any way, best by ``shard(x)``.
        rank: as there, as are all that are not here.
        n_iter_max: as there.
        tol: as there.
        init: ``"random"``, or a model, whole, to go on from; that of rank 0 is taken. There is no ``"nvecs"``.
        normalize_factors: as there.
        nonnegative: as there.
        fixed_modes: as there.
        l2_reg: as there.
        callback: called on every rank, with the whole model; True on any stops all.
        progress: drawn by rank 0.
        random_state: a seed gives the start that it gives on one process, however many ranks there are. Of a generator,
            or torch's own, that of rank 0 is taken.
        settings: as for `einsum`; ``mask=`` is none of them, nor here at all.

    Returns:
        The same model on every rank, whole. Ctrl-C on any rank ends a run on all.

    Raises:
        DistributedError: ranks were given different arguments, or some of them failed.
        DecompositionError, ShapeError, DtypeError, FormatError, OutOfMemoryError: all ranks failed alike.
    """
    if not isinstance(x, Sharded):
        raise DtypeError(f"{NAME}: x must be Sharded, found {type(x).__name__}; see sparsetc.distributed.shard")
    said = {"x": (x.shape, x.cut.nnz, x.dtype), "rank": rank, "n_iter_max": n_iter_max, "tol": tol}
    said |= {"normalize_factors": normalize_factors, "nonnegative": nonnegative, "l2_reg": l2_reg, "progress": progress}
    said |= {"callback": callback is not None} | alike(settings)
    said |= {"init": init if isinstance(init, str) else "a model", "random_state": _kind(random_state)}
    fixed_modes = fixed_modes if fixed_modes is None or isinstance(fixed_modes, int) else tuple(fixed_modes)
    ranks = x.ranks

    def begun() -> tuple[Wanted, list[torch.Tensor]]:
        if "mask" in settings:
            raise DecompositionError(
                f"{NAME}: there is no mask= over several ranks; sparsetc.decomposition.cp_als has it"
            )
        checks.kind(x.dtype, x.device, x.shape, NAME)
        wanted = Wanted.checked(
            x.order, rank, n_iter_max, tol, normalize_factors, nonnegative, fixed_modes, l2_reg, callback, progress
        )
        random = checks.generator(random_state, NAME)
        return wanted, start(_without_nonzeros(x), wanted, init, random, ("random",))

    wanted, factors = agreed(ranks, NAME, begun, said | {"fixed_modes": fixed_modes})
    _check_values(x)
    if not (isinstance(init, str) and isinstance(random_state, int)):
        factors = [ranks.first(f) for f in factors]
    flat = replace(x, local=x.local.expand_dense()) if x.local.dense_order else x
    equations, shares, gather = prepared(flat, factors, wanted.free, NAME, **settings)
    if callback is not None:
        wanted = replace(
            wanted, callback=lambda model, error: agreed(ranks, "callback", lambda: callback(model, error))
        )
    # Of sweeps with collectives in them only NCCL's become CUDA graphs (`benchmarks/results/distributed_2.json`).
    capture = ranks.size == 1 or "nccl" in ranks.backend
    return run(
        equations,
        shares,
        HALS if nonnegative else LEAST_SQUARES,
        wanted,
        is_model(init),
        gather,
        capture=capture,
        together=lambda why: _together(why, x),
        silent=ranks.rank > 0,
    )


def _without_nonzeros(x: Sharded) -> SparseTensor:
    """A tensor of x's shape, dtype and device, of which a random start asks no more."""
    values = x.local.values.new_zeros(0)
    coords = torch.zeros((x.order, 0), dtype=torch.int64, device=x.device)
    return SparseTensor._of(coords, values, x.shape, True)


def _check_values(x: Sharded) -> None:
    """Raise one error on every rank where values, or their squares, are no numbers on any; collective."""
    values = x.local.values
    largest = values.abs().max() if values.numel() else values.new_zeros(())
    square = x.ranks.sum_(values.square().sum())
    unfit = x.ranks.most((~largest.isfinite()).int())
    largest = x.ranks.most(largest.nan_to_num())
    checks.check_extent(float("nan") if bool(unfit) else float(largest), float(square), x.dtype, NAME)


def _together(why: str, x: Sharded) -> str:
    """Why all ranks stop, of why this one would; collective."""
    mine = torch.tensor(ENDS.index(why), dtype=torch.int32, device=x.device)
    return ENDS[int(x.ranks.most(mine))]


def _kind(random_state: Any) -> Any:
    return random_state if random_state is None or isinstance(random_state, int) else type(random_state).__name__
