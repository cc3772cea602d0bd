"""CP by alternating least squares: against pyttb, on planted models, continued, interrupted, at the edges."""

from __future__ import annotations

import signal
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from decomposition_cases import F32, F64, planted, random_factors, random_tensor, similarity, to_pyttb

import sparsetc as stc
from sparsetc.decomposition import CP, cp_als
from sparsetc.decomposition.linear import balancing
from sparsetc.decomposition.loop import convergence_test

SHAPES = [(6, 7), (8, 9, 10), (5, 6, 7, 8), (4, 5, 3, 6, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 3])
def test_every_sweep_fits_as_pyttbs_does(shape: tuple[int, ...], rank: int) -> None:
    pyttb = pytest.importorskip("pyttb")
    x, start = random_tensor(shape), random_factors(shape, rank)
    own = cp_als(x, rank, init=start, n_iter_max=4, tol=0)
    for sweeps in (2, 3, 4):  # pyttb says only the last fit; of a single sweep none
        given = pyttb.ktensor([f.numpy() for f in start])
        _, _, said = pyttb.cp_als(to_pyttb(x), rank, stoptol=0, maxiters=sweeps, init=given, printitn=0)
        assert own.fits[sweeps - 1] == pytest.approx(said["fit"], abs=1e-9)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize("shape", [(9, 8, 7), (6, 5, 7, 4)])
def test_planted_components_are_found(shape: tuple[int, ...], nonnegative: bool, dtype: torch.dtype) -> None:
    x, model = planted(shape, 3, dtype)
    found = max(
        (cp_als(x, 3, nonnegative=nonnegative, random_state=seed, n_iter_max=80) for seed in range(2)),
        key=lambda m: m.fits[-1],
    )
    assert found.dtype == dtype
    assert found.fits[-1] > 0.99
    assert similarity(found, model) > 0.98
    if nonnegative:
        assert all(bool((f >= 0).all()) for f in found.factors)


@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize("l2_reg", [0.0, 0.1])
@pytest.mark.parametrize("rank", [1, 5, 7])
def test_no_sweep_makes_the_fit_worse(rank: int, l2_reg: float, nonnegative: bool) -> None:
    x = random_tensor((12, 10, 9))
    found = cp_als(x, rank, nonnegative=nonnegative, l2_reg=l2_reg, random_state=3, n_iter_max=15, tol=0)
    assert len(found.fits) == 15
    assert found.stopped == "n_iter_max"
    error = (x.to_dense() - found.to_dense()).norm() / x.to_dense().norm()
    assert found.fit == pytest.approx(1 - float(error), abs=1e-9)
    if not l2_reg:
        assert all(later >= earlier - 1e-12 for earlier, later in pairwise(found.fits))


def test_the_penalty_is_what_falls_where_there_is_one() -> None:
    x = random_tensor((12, 10, 9))

    def minimised(model: CP) -> float:
        squares = sum(float(f.square().sum()) for f in model.factors)
        return float((x.to_dense() - model.to_dense()).square().sum()) + 0.5 * squares

    seen: list[float] = []
    cp_als(
        x, 4, l2_reg=0.5, random_state=0, n_iter_max=12, tol=0, normalize_factors=False,
        callback=lambda model, error: seen.append(minimised(model)),
    )  # fmt: skip
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(seen))


@pytest.mark.parametrize("options", [{}, {"normalize_factors": False}, {"nonnegative": True}, {"l2_reg": 0.1}])
def test_a_run_continues_as_if_it_had_not_ended(options: dict[str, Any]) -> None:
    x = random_tensor((8, 9, 10))
    whole = cp_als(x, 4, random_state=5, n_iter_max=9, tol=0, **options)
    part = cp_als(x, 4, random_state=5, n_iter_max=4, tol=0, **options)
    rest = cp_als(x, 4, init=part, n_iter_max=5, tol=0, **options)
    assert whole.fits == pytest.approx(part.fits + rest.fits, abs=1e-12)
    for one, other in zip((whole.weights, *whole.factors), (rest.weights, *rest.factors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"normalize_factors": False}])
@pytest.mark.parametrize("nonnegative", [False, True])
def test_a_run_continues_where_a_component_is_zero(nonnegative: bool, options: dict[str, Any], mode: int) -> None:
    """In one mode, its last in a sweep or another; it comes back from what it is in the others."""
    x, start = random_tensor((6, 5, 4)), random_factors((6, 5, 4), 3)
    start[mode][:, 1] = 0
    whole, begun = (cp_als(x, 3, init=start, n_iter_max=n, tol=0, nonnegative=nonnegative, **options) for n in (3, 0))
    rest = cp_als(x, 3, init=begun, n_iter_max=3, tol=0, nonnegative=nonnegative, **options)
    assert float(whole.factors[mode][:, 1].abs().max()) > 0
    assert whole.fits == pytest.approx(rest.fits, abs=1e-12)
    torch.testing.assert_close(rest.to_dense(), whole.to_dense())


