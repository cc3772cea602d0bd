"""The loop over given blocks that benchmarks compare with, run by Triton's interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import block_loop


@pytest.mark.parametrize(("side", "lines", "stages"), [(16, 5, 3), (32, 18, 5)])
def test_the_loop_multiplies_blocks(side: int, lines: int, stages: int) -> None:
    g = torch.Generator().manual_seed(0)
    there = torch.rand(lines, lines, generator=g) < 0.3
    there[1] = False
    columns = there.nonzero()[:, 1].int()
    row_ptr = torch.cat((torch.zeros(1), there.sum(1).cumsum(0))).int()
    values = torch.randn(len(columns), side, side, generator=g).half()
    b = torch.randn(lines * side, 256, generator=g).half()
    found = block_loop.block_product(row_ptr, columns, values, b, width=128, stages=stages, warps=4)
    dense = torch.zeros(lines, lines, side, side, dtype=torch.float64)
    dense[there] = values.double()
    expected = dense.transpose(1, 2).reshape(lines * side, -1) @ b.double()
    assert (found - expected).norm() < 1e-3 * expected.norm()
