"""Linear layers: against dense ones of the same weights; places that are saved, moved and loaded; pruned models."""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
from typing import Any

import pytest
import torch
from torch.nn.utils import prune

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
    with pytest.raises(stc.ShapeError, match=r"takes dense \(\*, 20\) activations, found \(4, 19\)"):
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_layer_whose_plan_is_the_dense_product_is_torchs(dtype: torch.dtype) -> None:
    """It multiplies by a dense weight, kept while nothing learns, and learns, transforms and is traced as any layer."""
    torch.manual_seed(0)
    weight, bias = torch.randn(12, 20, dtype=dtype) * (torch.rand(12, 20) < 0.5), torch.randn(12, dtype=dtype)
    layer, x = stc.nn.SparseLinear.from_dense(weight, bias, plan="dense"), torch.randn(2, 5, 20, dtype=dtype)
    mask, whole = weight != 0, weight.clone().requires_grad_()
    below = x.clone().requires_grad_()

    def expected(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, whole * mask, layer.bias)

    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(layer(x), expected(x))
            layer.values.mul_(2)
            whole.mul_(2)
        (kernel,) = layer._kernels.values()
        held, again = kernel.whole()  # type: ignore[misc]
        assert again() is held
        layer.values.mul_(2)
        whole.mul_(2)
        assert again() is None
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected(x))
    for x_learns, values_learn in ((True, True), (True, False), (False, True)):
        below.requires_grad_(x_learns)
        layer.values.requires_grad_(values_learn)
        whole.requires_grad_(values_learn)
        own, other = ([t for t in ts if t.requires_grad] for ts in ((below, layer.values), (below, whole)))
        found = torch.autograd.grad(layer(below).pow(3).sum(), own, create_graph=True)
        wanted = torch.autograd.grad(expected(below).pow(3).sum(), other, create_graph=True)
        again = torch.autograd.grad(sum(one.square().sum() for one in found), own)
        (*_, repeated) = (torch.autograd.grad(layer(below).pow(3).sum(), own) for _ in range(2))
        torch.testing.assert_close(repeated, found)
        for one, two in zip(
            (*found, *again), (*wanted, *torch.autograd.grad(_squares(wanted, mask), other)), strict=True
        ):
            torch.testing.assert_close(one, two[mask] if two.shape == mask.shape else two, rtol=1e-4, atol=1e-3)
    one = x[0, 0].clone()
    torch.testing.assert_close(torch.func.vmap(layer)(x), expected(x))
    torch.testing.assert_close(torch.func.jacrev(layer)(one), whole * mask)
    torch.testing.assert_close(torch.func.jvp(layer, (one,), (one,))[1], (whole * mask) @ one)
    torch.testing.assert_close(torch.compile(layer, backend="eager")(x), expected(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == dtype
    with torch.no_grad():
        layer(x)
        layer.bias = torch.nn.Parameter(bias.to(torch.float16))
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, whole * mask) + layer.bias)


def test_a_layer_of_the_dense_product_learns_as_a_masked_one_does() -> None:
    """What a call found holds for later ones in both modes, while an optimiser writes values without torch's count."""
    torch.manual_seed(0)
    weight = torch.randn(6, 8) * (torch.rand(6, 8) < 0.5)
    layer, mask = stc.nn.SparseLinear.from_dense(weight, torch.zeros(6), plan="dense"), weight != 0
    dense = torch.nn.Linear(8, 6)
    dense.weight.data, dense.bias.data = weight.clone(), torch.zeros(6)
    for _ in range(4):
        x = torch.randn(3, 8)
        for model in (layer, dense):
            model.zero_grad()
            model(x).square().sum().backward()
        dense.weight.grad *= mask  # type: ignore[operator]
        for model in (layer, dense):
            for parameter in model.parameters():
                parameter.data -= 0.1 * parameter.grad  # type: ignore[operator]
        with torch.no_grad():
            torch.testing.assert_close(layer(x), dense(x))


def _squares(gradients: Any, mask: torch.Tensor) -> torch.Tensor:
    """The sum of squares of gradients, of a weight at the places that are kept."""
    return sum(((g * mask if g.shape == mask.shape else g).square().sum() for g in gradients), torch.zeros(()))


def test_precision_that_is_asked_for_holds_in_a_layer_of_the_dense_product() -> None:
    layer = stc.nn.SparseLinear.from_dense(torch.eye(4), plan="dense", precision="high")
    x = torch.rand(3, 4)
    layer(x)
    (kernel,) = layer._kernels.values()
    assert kernel.whole() is None
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        torch.testing.assert_close(layer(x), x)
        assert kernel.whole() is not None
    finally:
        torch.set_float32_matmul_precision(before)


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


def test_what_is_packed_in_inference_mode_serves_gradients_later() -> None:
    layer, x = stc.nn.SparseLinear.from_dense(torch.eye(4), plan="dense").requires_grad_(False), torch.rand(3, 4)
    with torch.inference_mode():
        layer(x)
    torch.autograd.grad(layer(x.requires_grad_()).sum(), x)
