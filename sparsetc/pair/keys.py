"""Numbers for tuples of coordinates: ranks that never wrap, comparable between two tensors.

In: coordinates (modes, n) and sizes, of any number of modes, none included. Out: int64 numbers whose order is the
lexicographic one. A product of sizes below 2**63 is its own number; beyond it, tuples are ranked by sorting.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from sparsetc import coords as crd


def keys_of(coords: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """As `coords.sort_keys`; of no modes at all, one key that is 0 everywhere."""
    return crd.sort_keys(coords, sizes) if coords.shape[0] else [coords.new_zeros(coords.shape[1])]


def single_key(coords: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
    """One key of every column, or None when the product of sizes passes 2**63."""
    return keys_of(coords, sizes)[0] if prod(sizes) <= crd.INT64_SIZES else None


def ranks(coords: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(rank of every column among the distinct ones, a column of each rank), both int64."""
    if not coords.shape[0]:
        found = coords.new_zeros(coords.shape[1])
        return found, found[:1]
    keys = crd.sort_keys(coords, sizes)
    order = crd.lexsort(keys)
    fresh = crd.starts_of_runs([k[order] for k in keys])
    rank = torch.empty_like(order).scatter_(0, order, torch.cumsum(fresh, 0) - 1)
    return rank, order[fresh]


def joint_keys(left: torch.Tensor, right: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """One key a column of two sets of coordinates; equal, and ordered, across both as the coordinates are."""
    first, second = single_key(left, sizes), single_key(right, sizes)
    if first is not None and second is not None:
        return first, second
    rank, _ = ranks(torch.cat([left, right], dim=1), sizes)
    return rank[: left.shape[1]], rank[left.shape[1] :]
