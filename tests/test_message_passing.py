"""Layers of PyG that are fused: against the layers themselves."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import sparsetc as stc
from sparsetc import message_passing

PYG = ["GCN", "GCN with weights", "SAGE", "SAGE max", "SAGE of two kinds", "GAT", "GATv2", "GIN", "RGCN", "RGCN sum"]


@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("name", PYG)
def test_layers_of_pyg_that_are_fused(name: str, twice: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the layers themselves, also where an edge is named twice or a node has none."""
    pyg = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    edges = torch.randint(0, 8, (2, 20)).unique(dim=1)
    edges = torch.cat((edges, edges[:, :5]), 1) if twice else edges
    count, x = edges.shape[1], torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(count, dtype=torch.float64, requires_grad=True)
    kind = torch.arange(count) % 3
    made: dict[str, Any] = {
        "GCN": (pyg.GCNConv(6, 4), (x, edges)),
        "GCN with weights": (pyg.GCNConv(6, 4), (x, edges, weights)),
        "SAGE": (pyg.SAGEConv(6, 4), (x, edges)),
        "SAGE max": (pyg.SAGEConv(6, 4, aggr="max"), (x, edges)),
        "SAGE of two kinds": (pyg.SAGEConv((6, 6), 4), ((x, x[:9]), edges)),
        "GAT": (pyg.GATConv(6, 4, heads=3), (x, edges)),
        "GATv2": (pyg.GATv2Conv(6, 4, heads=3), (x, edges)),
        "GIN": (pyg.GINConv(torch.nn.Linear(6, 4)), (x, edges)),
        "RGCN": (pyg.RGCNConv(6, 4, 3), (x, edges, kind)),
        "RGCN sum": (pyg.RGCNConv(6, 4, 3, aggr="add"), (x, edges, kind)),
    }
    layer, inputs = made[name]
    layer.double()
    layer.reset_parameters()
    followed = [x, *layer.parameters()] + ([weights] if "weights" in name else [])
    expected = layer(*inputs)
    gradients = torch.autograd.grad(expected.cos().sum(), followed)
    fused = stc.nn.fuse(copy.deepcopy(layer))
    followed[1 : 1 + len([*layer.parameters()])] = fused.parameters()
    calls: list[str] = []
    monkeypatch.setattr(message_passing, "einsum", lambda *a, **k: calls.append(a[0]) or stc.einsum(*a, **k))
    for model in (fused, fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):  # at first as it was
        torch.testing.assert_close(model(*inputs), expected)
    assert len(calls) >= 3
    torch.testing.assert_close(torch.autograd.grad(fused(*inputs).cos().sum(), followed), gradients)


def test_what_fuse_leaves_alone() -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    edges, x = torch.tensor([[0, 1, 2], [2, 2, 0]]), torch.rand(3, 4)

    class Doubled(pyg.SAGEConv):
        def message(self, x_j: torch.Tensor) -> torch.Tensor:
            return 2 * x_j

    several = pyg.SAGEConv(4, 2, aggr=["mean", "max"])
    for layer in (Doubled(4, 2), pyg.EdgeConv(torch.nn.Linear(8, 2)), pyg.SAGEConv(4, 2, aggr="median"), several):
        expected = layer(x, edges)
        assert "propagate" not in vars(stc.nn.fuse(torch.nn.Sequential(layer))[0])
        torch.testing.assert_close(layer(x, edges), expected)
    seen: list[Any] = []
    layer = pyg.SAGEConv(4, 2)
    adjacency = torch.sparse_coo_tensor(edges.flip(0), torch.ones(3), (3, 3)).to_sparse_csr()
    expected = layer(x, edges)
    stc.nn.fuse(layer)
    torch.testing.assert_close(layer(x, adjacency), expected)
    layer.register_message_forward_hook(lambda layer, inputs, out: seen.append(out))
    torch.testing.assert_close(layer(x, edges), expected)
    assert len(seen) == 1


def test_fused_layers_under_modes() -> None:
    """EdgeIndex with and without sizes, autocast, inference, vmap over features, and edges that are not there."""
    pyg = pytest.importorskip("torch_geometric.nn")
    edge_index = pytest.importorskip("torch_geometric").EdgeIndex
    edges, x = torch.tensor([[0, 1, 2], [2, 2, 0]]), torch.rand(3, 4)
    layer = pyg.SAGEConv(4, 2)
    fused = stc.nn.fuse(copy.deepcopy(layer))
    for graph in (edges, edge_index(edges), edge_index(edges, sparse_size=(3, 3)), edges[:, :0]):
        for _ in range(2):
            torch.testing.assert_close(fused(x, graph), layer(x, graph))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(fused(x, edges), layer(x, edges), rtol=2**-6, atol=2**-6)
    with torch.inference_mode():
        torch.testing.assert_close(fused(x, edges), layer(x, edges))
    many = torch.func.vmap(lambda x: fused(x, edges))(torch.stack((x, 2 * x)))
    torch.testing.assert_close(many[1], layer(2 * x, edges))
    wrong = torch.tensor([[0, 5], [1, 0]])
    for _ in range(2):
        with pytest.raises(IndexError):
            fused(x, wrong)
