"""Groups of similar rows (1-SA: Labini et al., "Blocking Techniques for Sparse Matrix Multiplication on Tensor
Accelerators", sections 3.1 and 3.2).

In: the row and the column of every nonzero, the width of a strip of columns, and a similarity τ. Out: `Groups` of rows.
With the strips that its rows touch, each group is a row of dense blocks, as wide as a strip and as high as the group.

Theorem 1 of the paper holds for every group here: of its rows and the strips that any of them touches, each row touches
τ / 2 on average. So the group's density, empty strips removed, is at least τ / (2 width).

A tensor is a matrix whose rows are the slices of one mode, and whose columns are the fibers' coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsetc.errors import DtypeError, PlanError, ShapeError
from sparsetc.similarity.clusters import offsets, quotient
from sparsetc.similarity.merging import merged
from sparsetc.tensor import coords as crd
from sparsetc.tensor.numbering import histogram, numbered


@dataclass(frozen=True)
class Groups:
    """Disjoint groups of the rows that have nonzeros, in the order of their first rows. All tensors are int64."""

    order: torch.Tensor
    """(rows that have nonzeros,) the numbers of the rows, group by group, ascending within a group."""
    ptr: torch.Tensor
    """(groups + 1,) where each group begins in `order`."""

    @property
    def count(self) -> int:
        """How many groups there are."""
        return self.ptr.numel() - 1

    @property
    def heights(self) -> torch.Tensor:
        """(groups,) rows of each."""
        return self.ptr[1:] - self.ptr[:-1]

    def row_group(self, n_rows: int) -> torch.Tensor:
        """(n_rows,) the number of each row's group; -1 of rows without nonzeros."""
        found = torch.full((n_rows,), -1, dtype=torch.int64, device=self.order.device)
        return found.index_copy_(0, self.order, torch.repeat_interleave(self.heights))


def group_rows(
    rows: torch.Tensor, columns: torch.Tensor, n_rows: int, n_columns: int, *, width: int, tau: float
) -> Groups:
    """Group rows that touch about the same strips of columns; for matrices of any size, on any device.

    It takes O(nnz) memory and a few tens of rounds of whole-array steps. The groups depend on the pattern alone: not on
    the order of nonzeros, nor on that of the rows.

    It differs from the paper's algorithm, which takes rows as they come:

    - The most similar merge first, and groups may merge with groups. Whatever joins a group has a Jaccard similarity of
      at least τ to the union of those that joined before.
    - The bound on a union's growth, which only serves to prove Theorem 1, is replaced by what the theorem says: a merge
      is refused if the group's mean row would then touch less than τ / 2 of the union. So rows that touch half of their
      block's strips, of which any two exceed the bound, are grouped too.
    - Pairs are found by min-hash, so some that could merge may be left apart.

    Args:
        rows: (nnz,) int64, below `n_rows`.
        columns: (nnz,) int64, below `n_columns`, on the same device; a nonzero may be given more than once.
        n_rows: rows of the matrix.
        n_columns: columns of the matrix.
        width: columns of a strip, from 1; the last strip may have fewer.
        tau: the similarity, above 0 and at most 1. At 1 only rows that touch the same strips are grouped.

    Raises:
        PlanError: a width or a similarity out of range.
        DtypeError, ShapeError, CoordinateError: rows and columns that are not as above.
    """
    _check(rows, columns, n_rows, n_columns, width, tau)
    patterns = quotient(rows, columns, n_rows, n_columns, width)
    if patterns.rows.numel() == 0:
        return Groups(patterns.rows, patterns.rows.new_zeros(1))
    return _in_order(patterns.rows, merged(patterns, tau)[patterns.pattern])


def check_options(width: int, tau: float) -> None:
    """Raise `PlanError` unless strips can be so wide, and rows so similar."""
    if width < 1:
        raise PlanError(f"a strip has at least 1 column, found width {width}")
    if not 0 < tau <= 1:
        raise PlanError(f"a similarity must be above 0 and at most 1, found tau {tau}")


def _check(rows: torch.Tensor, columns: torch.Tensor, n_rows: int, n_columns: int, width: int, tau: float) -> None:
    check_options(width, tau)
    if rows.ndim != 1 or rows.shape != columns.shape:
        raise ShapeError(
            f"rows and columns must be two vectors of a length, found {tuple(rows.shape)} and {tuple(columns.shape)}"
        )
    if rows.dtype != torch.int64 or columns.dtype != torch.int64:
        raise DtypeError(f"rows and columns must be int64, found {rows.dtype} and {columns.dtype}")
    crd.check_range(torch.stack([rows, columns]), (n_rows, n_columns))


def _in_order(rows: torch.Tensor, group: torch.Tensor) -> Groups:
    """Groups in the order of their first rows, of rows that rise and the number of each one's group."""
    place = torch.arange(rows.numel(), device=rows.device)
    first = torch.full_like(rows, rows.numel()).scatter_reduce_(0, group, place, "amin")
    head, order = torch.sort(first[group], stable=True)
    return Groups(rows[order], offsets(torch.unique_consecutive(head, return_counts=True)[1]))


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
