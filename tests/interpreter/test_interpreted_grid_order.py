"""Dense axes slowest on the grid: the generated Triton source, run by Triton's interpreter."""

from __future__ import annotations

import pytest
from cases import check
from grid_order_cases import CASES, MTTKRP, SPMM, with_slowest
from row_block_cases import LAYOUTS
from row_blocks import blocked


@pytest.mark.parametrize("name", CASES)
def test_every_format(name: str) -> None:
    case = CASES[name]
    kernel = check(case.problem, **case.settings)
    assert ("programs // " in kernel.source) == (name != "of one block")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("equation", [SPMM, MTTKRP])
def test_a_format_from_outside(equation: str, layout: str) -> None:
    problem = CASES["coo" if equation == SPMM else "fiber"].problem
    height, width, strips, item = LAYOUTS[layout]
    order = len(equation.split(",")[0])
    plan = with_slowest(blocked(height, width, strips, item, order, r=16), "r")
    assert "items = programs // 3" in check(problem, plan=plan).source
