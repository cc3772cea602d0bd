"""Clusters that resemble each other merged, round by round, as long as the density is guaranteed (1-SA, section 3.2).

In: patterns, as a `Quotient` has them, and the similarity τ. Out: the group of each pattern. A round finds pairs of
clusters (`clusters.candidates`), has clusters join their nearest (`clusters.stars`), and checks of each that joins what
the sequential algorithm checks of a row, against the union as it is when its turn comes. The similarity asked for goes
down from round to round, so that the nearest merge first, until it is τ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sparsetc.similarity.clusters import Clusters, Pairs, Quotient, candidates, clusters_of, offsets, spans, stars

FIRST, STEP = 0.8, 0.7
"""The similarity asked for at first, and the factor to the next one. Steps of 0.8, and a fourth round of each, take 1.5
times as long, for the same heights and densities (R-MAT graphs and scrambled blocks, `benchmarks/blocking.py`)."""
ROUNDS, LAST_ROUNDS = 3, 16
"""Most rounds of a similarity, and of τ itself."""
WORTHWHILE = 0.02
"""Share of the clusters that a round must merge for another one of the same similarity."""


def merged(patterns: Quotient, tau: float) -> torch.Tensor:
    """(patterns,) int64: the number of each pattern's group."""
    clusters = clusters_of(patterns)
    owner = torch.arange(patterns.count, device=patterns.ptr.device)
    seed = 0
    for least in _similarities(tau):
        idle = 0
        for _ in range(LAST_ROUNDS if least == tau else ROUNDS):
            if clusters.count < 2:
                return owner
            before = clusters.count
            clusters, target = _round(clusters, least, tau, seed)
            owner, seed = target[owner], seed + 1
            idle = idle + 1 if before - clusters.count <= WORTHWHILE * before else 0
            if idle > (least == tau):
                break
    return owner


def _similarities(tau: float) -> list[float]:
    """What is asked for, falling to τ."""
    found = [tau]
    least = FIRST
    while least > tau / STEP**0.5:
        found.insert(-1, least)
        least *= STEP
    return found


def _round(clusters: Clusters, least: float, tau: float, seed: int) -> tuple[Clusters, torch.Tensor]:
    """(the clusters after a round; (count,) the new number of each old one)."""
    pairs = candidates(clusters, least, seed)
    pairs = pairs.only(_dense(clusters, pairs, tau))
    roots, followers = stars(pairs, clusters)
    return _joined(clusters, _accepted(clusters, roots, followers, least, tau))


def _dense(clusters: Clusters, pairs: Pairs, tau: float) -> torch.Tensor:
    """(pairs,) whether the two together keep the bound."""
    filled = clusters.filled[pairs.left] + clusters.filled[pairs.right]
    return keeps_bound(filled, clusters.height[pairs.left] + clusters.height[pairs.right], pairs.union, tau)


def keeps_bound(filled: torch.Tensor, height: torch.Tensor, union: torch.Tensor, tau: float) -> torch.Tensor:
    """Theorem 1, of groups by the strips their rows touch, their rows, and the strips of their union."""
    return filled >= (tau / 2) * (height * union).double()


@dataclass(frozen=True)
class Stars:
    """Clusters that join a root, and the unions they make. Each star's members lie together, the root first."""

    members: torch.Tensor
    """(members,) clusters; of those that were to follow a root, the ones that do."""
    star: torch.Tensor
    """(members,) the number of each one's star."""
    sizes: torch.Tensor
    """(stars,) strips of each union."""
    strips: torch.Tensor
    """The strips of each union, ascending within a star."""


def _accepted(clusters: Clusters, roots: torch.Tensor, followers: torch.Tensor, least: float, tau: float) -> Stars:
    """The followers that join, in turn, up to the first of a star that is too different by then."""
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
    return Stars(members[joins], star[joins], sizes, keys[kept] % clusters.strip_count)


def _running(counts: torch.Tensor, head: torch.Tensor, star: torch.Tensor) -> torch.Tensor:
    """Sums of each star's counts up to each member."""
    until = torch.cumsum(counts, 0)
    return until - (until[head] - counts[head])[star]


def _joined(clusters: Clusters, found: Stars) -> tuple[Clusters, torch.Tensor]:
    """(the clusters with each star as one; (count,) the new number of each old cluster)."""
    n, device, count = clusters.count, clusters.ptr.device, found.sizes.numel()
    head = torch.searchsorted(found.star, torch.arange(count, device=device))
    roots = found.members[head]
    into = torch.arange(n, device=device).index_copy_(0, found.members, roots[found.star])
    stays = into == torch.arange(n, device=device)
    number = torch.cumsum(stays, 0) - 1
    target = number[into]

    sizes = clusters.sizes.index_copy(0, roots, found.sizes)
    ptr = offsets(sizes[stays])
    alone = torch.nonzero(stays.index_fill(0, roots, False)).flatten()
    strips = found.strips.new_empty(int(ptr[-1]))
    strips[spans(ptr[number[roots]], found.sizes)] = found.strips
    strips[spans(ptr[:-1][number[alone]], sizes[alone])] = clusters.strips[
        spans(clusters.ptr[:-1][alone], sizes[alone])
    ]

    index = found.star[:, None].expand(-1, clusters.signature.shape[1])
    signature = clusters.signature[roots]
    signature.scatter_reduce_(0, index, clusters.signature[found.members], "amax")
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
