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
from sparsetc.ir.cost import Cost, Statistics, rates_of
from sparsetc.ir.operands import MIN_DOT, dense_axes
from sparsetc.ir.plan import Layout, Part, Plan, Schedule
from sparsetc.ir.tile_groups import TileGroups, groups_of
from sparsetc.partition.threshold import tile_populations
from sparsetc.planner.candidates import CPU_GRAIN, FUSE_BELOW, Candidate, Setting, coo
from sparsetc.planner.pricing import costs, seconds_of
from sparsetc.planner.statistics import Counts

# Measurements behind these numbers: benchmarks/results/tile_schedules.json.
TILES_AN_ITEM = 8
"""Most tiles one work item takes."""
LEAST_ITEMS = 500
"""Work items that a part is dealt to, if it has the tiles."""
MANY_ITEMS = 1000
"""The same before an item takes more than half of the most tiles: fewer would leave the GPU's last wave half empty."""
THRESHOLDS = tuple(sorted({round(2 ** (n / 2)) for n in range(25)}))
"""Populations tried as a threshold."""
RANKS = 128
"""Most elements of a dense axis that a program takes."""
MATRIX = 8192
"""Elements of the matrix a program accumulates in registers: ranks times columns."""
FUSED_RANKS, FUSED_MATRIX = 64, {"tf32x3": 1024}
"""The same in a fused launch (and 4,096 elsewhere): registers it takes are lost to the scalar programs too."""


@dataclass(frozen=True)
class HybridPlan:
    """A plan to be made for each einsum; what `plan_hls` returns."""

    threshold: int | None = None

    def __call__(self, setting: Setting, counts: Counts, sparse_output: bool = False) -> Candidate:
        """Two parts, by the threshold given or the cheapest one."""
        histogram, rest = populations(counts), coo(setting, counts)  # leftovers make short fibers: runs, then
        if self.threshold is not None:
            return _candidate(setting, counts, self.threshold, histogram, rest)
        made = [_candidate(setting, counts, t, histogram, rest) for t in _worth_trying(histogram)]
        rates, known = rates_of(setting.backend), dict[tuple[Schedule, ...], list[Cost]]()
        for c in made:  # thresholds change how much a part holds, seldom its program
            key = tuple(p.schedule for p in c.plan.parts)
            known[key] = known.get(key) or costs(c, setting, sparse_output)
        return min(made, key=lambda c: seconds_of(c, known[tuple(p.schedule for p in c.plan.parts)], rates))


def plan_hls(threshold: int | None = None) -> HybridPlan:
    """The hybrid plan with tiles of at least `threshold` nonzeros dense; without one, the cost model finds it.

    0 or 1 makes every tile dense, a threshold above a tile's volume none.
    """
    if threshold is not None and (not isinstance(threshold, int) or threshold < 0):
        raise PlanError(f"threshold must be a number of nonzeros, 0 or more, found {threshold!r}")
    return HybridPlan(threshold)


def offered(setting: Setting, counts: Counts, sparse_output: bool) -> Candidate | None:
    """The hybrid plan where ``"auto"`` should consider it: on a GPU, with dots, and with tiles worth making dense."""
    if setting.backend != "triton" or setting.deterministic or not setting.floating or not counts.nnz:
        return None
    if not groups_of(setting.bound, sides_of(counts.shape)).dot:
        return None
    found = HybridPlan()(setting, counts, sparse_output)
    return found if found.expected[0].nnz else None


def populations(counts: Counts) -> torch.Tensor:
    """(volume + 1,) how many nonzeros lie in tiles of each population."""
    return counts.histogram(
        "tiles", lambda: tile_populations(counts.coords, counts.shape, sides_of(counts.shape)), VOLUME
    )


def _worth_trying(histogram: torch.Tensor) -> list[int]:
    """Thresholds that make different parts: the smallest of those that deal alike, and one that makes nothing dense."""
    below = torch.cumsum(histogram, 0).tolist()
    found: dict[int, int] = {}
    for t in (*THRESHOLDS, VOLUME + 1):
        found.setdefault(below[min(t, VOLUME + 1) - 1], t)
    return list(found.values())


