"""Memory for large results: of numpy, as it asks the system for large pages; else of torch."""

from __future__ import annotations

import pytest
import torch

from sparsetc.support.compiled import LARGE, room


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.bool])
@pytest.mark.parametrize("size", [0, 3, LARGE // 2])
def test_room_for_every_type_and_size(dtype: torch.dtype, size: int) -> None:
    made = room(torch.device("cpu"), dtype, 2, size)
    assert (made.shape, made.dtype) == ((2, size), dtype)
    assert made.is_contiguous()
    assert bool((made.fill_(1) == 1).all())
