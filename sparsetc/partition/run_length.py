"""Dealing by run length: output rows of many nonzeros apart from rows of few.

A long row fills the lanes of a work item by itself; short rows run side by side, one a lane. No single kernel serves
both (`benchmarks/results/mttkrp_plans.json`): of 11 M nonzeros in rows of about 4, one row an item took 1.5 ms, one row
a lane 0.43.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sparsetc.partition.base import register_partition
from sparsetc.tensor.numbering import linear_key, ranked


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
    row = row_numbers((coords[m] for m in kept), [shape[m] for m in kept])
    return torch.bincount(row)[row]


def row_numbers(coords: Iterable[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """(nnz,) a number for each nonzero's output row: its linear index, or its rank where that would be too large.

    Args:
        coords: (nnz,) int64 for each of at least one mode.
        sizes: of the modes.
    """
    key, spread = linear_key(coords, sizes)
    return key if spread <= 8 * key.numel() + (1 << 20) else ranked(key, spread)[0]
