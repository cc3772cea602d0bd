"""Values that change: einsum reads them at each call, a kernel where torch tells, and coordinates are not shared."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from cases import Problem, assert_matches, random_sparse, random_values
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsetc as stc
from sparsetc.contraction import step
from sparsetc.tensor import kept_values


def packings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows at each packing of values."""
    packed: list[int] = []
    original = stc.formats.Packed.pack_values
    monkeypatch.setattr(stc.formats.Packed, "pack_values", lambda *a: packed.append(1) or original(*a))
    return packed


def matrix(seed: int = 0) -> stc.SparseTensor:
    return random_sparse((6, 8), "random", torch.float64, seed)


@pytest.mark.parametrize("plan", ["coo", "fiber", "rows", stc.plans.plan_hls(2)])
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,ir,kr->jr"])
@pytest.mark.parametrize("how", ["data", "ndarray", "set", "in place"])
def test_einsum_sees_values_however_they_changed(plan: Any, equation: str, how: str) -> None:
    x, *dense = Problem(equation, dtype=torch.float64).operands()
    values = x.values.clone()
    y = stc.SparseTensor(x.coords, values, x.shape)
    stc.einsum(equation, y, *dense, plan=plan)
    if how == "data":
        values.data.mul_(-2)
    elif how == "ndarray":
        np.multiply(values.numpy(), -2, out=values.numpy())
    elif how == "set":
        values.data = values * -2
    else:
        values.mul_(-2)
    assert_matches(stc.einsum(equation, y, *dense, plan=plan), equation, [x.with_values(-2 * x.values), *dense])


def test_einsum_sees_changes_of_the_memory_that_a_tensor_was_made_of() -> None:
    coords, values = np.array([[0, 1], [1, 0]]), np.array([1.0, 2.0])
    b = random_values((2, 3), torch.float64, 1)
    x = stc.SparseTensor(coords, values, (2, 2))
    stc.einsum("ij,ir->jr", x, b)
    values[:] = 5, 7
    assert_matches(stc.einsum("ij,ir->jr", x, b), "ij,ir->jr", [x.with_values(np.array([5.0, 7.0])), b])


def test_where_changes_are_counted_values_are_packed_at_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU no ndarray has the memory; here the CPU is taken for one."""
    monkeypatch.setattr("sparsetc.tensor.kept_values.counted", lambda values: True)
    packed = packings(monkeypatch)
    values, b = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), random_values((3, 2), torch.float64, 1)
    x = stc.SparseTensor(torch.tensor([[0, 1, 2], [1, 2, 0]]), values, (3, 3))
    for times, change in ((1, lambda: None), (2, lambda: values.mul_(3)), (3, lambda: x.values.add_(1))):
        change()
        for _ in range(3):
            assert_matches(stc.einsum("ij,ir->jr", x, b, plan="coo"), "ij,ir->jr", [x, b])
        assert len(packed) == times
    assert_matches(stc.einsum("ij,ir->jr", x.with_values(-values), b), "ij,ir->jr", [x.with_values(-values), b])
    assert_matches(stc.einsum("ij,ir->jr", x, b, plan="coo"), "ij,ir->jr", [x, b])


def test_values_are_packed_once_for_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    coords, values = torch.tensor([[1, 0, 1], [0, 1, 0]]), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    b = random_values((2, 3), torch.float64, 1)
    x = stc.SparseTensor(coords, values, (2, 2))
    packed = packings(monkeypatch)
    for _ in range(3):
        stc.einsum("ij,ir->jr", x, b)
    assert len(packed) == 1
    x.values.data.mul_(3)
    for _ in range(2):
        assert_matches(stc.einsum("ij,ir->jr", x, b), "ij,ir->jr", [x, b])
    assert len(packed) == 2


def test_packed_values_are_found_by_whoever_wraps_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    x, b = matrix(), random_values((6, 3), torch.float64, 1)
    p, packed = torch.nn.Parameter(x.values.clone()), packings(monkeypatch)
    for wrapped in (x.with_values(p), x.with_values(p), stc.SparseTensor(x.coords, p, x.shape), x.with_values(p)):
        stc.einsum("ij,ir->jr", wrapped, b)
    assert len(packed) <= 2  # the coordinates that were given anew are another pattern


@pytest.mark.parametrize("counted", [False, True])
def test_a_layer_packs_when_its_parameter_changed(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the CPU is also taken for a GPU, where torch's count of changes is believed."""
    monkeypatch.setattr("sparsetc.tensor.kept_values.counted", lambda values: counted)
    torch.manual_seed(0)
    dense = torch.nn.Linear(12, 9, bias=False)
    with torch.no_grad():
        dense.weight *= torch.rand(9, 12) < 0.5
    layer, mask = stc.nn.SparseLinear.from_linear(dense, plan="window"), dense.weight.detach() != 0
    inputs, packed, losses = torch.rand(5, 12), packings(monkeypatch), []
    for _ in range(8):
        layer(inputs)
    assert len(packed) == 1
    layer(inputs).square().sum().backward()  # with what is packed once for gradients
    before = len(packed)
    for model, values in ((layer, layer.values), (dense, dense.weight)):
        optimizer = torch.optim.SGD([values], lr=0.1)
        losses.append([])
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(inputs).square().sum()
            loss.backward()
            dense.weight.grad = None if dense.weight.grad is None else dense.weight.grad * mask
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(packed) == before + 5 + counted  # on a GPU once more after that gradient
    layer.load_state_dict(
        {name: 2 * value if name == "values" else value for name, value in layer.state_dict().items()}
    )
    torch.testing.assert_close(layer(inputs), inputs @ layer.weight.to_dense().T)
    layer.values.data = torch.ones_like(layer.values)
    torch.testing.assert_close(layer(inputs), inputs @ mask.float().T)


