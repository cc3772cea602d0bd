"""Sums in one order: runs of any lengths, by threads that have few rows each."""

from __future__ import annotations

import pytest
import torch
from cases import SIZES, Problem, explicit_plan

import sparsetc as stc
from sparsetc.runtime.executable import MOST_SUMMED, SecondPass


@pytest.mark.parametrize("rows", [1, 3, 5000])
@pytest.mark.parametrize("partials", [0, 1, MOST_SUMMED, MOST_SUMMED + 1, MOST_SUMMED**2 + 1, 70_000])
def test_sums(partials: int, rows: int) -> None:
    g = torch.Generator().manual_seed(0)
    row = torch.randint(0, rows, (partials,), generator=g)
    partial = torch.rand(partials, 2, 3, dtype=torch.float64, generator=g)
    expected = torch.zeros(rows, 2, 3, dtype=torch.float64).index_add_(0, row, partial)
    second = SecondPass.of(row)
    out = torch.zeros_like(expected)
    second(partial, out)
    torch.testing.assert_close(out, expected)
    second(partial, out, accumulate=True)
    torch.testing.assert_close(out, 2 * expected)


def test_no_thread_has_long_to_go() -> None:
    second = SecondPass.of(torch.zeros(1_000_000, dtype=torch.long))
    assert all(int(lengths.max()) <= MOST_SUMMED for lengths in second.lengths)
    assert [lengths.numel() for lengths in second.lengths] == [15625, 245, 4, 1]


def test_partial_rows_count_as_memory() -> None:
    equation = "ijk,jr,kr->ir"
    operands = Problem(equation, SIZES, "random").operands()
    plan = explicit_plan("coo", "0||12", {"r": 8}, max_item_nnz=1, lanes=4)
    settings = {"plan": plan, "backend": "triton", "deterministic": True}
    needed = 2 * 4 * SIZES["r"] * operands[0].nnz
    assert stc.compile(equation, *operands, memory_limit=needed, **settings).step.arrays.second is not None
    with pytest.raises(stc.OutOfMemoryError, match=f"{operands[0].nnz:,} additions .* {needed:,} bytes"):
        stc.compile(equation, *operands, memory_limit=needed - 1, **settings)
