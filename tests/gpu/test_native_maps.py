"""Attention and graph attention by one kernel on a GPU, against float64 over all pairs, with gradients."""

from __future__ import annotations

import logging
from itertools import product

import pytest
import torch
from map_cases import (
    FORMS,
    MAPPED,
    PATTERNS,
    READS,
    SMALL,
    as_if_large,
    dense_attention,
    form_of_attention,
    mapped_cases,
    reading,
    scattered,
)

import sparsetc as stc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("name", "width"), [*product(PATTERNS, (20, 64, 128)), *product(("mask", "scattered"), (256,))]
)
def test_attention(
    name: str, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    as_if_large(name, monkeypatch)
    given, meets = PATTERNS[name]()
    pattern = given if name == "mask" else given.to("cuda")
    rows, columns = meets.shape
    sizes = enumerate((rows, columns, columns), 2)  # drawn apart: of equal ones a query meets itself alone
    own = [drawn(2, n, width, seed=seed).to(dtype).requires_grad_() for seed, n in sizes]
    exact = [t.detach().double().requires_grad_() for t in own]
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = stc.attention(*own, pattern, scale=0.3)
    assert "attention runs in one kernel" in caplog.text
    expected = dense_attention(*exact, meets.cuda(), 0.3, None)
    upstream = drawn(2, rows, width, seed=1).to(dtype)
    gradients = torch.autograd.grad(found, own, upstream)
    exact_gradients = torch.autograd.grad(expected, exact, upstream.double())
    for one, other in zip((found, *gradients), (expected, *exact_gradients), strict=True):
        assert float((one.double() - other).norm()) <= TOLERANCE[dtype] * (1 + float(other.norm()))


@pytest.mark.parametrize("name", READS)
def test_functions_of_scores_that_read_a_tensor(name: str, caplog: pytest.LogCaptureFixture) -> None:
    inputs, function, dense = reading(name, (2, 2), torch.device("cuda"))
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = stc.attention(*inputs[:3], SMALL, bias=function)
    assert "attention runs in one kernel" in caplog.text
    expected = dense(SMALL)
    both = [(y, *torch.autograd.grad(y.square().sum(), inputs)) for y in (found, expected)]
    for one, other in zip(*both, strict=True):
        assert float((one.double() - other).norm()) <= 1e-4 * (1 + float(other.norm()))
    graph, plain = torch.cuda.CUDAGraph(), [t.detach() for t in inputs[:3]]
    with torch.cuda.graph(graph), torch.no_grad():
        again = stc.attention(*plain, SMALL, bias=function)
    again.zero_()
    graph.replay()
    torch.testing.assert_close(again, found.detach())


def test_the_same_bits_in_a_cuda_graph_and_in_a_compiled_function() -> None:
    q, k, v = (drawn(2, 150, 64, seed=n).half() for n in range(3))
    expected = stc.attention(q, k, v, SMALL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = stc.attention(q, k, v, SMALL)
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)
    compiled = torch.compile(lambda q: stc.attention(q, k, v, SMALL) * 1.0, fullgraph=True)
    assert torch.equal(compiled(q), expected)


@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv"])
def test_graph_attention_as_on_a_cpu(kind: str) -> None:
    torch.manual_seed(0)
    layer, x, graph = getattr(stc.nn, kind)(8, 6, heads=3), torch.randn(500, 8), scattered(500, 500, 0.02)
    results = []
    for device in ("cpu", "cuda"):
        layer.to(device)
        found = layer(stc.SparseTensor.from_dense(graph.float()).to(device), x.to(device))
        gradients = torch.autograd.grad(found.square().sum(), list(layer.parameters()))
        results.append([t.detach().cpu() for t in (found, *gradients)])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    as_if_large(name, monkeypatch)
    both = form_of_attention(name, torch.device("cuda"))
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = both()
    assert "attention runs in one kernel" in caplog.text
    with stc.options(backend="torch"):
        expected = both()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["near", "scattered", "by-row"])
@pytest.mark.parametrize("name", MAPPED)
def test_map_entries(name: str, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    as_if_large(way, monkeypatch)
    function, form = mapped_cases(name, torch.float32, torch.device("cuda"))[:2]
    inputs = [t for t in form.tensors if t.requires_grad]
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = stc.map_entries(function, form.pattern, **form.named)
    assert "map_entries runs in one kernel" in caplog.text
    with stc.options(backend="torch"):
        expected = stc.map_entries(function, form.pattern, **form.named)
    both = [y.values if isinstance(y, stc.SparseTensor) else y for y in (found, expected)]
    results = [(y, *torch.autograd.grad(y.square().sum(), inputs, retain_graph=True)) for y in both]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