def test_components_that_are_zero_in_a_free_mode_are_not_balanced() -> None:
    norms = torch.tensor([[2.0, 0.0, 4.0], [8.0, 5.0, 9.0], [3.0, 7.0, 0.0]], dtype=F64)
    free = torch.tensor([[True], [True], [False]])
    balanced = norms * balancing(norms, free.double() / 2)
    wanted = torch.tensor([[4.0, 0.0, 6.0], [4.0, 5.0, 6.0], [3.0, 7.0, 0.0]], dtype=F64)
    torch.testing.assert_close(balanced, wanted)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_fit_that_changes_by_rounding_errors_has_settled(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    rounding, more = ([[0.5], [0.5 + change * eps]] for change in (0.5, 2))
    assert convergence_test(1e-30, dtype)(rounding)
    assert not convergence_test(1e-30, dtype)(more)
    assert convergence_test(4 * eps, dtype)(more)
    assert not convergence_test(0, dtype)(rounding)  # never
    assert not convergence_test(1.0, dtype)(rounding[:1])


def test_a_component_that_weighs_nothing_is_nothing() -> None:
    x, factors = random_tensor((6, 5, 4)), random_factors((6, 5, 4), 2)
    found = cp_als(x, 2, init=(torch.tensor([2.0, 0.0], dtype=F64), factors), n_iter_max=0)
    assert found.weights[0] > 0
    assert found.weights[1] == 0


@pytest.mark.parametrize("free", [(0, 1, 2), (0, 2)])
def test_a_component_that_is_zero_in_a_free_mode_is_not_scaled(free: tuple[int, ...]) -> None:
    """What it is in the others would vanish: shared among them, its length is 0."""
    norms = torch.tensor([[8.0, 0.0, 3.0], [2.0, 5.0, 0.0], [0.5, 7.0, 4.0]], dtype=F64)
    is_free = torch.tensor([[mode in free] for mode in range(3)])
    scales = balancing(norms, is_free.double() / len(free))
    assert torch.equal(scales[:, 1], torch.ones(3, dtype=F64))
    balanced = (norms * scales)[list(free)]
    assert torch.equal(scales[~is_free.flatten()], torch.ones(3 - len(free), 3, dtype=F64))
    for component in (0, 2) if 1 not in free else (0,):
        assert balanced[:, component].tolist() == pytest.approx([float(balanced[0, component])] * len(free))
        assert float(scales[list(free), component].prod()) == pytest.approx(1)
    if 1 in free:
        assert torch.equal(scales[:, 2], torch.ones(3, dtype=F64))


@pytest.mark.parametrize("dtype", [F32, F64])
def test_what_is_less_than_rounding_is_no_change(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    for tol, change, ends in [
        *((1e-30, eps / 2, True), (1e-30, 2 * eps, False), (0.0, 0.0, False)),
        *((1e-3, 9e-4, True), (1e-3, -9e-4, True), (1e-3, 2e-3, False)),
    ]:
        assert convergence_test(tol, dtype)([[0.5], [0.5 + change]]) == ends
    assert not convergence_test(1e-3, dtype)([[0.5]])


def test_ctrl_c_ends_a_run_after_its_sweep_and_keeps_the_result() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in a shell's background does not have
    x = random_tensor((8, 9, 10))

    def pressed(model: CP, error: float) -> None:
        if len(model.fits) == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.warns(UserWarning, match="interrupted after 4 iterations"):
        found = cp_als(x, 3, random_state=0, n_iter_max=9, tol=0, callback=pressed)
    assert found.stopped == "interrupted"
    again = cp_als(x, 3, init=found, n_iter_max=5, tol=0)
    whole = cp_als(x, 3, random_state=0, n_iter_max=9, tol=0)
    torch.testing.assert_close(again.factors[1], whole.factors[1])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def pressed_twice(model: CP, error: float) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        cp_als(x, 3, callback=pressed_twice)


def test_a_callback_sees_copies_and_may_stop() -> None:
    x, seen = random_tensor((8, 9, 10)), []

    def third(model: CP, error: float) -> bool:
        seen.append((model, error))
        return len(seen) == 3

    found = cp_als(x, 3, random_state=0, tol=0, callback=third, normalize_factors=False)
    assert found.stopped == "callback"
    assert [len(model.fits) for model, _ in seen] == [1, 2, 3]
    assert [1 - error for _, error in seen] == pytest.approx(found.fits)
    assert not torch.equal(seen[0][0].factors[0], seen[2][0].factors[0])
    torch.testing.assert_close(seen[2][0].factors[0], found.factors[0])


def test_fixed_modes_stay_as_they_are() -> None:
    x = random_tensor((8, 9, 10))
    start = random_factors(x.shape, 3)
    start[1][:, 1] *= 100
    found = cp_als(x, 3, init=start, fixed_modes=[1, -1], n_iter_max=3)
    assert torch.equal(found.factors[1], start[1])
    assert torch.equal(found.factors[2], start[2])
    exact = torch.linalg.lstsq(
        torch.einsum("jr,kr->jkr", start[1], start[2]).flatten(0, 1), x.to_dense().flatten(1).T
    ).solution.T
    torch.testing.assert_close(found.factors[0] * found.weights, exact)
    assert found.fits[0] == pytest.approx(found.fits[-1])


@pytest.mark.parametrize("init", ["random", "nvecs"])
def test_a_seed_is_a_start(init: str) -> None:
    x = random_tensor((8, 9, 4))
    runs = [cp_als(x, 6, init=init, random_state=s, n_iter_max=2) for s in (7, torch.Generator().manual_seed(7), 8)]
    assert torch.equal(runs[0].factors[2], runs[1].factors[2])
    assert not torch.equal(runs[0].factors[2], runs[2].factors[2])


def test_models_of_other_libraries_are_starts() -> None:
    tl = pytest.importorskip("tensorly")
    x, start = random_tensor((8, 9, 10)), random_factors((8, 9, 10), 3)
    expected = cp_als(x, 3, init=start, n_iter_max=3, tol=0).fits
    arrays = [f.numpy() for f in start]
    for given in (
        arrays,
        (None, arrays),
        tl.cp_tensor.CPTensor((None, arrays)),
        CP(torch.ones(3, dtype=F64), tuple(start)),
    ):
        assert cp_als(x, 3, init=given, n_iter_max=3, tol=0).fits == pytest.approx(expected)


def test_nvecs_start_from_the_vectors_of_unfoldings() -> None:
    x = random_tensor((8, 9, 10))
    start = cp_als(x, 3, init="nvecs", n_iter_max=0)
    assert (start.fits, start.stopped) == ((), "n_iter_max")
    for mode, found in enumerate(start.factors):
        vectors = torch.linalg.svd(x.to_dense().movedim(mode, 0).flatten(1)).U[:, :3]
        torch.testing.assert_close((found.T @ vectors).abs(), torch.eye(3, dtype=F64))


@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_rank_above_that_of_the_tensor_harms_nothing(dtype: torch.dtype) -> None:
    x, _ = planted((6, 5, 4), 2, dtype)
    for rank in (5, 40):
        found = cp_als(x, rank, random_state=0, n_iter_max=30)
        assert all(bool(f.isfinite().all()) for f in (found.weights, *found.factors))
        assert found.fits[-1] > 0.99


@pytest.mark.parametrize("init", ["random", "nvecs"])
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_values_of_any_size_and_components_that_come_to_nothing(scale: float, init: str) -> None:
    dense = random_tensor((7, 2), 0.3, F32)
    single = stc.SparseTensor([[0]] * 4, [scale], (4, 1, 5, 1))
    for x in (dense.with_values(dense.values * scale), single):
        for options in ({}, {"mask": torch.ones(x.shape)}, {"nonnegative": True}):
            found = cp_als(x, 8, init=init, random_state=0, n_iter_max=9, tol=0, **options)
            assert all(bool(f.isfinite().all()) for f in (found.weights, *found.factors))
            error = (found.to_dense() - x.to_dense()).norm() / x.to_dense().norm()
            assert float(error) < 5e-3


def test_equal_columns_harm_nothing() -> None:
    x = random_tensor((6, 5, 4))
    start = [f[:, :1].expand(-1, 3).contiguous() for f in random_factors(x.shape, 3)]
    found = cp_als(x, 3, init=start, n_iter_max=10)
    assert found.fits[-1] >= cp_als(x, 1, init=[f[:, :1] for f in start], n_iter_max=10).fits[-1] - 1e-6


@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize("init", ["random", "nvecs"])
def test_a_tensor_of_zeros_has_a_model_of_zeros(init: str, nonnegative: bool) -> None:
    zeros = [stc.SparseTensor(torch.empty(3, 0, dtype=torch.int64), torch.empty(0), (4, 5, 6))]
    zeros.append(random_tensor((4, 5, 6), dtype=F32))
    zeros[1] = zeros[1].with_values(torch.zeros_like(zeros[1].values))
    for x in zeros:
        found = cp_als(x, 2, init=init, nonnegative=nonnegative)
        assert (found.fits, found.stopped) == ((1.0,), "converged")
        assert not found.to_dense().any()
        assert all(bool(f.isfinite().all()) for f in found.factors)


def test_sizes_of_one_and_what_is_not_coalesced() -> None:
    coords = torch.tensor([[0, 0, 0, 0], [2, 1, 2, 0], [0, 0, 0, 0]])
    x = stc.SparseTensor(coords, torch.tensor([1.0, 2.0, 3.0, 4.0]), (1, 3, 1), coalesce=False)
    found = cp_als(x, 1, random_state=0)
    assert found.fit == pytest.approx(1, abs=1e-3)
    torch.testing.assert_close(found.to_dense(), x.to_dense())


def test_every_kind_of_sparse_tensor() -> None:
    x = random_tensor((6, 8, 4))
    wanted = cp_als(x, 3, random_state=0, n_iter_max=3).fits
    semi = stc.SparseTensor.from_torch(x.to_dense().to_sparse(2))
    assert semi.dense_order == 1
    assert cp_als(semi, 3, random_state=0, n_iter_max=3).fits == pytest.approx(wanted)
    assert cp_als(x.to_torch(), 3, random_state=0, n_iter_max=3).fits == pytest.approx(wanted)
    matrix = random_tensor((6, 8)).to_dense()
    wanted = cp_als(stc.SparseTensor.from_dense(matrix), 2, random_state=0, n_iter_max=3).fits
    for form in (matrix.to_sparse_csr(), matrix.to_sparse_bsr((2, 4))):
        assert cp_als(form, 2, random_state=0, n_iter_max=3).fits == pytest.approx(wanted)


def test_what_is_minimised_takes_no_part_in_autograd() -> None:
    x = random_tensor((6, 8, 4))
    leaf = x.with_values(x.values.clone().requires_grad_())
    assert not cp_als(leaf, 2, n_iter_max=2).weights.requires_grad


def test_a_bar_is_drawn_for_who_asks(capsys: pytest.CaptureFixture[str]) -> None:
    cp_als(random_tensor((6, 8, 4)), 2, n_iter_max=3, progress=True)
    assert capsys.readouterr().out == ""


def test_settings_go_to_the_einsums() -> None:
    x = random_tensor((6, 8, 4))
    wanted = cp_als(x, 2, random_state=0, n_iter_max=3).fits
    assert cp_als(x, 2, random_state=0, n_iter_max=3, plan="rows").fits == pytest.approx(wanted)
    with pytest.raises(stc.PlanError):
        cp_als(x, 2, plan="absent")


X = random_tensor((4, 5, 6))
START = random_factors((4, 5, 6), 2)


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"rank": 0}, stc.DecompositionError, "the rank must be an integer from 1 on, found 0"),
        ({"rank": -1}, stc.DecompositionError, "found -1"),
        ({"rank": 2.0}, stc.DecompositionError, "found 2.0"),
        ({"rank": True}, stc.DecompositionError, "found True"),
        ({"n_iter_max": -1}, stc.DecompositionError, "n_iter_max"),
        ({"tol": -1e-3}, stc.DecompositionError, "tol must be a number from 0 on"),
        ({"l2_reg": float("nan")}, stc.DecompositionError, "l2_reg"),
        ({"init": "svd"}, stc.DecompositionError, "init must be 'random', 'nvecs', a CP model"),
        ({"init": 3}, stc.ShapeError, "init must be a CP model"),
        ({"init": START[:2]}, stc.ShapeError, "init must have 3 factors"),
        ({"init": [*START[:2], START[2][:5]]}, stc.ShapeError, r"mode 2 must have shape \(6, 2\), found \(5, 2\)"),
        ({"init": [f.float() for f in START]}, stc.DtypeError, "torch.float32, x has torch.float64"),
        ({"init": [f.to("meta") for f in START]}, stc.DeviceError, "is on meta, x is on cpu"),
        ({"init": [*START[:2], START[2] / 0]}, stc.FormatError, "infinite or NaN"),
        ({"init": [f.tolist() for f in START]}, stc.DecompositionError, "found list"),
        ({"init": (torch.ones(3), START)}, stc.ShapeError, "init's weights must have shape"),
        ({"init": [*START[:2], -START[2]], "nonnegative": True}, stc.DecompositionError, "mode 2 has entries below 0"),
        ({"fixed_modes": [3]}, stc.ShapeError, "fixed_modes: a tensor of 3 modes has no mode 3"),
        ({"fixed_modes": [0]}, stc.DecompositionError, "keeps factors of init, which must give them"),
        ({"fixed_modes": [0, 1, 2], "init": START}, stc.DecompositionError, "every mode"),
        ({"random_state": 2**70}, stc.DecompositionError, "a seed or a torch.Generator"),
        ({"random_state": "seed"}, stc.DecompositionError, "a seed or a torch.Generator"),
        ({"mask": "all"}, stc.DecompositionError, 'mask must be "observed"'),
        ({"mask": torch.ones(4, 5)}, stc.ShapeError, "mask must have x's shape"),
        ({"mask": torch.zeros(4, 5, 6)}, stc.FormatError, "no observed entry"),
    ],
)
def test_arguments_are_refused_before_anything_runs(
    arguments: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        cp_als(X, **{"rank": 2, **arguments})


@pytest.mark.parametrize(
    ("x", "kind", "says"),
    [
        (X.to_dense(), stc.DtypeError, "x must be sparse"),
        (X.to(torch.bfloat16), stc.DtypeError, r"convert it: x.to\(torch.float32\)"),
        (X.to(torch.complex64), stc.DtypeError, "no complex decomposition"),
        (X.to(torch.float16), stc.DtypeError, "float32 or float64"),
        (X.with_values(X.values / 0), stc.FormatError, "infinite or NaN"),
        (X.to(torch.float32).with_values(X.values.float() * 1e30), stc.FormatError, r"add up to inf in .*; scale x"),
        (X.to(torch.float32).with_values(X.values.float() * 1e-30), stc.FormatError, r"add up to 0 in .*; scale x"),
        (X.with_values(X.values * 1e200), stc.FormatError, r"add up to inf in torch.float64; scale x"),
        (stc.SparseTensor([[0, 2]], [1.0, 2.0], (3,)), stc.ShapeError, "needs at least 2"),
        (stc.SparseTensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (3, 0)), stc.ShapeError, "size 0"),
        (X.to("meta"), stc.DeviceError, "meta"),
    ],
)
def test_tensors_are_refused_before_anything_runs(x: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        cp_als(x, 2)


@pytest.mark.parametrize("options", [{}, {"nonnegative": True}, {"mask": "observed", "l2_reg": 0.1}])
def test_autocast_changes_nothing(options: dict[str, Any]) -> None:
    x, start = X.to(F32), random_factors(X.shape, 2, F32)
    plain = cp_als(x, 2, init=start, n_iter_max=3, **options)
    with torch.autocast("cpu", torch.bfloat16):
        found = cp_als(x, 2, init=start, n_iter_max=3, **options)
    torch.testing.assert_close(found.factors, plain.factors)
    assert found.fits == pytest.approx(plain.fits)


@pytest.mark.parametrize("run", [stc.decomposition.cp_apr, stc.decomposition.tucker])
def test_autocast_changes_no_other_decomposition(run: Any) -> None:
    x = X.to(F32)
    plain = run(x, 2, random_state=0, n_iter_max=3)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(x, 2, random_state=0, n_iter_max=3)
    torch.testing.assert_close(found.factors, plain.factors)


@pytest.mark.parametrize("enough", [True, np.bool_(True), torch.tensor(True)], ids=str)
def test_any_true_of_a_callback_ends_a_run(enough: Any) -> None:
    assert len(cp_als(random_tensor((4, 5, 6), 0.3, F64), 2, tol=0, callback=lambda *_: enough).fits) == 1


def test_a_callback_that_is_no_function_is_refused_before_any_sweep() -> None:
    with pytest.raises(stc.DecompositionError, match="callback must be a function of a model and an error, found 3"):
        cp_als(random_tensor((4, 5, 6), 0.3, F64), 2, callback=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [10**6, 10**12])
def test_a_rank_far_too_large_is_refused_by_its_size(rank: int) -> None:
    with pytest.raises(stc.OutOfMemoryError, match=f"cp_als: factors of rank {rank:,}, and their Gram matrices,"):
        cp_als(random_tensor((4, 5, 6), 0.3, F64), rank)
