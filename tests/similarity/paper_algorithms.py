"""Algorithms as their papers have them, loops that cannot be cut: what the package's own are compared with.

In: small tensors. Out: the paper's groups of rows (1-SA, algorithm 2), and the paper's partition (MM-CSF, algorithm 5).
"""

from __future__ import annotations

import torch

from sparsetc.similarity import groups
from sparsetc.similarity.groups import Groups, offsets


def group_rows_by_definition(
    rows: torch.Tensor, columns: torch.Tensor, n_rows: int, n_columns: int, *, width: int, tau: float
) -> Groups:
    """Algorithm 2 of the paper with the merge condition of section 3.2, row by row: for small matrices.

    The first row without a group opens one. Each later row without a group joins if its Jaccard similarity to the
    union of the group is at least τ and the union stays within 1 / (1 - τ / 2) times the first row's strips. Rows that
    touch the same strips are taken as one. Arguments and errors are those of `group_rows`.
    """
    groups._check(rows, columns, n_rows, n_columns, width, tau)
    touched: dict[int, set[int]] = {}
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        touched.setdefault(row, set()).add(column // width)
    alike: dict[frozenset[int], list[int]] = {}
    for row in sorted(touched):
        alike.setdefault(frozenset(touched[row]), []).append(row)
    left, found = list(alike), []
    while left:
        first, *later = left
        members, union, left = list(alike[first]), set(first), []
        for pattern in later:
            together = union | pattern
            if len(union & pattern) >= tau * len(together) and len(together) * (1 - tau / 2) <= len(first):
                members, union = members + alike[pattern], together
            else:
                left.append(pattern)
        found.append(sorted(members))
    heights = torch.tensor([len(group) for group in found], dtype=torch.int64)
    order = torch.tensor([row for group in found for row in group], dtype=torch.int64)
    return Groups(order.to(rows.device), offsets(heights).to(rows.device))


def one_by_one(coords: torch.Tensor, shape: tuple[int, ...]) -> list[int]:
    """The mode that each nonzero goes to, by the paper's algorithm 5: a loop over the nonzeros, for small tensors.

    Args:
        coords: (order, nnz), in the order in which nonzeros are dealt.
        shape: sizes of the modes.

    Returns:
        A mode for each nonzero: that along which its fiber has most nonzeros, without those that went elsewhere; of
        equally long ones that of the longest fibers on average, then the lowest.
    """
    modes = range(len(shape))
    lengths: list[dict[tuple[int, ...], int]] = [{} for _ in modes]
    nonzeros = [tuple(c) for c in coords.T.tolist()]
    for c in nonzeros:
        for m in modes:
            fiber = c[:m] + c[m + 1 :]
            lengths[m][fiber] = lengths[m].get(fiber, 0) + 1
    order = sorted(modes, key=lambda m: (len(lengths[m]), m))
    found = []
    for c in nonzeros:
        own = max(order, key=lambda m: lengths[m][c[:m] + c[m + 1 :]])  # the first of equals
        for m in modes:
            if m != own:
                lengths[m][c[:m] + c[m + 1 :]] -= 1
        found.append(own)
    return found
