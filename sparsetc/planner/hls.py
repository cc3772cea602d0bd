"""``hls``: a hybrid plan (HLSTO): well-filled tiles as dense tiles on the tensor cores, the other nonzeros as runs.

In: a `Setting`, counts, and the population from which a tile is dense, or none to take what the cost model finds best.
Out: a `Candidate` of two parts that share one launch. Asked for by name, ``plan="hls"``; rates of dense tiles have not
been calibrated on a GPU yet, so it is no candidate of ``plan="auto"``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from sparsetc.errors import PlanError
from sparsetc.formats.dense_tile import VOLUME, sides_of
from sparsetc.ir.cost import Statistics
from sparsetc.ir.operands import MIN_DOT, dense_axes
from sparsetc.ir.plan import Layout, Part, Plan, Schedule
from sparsetc.partition.threshold import tile_populations
from sparsetc.planner.candidates import CPU_GRAIN, Candidate, Setting, coo
from sparsetc.planner.pricing import expected_seconds
from sparsetc.planner.statistics import Counts

TILES_AN_ITEM = 8
"""Tiles one work item takes (the probes of one H200 took 8 or 32)."""
THRESHOLDS = tuple(1 << n for n in range(13))
"""Populations tried as a threshold."""


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
    populations = tile_populations(counts.coords, counts.shape)
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
    others = tuple(m for m in range(setting.order) if m not in setting.kept)
    volume = prod(sides_of(counts.shape))
    grain = TILES_AN_ITEM * volume if setting.backend == "triton" else CPU_GRAIN
    layout = Layout(setting.kept, others, (), 1, 0, grain, 1)
    part = Part("dense_tile", layout, _schedule(setting), nnz, label="tiles of many nonzeros")
    items = max(1, tiles // TILES_AN_ITEM) if tiles else 0
    return part, Statistics(items, tiles, tiles * volume, nnz, setting.itemsize)


def _schedule(setting: Setting) -> Schedule:
    sizes = {c: setting.bound.by_index[c] for c in dense_axes(setting.bound)}
    padded = {c: 1 << max(n - 1, 0).bit_length() for c, n in sizes.items()}
    if setting.backend == "triton":
        padded = {c: max(MIN_DOT, min(n, 64)) for c, n in padded.items()}
    return Schedule(1, tuple(padded.items()), setting.floating, setting.precision)
