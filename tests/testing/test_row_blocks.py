"""Row blocks, a format outside the package: right in every einsum, and under the conformance suite."""

from __future__ import annotations

import pytest
import torch
from row_block_cases import EQUATIONS, LAYOUTS, blocked, check, plan

import sparsetc as stc
from sparsetc.testing import check_format, pattern
from sparsetc.testing.patterns import PATTERNS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_every_einsum(equation: str, layout: str) -> None:
    check(equation, layout, torch.float32, "torch")
    check(equation, layout, torch.int64, "torch")


@pytest.mark.parametrize("shape", [(30, 40), (16, 16), (7, 100), (9, 10, 11), (5, 3, 4, 6)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_conformance(name: str, layout: str, shape: tuple[int, ...]) -> None:
    storage = plan(layout, len(shape)).parts[0].storage
    check_format("row_blocks", pattern(name, shape), shape, storage)


@pytest.mark.parametrize(
    "wrong", [(0, 4, False), (4, 0, False), (4, 4, False, 2), (4, 4, False, -1), (4, 4, True, 0, 1)]
)
def test_sides_and_modes_that_row_blocks_cannot_have(wrong: tuple[int, ...]) -> None:
    with pytest.raises(stc.PlanError, match="row blocks have sides of 1 or more and an item mode of two modes or more"):
        blocked(*wrong)


def test_lists_are_in_the_text_that_people_read() -> None:
    x = stc.SparseTensor.from_dense((torch.rand(20, 30, generator=torch.Generator().manual_seed(0)) < 0.1).float())
    source = stc.compile("ij,jr->ir", x, torch.ones(30, 16), plan=plan("windows", 2, "r"), backend="triton").source
    assert "at_i = tl.load(rows + (item * 16 + side_i))" in source
    assert "at_j = tl.load(columns + (tile * 16 + side_j))" in source
    assert "i = rows[" in source
