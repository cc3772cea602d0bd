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


def distinct(coords: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct coordinates in order, and which of them each one is. (torch.unique of columns takes seconds.)"""
    numbers = torch.zeros_like(coords[0])
    for column, size in zip(coords, shape, strict=True):
        numbers = numbers * size + column
    numbers, inverse = torch.unique(numbers, return_inverse=True)
    return torch.stack(torch.unravel_index(numbers, tuple(shape))), inverse


def with_loops(edges: torch.Tensor, nodes: int) -> torch.Tensor:
    """Edges, and one of every node to itself."""
    loops = torch.arange(nodes, device=edges.device).expand(2, nodes)
    return distinct(torch.cat((edges, loops), 1), (nodes, nodes))[0]


def places(shape: Sequence[int], nnz: int, seed: int = 0, skew: float = 1.0) -> torch.Tensor:
    """Random coordinates, in order and without duplicates: uniform, or gathered at small indices by a skew above 1."""
    g = generator(seed)
    draws = [torch.rand(nnz, generator=g, device=common.DEVICE, dtype=torch.float64) for _ in shape]
    columns = [(u**skew * size).long() for u, size in zip(draws, shape, strict=True)]
    return distinct(torch.stack(columns), shape)[0]


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