def _candidate(setting: Setting, counts: Counts, threshold: int, histogram: torch.Tensor, rest: Candidate) -> Candidate:
    sizes = torch.arange(histogram.numel())
    chosen = (sizes >= threshold) & (sizes > 0)
    nnz = int(histogram[chosen].sum())
    tiles = int((histogram[chosen] // sizes[chosen].clamp(min=1)).sum())
    fused = 0 < nnz < counts.nnz and _one_launch(setting, counts.nnz)
    dense, expected = _tiles(setting, counts, nnz, tiles, fused)
    leftovers = replace(rest.plan.parts[0], label="the other nonzeros")
    if fused:  # one launch has one number of warps and of stages
        schedule = replace(leftovers.schedule, warps=dense.schedule.warps, stages=dense.schedule.stages)
        leftovers = replace(leftovers, schedule=schedule)
    plan = Plan("hls", (dense, leftovers), fused, "threshold", (("threshold", threshold),))
    share = (counts.nnz - nnz) / max(1, counts.nnz)
    return Candidate(plan, (expected, rest.expected[0].scaled(share)))


def _tiles(setting: Setting, counts: Counts, nnz: int, tiles: int, fused: bool) -> tuple[Part, Statistics]:
    """The dense part, and what packing it is expected to give."""
    sides = sides_of(counts.shape)
    groups = groups_of(setting.bound, sides, setting.floating)
    each = min(TILES_AN_ITEM, 1 << max(tiles // LEAST_ITEMS, 1).bit_length() - 1)
    if tiles < MANY_ITEMS * each:
        each = min(each, TILES_AN_ITEM // 2)
    layout = _layout(setting, groups, each * prod(sides))
    schedule = _schedule(setting, groups, fused)
    width = 2 if schedule.precision == "bf16" else setting.itemsize
    # Bitmaps take fewer bytes, and longer: every position is expanded (benchmarks/results/tile_formats.json).
    dense = setting.memory is None or tiles * prod(sides) * width <= setting.memory
    stored = tiles * prod(sides) if dense else nnz
    part = Part("dense_tile" if dense else "bitmap_tile", layout, schedule, nnz, label="tiles of many nonzeros")
    chain = max(each, TILES_AN_ITEM // 2)  # a program of fewer tiles ends little sooner
    return part, Statistics(-(-tiles // each), tiles, stored, nnz, setting.itemsize, chain=chain)


def _one_launch(setting: Setting, nnz: int) -> bool:
    """Whether tiles and leftovers share a launch: where dots leave scalar programs the registers they need.

    On an H200 that was faster up to 4 M nonzeros, and beyond where a program's rank is short or values are 16 bits.
    """
    ranks = max((setting.bound.by_index[c] for c in dense_axes(setting.bound)), default=1)
    if setting.precision == "tf32x3":
        return ranks <= 32 and nnz < FUSE_BELOW
    return ranks <= 32 or nnz < FUSE_BELOW


def _layout(setting: Setting, groups: TileGroups, grain: int) -> Layout:
    """Tiles of one block of output rows together; positions stored as the dots take them."""
    (sparse,) = setting.bound.einsum.sparse
    letters = setting.bound.einsum.inputs[sparse]

    def modes(*names: str) -> tuple[int, ...]:
        return tuple(letters.index(c) for c in names)

    inner = (*groups.second, *groups.first)
    grain = grain if setting.backend == "triton" else CPU_GRAIN
    params = (("outer", len(groups.gridded)), ("inner", len(inner)))
    item, rest = modes(*groups.gridded, *groups.columns), modes(*groups.spread, *inner)
    return Layout(item, rest, (), 1, 0, grain, 1, params)


def _schedule(setting: Setting, groups: TileGroups, fused: bool) -> Schedule:
    """Ranks and columns that fill a program's registers, and warps to share them; one warp beside scalar programs.

    On an H200 (`benchmarks/results/tile_schedules.json`) tf32 was fastest by few warps, which take the instructions of
    one warp; of tf32x3, which needs three, a group of four warps was.
    """
    sizes = {c: setting.bound.by_index[c] for c in dense_axes(setting.bound)}
    padded = {c: 1 << max(n - 1, 0).bit_length() for c, n in sizes.items()}
    if setting.backend != "triton":
        return Schedule(1, tuple(padded.items()), setting.floating, setting.precision)
    most = FUSED_RANKS if groups.second or fused or setting.precision == "tf32" else RANKS
    blocks = {c: max(MIN_DOT, min(n, most)) for c, n in padded.items()}
    ranks = max(blocks.values(), default=1)
    matrix = FUSED_MATRIX.get(setting.precision, 4096) if fused else MATRIX
    columns = max(MIN_DOT, min(64 if fused else 128, matrix // ranks))
    warps = 1 if fused or not groups.dot else 4 if ranks >= 64 and setting.precision != "tf32" else 2
    return Schedule(warps, tuple(blocks.items()), setting.floating, setting.precision, stages=2, columns=columns)
