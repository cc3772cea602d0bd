"""The kernels that store values in halves under Triton's interpreter, against their twin in torch, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from split_cases import NO_VALUES, Drawn, Operand, drawn, operand, rows_of

from sparsetc.codegen import BLOCK, GROUP
from sparsetc.codegen.split_float16 import computed, largest, launched, room_for, split_by_kernel
from sparsetc.ir.nest.values import EXACT, INEXACT, INFINITE, scaled_halves


def check(x: Operand, y: Operand, expected: int) -> None:
    """Both give the same arrays and the same verdict, with places of 32 bits and of 64."""
    found = []
    values = [x[0], y[0]]
    for run, dtype in ((computed, torch.int64), (launched, torch.int64), (launched, torch.int32)):
        places = [replace(p, at=p.at.to(dtype)) for _, p in (x, y)]
        halves = room_for(places, values[0].device)
        for v, p, own in zip(values, places, halves.arrays, strict=True):
            run(v, p, own, halves.verdict)
        arrays = [*(a for own in halves.arrays for a in own), halves.verdict]
        found.append([a.view(torch.uint8) for a in arrays])
        assert int(halves.verdict) == expected
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@settings(max_examples=30, deadline=None)
@given(drawn(), drawn())
def test_any_values(x: Drawn, y: Drawn) -> None:
    check(x.operand(), y.operand(), EXACT)


def test_more_than_one_program() -> None:
    x, y = Drawn(16, 16, 12, 27, 0.9, 0).operand(), Drawn(16, 16, 5, 27, 1.0, 1).operand()
    assert x[0].numel() > 2 * BLOCK
    assert y[0].numel() > BLOCK
    check(x, y, EXACT)
    check(y, x, EXACT)


@pytest.mark.parametrize("length", [1, 3, GROUP // 2, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 5])
def test_groups_of_one_row_of_two_and_of_more(length: int) -> None:
    """Rows that begin anywhere in a group, sorted and not, some of their values 0."""
    values, places = rows_of(-(-(BLOCK + 100) // length), length)
    order = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(length))
    check((values, places), (values[order], replace(places, at=places.at[order])), EXACT)


def test_rows_of_which_one_has_an_infinity() -> None:
    values, places = rows_of(9, 2 * GROUP - 7)
    values[-1] = -float("inf")
    check((values, places), rows_of(2, 5), INFINITE)
    check(rows_of(2, 5), (values, places), INFINITE)


@pytest.mark.parametrize("count", [0, 1, BLOCK, 2 * BLOCK + 5])
def test_operands_that_have_one_scale(count: int) -> None:
    """In the order of their values, by a largest magnitude that may be another part's."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 2.0**20
    values[::3] *= 2.0**-30
    values[1::3] = 0
    for most in (largest(values), largest(values) * 8):
        found, expected = split_by_kernel(values, most), scaled_halves(values, most)
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, expected, strict=True))


def test_operands_without_values() -> None:
    some = rows_of(3, 40)
    check(some, NO_VALUES, EXACT)
    check(NO_VALUES, some, EXACT)
    check(NO_VALUES, NO_VALUES, EXACT)


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
    given, ones = operand(torch.tensor([[1.0, 2.0, 3.0, 4.0], row])), operand(torch.ones(1, 1))
    check(given, ones, expected)
    check(ones, given, expected)
