"""Patterns found again though the object around them is new: nothing is converted, planned or packed a second time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from cases import assert_matches, random_sparse, random_values

import sparsetc as stc
from sparsetc.packing import base as packing
from sparsetc.tensor.readings import readings

pytestmark = pytest.mark.filterwarnings("ignore:Sparse.*beta state:UserWarning")

SPMM = "ij,jr->ir"
LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The format of every part that is packed."""
    made: list[str] = []

    def pack(*args: Any) -> packing.Packed:
        made.append(args[2])
        return packing.pack(*args)

    monkeypatch.setattr("sparsetc.packing.partition.pack", pack)
    return made


def matrix(seed: int = 0) -> stc.SparseTensor:
    return random_sparse((6, 8), "random", torch.float64, seed)


def in_torch(x: stc.SparseTensor, layout: torch.layout) -> torch.Tensor:
    blocks = (2, 4) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return x.to_torch(layout, blocks)


def remade(a: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Another torch tensor with the same index arrays."""
    if a.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(a._indices(), values, a.shape, is_coalesced=a.is_coalesced())
    by_rows = a.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (a.crow_indices(), a.col_indices()) if by_rows else (a.ccol_indices(), a.row_indices())
    return torch.sparse_compressed_tensor(*indices, values, a.shape, layout=a.layout)


def stored(a: torch.Tensor) -> torch.Tensor:
    return a._values() if a.layout == torch.sparse_coo else a.values()


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_torch_operand_is_packed_once(layout: torch.layout, packs: list[str]) -> None:
    a, b = in_torch(matrix(), layout), random_values((8, 3), torch.float64, 1)
    for _ in range(2):
        torch.testing.assert_close(stc.einsum(SPMM, a, b), a.to_dense() @ b)
    stored(a).mul_(-3)  # in place, as training does
    torch.testing.assert_close(stc.einsum(SPMM, a, b), a.to_dense() @ b)
    other = remade(a, random_values(tuple(stored(a).shape), torch.float64, 2))
    torch.testing.assert_close(stc.einsum(SPMM, other, b), other.to_dense() @ b)
    assert len(packs) == 1
    assert stc.SparseTensor.from_torch(a).pattern is stc.SparseTensor.from_torch(other).pattern


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_reach_the_values_of_a_torch_operand(layout: torch.layout, packs: list[str]) -> None:
    a, b = in_torch(matrix(), layout), random_values((8, 3), torch.float64, 1)
    for seed in (2, 3):
        values = random_values(tuple(stored(a).shape), torch.float64, seed).requires_grad_()
        (expected,) = torch.autograd.grad((remade(a, values).to_dense() @ b).square().sum(), values)
        (found,) = torch.autograd.grad(stc.einsum(SPMM, remade(a, values), b).square().sum(), values)
        torch.testing.assert_close(found, expected)
    assert len(packs) <= 2  # for the result, and for the gradient


def test_a_torch_operand_with_duplicates() -> None:
    indices = torch.tensor([[2, 0, 2, 1], [1, 3, 1, 0]])
    b = random_values((4, 3), torch.float64, 1)
    for seed in (2, 3):
        values = random_values((4,), torch.float64, seed).requires_grad_()
        a = torch.sparse_coo_tensor(indices, values, (3, 4))
        result = stc.einsum(SPMM, a, b)
        torch.testing.assert_close(result, a.to_dense() @ b)
        (found,) = torch.autograd.grad(result.sum(), values)
        torch.testing.assert_close(found, b.sum(1)[indices[1]])
        torch.testing.assert_close(stc.einsum(SPMM, a.detach(), b), result)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trace", [True, False])
def test_index_arrays_that_changed_are_read_again(layout: torch.layout, trace: bool) -> None:
    a, b = in_torch(matrix(), layout), random_values((8, 3), torch.float64, 1)
    stc.einsum(SPMM, a, b)
    if layout == torch.sparse_coo:
        own = a._indices()[1]
    else:
        own = a.col_indices() if layout in (torch.sparse_csr, torch.sparse_bsr) else a.row_indices()
    (own if trace else own.data).copy_(own.max() - own)
    torch.testing.assert_close(stc.einsum(SPMM, a, b), a.to_dense() @ b)


def test_hybrid_and_batched_torch_operands() -> None:
    hybrid = torch.sparse_coo_tensor(torch.tensor([[2, 0]]), random_values((2, 4), torch.float64, 1), (3, 4))
    b = random_values((4, 2), torch.float64, 2)
    for _ in range(2):
        torch.testing.assert_close(stc.einsum(SPMM, hybrid, b), hybrid.to_dense() @ b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reading_goes_with_the_index_arrays(layout: torch.layout) -> None:
    gc.collect()
    gc.freeze()  # what is there already need not be looked at again
    before = len(readings)
    a, b = in_torch(matrix(), layout), random_values((8, 3), torch.float64, 1)
    stc.einsum(SPMM, a, b)
    key = weakref.ref(stc.SparseTensor.from_torch(a).pattern)
    assert len(readings) == before + 1
    other = remade(a, stored(a))
    del a
    gc.collect()
    assert key() is not None
    del other
    gc.collect()
    assert key() is None
    assert len(readings) == before


# --- scipy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["csr", "csc", "bsr", "coo"])
def test_a_scipy_operand_is_packed_once(form: str, packs: list[str]) -> None:
    a = matrix().to_scipy().asformat(form)
    b = random_values((8, 3), torch.float64, 1)
    for _ in range(2):
        torch.testing.assert_close(stc.einsum(SPMM, a, b), torch.from_numpy(a.toarray()) @ b)
    a.data *= -3
    torch.testing.assert_close(stc.einsum(SPMM, a, b), torch.from_numpy(a.toarray()) @ b)
    assert len(packs) == 1


def test_a_scipy_operand_sorted_in_place_is_read_again() -> None:
    a = scipy.sparse.csr_array((np.array([1.0, 2.0, 3.0]), np.array([3, 0, 1]), np.array([0, 2, 3])), shape=(2, 4))
    b = random_values((4, 3), torch.float64, 1)
    expected = torch.from_numpy(a.toarray()) @ b
    torch.testing.assert_close(stc.einsum(SPMM, a, b), expected)
    a.sort_indices()
    torch.testing.assert_close(stc.einsum(SPMM, a, b), expected)
    a.indices[:2] = [1, 2]
    torch.testing.assert_close(stc.einsum(SPMM, a, b), torch.from_numpy(a.toarray()) @ b)


@pytest.mark.parametrize("form", ["dia", "lil", "dok"])
def test_other_forms_of_scipy_are_read_each_time(form: str) -> None:
    a = matrix().to_scipy().asformat(form)
    b = random_values((8, 3), torch.float64, 1)
    torch.testing.assert_close(stc.einsum(SPMM, a, b), torch.from_numpy(a.toarray()) @ b)


def test_a_scipy_operand_that_may_only_be_read() -> None:
    a = matrix().to_scipy().tocsr()
    b = random_values((8, 3), torch.float64, 1)
    for array in (a.data, a.indices, a.indptr):
        array.flags.writeable = False
    for _ in range(2):
        torch.testing.assert_close(stc.einsum(SPMM, a, b), torch.from_numpy(a.toarray()) @ b)


# --- our own ----------------------------------------------------------------------------------------------------------


def test_a_sampled_result_has_the_operand_s_pattern(packs: list[str]) -> None:
    x, b = matrix(), random_values((8, 3), torch.float64, 1)
    left, right = random_values((6, 3), torch.float64, 2), random_values((8, 3), torch.float64, 3)
    stc.einsum(SPMM, x, b)
    for _ in range(2):
        y = stc.sddmm(x, left, right)
        assert isinstance(y, stc.SparseTensor)
        assert y.pattern is x.pattern
        made = len(packs)
        assert_matches(stc.einsum(SPMM, y, b), SPMM, [y, b])
        assert len(packs) == made


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ijk,k->ij", "ij,jr->ir"),  # projected
        ("ijk,kr->ijr", "ijr,jr->ir"),  # semi-sparse, projected
        ("ijk,kr->ijkr", "ijkr,jr->ir"),  # semi-sparse, on the operand's own pattern
    ],
)
def test_results_that_live_at_one_time_share_a_pattern(first: str, second: str, packs: list[str]) -> None:
    x = random_sparse((4, 5, 6), "random", torch.float64)
    b = random_values((5, 3), torch.float64, 2)
    made = []
    y: Any = None
    for seed in (1, 2, 3):
        shape = (6,) if first == "ijk,k->ij" else (6, 3)
        y = stc.einsum(first, x, random_values(shape, torch.float64, seed))  # the one before lives until here
        assert_matches(stc.einsum(second, y, b), second, [y, b])
        made.append(len(packs))
    assert made[0] == made[2]


def test_results_of_a_contraction_share_a_pattern(packs: list[str]) -> None:
    x, y = matrix(), random_sparse((8, 5), "random", torch.float64, 1)
    b = random_values((5, 3), torch.float64, 2)
    z: Any = None
    for _ in range(3):
        z = stc.einsum("ij,jk->ik", x, y)
        assert_matches(stc.einsum(SPMM, z, b), SPMM, [z, b])
    assert len(packs) == 1


def test_a_semi_sparse_operand_is_expanded_once(packs: list[str]) -> None:
    x = stc.SparseTensor([[0, 2], [1, 3]], random_values((2, 5), torch.float64, 1), (3, 4, 5))
    c = random_values((5, 2), torch.float64, 2)
    for scale in (1, 2):
        y = x.with_values(x.values * scale)
        assert_matches(stc.einsum("ijk,kr->ijr", y, c), "ijk,kr->ijr", [y.expand_dense(), c])
    assert len(packs) == 1
    assert x.expand_dense().coords is x.expand_dense().coords


def test_gradients_of_projected_results_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsetc.contraction import contraction

    made: list[str] = []
    build: Callable[..., Any] = contraction.parsed
    monkeypatch.setattr(
        contraction, "parsed", lambda text, *args, **how: made.append(text) or build(text, *args, **how)
    )
    x = random_sparse((4, 5, 6), "random", torch.float64)
    for seed in (1, 2, 3):
        values = random_values((x.nnz,), torch.float64, seed).requires_grad_()
        v = random_values((6,), torch.float64, seed).requires_grad_()
        result = stc.einsum("ijk,k->ij", x.with_values(values), v)
        assert isinstance(result, stc.SparseTensor)
        result.values.square().sum().backward()
    assert len(made) == 3  # the result, the gradients of values and of the vector
