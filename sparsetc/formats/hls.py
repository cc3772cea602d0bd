"""``hls``: well-filled tiles on the tensor cores, the other nonzeros as runs or fibers, in one result (HLSTO).

In: a `Problem`, and the population from which a tile is dense, or none to take what the cost model finds best. Out: a
`Candidate` of two parts or three, which share one launch where that pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from math import inf, prod

import numpy as np
import torch
from torch import Tensor

from sparsetc.device.profile import DeviceProfile, by_precision
from sparsetc.formats.coo import coo
from sparsetc.formats.fiber import best_leaf, fiber
from sparsetc.ir.lower.default_tree import MOST_SUMS, TileGroups, groups_of
from sparsetc.ir.nest import tiles_along
from sparsetc.ir.plan import Part, Plan, Schedule, check_threshold
from sparsetc.ir.program import MIN_DOT, Statistics, named_operands
from sparsetc.packing.base import VOLUME, sides_of
from sparsetc.planner import (
    Best,
    Candidate,
    Method,
    Numbers,
    Problem,
    add_plans,
    cheapest,
    dot_may_form,
    fit,
    in_blocks,
    least_seconds,
    of_whole_axes,
    padded_axes,
    rates_of,
    tiles_of,
)
from sparsetc.support import outside, volume


def stored_whole(problem: Problem, threshold: int, histogram: Tensor) -> int:
    """The population from which tiles are stored with all their positions; the others of `threshold` are bitmaps.

    Bitmaps take fewer bytes, and longer, since every position is expanded (`benchmarks/results/tile_formats.json`): so
    they are what does not fit the memory limit otherwise, the emptiest tiles first, of which they save most.
    """
    positions = prod(sides_of(problem.counts.shape))
    width = 2 if problem.precision == "bf16" else problem.itemsize  # bytes of a value of a tile
    sizes = torch.arange(histogram.numel(), device=histogram.device)
    tiles = torch.where(sizes >= max(1, threshold), histogram // sizes.clamp(min=1), 0)
    bitmaps = tiles * (positions // 8 + sizes * width)
    extra = (tiles * positions * width - bitmaps).clamp(min=0)
    more = torch.flip(torch.cumsum(torch.flip(extra, (0,)), 0), (0,))
    return int((more + bitmaps.sum() > problem.memory).sum())


def tiles_part(problem: Problem, format: str, nnz: int, tiles: int, schedule: Schedule) -> tuple[Part, Statistics]:
    """A part of tiles, and what packing it is expected to give."""
    sides = sides_of(problem.shape)
    groups, rules = groups_of(problem.bound, sides, problem.floating), problem.rules
    most = rules["chained_tiles" if groups.second else "item_tiles"]
    each = min(most, 1 << max(tiles // rules["least_items"], 1).bit_length() - 1)
    if tiles < rules["many_items"] * each:
        each = min(each, most // 2)
    # Tiles of one block of output rows together; positions stored as the dots take them.
    item_nnz = max(each * prod(sides), rules["tile_item_nnz"])
    storage = groups.storage(problem.letters, item_nnz)
    stored = tiles * prod(sides) if format == "dense_tile" else nnz
    part = Part(format, storage, schedule, nnz, label="tiles of many nonzeros")
    chain = max(each, most // 2)  # a program of fewer tiles ends little sooner
    rows = prod([n for m, n in enumerate(tiles_along(problem.shape, sides)) if m in problem.kept])
    split = tiles > each * rows
    return part, Statistics(-(-tiles // each), tiles, stored, nnz, problem.itemsize, chain=chain, split_rows=split)


def one_launch(problem: Problem) -> bool:
    """True if tiles and leftovers share a launch: scalar programs keep enough registers beside dots.

    On an H200 that was faster up to 4 M nonzeros, and beyond where a program's rank is short or values are 16 bits.
    """
    if dot_may_form(problem.bound):  # a matrix for each kept position
        return False
    ranks = max(problem.bound.extents(problem.einsum.axes), default=1)
    short, few = ranks <= 32, problem.nnz < problem.rules["fuse_below"]
    return short and few if problem.precision == "tf32x3" else short or few


def _schedule(problem: Problem, groups: TileGroups, fused: bool) -> Schedule:
    """Ranks and columns that fill a program's registers, and warps to share them; one warp beside scalar programs.

    On an H200 (`benchmarks/results/tile_schedules.json`) tf32 was fastest by few warps, which take the instructions of
    one warp; of tf32x3, which needs three, a group of four warps was.
    """
    if whole_axes := of_whole_axes(problem):
        return whole_axes
    padded, rules = padded_axes(problem), problem.rules
    side = dict(zip(problem.letters, sides_of(problem.shape), strict=True))
    operands = named_operands(problem.bound)[1]
    if any(groups.sampled):  # a dot of dense rows, as long as a side's matrix has room for, times what is stored
        wide = max(prod(side[c] for o in operands if o.name in names for c in o.rows) for names in groups.sampled)
        most = max(MIN_DOT, min(rules["sampled_ranks"], rules["matrix"] // wide))
        blocks = fit({c: max(MIN_DOT, min(n, most)) for c, n in padded.items()}, list(padded), most)
        return in_blocks(problem, blocks, rules["sampled_warps"], stages=2)
    if not groups.first:  # the positions of one letter, by all dense axes, are what a program multiplies and keeps
        positions = volume(side, (*groups.columns, *groups.second))
        width = 4 if problem.floating and problem.itemsize <= 4 else 8
        limit = max(1, rules["elementwise_bytes"] // (positions * width))
        blocks = fit({c: min(n, rules["ranks"]) for c, n in padded.items()}, list(padded), limit)
        return in_blocks(problem, blocks, 1, dot=False, stages=2)
    sides = []  # the dense axes of what each dot contracts with, in their order, and the positions that it contracts
    for letters in filter(None, (groups.first, groups.second)):
        axes = dict.fromkeys(a for o in operands if set(o.rows) & set(letters) for a in o.axes)
        sides.append((axes, max(MIN_DOT, volume(side, letters))))
    if groups.second:
        return _chained(problem, sides, padded)
    most = rules["fused_ranks" if fused or problem.precision == "tf32" else "ranks"]
    (rows, deep), *_ = sides
    beside = outside(padded, rows)  # of what the result is multiplied by once it is summed
    blocks = {c: max(MIN_DOT, min(n, most)) for c, n in padded.items()}
    most_rows = min(most, max(MIN_DOT, _most_elements(problem, 2 if problem.precision == "tf32" else 4) // deep))
    blocks |= fit({c: blocks[c] for c in rows}, list(rows), most_rows, [rows])
    ranks = volume(blocks, rows)
    blocks |= fit({c: blocks[c] for c in beside}, beside, max(1, rules["matrix"] // (MIN_DOT * ranks)))
    matrix = by_precision(rules["fused_matrix"], problem.precision) if fused else rules["matrix"]
    columns = max(MIN_DOT, min(64 if fused else 128, matrix // prod(blocks.values())))
    warps = 4 if ranks >= 64 and problem.precision != "tf32" else 2
    return in_blocks(problem, blocks, 1 if fused else warps, stages=2, columns=columns)


def _chained(problem: Problem, sides: Sequence[tuple[dict[str, None], int]], padded: dict[str, int]) -> Schedule:
    """The schedule of two dots: as many kept positions as the matrices have room for, `columns` being their number.

    On an H200 (`benchmarks/results/ttmc_tiles.json`, rank 32 x 32) 8 positions by 4 warps were fastest in bfloat16, by
    2 in tf32; in tf32x3 4 positions by 2.
    """
    matrix = problem.rules["matrix"] // (2 if problem.precision == "tf32x3" or problem.itemsize > 4 else 1)
    warps = 4 if problem.precision == "bf16" else 2
    blocks = {c: max(MIN_DOT, min(n, problem.rules["fused_ranks"])) for c, n in padded.items()}
    for axes, deep in sides:  # several operands of a side are multiplied together, position by position
        most_rows = max(MIN_DOT, _most_elements(problem, warps) // deep)
        blocks |= fit({c: blocks[c] for c in axes}, list(axes), most_rows, [axes])
    blocks = fit(blocks, list(padded), matrix, [axes for axes, _ in sides])
    positions = max(1, matrix // prod(blocks.values()))
    return in_blocks(problem, blocks, warps, dot=problem.floating, stages=2, columns=positions)


def _most_elements(problem: Problem, warps: int) -> int:
    """Return the elements of a tile that this many warps keep in registers; a float64 takes two registers."""
    return MOST_SUMS * warps * 4 // max(4, problem.itemsize)


THRESHOLDS = tuple(sorted({round(2 ** (n / 2)) for n in range(25)}))
"""Populations tried as a threshold."""


def _considered(problem: Problem, best: Best) -> Iterator[Candidate]:
    """The hybrid by the best threshold, if it may win by a sample: with dots, and with tiles worth making dense."""
    usable = problem.floating and problem.coalesced and not problem.deterministic
    if not usable or not problem.nnz or not groups_of(problem.bound, sides_of(problem.counts.shape)).first:
        return
    if best.allows("hls", 0.0 if best.seconds == inf else _least(problem, best)):
        candidate = by_tiles(problem)
        if any(tiles.nnz for tiles in candidate.expected[:-1]):
            yield candidate


def _least(problem: Problem, best: Best) -> float:
    """Seconds that a hybrid takes at least by a sample, whatever its threshold."""
    profile, rules = problem.profile, problem.rules
    turns = min(rules["item_tiles"], rules["chained_tiles"]) // 2  # of the shortest program
    waits = profile.constants["waits_a_turn"] * turns + profile.constants["first_waits"]
    if (least := profile.launch + waits * profile.wait) >= best.seconds:
        return least
    rates = _rates(problem.of_any_pattern, problem.profile)
    first, *_ = rates
    least = float(first.min())
    if least >= best.seconds:
        return least
    nonzeros, thresholds = tiles_of(problem.counts), np.array(THRESHOLDS)
    tiles = nonzeros / np.arange(nonzeros.size).clip(1)
    below, tiles_below = (np.cumsum(n)[thresholds - 1] for n in (nonzeros, tiles))
    left = (below / nonzeros.sum())[None]
    count = tiles.sum() - tiles_below[None]
    return float(least_seconds(rates, problem, best, count, left, 0 * left, launched=False).min())


@lru_cache
def _rates(problem: Problem, profile: DeviceProfile) -> Numbers:
    """Rates of dense tiles, alone and in a launch with other nonzeros, of any pattern."""
    groups = groups_of(problem.bound, sides_of(problem.shape), problem.floating)
    schedules = [_schedule(problem, groups, fused) for fused in (False, True)]
    return rates_of(problem, [tiles_part(problem, "dense_tile", 1, 1, schedule) for schedule in schedules])[0]


def by_tiles(problem: Problem, threshold: int | None = None) -> Candidate:
    """Tiles of many nonzeros dense, or as bitmaps, by a threshold or the best; what they leave as nonzeros."""
    check_threshold(threshold, 0)
    histogram, rest = problem.counts.tiles(), [coo(problem)]
    # What is not in dense tiles is runs, since it makes short fibers; or fibers, which save matrix products.
    if problem.backend.tensor_cores and problem.floating and len(problem.rest) > 1 and dot_may_form(problem.bound):
        rest.append(fiber(problem, best_leaf(problem)))
    tiles = histogram // torch.arange(VOLUME + 1, device=histogram.device).clamp(min=1)
    below = [(0, *torch.cumsum(counted, 0).tolist()) for counted in (histogram, tiles)]  # n nonzeros, by n
    # The smallest of the thresholds that divide alike, and one that makes nothing dense.
    different = {below[0][least]: least for least in (VOLUME + 1, *reversed(THRESHOLDS))}
    groups, splits = groups_of(problem.bound, sides_of(problem.counts.shape), problem.floating), list[Candidate]()
    schedule_of = cache(lambda fused: _schedule(problem, groups, fused))
    for least in sorted(different.values()) if threshold is None else [threshold]:
        whole = max(least, stored_whole(problem, least, histogram))
        ends = pairwise(min(n, VOLUME + 1) for n in (least, whole, VOLUME + 1))
        bitmaps, dense = ((below[0][end] - below[0][start], below[1][end] - below[1][start]) for start, end in ends)
        held = {"dense_tile": dense} if dense[0] or not bitmaps[0] else {}
        held |= {"bitmap_tile": bitmaps} if bitmaps[0] else {}
        splits += [_split(problem, least, whole, held, leftovers, schedule_of) for leftovers in rest]
    return cheapest(splits, problem)


def _split(
    problem: Problem,
    threshold: int,
    whole: int,
    held: dict[str, tuple[int, int]],
    rest: Candidate,
    schedule_of: Callable[[bool], Schedule],
) -> Candidate:
    """Return the candidate of tiles above a population (whole above another one) and the other nonzeros.

    `held` are how many nonzeros, and how many tiles, each format stores.
    """
    nnz = sum([n for n, _ in held.values()])
    fused = 0 < nnz < problem.nnz and rest.plan.name == "coo" and one_launch(problem)
    each = [tiles_part(problem, format, *held[format], schedule_of(fused)) for format in held]
    tile_parts, expected = zip(*each, strict=True)
    leftovers = replace(rest.plan.parts[0], label="the other nonzeros")
    if fused:  # one launch has one number of warps and of stages
        tiles = tile_parts[0].schedule
        leftovers = replace(leftovers, schedule=replace(leftovers.schedule, warps=tiles.warps, stages=tiles.stages))
    options = (("threshold", threshold),) if len(held) == 1 else (("threshold", threshold), ("whole", whole))
    plan = Plan("hls", (*tile_parts, leftovers), fused, "threshold", options)
    left = rest.expected[0].scaled((problem.nnz - nnz) / max(1, problem.nnz))
    if rest.plan.name == "fiber":  # they are not fewer, but shorter
        left = replace(left, fibers=min(left.nnz, rest.expected[0].fibers))
    return Candidate(plan, (*expected, left))


def plan_hls(threshold: int | None = None) -> Plan:
    """Make the hybrid plan: full tiles are multiplied by matrix units, all other nonzeros one by one.

    Args:
        threshold: nonzeros that a tile needs to be stored as a tile; nonzeros of other tiles are stored as runs or
            fibers. 0 or 1 stores every tile with a nonzero, a number above the volume of a tile none. None lets the
            cost model choose.

    Examples:
        >>> stc.plans.plan_hls(threshold=64)
        Plan('hls', threshold=64)
    """
    check_threshold(threshold, 0)
    return Plan("hls", options=() if threshold is None else (("threshold", threshold),))


add_plans(Method("hls", _considered, by_tiles, ("threshold",), kernels=True))
