"""``hls``: a hybrid plan (HLSTO): well-filled tiles on the tensor cores, the other nonzeros as runs.

In: a `Setting`, counts, and the population from which a tile is dense, or none to take what the cost model finds best.
Out: a `Candidate` of two parts that share one launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from sparsetc.errors import PlanError
from sparsetc.formats.tiles import VOLUME, sides_of
from sparsetc.ir.cost import Statistics
from sparsetc.ir.operands import MIN_DOT, dense_axes
from sparsetc.ir.plan import Layout, Part, Plan, Schedule
from sparsetc.ir.tile_groups import COLUMNS, TileGroups, groups_of
from sparsetc.partition.threshold import tile_populations
from sparsetc.planner.candidates import CPU_GRAIN, Candidate, Setting, coo
from sparsetc.planner.pricing import expected_seconds
from sparsetc.planner.statistics import Counts

TILES_AN_ITEM = 4
"""Tiles one work item takes."""
THRESHOLDS = tuple(1 << n for n in range(13))
"""Populations tried as a threshold."""
RANKS = 128
"""Most elements of a dense axis that a program takes."""
MATRIX = 8192
"""Elements of the matrix a program accumulates in registers: ranks times columns."""


@dataclass(frozen=True)
class HybridPlan:
    """A plan to be made for each einsum; what `plan_hls` returns."""

    threshold: int | None = None

    def __call__(self, setting: Setting, counts: Counts) -> Candidate:
        """Two parts, by the threshold given or the cheapest one."""
        if self.threshold is not None:
            return _candidate(setting, counts, self.threshold, _histogram(counts))
        histogram = _histogram(counts)
        made = [_candidate(setting, counts, t, histogram) for t in THRESHOLDS]
        return min(made, key=lambda c: expected_seconds(c, setting, sparse_output=False))


def plan_hls(threshold: int | None = None) -> HybridPlan:
    """The hybrid plan with tiles of at least `threshold` nonzeros dense; without one, the cost model finds it.

    0 or 1 makes every tile dense, a threshold above a tile's volume none.
    """
    if threshold is not None and (not isinstance(threshold, int) or threshold < 0):
        raise PlanError(f"threshold must be a number of nonzeros, 0 or more, found {threshold!r}")
    return HybridPlan(threshold)


def _histogram(counts: Counts) -> torch.Tensor:
    """(volume + 1,) how many nonzeros lie in tiles of each population."""
    populations = tile_populations(counts.coords, counts.shape, sides_of(counts.shape))
    return torch.bincount(populations, minlength=VOLUME + 1).cpu()


def _candidate(setting: Setting, counts: Counts, threshold: int, histogram: torch.Tensor) -> Candidate:
    populations = torch.arange(histogram.numel())
    chosen = (populations >= threshold) & (populations > 0)
    nnz = int(histogram[chosen].sum())
    tiles = int((histogram[chosen] // populations[chosen].clamp(min=1)).sum())
    dense, expected = _tiles(setting, counts, nnz, tiles)
    rest = coo(setting, counts)
    share = (counts.nnz - nnz) / max(1, counts.nnz)
    leftovers = replace(
        rest.plan.parts[0],
        label="the other nonzeros",
        schedule=replace(rest.plan.parts[0].schedule, warps=dense.schedule.warps, stages=dense.schedule.stages),
    )
    plan = Plan("hls", (dense, leftovers), True, "threshold", (("threshold", threshold),))
    return Candidate(plan, (expected, rest.expected[0].scaled(share)))


def _tiles(setting: Setting, counts: Counts, nnz: int, tiles: int) -> tuple[Part, Statistics]:
    """The dense part, and what packing it is expected to give."""
    sides = sides_of(counts.shape)
    groups = groups_of(setting.bound, sides, setting.floating)
    layout = _layout(setting, groups, prod(sides))
    part = Part("dense_tile", layout, _schedule(setting, groups), nnz, label="tiles of many nonzeros")
    items = max(1, tiles // TILES_AN_ITEM) if tiles else 0
    return part, Statistics(items, tiles, tiles * prod(sides), nnz, setting.itemsize)


def _layout(setting: Setting, groups: TileGroups, volume: int) -> Layout:
    """Tiles of one block of output rows together; positions stored as the dots take them."""
    (sparse,) = setting.bound.einsum.sparse
    letters = setting.bound.einsum.inputs[sparse]

    def modes(*names: str) -> tuple[int, ...]:
        return tuple(letters.index(c) for c in names)

    inner = (*groups.second, *groups.first)
    grain = TILES_AN_ITEM * volume if setting.backend == "triton" else CPU_GRAIN
    params = (("outer", len(groups.gridded)), ("inner", len(inner)))
    item, rest = modes(*groups.gridded, *groups.columns), modes(*groups.spread, *inner)
    return Layout(item, rest, (), 1, 0, grain, 1, params)


def _schedule(setting: Setting, groups: TileGroups) -> Schedule:
    """Ranks and columns that fill a program's registers, and warps to share them."""
    sizes = {c: setting.bound.by_index[c] for c in dense_axes(setting.bound)}
    padded = {c: 1 << max(n - 1, 0).bit_length() for c, n in sizes.items()}
    if setting.backend != "triton":
        return Schedule(1, tuple(padded.items()), setting.floating, setting.precision)
    most = 64 if groups.second else RANKS
    blocks = {c: max(MIN_DOT, min(n, most)) for c, n in padded.items()}
    ranks = max(blocks.values(), default=1)
    columns = max(MIN_DOT, min(COLUMNS, MATRIX // ranks))
    if setting.precision == "tf32x3":
        columns = min(columns, 128)
    warps = 4 if ranks >= 64 else 2 if groups.dot else 1
    return Schedule(warps, tuple(blocks.items()), setting.floating, setting.precision, columns=columns)
