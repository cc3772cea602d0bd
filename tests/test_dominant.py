"""Eigenvectors of the largest eigenvalues from a start: they are those of a full decomposition, or are not taken."""

from __future__ import annotations

import pytest
import torch

from sparsetc.decomposition import leading
from sparsetc.decomposition.leading import FULL, last_vectors

F64 = torch.finfo(torch.float64).eps
N, COUNT = FULL + 72, 6


def spectrum(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A symmetric matrix of these eigenvalues, and its eigenvectors."""
    g = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(len(values), len(values), generator=g, dtype=torch.float64)).Q
    matrix = vectors * values @ vectors.T
    return (matrix + matrix.T) / 2, vectors


def falling(rate: float) -> torch.Tensor:
    return rate ** torch.arange(N, dtype=torch.float64)


def found(gram: torch.Tensor, start: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, bool]:
    """What is found, and whether that took a full decomposition."""
    full: list[int] = []
    monkeypatch.setattr(leading, "last_vectors", lambda *a: full.append(1) or last_vectors(*a))
    return leading.dominant(gram, start, F64), bool(full)


def check(one: torch.Tensor, gram: torch.Tensor) -> None:
    """Orthonormal eigenvectors of the largest eigenvalues, in their order."""
    expected = last_vectors(gram, COUNT)
    torch.testing.assert_close(one.T @ one, torch.eye(COUNT, dtype=torch.float64), rtol=0, atol=1e-13)
    torch.testing.assert_close((one * expected).sum(0).abs(), torch.ones(COUNT, dtype=torch.float64))


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8])
def test_vectors_near_a_start_are_found_without_all_others(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gram, vectors = spectrum(falling(rate))
    g = torch.Generator().manual_seed(1)
    start = vectors[:, :COUNT] + 0.01 * torch.randn(N, COUNT, generator=g, dtype=torch.float64)
    one, full = found(gram, start, monkeypatch)
    check(one, gram)
    assert not full


@pytest.mark.parametrize("start", ["others", "zeros", "equal", "some"])
def test_a_start_that_says_nothing_of_them(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other eigenvectors are exact too; what is left of the spectrum tells that they are not the largest."""
    gram, vectors = spectrum(falling(0.5))
    starts = {
        "others": vectors[:, COUNT : 2 * COUNT],
        "zeros": torch.zeros(N, COUNT, dtype=torch.float64),
        "equal": vectors[:, :1].expand(N, COUNT),
        "some": torch.cat((vectors[:, 1:COUNT], vectors[:, COUNT + 1 : COUNT + 2]), 1),
    }
    check(found(gram, starts[start], monkeypatch)[0], gram)


def test_eigenvectors_that_are_not_the_largest_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    gram = torch.diag(falling(0.5).flip(0))  # whose eigenvectors are exact, so that no rounding leads away from them
    one, full = found(gram, torch.eye(N, dtype=torch.float64)[:, -2 - COUNT : -2], monkeypatch)
    check(one, gram)
    assert full


def test_small_eigenvalues_that_rounding_hides_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.zeros(N, dtype=torch.float64)
    values[-7:] = torch.tensor([1e-4, 4e-4, 0.6, 0.7, 0.8, 0.9, 1])
    gram, known = torch.diag(values), [-1, -2, -3, -4, -5, -7]  # the sixth largest is 4e-4, its fourth power 3e-14
    one, full = found(gram, torch.eye(N, dtype=torch.float64)[:, known], monkeypatch)
    check(one, gram)
    assert full


def test_a_spectrum_that_hardly_falls_is_decomposed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    gram, vectors = spectrum(1 + falling(0.9))
    one, full = found(gram, vectors[:, :COUNT], monkeypatch)
    check(one, gram)
    assert full


def test_a_matrix_of_zeros_has_any_vectors() -> None:
    gram = torch.zeros(N, N, dtype=torch.float64)
    one = leading.dominant(gram, gram[:, :COUNT], F64)
    torch.testing.assert_close(one.T @ one, torch.eye(COUNT, dtype=torch.float64))
