"""Executables of the generated Triton source alone, run by Triton's interpreter, with and without a second pass."""

from __future__ import annotations

import pytest
from executable_cases import (
    ADDED_BY_A_SECOND_PASS,
    CASES,
    check_accumulation,
    check_no_items,
    check_output,
    check_ranges,
    made,
)

KINDS = [(name, False) for name in CASES] + [(name, True) for name in ADDED_BY_A_SECOND_PASS]


@pytest.mark.parametrize(("name", "deterministic"), KINDS, ids=str)
def test_outputs_are_made_overwritten_and_added_to(name: str, deterministic: bool) -> None:
    m = made(name, "triton", deterministic)
    assert (m.arrays.second is not None) == deterministic
    check_output(m)
    check_accumulation(m)
    check_no_items(m)


@pytest.mark.parametrize(("name", "deterministic"), KINDS, ids=str)
def test_ranges_of_items_add_up(name: str, deterministic: bool) -> None:
    check_ranges(made(name, "triton", deterministic), 3)
