"""The kernels that store values in parts under Triton's interpreter, against their twin in torch, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from split_cases import Drawn, drawn, operand

from sparsetc.codegen.split_pairs import EXACT, INEXACT, INFINITE, Places, computed, launched


def check(values: torch.Tensor, places: Places, expected: int) -> None:
    """Both give the same arrays and the same verdict."""
    found = []
    for run in (computed, launched):
        most, verdict = torch.zeros(places.rows, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        found.append([a.view(torch.uint8) for a in (*run(values, places, most, verdict), most, verdict)])
        assert int(verdict) == expected
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@settings(max_examples=30, deadline=None)
@given(drawn())
def test_any_values(case: Drawn) -> None:
    check(*case.operand(), EXACT)


def test_more_than_one_program() -> None:
    check(*Drawn(16, 16, 12, 27, 0.9, 0).operand(), EXACT)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0.0, -0.0, 1.0, -1.0], EXACT),
        ([1.0, 2.0**-28, 0.0, 0.0], EXACT),
        ([1.0, 2.0**-28 * 0.99, 0.0, 0.0], INEXACT),
        ([1e-40, 0.0, 0.0, 0.0], INEXACT),
        ([2.0**81, 0.0, 0.0, 0.0], INEXACT),
        ([float("inf"), 1.0, 0.0, 0.0], INFINITE),
    ],
)
def test_verdicts(row: list[float], expected: int) -> None:
    check(*operand(torch.tensor([[1.0, 2.0, 3.0, 4.0], row])), expected)
