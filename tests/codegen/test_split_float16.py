"""Values in halves of 16 bits: that nothing is lost where the verdict says so, and what the verdict is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from split_cases import NO_VALUES, Drawn, drawn, operand, rows_of, value_of

from sparsetc.codegen.launch import ALIGNED
from sparsetc.codegen.split_float16 import TilePositions, room_for, split
from sparsetc.ir.nest.values import EXACT, INEXACT, INFINITE, scale


def verdict(*rows: list[float]) -> int:
    """Of one operand of these rows, beside one of ones."""
    values, places = operand(torch.tensor(rows))
    ones = operand(torch.ones(1, 1))
    first, second = split((values, ones[0]), (places, ones[1])), split((ones[0], values), (ones[1], places))
    found = {int(first.verdict), int(second.verdict)}
    assert len(found) == 1  # whichever operand it is
    return found.pop()


@settings(max_examples=100, deadline=None)
@given(drawn())
def test_parts_are_the_value_to_23_bits(case: Drawn) -> None:
    values, places = case.operand()
    halves = split((values, values), (places, places))
    assert int(halves.verdict) == EXACT
    found = value_of(halves.arrays[0], places)
    assert bool(((found - values.double()).abs() <= values.double().abs() * 2**-23).all())
    assert int(torch.count_nonzero(halves.arrays[0][0])) == int(torch.count_nonzero(values))
    scales = scale(halves.arrays[0][2], into=False).double()
    assert bool((torch.log2(scales) % 1 == 0).all())
    assert bool((values.double().abs() < scales[places.row] * 2**15).all())


def test_whole_numbers_are_exact() -> None:
    values, places = operand(torch.tensor([[1.0, -2047, 4095, 3.0], [2.0**22 - 1, 1.0, -7.0, 2.0**20]]))
    halves = split((values, values), (places, places))
    assert torch.equal(value_of(halves.arrays[1], places), values.double())


def test_places_of_32_bits_are_those_of_64() -> None:
    values, places = Drawn(4, 16, 3, 5, 0.5, 0).operand()
    wide = split((values, values), (places, places))
    narrow = split((values, values), (replace(places, at=places.at.int()), places))
    assert torch.equal(places.row, replace(places, at=places.at.int()).row)
    assert all(torch.equal(a, b) for a, b in zip(wide.arrays[0], narrow.arrays[0], strict=True))


def test_zeros_keep_their_sign_and_ask_for_nothing() -> None:
    values, places = operand(torch.tensor([[0.0, -0.0], [-0.0, 1.0]]))
    (high, low, most), _ = split((values, values), (places, places)).arrays
    assert high[places.at].signbit().tolist() == [False, True, True, False]
    assert not low.any()
    assert most.tolist() == [0, 1]
    assert verdict([0.0, -0.0], [0.0, 1.0]) == EXACT


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, 2.0**-28], EXACT),
        ([-1.0, -(2.0**-28)], EXACT),
        ([1.0, 2.0**-28 * 0.999], INEXACT),
        ([2 - 2**-23, 2.0**-28], INEXACT),
        ([2.0**80, 2.0**60], EXACT),
        ([2.0**80 * 1.001], INEXACT),
        ([2.0**-80], EXACT),
        ([2.0**-80 * 0.999], INEXACT),
        ([1e-40], INEXACT),
        ([1e-40, 1.0], INEXACT),
        ([3e38], INEXACT),
        ([float("inf"), 1.0], INFINITE),
        ([-float("inf"), 0.0], INFINITE),
        ([float("nan"), 1.0], INFINITE),
    ],
)
def test_verdicts(row: list[float], expected: int) -> None:
    padded = [*row, 0.0][:2]
    assert verdict(padded) == expected
    assert verdict([1.0, 3.0], padded) == expected
    assert verdict(padded, [1.0, 1e-30]) == max(expected, INEXACT)


def test_rows_are_of_the_operand_whatever_the_tile() -> None:
    """Two tiles of 2 x 2, side by side or one above another."""
    values, at = torch.tensor([1.0, 2.0**-30]), torch.tensor([0, 4])
    for line, rows, expected in (([0, 0], 1, INEXACT), ([0, 1], 2, EXACT)):
        places = TilePositions(at, torch.tensor(line, dtype=torch.int32), rows, 2, 2)
        halves = split((values, values), (places, places))
        assert int(halves.verdict) == expected
        assert halves.arrays[0][2].numel() == 2 * rows


def test_no_values() -> None:
    halves = split((NO_VALUES[0], NO_VALUES[0]), (NO_VALUES[1], NO_VALUES[1]))
    assert int(halves.verdict) == EXACT
    assert [a.numel() for operand in halves.arrays for a in operand] == [0] * 6


def test_an_operand_without_values() -> None:
    values, places = rows_of(3, 7)
    for own in (0, 1):
        operands = [(values, places), NO_VALUES] if own == 0 else [NO_VALUES, (values, places)]
        halves = split([v for v, _ in operands], [p for _, p in operands])
        assert int(halves.verdict) == EXACT
        torch.testing.assert_close(value_of(halves.arrays[own], places), values.double(), rtol=2**-23, atol=0)
        assert [a.numel() for a in halves.arrays[1 - own]] == [0] * 3


def test_arrays_are_aligned_whatever_their_sizes() -> None:
    """As kernels load many elements of them at once."""
    (_, x), (_, y) = rows_of(3, 1), rows_of(5, 1)
    halves = room_for((x, y), torch.device("cpu"))
    arrays = [*(a for own in halves.arrays for a in own), halves.verdict]
    assert [a.numel() for a in arrays] == [3, 3, 3, 5, 5, 5, 1]
    assert all(a.data_ptr() % ALIGNED == 0 for a in arrays)


@settings(max_examples=50, deadline=None)
@given(drawn(), st.floats(-30, 30))
def test_room_of_other_values_is_as_good_as_new(case: Drawn, size: float) -> None:
    """Larger or smaller ones, or an infinity, at the same places."""
    values, places = case.operand()
    fresh = split((values, values), (places, places))
    for other in (values.flip(0) * 2.0**size, values * float("inf")):
        room = split((other, other), (places, places))
        again = split((values, values), (places, places), room)
        assert again is room
        assert torch.equal(again.verdict, fresh.verdict)
        pairs = zip(again.arrays, fresh.arrays, strict=True)
        assert all(torch.equal(a, b) for own in pairs for a, b in zip(*own, strict=True))
