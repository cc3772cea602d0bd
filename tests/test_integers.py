"""Integers near their limits: sums as torch's, results that do not fit refused, duplicates added up exactly."""

from __future__ import annotations

import pytest
import torch
from cases import assert_matches, random_sparse

import sparsetc as stc

SMALL = [torch.int8, torch.int16, torch.int32]


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("output", ["dense", "sparse"])
def test_a_plain_sum_is_torch_s(dtype: torch.dtype, output: str) -> None:
    most = torch.iinfo(dtype).max
    x = stc.SparseTensor([[0, 0, 1], [0, 1, 1]], torch.tensor([most, most, -most], dtype=dtype), (2, 2))
    expected = torch.einsum("ij->i", x.to_dense())
    found = stc.einsum("ij->i", x, output=output)
    found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)
    assert stc.einsum("ij->ji", x).dtype == dtype  # nothing is summed


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("plan", ["auto", "coo", "fiber", "rows"])
def test_a_product_that_does_not_fit_is_refused(dtype: torch.dtype, plan: str) -> None:
    most = torch.iinfo(dtype).max
    x = stc.SparseTensor([[0, 1, 1], [0, 0, 1]], torch.tensor([1, 1, 1], dtype=dtype), (2, 2))
    b = torch.full((2, 3), most, dtype=dtype)
    with pytest.raises(stc.DtypeError, match=f"holds {2 * most}, which {dtype} cannot"):
        stc.einsum("ij,jr->ir", x, b, plan=plan)
    assert torch.equal(stc.einsum("ij,jr->ir", x, b // 2, plan=plan), x.to_dense() @ (b // 2))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("plan", ["auto", "scalar", "dense", "bcb"])
def test_a_contraction_that_does_not_fit_is_refused(dtype: torch.dtype, plan: str) -> None:
    most = torch.iinfo(dtype).max
    x = stc.SparseTensor([[0, 0], [0, 1]], torch.tensor([most, most], dtype=dtype), (2, 2))
    y = stc.SparseTensor([[0, 1], [0, 0]], torch.tensor([1, 1], dtype=dtype), (2, 2))
    with pytest.raises(stc.DtypeError, match=f"holds {2 * most}, which {dtype} cannot"):
        stc.einsum("ij,jk->ik", x, y, plan=plan)
    less = stc.einsum("ij,jk->ik", x, y.with_values(torch.tensor([1, -1], dtype=dtype)), plan=plan)
    assert less.dtype == dtype
    assert less.values.tolist() == [0]


def test_what_is_made_on_the_way_has_64_bits() -> None:
    x = stc.SparseTensor([[0, 0], [0, 1]], torch.tensor([100, 100], dtype=torch.int8), (1, 2))
    y = stc.SparseTensor([[0, 1], [0, 0]], torch.tensor([1, 1], dtype=torch.int8), (2, 1))
    zero = stc.SparseTensor([[0], [0]], torch.tensor([0], dtype=torch.int8), (1, 1))
    assert stc.einsum("ij,jk,kl->il", x, y, zero).values.tolist() == [0]  # 200 times 0


def test_products_of_dense_operands_have_64_bits() -> None:
    x = stc.SparseTensor([[0], [1]], torch.tensor([0], dtype=torch.int8), (2, 2))
    b = torch.full((2, 2), 100, dtype=torch.int8)
    assert stc.einsum("ij,jr,rs->is", x, b, b).tolist() == [[0, 0], [0, 0]]
    with pytest.raises(stc.DtypeError, match="holds 20000, which"):
        stc.einsum("ij,jr,rs->is", x.with_values(torch.tensor([1], dtype=torch.int8)), b, b)


@pytest.mark.parametrize("dtype", [*SMALL, torch.int64], ids=str)
def test_duplicates_are_added_up_exactly(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    for values, fits in (
        ([limits.max, 0, 0], True),
        ([limits.max, 1, -1], True),
        ([limits.min, -1, 1], True),
        ([limits.min, limits.max, 1], True),
        ([limits.max, 1, 0], False),
        ([limits.min, -1, 0], False),
        ([limits.max, limits.max, limits.max], False),
        ([limits.min, limits.min, limits.min], False),
    ):
        given = torch.tensor(values, dtype=dtype)
        if fits:
            x = stc.SparseTensor([[3, 3, 3]], given, (5,))
            assert x.values.tolist() == [sum(values)]
        else:
            with pytest.raises(stc.DtypeError, match=f"duplicates sum to {sum(values)}|holds {sum(values)}"):
                stc.SparseTensor([[3, 3, 3]], given, (5,))


def test_results_are_scaled_and_added_to_within_their_type() -> None:
    x = random_sparse((4, 4), "dense", torch.int8)
    b = torch.ones(4, 3, dtype=torch.int8)
    assert_matches(stc.contract(x, b, 1), "ij,jr->ir", [x, b])
    with pytest.raises(stc.DtypeError, match="1000 times the result"):
        stc.contract(x, b, 1, alpha=1000)
