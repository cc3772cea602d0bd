"""The kernels of small systems, and decompositions whose einsums run the generated Triton source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decomposition_cases import random_factors, random_tensor

import sparsetc as stc
from sparsetc.decomposition import cp_als, fused, linear
from sparsetc.decomposition.als import Equations, Sweep


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
    if deficient:
        root[:, rank // 2] = 0  # a component that is zero in another mode
    gram = (root.T @ root).to(dtype).double()
    _, expected = linear.inverse_by_torch(gram, dtype)
    own, found = linear.inverse_by_kernel(gram, dtype)
    assert torch.equal(own, gram.to(dtype))
    assert found.dtype == dtype
    scale = gram.diagonal().clamp(min=1e-300).sqrt()
    scale[gram.diagonal() == 0] = 1
    both = [scale[:, None] * inverse.double() * scale for inverse in (found, expected)]
    torch.testing.assert_close(
        both[0] / both[1].abs().max(), both[1] / both[1].abs().max(), rtol=0, atol=1e-2 if deficient else 1e-6
    )


def test_a_factor_of_nan_stays_so() -> None:
    factor = torch.full((3, 2), torch.nan)
    linear.hals_by_kernel(factor, torch.ones(3, 2), torch.eye(2))
    assert bool(factor.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("penalty", [None, 0.3])
@pytest.mark.parametrize(("order", "skip", "rank"), [(2, 0, 1), (3, 2, 5), (4, 1, 16), (3, -1, 33)])
def test_the_product_is_inverted_in_one_launch(
    order: int, skip: int, rank: int, penalty: float | None, dtype: torch.dtype
) -> None:
    factors = random_factors((rank + 9,) * order, rank)
    grams = torch.stack([f.T @ f for f in factors])
    used = torch.stack([gram for mode, gram in enumerate(grams) if mode != skip])
    given = None if penalty is None else torch.tensor(penalty, dtype=torch.float64)
    product = linear.hadamard(used) + (penalty or 0) * torch.eye(rank, dtype=torch.float64)
    expected = linear.inverse_by_torch(product, dtype)
    before = grams.clone()
    for found, wanted in zip(linear.inverse_of_product(grams, dtype, skip, given), expected, strict=True):
        torch.testing.assert_close(found / wanted.abs().max(), wanted / wanted.abs().max())
    assert torch.equal(grams, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("deficient", [False, True])
@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (67, 5), (16, 16), (40, 33), (33, 64), (2100, 5)])
def test_a_step_is_that_of_torch(rows: int, rank: int, deficient: bool, dtype: torch.dtype) -> None:
    start, rhs, root = random_factors((rows, rows, max(1, rank // 2) if deficient else rank + 9), rank)
    if deficient:
        root[:, rank // 2] = 0
        rhs = torch.rand(rows, root.shape[0], dtype=torch.float64) @ root  # of H's range, as an MTTKRP is
    system, rhs = linear.inverse_by_torch(root.T @ root, dtype), rhs.to(dtype)
    expected, *others = (start.to(dtype, copy=True) for _ in range(3))
    linear.step(expected, rhs, system)
    grams = torch.full((2, rank, rank), torch.nan, dtype=torch.float64)
    inners = torch.full((2,), torch.nan, dtype=torch.float64)
    for number, other in enumerate(others):
        fused.advance(other, rhs, system, grams[number], inners[number])
    found = others[0]
    assert torch.equal(found, others[1])
    assert torch.equal(grams[0], grams[1])
    assert torch.equal(inners[0], inners[1])
    eps = 1e3 * torch.finfo(dtype).eps
    if (
        deficient
    ):  # and what it says nothing of moves by rounding errors times its inverse, so compare how exact both are
        solution = rhs.double() @ torch.linalg.pinv(root.T @ root, rtol=1e-10) @ root.T
        errors = [float((factor.double() @ root.T - solution).abs().max()) for factor in (found, expected)]
        assert errors[0] <= 5 * errors[1] + eps
    else:
        torch.testing.assert_close(found / expected.abs().max(), expected / expected.abs().max(), rtol=0, atol=10 * eps)
    exact = found.double().T @ found.double()
    torch.testing.assert_close(grams[0] / exact.max(), exact / exact.max(), rtol=0, atol=eps)
    product = rhs.double() * found.double()
    assert abs(float(inners[0] - product.sum())) <= eps * float(product.abs().sum())


def test_a_step_of_nan_is_nan() -> None:
    factor, rhs, gram = torch.ones(20, 3), torch.ones(20, 3), torch.zeros(3, 3, dtype=torch.float64)
    rhs[4, 1] = torch.nan
    fused.advance(factor, rhs, (torch.eye(3), torch.eye(3)), gram, inner := torch.zeros((), dtype=torch.float64))
    assert bool(inner.isnan())
    assert bool(gram[1].isnan().all())
    assert not bool(factor[[*range(4), *range(5, 20)]].isnan().any())


@pytest.mark.parametrize("case", ["", "zero", "nan", "exact", "empty"])
@pytest.mark.parametrize("free", [(0, 1, 2), (0, 2), (1,)])
@pytest.mark.parametrize("rank", [1, 5, 16, 33, 64])
def test_a_model_is_measured_and_balanced_as_by_torch(rank: int, free: tuple[int, ...], case: str) -> None:
    x, factors = random_tensor((4, 6, 5)), random_factors((4, 6, 5), rank)
    if case in ("zero", "nan"):
        factors[1][:, rank // 2] = 0 if case == "zero" else torch.nan
    equations = Equations(x, factors, free, backend="torch")
    if case == "empty":
        equations.norm.zero_()
    sweep = Sweep(equations, factors, free, linear.LEAST_SQUARES, 0.0)
    grams, found = equations.grams.clone(), [f.clone() for f in factors]
    rhs = equations.rhs(free[-1])
    inner = (rhs * factors[free[-1]]).sum()
    square = linear.hadamard(grams).sum()
    if case == "exact":  # by rounding the error would be a root of less than 0
        inner = (equations.norm.square() + square) / 2 + 1e-9
    expected = linear.fit_of(equations.norm, inner, square)
    scales = linear.balancing(equations.norms(), sweep._is_free)
    sweep.balance()
    fit = torch.zeros(1, dtype=torch.float64)
    fused_scales = fused.measure(grams, inner, equations.norm, sweep._is_free, fit)
    fused.scale([found[m] for m in free], free, grams, fused_scales)
    torch.testing.assert_close(fit[0], expected, equal_nan=True)
    torch.testing.assert_close(fused_scales, scales)
    torch.testing.assert_close(grams, equations.grams, equal_nan=True)
    for one, other in zip(found, factors, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert case == "zero" or rank == 1 or len(free) == 1 or not torch.equal(scales, torch.ones_like(scales))


def test_factors_are_scaled_in_float64() -> None:
    factors = [f.float() for f in random_factors((700, 3), 5)]
    scales = torch.rand(3, 5, dtype=torch.float64)
    expected = [(f * scales[mode]).float() for f, mode in zip(factors, (0, 2), strict=True)]
    fused.scale(factors, (0, 2), torch.ones(3, 5, 5, dtype=torch.float64), scales)
    for found, wanted in zip(factors, expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rank", "options"),
    [(1, {}), (3, {}), (3, {"l2_reg": 0.1}), (3, {"fixed_modes": [1]}), (3, {"fixed_modes": [0, 2], "l2_reg": 0.1}),
     (16, {}), (33, {}), (64, {"l2_reg": 1e-3}), (3, {"normalize_factors": False})],
    ids=str,
)  # fmt: skip
def test_a_decomposition_in_few_launches(
    rank: int, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (5, 6, 4)
    x, start = random_tensor(shape, 0.5, dtype), random_factors(shape, rank, dtype)
    options = {"init": start, "n_iter_max": 3, "tol": 0, "backend": "torch"} | options
    expected = cp_als(x, rank, **options)
    made = in_few_launches(monkeypatch)
    found = cp_als(x, rank, **options)
    assert made == [True]
    close = 2e-3 if dtype == torch.float32 else 1e-6
    assert found.fits == pytest.approx(expected.fits, abs=close)
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=0, atol=5 * close)


def test_long_factors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tensor((5, 6, 7), 0.5)
    expected = cp_als(x, 3, random_state=0, n_iter_max=3, backend="torch")
    in_few_launches(monkeypatch)
    for rows in (4, 5, 6):  # which are the rows of the modes, of which the last one measures the fit
        monkeypatch.setattr(fused, "ADVANCE_ROWS", rows)
        assert cp_als(x, 3, random_state=0, n_iter_max=3, backend="torch").fits == pytest.approx(expected.fits)


def test_a_run_in_few_launches_diverges_where_values_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tensor((5, 6, 4), 0.5, torch.float32)
    start = [f * 1e18 for f in random_factors(x.shape, 3, torch.float32)]
    in_few_launches(monkeypatch)
    with pytest.warns(UserWarning, match="no number"):
        assert cp_als(x, 3, init=start, backend="torch").stopped == "diverged"


def in_few_launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Have CP-ALS run as on a GPU; what is returned gets an entry for each sweep so made."""
    made: list[bool] = []
    monkeypatch.setattr(fused, "serves", lambda factors: not made.append(True))
    return made


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
