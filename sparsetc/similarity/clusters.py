"""Clusters of patterns, and one round of merging those that resemble each other.

In: patterns of strips, as a `Quotient` has them. Out: clusters, fewer each round. All steps are whole-array ones, on
any device, and what they give depends on nothing but the patterns. A cluster's *signature* (min-hash) has, for each of
some random orders of the strips, the last strip of the union of its patterns: two clusters agree in a hash as often as
their unions' Jaccard similarity says, and a union's signature is the maximum of its parts'. Clusters are candidates
for each other where they are neighbours in the order of some of their hashes (an LSH forest), so a round compares a few
pairs a cluster, and never all pairs.

A `Quotient` of a matrix says which strips of columns each row touches, with equal rows compressed (1-SA, section 3.1):
distinct patterns, each of as many rows as share it. Rows of equal patterns are found by a hash, as Ashcraft's
compression does, and compared strip by strip before they are taken to be equal. Patterns are numbered by their hashes,
so that what is made of them does not depend on the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding_bag

from sparsetc.tensor import coords as crd
from sparsetc.tensor.numbering import markable, numbered


@dataclass(frozen=True)
class Quotient:
    """Distinct patterns of strips, and the rows that have them. All tensors are int64."""

    rows: torch.Tensor
    """(rows,) the numbers of the rows that have nonzeros, ascending."""
    pattern: torch.Tensor
    """(rows,) the number of each row's pattern."""
    ptr: torch.Tensor
    """(patterns + 1,) where each pattern's strips begin."""
    strips: torch.Tensor
    """The strips of each pattern, ascending; numbered among those that have nonzeros."""
    strip_count: int
    """Strips that have nonzeros."""

    @property
    def count(self) -> int:
        """Distinct patterns."""
        return self.ptr.numel() - 1


