"""Where a CP decomposition starts: random factors, leading vectors of the unfoldings, or a model.

In: a checked tensor and what the user gave as ``init``. Out: factors of the decomposition's own, all weights in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparsetc.decomposition import checks
from sparsetc.decomposition.leading import leading_vectors
from sparsetc.errors import DecompositionError, ShapeError
from sparsetc.options import current
from sparsetc.tensor.sparse_tensor import SparseTensor

STARTS = ("random", "nvecs")
"""Starts that have a name."""


def cp_factors(
    x: SparseTensor,
    rank: int,
    init: Any,
    random: torch.Generator | None,
    free: Sequence[int],
    name: str,
    starts: Sequence[str] = STARTS,
) -> list[torch.Tensor]:
    """(size, rank) factors to be changed in place; those of the modes that are not `free` as they were given.

    Raises:
        DecompositionError, ShapeError, DtypeError, DeviceError, FormatError: of a start that is none.
        OutOfMemoryError: factors of this rank, and their float64 Gram matrices, would pass the memory limit.
    """
    nbytes = rank * (sum(x.shape) * x.dtype.itemsize + x.order * rank * 8)
    current().check_memory(nbytes, x.device, f"{name}: factors of rank {rank:,}, and their Gram matrices,")
    if isinstance(init, str):
        if init not in starts:
            raise DecompositionError(f"{name}: init must be {_listed(starts)}, found {init!r:.80}")
        if len(free) < x.order:
            raise DecompositionError(f"{name}: fixed_modes keeps factors of init, which must give them, found {init!r}")
        if init == "random":
            return [uniform(n, rank, x, random) for n in x.shape]
        return [_completed(leading_vectors(x, m, min(rank, n), random), rank, x, random)
                for m, n in enumerate(x.shape)]  # fmt: skip
    weights, given = checks.model_parts(init) or (None, init)
    if not isinstance(given, Sequence):
        found = type(given).__name__
        raise ShapeError(f"{name}: init must be a CP model, (weights, factors) or a list of factors, found {found}")
    factors = checks.factors(given, x, [rank] * x.order, name)
    if weights is not None:  # tensorly has None for ones
        own = checks.matrix(weights, (rank,), x, f"{name}: init's weights")
        lengths = torch.where(own == 0, 1, own.abs() ** (1 / len(free)))
        for mode in free:
            factors[mode].mul_(lengths)
        # A component that is 0 in one mode stays as it is in the others, from which a run goes on.
        zero = torch.stack([(factors[mode] == 0).all(0) for mode in free]).any(0)
        factors[free[0]].mul_(torch.where(zero, 1, own.sign()))
    return factors


def is_model(init: Any) -> bool:
    """Whether a start says what its components weigh: a model, or a pair of weights and factors as tensorly has it."""
    return checks.model_parts(init) is not None


def uniform(size: int, rank: int, x: SparseTensor, random: torch.Generator | None) -> torch.Tensor:
    """(size, rank) of x's dtype and device, uniform in [0, 1): drawn on the generator's device, the CPU without one.

    So a seed gives one start wherever the tensor is.
    """
    device = "cpu" if random is None else random.device
    return torch.rand(size, rank, generator=random, dtype=x.dtype, device=device).to(x.device)


def _completed(vectors: torch.Tensor, rank: int, x: SparseTensor, random: torch.Generator | None) -> torch.Tensor:
    """Random columns after those there are, of about their length; a mode has no more vectors than its size."""
    size, count = vectors.shape
    if count == rank:
        return vectors
    return torch.cat((vectors, uniform(size, rank - count, x, random) / size**0.5), 1)


def _listed(starts: Sequence[str]) -> str:
    return ", ".join(map(repr, starts)) + ", a CP model or a list of factors"
