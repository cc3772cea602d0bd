"""Sums of values by the entry they belong to, in a type wide enough, on any device.

In: values and their owners. Out: one sum an owner. Sums of float16 and bfloat16 are kept in float32, of integers in
64 bits. `deterministic` matters on a GPU alone, where `index_add_` adds in whatever order threads finish.
"""

from __future__ import annotations

import torch

from sparsetc.codegen.launch import accumulator as kept_dtype

__all__ = ["add_up", "kept_dtype"]


def add_up(values: torch.Tensor, owner: torch.Tensor, count: int, deterministic: bool = False) -> torch.Tensor:
    """(count, …) the sum of each owner's values. values (n, …); owner (n,) int, not falling."""
    if deterministic and values.is_cuda and values.dtype in (torch.float32, torch.float64):
        lengths = torch.bincount(owner, minlength=count)
        return torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True)
    return values.new_zeros((count, *values.shape[1:])).index_add(0, owner, values)
