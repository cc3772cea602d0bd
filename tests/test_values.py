"""Values that change: einsum reads them at each call, a kernel where torch tells, and coordinates are not shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import Problem, assert_matches, random_sparse, random_values

import sparsetc as stc


def matrix(seed: int = 0) -> stc.SparseTensor:
    return random_sparse((6, 8), "random", torch.float64, seed)


@pytest.mark.parametrize("plan", ["coo", "fiber", "rows", stc.plan_hls(2)])
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
    monkeypatch.setattr(
        "sparsetc.tensor.sparse_tensor.counted_version", lambda v: None if v.requires_grad else v._version
    )
    packed: list[int] = []
    original = stc.formats.Packed.pack_values
    monkeypatch.setattr(stc.formats.Packed, "pack_values", lambda *a: packed.append(1) or original(*a))
    values, b = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), random_values((3, 2), torch.float64, 1)
    x = stc.SparseTensor(torch.tensor([[0, 1, 2], [1, 2, 0]]), values, (3, 3))
    for times, change in ((1, lambda: None), (2, lambda: values.mul_(3)), (3, lambda: x.values.add_(1))):
        change()
        for _ in range(3):
            assert_matches(stc.einsum("ij,ir->jr", x, b), "ij,ir->jr", [x, b])
        assert len(packed) == times
    assert_matches(stc.einsum("ij,ir->jr", x.with_values(-values), b), "ij,ir->jr", [x.with_values(-values), b])
    assert_matches(stc.einsum("ij,ir->jr", x, b), "ij,ir->jr", [x, b])


def test_values_that_were_nobody_else_s_are_packed_once_until_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    coords, values = torch.tensor([[1, 0, 1], [0, 1, 0]]), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    b = random_values((2, 3), torch.float64, 1)
    x = stc.SparseTensor(coords, values, (2, 2))  # with a duplicate, so its values are sums
    packed: list[int] = []
    original = stc.formats.Packed.pack_values
    monkeypatch.setattr(stc.formats.Packed, "pack_values", lambda *a: packed.append(1) or original(*a))
    for _ in range(3):
        stc.einsum("ij,ir->jr", x, b)
    assert len(packed) == 1
    x.values.data.mul_(3)
    for _ in range(2):
        assert_matches(stc.einsum("ij,ir->jr", x, b), "ij,ir->jr", [x, b])
    assert len(packed) == 3


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
