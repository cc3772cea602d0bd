"""Graph attention: against softmax over all pairs and PyG's layers; dropout, types and features of edges."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from layer_cases import graph

import sparsetc as stc


def dense_attention(layer: stc.nn.GATConv, meets: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> Any:
    """Return what a layer gives, by softmax over all pairs."""
    heads = layer.of_source.shape
    of_sources, of_targets = ((x @ layer.linear.weight.T).view(-1, *heads) for x in (sources, targets))
    scores = (of_targets * layer.of_target).sum(-1)[:, None] + (of_sources * layer.of_source).sum(-1)[None]
    scores = torch.where(scores > 0, scores, layer.negative_slope * scores).masked_fill(~meets[..., None], -torch.inf)
    found = torch.einsum("ijh,jhr->ihr", torch.softmax(scores, 1).nan_to_num(0.0), of_sources)
    return found.flatten(1) + layer.bias


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize(("targets", "sources"), [(9, 9), (6, 9), (9, 6)])
def test_graph_attention(targets: int, sources: int, loops: bool) -> None:
    torch.manual_seed(0)
    layer = stc.nn.GATConv(5, 4, heads=3, negative_slope=0.7, add_self_loops=loops).double()
    torch.nn.init.normal_(layer.bias)
    adjacency = graph()[:targets, :sources]
    x = torch.randn(9, 5, dtype=torch.float64)
    meets = adjacency.to_dense() != 0
    if loops:
        meets |= torch.eye(targets, sources, dtype=torch.bool)
    expected = dense_attention(layer, meets, x[:sources], x[:targets])
    found = layer(adjacency, x if targets == sources else (x[:sources], x[:targets]))
    torch.testing.assert_close(found, expected)
    trained = [layer.of_source, layer.of_target, layer.linear.weight, layer.bias]
    own, other = (torch.autograd.grad(y.square().sum(), trained) for y in (found, expected))
    assert all(torch.allclose(a, b) for a, b in zip(own, other, strict=True))
    other_targets = x[:targets].flip(0)
    found = layer(adjacency, (x[:sources], other_targets))
    torch.testing.assert_close(found, dense_attention(layer, meets, x[:sources], other_targets))


@pytest.mark.parametrize("kind", [stc.nn.GATConv, stc.nn.GATv2Conv])
def test_dropout_of_graph_attention(kind: Any) -> None:
    """Of weights, as PyG's: with one neighbour each, a row is 0 or twice what it is without."""
    layer, x = kind(3, 2, heads=400, dropout=0.5, add_self_loops=False), torch.rand(4, 3)
    adjacency = stc.eye(4)[torch.tensor([1, 2, 3, 0])]
    for name, parameter in layer.named_parameters():
        parameter.data *= "bias" not in name
    whole = layer.eval()(adjacency, x).view(4, 400, 2)
    x.requires_grad_()
    dropped = layer.train()(adjacency, x).view(4, 400, 2)
    share = dropped / whole
    torch.testing.assert_close(share[..., 0], share[..., 1])
    torch.testing.assert_close(share, torch.where(share > 1, 2.0, 0.0))
    assert 0.4 < share.count_nonzero() / share.numel() < 0.6
    gradient = torch.autograd.grad(dropped.sum(), x)[0]
    torch.testing.assert_close((gradient * x).sum(), dropped.sum())  # which is linear in x
    with pytest.raises(stc.ShapeError, match="dropout is a share, from 0 to 1, found 2"):
        kind(3, 2, dropout=2)


def test_where_weights_start() -> None:
    torch.manual_seed(0)
    layer, bound = stc.nn.GATConv(5, 40, heads=30), (6 / 70) ** 0.5  # Glorot and Bengio's
    for weight in (layer.of_source, layer.of_target):
        assert weight.min() < -0.9 * bound
        assert 0.9 * bound < weight.max() <= bound
    assert not layer.bias.any()


