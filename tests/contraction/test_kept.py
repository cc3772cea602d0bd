"""What is kept for patterns: counted, forgotten on demand, and made once, whatever it was derived from."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from cases import random_sparse, random_values

import sparsetc as stc
from sparsetc.contraction.request import Request
from sparsetc.contraction.rewrites import coordinates
from sparsetc.ir.equation.parse import parse
from sparsetc.options import Options
from sparsetc.tensor.pattern import KEPT, Pattern

SPMM = "ij,jr->ir"


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> None:
    gc.collect()  # kernels of other tests, and what they refer to
    gc.freeze()
    stc.clear_cache()


def operands(coalesce: bool = True, shape: tuple[int, ...] = (6, 8)) -> tuple[stc.SparseTensor, torch.Tensor]:
    return random_sparse(shape, "random", torch.float64, coalesce=coalesce), random_values((8, 4), torch.float64, 1)


def test_nothing_is_counted_at_first() -> None:
    operands()
    assert stc.cache_info() == type(stc.cache_info())(0, 0, 0, 0, 0, 0)


def test_kernels_storages_and_modules_are_counted() -> None:
    x, b = operands()
    kernel = stc.compile(SPMM, x, b)
    stored = sum(part.packed.nbytes for part in kernel.step.parts)
    first = stc.cache_info()
    assert (first.patterns, first.kernels, first.storages, first.nbytes) == (1, 0, 1, stored)
    assert first.modules == 1
    for _ in range(2):
        stc.einsum(SPMM, x, b)
    assert stc.cache_info() == type(first)(1, 1, 1, stored, 0, 1)
    stc.einsum("ij,ir->jr", x, random_values((6, 4), torch.float64, 2))
    more = stc.cache_info()
    assert (more.kernels, more.storages, more.modules) == (2, 2, 2)
    assert more.nbytes > stored


def test_values_of_one_pattern_share_what_is_kept() -> None:
    x, b = operands()
    stc.einsum(SPMM, x, b)
    before = stc.cache_info()
    stc.einsum(SPMM, x.with_values(2 * x.values), b)
    assert stc.cache_info() == before


def test_foreign_tensors_are_counted() -> None:
    x, b = operands()
    given = x.to_torch()
    stc.einsum(SPMM, given, b)
    assert stc.cache_info().foreign == 1
    stc.clear_cache()
    assert stc.cache_info().foreign == 0
    torch.testing.assert_close(stc.einsum(SPMM, given, b), x.to_dense() @ b)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_same_coordinates_find_their_pattern(order: list[int], dtype: torch.dtype) -> None:
    coords = torch.tensor([[0, 1, 1], [2, 0, 2]], dtype=dtype)[:, order]
    values = torch.tensor([1.0, 2.0, 3.0])[order].requires_grad_()
    x, y = (stc.SparseTensor(coords, times * values, (2, 3)) for times in (1, 2))
    assert x.pattern is y.pattern
    torch.testing.assert_close(y.to_dense(), torch.tensor([[0.0, 0, 2], [4, 0, 6]]))
    torch.testing.assert_close(torch.autograd.grad(y.values.sum(), values)[0], torch.full((3,), 2.0))
    assert stc.SparseTensor(coords, values, (3, 3)).pattern is not x.pattern
    coords[0, 0] = 0  # changed where it lies
    torch.testing.assert_close(stc.SparseTensor(coords, values, (2, 3)).to_dense().sum(), values.sum())
    coords[1, 1] = 3
    with pytest.raises(stc.FormatError, match="3"):
        stc.SparseTensor(coords, values, (2, 3))


def test_what_is_kept_goes_with_its_tensor() -> None:
    x, b = operands()
    stc.einsum(SPMM, x, b)
    del x
    gc.collect()
    info = stc.cache_info()
    assert (info.patterns, info.kernels, info.storages, info.nbytes) == (0, 0, 0, 0)


def test_kernels_that_are_held_go_on() -> None:
    x, b = operands()
    kernel, pair = stc.compile(SPMM, x, b), stc.compile("ij,kj->ik", x, x)
    expected, squared = kernel(b), pair().to_dense()
    stc.clear_cache()
    assert stc.cache_info() == type(stc.cache_info())(0, 0, 0, 0, 0, 0)
    assert torch.equal(kernel(b), expected)
    assert torch.equal(pair().to_dense(), squared)
    torch.testing.assert_close(kernel(b, values=[2 * x.values]), 2 * expected)
    values = x.values.clone().requires_grad_()
    kernel(b, values=[values]).sum().backward()
    torch.testing.assert_close(values.grad, b.sum(1)[x.coords[1]])
    assert "part_0" in kernel.source
    assert kernel.path.read_text() == kernel.source
    torch.testing.assert_close(stc.einsum(SPMM, x, b), expected)


def derived(equation: str, x: stc.SparseTensor, *dense: torch.Tensor) -> Pattern:
    """The pattern that a contraction is planned and packed for."""
    bound = parse(equation, [x.shape, *(tuple(d.shape) for d in dense)], [True, *(False for _ in dense)])
    rewrite = coordinates(Request(bound, [x, *dense], Options(), "auto"))
    return rewrite.inner.sparse[0].pattern if rewrite else x.pattern


def test_an_uncoalesced_pattern_is_sorted_once() -> None:
    x, b = operands(coalesce=False)
    own = derived(SPMM, x, b)
    assert own is not x.pattern
    assert own.nnz == x.nnz
    assert derived(SPMM, x.with_values(2 * x.values), b) is own
    assert derived("ij->i", x) is own
    for equation, dense in ((SPMM, b), ("ij,rj->ri", b.T)):
        torch.testing.assert_close(stc.einsum(equation, x, dense), torch.einsum(equation, x.to_dense(), dense))
    assert stc.cache_info().patterns == 2
    assert derived(SPMM, x, b) is own


def test_a_diagonal_is_taken_once() -> None:
    x = random_sparse((6, 6, 8), "dense", torch.float64)
    b = random_values((8, 4), torch.float64, 1)
    own = derived("iij,jr->ir", x, b)
    assert own.shape == (6, 8)
    assert bool((x.coords[0] == x.coords[1]).sum() == own.nnz)
    assert derived("aak,kr->ar", x, b) is own
    assert derived("iij->j", x.with_values(2 * x.values)) is own
    assert derived("ijj->i", random_sparse((6, 8, 8), "dense", torch.float64)) is not own
    expected = torch.einsum("iij,jr->ir", x.to_dense(), b)
    torch.testing.assert_close(stc.einsum("iij,jr->ir", x, b), expected)
    assert derived("iij,jr->ir", x, b) is own


@pytest.mark.parametrize(("equation", "coalesce"), [("iij->ij", True), ("iij->ij", False), ("kij->kij", False)])
def test_values_of_some_entries_are_stored_in_their_order(equation: str, coalesce: bool) -> None:
    x = random_sparse((6, 6, 8), "random", torch.float64, coalesce=coalesce)
    assert "slot" not in stc.compile(equation, x, plan="coo", backend="triton").source
    found = stc.einsum(equation, x)
    torch.testing.assert_close(found.to_dense(), torch.einsum(equation, x.to_dense()))
    assert stc.einsum(equation, x.with_values(2 * x.values)).pattern is found.pattern


def test_entries_that_happen_to_be_sorted_are_left_where_they_are() -> None:
    x, b = operands()
    y = stc.SparseTensor(x.coords, x.values, x.shape, coalesce=False)
    assert derived(SPMM, y, b) is y.pattern
    assert stc.einsum("ij->ij", y).pattern is y.pattern


def test_a_diagonal_and_a_whole_operand_are_told_apart() -> None:
    x = random_sparse((6, 6), "dense", torch.float64, coalesce=False)
    whole, diagonal = derived("ij->i", x), derived("ii->i", x)
    assert (whole.shape, diagonal.shape) == ((6, 6), (6,))
    assert derived("ji->i", x) is whole
    assert derived("jj->j", x) is diagonal


def test_results_of_the_same_modes_are_of_one_pattern() -> None:
    x, w = random_sparse((6, 7, 5), "random", torch.float64), random_sparse((5, 4), "random", torch.float64, 1)
    v = random_values((5,), torch.float64, 2)
    summed, scaled = stc.einsum("ijk->ij", x), stc.einsum("ijk,k->ij", x.with_values(2 * x.values), v)
    assert summed.pattern is scaled.pattern
    pair = stc.einsum("ijk,kl->ijl", x, w)
    assert stc.compile("ijk,kl->ijl", x, w)().pattern is pair.pattern
    assert stc.compile("ijk,kl->jil", x, w)().pattern is not pair.pattern
    torch.testing.assert_close(pair.to_dense(), torch.einsum("ijk,kl->ijl", x.to_dense(), w.to_dense()))
    sum_of_scaled = torch.einsum("ijk,k->ij", 2 * x.to_dense(), v)
    torch.testing.assert_close(scaled.to_dense(), sum_of_scaled)


def test_a_result_s_pattern_goes_with_those_who_have_it() -> None:
    x = random_sparse((6, 7, 5), "random", torch.float64)
    kernel = stc.compile("ijk->ij", x)
    left = weakref.ref(kernel().pattern)
    assert left() is not None
    del kernel
    assert left() is None


@pytest.mark.parametrize("coalesce", [True, False])
def test_a_permuted_pattern_is_made_once(coalesce: bool) -> None:
    x, _ = operands(coalesce)
    y = x.permute(1, 0)
    assert y.pattern is x.with_values(2 * x.values).permute(1, 0).pattern
    torch.testing.assert_close(y.to_dense(), x.to_dense().T)
    semi = stc.SparseTensor([[2, 0]], random_values((2, 5, 4), torch.float64, 1), (3, 5, 4), coalesce=coalesce)
    assert semi.permute(0, 2, 1).pattern is semi.pattern
    torch.testing.assert_close(semi.permute(0, 2, 1).to_dense(), semi.to_dense().permute(0, 2, 1))


@pytest.mark.parametrize("coalesce", [True, False])
def test_tensors_are_made_under_transforms(coalesce: bool) -> None:
    coords = torch.tensor([[0, 1, 2], [0, 1, 0]])

    def total(values: torch.Tensor) -> torch.Tensor:
        return stc.SparseTensor(coords, values, (3, 3), coalesce=coalesce).to_dense().square().sum()

    values = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(torch.func.grad(total)(values), 2 * values)
    torch.testing.assert_close(torch.func.vmap(total)(torch.stack([values, 2 * values])), torch.tensor([14.0, 56.0]))


def test_kernels_of_batches_of_many_sizes_are_not_all_kept() -> None:
    x, b = operands()
    kernel = stc.compile(SPMM, x, b)
    for size in range(1, KEPT + 8):
        assert torch.func.vmap(kernel)(b.expand(size, *b.shape)).shape == (size, 6, 4)
    assert 0 < len(x.pattern.cache) <= KEPT
