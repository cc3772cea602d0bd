"""The cut of a sparse tensor over ranks, a grid of boxes as plain frozen data, and the choice of the grid.

In: coordinates of the nonzeros that this rank counts, and the modes that may be cut. Out: a `Cut`: ranges of rows, and
ranks that share them; boundaries by prefix sums, the grid by what it sends and how it balances. The medium-grained
decomposition of Smith & Karypis 2016 is a cut of all modes, each into ranges of about equally many nonzeros; that of
SpTV one of all but the contracted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod

import torch
from torch import Tensor

from sparsetc.distributed.ranks import Ranks
from sparsetc.support import Ints

Range = tuple[int, int]
"""Rows from the first to below the second."""
Box = tuple[Range, ...]
"""A range of each mode."""
LISTED = 16
"""Ranks that are printed a line each; of more, only the fewest and the most nonzeros are said."""
TRIED = 12
"""Grids to count nonzeros for: those that send the fewest rows."""
LEVEL = 1.01
"""The largest imbalance accepted for ranges of equally many rows: these are the ranges of a DTensor, so that a result's
rows are neither sent nor copied. Not measured."""
EVEN = 1.15
"""An imbalance that is taken for the sake of fewer rows to send. Not measured."""
UNEVEN = 1.5
"""The least imbalance for dividing boxes into parts, with results that are summed over ranks. Not measured."""

Grid = Ints


@dataclass(frozen=True)
class Cut:
    """A partition of a tensor's nonzeros into boxes of coordinates, one for each rank, or several ranks for one box.

    Attributes:
        shape: sizes of all modes.
        bounds: for each mode where its ranges begin, and its size at last; (0, size) of a mode that is not cut.
        coordinates: of each rank in the grid: the number of its range along every mode and, last, of its part of the
            box's nonzeros.
        nnz: nonzeros of each rank.
    """

    shape: Ints
    bounds: tuple[Ints, ...]
    coordinates: tuple[Ints, ...]
    nnz: Ints

    @property
    def order(self) -> int:
        """The number of modes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.coordinates)

    @property
    def grid(self) -> Ints:
        """The number of ranges along each mode and, last, of parts of a box."""
        return (*(len(b) - 1 for b in self.bounds), 1 + max(at[-1] for at in self.coordinates))

    @property
    def modes(self) -> Ints:
        """The modes that are cut."""
        return tuple(m for m, b in enumerate(self.bounds) if len(b) > 2)

    @property
    def imbalance(self) -> float:
        """The largest number of nonzeros of a rank over the mean; 1 if there are none."""
        return max(self.nnz) * self.size / sum(self.nnz) if any(self.nnz) else 1.0

    def ranges(self, rank: int) -> Box:
        """Return the range of rows of each mode in a rank's box."""
        return tuple((b[at], b[at + 1]) for b, at in zip(self.bounds, self.coordinates[rank], strict=False))

    def sharing(self, modes: Iterable[int]) -> tuple[Ints, ...]:
        """Group the ranks that have the same ranges in all these modes."""
        modes, parts = tuple(modes), dict[Ints, list[int]]()
        for rank, at in enumerate(self.coordinates):
            parts.setdefault(tuple(at[m] for m in modes), []).append(rank)
        return tuple(tuple(part) for _, part in sorted(parts.items()))

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.shape))
        grid = " x ".join(map(str, self.grid[:-1])) + (f", {self.grid[-1]} parts each" if self.grid[-1] > 1 else "")
        lines = [f"cut of {sizes}, {sum(self.nnz):,} nonzeros, over {ranks_of(self.size)}: {grid}"]
        for m in self.modes:
            lines.append(f"  mode {m}: rows from {_few(self.bounds[m][:-1])}, to {self.bounds[m][-1]:,}")
        if self.size <= LISTED:
            lines += [f"  rank {r}: {self._box(r)}: {n:,} nonzeros" for r, n in enumerate(self.nnz)]
        lines.append(
            f"  {min(self.nnz):,} to {max(self.nnz):,} nonzeros a rank, the most {self.imbalance:.2f} x the mean"
        )
        return "\n".join(lines)

    def _box(self, rank: int) -> str:
        ranges = self.ranges(rank)
        said = [f"mode {m} {ranges[m][0]:,}..{ranges[m][1]:,}" for m in self.modes]
        if self.grid[-1] > 1:
            said.append(f"part {self.coordinates[rank][-1]}")
        return ", ".join(said) or "all"


def ranks_of(size: int) -> str:
    """``1 rank``, ``4 ranks``."""
    return f"{size:,} rank{'s' if size > 1 else ''}"


