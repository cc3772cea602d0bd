"""The kernels of small systems, and decompositions whose einsums run the generated Triton source."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 5, 16, 33])
@pytest.mark.parametrize("deficient", [False, True])
def test_inverses_are_those_of_torch(deficient: bool, rank: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(rank)
    rows = max(1, rank // 2) if deficient else rank + 9
    root = torch.rand(rows, rank, generator=random, dtype=torch.float64) * torch.logspace(-3, 3, rank)
    if deficient and rank > 1:
        root[:, rank // 2] = 0  # a component that is zero in another mode, for which any inverse will do
    gram = (root.T @ root).to(dtype).double()
    expected, found = linear.inverse_by_torch(gram, dtype), linear.inverse_by_kernel(gram, dtype)
    assert found.dtype == dtype
    assert bool(found.isfinite().all())
    scale = gram.diagonal().sqrt()
    both = [scale[:, None] * inverse.double() * scale for inverse in (found, expected)]
    torch.testing.assert_close(
        both[0] / both[1].abs().max(), both[1] / both[1].abs().max(), rtol=0, atol=1e-2 if deficient else 1e-6
    )


def test_a_factor_of_nan_stays_so() -> None:
    factor = torch.full((3, 2), torch.nan)
    linear.hals_by_kernel(factor, torch.ones(3, 2), torch.eye(2))
    assert bool(factor.isnan().all())


@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize("mask", [None, "observed"])
def test_a_decomposition(mask: str | None, nonnegative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    dense = torch.rand(5, 6, 4, generator=random, dtype=torch.float64)
    x = stc.SparseTensor.from_dense(dense * (dense > 0.5))
    options: dict[str, Any] = {
        "mask": mask,
        "nonnegative": nonnegative,
        "l2_reg": 0.1,
        "random_state": 0,
        "n_iter_max": 2,
    }
    expected = cp_als(x, 3, backend="torch", **options)
    monkeypatch.setattr(linear, "inverse_by_torch", linear.inverse_by_kernel)
    monkeypatch.setattr(linear, "hals_by_columns", linear.hals_by_kernel)
    assert cp_als(x, 3, **options).fits == pytest.approx(expected.fits)
