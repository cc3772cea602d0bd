"""Tucker by orthogonal iteration: against tensorly, on planted models, continued, at the edges."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from decomposition_cases import F32, F64, random_tensor

import sparsetc as stc
from sparsetc.decomposition import Tucker, initial, tucker

CASES = [((6, 7), (2, 2)), ((8, 9, 10), (3, 2, 4)), ((5, 6, 7, 8), (2, 3, 1, 2)), ((4, 5, 3, 6, 4), (2, 1, 3, 2, 2))]


def orthonormal(shape: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype = F64) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    drawn = [torch.randn(n, r, generator=random, dtype=F64) for n, r in zip(shape, ranks, strict=True)]
    return [torch.linalg.qr(f).Q.to(dtype) for f in drawn]


LONG = [((140, 15, 15, 8), (3, 12, 12, 4)), ((300, 14, 15, 8), (4, 12, 13, 6))]
"""Chains with two long sides, whose Gram matrices are decomposed in part where eigenvalues fall."""


@pytest.mark.parametrize(("shape", "ranks"), [*CASES, *LONG])
def test_every_sweep_fits_as_tensorlys_does(shape: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    pytest.importorskip("tensorly")
    from tensorly.decomposition import tucker as theirs

    x, start = random_tensor(shape), orthonormal(shape, ranks)
    if (shape, ranks) in LONG:
        x = x.with_values(x.values * 0.6 ** x.coords[0].clamp(max=12))
    own = tucker(x, ranks, init=start, n_iter_max=5, tol=0)
    given = (torch.zeros(ranks, dtype=F64).numpy(), [f.numpy() for f in start])
    _, errors = theirs(x.to_dense().numpy(), list(ranks), init=given, n_iter_max=5, tol=0, return_errors=True)
    assert own.fits == pytest.approx([1 - float(e) for e in errors], abs=1e-9)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("init", ["nvecs", "random"])
@pytest.mark.parametrize(("shape", "ranks"), CASES)
def test_a_planted_model_is_found(
    shape: tuple[int, ...], ranks: tuple[int, ...], init: str, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(3)
    planted = Tucker(torch.randn(ranks, generator=random, dtype=F64).to(dtype), tuple(orthonormal(shape, ranks, dtype)))
    x = stc.SparseTensor.from_dense(planted.to_dense())
    found = tucker(x, ranks, init=init, random_state=0)
    tolerance = 1e-3 if dtype == F32 else 1e-7
    assert found.fit == pytest.approx(1, abs=tolerance)
    torch.testing.assert_close(found.to_dense(), planted.to_dense(), rtol=tolerance, atol=tolerance)
    for f in found.factors:
        torch.testing.assert_close(f.T @ f, torch.eye(f.shape[1], dtype=dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limit", [1, 5, 1024])
def test_however_the_vectors_are_found_no_sweep_makes_the_fit_worse(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(initial, "GRAM", limit)
    x = random_tensor((12, 10, 9))
    found = tucker(x, (4, 3, 5), random_state=0, n_iter_max=12, tol=0)
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(found.fits))
    error = float((x.to_dense() - found.to_dense()).norm() / x.to_dense().norm())
    assert found.fit == pytest.approx(1 - error, abs=1e-9)
    assert found.fit == pytest.approx(tucker(x, (4, 3, 5), n_iter_max=60).fits[-1], abs=5e-3)


def test_a_run_continues_as_if_it_had_not_ended() -> None:
    x = random_tensor((8, 9, 10))
    whole = tucker(x, 3, init="random", random_state=5, n_iter_max=7, tol=0)
    part = tucker(x, 3, init="random", random_state=5, n_iter_max=3, tol=0)
    rest = tucker(x, 3, init=part, n_iter_max=4, tol=0)
    assert whole.fits == pytest.approx(part.fits + rest.fits)
    torch.testing.assert_close(whole.core, rest.core)
    for one, other in zip(whole.factors, rest.factors, strict=True):
        torch.testing.assert_close(one, other)


def test_full_ranks_leave_nothing_and_no_sweeps_project() -> None:
    x = random_tensor((3, 4, 5))
    assert tucker(x, x.shape).fit == pytest.approx(1, abs=1e-7)
    start = tucker(x, x.shape, n_iter_max=0)
    assert start.fits == ()
    torch.testing.assert_close(start.to_dense(), x.to_dense())


def test_fixed_modes_stay_as_they_are() -> None:
    x, start = random_tensor((8, 9, 10)), orthonormal((8, 9, 10), (3, 2, 4))
    found = tucker(x, (3, 2, 4), init=start, fixed_modes=[-1], n_iter_max=3)
    assert torch.equal(found.factors[2], start[2])
    projected = torch.einsum("ijk,ir,js,kt->rst", x.to_dense(), *found.factors)
    torch.testing.assert_close(found.core, projected)
    start[2][0] += 1
    with pytest.raises(stc.DecompositionError, match="mode 2 is fixed, so its columns must be orthonormal"):
        tucker(x, (3, 2, 4), init=start, fixed_modes=[2])


@pytest.mark.parametrize("init", ["nvecs", "random"])
def test_zeros_sizes_of_one_and_semi_sparse_tensors(init: str) -> None:
    x = random_tensor((6, 1, 5))
    zero = tucker(x.with_values(torch.zeros_like(x.values)), (2, 1, 2), init=init)
    assert (zero.fit, zero.stopped) == (1.0, "converged")
    assert not zero.to_dense().any()
    empty = stc.SparseTensor(torch.empty(3, 0, dtype=torch.int64), torch.empty(0), (4, 5, 6))
    assert tucker(empty, 2, init=init).fit == 1.0
    expected = tucker(x, (2, 1, 2), init=init, random_state=0, n_iter_max=3).fits
    semi = stc.SparseTensor.from_torch(x.to_dense().to_sparse(2))
    assert tucker(semi, (2, 1, 2), init=init, random_state=0, n_iter_max=3).fits == pytest.approx(expected)


def test_a_callback_sees_copies_and_may_stop() -> None:
    x, seen = random_tensor((6, 5, 4)), []

    def second(model: Tucker, error: float) -> bool:
        seen.append(model)
        assert error == pytest.approx(1 - model.fits[-1])
        return len(seen) == 2

    assert tucker(x, 2, init="random", random_state=0, tol=0, callback=second).stopped == "callback"
    assert not torch.equal(seen[0].factors[0], seen[1].factors[0])


X = random_tensor((4, 5, 6))


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"ranks": 0}, stc.DecompositionError, "the rank of mode 0 must be an integer from 1 on, found 0"),
        ({"ranks": True}, stc.DecompositionError, "found True"),
        ({"ranks": (2, 2.5, 2)}, stc.DecompositionError, "mode 1 must be an integer"),
        ({"ranks": (2, 2)}, stc.DecompositionError, "an integer or 3 of them"),
        ({"ranks": "full"}, stc.DecompositionError, "an integer or 3 of them"),
        ({"ranks": (2, 6, 3)}, stc.DecompositionError, "the rank of mode 1 is 6, above its size 5"),
        ({"ranks": (1, 5, 2)}, stc.DecompositionError, "above the product 2 of the others"),
        ({"init": "svd"}, stc.DecompositionError, "init must be 'random', 'nvecs', a Tucker model"),
        ({"init": 1}, stc.ShapeError, "init must be a Tucker model"),
        ({"init": orthonormal(X.shape, (2, 2, 3))}, stc.ShapeError, r"mode 2 must have shape \(6, 2\)"),
        ({"fixed_modes": [1]}, stc.DecompositionError, "keeps factors of init"),
        ({"n_iter_max": 1.5}, stc.DecompositionError, "n_iter_max must be an integer"),
    ],
)
def test_arguments_are_refused_before_anything_runs(
    arguments: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        tucker(X, **{"ranks": 2, **arguments})


@pytest.mark.parametrize("limit", [1, 1024])
def test_a_plan_that_options_name_is_for_the_chains_alone(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "GRAM", limit)
    with stc.options(plan="coo"):
        found = tucker(X, 2, random_state=0, n_iter_max=2)
    assert found.fit == pytest.approx(tucker(X, 2, random_state=0, n_iter_max=2, plan="coo").fit)
