"""Clusters of rows by the strips of columns that they touch, and one round of merging similar ones.

In: the row and the column of every nonzero. Out: clusters, fewer each round. All steps are whole-array ones, on any
device, and what they give depends on nothing but the patterns. A cluster's *signature* (min-hash) has, for each of
some random orders of the strips, the last strip of the union of its patterns: two clusters agree in a hash as often as
their unions' Jaccard similarity says, and a union's signature is the maximum of its parts'. Clusters are candidates
for each other where they are neighbours in the order of some of their hashes (an LSH forest), so a round compares a few
pairs a cluster, and never all pairs.

At first, rows of equal patterns are a cluster each (1-SA, section 3.1). They are found by a hash, as Ashcraft's
compression does, and compared strip by strip before they are taken to be equal. Patterns are numbered by their hashes,
so that what is made of them does not depend on the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from sparsetc.tensor.coords import in_runs, markable, numbered, sorted_runs

HASHES = 24
"""Hashes of a signature; each takes 24 bits, which float32 holds."""
BANDS = (2, 12)
"""Orders in which clusters are neighbours in a round: the fewest and the most."""
COMPARED = 1 << 19
"""Pairs of neighbours up to which a round takes more orders than the fewest."""


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


# -- arithmetic on ranges and hashes ----------------------------------------------------------------------------------


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
