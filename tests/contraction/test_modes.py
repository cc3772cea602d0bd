"""Modes of torch that are in force around a call: inference, no gradients, a default device, a default dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import OPERATIONS, TILED, Problem, assert_matches, explicit_plan, random_sparse, random_values

import sparsetc as stc
from sparsetc.contraction.guard import Guard
from sparsetc.testing import check_format, pattern

SPMM = "ij,jr->ir"
NAMES = ("mttkrp-3-0", "mttkrp-3-1", "ttmc-3-0", "spmm", "sampled", "ttv-0", "semi-sparse", "reduction", "shared-table")


def matrix(seed: int = 0) -> stc.SparseTensor:
    return random_sparse((6, 8), "random", torch.float64, seed)


# --- inference mode ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coalesce", [True, False])
def test_a_tensor_made_under_inference_mode(coalesce: bool) -> None:
    b = random_values((4, 3), torch.float64, 1)
    with torch.inference_mode():
        coords = torch.tensor([[0, 1, 2, 2], [3, 0, 1, 1]])
        x = stc.SparseTensor(coords, random_values((4,), torch.float64, 2), (3, 4), coalesce=coalesce)
        expected = x.to_dense() @ b
        torch.testing.assert_close(stc.einsum(SPMM, x, b), expected)
        kernel = stc.compile(SPMM, x, b)
        torch.testing.assert_close(kernel(b), expected)
        sampled = stc.einsum("ij,jr->ijr", x, b)
    for found in (stc.einsum(SPMM, x, b), kernel(b), stc.einsum("ijr->ir", sampled, output="dense")):
        torch.testing.assert_close(found, expected)
    learned = b.clone().requires_grad_()
    for found in (stc.einsum(SPMM, x, learned), kernel(learned)):
        (gradient,) = torch.autograd.grad(found.sum(), learned)
        torch.testing.assert_close(gradient, x.to_dense().sum(0).unsqueeze(1).expand(4, 3))


def test_values_given_under_inference_mode() -> None:
    x, b = matrix(), random_values((8, 3), torch.float64, 1)
    kernel = stc.compile(SPMM, x, b)
    with torch.inference_mode():
        values = random_values((x.nnz,), torch.float64, 2)
        other, y = kernel.with_values(values), x.with_values(values)
        for _ in range(2):
            assert_matches(other(b), SPMM, [y, b])
            assert_matches(stc.einsum(SPMM, y, b), SPMM, [y, b])
            values.mul_(2)  # of which torch keeps no count
    assert_matches(other(b), SPMM, [y, b])
    assert_matches(stc.einsum(SPMM, y, b), SPMM, [y, b])


def test_operands_are_looked_at_again_where_they_changed_or_have_no_versions() -> None:
    seen: list[object] = []
    looked = Guard(lambda tables: not seen.append(tables))

    def looks(operand: torch.Tensor) -> int:
        """How often an operand is looked at that comes twice, where no table lies on a CPU."""
        before = len(seen)
        assert all(looked.admits([operand], []) for _ in range(2))
        return len(seen) - before

    b = torch.ones(3)
    with torch.inference_mode():
        c = torch.ones(3)
    assert (looks(b), looks(b), looks(c), looks(b)) == (1, 0, 2, 0)
    assert looks(b.add_(1)) == 1
    before = len(seen)
    assert looked.admits([b], [b])
    assert len(seen) == before + 1  # an ndarray may have changed it


def test_what_is_compiled_under_inference_mode_serves_training() -> None:
    x, b = random_sparse((4, 5, 6), "random", torch.float64), random_values((6,), torch.float64, 1)
    with torch.inference_mode():
        stc.einsum("ijk,k->ij", x, b)
        stc.einsum("ijk,klm->ijlm", x, random_sparse((6, 2, 3), "random", torch.float64, 1))
    values, other = x.values.clone().requires_grad_(), b.clone().requires_grad_()
    result = stc.einsum("ijk,k->ij", x.with_values(values), other)
    assert isinstance(result, stc.SparseTensor)
    found = torch.autograd.grad(result.values.sum(), [values, other])
    torch.testing.assert_close(found[0], b[x.coords[2]])
    torch.testing.assert_close(found[1], x.to_dense().sum((0, 1)))


@pytest.mark.parametrize("inside", [True, False])
def test_two_sparse_operands_and_inference_mode(inside: bool) -> None:
    x = matrix()
    with torch.inference_mode():
        y = random_sparse((8, 5), "random", torch.float64, 1)
        if inside:
            assert_matches(stc.einsum("ij,jk->ik", x, y), "ij,jk->ik", [x, y])
    values = x.values.clone().requires_grad_()
    result = stc.einsum("ij,jk->ik", x.with_values(values), y)
    assert isinstance(result, stc.SparseTensor)
    (found,) = torch.autograd.grad(result.values.sum(), values)
    torch.testing.assert_close(found, y.to_dense().sum(1)[x.coords[1]])


# --- a default device, and a default dtype ----------------------------------------------------------------------------


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Tensors made without a device, or without a dtype, are of no use to anyone."""
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def elsewhere_now() -> None:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float16)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int32])
def test_einsum(name: str, dtype: torch.dtype) -> None:
    problem = Problem(OPERATIONS[name], dtype=dtype)
    operands = problem.operands()
    elsewhere_now()
    found = stc.einsum(problem.equation, *operands)
    torch.set_default_device(None)
    assert_matches(found, problem.equation, operands)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("plan", ["coo", "fiber", "rows", stc.plans.plan_hls(2), *TILED])
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,jr,ks->irs"])
def test_plans_and_their_explanations(plan: Any, equation: str) -> None:
    check_elsewhere(equation, plan)


