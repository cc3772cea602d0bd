"""Layers: against dense ones of the same weights; places that are saved, moved and loaded; batches of graphs."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.nn.utils import prune
from torch.utils.data import DataLoader

import sparsetc as stc


def linear(bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(20, 12, bias=bias).double()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(20,), (5, 20), (2, 3, 20)])
def test_a_pruned_layer(shape: tuple[int, ...], bias: bool) -> None:
    dense = linear(bias)
    prune.l1_unstructured(dense, "weight", 0.8)
    layer, x = stc.nn.SparseLinear.from_linear(dense), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert layer.values.numel() == int(dense.weight_mask.sum())
    found, expected = layer(x), dense(x)
    torch.testing.assert_close(found, expected)
    own = torch.autograd.grad(found.square().sum(), [x, layer.values])
    other = torch.autograd.grad(expected.square().sum(), [x, dense.weight_orig])
    torch.testing.assert_close(own[0], other[0])
    torch.testing.assert_close(own[1], other[1][tuple(layer.coords)])
    assert "nnz=48" in repr(layer)


def test_places_are_saved_moved_and_loaded() -> None:
    dense, x = linear(), torch.randn(4, 20, dtype=torch.float64)
    mask = torch.rand(12, 20) < 0.3
    layer = stc.nn.SparseLinear.from_dense(dense.weight, dense.bias, mask)
    assert {*layer.state_dict()} == {"coords", "values", "bias"}
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = stc.nn.SparseLinear.from_dense(torch.eye(12, 20).double(), torch.zeros(12).double())
    other.load_state_dict(torch.load(file))  # of another number of nonzeros
    torch.testing.assert_close(other(x), layer(x))
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))
    torch.testing.assert_close(layer.to(torch.float32)(x.float()).double(), other(x), rtol=1e-5, atol=1e-6)
    state = other.state_dict() | {"coords": other.coords + 12}
    with pytest.raises(stc.CoordinateError, match="out of range"):
        other.load_state_dict(state)
    with pytest.raises(stc.CoordinateError, match="lexicographic order"):
        other.load_state_dict(other.state_dict() | {"coords": other.coords.flip(1)})
    with pytest.raises(stc.ShapeError, match="sparse matrix"):
        stc.nn.SparseLinear(torch.eye(3))


def test_kernels_are_kept_while_values_are_trained() -> None:
    layer = stc.nn.SparseLinear.from_dense(torch.eye(8))
    pattern, optimizer = layer.weight.pattern, torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        layer(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()
    assert layer.weight.pattern is pattern
    torch.testing.assert_close(layer.weight.values, layer.values)


def graph(nodes: int = 9, seed: int = 0) -> stc.SparseTensor:
    g = torch.Generator().manual_seed(seed)
    dense = (torch.rand(nodes, nodes, generator=g) < 0.4).double()
    return stc.SparseTensor.from_dense(torch.maximum(dense, dense.T))


@pytest.mark.parametrize(("inputs", "outputs"), [(4, 6), (6, 4)])
def test_graph_convolution(inputs: int, outputs: int) -> None:
    adjacency, x = graph(), torch.randn(9, inputs, dtype=torch.float64)
    layer = stc.nn.GraphConv(inputs, outputs).double()
    dense = adjacency.to_dense() + torch.eye(9, dtype=torch.float64)
    root = dense.sum(1).rsqrt()
    normal = stc.nn.normalized(adjacency)
    torch.testing.assert_close(normal.to_dense(), root[:, None] * dense * root)
    torch.testing.assert_close(layer(normal, x), (root[:, None] * dense * root) @ x @ layer.linear.weight.T)
    with pytest.raises(stc.ShapeError, match="a row and a column"):
        stc.nn.normalized(stc.SparseTensor.from_dense(torch.ones(2, 3)))
    with pytest.raises(stc.ShapeError, match="a row and a column"):
        stc.nn.normalized(stc.SparseTensor([[0], [0]], torch.ones(1, 2), (2, 2, 2)))


def test_graph_attention() -> None:
    torch.manual_seed(0)
    adjacency, x, layer = graph(), torch.randn(9, 5, dtype=torch.float64), stc.nn.GATConv(5, 4, heads=3).double()
    mixed = layer.linear(x).view(9, 3, 4)
    scores = (mixed * layer.of_target).sum(-1)[:, None] + (mixed * layer.of_source).sum(-1)[None]
    scores = torch.nn.functional.leaky_relu(scores, 0.2).masked_fill(adjacency.to_dense()[..., None] == 0, -torch.inf)
    expected = torch.einsum("ijh,jhr->ihr", torch.softmax(scores, 1).nan_to_num(0.0), mixed).flatten(1)
    found = layer(adjacency, x)
    torch.testing.assert_close(found, expected)
    trained = [layer.of_source, layer.of_target, layer.linear.weight]
    own, other = (torch.autograd.grad(y.square().sum(), trained) for y in (found, expected))
    assert all(torch.allclose(a, b) for a, b in zip(own, other, strict=True))


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
    with pytest.raises(stc.ShapeError, match="one order"):
        stc.nn.collate([single, stc.rand((2, 2, 2), dtype=torch.float64)])
    with pytest.raises(stc.ShapeError, match="one sample or more"):
        stc.nn.collate([])