def quotient(rows: torch.Tensor, columns: torch.Tensor, n_rows: int, n_columns: int, width: int) -> Quotient:
    """The patterns of rows over strips of `width` columns.

    Args:
        rows: (nnz,) int64, below `n_rows`.
        columns: (nnz,) int64, below `n_columns`; a nonzero may be given more than once.
        n_rows: rows of the matrix.
        n_columns: columns of the matrix.
        width: columns of a strip; the last strip may have fewer.
    """
    nnz = rows.numel()
    row = numbered([rows], [n_rows], nnz, rows, ascending=bool((rows[1:] >= rows[:-1]).all()))
    strip = numbered([columns // width], [-(-n_columns // width)], nnz, rows)
    entries = numbered([row.rank, strip.rank], [max(row.count, 1), max(strip.count, 1)], nnz, rows)
    of_row, strips = entries.coords
    ptr = offsets(torch.bincount(of_row, minlength=row.count))
    pattern, first = _equal_rows(of_row, strips, ptr)
    lengths = (ptr[1:] - ptr[:-1])[first]
    return Quotient(row.coords[0], pattern, offsets(lengths), strips[spans(ptr[first], lengths)], strip.count)


def _equal_rows(of_row: torch.Tensor, strips: torch.Tensor, ptr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """((rows,) the number of each row's pattern; (patterns,) a row that has each)."""
    hashes = torch.zeros_like(ptr[1:]).index_add_(0, of_row, mixed(strips, 0))
    by_hash, fresh = crd.sorted_runs([hashes])
    run = torch.empty_like(by_hash).scatter_(0, by_hash, torch.cumsum(fresh, 0) - 1)
    first = by_hash[fresh]
    # A row's hash may be that of another pattern: then the row is compressed with none.
    lengths = ptr[1:] - ptr[:-1]
    alike = lengths == lengths[first][run]
    place = torch.arange(strips.numel(), device=ptr.device) - ptr[of_row]
    other = ptr[first][run][of_row] + place
    unlike = strips != strips[other.clamp_(max=max(strips.numel() - 1, 0))]
    alike[of_row[unlike]] = False
    alone = torch.nonzero(~alike).flatten()
    run[alone] = first.numel() + torch.arange(alone.numel(), device=ptr.device)
    return run, torch.cat([first, alone])


# -- arithmetic on ranges and hashes ----------------------------------------------------------------------------------


def offsets(counts: torch.Tensor) -> torch.Tensor:
    """(n + 1,) where each of n ranges begins that lie one behind the other."""
    return torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])


def spans(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The numbers of ranges, one range behind the other."""
    owner = torch.repeat_interleave(lengths)
    place = torch.arange(owner.numel(), device=starts.device)
    return place + (starts - offsets(lengths)[:-1])[owner]


def mixed(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """int64 numbers that look random and depend on nothing but the given ones (splitmix64, which wraps)."""
    x = numbers + _signed((seed + 1) * 0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(word: int) -> int:
    """The int64 with the low 64 bits of a word."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


HASHES = 24
"""Hashes of a signature; each takes 24 bits, which float32 holds."""
BANDS = (2, 12)
"""Orders in which clusters are neighbours in a round: the fewest and the most."""
COMPARED = 1 << 19
"""Pairs of neighbours up to which a round takes more orders than the fewest."""


@dataclass(frozen=True)
class Clusters:
    """Disjoint sets of rows, each with the union of its rows' patterns. All tensors are int64 but the signatures."""

    ptr: torch.Tensor
    """(count + 1,) where each cluster's strips begin."""
    strips: torch.Tensor
    """The strips of each union, ascending."""
    height: torch.Tensor
    """(count,) rows of each cluster."""
    filled: torch.Tensor
    """(count,) strips that the rows of each cluster touch, summed over the rows."""
    signature: torch.Tensor
    """(count, HASHES) int32 of each union."""
    strip_count: int

    @property
    def count(self) -> int:
        """How many there are."""
        return self.height.numel()

    @property
    def sizes(self) -> torch.Tensor:
        """(count,) strips of each union."""
        return self.ptr[1:] - self.ptr[:-1]


def clusters_of(patterns: Quotient) -> Clusters:
    """A cluster a pattern, of the rows that have it."""
    height = torch.bincount(patterns.pattern, minlength=patterns.count)
    filled = height * (patterns.ptr[1:] - patterns.ptr[:-1])
    return Clusters(patterns.ptr, patterns.strips, height, filled, _signatures(patterns), patterns.strip_count)


def _signatures(patterns: Quotient) -> torch.Tensor:
    """(patterns, HASHES) int32; a few hashes at a time, so that no more than some numbers a strip are held."""
    strip = torch.arange(max(patterns.strip_count, 1), device=patterns.ptr.device)
    found = []
    for first in range(0, HASHES, 4):
        table = torch.stack([mixed(strip, seed) & 0xFFFFFF for seed in range(first, first + 4)], 1).float()
        found.append(embedding_bag(patterns.strips, table, patterns.ptr[:-1], mode="max").int())
    return torch.cat(found, 1)


@dataclass(frozen=True)
class Pairs:
    """Pairs of clusters, their unions' strips and Jaccard similarity."""

    left: torch.Tensor
    right: torch.Tensor
    union: torch.Tensor
    similarity: torch.Tensor

    def only(self, kept: torch.Tensor) -> Pairs:
        """The pairs where a mask is set."""
        return Pairs(self.left[kept], self.right[kept], self.union[kept], self.similarity[kept])


def candidates(clusters: Clusters, least: float, seed: int) -> Pairs:
    """For each cluster the candidate whose signature agrees most with its own, compared exactly.

    Args:
        clusters: two or more.
        least: pairs of a Jaccard similarity below this are left out.
        seed: by which hashes clusters are put in order this time.
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
        for own, other in ((left, right), (right, left)):  # each cluster is once at most in either
            better = agreed > agreement[own]
            agreement[own] = torch.where(better, agreed, agreement[own])
            nearest[own] = torch.where(better, other, nearest[own])
    own = torch.arange(n, device=hashes.device)
    twice = (nearest[nearest.clamp(min=0)] == own) & (nearest < own)
    left = torch.nonzero((2 * agreement >= least * HASHES) & (nearest >= 0) & ~twice).flatten()
    sizes = clusters.sizes
    right = nearest[left]
    close = torch.minimum(sizes[left], sizes[right]) >= least * torch.maximum(sizes[left], sizes[right])
    return _compared(clusters, left[close], right[close], least)


def _compared(clusters: Clusters, left: torch.Tensor, right: torch.Tensor, least: float) -> Pairs:
    """The pairs whose unions have a Jaccard similarity of at least `least`."""
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
    shared = until[1:] - until[:-1]
    union = sizes[left] + sizes[right] - shared
    similarity = shared.double() / union.double()
    return Pairs(left, right, union, similarity).only(similarity >= least)


def stars(pairs: Pairs, clusters: Clusters) -> tuple[torch.Tensor, torch.Tensor]:
    """Which clusters are to join which, from pairs that may merge.

    Each cluster points at the nearest one it is paired with. Where two point at each other, the one of more filled
    strips is a root, and all that point at a root follow it.

    Returns:
        (roots, followers), a follower each; those of a root lie together, nearest first.
    """
    n, edges = clusters.count, pairs.left.numel()
    device = pairs.left.device
    # Equal similarities are told apart by numbers in no order, else the pointers would make chains.
    number = torch.arange(edges, device=device) * 0x5851F42D & 0x7FFFFFFF  # by an odd one: no two become the same
    rank = (pairs.similarity * (1 << 31)).long() << 31 | number
    best = torch.full((n,), -1, dtype=torch.int64, device=device)
    for side in (pairs.left, pairs.right):
        best.scatter_reduce_(0, side, rank, "amax")
    target = torch.arange(n, device=device)
    for own, other in ((pairs.left, pairs.right), (pairs.right, pairs.left)):
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
