"""The Triton source of tile programs over a task list under Triton's interpreter: schedules, storages, padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from tile_pairs import FOLDS, DrawnTiles, drawn_tiles, error, spread_tiles

from sparsetc.backends import TRITON
from sparsetc.codegen.programs import Programs

CPU = torch.device("cpu")


def check(case: DrawnTiles) -> None:
    """Small whole numbers: every type and order of sums is exact."""
    case = replace(case, whole=False)
    found = Programs([case.program], case.dtype, TRITON, CPU, None).blocks(case.arrays())
    assert torch.equal(found.view_as(case.expected()).double(), case.expected())


@pytest.mark.parametrize("index64", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("bitmap", [False, True], ids=["whole", "bitmap"])
@pytest.mark.parametrize("dot", [True, False], ids=["dot", "multiply"])
@pytest.mark.parametrize("name", FOLDS)
def test_schedules_and_storages(name: str, dot: bool, bitmap: bool, index64: bool) -> None:
    check(DrawnTiles(FOLDS[name], dot, bitmap, index64=index64, tiles=(2, 2), pairs=(2, 0, 1)))


@pytest.mark.parametrize("name", FOLDS)
def test_operands_that_differ_in_storage(name: str) -> None:
    check(DrawnTiles(FOLDS[name], True, True, mixed=True, tiles=(2, 2), pairs=(2, 0, 1)))


@pytest.mark.parametrize("index64", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("name", FOLDS)
def test_tiles_in_halves(name: str, index64: bool) -> None:
    check(DrawnTiles(FOLDS[name], dtype=torch.float32, index64=index64, tiles=(2, 3), pairs=(2, 0, 1), halves=True))


@settings(max_examples=30, deadline=None)
@given(spread_tiles())
def test_parts_are_as_exact_as_float32(case: DrawnTiles) -> None:
    found = Programs([case.program], case.dtype, TRITON, CPU, None).blocks(case.arrays())
    assert error(found, case) < 1e-6


@settings(max_examples=30, deadline=None)
@given(drawn_tiles((torch.float64, torch.float32, torch.float16, torch.int32, torch.int64), most=1 << 10))
def test_any_tiles(case: DrawnTiles) -> None:
    check(replace(case, bitmap=case.bitmap and case.dot))  # else bits are gone through one by one, which takes minutes
