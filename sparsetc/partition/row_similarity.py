"""Dealing by similarity: nonzeros of groups of similar rows that fill their blocks, apart from all others (1-SA).

A row is a slice of one mode; its columns are the coordinates of all other modes together, so a tensor is grouped as its
unfolding. Groups go to dense blocks on the tensor cores, the leftovers to a scalar part.
"""

from __future__ import annotations

import torch

from sparsetc.errors import PlanError
from sparsetc.partition.base import register_partition
from sparsetc.partition.run_length import row_numbers
from sparsetc.partition.similarity import Groups, group_rows
from sparsetc.tensor import coords as crd
from sparsetc.tensor.numbering import histogram, numbered


@register_partition("row_similarity")
def by_row_similarity(
    coords: torch.Tensor,
    shape: tuple[int, ...],
    *,
    mode: int,
    width: int,
    tau: int,
    threshold: int,
    height: int = 1,
) -> list[torch.Tensor | None]:
    """[nonzeros of the groups that are filled to at least `threshold` percent, the others].

    Args:
        coords: (order, nnz).
        shape: sizes of the modes.
        mode: the mode whose slices are rows.
        width: columns of a strip, as `group_rows` has it.
        tau: the similarity in percent, from 1 to 100.
        threshold: percent of nonzeros among what a group would store: its height times its distinct columns.
        height: what the stored heights of groups are multiples of.
    """
    if not 0 <= mode < len(shape):
        raise PlanError(f"row_similarity groups slices of a mode from 0 to {len(shape) - 1}, found mode {mode}")
    if height < 1:
        raise PlanError(f"a group is stored in at least 1 row, found height {height}")
    if coords.shape[1] == 0:
        return [coords.new_zeros(0), coords.new_zeros(0)]
    rows, columns, n_columns = unfolded(coords, shape, mode)
    groups = group_rows(rows, columns, shape[mode], n_columns, width=width, tau=tau / 100)
    group = group_of_nonzeros(groups, rows)
    stored = -(-groups.heights // height) * height * distinct_columns(group, columns, groups.count, n_columns)
    full = (100 * histogram(group, groups.count) >= threshold * stored)[group]
    return [torch.nonzero(full).flatten(), torch.nonzero(~full).flatten()]


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
        columns = row_numbers(coords, shape, tuple(others))
    return coords[mode], columns, int(columns.max()) + 1 if columns.numel() else 1


def group_of_nonzeros(groups: Groups, rows: torch.Tensor) -> torch.Tensor:
    """(nnz,) the number of the group of each nonzero, from its row."""
    ascending, place = torch.sort(groups.order)
    return torch.repeat_interleave(groups.heights)[place[torch.searchsorted(ascending, rows)]]


def distinct_columns(group: torch.Tensor, columns: torch.Tensor, n_groups: int, n_columns: int) -> torch.Tensor:
    """(groups,) different columns of the nonzeros of each group."""
    found = numbered([group, columns], [n_groups, n_columns], group.numel(), group)
    return histogram(found.coords[0], n_groups)
