"""The kernel of nonnegative updates, and decompositions whose einsums run the generated Triton source."""

from __future__ import annotations

import pytest
import torch

import sparsetc as stc
from sparsetc.decomposition import cp_als, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("a_row", [False, True])
@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (67, 5), (40, 17), (9, 33)])
def test_the_kernel_updates_as_torch_does(rows: int, rank: int, a_row: bool, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(rank)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=random, dtype=torch.float64).to(dtype)

    factor, rhs = drawn(rows, rank), drawn(rows, rank) * rank - 0.3
    root = drawn(*((rows,) if a_row else ()), rank + 3, rank)
    root[..., rank // 2] = 0  # a column of which nothing is known
    gram = root.mT @ root
    expected, found = factor.clone(), factor.clone()
    linear.hals_by_columns(expected, rhs, gram)
    linear.hals_by_kernel(found, rhs, gram)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[:, rank // 2], factor[:, rank // 2])
    assert rank == 1 or not torch.equal(found, factor)


def test_a_factor_of_nan_stays_so() -> None:
    factor = torch.full((3, 2), torch.nan)
    linear.hals_by_kernel(factor, torch.ones(3, 2), torch.eye(2))
    assert bool(factor.isnan().all())


def test_a_decomposition() -> None:
    dense = torch.rand(5, 6, 4, dtype=torch.float64)
    x = stc.SparseTensor.from_dense(dense * (dense > 0.5))
    found = cp_als(x, 3, random_state=0, n_iter_max=2)
    expected = cp_als(x, 3, random_state=0, n_iter_max=2, backend="torch")
    assert found.fits == pytest.approx(expected.fits)
