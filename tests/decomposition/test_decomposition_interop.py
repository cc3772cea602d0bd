"""Tensors, tables, counts and models of other libraries, which decompositions take as they are, and their arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from decomposition_cases import F32, F64, random_factors, random_tensor, to_pyttb

import sparsetc as stc
from sparsetc.decomposition import CP, Tucker, cp_als, cp_apr, tucker

SHAPE = (6, 5, 4)
X = random_tensor(SHAPE)


def table(library: str, x: stc.SparseTensor) -> Any:
    """A table of x's nonzeros in no order, one of them in two parts, which are summed."""
    frame = pytest.importorskip(library)
    coords, values = x.coords.flip(1), x.values.flip(0).clone()
    values[0] /= 2
    coords, values = torch.cat((coords, coords[:, :1]), 1), torch.cat((values, values[:1]))
    return frame.DataFrame(dict(zip("ijkv", (*coords.numpy(), values.numpy()), strict=True)))


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_the_last_column_of_a_table_has_the_values(library: str) -> None:
    given = table(library, X)
    for run, rank in ((cp_als, 2), (cp_apr, 2), (tucker, (2, 2, 2))):
        expected, found = (run(x, rank, random_state=0, n_iter_max=3, tol=0) for x in (X, given))
        assert found.fits == pytest.approx(expected.fits)
    expected, found = (cp_als(x, 2, mask="observed", random_state=0, n_iter_max=3) for x in (X, given))
    assert found.fits == pytest.approx(expected.fits)


def test_tables_without_coordinates_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    frame = table("pandas", X)
    with pytest.raises(stc.FormatError, match="column 'v' holds float64; coordinates are integers"):
        cp_als(frame[["i", "v", "j"]], 2)
    named = frame.assign(i=frame["i"].astype(str).astype(object))  # labels are numbered in their order
    assert cp_als(named, 2, random_state=0).fits == cp_als(frame, 2, random_state=0).fits
    with pytest.raises(stc.FormatError, match="one a mode"):
        cp_als(pandas.DataFrame({"v": [1.0, 2.0]}), 2)
    with pytest.raises(stc.ShapeError, match="needs at least 2"):
        cp_als(frame[["i", "v"]], 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_counts_are_taken_as_numbers_of_the_default_dtype(dtype: torch.dtype) -> None:
    counts = X.with_values((9 * X.values).ceil().to(dtype))
    real = counts.to(F32)
    for run, rank in ((cp_als, 2), (cp_apr, 2), (tucker, (2, 2, 2))):
        expected, found = (run(x, rank, random_state=0, n_iter_max=3, tol=0) for x in (real, counts))
        assert found.dtype == F32
        torch.testing.assert_close(found.factors, expected.factors)
    expected, found = (cp_als(x, 2, mask="observed", random_state=0, n_iter_max=3) for x in (real, counts))
    assert found.fits == expected.fits


@pytest.mark.parametrize("dtype", [F32, F64])
def test_tensors_of_pyttb(dtype: torch.dtype) -> None:
    pyttb = pytest.importorskip("pyttb")
    expected = cp_als(X, 2, random_state=0, n_iter_max=3)
    found = cp_als(to_pyttb(X), 2, random_state=0, n_iter_max=3)
    assert found.shape == SHAPE
    assert found.fits == pytest.approx(expected.fits)
    assert cp_als(pyttb.sptensor(shape=SHAPE), 2).stopped == "converged"
    einsum = stc.einsum("ijk,jr->ikr", to_pyttb(X), torch.ones(5, 2, dtype=F64), output="dense")
    torch.testing.assert_close(einsum, torch.einsum("ijk,jr->ikr", X.to_dense(), torch.ones(5, 2, dtype=F64)))


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("library", ["pyttb", "tensorly"])
def test_models_of_other_libraries_are_gone_on_from(library: str, dtype: torch.dtype) -> None:
    """Their numbers are float64, whatever x has."""
    pytest.importorskip(library)
    x = X.to(dtype)
    for run, rank in ((cp_als, 3), (cp_apr, 3), (tucker, (2, 3, 2))):
        begun = run(x, rank, random_state=0, n_iter_max=3, tol=0)
        other = getattr(begun.to(F64), f"to_{library}")()
        expected, found = (run(x, rank, init=init, n_iter_max=3, tol=0) for init in (begun, other))
        assert found.dtype == dtype
        assert found.fits == pytest.approx(expected.fits, abs=1e-6)
        back = getattr(found, f"to_{library}")()
        assert isinstance(back, type(other))


def test_two_arrays_of_a_matrix_are_factors_and_no_model() -> None:
    matrix, start = random_tensor((6, 5)), random_factors((6, 5), 2)
    expected = cp_als(matrix, 2, init=start, n_iter_max=3)
    assert cp_als(matrix, 2, init=[f.numpy() for f in start], n_iter_max=3).fits == expected.fits
    with pytest.raises(stc.DtypeError, match="complex128"):
        cp_als(matrix, 2, init=[f.numpy() * np.complex128(1) for f in start])


@pytest.mark.parametrize(
    ("run", "arguments", "ours"),
    [
        (cp_als, {"maxiters": 5}, "cp_als has no maxiters=; here it is n_iter_max"),
        (cp_als, {"stoptol": 1e-3}, "here it is tol"),
        (cp_als, {"printitn": 0}, "here it is progress=True, or callback"),
        (cp_als, {"verbose": 1}, "here it is progress=True, or callback"),
        (cp_als, {"dimorder": [0, 1]}, "cp_als has no dimorder=; here it is permute\\(\\) of x"),
        (cp_als, {"non_negative": True}, "here it is nonnegative"),
        (cp_als, {"return_errors": True}, "here it is the model's fits"),
        (cp_apr, {"maxinneriters": 5}, "cp_apr has no maxinneriters=; here it is n_inner_max"),
        (cp_apr, {"kappatol": 5}, "here it is kappa_tol"),
        (cp_apr, {"epsDivZero": 5}, "here it is epsilon"),
    ],
)
def test_arguments_of_other_libraries_are_answered_with_ours(run: Any, arguments: dict[str, Any], ours: str) -> None:
    with pytest.raises(stc.KeywordError, match=ours):
        run(X, 2, **arguments)


def test_a_rank_a_mode_is_ranks() -> None:
    with pytest.raises(stc.KeywordError, match="tucker has no rank=; here it is ranks"):
        tucker(X, rank=[2, 2, 2])  # type: ignore[call-arg]
    with pytest.raises(stc.DecompositionError, match=r"the rank must be an integer, found \[2, 2, 2\]"):
        cp_als(X, rank=[2, 2, 2])  # type: ignore[arg-type]
    with pytest.raises(stc.DecompositionError, match="init must be 'random', 'nvecs'"):
        cp_als(X, 2, init="svd")


def test_models_come_out_as_they_went_in() -> None:
    """The same tensor, as every library multiplies it out."""
    pytest.importorskip("pyttb")
    pytest.importorskip("tensorly")
    for model in (cp_als(X, 2, random_state=0, n_iter_max=2), tucker(X, (2, 2, 2), n_iter_max=2)):
        assert isinstance(model, CP | Tucker)
        full = model.to_dense().numpy()
        np.testing.assert_allclose(model.to_pyttb().full().data, full)
        np.testing.assert_allclose(model.to_tensorly().to_tensor(), full)
