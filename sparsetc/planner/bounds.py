"""Samples of a pattern, and the seconds that plans with tiles take at least by them: what cannot win is not counted.

In: `Counts` of a pattern, and the fastest plan so far. Out: whether a plan may be faster. A sample has whole blocks of
rows, drawn in proportion to their nonzeros, and of these the nonzeros of some columns. No random numbers are used, so
that every rank and every replay makes the same plan. A sample is no bound: what comes near the best is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Any

import numpy as np
import torch

from sparsetc.device.profile import of_backend
from sparsetc.ir.plan import Part, Plan
from sparsetc.ir.program.cost import Statistics
from sparsetc.packing.tiles import VOLUME, sides_of
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.pricing import in_order, rounded
from sparsetc.planner.problem import Counts, Problem
from sparsetc.tensor import coords as crd

SAMPLE = 4096
"""Nonzeros of a sample, about, once columns are left out."""
BLOCKS = (12, 32)
"""Blocks of rows that are drawn, the fewest and the most."""
SLABS = 48
"""Slabs of tiles that are drawn."""
HEIGHTS = (16, 32, 64, 128)
"""Rows of the windows that are sampled. Rows of the highest are drawn together."""
STRIP = 3
"""Bits of a column's number that are left out of hashes. Hashes of strips of 8 columns found most groups of 1-SA, in
blocks and among rows that share columns anywhere; those of 64 columns lost the latter."""
ERROR = 1.25
"""Factor by which tiles may take less than a sample says, and hold more of the nonzeros."""
MOST_COLUMNS = 1 << 48
"""Possible columns above which those of a sample are numbered."""
MANY = 1 << 20
"""Tiles of which each takes what tiles take where there are many."""
SPREAD = 0x1E3779B97F4A7C15
"""An odd number by which keys are spread."""


Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Best:
    """The seconds that candidates have to beat, before they are counted.

    Attributes:
        seconds: below which a plan with tiles is taken for the fastest; infinite where all are to be counted.
        dismissed: what was not counted, and the seconds that it takes at least, by a sample.
    """

    seconds: float = inf
    dismissed: dict[str, float] = field(default_factory=dict)

    def take(self, candidates: Iterable[Candidate]) -> None:
        """Note what candidates are expected to take. A simple plan is preferred to one with tiles that is as fast."""
        for c in candidates:
            self.seconds = min(self.seconds, inf if c.total is None else c.total / (c.apart or 1.0))

    def allows(self, name: str, least: float) -> bool:
        """Return True if so many seconds would be the best; else note that what has the name was dismissed."""
        if least < self.seconds:
            return True
        self.dismissed[name] = min(least, self.dismissed.get(name, inf))
        return False


@dataclass(frozen=True)
class Rates:
    """Seconds of tiles of one kind, before any are counted.

    Attributes:
        first: of a plan of a single tile, with what it launches and writes.
        more: of each tile more.
        turn: of each tile more that one work item has.
    """

    first: float
    more: float
    turn: float

    @classmethod
    def of(cls, problem: Problem, part: Part, sizes: Statistics) -> list[Rates]:
        """Price plans of a part, and of it with operands rounded where that pays, given what is expected of a tile."""
        seconds = cache(lambda candidate: in_order(candidate, problem).total or 0.0)
        many = Candidate(Plan("", (part,)), (replace(sizes, fibers=MANY, stored=MANY * sizes.stored),))
        rates = []
        for fast in dict.fromkeys((many, rounded(many, problem, seconds))):
            first = seconds(replace(fast, expected=(sizes,)))
            turn = seconds(replace(fast, expected=(replace(sizes, chain=MANY),))) - first
            rates.append(cls(first, max(0.0, seconds(fast) - first) / MANY, turn / MANY))
        return rates

    def least(
        self, problem: Problem, best: Best, tiles: Numbers, left: Numbers, chain: Numbers, launched: bool
    ) -> float:
        """Return the seconds that tiles take at least beside the rest of the nonzeros, of several ways to split them.

        Args:
            problem: that is planned.
            best: the best plan so far; of a share of the nonzeros it takes that share, launch and waits apart.
            tiles: (ways,) how many tiles there are.
            left: (ways,) the share of the nonzeros that is in none.
            chain: (ways,) the most tiles of a work item, less the one that `first` has.
            launched: the rest has a launch of its own.
        """
        profile = of_backend(problem.backend)
        fixed = profile.launch + profile.laws["starting_waits"] * profile.wait
        left = 1 - ((1 - left) * ERROR).clip(max=1)
        rest = left * max(0.0, best.seconds - fixed) + (left > 0) * (fixed if launched else 0.0)
        seconds = self.first + (tiles * self.more + chain * self.turn) / ERROR + rest
        return float(seconds[tiles > 0].min(initial=inf))


# -- samples ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Windows:
    """(windows,) of a sample.

    Attributes:
        nonzeros: of each.
        columns: different ones of each, about.
        share: of so many columns one was counted.
        weight: how many windows each stands for.
    """

    nonzeros: Numbers
    columns: Numbers
    share: int
    weight: Numbers

    def tiles(self, width: int) -> tuple[Numbers, Numbers]:
        """(windows,) how many tiles the columns of each fill, about; and at least, by two standard deviations."""
        counted = self.share == 1
        error = 2 * np.sqrt(self.columns * (self.share - 1))
        each = self.columns if counted else self.columns - width / 2, self.columns - error
        about, least = [np.ceil(columns / width).clip(self.nonzeros > 0) for columns in each]
        return about, least


def windows_of(counts: Counts, kept: tuple[int, ...], rest: tuple[int, ...], similar: bool) -> dict[int, Windows]:
    """Return a sample of windows by their height, of rows as they lie or in an order that puts similar ones together.

    Rows are fibers of the modes that are kept, columns those of the rest.
    """
    return counts.once(("sample", kept, rest, similar), lambda: _windows(counts, kept, rest, similar))


def _windows(counts: Counts, kept: tuple[int, ...], rest: tuple[int, ...], similar: bool) -> dict[int, Windows]:
    lengths, together, most = counts.lengths(kept), kept == tuple(range(len(kept))), HEIGHTS[-1]
    count, device = lengths.numel(), lengths.device
    if not together:
        number = crd.narrow_ranks((counts.row(m) for m in kept), [counts.shape[m] for m in kept], counts.row(0))[0]
    elif similar:
        number = torch.repeat_interleave(lengths, output_size=counts.nnz)
    order = similar_order(number, counts.row(rest[-1]), count) if similar else torch.arange(count, device=device)
    # Blocks of rows in that order, and each of their rows: which row it is, and its place among them.
    ends = torch.cumsum(lengths[order], 0).cpu()
    block, weight = _drawn(ends[torch.arange(most - 1, count + most - 1, most).clamp(max=count - 1)], counts.nnz)
    rows, owner = _ranges(block.to(device) * most, (count - block.to(device) * most).clamp(max=most))
    lowest, rows = (owner * most + rows % most) // HEIGHTS[0], order[rows]
    # Of nonzeros of these rows: which they are, and the place of the row among the rows.
    if together:
        numbers, of_row = _ranges((torch.cumsum(lengths, 0) - lengths)[rows], lengths[rows])
    else:
        places = torch.arange(rows.numel(), device=device)
        of_row = rows.new_full((count,), -1).scatter_(0, rows, places)[number]
        numbers = torch.nonzero(of_row >= 0).flatten()
        of_row = of_row[numbers]
    column, spread = crd.linear_key((counts.row(m)[numbers] for m in rest), [counts.shape[m] for m in rest])
    if spread > MOST_COLUMNS:
        number, spread = crd.ranked(column, spread)
        column = number.long()
    windows, (some, share) = block.numel() * most // HEIGHTS[0], _thinned(column)
    held = lengths.new_zeros(windows).index_add_(0, lowest, lengths[rows]).cpu().numpy()
    keys = torch.add(lowest[of_row[some]], column[some], alpha=windows)
    key = np.sort(crd.narrowed(keys, spread * windows).cpu().numpy())
    sample = {}
    for height in HEIGHTS:
        several = height // HEIGHTS[0]  # lowest windows, whose columns are in order too
        met = key // several
        met = met[np.append(True, met[1:] != met[:-1])[: met.size]] % (windows // several)
        nonzeros = held.reshape(-1, several).sum(1)
        columns = (share * np.bincount(met, minlength=nonzeros.size)).clip(-(-nonzeros // height), nonzeros)
        sample[height] = Windows(nonzeros, columns, share, weight.repeat(most // height))
    return sample


def different(group: torch.Tensor, key: torch.Tensor, spread: int, groups: int) -> torch.Tensor:
    """(groups,) how many different keys, below `spread`, the entries of each group have."""
    if groups * spread > crd.INT64_SIZES:
        number, spread = crd.ranked(key, spread)
        key = number.long()
    keys = torch.sort(crd.narrowed(torch.add(key, group, alpha=spread), groups * spread)).values
    return torch.bincount(keys[crd.starts_of_runs([keys])] // spread, minlength=groups)


def similar_order(row: torch.Tensor, column: torch.Tensor, count: int) -> torch.Tensor:
    """(count,) rows in the order of two min-hashes of the strips of columns that they touch: like rows are together."""
    hashed = (column >> STRIP).mul_(SPREAD).bitwise_right_shift_(33).bitwise_and_(0x3FFFFFFF).int()
    low = hashed.new_full((count,), 1 << 30).scatter_reduce_(0, row.long(), hashed, "amin")
    high = hashed.new_zeros(count).scatter_reduce_(0, row.long(), hashed, "amax")
    return torch.argsort(low.long() << 30 | high, stable=True)


def tiles_of(counts: Counts) -> torch.Tensor:
    """(volume + 1,) how many nonzeros lie in tiles of each population, about, from slabs of tiles along a mode."""

    def count() -> torch.Tensor:
        sides, row, nnz = sides_of(counts.shape), counts.row(0), counts.nnz
        at = torch.arange(SLABS, device=row.device) * nnz // SLABS
        slab, hits = torch.unique_consecutive(row[at] // sides[0], return_counts=True)
        start, end = torch.searchsorted(row, torch.stack((slab, slab + 1)) * sides[0])
        numbers, owner = _ranges(start, end - start)
        # Sides are powers of two.
        tiles = (counts.row(m)[numbers] >> side.bit_length() - 1 for m, side in enumerate(sides))
        key = crd.linear_key(tiles, [-(-n // side) for n, side in zip(counts.shape, sides, strict=True)])[0]
        some, share = _thinned(key)
        weight = share * (hits * nnz / (SLABS * (end - start)))[owner[some]].cpu()
        key, order = torch.sort(key[some].cpu())
        first = torch.nonzero(crd.starts_of_runs([key])).flatten()
        held = torch.diff(first, append=first.new_tensor([key.numel()]))
        weight = weight[order[first]]
        return torch.bincount(held, held * weight, minlength=VOLUME + 1)

    return counts.once("sampled tiles", count)


def _drawn(ends: torch.Tensor, nnz: int) -> tuple[torch.Tensor, Numbers]:
    """Draw blocks of nonzeros in proportion to these, or all; return which, and for how many each stands."""
    blocks = ends.numel()
    count = min(BLOCKS[1], max(BLOCKS[0], SAMPLE * blocks // nnz))
    if blocks <= count:
        return torch.arange(blocks), np.ones(blocks)
    at = (2 * torch.arange(count) + 1) * nnz // (2 * count)
    block, hits = torch.unique_consecutive(torch.searchsorted(ends, at, right=True), return_counts=True)
    return block, (hits * nnz / (count * torch.diff(ends, prepend=ends.new_zeros(1))[block])).numpy()


def _ranges(start: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of ranges, one range behind the other, and the range of each."""
    owner = torch.repeat_interleave(length)
    before = torch.cumsum(length, 0) - length
    return torch.arange(owner.numel(), device=owner.device) + (start - before)[owner], owner


def _thinned(key: torch.Tensor) -> tuple[torch.Tensor | slice, int]:
    """Choose keys, all entries of each, so that about `SAMPLE` entries are left; one key of how many was chosen."""
    share = 1 << max(0, (key.numel() - 1) // SAMPLE).bit_length()
    if share == 1:
        return slice(None), 1
    return torch.nonzero((key * SPREAD >> 40) & (share - 1) == 0).flatten(), share
