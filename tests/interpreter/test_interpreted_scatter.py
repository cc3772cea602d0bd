"""The kernel that adds rows of new patterns, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sparsetc.codegen import ENTRIES, WIDE
from sparsetc.codegen.launch import FUSED, launch_of
from sparsetc.codegen.scatter_kernels import add_rows


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("width", [1, WIDE, 2 * WIDE + 3])
@pytest.mark.parametrize("count", [1, ENTRIES, 7 * ENTRIES + 5])
def test_sums_of_weighted_rows(count: int, width: int, programs: int) -> None:
    g = torch.Generator().manual_seed(0)
    row, column = torch.randint(7, (2, count), generator=g)
    weights = torch.randn(count, generator=g, dtype=torch.float64)
    table = torch.randn(7, width, generator=g, dtype=torch.float64)
    out = torch.zeros(7, width, dtype=torch.float64)
    launch = launch_of(add_rows, programs, (0, 1, 2, 3, 6), {"num_warps": 4, **FUSED})
    launch([row, column, weights, table, count, width, out])
    expected = torch.zeros_like(out).index_add(0, row, table[column] * weights[:, None])
    torch.testing.assert_close(out, expected)
