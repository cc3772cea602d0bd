"""``hls``: well-filled tiles on the tensor cores, the other nonzeros as runs or fibers, in one result (HLSTO).

In: a `Problem`, and the population from which a tile is dense, or none to take what the cost model finds best. Out: a
`Candidate` of two parts or three, which share one launch where that pays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from sparsetc.formats.tiles import VOLUME, sides_of
from sparsetc.ir.default_tree.by_groups import groups_of
from sparsetc.ir.plan import Plan
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.method import Hybrid, OperandMethod
from sparsetc.planner.methods.fibers import best_leaf, fiber
from sparsetc.planner.methods.runs import coo
from sparsetc.planner.methods.tiles import one_launch, populations, stored_whole, tiles_part
from sparsetc.planner.pricing import price
from sparsetc.planner.problem import Problem
from sparsetc.planner.requests import check_threshold
from sparsetc.planner.rounding import rounded
from sparsetc.planner.schedule import dot_axes
from sparsetc.planner.statistics import Counts

THRESHOLDS = tuple(sorted({round(2 ** (n / 2)) for n in range(25)}))
"""Populations tried as a threshold."""


class ByTiles(OperandMethod, Hybrid[Problem]):
    """Tiles of many nonzeros dense, or as bitmaps; what they leave as nonzeros."""

    name = "hls"

    def candidates(self, problem: Problem, counts: Counts) -> Iterator[Candidate]:
        """The hybrid by the best threshold: on a GPU, with dots, and with tiles worth making dense."""
        usable = problem.backend == "triton" and problem.floating and problem.coalesced and not problem.deterministic
        if usable and counts.nnz and groups_of(problem.bound, sides_of(counts.shape)).dot:
            found = self.candidate(problem, counts, Plan(self.name))
            if any(tiles.nnz for tiles in found.expected[:-1]):
                yield found

    def candidate(self, problem: Problem, counts: Counts, request: Plan) -> Candidate:
        """The hybrid by the threshold that the request names, or by the best."""
        threshold = request.option("threshold", None)
        check_threshold(threshold, 0)
        splits = _splits(problem, counts, None if threshold is None else [threshold])
        if len(splits) == 1:
            return splits[0]

        def seconds(split: Candidate) -> float:
            return sum(price(split, problem))

        return self.best(problem, splits, lambda split: seconds(rounded(split, problem, seconds)))


def _splits(problem: Problem, counts: Counts, thresholds: Sequence[int] | None = None) -> list[Candidate]:
    """The hybrid by each threshold, or by each that is worth trying, and each way to take what tiles leave."""
    histogram, rest = populations(counts), _leftovers(problem, counts)
    held, made = Held.of(histogram), []
    for least in _worth_trying(histogram) if thresholds is None else thresholds:
        whole = max(least, stored_whole(problem, counts, least, histogram))
        made += [_split(problem, counts, least, whole, held, leftovers) for leftovers in rest]
    return made


def _leftovers(problem: Problem, counts: Counts) -> list[Candidate]:
    """Plans of what is not in dense tiles: runs, since it makes short fibers; or fibers, which save matrix products."""
    if problem.backend != "triton" or not problem.floating or len(problem.rest) < 2 or not dot_axes(problem.bound):
        return [coo(problem, counts)]
    return [coo(problem, counts), fiber(problem, counts, best_leaf(problem, counts))]


def _worth_trying(histogram: torch.Tensor) -> list[int]:
    """Thresholds that make different parts: the smallest of those that deal alike, and one that makes nothing dense."""
    below = torch.cumsum(histogram, 0).tolist()
    found: dict[int, int] = {}
    for t in (*THRESHOLDS, VOLUME + 1):
        found.setdefault(below[min(t, VOLUME + 1) - 1], t)
    return list(found.values())


def _split(
    problem: Problem, counts: Counts, threshold: int, whole: int, populations: Held, rest: Candidate
) -> Candidate:
    """Tiles from a population on, those from another on stored whole, and what is left."""
    populated = {"dense_tile": (whole, VOLUME + 1), "bitmap_tile": (threshold, whole)}
    held = {format: populations.between(*bounds) for format, bounds in populated.items()}
    nnz = sum(n for n, _ in held.values())
    fused = 0 < nnz < counts.nnz and rest.plan.name == "coo" and one_launch(problem, counts.nnz)
    if held["dense_tile"][0] or not nnz:
        held = held if held["bitmap_tile"][0] else {"dense_tile": held["dense_tile"]}
    else:
        del held["dense_tile"]
    made = [tiles_part(problem, counts, format, *held[format], fused) for format in held]
    leftovers = replace(rest.plan.parts[0], label="the other nonzeros")
    if fused:  # one launch has one number of warps and of stages
        tiles = made[0][0].schedule
        leftovers = replace(leftovers, schedule=replace(leftovers.schedule, warps=tiles.warps, stages=tiles.stages))
    options = (("threshold", threshold),) if len(held) == 1 else (("threshold", threshold), ("whole", whole))
    plan = Plan("hls", (*(part for part, _ in made), leftovers), fused, "threshold", options)
    left = rest.expected[0].scaled((counts.nnz - nnz) / max(1, counts.nnz))
    if rest.plan.name == "fiber":  # they are not fewer, but shorter
        left = replace(left, fibers=min(left.nnz, rest.expected[0].fibers))
    return Candidate(plan, (*(expected for _, expected in made), left))


@dataclass(frozen=True)
class Held:
    """How many nonzeros, and how many tiles, there are in tiles of fewer than n nonzeros: at place n of a list each."""

    nonzeros: tuple[int, ...]
    tiles: tuple[int, ...]

    @classmethod
    def of(cls, histogram: torch.Tensor) -> Held:
        """Count from the number of nonzeros of each population."""
        tiles = histogram // torch.arange(histogram.numel(), device=histogram.device).clamp(min=1)
        below = (torch.cumsum(counted, 0).tolist() for counted in (histogram, tiles))
        nonzeros, whole = ((0, *counted) for counted in below)
        return cls(nonzeros, whole)

    def between(self, least: int, below: int) -> tuple[int, int]:
        """(nonzeros, tiles) of the tiles that hold from `least` up to, not including, `below` nonzeros."""
        last = len(self.tiles) - 1
        first, end = min(max(1, least), last), min(below, last)
        if first >= end:
            return 0, 0
        return self.nonzeros[end] - self.nonzeros[first], self.tiles[end] - self.tiles[first]
