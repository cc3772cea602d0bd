"""Groups of similar rows, by the algorithm 1-SA.

Labini et al., "Blocking Techniques for Sparse Matrix Multiplication on Tensor Accelerators", sections 3.1 and 3.2.

In: the row and the column of every nonzero, the width of a strip of columns, and a similarity τ. Out: `Groups` of rows.
With the strips that its rows touch, each group is a row of dense blocks, as wide as a strip and as high as the group.

Theorem 1 of the paper holds for every group here: of its rows and the strips that any of them touches, each row touches
τ / 2 on average. So the group's density, empty strips removed, is at least τ / (2 width).

A tensor is a matrix whose rows are the slices of one mode, and whose columns are the fibers' coordinates.

Clusters are rows of equal patterns at first, and fewer each round. All steps are whole-array ones, on any device, and
what they give depends on nothing but the patterns. A cluster's *signature* (min-hash) has, for each of some random
orders of the strips, the last strip of the union of its patterns: two clusters agree in a hash as often as their
unions' Jaccard similarity says, and a union's signature is the maximum of its parts'. Clusters are candidates for each
other where they are neighbours in the order of some of their hashes (an LSH forest), so a round compares a few pairs a
cluster, and never all pairs.

Equal patterns are found by a hash, as Ashcraft's compression does, and compared strip by strip before they are taken to
be equal. Patterns are numbered by their hashes, so that what is made of them does not depend on the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from sparsetc.errors import DtypeError, PlanError, ShapeError
from sparsetc.tensor.coords import check_range, in_runs, markable, numbered, sorted_runs

HASHES = 24
"""Hashes of a signature; each takes 24 bits, which float32 holds."""
BANDS = (2, 12)
"""Orders in which clusters are neighbours in a round: the fewest and the most."""
COMPARED = 1 << 19
"""Pairs of neighbours up to which a round takes more orders than the fewest."""


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
    check_range(torch.stack([rows, columns]), (n_rows, n_columns))


def group_of_nonzeros(groups: Groups, rows: Tensor) -> Tensor:
    """(nnz,) the number of the group of each nonzero, from its row."""
    ascending, place = torch.sort(groups.order)
    return torch.repeat_interleave(groups.heights)[place[torch.searchsorted(ascending, rows)]]


# -- clusters of rows with equal patterns ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clusters:
    """Disjoint sets of rows, each with the union of its rows' patterns. All tensors are int64 but the signatures.

    Attributes:
        ptr: (count + 1,) where each cluster's strips begin.
        strips: the strips of each union, ascending; numbered among those that have nonzeros.
        height: (count,) rows of each cluster.
        filled: (count,) strips that the rows of each cluster touch, summed over the rows.
        signature: (count, HASHES) int32 of each union.
        strip_count: strips that have nonzeros.
    """

    ptr: Tensor
    strips: Tensor
    height: Tensor
    filled: Tensor
    signature: Tensor
    strip_count: int

    @property
    def count(self) -> int:
        """The number of clusters."""
        return self.height.numel()

    @property
    def sizes(self) -> Tensor:
        """(count,) strips of each union."""
        return torch.diff(self.ptr)


def clusters_of(
    rows: Tensor, columns: Tensor, n_rows: int, n_columns: int, width: int
) -> tuple[Tensor, Tensor, Clusters]:
    """Put rows that touch the same strips of `width` columns into one cluster.

    Args:
        rows: (nnz,) int64, below `n_rows`.
        columns: (nnz,) int64, below `n_columns`; a nonzero may be given more than once.
        n_rows: rows of the matrix.
        n_columns: columns of the matrix.
        width: columns of a strip; the last strip may have fewer.

    Returns:
        (rows,) the numbers of the rows that have nonzeros, ascending; (rows,) the number of each one's cluster; the
        clusters.
    """
    nnz = rows.numel()
    row = numbered([rows], [n_rows], nnz, rows, ascending=bool((rows[1:] >= rows[:-1]).all()))
    strip = numbered([columns // width], [-(-n_columns // width)], nnz, rows)
    entries = numbered([row.rank, strip.rank], [max(row.count, 1), max(strip.count, 1)], nnz, rows)
    of_row, strips = entries.coords
    ptr = offsets(torch.bincount(of_row, minlength=row.count))
    cluster, first = _equal_rows(of_row, strips, ptr)
    lengths = torch.diff(ptr)[first]
    strips, ptr = strips[spans(ptr[first], lengths)], offsets(lengths)
    height = torch.bincount(cluster, minlength=first.numel())
    signature = _signatures(ptr, strips, strip.count)
    return row.coords[0], cluster, Clusters(ptr, strips, height, height * lengths, signature, strip.count)


def _signatures(ptr: Tensor, strips: Tensor, strip_count: int) -> Tensor:
    """(patterns, HASHES) int32; a few hashes at a time, so that no more than some numbers a strip are held."""
    strip = torch.arange(max(strip_count, 1), device=ptr.device)
    signatures = []
    for first in range(0, HASHES, 4):
        table = torch.stack([mixed(strip, seed) & 0xFFFFFF for seed in range(first, first + 4)], 1).float()
        signatures.append(embedding_bag(strips, table, ptr[:-1], mode="max").int())
    return torch.cat(signatures, 1)


def _equal_rows(of_row: Tensor, strips: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """((rows,) the number of each row's pattern; (patterns,) a row that has each)."""
    hashes = torch.zeros_like(ptr[1:]).index_add_(0, of_row, mixed(strips, 0))
    by_hash, fresh = sorted_runs([hashes])
    run = torch.empty_like(by_hash).scatter_(0, by_hash, torch.cumsum(fresh, 0) - 1)
    first = by_hash[fresh]
    # A row's hash may be that of another pattern: then the row is compressed with none.
    lengths = torch.diff(ptr)
    alike = lengths == lengths[first][run]
    place = torch.arange(strips.numel(), device=ptr.device) - ptr[of_row]
    other = ptr[first][run][of_row] + place
    unlike = strips != strips[other.clamp_(max=max(strips.numel() - 1, 0))]
    alike[of_row[unlike]] = False
    alone = torch.nonzero(~alike).flatten()
    run[alone] = first.numel() + torch.arange(alone.numel(), device=ptr.device)
    return run, torch.cat([first, alone])


def offsets(counts: Tensor) -> Tensor:
    """(n + 1,) where each of n ranges begins that lie one behind the other."""
    return torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])


def spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """The numbers of ranges, one range behind the other."""
    return in_runs(lengths, first=starts)[1]


def mixed(numbers: Tensor, seed: int) -> Tensor:
    """Return pseudo-random int64 numbers, a fixed function of the given ones (splitmix64, which wraps)."""
    x = numbers + _signed((seed + 1) * 0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(word: int) -> int:
    """The int64 with the low 64 bits of a word."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def candidates(clusters: Clusters, least: float, tau: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find for each cluster the one whose signature agrees most with its own, where the two may merge.

    Args:
        clusters: two or more.
        least: pairs of a Jaccard similarity below this are left out.
        tau: the similarity whose bound the two together must keep.
        seed: by which hashes clusters are put in order this time.

    Returns:
        (pairs,) each: a cluster, the one found for it, and the Jaccard similarity of their unions.
    """
    n, hashes = clusters.count, clusters.signature
    agreement = torch.zeros(n, dtype=torch.int64, device=hashes.device)
    nearest = torch.full_like(agreement, -1)
    for band in range(max(BANDS[0], min(BANDS[1], COMPARED // n))):
        picked = [(seed * 7 + band * step + 5 * place) % HASHES for place, step in enumerate((1, 3, 7))]
        first, second, third = (hashes[:, p].long() for p in picked)
        order = torch.sort(first << 39 | second << 15 | third >> 9, stable=True).indices
        left, right = order[:-1], order[1:]
        agreed = (hashes[left] == hashes[right]).sum(1)
        for number, other in ((left, right), (right, left)):  # each cluster is once at most in either
            better = agreed > agreement[number]
            agreement[number] = torch.where(better, agreed, agreement[number])
            nearest[number] = torch.where(better, other, nearest[number])
    number = torch.arange(n, device=hashes.device)
    twice = (nearest[nearest.clamp(min=0)] == number) & (nearest < number)
    left = torch.nonzero((2 * agreement >= least * HASHES) & (nearest >= 0) & ~twice).flatten()
    sizes = clusters.sizes
    right = nearest[left]
    close = torch.minimum(sizes[left], sizes[right]) >= least * torch.maximum(sizes[left], sizes[right])
    return _compared(clusters, left[close], right[close], least, tau)


def _compared(
    clusters: Clusters, left: Tensor, right: Tensor, least: float, tau: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs with a Jaccard similarity of at least `least` whose union keeps the bound `tau`."""
    sizes, span = clusters.sizes, clusters.strip_count
    swap = sizes[left] > sizes[right]
    short, long = torch.where(swap, right, left), torch.where(swap, left, right)
    keys = torch.repeat_interleave(sizes) * span + clusters.strips  # rise
    lengths = sizes[short]
    wanted = long.repeat_interleave(lengths) * span + clusters.strips[spans(clusters.ptr[short], lengths)]
    if markable(clusters.count * span, keys.numel()):
        marks = torch.zeros(clusters.count * span, dtype=torch.bool, device=keys.device).index_fill_(0, keys, True)
        hit = marks[wanted]
    else:
        place = torch.searchsorted(keys, wanted).clamp_(max=keys.numel() - 1)
        hit = keys[place] == wanted
    until = offsets(hit.long())[offsets(lengths)]
    shared = torch.diff(until)
    union = sizes[left] + sizes[right] - shared
    similarity = shared.double() / union.double()
    filled, height = (each[left] + each[right] for each in (clusters.filled, clusters.height))
    kept = (similarity >= least) & keeps_bound(filled, height, union, tau)
    return left[kept], right[kept], similarity[kept]


def keeps_bound(filled: Tensor, height: Tensor, union: Tensor, tau: float) -> Tensor:
    """Return True where groups keep the bound of theorem 1, by filled strips, rows and strips of the union."""
    return filled >= (tau / 2) * (height * union).double()


def stars(clusters: Clusters, left: Tensor, right: Tensor, similarity: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the merges of a round: return roots and their followers from pairs that may merge.

    Each cluster points at the nearest one it is paired with. Where two point at each other, the one of more filled
    strips is a root, and all that point at a root follow it.

    Returns:
        (roots, followers), a follower each; those of a root lie together, nearest first.
    """
    n, edges = clusters.count, left.numel()
    device = left.device
    # Equal similarities are told apart by numbers in no order, else the pointers would make chains.
    number = torch.arange(edges, device=device) * 0x5851F42D & 0x7FFFFFFF  # by an odd one: no two become the same
    rank = (similarity * (1 << 31)).long() << 31 | number
    best = torch.full((n,), -1, dtype=torch.int64, device=device)
    for side in (left, right):
        best.scatter_reduce_(0, side, rank, "amax")
    target = torch.arange(n, device=device)
    for own, other in ((left, right), (right, left)):
        chosen = best[own] == rank
        target[own[chosen]] = other[chosen]
    own = torch.arange(n, device=device)
    mutual = (target[target] == own) & (target != own)
    more, less = clusters.filled, clusters.filled[target]
    root = mutual & ((more > less) | ((more == less) & (own < target)))
    followers = torch.nonzero(root[target] & ~root).flatten()
    followers = followers[torch.sort(best[followers], descending=True, stable=True).indices]
    followers = followers[torch.sort(target[followers], stable=True).indices]
    return target[followers], followers


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
