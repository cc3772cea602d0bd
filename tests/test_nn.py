"""Layers: against dense ones of the same weights; places that are saved, moved and loaded; batches of graphs."""

from __future__ import annotations

import copy
import copyreg
import inspect
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.utils.data import DataLoader

import sparsetc as stc
from sparsetc import message_passing


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


@pytest.mark.parametrize(("size", "kept_as"), [(2**31 - 1, torch.int32), (2**31, torch.int64)])
def test_places_are_saved_in_32_bits_where_they_fit(size: int, kept_as: torch.dtype) -> None:
    """In states, in pickles of layers and of tensors; keys of rows and columns do not fit there."""
    places = torch.tensor([[0, 1, size - 1], [2, size - 1, size - 2]])
    tensor = stc.SparseTensor(places, [1.0, 2.0, 3.0], (size, size))
    layer, other = stc.nn.SparseLinear(tensor), stc.nn.SparseLinear(stc.zeros((size, size)))
    file = io.BytesIO()
    torch.save({"state": layer.state_dict(), "tensor": tensor}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["state"]["coords"].dtype == kept_as
    reduced = copyreg.dispatch_table[type(tensor.pattern)](tensor.pattern)
    assert reduced[1][0].dtype == kept_as
    for assign in (False, True):
        other.load_state_dict(loaded["state"], assign=assign)
        assert torch.equal(other.weight.coords, places)
    other.load_state_dict(loaded["state"] | {"coords": places}, assign=True)  # what others wrote
    assert torch.equal(other.weight.coords, places)
    assert torch.equal(loaded["tensor"].coords, places)
    assert torch.equal(copy.deepcopy(other).weight.coords, places)


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
    with pytest.raises(stc.ShapeError, match=r"takes \(\*, 20\) activations, found \(4, 19\)"):
        layer(x[:, :19])
    with pytest.raises(stc.ShapeError, match=r"the mask of a tensor \(12, 20\) must have its shape, found \(20, 12\)"):
        stc.nn.SparseLinear.from_dense(dense.weight, dense.bias, mask.T)
    for bad in ((4,), (4, 5, 1), (4, 0), 4, (4, 0.5)):
        with pytest.raises(stc.ShapeError, match="a side of 1 or more for each of 2 modes, found sides"):
            stc.nn.SparseLinear.from_dense(dense.weight, blocksize=bad)  # type: ignore[arg-type]


def test_a_state_that_is_loaded_replaces_the_weight_in_use() -> None:
    """Also one of the same number of nonzeros at other places, after a call that has kept the old ones."""
    layer = stc.nn.SparseLinear(stc.SparseTensor([[0, 1], [0, 1]], [1.0, 2.0], (2, 3)))
    other = stc.nn.SparseLinear(stc.SparseTensor([[0, 1], [1, 2]], [3.0, 4.0], (2, 3)))
    x = torch.tensor([[1.0, 10.0, 100.0]])
    assert layer(x).tolist() == [[1.0, 20.0]]
    assert layer.weight.shape == (2, 3)
    layer.load_state_dict(other.state_dict())
    assert layer(x).tolist() == [[30.0, 400.0]]
    torch.testing.assert_close(layer.weight.to_dense(), torch.tensor([[0.0, 3.0, 0.0], [0.0, 0.0, 4.0]]))


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("batch", [(), (4,), (0,), (2, 0)])
@pytest.mark.parametrize("blocksize", [None, (2, 2)])
def test_layers_of_size_0(inputs: int, outputs: int, batch: tuple[int, ...], blocksize: tuple[int, int] | None) -> None:
    layer = stc.nn.SparseLinear.from_dense(torch.zeros(outputs, inputs), torch.ones(outputs), blocksize=blocksize)
    torch.testing.assert_close(layer(torch.rand(*batch, inputs)), torch.ones(*batch, outputs))


def in_pieces(whole: torch.Tensor, coords: torch.Tensor, sides: tuple[int, int]) -> torch.Tensor:
    """Return the blocks of a dense matrix at some places, padded with zeros."""
    pieces = torch.zeros(coords.shape[1], *sides, dtype=whole.dtype)
    for piece, (i, j) in zip(pieces, coords.T.tolist(), strict=True):
        part = whole[i * sides[0] : (i + 1) * sides[0], j * sides[1] : (j + 1) * sides[1]]
        piece[: part.shape[0], : part.shape[1]] = part
    return pieces


LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("sides", [(4, 5), (3, 8), (12, 20), (1, 7), (16, 32)])
def test_a_layer_in_blocks(sides: tuple[int, int], dtype: torch.dtype) -> None:
    """Sides that divide the sizes (12, 20) and that do not; places of a mask within blocks, and zeros under it."""
    torch.manual_seed(0)
    weight, bias = torch.randn(12, 20).to(dtype), torch.randn(12).to(dtype)
    x, above = torch.randn(2, 3, 20).to(dtype).requires_grad_(), torch.randn(2, 3, 12).to(dtype)
    mask = torch.zeros(12, 20)
    mask[1:3, 6:9] = mask[5, 0] = mask[11, 19] = 1
    weight[11, 19] = 0
    layer = stc.nn.SparseLinear.from_dense(weight, bias, mask, blocksize=sides)
    places = sorted({(i // sides[0], j // sides[1]) for i, j in mask.nonzero().tolist()})
    assert layer.coords.T.tolist() == [list(place) for place in places]
    assert torch.equal(layer.values, in_pieces(weight * mask, layer.coords, sides))
    assert f"nnz={len(places)}, blocksize={sides}, bias=True" in repr(layer)

    out = layer(x)
    found = out, *torch.autograd.grad(out, [x, layer.values, layer.bias], above)
    exact, g = (weight * mask).double(), above.double().flatten(0, 1)
    of_weight = g.T @ x.detach().double().flatten(0, 1)
    expected = (
        x.detach().double() @ exact.T + bias.double(),
        above.double() @ exact,
        in_pieces(of_weight, layer.coords, sides),
        g.sum(0),
    )
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= LIMIT[dtype] * other.norm()


def test_whatever_is_in_blocks_stays_in_blocks() -> None:
    torch.manual_seed(0)
    whole = torch.zeros(6, 8, dtype=torch.float64)
    whole[:2, 4:], whole[4:, :4] = torch.randn(2, 4), torch.randn(2, 4)
    dense, x = linear(), torch.randn(5, 8, dtype=torch.float64)
    prune.custom_from_mask(dense, "weight", torch.ones(12, 20).index_fill_(0, torch.arange(4, 12), 0))
    blocks = stc.SparseTensor.from_blocks([[2, 0], [0, 1]], torch.stack((whole[4:, :4], whole[:2, 4:])), (6, 8))
    for given in (blocks, whole.to_sparse_bsr((2, 4)), whole.to_sparse_bsc((2, 4))):
        layer = stc.nn.SparseLinear(given)
        assert layer.values.shape == (2, 2, 4)
        assert layer.weight.blocksize == (2, 4)
        assert layer.coords.tolist() == [[0, 2], [1, 0]]  # in order
        torch.testing.assert_close(layer(x), x @ whole.T)
    pruned, y = stc.nn.SparseLinear.from_linear(dense, (4, 5)), torch.randn(3, 20, dtype=torch.float64)
    assert pruned.values.shape == (4, 4, 5)
    torch.testing.assert_close(pruned(y), dense(y))
    rows = stc.nn.SparseLinear(stc.SparseTensor([[2, 0]], whole[[2, 0]], whole.shape))  # a dense mode: single entries
    assert rows.coords.shape == (2, 16)


def test_states_of_layers_in_blocks() -> None:
    """Other places, other blocks, and none: coordinates and values say all that the layer does not have itself."""
    torch.manual_seed(0)
    weights = [torch.randn(12, 20).double() * (torch.rand(12, 20) < share) for share in (0.02, 0.05)]
    x, layer = torch.randn(4, 20).double(), stc.nn.SparseLinear.from_dense(weights[0], blocksize=(4, 8))
    assert {*layer.state_dict()} == {"coords", "values"}
    for weight in weights:
        for sides in ((4, 8), None, (5, 3)):
            other = stc.nn.SparseLinear.from_dense(weight, blocksize=sides)
            file = io.BytesIO()
            torch.save(other.state_dict(), file)
            file.seek(0)
            layer(x)
            layer.load_state_dict(torch.load(file))
            assert layer.weight.blocksize == (sides or ())
            torch.testing.assert_close(layer(x), x @ weight.T)
            for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
                torch.testing.assert_close(same(x), x @ weight.T)
    narrow = copy.deepcopy(layer).to(torch.float32)
    torch.testing.assert_close(narrow(x.float()), (x @ weights[1].T).float())
    assert narrow.weight.blocksize == (5, 3)
    state = layer.state_dict()
    with pytest.raises(stc.CoordinateError, match="mode 0: block 0 has 3, but the size of mode 0 is 3 blocks"):
        layer.load_state_dict(state | {"coords": state["coords"] + 3})
    with pytest.raises(stc.CoordinateError, match="lexicographic order"):
        layer.load_state_dict(state | {"coords": state["coords"].flip(1)})
    with pytest.raises(stc.ShapeError, match="a side of 1 or more for each of 2 modes"):
        layer.load_state_dict(state | {"values": state["values"][:, 0]})
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(state | {"values": state["values"][1:]})
    torch.testing.assert_close(layer(x), x @ weights[1].T)


def test_a_layer_in_blocks_learns_what_a_masked_one_learns() -> None:
    torch.manual_seed(0)
    kept = torch.zeros(3, 4).bernoulli_(0.5)
    mask, x = kept.repeat_interleave(4, 0).repeat_interleave(5, 1).double(), torch.randn(16, 20, dtype=torch.float64)
    dense, losses = linear(), list[list[float]]()
    layer, target = stc.nn.SparseLinear.from_dense(dense.weight, dense.bias, mask, (4, 5)), torch.randn(16, 12).double()
    pattern = layer.weight.pattern
    prune.custom_from_mask(dense, "weight", mask)
    for model in (layer, dense):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        losses.append([])
        for _ in range(8):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][-1] < 0.7 * losses[0][0]
    assert layer.weight.pattern is pattern
    torch.testing.assert_close(layer.weight.to_dense(), dense.weight_orig * mask)


def test_kernels_are_kept_while_values_are_trained() -> None:
    layer = stc.nn.SparseLinear.from_dense(torch.eye(8))
    pattern, optimizer = layer.weight.pattern, torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        layer(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()
    assert len(layer._kernels) == 1  # of this shape, by which nothing is looked up
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


def test_a_layer_follows_what_changes() -> None:
    """Options in force, types, parameters, pickles and copies, behind a kernel that is held."""
    layer, x = stc.nn.SparseLinear.from_dense(torch.eye(3) * 2), torch.rand(2, 3)
    torch.testing.assert_close(layer(x), 2 * x)
    with stc.options(plan="no such plan"), pytest.raises(stc.PlanError, match="no such plan"):
        layer(x)
    again = pickle.loads(pickle.dumps(layer))
    layer.values = torch.nn.Parameter(torch.full((3,), 3.0))
    torch.testing.assert_close(layer(x), 3 * x)
    for other in (again, copy.deepcopy(again)):
        torch.testing.assert_close(other(x), 2 * x)
    torch.testing.assert_close(layer.double()(x.double()), 3 * x.double())
    for rows in range(20):
        assert layer(torch.rand(rows, 3, dtype=torch.float64)).shape == (rows, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.float()(x.bfloat16()).dtype == torch.float32
    swapped = torch.func.functional_call(layer, {"values": torch.ones(3)}, x)
    torch.testing.assert_close(swapped, x)
    gradient = torch.func.grad(lambda v: torch.func.functional_call(layer, {"values": v}, x).sum())(torch.ones(3))
    torch.testing.assert_close(gradient, x.sum(0))
    torch.testing.assert_close(layer(x), 3 * x)


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


class Twice(torch.nn.Module):
    """A model with layers in layers, attention that reads the weight of one, and a layer that stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        shared = torch.nn.Linear(8, 8)
        self.body = torch.nn.Sequential(shared, torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False)))
        self.again, self.attention = shared, torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.again(self.attention(*[self.body(x)] * 3)[0])


def test_a_pruned_model_is_sparsified() -> None:
    x, layers = torch.rand(2, 3, 8), ("body.0", "body.2.0")
    model = Twice()
    for name in layers:
        prune.random_unstructured(model.get_submodule(name), "weight", amount=0.5)
    expected = model(x)
    assert stc.nn.sparsify(model) is model
    kinds = {name for name, module in model.named_modules() if isinstance(module, stc.nn.SparseLinear)}
    assert kinds == {*layers}
    assert model.again is model.body[0]
    assert type(model.attention.out_proj) is not stc.nn.SparseLinear
    torch.testing.assert_close(model(x), expected)
    assert model.body[0].values.shape == (32,)  # type: ignore[union-attr, index]


def test_a_model_is_sparsified_by_masks_and_by_magnitude() -> None:
    x, model = torch.rand(3, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).eval()
    weight = model[0].weight.detach().clone()
    mask = torch.zeros(8, 8).index_fill(0, torch.tensor([1, 5]), 1)
    stc.nn.sparsify(model, {"0": mask}, blocksize=(2, 8))
    assert model[0].values.shape == (2, 2, 8)
    torch.testing.assert_close(model[0](x), x @ (weight * mask).T + model[0].bias)
    assert isinstance(model[1], torch.nn.Linear)
    linear = torch.nn.Linear(8, 8)
    sparse = stc.nn.sparsify(linear, 0.1)
    kept = linear.weight.detach() * (linear.weight.detach().abs() > 0.1)
    torch.testing.assert_close(sparse(x), x @ kept.T + linear.bias)
    assert sparse.training
    with pytest.raises(stc.KeywordError, match="no linear layer is called '2'; there are '1'"):
        stc.nn.sparsify(model, {"2": mask})


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


class OfGraph(torch.nn.Module):
    """A module with a sparse buffer."""

    adjacency: stc.SparseTensor

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("adjacency", stc.rand((5, 5), 0.4, generator=generator, dtype=dtype))  # type: ignore[arg-type]
        self.linear = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.adjacency @ x)  # type: ignore[no-any-return]


def test_a_buffer_is_converted_and_moved() -> None:
    module = OfGraph(0)
    before = module.adjacency
    assert module.to("cpu").adjacency is before
    for call, dtype in (("half", torch.float16), ("double", torch.float64), ("float", torch.float32)):
        assert getattr(module, call)().adjacency.dtype == dtype
        assert module.adjacency.pattern is before.pattern
    assert module.to(torch.bfloat16).adjacency.dtype == torch.bfloat16
    module.register_buffer("mask", before > 0.5)  # type: ignore[arg-type]
    assert module.float().mask.dtype == torch.bool  # type: ignore[union-attr]
    module.requires_grad_(False).eval().zero_grad()
    assert module.type(torch.float64).adjacency.dtype == torch.float64


def test_a_buffer_is_saved_and_loaded(tmp_path: Path) -> None:
    first, second = OfGraph(0), OfGraph(1, torch.float64)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    held, x = second.adjacency, torch.rand(5, 2)
    assert not second.load_state_dict(torch.load(tmp_path / "state.pt")).missing_keys
    assert second.adjacency is held
    assert second.adjacency.dtype == torch.float64
    assert torch.equal(second.adjacency.to_dense(), first.adjacency.to_dense().double())
    assert torch.equal(second.float()(x[:, :1].expand(5, 5)), first(x[:, :1].expand(5, 5)))
    values = second.adjacency.values
    second.load_state_dict({**first.state_dict(), "adjacency": first.adjacency * 2})
    assert second.adjacency.values is values  # written where they lie, as the coordinates are the same
    assert torch.equal(values, first.adjacency.values * 2)
    second.load_state_dict(first.state_dict(), assign=True)
    assert second.adjacency.pattern is first.adjacency.pattern
    with pytest.raises(RuntimeError, match="size mismatch for adjacency"):
        first.load_state_dict({**first.state_dict(), "adjacency": stc.eye(4)})
    with pytest.raises(stc.DtypeError, match="copy_ takes a SparseTensor"):
        first.adjacency.copy_(torch.eye(5))  # type: ignore[arg-type]


def test_a_module_with_a_buffer_is_copied_shared_and_called() -> None:
    module, x = OfGraph(0), torch.rand(5, 5)
    expected = module(x)
    other = copy.deepcopy(module)
    assert other.adjacency.values.data_ptr() != module.adjacency.values.data_ptr()
    assert torch.equal(other(x), expected)
    module.share_memory()
    assert module.adjacency.is_shared()
    assert module.adjacency.coords.is_shared()
    assert torch.equal(module(x), expected)
    found = torch.func.functional_call(module, {"linear.bias": module.linear.bias + 1}, (x,))
    torch.testing.assert_close(found, expected + 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["adjacency"])
    assert module.adjacency._ddp_ignored
    averaged = torch.optim.swa_utils.AveragedModel(module, use_buffers=False)
    averaged.update_parameters(module)
    assert torch.equal(averaged(x), expected)


def test_gradients_and_hooks_of_values() -> None:
    x, seen = stc.eye(3).requires_grad_(), []
    assert (x.is_leaf, x.grad, x.grad_fn) == (True, None, None)
    x.register_hook(seen.append)
    (x * 2).sum().backward()
    assert x.grad.values.tolist() == [2.0] * 3
    assert x.grad.pattern is x.pattern
    assert [g.tolist() for g in seen] == [[2.0] * 3]
    assert not (x * 2).is_leaf
    torch.optim.SGD([x.values], 0.5).step()
    assert x.values.tolist() == [0.0] * 3


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_a_loader_pins_tensors_that_workers_send(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, pinned = [stc.eye(n) * n for n in (2, 3)], []
    loader = DataLoader(graphs, batch_size=2, collate_fn=stc.nn.collate, num_workers=1)  # type: ignore[arg-type, var-annotated]
    (batch,) = loader
    assert torch.equal(batch.to_dense(), stc.nn.collate(graphs).to_dense())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone())
    found = torch.utils.data._utils.pin_memory.pin_memory([batch])[0]
    assert len(pinned) == 2
    assert torch.equal(found.to_dense(), batch.to_dense())


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


def test_layers_check_their_keywords_when_they_are_made() -> None:
    for layer, size in ((stc.nn.GraphConv, (3, 2)), (stc.nn.GATConv, (3, 2)), (stc.nn.SparseLinear, (stc.eye(3),))):
        with pytest.raises(stc.KeywordError, match="precison"):
            layer(*size, precison="high")
        assert layer(*size, precision="high").settings == {"precision": "high"}
