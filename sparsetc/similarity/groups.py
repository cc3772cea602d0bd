"""Groups of similar rows, by the algorithm 1-SA.

Labini et al., "Blocking Techniques for Sparse Matrix Multiplication on Tensor Accelerators", sections 3.1 and 3.2.

In: the row and the column of every nonzero, the width of a strip of columns, and a similarity τ. Out: `Groups` of rows.
With the strips that its rows touch, each group is a row of dense blocks, as wide as a strip and as high as the group.

Theorem 1 of the paper holds for every group here: of its rows and the strips that any of them touches, each row touches
τ / 2 on average. So the group's density, empty strips removed, is at least τ / (2 width).

A tensor is a matrix whose rows are the slices of one mode, and whose columns are the fibers' coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsetc.errors import DtypeError, PlanError, ShapeError
from sparsetc.similarity.clusters import Clusters, candidates, clusters_of, keeps_bound, offsets, spans, stars
from sparsetc.tensor import coords as crd


@dataclass(frozen=True)
class Groups:
    """Disjoint groups of the rows that have nonzeros, in the order of their first rows. All tensors are int64.

    Attributes:
        order: (rows that have nonzeros,) the numbers of the rows, group by group, ascending within a group.
        ptr: (groups + 1,) where each group begins in `order`.
    """

    order: Tensor
    ptr: Tensor

    @property
    def count(self) -> int:
        """The number of groups."""
        return self.ptr.numel() - 1

    @property
    def heights(self) -> Tensor:
        """(groups,) rows of each."""
        return torch.diff(self.ptr)


def group_rows(rows: Tensor, columns: Tensor, n_rows: int, n_columns: int, *, width: int, tau: float) -> Groups:
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
    numbers, cluster, clusters = clusters_of(rows, columns, n_rows, n_columns, width)
    if numbers.numel() == 0:
        return Groups(numbers, numbers.new_zeros(1))
    group, place = merged(clusters, tau)[cluster], torch.arange(numbers.numel(), device=numbers.device)
    first = torch.full_like(numbers, numbers.numel()).scatter_reduce_(0, group, place, "amin")  # of each group's rows
    head, order = torch.sort(first[group], stable=True)
    return Groups(numbers[order], offsets(torch.unique_consecutive(head, return_counts=True)[1]))


def check_options(width: int, tau: float) -> None:
    """Raise `PlanError` unless strips can be so wide, and rows so similar."""
    if width < 1:
        raise PlanError(f"a strip has at least 1 column, found width {width}")
    if not 0 < tau <= 1:
        raise PlanError(f"a similarity must be above 0 and at most 1, found tau {tau}")


def _check(rows: Tensor, columns: Tensor, n_rows: int, n_columns: int, width: int, tau: float) -> None:
    check_options(width, tau)
    if rows.ndim != 1 or rows.shape != columns.shape:
        raise ShapeError(
            f"rows and columns must be two vectors of a length, found {tuple(rows.shape)} and {tuple(columns.shape)}"
        )
    if rows.dtype != torch.int64 or columns.dtype != torch.int64:
        raise DtypeError(f"rows and columns must be int64, found {rows.dtype} and {columns.dtype}")
    crd.check_range(torch.stack([rows, columns]), (n_rows, n_columns))


def group_of_nonzeros(groups: Groups, rows: Tensor) -> Tensor:
    """(nnz,) the number of the group of each nonzero, from its row."""
    ascending, place = torch.sort(groups.order)
    return torch.repeat_interleave(groups.heights)[place[torch.searchsorted(ascending, rows)]]


# -- clusters merged, round by round ----------------------------------------------------------------------------------
# A round finds pairs of clusters (`candidates`), has clusters join their nearest (`stars`), and checks of each that
# joins what the sequential algorithm checks of a row, against the union as it is when its turn comes. The similarity
# asked for goes down from round to round, so that the nearest merge first, until it is τ.
FIRST, STEP = 0.8, 0.7
"""The similarity asked for at first, and the factor to the next one. Steps of 0.8, and a fourth round of each, take 1.5
times as long, for the same heights and densities (R-MAT graphs and scrambled blocks, `benchmarks/blocking.py`)."""
ROUNDS, LAST_ROUNDS = 3, 16
"""Most rounds of a similarity, and of τ itself."""
WORTHWHILE = 0.02
"""Share of the clusters that a round must merge for another one of the same similarity."""


def merged(clusters: Clusters, tau: float) -> Tensor:
    """(count,) int64: the number of each cluster's group."""
    owner = torch.arange(clusters.count, device=clusters.ptr.device)
    seed = 0
    for least in _similarities(tau):
        idle = 0
        for _ in range(LAST_ROUNDS if least == tau else ROUNDS):
            if clusters.count < 2:
                return owner
            before = clusters.count
            roots, followers = stars(clusters, *candidates(clusters, least, tau, seed))
            clusters, target = _joined(clusters, *_accepted(clusters, roots, followers, least, tau))
            owner, seed = target[owner], seed + 1
            idle = idle + 1 if before - clusters.count <= WORTHWHILE * before else 0
            if idle > (least == tau):
                break
    return owner


