"""The kernel that finds magnitudes under Triton's interpreter, against its twin in torch."""

from __future__ import annotations

import pytest
import torch

from sparsetc.codegen import split_float16


@pytest.mark.parametrize("count", [1, 5, split_float16.LOOKED, 3 * split_float16.LOOKED + 7])
@pytest.mark.parametrize("special", [None, 0.0, torch.inf, torch.nan])
def test_as_torch_finds_them(count: int, special: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_float16, "LOOKS", 2)  # so that a program has several blocks
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    if special is not None:
        values[count // 2] = special
    found = torch.zeros(2, dtype=torch.int32)
    split_float16.find_by_kernel(values, found)
    assert torch.equal(found, split_float16.extremes(values))
