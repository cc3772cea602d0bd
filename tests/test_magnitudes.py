"""The largest and smallest magnitudes of values: by torch, and what becomes of them."""

from __future__ import annotations

from math import inf, isnan

import pytest
import torch

from sparsetc.codegen import split_float16


@pytest.mark.parametrize(
    ("values", "most", "least"),
    [([], 0, inf), ([0.0, -0.0], 0, inf), ([3.0, -5.0, 0.0], 5, 3), ([2.0**-149, -inf], inf, 2.0**-149)],
)
def test_what_is_found(values: list[float], most: float, least: float) -> None:
    found = split_float16.extremes(torch.tensor(values, dtype=torch.float32))
    assert split_float16.read_extremes([found]) == [[most, least]]


def test_nan_is_the_largest() -> None:
    values = torch.tensor([[1.0, inf], [torch.nan, 0.5]]).T
    ((most, least),) = split_float16.read_extremes([split_float16.extremes(values)])
    assert isnan(most)
    assert least == 0.5
    assert bool(split_float16.largest(values).isnan())


def test_nothing_is_read_of_no_tables() -> None:
    assert split_float16.read_extremes([]) == []
