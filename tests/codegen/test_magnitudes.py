"""The largest and smallest magnitudes of values: by torch, and what becomes of them."""

from __future__ import annotations

from math import inf, isnan, nan

import pytest
import torch

from sparsetc.codegen import split_float16
from sparsetc.ir.nest.values import EXACT, INEXACT, INFINITE


def read(found: torch.Tensor) -> list[float]:
    """The largest and the smallest magnitude; without one but 0 the latter is NaN."""
    most, below = found
    return torch.stack([most, split_float16.TOP - below]).view(torch.float32).tolist()


@pytest.mark.parametrize(
    ("values", "most", "least"),
    [([], 0, nan), ([0.0, -0.0], 0, nan), ([3.0, -5.0, 0.0], 5, 3), ([2.0**-149, -inf], inf, 2.0**-149)],
)
def test_what_is_found(values: list[float], most: float, least: float) -> None:
    found = read(split_float16.extremes(torch.tensor(values, dtype=torch.float32)))
    assert found == pytest.approx([most, least], abs=0, rel=0, nan_ok=True)


def test_nan_is_the_largest() -> None:
    values = torch.tensor([[1.0, inf], [torch.nan, 0.5]]).T
    most, least = read(split_float16.extremes(values))
    assert isnan(most)
    assert least == 0.5
    assert bool(split_float16.largest(values).isnan())


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([], EXACT),
        ([0.0, -0.0], EXACT),
        ([1.0, -(2.0**-36), 0.0], EXACT),
        ([1.0, 2.0**-36 * 0.999], INEXACT),
        ([2 - 2**-23, 2.0**-36], INEXACT),
        ([2.0**80], EXACT),
        ([2.0**80 * 1.001], INEXACT),
        ([-(2.0**-80)], EXACT),
        ([2.0**-80 * 0.999], INEXACT),
        ([1e-40], INEXACT),
        ([3e38, 1.0], INEXACT),
        ([-inf, 0.0], INFINITE),
        ([nan, 1.0], INFINITE),
    ],
)
def test_verdicts_on_operands_of_one_scale(values: list[float], verdict: int) -> None:
    assert split_float16.verdicts_on([torch.ones(2, 3), torch.tensor(values)]) == [EXACT, verdict]
