"""Tensors that decompositions are tried on, and the same for the libraries that they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import sparsetc as stc

F32, F64 = torch.float32, torch.float64


def random_tensor(
    shape: Sequence[int], density: float = 0.3, dtype: torch.dtype = F64, seed: int = 0
) -> stc.SparseTensor:
    """Uniform values at random positions."""
    random = torch.Generator().manual_seed(seed)
    values, drawn = (torch.rand(tuple(shape), generator=random, dtype=F64) for _ in range(2))
    return stc.SparseTensor.from_dense((values * (drawn < density)).to(dtype))


def random_factors(shape: Sequence[int], rank: int, dtype: torch.dtype = F64, seed: int = 1) -> list[torch.Tensor]:
    """Uniform factors."""
    random = torch.Generator().manual_seed(seed)
    return [torch.rand(n, rank, generator=random, dtype=F64).to(dtype) for n in shape]


def planted(
    shape: Sequence[int], rank: int, dtype: torch.dtype = F64, seed: int = 2
) -> tuple[stc.SparseTensor, stc.decomposition.CP]:
    """A tensor that is a nonnegative CP model, whose factors have zeros, and that model."""
    random = torch.Generator().manual_seed(seed)
    factors = []
    for n in shape:
        factor = torch.rand(n, rank, generator=random, dtype=F64) + 0.2
        factors.append((factor * (torch.rand(n, rank, generator=random, dtype=F64) < 0.7)).to(dtype))
    model = stc.decomposition.CP(torch.ones(rank, dtype=dtype), tuple(factors))
    return stc.SparseTensor.from_dense(model.to_dense()), model


def similarity(one: stc.decomposition.CP, other: stc.decomposition.CP) -> float:
    """How alike the components of two models are, whatever their order: 1 when the same."""
    products = torch.ones(one.rank, other.rank, dtype=F64)
    for a, b in zip(one.arranged().factors, other.arranged().factors, strict=True):
        products = products * (a.double().T @ b.double()).abs()
    return float(products.max(1).values.min())


def to_pyttb(x: stc.SparseTensor) -> Any:
    """The same as a sptensor."""
    import pyttb

    return pyttb.sptensor(x.coords.T.numpy().copy(), x.values.double().numpy()[:, None].copy(), x.shape)
