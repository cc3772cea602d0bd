"""Operations of graph networks, against gathers and scatters as PyTorch Geometric's, and a GCN step against its parts.

    python benchmarks/graph.py

An R-MAT graph of 1.4 M edges, 64 features. Each reduction, a softmax over the entries of a row, a GAT layer of 4 heads
forward and backward. "theirs" gathers a row an edge, multiplies, and reduces: by `torch_geometric.utils.scatter` and
`softmax` where that is installed, else by `scatter_reduce` and `index_add` as these do. "ratio" is their time over
ours. Results are compared first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import synthetic
import torch
from common import DEVICE, record
from torch.nn.functional import leaky_relu

import sparsetc as stc

GEOMETRIC = find_spec("torch_geometric") is not None
HEADS = 4
Call = Callable[[], Any]


def main() -> None:
    """Time each, and record the table."""
    coords, shape = synthetic.rmat(17, 12, device=DEVICE)
    g = torch.Generator(device=DEVICE).manual_seed(0)
    weights = torch.rand(coords.shape[1], generator=g, device=DEVICE) + 0.1
    graph = stc.SparseTensor(coords, weights, shape).coalesce()
    x = torch.randn(shape[1], 64, generator=g, device=DEVICE)
    rows = []
    for name, (ours, theirs) in pairs(graph, x).items():
        for found, expected in zip(flat(ours()), flat(theirs()), strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
        times = {"ours_ms": median_ms(ours), "theirs_ms": median_ms(theirs)}
        rows.append({"what": name, **times, "ratio": round(times["theirs_ms"] / times["ours_ms"], 2)})
        print(rows[-1], flush=True)
    record("graph" if DEVICE == "cuda" else "graph_cpu", rows, geometric=GEOMETRIC)


def pairs(graph: stc.SparseTensor, x: torch.Tensor) -> dict[str, tuple[Call, Call]]:
    """What is timed, ours and theirs, by name."""
    target, source = graph.coords
    n, w = graph.shape[0], graph.values

    def scattered(kind: str) -> torch.Tensor:
        products = x[source] * w[:, None]
        if GEOMETRIC:
            from torch_geometric.utils import scatter

            names = {"amax": "max", "amin": "min", "prod": "mul"}
            return scatter(products, target, 0, n, names.get(kind, kind))
        places = target[:, None].expand_as(products)
        out = x.new_full((n, x.shape[1]), 1.0 if kind == "prod" else 0.0)
        return out.scatter_reduce(0, places, products, kind, include_self=kind == "prod")

    def softmaxed(scores: torch.Tensor) -> torch.Tensor:
        if GEOMETRIC:
            from torch_geometric.utils import softmax

            return softmax(scores, target, num_nodes=n)
        places = target[:, None].expand_as(scores)
        most = scores.new_zeros(n, scores.shape[1]).scatter_reduce(
            0, places, scores.detach(), "amax", include_self=False
        )
        raised = (scores - most[target]).exp()
        return raised / (raised.new_zeros(n, scores.shape[1]).index_add(0, target, raised) + 1e-16)[target]

    reductions: dict[str, tuple[Call, Call]] = {
        kind: (partial(stc.einsum, "ij,jr->ir", graph, x, reduce=kind), partial(scattered, kind))
        for kind in ("sum", "mean", "amax", "amin", "prod")
    }
    scores = torch.randn(graph.nnz, HEADS, device=x.device)
    of_heads = graph.with_values(scores)
    layer = stc.nn.GATConv(64, 16, HEADS, add_self_loops=False).to(x.device)

    def attended() -> torch.Tensor:
        mixed = layer.linear(x).unflatten(1, (HEADS, 16))
        own = leaky_relu(
            (mixed * layer.of_source).sum(-1)[source] + (mixed * layer.of_target).sum(-1)[target], layer.negative_slope
        )
        messages = mixed[source] * softmaxed(own)[:, :, None]
        return mixed.new_zeros(n, HEADS, 16).index_add(0, target, messages).flatten(1) + layer.bias

    def step(forward: Callable[[], torch.Tensor]) -> Any:
        return torch.autograd.grad(forward().square().sum(), layer.parameters())

    convolution = stc.nn.GraphConv(64, 64).to(x.device)
    normal = stc.nn.normalized(graph)
    kernel = stc.compile("ij,jr->ir", normal, x)

    def quiet(call: Call) -> Call:
        def called() -> Any:
            with torch.no_grad():
                return call()

        return called

    return {
        **{kind: (quiet(ours), quiet(theirs)) for kind, (ours, theirs) in reductions.items()},
        "softmax, 4 heads": (lambda: stc.softmax(of_heads, 1).values, lambda: softmaxed(scores)),
        "GAT forward": (quiet(lambda: layer(graph, x)), quiet(attended)),
        "GAT step": (lambda: step(lambda: layer(graph, x)), lambda: step(attended)),
        "GCN forward, its product and sum as theirs": (
            quiet(lambda: convolution(normal, x)),
            quiet(lambda: convolution.linear(kernel(x)) + convolution.bias),
        ),
    }


def flat(found: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    return [found] if isinstance(found, torch.Tensor) else list(found)


def median_ms(call: Call) -> float:
    """Milliseconds of a call: the median of rows of them, after which the device is waited for; first ones left out."""
    times, calls = [], 10 if DEVICE == "cuda" else 1
    for n in range(15):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if n >= 3:
            times.append(1e3 * (time.perf_counter() - start) / calls)
    return round(statistics.median(times), 4)


if __name__ == "__main__":
    main()
