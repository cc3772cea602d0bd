"""How a sparse tensor is cut over ranks: a grid of boxes, as plain frozen data that prints.

In: boundaries along each mode, and which box each rank has. Out: `Cut`: ranges of rows, ranks that share them. The
medium-grained decomposition of Smith & Karypis 2016 is a cut of all modes; that of SpTV one of all but the contracted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from sparsetc.errors import FormatError

Range = tuple[int, int]
"""Rows from the first to below the second."""
LISTED = 16
"""Ranks that are printed a line each; of more, only the fewest and the most nonzeros are said."""


@dataclass(frozen=True)
class Cut:
    """A tensor's nonzeros, dealt to ranks: each has those in its box, or a piece of them; `verify` says what holds.

    Attributes:
        shape: sizes of all modes.
        bounds: for each mode where its ranges begin, and its size at last; (0, size) of a mode that is not cut.
        places: for each rank the number of its range along every mode and, last, of its piece of the box's nonzeros.
        nnz: nonzeros of each rank.
    """

    shape: tuple[int, ...]
    bounds: tuple[tuple[int, ...], ...]
    places: tuple[tuple[int, ...], ...]
    nnz: tuple[int, ...]

    @property
    def order(self) -> int:
        """The number of modes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.places)

    @property
    def grid(self) -> tuple[int, ...]:
        """Ranges along each mode and, last, pieces of a box."""
        return (*(len(b) - 1 for b in self.bounds), 1 + max(p[-1] for p in self.places))

    @property
    def modes(self) -> tuple[int, ...]:
        """The modes that are cut."""
        return tuple(m for m, b in enumerate(self.bounds) if len(b) > 2)

    @property
    def imbalance(self) -> float:
        """The most nonzeros of a rank over the mean; 1 where there are none."""
        return max(self.nnz) * self.size / sum(self.nnz) if any(self.nnz) else 1.0

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """The rows of each mode in a rank's box."""
        return tuple((b[at], b[at + 1]) for b, at in zip(self.bounds, self.places[rank], strict=False))

    def sharing(self, modes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """The ranks, those together that have the same ranges of all these modes."""
        modes, parts = tuple(modes), dict[tuple[int, ...], list[int]]()
        for rank, place in enumerate(self.places):
            parts.setdefault(tuple(place[m] for m in modes), []).append(rank)
        return tuple(tuple(part) for _, part in sorted(parts.items()))

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.shape))
        grid = " x ".join(map(str, self.grid[:-1])) + (f", {self.grid[-1]} pieces each" if self.grid[-1] > 1 else "")
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
        own = self.ranges(rank)
        said = [f"mode {m} {own[m][0]:,}..{own[m][1]:,}" for m in self.modes]
        if self.grid[-1] > 1:
            said.append(f"piece {self.places[rank][-1]}")
        return ", ".join(said) or "all"


def verify(cut: Cut) -> None:
    """FormatError unless boundaries rise from 0 to the size of each mode, and each place of the grid has one rank."""
    if len(cut.bounds) != cut.order or len(cut.nnz) != cut.size:
        raise FormatError(f"a cut of {cut.order} modes over {cut.size} ranks has as many bounds and counts")
    for mode, (n, b) in enumerate(zip(cut.shape, cut.bounds, strict=True)):
        if len(b) < 2 or b[0] != 0 or b[-1] != n or list(b) != sorted(b):
            raise FormatError(f"mode {mode} of size {n} is cut at {b}; expected boundaries from 0 to {n} that rise")
    if any(len(p) != cut.order + 1 for p in cut.places):
        raise FormatError(f"a place has {cut.order} ranges and a piece")
    inside = all(0 <= at < n for p in cut.places for at, n in zip(p, cut.grid, strict=True))
    if len(set(cut.places)) != cut.size or prod(cut.grid) != cut.size or not inside:
        raise FormatError(f"{cut.size} ranks have places {cut.places[:4]}…; expected each of a grid {cut.grid} once")


def ranks_of(size: int) -> str:
    """``1 rank``, ``4 ranks``."""
    return f"{size:,} rank{'s' if size > 1 else ''}"


def _few(numbers: tuple[int, ...]) -> str:
    said = ", ".join(f"{n:,}" for n in numbers[:6])
    return said if len(numbers) <= 6 else f"{said}, … ({len(numbers)} ranges)"
