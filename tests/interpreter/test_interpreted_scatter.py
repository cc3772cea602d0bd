"""The kernels that read entries of new patterns, and add rows, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sparsetc.codegen import BLOCK, ENTRIES, WHOLE, WIDE, launch
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
    terms = table[of.row].double() * weights[:, None]
    expected = torch.zeros(9, width, dtype=torch.float64).index_add(0, to.row, terms)
    found = [(entries._by_kernel(weights, table, to, of), expected)]
    if dtype == torch.float16:
        rows = table[of.row]
        found += [
            (entries._by_kernel(weights, table, None, of), terms),
            (entries._by_kernel(weights, rows, to, None), expected),
        ]
    for one, other in found:
        torch.testing.assert_close(one.double(), other, rtol=error, atol=10 * error)
    launch.launch_by_hand.cache_clear()


@pytest.mark.parametrize("wrong", [None, (0, -1), (1, 6), (2, 1 << 40)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("count", [1, BLOCK + 3])
def test_entries_are_copied_and_their_range_is_checked(
    count: int, dtype: torch.dtype, wrong: tuple[int, int] | None
) -> None:
    g = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(size, (count,), generator=g) for size in (7, 6, 9)])
    if wrong is not None:
        coords[wrong[0], -1] = wrong[1]
    values = torch.randn(count, generator=g).to(dtype)
    outside, own, copy = torch.zeros(1, dtype=torch.int32), torch.empty_like(coords), torch.empty_like(values)
    launch.launch_by_hand("read_entries", (0, 1, 8, 9, 10))([coords, outside, 3, count, 7, 6, 9, 1, values, own, copy])
    assert torch.equal(own, coords)
    assert torch.equal(copy, values)
    assert bool(outside) == (wrong is not None)
