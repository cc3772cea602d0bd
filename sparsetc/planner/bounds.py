"""Samples of a pattern, and lower estimates of the time of tiled plans, so that losing plans are not counted.

In: `Counts` of a pattern, and the fastest plan so far. Out: whether a plan may be faster. A sample has whole blocks of
rows, drawn in proportion to their nonzeros, and of these the nonzeros of some columns. No random numbers are used, so
that every rank and every replay makes the same plan. A sample is no bound: what comes near the best is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.ir.plan import Part, Plan
from sparsetc.ir.program.resources import Statistics
from sparsetc.packing.base import VOLUME, sides_of
from sparsetc.planner.candidate import Best, Candidate
from sparsetc.planner.pricing import in_order, rounded
from sparsetc.planner.problem import Counts, Problem
from sparsetc.support import Ints
from sparsetc.tensor import coords as crd

SAMPLE = 4096
"""Nonzeros of a sample, about, once columns are left out."""
BLOCKS = (12, 32)
"""Blocks of rows that are drawn, the fewest and the most."""
SLABS = 48
"""Slabs of tiles that are drawn."""
HEIGHTS = (16, 32, 64, 128)
"""Rows of the windows that are sampled. Rows of the highest are drawn together."""
STRIPS = (3, 6)
"""Bits of a column's number that are left out of hashes; the order counts whose windows have fewer columns. Strips of 8
columns find most groups of 1-SA in small blocks and among rows that share columns anywhere, which those of 64 lose; of
blocks of 64 that are filled to a tenth, where rows share few strips of 8, those of 64 find twice as few columns."""
SHARED = 1.5
"""Nonzeros for each column of the tallest windows from which the second order is tried: random rows have fewer."""
ERROR = 1.25
"""Factor by which tiles may take less than a sample says, and hold more of the nonzeros."""
MOST_COLUMNS = 1 << 48
"""Possible columns above which those of a sample are numbered."""
MANY = 1 << 20
"""The number of tiles from which each takes the time that a tile takes among many."""
SPREAD = 0x1E3779B97F4A7C15
"""An odd number by which keys are spread."""


Numbers = np.ndarray[Any, np.dtype[Any]]


def rates_of(problem: Problem, parts: Iterable[tuple[Part, Statistics]]) -> tuple[Numbers, list[int]]:
    """Price plans of single parts, before any tiles are counted, also with operands cast where that pays.

    Args:
        problem: that is planned, of any pattern.
        parts: each with what is expected of one tile.

    Returns:
        (3, ways) seconds: of a plan of a single tile, with what it launches and writes; of each tile more; and of each
        tile more that one work item has. Then the part of each way.
    """

    def seconds(candidate: Candidate) -> float:
        return in_order(candidate, problem).total

    rates = []
    owner = []
    for number, (part, sizes) in enumerate(parts):
        many = Candidate(Plan("", (part,)), (replace(sizes, fibers=MANY, stored=MANY * sizes.stored),))
        for way in dict.fromkeys((many, rounded(many, problem))):
            first = seconds(replace(way, expected=(sizes,)))
            turn = seconds(replace(way, expected=(replace(sizes, chain=MANY),))) - first
            rates.append((first, max(0.0, seconds(way) - first) / MANY, turn / MANY))
            owner.append(number)
    return np.array(rates).reshape(-1, 3).T, owner


def least_seconds(
    rates: Numbers, problem: Problem, best: Best, tiles: Numbers, left: Numbers, chain: Numbers, launched: bool
) -> Numbers:
    """(ways,) the seconds that tiles take at least beside the rest of the nonzeros, of the best way to split them.

    Args:
        rates: as `rates_of` gives them.
        problem: that is planned.
        best: the best plan so far; of a share of the nonzeros it takes that share, launch and waits apart.
        tiles: (ways or 1, splits) how many tiles there are.
        left: (ways or 1, splits) the share of the nonzeros that is in none.
        chain: (ways or 1, splits) the most tiles of a work item, less the one that a single tile is.
        launched: the rest has a launch of its own.
    """
    profile, (first, more, turn) = problem.profile, rates[:, :, None]
    fixed = profile.launch + profile.constants["starting_waits"] * profile.wait
    left = 1 - ((1 - left) * ERROR).clip(max=1)
    rest = left * max(0.0, best.seconds - fixed) + (left > 0) * (fixed if launched else 0.0)
    seconds = first + (tiles * more + chain * turn) / ERROR + rest
    least: Numbers = np.where(tiles > 0, seconds, inf).min(1)
    return least


# -- samples ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Windows:
    """(heights, windows) of a sample, by `HEIGHTS`; behind the windows of a height there are empty ones.

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

    def at(self, heights: Sequence[int]) -> Windows:
        """Return the windows of these heights."""
        rows = [HEIGHTS.index(height) for height in heights]
        return Windows(self.nonzeros[rows], self.columns[rows], self.share, self.weight[rows])

    def tiles(self, width: int | Numbers) -> tuple[Numbers, Numbers]:
        """(heights, windows) how many tiles the columns of each fill, about; and at least, by two deviations.

        The width of a tile may be one, or one a height, (heights, 1).
        """
        error = 2 * np.sqrt(self.columns * (self.share - 1))
        about = self.columns if self.share == 1 else self.columns - width / 2
        filled = self.nonzeros > 0
        return np.ceil(about / width).clip(filled), np.ceil((self.columns - error) / width).clip(filled)