def test_graph_attention_of_16_bits_and_in_forward_mode() -> None:
    torch.manual_seed(0)
    layer, adjacency, x = stc.nn.GATConv(5, 4, heads=3).double(), graph(), 4 * torch.randn(9, 5, dtype=torch.float64)
    meets = (adjacency.to_dense() != 0) | torch.eye(9, dtype=torch.bool)
    _, found = torch.func.jvp(lambda x: layer(adjacency, x), (x,), (x.cos(),))
    _, expected = torch.func.jvp(lambda x: dense_attention(layer, meets, x, x), (x,), (x.cos(),))
    torch.testing.assert_close(found, expected)
    layer.bfloat16()
    x = x.bfloat16()
    found = layer(adjacency, x)
    layer.double()
    assert found.dtype == torch.bfloat16
    mixed = (x.double() @ layer.linear.weight.T).bfloat16()  # as torch's own product gives it
    exact = copy.deepcopy(layer)
    exact.linear.weight.data = torch.eye(12, dtype=torch.float64)
    expected = dense_attention(exact, meets, mixed.double(), mixed.double())
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize(("targets", "sources"), [(12, 12), (7, 12), (12, 7)])
def test_the_numbers_of_pyg(targets: int, sources: int, twice: bool, loops: bool) -> None:
    """Of graphs with and without self loops, edges that are named twice, nodes without edges and two kinds of nodes."""
    pytest.importorskip("torch_geometric")
    from torch_geometric.nn import GATConv, GATv2Conv
    from torch_geometric.nn.conv.gcn_conv import gcn_norm

    g = torch.Generator().manual_seed(targets)
    pairs = (torch.rand(sources, targets, generator=g) < 0.3).index_fill_(0, torch.tensor([0, 5]), False)
    pairs[:, 0], pairs[1, 1], pairs[2, 2] = False, True, False  # nodes 0 and 5 send nothing, node 0 gets nothing
    edges = pairs.nonzero().T
    if twice:
        edges = torch.cat((edges, edges[:, edges[0] != edges[1]][:, :5]), 1)
    weights = torch.rand(edges.shape[1], dtype=torch.float64, generator=g)
    adjacency = stc.SparseTensor(edges.flip(0), weights, (targets, sources))
    if targets == sources:
        (source, target), normal = gcn_norm(edges, weights, targets, add_self_loops=loops)
        expected = torch.zeros(12, 12, dtype=torch.float64).index_put_((target, source), normal, accumulate=True)
        torch.testing.assert_close(stc.nn.normalized(adjacency, loops).to_dense(), expected)
    if twice:  # an edge of two is one here
        edges = edges.unique(dim=1)
    theirs = GATConv(5, 4, heads=3, negative_slope=0.3, add_self_loops=loops).double()
    torch.nn.init.normal_(theirs.bias)
    layer = stc.nn.GATConv(5, 4, heads=3, negative_slope=0.3, add_self_loops=loops).double()
    state = {"linear.weight": theirs.lin.weight, "bias": theirs.bias}
    layer.load_state_dict(state | {"of_source": theirs.att_src[0], "of_target": theirs.att_dst[0]})
    x = [torch.randn(n, 5, dtype=torch.float64, generator=g) for n in (sources, targets)]
    torch.testing.assert_close(layer(adjacency, tuple(x)), theirs(tuple(x), edges))
    if targets == sources:
        torch.testing.assert_close(layer(adjacency, x[0]), theirs(x[0], edges))
    if targets <= sources:  # PyG has no means for targets that are no sources
        edge_features(adjacency, tuple(x), edges, loops)
        edge_features_in_the_middle(adjacency, tuple(x), edges, loops)
    second = GATv2Conv(5, 4, heads=3, negative_slope=0.3, add_self_loops=loops).double()
    layer2 = stc.nn.GATv2Conv(5, 4, heads=3, negative_slope=0.3, add_self_loops=loops).double()
    names = {"of_source": "lin_l", "of_target": "lin_r"}
    state = {
        f"{name}.{kind}": getattr(getattr(second, of), kind)
        for name, of in names.items()
        for kind in ("weight", "bias")
    }
    layer2.load_state_dict(state | {"score": second.att[0], "bias": second.bias})
    found, expected = layer2(adjacency, tuple(x)), second(tuple(x), edges)
    torch.testing.assert_close(found, expected)
    own = torch.autograd.grad(found.square().sum(), [layer2.score, layer2.of_source.weight, layer2.of_target.bias])
    other = torch.autograd.grad(expected.square().sum(), [second.att, second.lin_l.weight, second.lin_r.bias])
    for one, two in zip(own, other, strict=True):
        torch.testing.assert_close(one, two.view_as(one))


