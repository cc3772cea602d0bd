"""Completion: CP models of observed entries, against least squares by hand and against means."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from decomposition_cases import F32, F64, random_factors, random_tensor

import sparsetc as stc
from sparsetc.decomposition import CP, cp_als


def ratings(shape: tuple[int, ...], share: float, dtype: torch.dtype = F64) -> tuple[torch.Tensor, torch.Tensor]:
    """A dense tensor that is a CP model of rank 3, and which of its entries are known."""
    random = torch.Generator().manual_seed(0)
    factors = tuple(torch.randn(n, 3, generator=random, dtype=F64).to(dtype) for n in shape)
    known = torch.rand(shape, generator=random, dtype=F64) < share
    return CP(torch.ones(3, dtype=dtype), factors).to_dense(), known


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(("shape", "share"), [((20, 24), 0.5), ((20, 18, 16), 0.15), ((10, 9, 8, 9), 0.2)])
def test_what_was_not_seen_is_found(shape: tuple[int, ...], share: float, dtype: torch.dtype) -> None:
    full, known = ratings(shape, share, dtype)
    x = stc.SparseTensor.from_dense(full * known)
    runs = (cp_als(x, 3, mask="observed", l2_reg=1e-4, random_state=seed, n_iter_max=80) for seed in range(2))
    found = max(runs, key=lambda m: m.fits[-1])
    hidden = full[~known]
    error = (found.to_dense()[~known] - hidden).norm() / hidden.norm()
    assert float(error) < 0.02
    means = (hidden - full[known].mean()).norm() / hidden.norm()
    assert float(error) < 0.1 * float(means)


def test_all_forms_of_a_mask_say_the_same() -> None:
    full, known = ratings((9, 8, 7), 0.4)
    x = stc.SparseTensor.from_dense(full)
    sampled = stc.SparseTensor.from_dense(full * known)
    start = random_factors(x.shape, 3)
    expected = cp_als(sampled, 3, mask="observed", init=start, n_iter_max=4).fits
    forms = [known, known.double(), known.numpy(), stc.SparseTensor.from_dense(known.float()), known.to_sparse()]
    for mask in forms:
        assert cp_als(x, 3, mask=mask, init=start, n_iter_max=4).fits == pytest.approx(expected)
    scipy = pytest.importorskip("scipy.sparse")
    matrix = stc.SparseTensor.from_dense(full[0])
    expected = cp_als(matrix, 2, mask=known[0], init=[f[:, :2] for f in start[1:]], n_iter_max=4).fits
    mask = scipy.csr_array(known[0].numpy())
    assert cp_als(matrix, 2, mask=mask, init=[f[:, :2] for f in start[1:]], n_iter_max=4).fits == pytest.approx(
        expected
    )


def test_observed_zeros_count_and_a_mask_tells_them() -> None:
    full, known = ratings((9, 8, 7), 0.4)
    full = full.clamp(min=0)
    start = random_factors(full.shape, 3)
    coords = known.nonzero().T
    explicit = stc.SparseTensor(coords, full[tuple(coords)], full.shape)
    told = cp_als(stc.SparseTensor.from_dense(full), 3, mask=known, init=start, n_iter_max=4)
    assert cp_als(explicit, 3, mask="observed", init=start, n_iter_max=4).fits == pytest.approx(told.fits)
    error = (told.to_dense() - full)[known].norm() / full[known].norm()
    assert told.fit == pytest.approx(1 - float(error))


def test_a_mask_of_everything_is_no_mask() -> None:
    x = random_tensor((9, 8, 7))
    start = random_factors(x.shape, 3)
    everything = torch.ones(x.shape, dtype=torch.bool)
    expected = cp_als(x, 3, init=start, n_iter_max=5, tol=0)
    found = cp_als(x, 3, init=start, n_iter_max=5, tol=0, mask=everything)
    assert found.fits == pytest.approx(expected.fits)
    torch.testing.assert_close(found.factors[1], expected.factors[1])


def test_each_row_is_a_least_squares_problem_of_its_own() -> None:
    full, known = ratings((5, 8, 7), 0.4)
    start = random_factors(full.shape, 2)
    found = cp_als(
        stc.SparseTensor.from_dense(full), 2, mask=known, init=start, fixed_modes=[1, 2], n_iter_max=1, l2_reg=0.3
    )  # fmt: skip
    rows = torch.einsum("jr,kr->jkr", start[1], start[2])
    for i in range(5):
        a, b = rows[known[i]], full[i][known[i]]
        exact = torch.linalg.solve(a.T @ a + 0.3 * torch.eye(2, dtype=F64), a.T @ b)
        torch.testing.assert_close(found.factors[0][i] * found.weights, exact)


@pytest.mark.parametrize("nonnegative", [False, True])
def test_no_sweep_makes_the_fit_worse_and_runs_continue(nonnegative: bool) -> None:
    full, known = ratings((9, 8, 7), 0.4)
    x = stc.SparseTensor.from_dense(full.abs())
    whole = cp_als(x, 3, mask=known, nonnegative=nonnegative, random_state=0, n_iter_max=9, tol=0)
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(whole.fits))
    part = cp_als(x, 3, mask=known, nonnegative=nonnegative, random_state=0, n_iter_max=4, tol=0)
    rest = cp_als(x, 3, mask=known, nonnegative=nonnegative, init=part, n_iter_max=5, tol=0)
    torch.testing.assert_close(rest.factors[0], whole.factors[0], rtol=1e-6, atol=1e-6)
    if nonnegative:
        assert all(bool((f >= 0).all()) for f in whole.factors)


def test_a_row_that_nobody_saw_is_zero() -> None:
    full, known = ratings((9, 8, 7), 0.4)
    known[4] = False
    found = cp_als(stc.SparseTensor.from_dense(full), 3, mask=known, random_state=0, n_iter_max=5)
    assert not found.factors[0][4].any()
    assert all(bool(f.isfinite().all()) for f in found.factors)


def test_observed_zeros_alone_have_a_model_of_zeros() -> None:
    full, known = ratings((9, 8, 7), 0.4)
    found = cp_als(stc.SparseTensor.from_dense(full * ~known), 3, mask=known)
    assert (found.fits, found.stopped) == ((1.0,), "converged")
    assert not found.to_dense().any()


def test_matrices_of_rows_that_would_not_fit_are_refused() -> None:
    x = random_tensor((9, 8, 7))
    with stc.options(memory_limit=1000), pytest.raises(stc.OutOfMemoryError, match="3 x 3 matrix for each of 9 rows"):
        cp_als(x, 3, mask="observed")


def test_values_outside_a_mask_are_not_read() -> None:
    x, seen = random_tensor((4, 5, 6), 0.9), torch.rand(4, 5, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    start = random_factors(x.shape, 2)
    unknown = stc.SparseTensor.from_dense(x.to_dense().masked_fill(~seen, float("nan")))
    found, expected = (cp_als(y, 2, init=start, mask=seen, n_iter_max=3) for y in (unknown, x))
    torch.testing.assert_close(found.to_dense(), expected.to_dense())
    with pytest.raises(stc.FormatError, match="infinite or NaN"):
        cp_als(unknown, 2, mask="observed")


@pytest.mark.parametrize("form", [lambda m: m, torch.Tensor.numpy, stc.SparseTensor.from_dense, torch.Tensor.to_sparse])
def test_a_mask_of_nan_says_nothing(form: Any) -> None:
    x = random_tensor((4, 5, 6), 0.9)
    mask = torch.ones(x.shape).double()
    mask[1, 2, 3] = float("nan")
    with pytest.raises(stc.FormatError, match="the mask has NaN; it must be 0 where an entry is not known"):
        cp_als(x, 2, mask=form(mask))
