"""Graphs as layers take them: the convolution and degrees against dense ones, batches, refusals and settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_cases import graph
from torch.utils.data import DataLoader

import sparsetc as stc


@pytest.mark.parametrize(("inputs", "outputs"), [(4, 6), (6, 4)])
def test_graph_convolution(inputs: int, outputs: int) -> None:
    adjacency, x = graph(), torch.randn(9, inputs, dtype=torch.float64)
    layer = stc.nn.GraphConv(inputs, outputs).double()
    assert 0 < adjacency.to_dense().diagonal().count_nonzero() < 9
    dense = adjacency.to_dense().fill_diagonal_(1.0)  # loops that are there are not added again
    root = dense.sum(1).rsqrt()
    normal = stc.nn.normalized(adjacency)
    torch.testing.assert_close(normal.to_dense(), root[:, None] * dense * root)
    torch.testing.assert_close(layer(normal, x), (root[:, None] * dense * root) @ x @ layer.linear.weight.T)
    assert stc.nn.normalized(adjacency).pattern is normal.pattern


def test_degrees() -> None:
    """Loops keep their values; an entry of a node whose sum is 0 is 0; sums of 16 bits, and of integers, are exact."""
    x = stc.SparseTensor([[0, 0, 1], [0, 1, 2]], [3.0, 1.0, 9.0], (3, 3))
    expected = torch.tensor([[0.75, 1 / 40**0.5, 0.0], [0.0, 0.1, 9 / 10**0.5], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(stc.nn.normalized(x).to_dense(), expected)
    expected = torch.tensor([[0.75, 1 / 6.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(stc.nn.normalized(x, add_self_loops=False).to_dense(), expected)
    values = torch.tensor([3.0, 1.0, 0.0], requires_grad=True)  # of which the last row's sum is 0
    (gradient,) = torch.autograd.grad(
        stc.nn.normalized(x.with_values(values), add_self_loops=False).values.sum(), values
    )
    assert gradient.isfinite().all()
    torch.testing.assert_close(stc.nn.normalized(x.to(torch.int8)).values, stc.nn.normalized(x).values)
    modes = stc.nn.normalized(x.with_values(torch.stack((x.values, 2 * x.values), 1)))
    for n in range(2):
        torch.testing.assert_close(modes.values[:, n], stc.nn.normalized(x.with_values(x.values * (n + 1))).values)
    for dtype in (torch.float16, torch.bfloat16):
        star = stc.SparseTensor([[0] * 3000, [*range(3000)]], torch.ones(3000, dtype=dtype), (3000, 3000))
        found = stc.nn.normalized(star).values
        torch.testing.assert_close(found[1], torch.tensor(3000**-0.5, dtype=dtype), rtol=0, atol=0)


def test_what_graphs_are_refused() -> None:
    with pytest.raises(stc.ShapeError, match="a row and a column"):
        stc.nn.normalized(stc.SparseTensor.from_dense(torch.ones(2, 3)))
    with pytest.raises(stc.DtypeError, match="real values"):
        stc.nn.normalized(stc.eye(2).to(torch.complex64))
    for bad in (torch.eye(3), stc.rand((3, 3, 3), 0.5), stc.SparseTensor([[0]], [1.0], (3,))):
        with pytest.raises(stc.ShapeError, match="normalized takes a sparse matrix"):
            stc.nn.normalized(bad)
        with pytest.raises(stc.ShapeError, match="GATConv takes a sparse matrix"):
            stc.nn.GATConv(4, 2)(bad, torch.rand(3, 4))
    layer, wide = stc.nn.GATConv(4, 2), stc.SparseTensor.from_dense(torch.ones(3, 5))
    three, five = torch.rand(3, 4), torch.rand(5, 4)
    for x in (three, five, (three, five), (five, five), (five, torch.rand(3, 2)), (five, three[0])):
        with pytest.raises(stc.ShapeError, match=r"3 targets and 5 sources takes features \(5, 4\) of sources and"):
            layer(wide, x)
        with pytest.raises(stc.ShapeError, match="5 targets and 3 sources"):
            layer(wide.T, x if isinstance(x, torch.Tensor) else x[::-1])


def test_settings_reach_every_product() -> None:
    x, plan = torch.rand(4, 4), {"plan": "no such plan"}
    for call in (
        lambda: stc.nn.SparseLinear(stc.eye(4), **plan)(x),
        lambda: stc.nn.SparseLinear.from_dense(torch.eye(4), **plan)(x),
        lambda: stc.nn.SparseLinear.from_linear(torch.nn.Linear(4, 4), **plan)(x),
        lambda: stc.nn.GraphConv(4, 2, **plan)(stc.eye(4), x),
        lambda: stc.nn.GATConv(4, 2, **plan)(stc.eye(4), x),
    ):
        with pytest.raises(stc.PlanError, match="no such plan"):
            call()


def test_batches_of_graphs() -> None:
    samples = [(graph(n, n), torch.full((n, 2), float(n)), n % 2) for n in (3, 5, 4)]
    (adjacency, features, labels), *_ = DataLoader(samples, batch_size=3, collate_fn=stc.nn.collate)  # type: ignore[var-annotated, arg-type]
    torch.testing.assert_close(adjacency.to_dense(), torch.block_diag(*(s[0].to_dense() for s in samples)))
    assert features.shape == (12, 2)
    assert labels.tolist() == [1, 1, 0]
    assert stc.nn.batch_of([3, 5, 4]).bincount().tolist() == [3, 5, 4]


def test_graphs_in_blocks() -> None:
    given = torch.zeros(6, 6, dtype=torch.float64)
    given[:2, 2:4], given[4:, 4:] = torch.rand(2, 2), torch.rand(2, 2)
    blocks, single = stc.SparseTensor.from_torch(given.to_sparse_bsr((2, 2))), stc.SparseTensor.from_dense(given)
    torch.testing.assert_close(stc.nn.normalized(blocks).to_dense(), stc.nn.normalized(single).to_dense())
    torch.testing.assert_close(stc.nn.collate([blocks, single]).to_dense(), torch.block_diag(given, given))
    layer, x = stc.nn.GATConv(3, 2, heads=2).double(), torch.rand(6, 3, dtype=torch.float64)
    torch.testing.assert_close(layer(blocks, x), layer(single, x))
    modes = stc.SparseTensor([[0], [1]], torch.ones(1, 3), (2, 2, 3))
    assert stc.nn.collate([modes, modes]).shape == (4, 4, 3)
    assert stc.nn.collate([given.to_sparse(), blocks]).shape == (12, 12)
    assert stc.nn.batch_of([]).tolist() == []
    for bad in ([], [single, torch.eye(2)], [(single, 1), (single,)], [(single, 1), single]):
        with pytest.raises(stc.ShapeError, match="collate takes samples that are all alike"):
            stc.nn.collate(bad)
    with pytest.raises(stc.ShapeError, match="one order"):
        stc.nn.collate([single, stc.rand((2, 2, 2), dtype=torch.float64)])


def test_layers_check_their_keywords_when_they_are_made() -> None:
    for layer, size in ((stc.nn.GraphConv, (3, 2)), (stc.nn.GATConv, (3, 2)), (stc.nn.SparseLinear, (stc.eye(3),))):
        with pytest.raises(stc.KeywordError, match="precison"):
            layer(*size, precison="high")
        assert layer(*size, precision="high").settings == {"precision": "high"}


@pytest.mark.parametrize("layer", [stc.nn.GraphConv, stc.nn.GATConv, stc.nn.GATv2Conv])
def test_layers_check_their_sizes_when_they_are_made(layer: Any) -> None:
    name = layer.__name__
    for sizes, found in (((-3, 4), "in_channels .* found -3"), ((3, 1.5), "out_channels"), ((3, None), "out_channels")):
        with pytest.raises(stc.ShapeError, match=f"{name}: {found}"):
            layer(*sizes)
    if layer is not stc.nn.GraphConv:
        for named in ({"heads": -1}, {"heads": "x"}, {"edge_dim": -1}, {"edge_dim": 1.5}):
            with pytest.raises(stc.ShapeError, match=f"{name}: {next(iter(named))} must be an integer"):
                layer(3, 4, **named)
        for named in ({"dropout": "x"}, {"negative_slope": None}):
            with pytest.raises(stc.DtypeError, match="must be a number"):
                layer(3, 4, **named)


def test_layers_check_features_before_anything_runs() -> None:
    eye = stc.eye(4)
    for x, found in (([1.0], "list"), (torch.ones(4), r"\(4,\)"), (torch.ones(4, 3), r"\(4, 3\)")):
        for call in (stc.nn.GraphConv(4, 2), stc.nn.GraphConv(2, 4), stc.nn.SparseLinear(stc.eye(5))):
            with pytest.raises(stc.ShapeError, match=found):
                call(*([] if isinstance(call, stc.nn.SparseLinear) else [eye]), x)
    for wrong in (None, [1], (torch.ones(4, 4),) * 3, torch.ones(4)):
        with pytest.raises(stc.ShapeError, match="takes features"):
            stc.nn.GATConv(4, 2)(eye, wrong)  # type: ignore[arg-type]
    with pytest.raises(stc.DtypeError, match="edge_attr cannot be read"):
        stc.nn.GATConv(4, 2, edge_dim=1)(eye, torch.ones(4, 4), "x")  # type: ignore[arg-type]
    with pytest.raises(stc.DtypeError, match="floating point or complex weights"):
        stc.nn.SparseLinear(stc.eye(4, dtype=torch.int64))
    with pytest.raises(stc.ShapeError, match=r"a bias \(4,\), found \(3,\)"):
        stc.nn.SparseLinear(eye, torch.ones(3))
    with pytest.raises(stc.ShapeError, match=r"dense .* activations"):
        stc.nn.SparseLinear(eye)(torch.eye(4).to_sparse())