def _in_place(values: torch.Tensor) -> torch.Tensor:
    return values.mul_(3)


CHANGES = {
    "in place": lambda x: x.values.mul_(2),
    "data": lambda x: x.values.data.add_(1),
    "ndarray": lambda x: np.negative(x.values.detach().numpy(), out=x.values.detach().numpy()),
    "assigned data": lambda x: setattr(x.values, "data", x.values.detach() + 1),
    "detached": lambda x: x.detach().values.mul_(2),
    "of another": lambda x: x.with_values(x.values).values.sub_(1),
    "map": lambda x: x.map(_in_place),
    "copy": lambda x: copy.copy(x).values.mul_(2),
    "inference": lambda x: torch.inference_mode()(lambda: x.values.mul_(2))(),
}
WAYS = {
    "itself": lambda x: x,
    "detach": lambda x: x.detach(),
    "reshape": lambda x: x.reshape(x.shape),
    "flatten": lambda x: x.flatten().reshape(x.shape),
    "permute": lambda x: x.permute(1, 0).permute(1, 0),
    "positive": lambda x: +x,
    "copy": copy.copy,
    "sum of nothing": lambda x: x.sum(()),
    "amax of nothing": lambda x: x.amax(()),
    "to": lambda x: x.to(x.dtype),
    "coalesce": lambda x: x.coalesce(),
    "with_values": lambda x: x.with_values(x.values),
    "made anew": lambda x: stc.SparseTensor(x.coords, x.values, x.shape),
    "deepcopy": copy.deepcopy,
}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*WAYS]), st.sampled_from([*CHANGES]), st.integers(0, 9)), max_size=8),
    st.sampled_from(["ij,i->j", "ij,j->i"]),
)
def test_a_tensor_agrees_with_itself(steps: list[tuple[str, str, int]], equation: str) -> None:
    v = torch.arange(1.0, 5.0, dtype=torch.float64)
    family = [stc.SparseTensor.from_dense(torch.eye(4, dtype=torch.float64) + torch.ones(4, 4).triu(2))]
    for way, change, number in steps:
        of = family[number % len(family)]
        family.append(WAYS[way](of))
        for x in family:
            stc.einsum(equation, x, v)
        CHANGES[change](family[(number * 7) % len(family)])
        for x in family:
            torch.testing.assert_close(stc.einsum(equation, x, v), torch.einsum(equation, x.to_dense(), v))


