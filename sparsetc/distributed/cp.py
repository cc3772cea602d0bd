"""CP-ALS of a sharded tensor: MTTKRPs of boxes, summed where ranks share rows, which each rank updates a part of.

In: a `Sharded`, and what `sparsetc.decomposition.cp_als` was asked for. Out: on every rank, the model that one process
would find, to rounding. For each mode a rank holds the rows of its range, the *block*, as all ranks of the range do; of
these it owns an equal share, which it alone updates. Smith & Karypis, A medium-grained algorithm for sparse tensor
factorization, 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsetc.decomposition import checks
from sparsetc.decomposition.als import Equations
from sparsetc.decomposition.cp import Wanted, run, start
from sparsetc.decomposition.linear import hals, least_squares
from sparsetc.decomposition.models import CP
from sparsetc.distributed.cut import Cut, Range, shares
from sparsetc.distributed.ranks import agreed, alike, on_all
from sparsetc.distributed.shard import Sharded
from sparsetc.distributed.transfer import Transfer
from sparsetc.errors import DecompositionError
from sparsetc.tensor.sparse_tensor import SparseTensor

ENDS = ("", "converged", "callback", "diverged", "interrupted")
"""Why a rank stops; of several reasons the last one here is that of all."""


def cp_als(x: Sharded, wanted: Wanted, settings: dict[str, Any]) -> CP:
    """Decompose a sharded tensor, cut in any way; collective.

    Raises:
        DistributedError: ranks were given different arguments, or some of them failed.
        DecompositionError, ShapeError, DtypeError, FormatError, OutOfMemoryError: all ranks failed alike.
    """
    ranks = x.ranks
    init = wanted.init
    callback = wanted.callback
    fixed = wanted.fixed_modes
    if fixed is not None and not isinstance(fixed, int):
        wanted = replace(wanted, fixed_modes=tuple(fixed))

    def begun() -> tuple[Wanted, list[Tensor]]:
        if wanted.mask is not None:
            raise DecompositionError("there is no mask= of a sharded tensor; one of one process has it")
        checks.kind(x.dtype, x.device, x.shape)
        chosen, no_coords = wanted.checked(x.order), torch.zeros((x.order, 0), dtype=torch.int64, device=x.device)
        # A random start asks for shape, dtype and device alone.
        without_nonzeros = SparseTensor._of(no_coords, x.local.values.new_zeros(0), x.shape, True)
        return chosen, start(without_nonzeros, chosen, ("random",))

    chosen, factors = agreed(ranks, "cp_als", begun, _said(x, wanted) | alike(settings))
    _check_values(x)
    if not (isinstance(init, str) and isinstance(wanted.random_state, int)):
        factors = [ranks.first(f) for f in factors]
    if callback is not None:
        chosen = replace(chosen, callback=lambda *now: agreed(ranks, "callback", lambda: callback(*now)))
    flat = replace(x, local=x.local.expand_dense()) if x.local.dense_order else x
    equations, own_rows, gather = prepared(flat, factors, chosen.free, settings)
    return run(
        equations,
        own_rows,
        hals if wanted.nonnegative else least_squares,
        chosen,
        gather,
        # Of sweeps with collectives in them only NCCL's become CUDA graphs (`benchmarks/results/distributed_2.json`).
        capture=ranks.size == 1 or "nccl" in ranks.backend,
        together=lambda why: _together(why, x),
        silent=ranks.rank > 0,
    )


def prepared(
    x: Sharded, factors: Sequence[Tensor], free: Sequence[int], settings: dict[str, Any]
) -> tuple[Equations, list[Tensor], Callable[[], list[Tensor]]]:
    """The equations, compiled on every rank; collective.

    B comes from an MTTKRP of this rank's box, whose rows go to their owners; updated rows go back to all holders.

    Returns:
        The equations; this rank's rows of each factor, which are changed in place; and what gathers the factors from
        the ranks that own their rows, collectively.

    Raises:
        DistributedError: a rank could not.
    """
    ranks = x.ranks
    modes = range(x.order)
    width = factors[0].shape[1]
    held = [[x.cut.ranges(rank)[mode] for rank in range(ranks.size)] for mode in modes]
    owned = [_owned(x.cut, mode) for mode in modes]
    whole = [[(0, n)] * ranks.size for n in x.shape]

    def transfers(rows: Sequence[Sequence[Range]], targets: Sequence[Sequence[Range]]) -> list[Transfer]:
        boxes = [[(one, (0, width)) for one in each] for each in rows]
        each = zip(boxes, targets, x.shape, strict=True)
        return [Transfer.of_boxes(ranks, box, to, (n, width)) for box, to, n in each]

    to_owners = transfers(held, owned)
    to_blocks = transfers(owned, held)
    to_all = transfers(owned, whole)

    def make(**settings: Any) -> tuple[Equations, list[Tensor]]:
        blocks, parts = (
            [f[slice(*rows[ranks.rank])].clone() for f, rows in zip(factors, of_ranks, strict=True)]
            for of_ranks in (held, owned)
        )
        own_rows = [parts[m] if to_blocks[m].moves else blocks[m] for m in modes]
        return Equations(
            x.local,
            own_rows,
            free,
            blocks,
            ranks.sum_,
            lambda mode, rhs: to_owners[mode](rhs),
            lambda mode: to_blocks[mode](own_rows[mode], out=blocks[mode]),
            **settings,
        ), own_rows

    equations, own_rows = on_all(ranks, "cp_als", make, settings)
    equations.join()

    def gather() -> list[Tensor]:
        return [transfer(rows) for transfer, rows in zip(to_all, own_rows, strict=True)]

    return equations, own_rows, gather


def _owned(cut: Cut, mode: int) -> list[Range]:
    """Return the rows of a mode that each rank owns: an equal share of its range."""
    owned: dict[int, Range] = {}
    for part in cut.sharing((mode,)):
        owned |= zip(part, shares(cut.ranges(part[0])[mode], len(part)), strict=True)
    return [owned[rank] for rank in range(cut.size)]


def _said(x: Sharded, wanted: Wanted) -> dict[str, Any]:
    """Return the printed arguments that must be equal on every rank."""
    init, random = wanted.init, wanted.random_state
    printed = replace(
        wanted,
        callback=wanted.callback is not None,
        mask=wanted.mask is not None,
        init=init if isinstance(init, str) else "a model",
        random_state=random if random is None or isinstance(random, int) else type(random).__name__,
    )
    return {"x": (x.shape, x.cut.nnz, x.dtype)} | vars(printed)


def _check_values(x: Sharded) -> None:
    """Raise one error on every rank where values, or their squares, are no numbers on any; collective."""
    values = x.local.values
    largest = values.abs().max() if values.numel() else values.new_zeros(())
    most = x.ranks.most(torch.stack((~largest.isfinite(), largest.nan_to_num())))
    unfit, worst, square = torch.stack((*most, x.ranks.sum_(values.square().sum()))).tolist()
    checks.check_extent(float("nan") if unfit else worst, square, x.dtype)


def _together(why: str, x: Sharded) -> str:
    """Why all ranks stop, of why this one would; collective."""
    mine = torch.tensor(ENDS.index(why), dtype=torch.int32, device=x.device)
    return ENDS[int(x.ranks.most(mine))]
