"""The start of a decomposition: random factors, leading vectors of the unfoldings, or a model.

In: a checked tensor and what the user gave as ``init``. Out: factors of the decomposition's own, all weights in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetc.decomposition import checks
from sparsetc.decomposition.leading import drawn, leading_vectors
from sparsetc.errors import DecompositionError
from sparsetc.support import memory
from sparsetc.tensor.sparse_tensor import SparseTensor

STARTS = ("random", "nvecs")
"""Starts that have a name."""


def begun(
    x: SparseTensor,
    ranks: Sequence[int],
    init: Any,
    random: torch.Generator | None,
    free: Sequence[int],
    kind: str,
    name: str,
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
        name: of the decomposition.
        starts: those that it has.
        draw: torch's function for ``"random"``.

    Raises:
        DecompositionError, ShapeError, DtypeError, DeviceError, FormatError: of a start that is none.
    """
    if not isinstance(init, str):
        return checks.model(init, x, ranks, kind, name)
    if init not in starts:
        wanted = ", ".join((*map(repr, starts), f"a {kind} model or a list of factors"))
        raise DecompositionError(f"{name}: init must be {wanted}, found {init!r:.80}")
    if len(free) < x.order:
        raise DecompositionError(f"{name}: fixed_modes keeps factors of init, which must give them, found {init!r}")
    sizes = list(zip(x.shape, ranks, strict=True))
    if init == "random":
        return None, [drawn(draw, n, rank, x, random) for n, rank in sizes]
    return None, [leading_vectors(x, mode, min(rank, n), random) for mode, (n, rank) in enumerate(sizes)]


def cp_factors(
    x: SparseTensor,
    rank: int,
    init: Any,
    random: torch.Generator | None,
    free: Sequence[int],
    name: str,
    starts: Sequence[str] = STARTS,
) -> list[Tensor]:
    """Return (size, rank) factors to change in place; modes that are not `free` keep the factors given.

    Raises:
        DecompositionError, ShapeError, DtypeError, DeviceError, FormatError: of a start that is none.
        OutOfMemoryError: factors of this rank, and their float64 Gram matrices, would pass the memory limit.
    """
    nbytes = rank * (sum(x.shape) * x.dtype.itemsize + x.order * rank * 8)
    memory.check(f"{name}: factors of rank {rank:,}, and their Gram matrices,", nbytes, x.device)
    weights, factors = begun(x, [rank] * x.order, init, random, free, "CP", name, starts)
    for mode, vectors in enumerate(factors):  # a mode has no more leading vectors than its size
        size, count = vectors.shape
        if count < rank:  # random columns of about their length
            more = drawn(torch.rand, size, rank - count, x, random) / size**0.5
            factors[mode] = torch.cat((vectors, more), 1)
    if weights is not None:  # tensorly has None for ones
        scales = checks.matrix(weights, (rank,), x, f"{name}: init's weights")
        lengths = torch.where(scales == 0, 1, scales.abs() ** (1 / len(free)))
        for mode in free:
            factors[mode].mul_(lengths)
        # A component that is 0 in one mode stays as it is in the others, from which a run goes on.
        zero = torch.stack([(factors[mode] == 0).all(0) for mode in free]).any(0)
        factors[free[0]].mul_(torch.where(zero, 1, scales.sign()))
    return factors
