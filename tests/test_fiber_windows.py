"""Windows of fibers, a format outside the package: several modes are listed along one side of a tile."""

from __future__ import annotations

import pytest
import torch
from fiber_window_cases import EQUATIONS, LAYOUTS, check, plan

from sparsetc.testing import check_format, pattern
from sparsetc.testing.conformance import PATTERNS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_every_einsum(equation: str, layout: str) -> None:
    check(equation, layout, torch.float32, "torch")
    check(equation, layout, torch.int64, "torch")


@pytest.mark.parametrize("shape", [(9, 10, 11), (5, 3, 4, 6)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_conformance(name: str, layout: str, shape: tuple[int, ...]) -> None:
    check_format("fiber_windows", pattern(name, shape), shape, plan(layout, len(shape)).parts[0].storage)
