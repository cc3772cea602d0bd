"""Memory for large results: of numpy, as it asks the system for large pages; else of torch."""

from __future__ import annotations

import pytest
import torch
from torch._C._dynamo import guards

from sparsetc.support.checks import LARGE, room, room_of


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.bool])
@pytest.mark.parametrize("size", [0, 3, LARGE // 2])
def test_room_for_every_type_and_size(dtype: torch.dtype, size: int) -> None:
    made = room(torch.device("cpu"), dtype, 2, size)
    assert (made.shape, made.dtype) == ((2, size), dtype)
    assert made.is_contiguous()
    assert bool((made.fill_(1) == 1).all())


def test_room_on_the_current_gpu_is_made_without_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's allocation of compiled graphs takes plain tuples, and the current device."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)
    turned = torch.empty(5, 3).t()
    made = room_of(turned, torch.device("cuda", 1))()
    assert (made.shape, made.stride(), made.dtype) == (turned.shape, turned.stride(), turned.dtype)
    assert room_of(turned, torch.device("cpu"))().stride() == turned.stride()
