"""Operands of rows: random and real tensors, on the device of the run."""

from __future__ import annotations

from collections.abc import Sequence

import common
import torch

import sparsetc as stc


def generator(seed: int = 0) -> torch.Generator:
    """A random generator of the device."""
    return torch.Generator(device=common.DEVICE).manual_seed(seed)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A dense operand."""
    return torch.randn(shape, generator=generator(seed), device=common.DEVICE).to(dtype)


def positive(size: int, seed: int = 0) -> torch.Tensor:
    """Values in [0.1, 1.1)."""
    return torch.rand(size, generator=generator(seed), device=common.DEVICE) + 0.1


def places(shape: Sequence[int], nnz: int, seed: int = 0, skew: float = 1.0) -> torch.Tensor:
    """Random coordinates, in order and without duplicates: uniform, or gathered at small indices by a skew above 1."""
    g = generator(seed)
    draws = [torch.rand(nnz, generator=g, device=common.DEVICE, dtype=torch.float64) for _ in shape]
    columns = [(u**skew * size).long() for u, size in zip(draws, shape, strict=True)]
    return torch.unique(torch.stack(columns), dim=1)


def scattered(shape: Sequence[int], nnz: int, seed: int = 0, skew: float = 1.0) -> stc.SparseTensor:
    """A tensor of random places and positive values."""
    coords = places(shape, nnz, seed, skew)
    return stc.SparseTensor(coords, positive(coords.shape[1], seed), tuple(shape))


def of_data(name: str) -> stc.SparseTensor:
    """A tensor that `Row.needs` names, or a synthetic one of `common`."""
    x = common.tensor(name)
    assert x is not None, f"SPARSETC_DATA holds no {name}.npz"
    return x


def uber() -> stc.SparseTensor:
    """The Uber tensor that comes with the package, on the device."""
    return stc.datasets.uber().to(common.DEVICE)
