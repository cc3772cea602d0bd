"""A tensor as a matrix whose rows are the slices of one mode, and what groups of its rows hold.

In: coordinates, and a mode; then `Groups`. Out: rows and columns; the group of each nonzero, columns of each group.
"""

from __future__ import annotations

import torch

from sparsetc.similarity.groups import Groups
from sparsetc.tensor import coords as crd
from sparsetc.tensor.numbering import histogram, numbered


def unfolded(coords: torch.Tensor, shape: tuple[int, ...], mode: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(rows, columns, how many columns) of the unfolding along a mode, (nnz,) int64 each.

    A column is the linear index of the other modes' coordinates, or its rank among those of nonzeros where the index
    would pass 2**63.
    """
    others = [m for m in range(len(shape)) if m != mode]
    if not others:
        return coords[mode], torch.zeros_like(coords[mode]), 1
    sizes = [shape[m] for m in others]
    columns = crd.linear_key(coords[others], sizes)
    if columns is None:
        columns = numbered(list(coords[others]), sizes, coords.shape[1], coords).rank
    return coords[mode], columns, int(columns.max()) + 1 if columns.numel() else 1


def group_of_nonzeros(groups: Groups, rows: torch.Tensor) -> torch.Tensor:
    """(nnz,) the number of the group of each nonzero, from its row."""
    ascending, place = torch.sort(groups.order)
    return torch.repeat_interleave(groups.heights)[place[torch.searchsorted(ascending, rows)]]


def distinct_columns(group: torch.Tensor, columns: torch.Tensor, n_groups: int, n_columns: int) -> torch.Tensor:
    """(groups,) different columns of the nonzeros of each group."""
    found = numbered([group, columns], [n_groups, n_columns], group.numel(), group)
    return histogram(found.coords[0], n_groups)
