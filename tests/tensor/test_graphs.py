"""Graphs of other libraries, edges and weights as sparse tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsetc as stc


def graphs_of_others() -> tuple[torch.Tensor, dict[str, Any]]:
    """Edges 0 -> 2, 1 -> 2, 2 -> 0 among four nodes, as the libraries of graphs have them."""
    networkx = pytest.importorskip("networkx")
    torch_geometric = pytest.importorskip("torch_geometric")
    edges = torch.tensor([[0, 1, 2], [2, 2, 0]])
    directed = networkx.DiGraph()
    directed.add_nodes_from(range(4))
    directed.add_edges_from(edges.T.tolist())
    graphs = {
        "networkx": directed,
        "EdgeIndex": torch_geometric.EdgeIndex(edges, sparse_size=(4, 4), sort_order="row"),
        "Data": torch_geometric.data.Data(edge_index=edges, num_nodes=4),
    }
    return edges, graphs


def test_graphs_of_other_libraries() -> None:
    edges, graphs = graphs_of_others()
    into_rows = torch.zeros(4, 4)
    into_rows[edges[1], edges[0]] = 1
    x = torch.rand(4, 3)
    layers = stc.nn.GraphConv(3, 2), stc.nn.GATConv(3, 2)
    expected = [layer(stc.SparseTensor.from_dense(into_rows), x) for layer in layers]
    for graph in graphs.values():
        torch.testing.assert_close(stc.SparseTensor.from_graph(graph).to_dense(), into_rows)
        torch.testing.assert_close(stc.einsum("ij,jr->ir", graph, x), into_rows.T @ x)  # as EdgeIndex @ x
        torch.testing.assert_close([layer(graph, x) for layer in layers], expected)
    torch.testing.assert_close(graphs["EdgeIndex"] @ x, into_rows.T @ x)
    for adjacency in (into_rows, into_rows.bool(), into_rows.bool().to_sparse(), into_rows.bool().numpy()):
        torch.testing.assert_close(stc.SparseTensor.from_graph(adjacency).to_dense(), into_rows)
    torch.testing.assert_close(layers[1](into_rows.bool().to_sparse_csr(), x), expected[1])
    assert stc.SparseTensor.from_graph(edges).shape == (3, 3)
    assert stc.SparseTensor.from_graph(edges.numpy(), nodes=(3, 7)).shape == (7, 3)


def test_weights_of_graphs() -> None:
    networkx = pytest.importorskip("networkx")
    data = pytest.importorskip("torch_geometric.data")
    edges, weights = torch.tensor([[0, 1, 2, 0], [2, 2, 0, 2]]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected = torch.tensor([[0.0, 0.0, 3.0], [0.0, 0.0, 0.0], [5.0, 2.0, 0.0]])
    graph = data.Data(edge_index=edges, edge_weight=weights, num_nodes=3)
    torch.testing.assert_close(stc.SparseTensor.from_graph(graph).to_dense(), expected)
    features = torch.stack((weights, -weights), 1)
    of_features = stc.SparseTensor.from_graph(edges, features, nodes=3)
    torch.testing.assert_close(of_features.to_dense(), torch.stack((expected, -expected), 2))
    undirected = networkx.Graph()
    undirected.add_edge("a", "b", weight=2, length=5)
    torch.testing.assert_close(stc.SparseTensor.from_graph(undirected).to_dense(), torch.tensor([[0.0, 2], [2, 0]]))
    lengths = stc.SparseTensor.from_graph(undirected, weight="length").to_dense()
    torch.testing.assert_close(lengths, torch.tensor([[0.0, 5], [5, 0]]))


def test_a_tensor_of_torch_sparse() -> None:
    """A stand-in for its class, as it has no wheel for every torch: `coo` and `sizes` are what is read."""
    rows, columns = torch.tensor([0, 2]), torch.tensor([1, 0])

    def made(values: torch.Tensor | None, *dense: int) -> Any:
        methods = {"coo": lambda self: (rows, columns, values), "sizes": lambda self: [3, 2, *dense]}
        return type("SparseTensor", (), {"__module__": "torch_sparse.tensor", **methods})()

    torch.testing.assert_close(stc.SparseTensor.coerce(made(None)).to_dense(), torch.tensor([[0.0, 1], [0, 0], [1, 0]]))
    assert (stc.ops.spmm(made(torch.tensor([2.0, 3.0])), torch.ones(2)) == torch.tensor([2.0, 0, 3])).all()
    assert stc.SparseTensor.from_graph(made(torch.ones(2, 4), 4)).shape == (3, 2, 4)


def test_what_is_no_graph() -> None:
    for bad in ("abc", [[0, 1], [1, 0]], torch.ones(3), stc.rand((2, 2, 2), nnz=2).to_torch()):
        with pytest.raises(stc.FormatError, match="from_graph takes"):
            stc.SparseTensor.from_graph(bad)
    with pytest.raises(stc.FormatError, match="go with edges"):
        stc.SparseTensor.from_graph(torch.eye(3), nodes=3)
    with pytest.raises(stc.ShapeError, match="a row for each of 2 edges"):
        stc.SparseTensor.from_graph(torch.tensor([[0, 1], [1, 0]]), torch.ones(3))
    with pytest.raises(stc.CoordinateError):
        stc.SparseTensor.from_graph(torch.tensor([[0, 1], [1, 0]]), nodes=1)
    edges = torch.tensor([[0, 1], [1, 0]])
    for call in (stc.spmm, stc.nn.GraphConv(3, 2), lambda edges, x: stc.einsum("ij,jr->ir", edges, x)):
        with pytest.raises(stc.EquationError, match="from_graph"):
            call(edges, torch.rand(2, 3))
    with pytest.raises(stc.ShapeError, match="from_graph makes one of an edge_index"):
        stc.nn.GATConv(3, 2)(torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 3))