def windows_of(counts: Counts, kept: Ints, rest: Ints, similar: bool) -> Windows:
    """Sample windows of rows in order, or sorted by similarity, whichever has fewer columns.

    Rows are fibers of the modes that are kept, columns those of the rest.
    """

    def sampled() -> Windows:
        best = _windows(counts, kept, rest, STRIPS[0] if similar else None)
        if similar and SHARED * best.columns[-1].sum() < best.nonzeros[-1].sum():
            other = _windows(counts, kept, rest, STRIPS[1])
            best = min(best, other, key=lambda own: float((own.weight * own.columns).sum()))
        return best

    return counts.once(("sample", kept, rest, similar), sampled)


def _windows(counts: Counts, kept: Ints, rest: Ints, strip: int | None) -> Windows:
    lengths, most = counts.lengths(kept), HEIGHTS[-1]
    count, device = lengths.numel(), lengths.device
    sorted_by_row = kept == tuple(range(len(kept)))
    if not sorted_by_row:
        row = crd.ranked(
            *crd.linear_key((counts.row(m) for m in kept), [counts.shape[m] for m in kept], counts.row(0))
        )[0]
    elif strip is not None:
        row = torch.repeat_interleave(lengths, output_size=counts.nnz)
    order = None if strip is None else similar_order(row, counts.row(rest[-1]) >> strip, count)
    # Blocks of rows in that order, and the rows of each; places are on the host, so that few answers are waited for.
    ends = torch.cumsum(crd.picked(lengths, order), 0)
    last = torch.arange(most - 1, count + most - 1, most, device=device).clamp_(max=count - 1)
    block, weight = _drawn(ends[last].cpu().numpy(), counts.nnz)
    place = (block[:, None] * most + np.arange(most)).ravel()
    lowest = np.arange(place.size)[place < count] // HEIGHTS[0]
    rows = torch.as_tensor(place[place < count]).to(device)
    rows = rows if order is None else order.index_select(0, rows)
    # Of nonzeros of these rows: which they are, and the place of the row among the rows.
    if sorted_by_row:
        starts = torch.cumsum(lengths, 0) - lengths
        start, length = torch.stack((starts, lengths)).index_select(1, rows).cpu().numpy()
        numbers, of_row = _ranges(start, length, device)
    else:
        length = lengths.index_select(0, rows).cpu().numpy()
        places = torch.arange(rows.numel(), device=device)
        of_row = rows.new_full((count,), -1).scatter_(0, rows, places)[row]
        numbers = torch.nonzero(of_row >= 0).flatten()
        of_row = of_row[numbers]
    column, spread = crd.linear_key((counts.row(m)[numbers] for m in rest), [counts.shape[m] for m in rest])
    if spread > MOST_COLUMNS:
        column = crd.ranked(column, spread)[0].long()
    windows, (some, share) = block.size * most // HEIGHTS[0], _thinned(column)
    keys = torch.add(torch.as_tensor(lowest).to(device)[of_row[some]], column[some], alpha=windows)
    return _by_height(np.sort(keys.cpu().numpy()), np.bincount(lowest, length, windows), share, weight)


