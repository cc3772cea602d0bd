"""Packing takes bounded memory: scratch of no more than three times the coordinates' own bytes, in every format."""

from __future__ import annotations

import pytest
from peak_memory import packings, peak

CASES = [(order, number) for order in (2, 3, 4) for number, _ in enumerate(packings(order, 100))]
BOUND = 3
"""Times the coordinates' bytes that scratch may take, beside what is packed."""


@pytest.mark.parametrize(("order", "number"), CASES)
def test_scratch_is_bounded_by_the_coordinates(order: int, number: int) -> None:
    name, coords, run = list(packings(order, 40_000))[number]
    most, left, _ = peak(run)
    assert most - left <= BOUND * coords.numel() * coords.element_size(), name
