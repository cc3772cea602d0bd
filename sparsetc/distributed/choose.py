"""Which grid a tensor is cut by, and where: boundaries by prefix sums, the grid by what it sends and how it balances.

In: coordinates of the nonzeros that this rank counts, and the modes that may be cut. Out: a `Cut`.
Smith & Karypis 2016 cut each mode so that its ranges have about equally many nonzeros; so does this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product
from math import prod

import torch

from sparsetc.distributed.cut import Cut
from sparsetc.distributed.ranks import Ranks

TRIED = 12
"""Grids of which nonzeros are counted, those first that send the fewest rows."""
EVEN = 1.15
"""An imbalance that is taken for the sake of fewer rows to send. Not measured."""
UNEVEN = 1.5
"""An imbalance above which boxes are cut into pieces too, whose results are summed over ranks. Not measured."""

Grid = tuple[int, ...]


def boundaries(counts: torch.Tensor, ranges: int) -> tuple[int, ...]:
    """(ranges + 1) rows at which a mode is cut so that its ranges have about equally many of the nonzeros.

    Args:
        counts: (size,) int64, nonzeros of each row.
        ranges: how many.
    """
    size = counts.shape[0]
    if ranges == 1:
        return 0, size
    sums = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    total = int(sums[-1])
    if total == 0:
        return tuple(size * k // ranges for k in range(ranges + 1))
    wanted = torch.tensor([total * k // ranges for k in range(1, ranges)], device=counts.device)
    after = torch.searchsorted(sums, wanted).clamp(1, size)  # the first row from which at least so many lie before
    nearer = (wanted - sums[after - 1]) < (sums[after] - wanted)
    return 0, *(after - nearer.long()).tolist(), size


def grids(size: int, shape: Sequence[int], modes: Sequence[int], pieces: bool) -> list[Grid]:
    """All grids of so many ranks that cut these modes alone, those first that send the fewest rows.

    Args:
        size: of the ranks.
        shape: of the tensor.
        modes: those that may be cut; no mode is into more ranges than it has rows.
        pieces: whether boxes may be cut into pieces, in which grids come after the others.
    """
    axes = [*sorted(set(modes)), len(shape)] if pieces else sorted(set(modes))
    most = [max(1, shape[m]) if m < len(shape) else size for m in axes]
    found = []
    for parts in _factorings(size, len(axes)):
        if all(p <= n for p, n in zip(parts, most, strict=True)):
            by_axis = dict(zip(axes, parts, strict=True))
            found.append(tuple(by_axis.get(m, 1) for m in range(len(shape) + 1)))
    return sorted(found, key=lambda grid: (grid[-1], rows_sent(grid, shape), grid))


def rows_sent(grid: Grid, shape: Sequence[int]) -> float:
    """Rows of factor matrices that a rank sends in each direction for all modes, were all ranges of one length."""
    size = prod(grid)
    sharing = [size // g for g in grid[:-1]]
    return sum(n / g * (s - 1) / s for n, g, s in zip(shape, grid[:-1], sharing, strict=True))


def chosen(coords: torch.Tensor, shape: Sequence[int], modes: Sequence[int], ranks: Ranks, scattered: bool) -> Cut:
    """The cut of a tensor; collective where its nonzeros are scattered.

    Args:
        coords: (sparse order, n) those that this rank counts.
        shape: of all modes, dense ones last.
        modes: that may be cut.
        ranks: as many as there will be boxes, or pieces of them.
        scattered: whether each rank counts others; else all count the same.
    """

    def over_ranks(counts: torch.Tensor) -> torch.Tensor:
        return ranks.sum_(counts) if scattered else counts

    counts = {m: over_ranks(torch.bincount(coords[m], minlength=shape[m])) for m in modes}

    def cut(grid: Grid) -> Cut:
        bounds = tuple(boundaries(counts[m], g) if m in counts else (0, shape[m]) for m, g in enumerate(grid[:-1]))
        per_box = torch.bincount(box_of(coords, bounds), minlength=prod(grid[:-1]))
        return cut_of(shape, grid, bounds, over_ranks(per_box).tolist())

    def tried(listed: Iterable[Grid]) -> Iterator[Cut]:
        possible = (grid for grid in listed if ranks.divisible or sum(g > 1 for g in grid) <= 1)
        return (cut(grid) for grid in islice(possible, TRIED))

    plain = _until_even(tried(grids(ranks.size, shape, modes, False)))
    if plain and plain[0].imbalance <= UNEVEN:
        return plain[0]
    pieced = tried(grid for grid in grids(ranks.size, shape, modes, True) if grid[-1] > 1)
    return min([*plain, *pieced], key=lambda c: c.imbalance)


def _until_even(tried: Iterable[Cut]) -> list[Cut]:
    """The first cut that is even enough, or the most even one; empty of no cuts."""
    uneven: list[Cut] = []
    for cut in tried:
        if cut.imbalance <= EVEN:
            return [cut]
        uneven.append(cut)
    return sorted(uneven, key=lambda c: c.imbalance)[:1]


def box_of(coords: torch.Tensor, bounds: Sequence[Sequence[int]]) -> torch.Tensor:
    """(n,) int64 the box that each nonzero lies in, the last mode's ranges fastest."""
    box = torch.zeros(coords.shape[1], dtype=torch.int64, device=coords.device)
    for m, b in enumerate(bounds):
        if len(b) > 2:
            inner = torch.tensor(b[1:-1], device=coords.device)
            box.mul_(len(b) - 1).add_(torch.bucketize(coords[m], inner, right=True))
    return box


def cut_of(shape: Sequence[int], grid: Grid, bounds: tuple[tuple[int, ...], ...], counts: Sequence[int]) -> Cut:
    """The cut by which rank n has the n-th box, or, of boxes in pieces, the n-th piece; pieces are fastest.

    Args:
        shape: sizes of all modes.
        grid: ranges along each mode; last, pieces.
        bounds: where they begin and end.
        counts: nonzeros of each box, the last mode's ranges fastest.
    """
    pieces = grid[-1]
    nnz = [n * (k + 1) // pieces - n * k // pieces for n in counts for k in range(pieces)]
    return Cut(tuple(shape), bounds, tuple(product(*map(range, grid))), tuple(nnz))


def _factorings(n: int, parts: int) -> list[Grid]:
    """All ways to write n as an ordered product of so many factors."""
    if parts <= 1:
        return [(n,) * parts] if parts or n == 1 else []
    return [(d, *rest) for d in range(1, n + 1) if n % d == 0 for rest in _factorings(n // d, parts - 1)]