def _by_height(keys: Numbers, held: Numbers, share: int, weight: Numbers) -> Windows:
    """Count the columns of windows of every height from those of the lowest.

    Args:
        keys: (n,) a column times the number of lowest windows, plus the window; in order.
        held: (windows,) nonzeros of the lowest windows.
        share: of so many columns one is among the keys.
        weight: (blocks,) how many each stands for.
    """
    nonzeros, columns, weights = np.zeros((3, len(HEIGHTS), held.size))
    for number, height in enumerate(HEIGHTS):
        several = height // HEIGHTS[0]  # lowest windows, whose columns are in order too
        windows = held.size // several
        met = keys // several
        met = met[np.append(True, met[1:] != met[:-1])[: met.size]] % windows
        nonzeros_held = held.reshape(-1, several).sum(1)
        nonzeros[number, :windows] = nonzeros_held
        columns[number, :windows] = (share * np.bincount(met, minlength=windows)).clip(
            -(-nonzeros_held // height), nonzeros_held
        )
        weights[number, :windows] = weight.repeat(HEIGHTS[-1] // height)
    return Windows(nonzeros, columns, share, weights)


def different(group: Tensor, key: Tensor, spread: int, groups: int) -> Tensor:
    """(groups,) how many different keys, below `spread`, the entries of each group have."""
    if groups * spread > crd.INT64_SIZES:
        number, spread = crd.ranked(key, spread)
        key = number.long()
    keys = torch.sort(crd.narrowed(torch.add(key, group, alpha=spread), groups * spread)).values
    return torch.bincount(keys[crd.starts_of_runs([keys])] // spread, minlength=groups)


def similar_order(row: Tensor, strip: Tensor, count: int) -> Tensor:
    """(count,) rows in the order of two min-hashes of the strips of columns that they touch: like rows are together."""
    hashed = (strip * SPREAD).bitwise_right_shift_(33).bitwise_and_(0x3FFFFFFF).int()
    low = hashed.new_full((count,), 1 << 30).scatter_reduce_(0, row.long(), hashed, "amin")
    high = hashed.new_zeros(count).scatter_reduce_(0, row.long(), hashed, "amax")
    return torch.argsort(low.long() << 30 | high, stable=True)


def tiles_of(counts: Counts) -> Numbers:
    """(volume + 1,) how many nonzeros lie in tiles of each population, about, from slabs of tiles along a mode."""

    def count() -> Numbers:
        sides = sides_of(counts.shape)
        row = counts.row(0)
        nnz = counts.nnz
        slab = row[torch.arange(SLABS, device=row.device) * nnz // SLABS] // sides[0]
        ends = torch.searchsorted(row, torch.stack((slab, slab + 1)) * sides[0])
        slab, start, end = torch.cat((slab[None], ends)).cpu().numpy()
        _, different, hits = np.unique(slab, return_index=True, return_counts=True)
        length = (end - start)[different]
        numbers, owner = _ranges(start[different], length, row.device)
        # Sides are powers of two.
        tiles = (counts.row(m)[numbers] >> side.bit_length() - 1 for m, side in enumerate(sides))
        key = crd.linear_key(tiles, [-(-n // side) for n, side in zip(counts.shape, sides, strict=True)])[0]
        some, share = _thinned(key)
        each, slab = torch.stack((key[some], owner[some])).cpu().numpy()
        _, first, held = np.unique(each, return_index=True, return_counts=True)
        weight = share * (hits * nnz / (SLABS * length))[slab[first]]
        return np.bincount(held, held * weight, minlength=VOLUME + 1)

    return counts.once("sampled tiles", count)


def _drawn(ends: Numbers, nnz: int) -> tuple[Numbers, Numbers]:
    """Sample blocks in proportion to their nonzeros; return their numbers, and how many blocks each represents."""
    blocks = ends.size
    count = min(BLOCKS[1], max(BLOCKS[0], SAMPLE * blocks // nnz))
    if blocks <= count:
        return np.arange(blocks), np.ones(blocks)
    at = (2 * np.arange(count) + 1) * nnz // (2 * count)
    block, hits = np.unique(np.searchsorted(ends, at, side="right"), return_counts=True)
    return block, hits * nnz / (count * np.diff(ends, prepend=0)[block])


def _ranges(start: Numbers, length: Numbers, device: torch.device) -> tuple[Tensor, Tensor]:
    """The numbers of ranges, one behind the other, and the range of each; on a device, which is not waited for."""
    first, lengths = torch.as_tensor(np.stack((start, length))).to(device)
    owner, numbers = crd.in_runs(lengths, int(length.sum()), first)
    return numbers, owner


def _thinned(key: Tensor) -> tuple[Tensor | slice, int]:
    """Choose keys, all entries of each, so that about `SAMPLE` entries are left; one key of how many was chosen."""
    share = 1 << max(0, (key.numel() - 1) // SAMPLE).bit_length()
    if share == 1:
        return slice(None), 1
    return torch.nonzero((key * SPREAD >> 40) & (share - 1) == 0).flatten(), share
