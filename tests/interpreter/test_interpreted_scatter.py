"""The kernels that add rows of new patterns, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sparsetc.codegen import ENTRIES, WHOLE, WIDE, launch
from sparsetc.contraction import entries
from sparsetc.contraction.entries import EntryRows


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 2e-3)])
@pytest.mark.parametrize("width", [1, WIDE, 2 * WIDE + 3, WHOLE + 5])
@pytest.mark.parametrize("count", [0, 1, ENTRIES, 7 * ENTRIES + 5])
def test_sums_of_weighted_rows(
    count: int, width: int, dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PROGRAMS", 3)
    launch.launch_by_hand.cache_clear()
    g = torch.Generator().manual_seed(0)
    to, of = (EntryRows(row, rows) for row, rows in zip(torch.randint(7, (2, count), generator=g), (9, 7), strict=True))
    weights, table = (
        torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in ((count,), (7, width))
    )
    weights = torch.stack((weights, weights + 1), 1)[:, 0]  # not next to one another, as values may lie
    terms = table[of.row].double() * weights[:, None]
    expected = torch.zeros(9, width, dtype=torch.float64).index_add(0, to.row, terms)
    found = [(entries._by_kernel(weights, table, to, of), expected)]
    if dtype == torch.float16:
        rows = table[of.row]
        monkeypatch.setattr(entries, "SMALL", 0)
        found += [
            (entries._by_kernel(weights, table, to, of), expected),
            (entries._by_kernel(weights, table, None, of), terms),
            (entries._by_kernel(weights, rows, to, None), expected),
        ]
    for one, other in found:
        torch.testing.assert_close(one.double(), other, rtol=error, atol=10 * error)
    launch.launch_by_hand.cache_clear()