def check_elsewhere(equation: str, plan: Any) -> None:
    """A plan is made, explained and run where tensors of torch are made elsewhere."""
    problem = Problem(equation, {"i": 40, "j": 30, "k": 20, "r": 4, "s": 3}, dtype=torch.float64)
    operands = problem.operands()
    elsewhere_now()
    kernel = stc.compile(equation, *operands, plan=plan)
    assert str(kernel.explain())
    found = kernel(*operands[1:])
    torch.set_default_device(None)
    assert_matches(found, equation, operands)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("plan", ["auto", "scalar", "dense", "bcb", stc.plans.plan_bcb(threshold=3)])
def test_two_sparse_operands(plan: Any) -> None:
    x, y = matrix(), random_sparse((8, 5), "random", torch.float64, 1)
    elsewhere_now()
    kernel = stc.compile("ij,jk->ik", x, y, plan=plan)
    assert str(kernel.explain())
    found = kernel()
    torch.set_default_device(None)
    assert_matches(found, "ij,jk->ik", [x, y])


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("equation", ["ij,jr->ir", "ij,jr->jir", "ii,ir->ir", "ij,jr->ijr"])
def test_gradients(equation: str) -> None:
    x = random_sparse((6, 6), "random", torch.float64)
    values, b = x.values.clone().requires_grad_(), random_values((6, 3), torch.float64, 1).requires_grad_()
    found, expected = [], []
    for made in (found, expected):
        if made is found:
            elsewhere_now()
        result = stc.einsum(equation, x.with_values(values), b)
        total = (result.values if isinstance(result, stc.SparseTensor) else result).square().sum()
        made += torch.autograd.grad(total, [values, b])
        torch.set_default_device(None)
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("elsewhere")
def test_tensors_and_their_forms() -> None:
    x, b = matrix(), random_values((8, 3), torch.float64, 1)
    coords = torch.tensor([[2, 0, 2], [1, 1, 1]])
    hybrid = stc.SparseTensor([[0, 2]], random_values((2, 8), torch.float64, 1), (6, 8))
    blocks = x.to_torch(torch.sparse_bsr, (2, 2))
    dense, expected, scipy = x.to_dense(), x.to_dense() @ b, x.to_scipy().tocsr()
    elsewhere_now()
    assert stc.SparseTensor(coords, torch.ones(3, device="cpu"), (3, 2)).values.tolist() == [1, 2]
    assert hybrid.expand_dense().device.type == "cpu"
    assert x.permute(1, 0).device.type == "cpu"
    assert stc.SparseTensor.from_dense(dense).nnz == x.nnz
    found = [stc.einsum(SPMM, blocks, b), x.to_dense() @ b]
    torch.set_default_device(None)
    found += [stc.einsum(SPMM, scipy, b)]
    for one in found:
        torch.testing.assert_close(one, expected)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", ["coo", "fiber", "dense_tile", "bitmap_tile"])
def test_the_conformance_suite(name: str) -> None:
    elsewhere_now()
    storage = explicit_plan(name, "0|1|2" if name == "fiber" else "0||12", {}, lanes=1).parts[0].storage
    check_format(name, pattern("random", (5, 6, 7)), (5, 6, 7), storage)
