"""Executables alone: programs and tensors, into an output that is made, given or added to."""

from __future__ import annotations

import pytest
import torch
from cases import TILED
from executable_cases import CASES, check_accumulation, check_output, check_rows_without_nonzeros, made

import sparsetc as stc


@pytest.mark.parametrize("name", CASES)
def test_an_output_is_made_or_overwritten(name: str) -> None:
    check_output(made(name, "torch"))


def test_rows_that_are_added_to_are_zeroed_alone() -> None:
    m = made("long rows added, others stored", "torch")
    assert m.arrays.zeroed is not None
    assert 0 < m.arrays.zeroed.numel() <= m.executable.shape[0] // 2
    assert m.executable.zeroes
    assert m.executable.stores


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("plan", ["coo", "fiber", "rows", *TILED, "coo+rows"])
def test_rows_without_nonzeros_are_zeroed_alone(plan: str, deterministic: bool) -> None:
    check_rows_without_nonzeros(plan, "torch", deterministic)


@pytest.mark.parametrize("name", CASES)
def test_results_are_added_to_an_output(name: str) -> None:
    check_accumulation(made(name, "torch"))


def test_arrays_are_bound_once() -> None:
    m = made("fiber", "torch")
    m.run()
    first = m.executable._bound
    m.run()
    assert m.executable._bound is first is not None


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("n", [5000, 20_000, 65_536, 65_537])
@pytest.mark.parametrize("equation", ["ij,r->r", "ij,rs->rs", "ij,ir,jr->r"])
def test_chunks_of_one_item_are_added_up(equation: str, n: int, deterministic: bool) -> None:
    x = stc.SparseTensor(torch.stack([torch.arange(n) // 256, torch.arange(n) % 256]), torch.ones(n), (400, 256))
    sizes = {"i": 400, "j": 256, "r": 64, "s": 2}
    dense = [torch.ones([sizes[c] for c in term]) for term in equation.split("->")[0].split(",")[1:]]
    for plan in ("auto", "coo"):
        found = stc.einsum(equation, x, *dense, plan=plan, deterministic=deterministic, backend="torch")
        assert found.unique().tolist() == [n]