def _similarities(tau: float) -> list[float]:
    """Return the similarities required round by round, falling to τ."""
    similarities = [tau]
    least = FIRST
    while least > tau / STEP**0.5:
        similarities.insert(-1, least)
        least *= STEP
    return similarities


def _accepted(
    clusters: Clusters, roots: Tensor, followers: Tensor, least: float, tau: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the followers to join each star, in order, up to the first that differs too much by then.

    Returns:
        (members,) the clusters of each star, its root first, and (members,) the number of each one's star; (stars,) how
        many strips each union has, and these strips, ascending within a star.
    """
    first, star = torch.unique_consecutive(roots, return_inverse=True)
    device, count = roots.device, first.numel()
    starts = torch.searchsorted(star, torch.arange(count, device=device))
    members = roots.new_empty(count + followers.numel())
    head = starts + torch.arange(count, device=device)
    members[head] = first
    members[torch.arange(followers.numel(), device=device) + star + 1] = followers
    star = torch.zeros_like(members).index_fill_(0, head, 1).cumsum(0) - 1
    sizes = clusters.sizes[members]

    entry = torch.repeat_interleave(sizes)  # the member of each strip
    keys = star[entry] * clusters.strip_count + clusters.strips[spans(clusters.ptr[members], sizes)]
    keys, order = torch.sort(keys, stable=True)
    fresh = torch.ones_like(keys, dtype=torch.bool)
    fresh[1:] = keys[1:] != keys[:-1]
    brought_by, keys = entry[order[fresh]], keys[fresh]

    union = _running(torch.bincount(brought_by, minlength=members.numel()), head, star)
    filled = _running(clusters.filled[members], head, star)
    height = _running(clusters.height[members], head, star)
    before = torch.cat([union[:1], union[:-1]])
    similar = (before + sizes - union).double() >= least * union.double()
    similar[head] = True
    fails = torch.nonzero(~(similar & keeps_bound(filled, height, union, tau))).flatten()
    end = torch.full((count,), members.numel(), device=device).scatter_reduce_(0, star[fails], fails, "amin")
    joins = torch.arange(members.numel(), device=device) < end[star]
    kept = joins[brought_by]
    sizes = torch.bincount(star[brought_by[kept]], minlength=count)
    return members[joins], star[joins], sizes, keys[kept] % clusters.strip_count


def _running(counts: Tensor, head: Tensor, star: Tensor) -> Tensor:
    """Sums of each star's counts up to each member."""
    until = torch.cumsum(counts, 0)
    return until - (until[head] - counts[head])[star]


def _joined(
    clusters: Clusters, members: Tensor, star: Tensor, union: Tensor, union_strips: Tensor
) -> tuple[Clusters, Tensor]:
    """(the clusters with each star as one; (count,) the new number of each old cluster)."""
    n = clusters.count
    device = clusters.ptr.device
    count = union.numel()
    head = torch.searchsorted(star, torch.arange(count, device=device))
    roots = members[head]
    into = torch.arange(n, device=device).index_copy_(0, members, roots[star])
    stays = into == torch.arange(n, device=device)
    number = torch.cumsum(stays, 0) - 1
    target = number[into]

    sizes = clusters.sizes.index_copy(0, roots, union)
    ptr = offsets(sizes[stays])
    alone = torch.nonzero(stays.index_fill(0, roots, False)).flatten()
    strips = union_strips.new_empty(int(ptr[-1]))
    strips[spans(ptr[number[roots]], union)] = union_strips
    strips[spans(ptr[:-1][number[alone]], sizes[alone])] = clusters.strips[
        spans(clusters.ptr[:-1][alone], sizes[alone])
    ]

    index = star[:, None].expand(-1, clusters.signature.shape[1])
    signature = clusters.signature[roots]
    signature.scatter_reduce_(0, index, clusters.signature[members], "amax")
    return (
        replace(
            clusters,
            ptr=ptr,
            strips=strips,
            height=torch.zeros_like(ptr[1:]).index_add_(0, target, clusters.height),
            filled=torch.zeros_like(ptr[1:]).index_add_(0, target, clusters.filled),
            signature=clusters.signature.index_copy(0, roots, signature)[stays],
        ),
        target,
    )
