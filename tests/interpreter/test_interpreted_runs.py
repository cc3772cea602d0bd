"""The kernels that read entries and copy runs of them, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sparsetc.codegen import launch
from sparsetc.tensor import loops


@pytest.mark.parametrize("order", [1, 3])
def test_runs_are_copied_as_by_the_loop(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PROGRAMS", 2)
    launch.launch_by_hand.cache_clear()
    g = torch.Generator().manual_seed(0)
    times = torch.tensor([3, 0, 300, 1, 128])
    first = times.cumsum(0) - times
    kinds = torch.tensor([4, 1, 0, 2, 2, 3, 1])
    coords = torch.randint(9, (order, int(times.sum())), generator=g)
    count = int(times[kinds].sum())
    pairs = [(torch.zeros(order, count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)) for _ in "ab"]
    runs = kinds, first, times[kinds].cumsum(0), coords
    sizes = len(kinds), *coords.shape, count
    launch.launch_by_hand("copy_runs")([*runs, *sizes, *pairs[0]])
    loops.runs(*(t.numpy() for t in (*runs, *pairs[1])))
    for one, other in zip(*pairs, strict=True):
        assert torch.equal(one, other)
    launch.launch_by_hand.cache_clear()


@pytest.mark.parametrize("wrong", [None, (0, -1), (1, 6), (2, 1 << 40)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("count", [1, 300])
def test_entries_are_copied_and_their_range_is_checked(
    count: int, dtype: torch.dtype, wrong: tuple[int, int] | None
) -> None:
    g = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(size, (count,), generator=g) for size in (7, 6, 9)])
    if wrong is not None:
        coords[wrong[0], -1] = wrong[1]
    values = torch.randn(count, generator=g).to(dtype)
    outside, own, copy = torch.zeros(1, dtype=torch.int32), torch.empty_like(coords), torch.empty_like(values)
    read = launch.launch_by_hand("read_entries")
    read([coords, outside, 3, count, 7, 6, 9, 1, values, own, copy])
    assert torch.equal(own, coords)
    assert torch.equal(copy, values)
    assert bool(outside) == (wrong is not None)
