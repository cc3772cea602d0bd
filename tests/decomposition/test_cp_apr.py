"""CP of counts by multiplicative updates: against pyttb, on planted models, continued, at the edges."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from decomposition_cases import F32, F64, random_factors, random_tensor, similarity, to_pyttb

import sparsetc as stc
from sparsetc.decomposition import CP, cp_apr


def counts(shape: tuple[int, ...], dtype: torch.dtype = F64, scale: float = 3.0) -> tuple[stc.SparseTensor, CP]:
    """Poisson variables of a planted model, and that model."""
    random = torch.Generator().manual_seed(0)
    factors = [torch.rand(n, 3, generator=random, dtype=F64) ** 3 for n in shape]
    model = CP(torch.full((3,), scale ** len(shape), dtype=F64), tuple(factors))
    drawn = torch.poisson(model.to_dense(), generator=random).to(dtype)
    return stc.SparseTensor.from_dense(drawn), model.to(dtype)


@pytest.mark.parametrize("shape", [(6, 7), (8, 9, 10), (5, 6, 7, 4), (4, 3, 4, 3, 4)])
def test_every_iteration_is_as_likely_as_pyttbs(shape: tuple[int, ...]) -> None:
    pyttb = pytest.importorskip("pyttb")
    x, _ = counts(shape, scale=2)
    start = random_factors(shape, 3)
    own = cp_apr(x, 3, init=start, n_iter_max=5, tol=1e-4, kappa=0)
    for iterations in (1, 3, 5):
        # Without a kappa: pyttb nudges every entry near 0, where the paper nudges those at which the likelihood rises.
        given = pyttb.ktensor([f.numpy() for f in start])
        _, _, said = pyttb.cp_apr(
            to_pyttb(x), 3, stoptol=1e-4, maxiters=iterations, init=given, printitn=0, kappa=0
        )  # fmt: skip
        assert own.log_likelihoods[iterations - 1] == pytest.approx(said["obj"], rel=1e-9)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_planted_model_is_found(dtype: torch.dtype) -> None:
    x, model = counts((12, 11, 10), dtype, scale=5)
    runs = [cp_apr(x, 3, random_state=seed, n_iter_max=25) for seed in range(2)]
    found = max(runs, key=lambda m: m.log_likelihoods[-1])
    assert similarity(found, model) > 0.98
    full = found.to_dense().double()
    likelihood = torch.xlogy(x.to_dense().double(), full).sum() - full.sum()
    assert found.log_likelihoods[-1] == pytest.approx(float(likelihood), rel=1e-5)
    assert found.fit == pytest.approx(1 - float((x.to_dense() - full).norm() / x.to_dense().norm()), abs=1e-5)
    for f in found.factors:
        assert bool((f >= 0).all())
        torch.testing.assert_close(f.sum(0), torch.ones(3, dtype=dtype))
    assert float(found.weights.sum()) == pytest.approx(float(x.values.sum()), rel=1e-5)


def test_the_likelihood_rises_and_a_run_ends_where_it_is_greatest() -> None:
    x, _ = counts((6, 5, 4))
    found = cp_apr(x, 1, random_state=0)
    assert found.stopped == "converged"
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(found.log_likelihoods))
    dense = x.to_dense()  # at rank 1 the greatest likelihood is known: the product of the marginals
    margins = [dense.sum([m for m in range(3) if m != mode]) for mode in range(3)]
    for f, margin in zip(found.factors, margins, strict=True):
        torch.testing.assert_close(f[:, 0], margin / margin.sum(), rtol=1e-4, atol=1e-6)


def test_an_entry_that_came_to_zero_and_should_not_have_is_set_free() -> None:
    x, _ = counts((6, 5, 4))
    start = [f + 0.1 for f in random_factors(x.shape, 2)]
    start[0][2] = 0
    assert not cp_apr(x, 2, init=start, n_iter_max=30, kappa=0).factors[0][2].any()
    freed = cp_apr(x, 2, init=start, n_iter_max=30)
    assert freed.factors[0][2].any()
    assert freed.log_likelihoods[-1] > cp_apr(x, 2, init=start, n_iter_max=30, kappa=0).log_likelihoods[-1]


def test_a_run_continues_as_if_it_had_not_ended() -> None:
    x, _ = counts((8, 9, 10))
    whole = cp_apr(x, 3, random_state=5, n_iter_max=7, tol=0)
    part = cp_apr(x, 3, random_state=5, n_iter_max=3, tol=0)
    rest = cp_apr(x, 3, init=part, n_iter_max=4, tol=0)
    assert whole.log_likelihoods == pytest.approx(part.log_likelihoods + rest.log_likelihoods)
    torch.testing.assert_close(whole.weights, rest.weights)
    for one, other in zip(whole.factors, rest.factors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_zeros_and_what_is_not_single_nonzeros() -> None:
    x = random_tensor((4, 5, 6))
    found = cp_apr(x.with_values(torch.zeros_like(x.values)), 2)
    assert found.stopped == "converged"
    assert (found.fit, found.log_likelihoods[-1]) == (1.0, 0.0)
    assert not found.to_dense().any()
    semi = stc.SparseTensor.from_torch(x.to_dense().to_sparse(2))
    expected = cp_apr(x, 2, random_state=0, n_iter_max=2).log_likelihoods
    assert cp_apr(semi, 2, random_state=0, n_iter_max=2).log_likelihoods == pytest.approx(expected)


def test_a_callback_sees_copies_and_may_stop() -> None:
    x, _ = counts((6, 5, 4))
    seen: list[CP] = []

    def second(model: CP, error: float) -> bool:
        seen.append(model)
        assert error == pytest.approx(1 - model.fits[-1])
        return len(seen) == 2

    found = cp_apr(x, 2, random_state=0, callback=second)
    assert found.stopped == "callback"
    assert [len(m.log_likelihoods) for m in seen] == [1, 2]
    assert not torch.equal(seen[0].factors[0], seen[1].factors[0])


def test_what_is_refused() -> None:
    x, _ = counts((6, 5, 4))
    with pytest.raises(stc.FormatError, match="below 0"):
        cp_apr(x.with_values(-x.values), 2)
    with pytest.raises(stc.DecompositionError, match="init must be 'random', a CP model"):
        cp_apr(x, 2, init="nvecs")
    with pytest.raises(stc.DecompositionError, match="mode 0 has entries below 0"):
        cp_apr(x, 2, init=[-f for f in random_factors(x.shape, 2)])
    with pytest.raises(stc.DecompositionError, match="n_inner_max must be an integer from 1 on"):
        cp_apr(x, 2, n_inner_max=0)
    with pytest.raises(stc.DecompositionError, match="kappa must be a number from 0 on"):
        cp_apr(x, 2, kappa=-1)
    with pytest.raises(stc.DtypeError, match="float32 or float64"):
        cp_apr(x.to(torch.bfloat16), 2)
