"""A number for the bits of a tensor, by which ranks and records know it again.

In: a tensor. Out: an integer that sees the order of elements.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from sparsetc.tensor.dtypes import WORDS, real_numbers

CHUNK = 1 << 18
"""Words of a chunk, so that a core's cache holds their products: 1.2 ns each on one core of a CPU. On a GPU 16 times as
many, so that launches take less time than products; not measured."""


def bits(x: Tensor) -> int:
    """A number for the bits of a tensor in their order, which other tensors rarely have; waits for a GPU."""
    x = torch.atleast_1d(real_numbers(x))
    weights = _weights(CHUNK << 4 * x.is_cuda, x.device)
    chunk, number = weights.numel(), torch.zeros((), dtype=torch.int64, device=x.device)
    for rows in x.split(max(1, chunk // max(1, x[:1].numel()))):
        # Of one element, or none, `contiguous` leaves any stride.
        flat = rows.contiguous().as_strided((rows.numel(),), (1,))
        for words in flat.view(WORDS[min(4, x.element_size())]).split(chunk):
            number.mul_(3).add_((words * weights[: words.numel()]).sum())
    return int(number)


@lru_cache
def _weights(count: int, device: torch.device) -> Tensor:
    """(count,) random: exchanged words change a sum of products but in one of 2**33 cases."""
    random = torch.Generator("cpu").manual_seed(0)
    return torch.empty(count, dtype=torch.int64, device="cpu").random_(generator=random).to(device)