def _few(numbers: Ints) -> str:
    said = ", ".join(f"{n:,}" for n in numbers[:6])
    return said if len(numbers) <= 6 else f"{said}, … ({len(numbers)} ranges)"


def boundaries(counts: Tensor, ranges: int) -> Ints:
    """Return the (ranges + 1) rows at which a mode is cut into ranges of about equally many nonzeros.

    Args:
        counts: (size,) int64, nonzeros of each row.
        ranges: how many.
    """
    size = counts.shape[0]
    sums = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    equal = torch.tensor([start for start, _ in shares((0, size), ranges)] + [size], device=counts.device)
    if int(sums[equal].diff().max()) * ranges <= LEVEL * int(sums[-1]):
        return tuple(equal.tolist())
    wanted = torch.tensor([int(sums[-1]) * k // ranges for k in range(1, ranges)], device=counts.device)
    after = torch.searchsorted(sums, wanted).clamp(1, size)  # the first row from which at least so many lie before
    nearer = (wanted - sums[after - 1]) < (sums[after] - wanted)
    return 0, *(after - nearer.long()).tolist(), size


def shares(rows: Range, ranks: int) -> list[Range]:
    """A range in equal parts, of which the last may be shorter, or empty: as a DTensor is cut."""
    start, stop = rows
    share = -(-(stop - start) // ranks)
    return [(min(stop, start + share * n), min(stop, start + share * (n + 1))) for n in range(ranks)]


def grids(size: int, shape: Sequence[int], modes: Sequence[int], divided: bool) -> list[Grid]:
    """Return all grids of `size` ranks that cut only these modes, fewest rows sent first.

    Args:
        size: of the ranks.
        shape: of the tensor.
        modes: those that may be cut; no mode is into more ranges than it has rows.
        divided: whether boxes may be divided into parts, in which case grids of these come after the others.
    """
    most = [n if m in modes else 1 for m, n in enumerate(shape)] + [size if divided else 1]
    ranges = [[d for d in range(1, size + 1) if size % d == 0 and d <= max(1, n)] for n in most]
    fitting = [grid for grid in product(*ranges) if prod(grid) == size]
    return sorted(fitting, key=lambda grid: (grid[-1], rows_sent(grid, shape), grid))


def rows_sent(grid: Grid, shape: Sequence[int]) -> float:
    """Return how many factor rows a rank sends in each direction, over all modes, with ranges of equal length."""
    size = prod(grid)
    sharing = [size // g for g in grid[:-1]]
    return sum(n / g * (s - 1) / s for n, g, s in zip(shape, grid[:-1], sharing, strict=True))


def chosen(coords: Tensor, shape: Sequence[int], modes: Sequence[int], ranks: Ranks) -> Cut:
    """The cut of a tensor; collective.

    Args:
        coords: (sparse order, n) those that this rank has.
        shape: of all modes, dense ones last.
        modes: that may be cut.
        ranks: as many as there will be boxes, or parts of them.
    """
    counts = {m: ranks.sum_(torch.bincount(coords[m], minlength=shape[m])) for m in modes}

    def cut(grid: Grid) -> Cut:
        bounds = tuple(boundaries(counts[m], g) if m in counts else (0, shape[m]) for m, g in enumerate(grid[:-1]))
        per_box = torch.bincount(box_of(coords, bounds), minlength=prod(grid[:-1]))
        counted, parts = ranks.sum_(per_box).tolist(), grid[-1]
        # rank n has the n-th box, or, of boxes in parts, the n-th part; the last mode's ranges, and parts, are fastest
        nnz = [n * (k + 1) // parts - n * k // parts for n in counted for k in range(parts)]
        return Cut(tuple(shape), bounds, tuple(product(*map(range, grid))), tuple(nnz))

    def tried(divided: bool) -> Iterator[Cut]:
        listed = (grid for grid in grids(ranks.size, shape, modes, divided) if divided == (grid[-1] > 1))
        return map(cut, islice(listed, TRIED))

    cuts: list[Cut] = []
    for plain in tried(False):
        if plain.imbalance <= EVEN:
            return plain
        cuts.append(plain)
    if not cuts or min(one.imbalance for one in cuts) > UNEVEN:
        cuts += tried(True)
    return min(cuts, key=lambda one: one.imbalance)


def box_of(coords: Tensor, bounds: Sequence[Sequence[int]]) -> Tensor:
    """(n,) int64 the box that each nonzero lies in, the last mode's ranges fastest."""
    box = torch.zeros(coords.shape[1], dtype=torch.int64, device=coords.device)
    for m, b in enumerate(bounds):
        if len(b) > 2:
            inner = torch.tensor(b[1:-1], device=coords.device)
            box.mul_(len(b) - 1).add_(torch.bucketize(coords[m], inner, right=True))
    return box
