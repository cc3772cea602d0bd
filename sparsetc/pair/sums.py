"""Sums of values by the entry they belong to, in a type wide enough, on any device.

In: values and their owners. Out: one sum an owner. Sums of float16 and bfloat16 are kept in float32, of integers in
64 bits. `deterministic` matters on a GPU alone.
"""

from __future__ import annotations

import torch

from sparsetc.codegen.launch import accumulator as kept_dtype
from sparsetc.tensor.sums import add_rows, in_order

__all__ = ["add_up", "kept_dtype"]


def add_up(values: torch.Tensor, owner: torch.Tensor, count: int, deterministic: bool = False) -> torch.Tensor:
    """The sum of each owner's values, (count, …), of values (n, …) and owner (n,) int, not falling."""
    with in_order(deterministic):
        return add_rows(values.new_zeros((count, *values.shape[1:])), owner, values)
