"""``window`` and ``1-sa``: groups of output rows in dense tiles over their columns; rows of poor groups as runs.

In: a `Problem`, and what a request says of the tiles. Out: a `Candidate` of one part or two, which never add to the
same row. Groups are of neighbouring rows (``window``, as in DTC-SpMM and FlashSparse) or of similar ones (``1-sa``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch

from sparsetc.errors import PlanError
from sparsetc.formats.windows import Windowing, populations, similar_rows
from sparsetc.ir.default_tree.groups import groups_of
from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.ir.program.cost import Statistics
from sparsetc.ir.program.operands import MIN_DOT, dense_axes
from sparsetc.planner.candidate import CPU_ITEM_NNZ, Candidate
from sparsetc.planner.method import OperandMethod
from sparsetc.planner.methods.rows import Rows
from sparsetc.planner.methods.runs import coo
from sparsetc.planner.pricing import Prices
from sparsetc.planner.problem import Problem
from sparsetc.planner.requests import check_windows
from sparsetc.planner.schedule import fit
from sparsetc.planner.statistics import Counts

# Measurements behind these numbers: benchmarks/results/windows.json.


@dataclass(frozen=True)
class Shape:
    """A tile, and how a program goes over tiles."""

    height: int
    width: int
    columns: int
    """Elements of the dense axes that a program takes."""
    warps: int


SHAPES = {
    "tf32x3": (Shape(16, 32, 128, 4), Shape(32, 32, 128, 4), Shape(64, 32, 128, 4)),
    "tf32": (Shape(16, 32, 128, 2), Shape(32, 32, 64, 2), Shape(64, 32, 64, 2)),
    "bf16": (Shape(16, 32, 64, 2), Shape(32, 32, 128, 2), Shape(64, 64, 128, 4)),
    "ieee": (Shape(16, 16, 64, 4), Shape(32, 16, 64, 4)),
}
"""What is considered, by the precision of dots. Of tf32, four warps or more take the instruction that wants the dense
operand in the other order, and up to six times as long."""
TAUS, STRIP = (20, 40, 60, 80), 64
"""Similarity that rows of a group have at least, in percent, and the columns of strips by which they are compared."""
USUAL = (40,)
"""Similarities that ``"auto"`` considers: grouping takes longer than all else that planning does."""
FILLS = (0, 2, 4, 8, 16, 32)
"""Percent of a tile's positions that hold nonzeros, at least, where a group's rows are not left to runs."""
PROGRAMS = 2048
"""Programs that a part is cut into, if it has the tiles."""
LEAST_TILES = 8
"""Tiles of a work item that is cut, at least."""


class Windows(OperandMethod):
    """Windows where they are filled well enough, and runs elsewhere."""

    def __init__(self, name: str, taus: tuple[int, ...], usual: tuple[int, ...]) -> None:
        """A method of this name, which considers groups of these similarities; ``"auto"`` only the usual ones."""
        self.name, self.taus, self.usual = name, taus, usual

    def candidates(self, problem: Problem, counts: Counts) -> Iterator[Candidate]:
        """The best split for each shape of tile, on a GPU, of a matrix whose rows the output keeps."""
        usable = problem.backend == "triton" and problem.floating and problem.coalesced and not problem.sparse_output
        if usable and counts.nnz and problem.order == 2 and len(problem.kept) == 1:
            for tau in self.usual:
                for shape in shapes_of(problem):
                    found = splits(problem, counts, self.name, Tiling(shape, tau))
                    yield from cheapest(problem, (split for split in found if fits(problem, split)))

    def candidate(self, problem: Problem, counts: Counts, request: Plan) -> Candidate:
        """What the request says, and the best of what it leaves open."""
        if not problem.kept or not problem.rest:
            raise PlanError(f'plan "{self.name}" needs an output with some, not all, of the sparse operand\'s modes')
        check_windows(dict(request.options))
        found = [
            split
            for tiling in tilings(problem, dict(request.options), self.taus)
            for split in splits(problem, counts, self.name, tiling, request.option("threshold", None))
        ]
        if not found:
            raise PlanError(f'plan "{self.name}" needs a matrix product, and finds none in "{problem.bound.einsum}"')
        return next(iter(cheapest(problem, found)))


def shapes_of(problem: Problem) -> tuple[Shape, ...]:
    """The shapes for a precision; values of 16 bits are multiplied as they are."""
    return SHAPES["bf16" if problem.itemsize == 2 else problem.precision]


@dataclass(frozen=True)
class Tiling:
    """A shape of tile, and how rows are grouped."""

    shape: Shape
    tau: int = 0
    strip: int = 0

    @property
    def params(self) -> tuple[tuple[str, int], ...]:
        """As a storage has them."""
        similar = (("strip", self.strip or STRIP), ("tau", self.tau)) if self.tau else ()
        return (("height", self.shape.height), *similar, ("width", self.shape.width))


def tilings(problem: Problem, named: dict[str, Any], taus: Iterable[int]) -> Iterator[Tiling]:
    """What a request leaves open: shapes of the height and the width that it names, and similarities."""
    shapes = shapes_of(problem)
    if "height" in named:
        near = min(shapes, key=lambda shape: abs(shape.height - named["height"]))
        shapes = (replace(near, height=named["height"]),)
    for tau in (named["tau"],) if "tau" in named else taus:
        for shape in shapes:
            yield Tiling(replace(shape, width=named.get("width", shape.width)), tau, named.get("strip", 0))


def fits(problem: Problem, split: Candidate) -> bool:
    """Whether the windows are within the memory that stored tiles may take."""
    return problem.memory is None or split.expected[0].stored * problem.itemsize <= problem.memory


def cheapest(problem: Problem, found: Iterable[Candidate]) -> Iterator[Candidate]:
    """The candidate that is expected to be fastest, if there is one."""
    prices, each = Prices(problem), list(found)
    if each:
        yield min(each, key=lambda split: sum(prices(split)))


def splits(
    problem: Problem, counts: Counts, name: str, tiling: Tiling, threshold: int | None = None
) -> Iterator[Candidate]:
    """Windows of one kind, by each fill from which a group's rows are taken, or by a number of nonzeros a tile."""
    storage = storage_of(problem, tiling)
    windowing = Windowing.of(storage)
    if problem.backend == "triton" and not groups_of(problem.bound, windowing.sides(problem.order)).dot:
        return
    held = counted(counts, windowing)
    volume = windowing.height * windowing.width
    tried = dict.fromkeys(volume * fill // 100 for fill in FILLS) if threshold is None else [threshold]
    for least in tried:
        own = held.filled(least)
        if own.tiles.numel() or threshold is not None or not counts.nnz:  # what is named may leave all to runs
            windows, expected = _part(problem, storage, tiling.shape, own)
            yield _beside_runs(problem, counts, name, windows, expected, least)


def storage_of(problem: Problem, tiling: Tiling) -> Storage:
    """Tiles of a kept mode and a summed one, the first of each that a dot keeps and contracts: not those of a batch."""
    found = []
    for row, column in product(problem.kept, reversed(problem.rest)):
        others = tuple(m for m in range(problem.order) if m not in (row, column))
        storage = Storage(item=(row,), lane=(*others, column), params=tiling.params)
        groups = groups_of(problem.bound, Windowing.of(storage).sides(problem.order))
        dealt = (problem.letters[row] in groups.columns) + (problem.letters[column] in groups.contracted)
        found.append((groups.dot, dealt, storage))
    return max(found, key=lambda f: f[:2])[-1]


@dataclass(frozen=True)
class Populations:
    """What the groups of one kind hold, on the CPU."""

    nonzeros: torch.Tensor
    """(groups,)."""
    tiles: torch.Tensor
    """(groups,)."""

    def filled(self, threshold: int) -> Populations:
        """The groups whose tiles hold at least so many nonzeros on average."""
        own = self.nonzeros // self.tiles >= threshold
        return Populations(self.nonzeros[own], self.tiles[own])


def counted(counts: Counts, windowing: Windowing) -> Populations:
    """What the groups hold, counted once."""
    coords, shape = counts.coords, counts.shape

    def count() -> Populations:
        key = ("similar rows", windowing.row, windowing.strip, windowing.tau)  # whatever the tiles
        similar = counts.once(key, lambda: similar_rows(coords, shape, windowing)) if windowing.tau else None
        _, nonzeros, tiles = populations(coords, shape, windowing, similar)
        return Populations(nonzeros.cpu(), tiles.cpu())

    return counts.once(("windows", windowing), count)


def _part(problem: Problem, storage: Storage, shape: Shape, held: Populations) -> tuple[Part, Statistics]:
    """Groups as a part; long ones are cut where there are few programs, and their results added."""
    schedule, volume = schedule_of(problem, shape), shape.height * shape.width
    sizes = {c: problem.bound.by_index[c] for c in dense_axes(problem.bound)}
    programs = prod(-(-size // schedule.block(c)) for c, size in sizes.items())
    tiles, nnz = int(held.tiles.sum()), int(held.nonzeros.sum())
    longest = int(held.tiles.max()) if tiles else 0
    each = max(LEAST_TILES, -(-tiles * programs // PROGRAMS))
    if problem.backend != "triton":
        each = max(1, CPU_ITEM_NNZ // volume)
    cut = longest > each and not problem.deterministic
    items = int((-(-held.tiles // each)).sum()) if cut else held.tiles.numel()
    part = Part("window", replace(storage, max_item_nnz=each * volume if cut else 0), schedule, nnz, label="windows")
    chain = min(each, longest) if cut else longest
    return part, Statistics(items, tiles, tiles * volume, nnz, problem.itemsize, chain=chain, split_rows=cut)


def _beside_runs(
    problem: Problem, counts: Counts, name: str, windows: Part, expected: Statistics, least: int
) -> Candidate:
    """Windows, and what they leave as short rows a lane each, or as runs."""
    if expected.nnz == counts.nnz:
        return Candidate(Plan(name, (windows,)), (expected,))
    rest = next(iter(Rows().candidates(problem, counts)), None) or coo(problem, counts)
    modes = (("mode", windows.storage.item[0]), ("column", windows.storage.lane[-1]))
    options = (*modes, ("threshold", least), *windows.storage.params)
    parts = (windows, replace(rest.plan.parts[0], label="the other rows"))
    left = rest.expected[0].scaled((counts.nnz - expected.nnz) / counts.nnz)
    return Candidate(Plan(name, parts, False, "windows", options), (expected, left))


def schedule_of(problem: Problem, shape: Shape) -> Schedule:
    """How a part of windows runs."""
    sizes = {c: problem.bound.by_index[c] for c in dense_axes(problem.bound)}
    padded = {c: 1 << max(n - 1, 0).bit_length() for c, n in sizes.items()}
    if problem.backend != "triton":
        return Schedule(1, tuple(padded.items()), problem.floating, problem.precision)
    blocks = fit({c: max(MIN_DOT, min(n, shape.columns)) for c, n in padded.items()}, list(padded), shape.columns)
    return Schedule(shape.warps, tuple(blocks.items()), True, problem.precision)