def edge_features(adjacency: stc.SparseTensor, x: Any, edges: torch.Tensor, loops: bool) -> None:
    """Compare attention with features of edges to PyG's, results and gradients."""
    from torch_geometric.nn import GATConv

    theirs = GATConv(5, 4, heads=3, edge_dim=2, add_self_loops=loops).double()
    layer = stc.nn.GATConv(5, 4, heads=3, edge_dim=2, add_self_loops=loops).double()
    state = {"linear.weight": theirs.lin.weight, "edge_linear.weight": theirs.lin_edge.weight, "bias": theirs.bias}
    ends = {"of_source": theirs.att_src[0], "of_target": theirs.att_dst[0], "of_edge": theirs.att_edge[0]}
    layer.load_state_dict(state | ends)
    features = torch.randn(edges.shape[1], 2, dtype=torch.float64).requires_grad_()
    graph = stc.SparseTensor(edges.flip(0), features, (*adjacency.shape, 2))
    found, expected = layer(graph, x), theirs(x, edges, features)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(layer(adjacency, x, graph.values), expected)
    weights = torch.randn(found.shape, dtype=torch.float64)
    both = torch.autograd.grad(found, [features, layer.edge_linear.weight, layer.of_edge], weights)
    other = torch.autograd.grad(expected, [features, theirs.lin_edge.weight, theirs.att_edge], weights)
    for one, two in zip(both, other, strict=True):
        torch.testing.assert_close(one, two.view_as(one))
    with pytest.raises(stc.ShapeError, match="takes features"):
        layer(graph, x, graph.values[:, :1])
    with pytest.raises(stc.ShapeError, match="made with edge_dim="):
        stc.nn.GATConv(5, 4).double()(graph, x, graph.values)


def edge_features_in_the_middle(adjacency: stc.SparseTensor, x: Any, edges: torch.Tensor, loops: bool) -> None:
    """The same of GATv2Conv, which takes them before its leaky ReLU."""
    from torch_geometric.nn import GATv2Conv

    theirs = GATv2Conv(5, 4, heads=3, edge_dim=2, add_self_loops=loops).double()
    layer = stc.nn.GATv2Conv(5, 4, heads=3, edge_dim=2, add_self_loops=loops).double()
    state = {f"of_source.{name}": one for name, one in theirs.lin_l.named_parameters()}
    state |= {f"of_target.{name}": one for name, one in theirs.lin_r.named_parameters()}
    state |= {"edge_linear.weight": theirs.lin_edge.weight, "score": theirs.att[0], "bias": theirs.bias}
    layer.load_state_dict(state)
    features = torch.randn(edges.shape[1], 2, dtype=torch.float64).requires_grad_()
    graph = stc.SparseTensor(edges.flip(0), features, (*adjacency.shape, 2))
    found, expected = layer(graph, x), theirs(x, edges, features)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, dtype=torch.float64)
    own = [features, layer.edge_linear.weight, layer.score, layer.of_source.weight]
    other = [features, theirs.lin_edge.weight, theirs.att, theirs.lin_l.weight]
    both = torch.autograd.grad(found, own, weights), torch.autograd.grad(expected, other, weights)
    for one, two in zip(*both, strict=True):
        torch.testing.assert_close(one, two.view_as(one))
    with pytest.raises(stc.ShapeError, match="takes features"):
        layer(graph, x, graph.values[:, :1])


@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv"])
def test_attention_layers_have_the_defaults_of_pyg(kind: str) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    ours, theirs = (inspect.signature(getattr(of, kind)).parameters for of in (stc.nn, pyg))
    for name, parameter in ours.items():
        if name in theirs and parameter.default is not parameter.empty:
            assert parameter.default == theirs[name].default, name
