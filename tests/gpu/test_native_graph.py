"""Reductions, softmax, attention and layers on a GPU, against the same on the CPU, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparsetc as stc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LARGE = (3000, 40)  # rows of a mean of 40 entries, one of all columns, some of none


def drawn(shape: tuple[int, ...], seed: int = 0) -> stc.SparseTensor:
    g = torch.Generator().manual_seed(seed)
    stored = torch.rand(shape[:2], generator=g) < torch.rand(shape[0], 1, generator=g) ** 4
    stored[0] = True
    return stc.SparseTensor(
        stored.nonzero().T, torch.randn(int(stored.sum()), *shape[2:], generator=g).double(), tuple(shape)
    )


def both(call: Callable[..., Any], x: stc.SparseTensor, *dense: torch.Tensor) -> None:
    """Compare results, and gradients to all values, on both devices."""
    results = []
    for device in ("cpu", "cuda"):
        own = [t.detach().to(device).requires_grad_() for t in (x.values, *dense)]
        found = call(x.to(device).with_values(own[0]), *own[1:])
        weights = torch.arange(found.numel(), device=device, dtype=found.dtype).cos().view(found.shape)
        gradients = torch.autograd.grad((found * weights).sum(), own, allow_unused=True)
        results.append([t.detach().cpu() for t in (found, *gradients) if t is not None])
    assert len(results[0]) == len(results[1])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here)


@pytest.mark.parametrize("heads", [(), (1,), (4,), (3, 2), (40,)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("function", [stc.softmax, stc.log_softmax])
def test_softmax(function: Callable[..., Any], dim: int, heads: tuple[int, ...]) -> None:
    for shape in (LARGE, (40, 3000)):
        both(lambda x: function(x, dim).values, drawn((*shape, *heads)))


@pytest.mark.parametrize("width", [1, 5, 64])
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin", "prod"])
@pytest.mark.parametrize("equation", ["ij,jr->ir", "ij,ir->jr"])
def test_reduced_einsums(equation: str, reduce: str, width: int) -> None:
    x = drawn((40, 3000) if equation.startswith("ij,jr") else LARGE)
    b = torch.randn(3000, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    both(lambda x, b: stc.einsum(equation, x, b, reduce=reduce), x, b)


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "norm"])
@pytest.mark.parametrize("heads", [(), (4,)], ids=str)
def test_reductions(name: str, heads: tuple[int, ...]) -> None:
    for dim in (None, 0, 1):
        both(lambda x, d=dim: getattr(x, name)(dim=d), drawn((*LARGE, *heads)))


def test_layers() -> None:
    x, graph = torch.randn(500, 8, dtype=torch.float64), drawn((500, 500), 2)
    for layer in (stc.nn.GATConv(8, 6, heads=3).double(), stc.nn.GraphConv(8, 6).double()):
        results = []
        for device in ("cpu", "cuda"):
            layer.to(device)
            found = layer(graph.to(device), x.to(device))
            gradients = torch.autograd.grad(found.square().sum(), list(layer.parameters()))
            results.append([t.detach().cpu() for t in (found, *gradients)])
        for here, there in zip(*results, strict=True):
            torch.testing.assert_close(there, here)


def test_attention() -> None:
    q, k, v = (torch.randn(2, n, 8, dtype=torch.float64) for n in (300, 200, 200))
    both(lambda x, q, k, v: stc.attention(q, k, v, x), drawn((300, 200), 3), q, k, v)
