"""The kernel that copies runs of entries, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sparsetc.tensor import loops
from sparsetc.tensor.indexing import _on_gpu


@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int64], ids=str)
@pytest.mark.parametrize("width", [1, 3, 40])
def test_runs_are_copied_as_by_the_loop(width: int, dtype: torch.dtype, order: int) -> None:
    g = torch.Generator().manual_seed(0)
    times = torch.tensor([3, 0, 300, 1, 128])
    first = times.cumsum(0) - times
    kinds = torch.tensor([4, 1, 0, 2, 2, 3, 1])
    coords = torch.randint(9, (order, int(times.sum())), generator=g)
    values = torch.randint(100, (coords.shape[1] * width,), generator=g).to(dtype)
    count = int(times[kinds].sum())
    pairs = [(torch.zeros(order, count, dtype=torch.int64), torch.zeros(count * width, dtype=dtype)) for _ in "ab"]
    runs = kinds, first, times[kinds].cumsum(0), coords, values
    _on_gpu(*runs, width, *pairs[0])
    loops.runs(*(t.numpy() for t in runs), width, *(t.numpy() for t in pairs[1]))
    for one, other in zip(*pairs, strict=True):
        assert torch.equal(one, other)