@pytest.mark.parametrize("equation", ["ij,jr->ir", "ij,ir->jr"])
def test_a_parameter_that_an_optimiser_of_old_style_trains(equation: str) -> None:
    x, b = matrix(), random_values((8 if "jr->" in equation else 6, 3), torch.float64, 1)
    p = torch.nn.Parameter(x.values.clone())
    y = x.with_values(p)
    kernel = stc.compile(equation, y, b)
    for _ in range(2):
        kernel(b).square().sum().backward()
        assert p.grad is not None
        p.data -= 0.1 * p.grad
        with torch.no_grad():
            for found in (kernel(b), stc.einsum(equation, y, b)):
                assert_matches(found, equation, [x.with_values(p.detach()), b])


def test_a_kernel_takes_values_anew_when_told() -> None:
    x, b = matrix(), random_values((6, 3), torch.float64, 1)
    kernel = stc.compile("ij,ir->jr", x, b)
    x.values.data.mul_(2)
    assert_matches(kernel.with_values(x.values)(b), "ij,ir->jr", [x, b])


def test_coordinates_that_the_caller_changes_are_not_ours() -> None:
    for coords in (torch.tensor([[0, 1], [1, 0]]), np.array([[0, 1], [1, 0]])):
        x = stc.SparseTensor(coords, [1.0, 2.0], (2, 2))
        before = x.to_dense()
        coords[:] = 0
        assert torch.equal(x.to_dense(), before)
        assert torch.equal(stc.einsum("ij,jr->ir", x, torch.eye(2)), before)


def test_complex_infinities_are_added_part_by_part() -> None:
    inf = float("inf")
    x = stc.SparseTensor([[0, 1]], torch.tensor([inf, 1], dtype=torch.complex64))
    other = stc.SparseTensor([[0]], torch.tensor([inf + 1j], dtype=torch.complex64), (2,))
    assert x.to_dense().tolist() == [inf, 1]
    assert x.sum().item() == inf
    assert x.reshape(1, 2).sum(1).tolist() == [inf]
    assert (x + x).values.tolist() == [inf, 2]
    assert (x + other).values.tolist() == (other + x).values.tolist() == [inf + 1j, 1]
    assert (x - -other).values.tolist() == [inf + 1j, 1]
    assert stc.SparseTensor([[0, 0]], x.values).values.tolist() == [inf]
    assert stc.einsum("i->", x).item() == inf


def test_values_that_are_gone_are_forgotten_and_others_in_their_place_are_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values are found by ids, which others take over; here the CPU is taken for a GPU, which compares no bits."""
    monkeypatch.setattr(kept_values, "counted", lambda values: True)
    x, b = stc.SparseTensor([[0, 1, 1], [1, 0, 2]], torch.zeros(3), (2, 3)), torch.ones(3, 1)
    gc.collect()  # what other tests left
    gc.freeze()  # what is there already need not be looked at again
    before = len(kept_values._seen)
    for n in range(9):
        values = torch.full((3,), float(n))
        assert stc.einsum("ij,jr->ir", x.with_values(values), b, plan="rows").flatten().tolist() == [n, 2 * n]
        assert len(kept_values._seen) == before + 1
        del values
        gc.collect()
        assert len(kept_values._seen) == before


def test_a_cuda_graph_keeps_what_it_reads_and_gives_nothing_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the CPU is taken for a GPU, and calls for those that are captured."""
    monkeypatch.setattr(kept_values, "counted", lambda values: True)
    capturing = False
    for module in (kept_values, step):
        monkeypatch.setattr(module, "captured", lambda values: capturing)
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    x = stc.SparseTensor(torch.tensor([[0, 1, 2], [1, 2, 0]]), p, (3, 3))
    b, packed = random_values((3, 2), torch.float64, 1), packings(monkeypatch)

    def call() -> None:
        assert_matches(stc.einsum("ij,ir->jr", x, b, plan="coo"), "ij,ir->jr", [x.detach(), b])

    call()
    with torch.no_grad():
        call()
        capturing = True
        call()  # a graph reads what is packed
        assert len(packed) == 1
        held = weakref.ref(kept_values._seen[id(p)][2])
        p.mul_(2)
        call()  # changed since: it is packed within the graph, for the graph alone
        call()
        assert len(packed) == 3
        capturing = False
        call()
        assert len(packed) == 4
        assert held() is not None
    capturing = True
    call()  # of a training step: packed at each replay
    assert len(packed) == 5
