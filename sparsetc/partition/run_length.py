"""Dealing by run length: output rows of many nonzeros apart from rows of few.

A long row fills the lanes of a work item by itself; short rows run side by side, one a lane. No single kernel serves
both (`benchmarks/results/mttkrp_plans.json`): of 11 M nonzeros in rows of about 4, one row an item took 1.5 ms, one row
a lane 0.43.
"""

from __future__ import annotations

from math import prod

import torch

from sparsetc.partition.base import register_partition
from sparsetc.tensor import coords as crd


@register_partition("run_length", whole_rows=True)
def by_run_length(
    coords: torch.Tensor, shape: tuple[int, ...], kept: tuple[int, ...], *, threshold: int
) -> list[torch.Tensor | None]:
    """[nonzeros of rows with at least `threshold` of them, the others]. A row shares the kept modes' coordinates."""
    lengths = row_lengths(coords, shape, kept)
    long = lengths >= threshold
    return [torch.nonzero(long).flatten(), torch.nonzero(~long).flatten()]


def row_lengths(coords: torch.Tensor, shape: tuple[int, ...], kept: tuple[int, ...]) -> torch.Tensor:
    """(nnz,) for every nonzero, how many share its output row."""
    nnz = coords.shape[1]
    if not kept or nnz == 0:
        return torch.full((nnz,), nnz, device=coords.device)
    row = row_numbers(coords, shape, kept)
    return torch.bincount(row)[row]


def row_numbers(coords: torch.Tensor, shape: tuple[int, ...], kept: tuple[int, ...]) -> torch.Tensor:
    """(nnz,) a number for each nonzero's output row: its linear index, or its rank where that would be too large."""
    sizes = [shape[m] for m in kept]
    keys = crd.sort_keys(coords[list(kept)], sizes)
    if len(keys) == 1 and prod(sizes) <= 8 * coords.shape[1] + (1 << 20):
        return keys[0]
    order, fresh = crd.sorted_runs(keys)
    rank = torch.cumsum(fresh, 0) - 1
    return torch.empty_like(rank).scatter_(0, order, rank)
