"""``window`` and ``1-sa``: groups of output rows in dense tiles over their columns; rows of poor groups as runs.

In: a `Problem`, and what a request says of a tile. Out: a `Candidate` of one part or two, which never add to the same
row. Groups are of neighbouring rows (``window``, DTC-SpMM), or of similar ones (``1-sa``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from sparsetc.errors import PlanError
from sparsetc.formats.windows import Shape, populations
from sparsetc.ir.default_tree.groups import groups_of
from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.ir.program.cost import Statistics
from sparsetc.ir.program.operands import MIN_DOT, dense_axes
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.method import OperandMethod
from sparsetc.planner.methods.rows import Rows
from sparsetc.planner.methods.runs import coo
from sparsetc.planner.pricing import Prices
from sparsetc.planner.problem import Problem
from sparsetc.planner.schedule import fit
from sparsetc.planner.statistics import Counts

HEIGHTS, WIDTH = (16, 32, 64), 32
"""Rows and columns of a tile."""
TAUS = (20, 40, 60, 80)
"""Similarity, in percent, that rows of a group have at least."""
FILLS = (0, 2, 4, 8, 16, 32)
"""Percent of a tile's positions that hold nonzeros, at least, where its rows are not left to runs."""
PROGRAMS = 2048
"""Programs that a part is cut into, if it has the tiles."""
LEAST_TILES = 4
"""Tiles of a work item that is cut, at least."""
COLUMNS = 128
"""Elements of the dense axes that a program takes."""


@dataclass(frozen=True)
class Populations:
    """What windows of one kind hold, on the CPU."""

    nonzeros: torch.Tensor
    """(groups,)."""
    tiles: torch.Tensor
    """(groups,)."""

    def filled(self, threshold: int) -> Populations:
        """The groups that are not left to runs."""
        own = self.nonzeros >= threshold * self.tiles
        return Populations(self.nonzeros[own], self.tiles[own])


class Windows(OperandMethod):
    """Windows where they are filled well enough, and runs."""

    def __init__(self, name: str, taus: tuple[int, ...]) -> None:
        self.name, self.taus = name, taus

    def candidates(self, problem: Problem, counts: Counts) -> Iterator[Candidate]:
        """The best split for each height, on a GPU, of a matrix whose rows the output keeps."""
        usable = problem.backend == "triton" and problem.floating and problem.coalesced and problem.order == 2
        if not usable or not counts.nnz or len(problem.kept) != 1 or problem.sparse_output:
            return
        prices = Prices(problem)
        for tau in self.taus:
            for height in HEIGHTS:
                found = list(splits(problem, counts, self.name, Tile(height, WIDTH, tau)))
                if found:
                    yield min(found, key=lambda split: sum(prices(split)))

    def candidate(self, problem: Problem, counts: Counts, request: Plan) -> Candidate:
        """What the request says, and the best of what it leaves open."""
        if not problem.kept or not problem.rest:
            raise PlanError(f'plan "{self.name}" needs an output with some, not all, of the sparse operand\'s modes')
        named = dict(request.options)
        heights = (named["height"],) if "height" in named else HEIGHTS
        taus = (named["tau"],) if "tau" in named else self.taus
        threshold, width = named.get("threshold", 0), named.get("width", WIDTH)
        prices, found = Prices(problem), []
        for tau in taus:
            for height in heights:
                found += splits(problem, counts, self.name, Tile(height, width, tau, named.get("strip", width)), threshold)
        if not found:
            raise PlanError(f'plan "{self.name}" needs a matrix product for its tiles, on this tensor there is none')
        return min(found, key=lambda split: sum(prices(split)))


@dataclass(frozen=True)
class Tile:
    """The parameters of windows."""

    height: int
    width: int
    tau: int = 0
    strip: int = WIDTH

    @property
    def params(self) -> tuple[tuple[str, int], ...]:
        """As a storage has them."""
        similar = (("strip", self.strip), ("tau", self.tau)) if self.tau else ()
        return (("height", self.height), *similar, ("width", self.width))


def splits(
    problem: Problem, counts: Counts, name: str, tile: Tile, threshold: int | None = None
) -> Iterator[Candidate]:
    """Windows of one kind, by each fill from which they take a group's rows."""
    row = problem.kept[0]
    storage = Storage(item=(row,), lane=tuple(m for m in range(problem.order) if m != row), params=tile.params)
    s = Shape.of(storage)
    if not groups_of(problem.bound, s.sides(problem.order)).dot and problem.backend == "triton":
        return
    held = counted(counts, s)
    tried = dict.fromkeys(tile.height * tile.width * fill // 100 for fill in FILLS) if threshold is None else [threshold]
    for least in tried:
        own = held.filled(least)
        if own.tiles.numel():
            yield _split(problem, counts, name, storage, row, least, own)


def counted(counts: Counts, s: Shape) -> Populations:
    """What the windows hold, counted once."""
    return counts.once(("windows", s), lambda: Populations(*(n.cpu() for n in populations(counts.coords, counts.shape, s)[1:])))


def _split(
    problem: Problem, counts: Counts, name: str, storage: Storage, row: int, least: int, own: Populations
) -> Candidate:
    nnz, volume = int(own.nonzeros.sum()), prod(n for name, n in storage.params if name in ("height", "width"))
    schedule = schedule_of(problem)
    sizes = {c: problem.bound.by_index[c] for c in dense_axes(problem.bound)}
    programs = prod(-(-sizes[c] // schedule.block(c)) for c in sizes)
    tiles, longest = int(own.tiles.sum()), int(own.tiles.max())
    each = max(LEAST_TILES, -(-tiles * programs // PROGRAMS))
    cut = longest > each and not problem.deterministic
    items = int((-(-own.tiles // each)).sum()) if cut else own.tiles.numel()
    storage = replace(storage, max_item_nnz=each * volume if cut else 0)
    part = Part("window", storage, schedule, nnz, label="windows")
    chain = min(each, longest) if cut else longest
    expected = Statistics(items, tiles, tiles * volume, nnz, problem.itemsize, chain=chain, split_rows=cut)
    if nnz == counts.nnz:
        return Candidate(Plan(name, (part,)), (expected,))
    rest = _leftovers(problem, counts)
    options = (("mode", row), *storage.params, ("threshold", least))
    plan = Plan(name, (part, replace(rest.plan.parts[0], label="the other rows")), False, "windows", options)
    return Candidate(plan, (expected, rest.expected[0].scaled((counts.nnz - nnz) / counts.nnz)))


def _leftovers(problem: Problem, counts: Counts) -> Candidate:
    short = list(Rows().candidates(problem, counts))
    return short[0] if short else coo(problem, counts)


def schedule_of(problem: Problem) -> Schedule:
    """How the tiles of windows run."""
    sizes = {c: problem.bound.by_index[c] for c in dense_axes(problem.bound)}
    padded = {c: 1 << max(n - 1, 0).bit_length() for c, n in sizes.items()}
    if problem.backend != "triton":
        return Schedule(1, tuple(padded.items()), problem.floating, problem.precision)
    blocks = fit({c: max(MIN_DOT, min(n, COLUMNS)) for c, n in padded.items()}, list(padded), COLUMNS)
    return Schedule(4, tuple(blocks.items()), True, problem.precision, stages=3)
