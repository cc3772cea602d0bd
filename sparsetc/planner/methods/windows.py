"""``window`` and ``1-sa``: groups of output rows in dense tiles over their columns; rows of poor groups as runs.

In: a `Problem`, and what a request says of the tiles. Out: a `Candidate` of one part or two, which never add to the
same row. Groups are of neighbouring rows (``window``, as in DTC-SpMM and FlashSparse) or of similar ones (``1-sa``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from sparsetc.errors import OutOfMemoryError, PlanError
from sparsetc.formats.windows import Rows, Windowing, populations
from sparsetc.ir.plan import DOTS, F16X3, Part, Plan, Schedule, Storage
from sparsetc.ir.program.operands import MIN_DOT, dense_axes, named_operands
from sparsetc.ir.program.statistics import ZERO, Statistics
from sparsetc.planner.candidate import CPU_ITEM_NNZ, Candidate
from sparsetc.planner.method import OperandMethod, in_order, rounded
from sparsetc.planner.methods.rows import Rows as ShortRows
from sparsetc.planner.methods.rows import coo, rows
from sparsetc.planner.pricing import costs
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
    precision: str = ""
    """The precision of dots, where it is not the one asked for."""


SHAPES = {
    "tf32x3": (
        Shape(16, 32, 128, 2),
        Shape(16, 64, 128, 2),
        Shape(64, 32, 64, 4),
        Shape(64, 64, 64, 4),
        Shape(128, 64, 64, 4),
    ),
    "tf32": (
        Shape(16, 32, 128, 2),
        Shape(16, 64, 128, 2),
        Shape(32, 64, 128, 2),
        Shape(64, 64, 128, 2),
        Shape(128, 64, 64, 2),
    ),
    "bf16": (
        Shape(16, 64, 128, 2),
        Shape(32, 64, 128, 2),
        Shape(64, 64, 128, 4),
        Shape(64, 128, 64, 4),
        Shape(128, 64, 128, 4),
    ),
    "ieee": (Shape(16, 16, 64, 4), Shape(32, 16, 64, 4)),
    F16X3: (
        Shape(16, 32, 64, 2, F16X3),
        Shape(16, 64, 64, 2, F16X3),
        Shape(32, 64, 64, 4, F16X3),
        Shape(64, 64, 64, 4, F16X3),
        Shape(128, 64, 64, 4, F16X3),
    ),
}
"""What is considered, by the precision of dots: together within 0.2 % (tf32x3), 4 % (tf32) and 3 % (bf16) of the
fastest of 105 shapes with either operand left, by geometric mean of 9, 9 and 24 cases; 22 % at worst (H200,
`benchmarks/results/windows.json`). Of tf32, four warps or more take the instruction that wants the dense operand in the
other order, and up to six times as long. Those in halves are together within 0.3 % of the fastest of 23, by geometric
mean of 21 cases (`benchmarks/results/windows_halves.json`)."""
TAUS, STRIP = (20, 40, 60, 80), 64
"""Similarity that rows of a group have at least, in percent, and the columns of strips by which they are compared."""
USUAL, MOST_GROUPED, MANY = (40, 60), 8_000_000, 1 << 16
"""Similarities that ``"auto"`` considers; the nonzeros whose rows it groups, at most, in all, since grouping takes
longer than all else that planning does (H200: 0.05 to 0.26 s of 0.7 to 3.1 M, `benchmarks/results/grouping.json`); and
those from which it considers more than the first, as planning then takes twice as long."""
LEAST_FILL, MOST_STORED, MOST_BYTES = 3, 32, 1 << 30
"""Percent of a tile's positions that may hold nonzeros, at least, where ``"auto"`` looks at windows; values that it
stores a nonzero, and bytes of values in all, at most."""
FILLS = (0, 2, 4, 8, 16, 32)
"""Percent of a tile's positions that hold nonzeros, at least, where a group's rows are not left to runs."""
PROGRAMS = 2048
"""Programs that a part is cut into, if it has the tiles."""
LEAST_TILES = 8
"""Tiles of a work item that is cut, at least."""


def _nbytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes of the values that a candidate's tiles store."""
    return candidate.expected[0].stored * problem.itemsize


def _worthwhile(problem: Problem) -> Callable[[Candidate], bool]:
    """Whether what a candidate's tiles store is within the bounds of what ``"auto"`` considers."""

    def within(candidate: Candidate) -> bool:
        tiles = candidate.expected[0]
        return tiles.stored <= MOST_STORED * tiles.nnz and _nbytes(problem, candidate) <= MOST_BYTES

    return within


def _fitting(problem: Problem, found: Iterable[Candidate]) -> Iterator[Candidate]:
    """The candidates whose tiles are within the memory limit."""
    return (split for split in found if _nbytes(problem, split) <= problem.memory)


class Windows(OperandMethod):
    """Windows where they are filled well enough, and runs elsewhere."""

    def __init__(self, name: str, taus: tuple[int, ...], usual: tuple[int, ...]) -> None:
        """A method of this name, which considers groups of these similarities; ``"auto"`` only the usual ones."""
        self.name, self.taus, self.usual = name, taus, usual

    def candidates(self, problem: Problem, counts: Counts) -> Iterator[Candidate]:
        """The best split for each shape of tile, on a GPU, where tiles make matrix products."""
        usable = problem.backend == "triton" and problem.floating and problem.coalesced
        if not usable or not counts.nnz or not problem.kept or not problem.rest or _products_of_rows(problem):
            return
        columns, grouped = counts.distinct(problem.rest), MOST_GROUPED // counts.nnz if problem.order == 2 else 0
        grouped = grouped if counts.nnz >= MANY else min(grouped, 1)
        for tau in (tau for n, tau in enumerate(self.usual) if n < grouped or not tau):
            for shape in (*_shapes(problem), *_in_halves(problem)):
                # A column of a window holds no more nonzeros than columns do on average, were all rows one window.
                if 100 * counts.nnz >= LEAST_FILL * shape.height * columns:
                    found = splits(problem, counts, self.name, Tiling(shape, tau))
                    yield from cheapest(problem, filter(_worthwhile(problem), _fitting(problem, found)))

    def candidate(self, problem: Problem, counts: Counts, request: Plan) -> Candidate:
        """What the request says, and the best of what it leaves open, among what the memory limit has room for."""
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
        for split in cheapest(problem, _fitting(problem, found)):
            return split
        least = min(_nbytes(problem, split) for split in found)
        raise OutOfMemoryError(
            f'tiles of plan "{self.name}" would take {least:,} bytes, the limit is {problem.memory:,}; raise it with '
            "sparsetc.options(memory_limit=...), or leave more rows to runs by a higher threshold"
        )


def _shapes(problem: Problem) -> tuple[Shape, ...]:
    """The shapes for a precision; values of 16 bits are multiplied as they are."""
    return SHAPES["bf16" if problem.itemsize == 2 else problem.precision]


def _in_halves(problem: Problem) -> tuple[Shape, ...]:
    """The shapes for float32 in halves, where that is as exact as what is asked for."""
    return SHAPES[F16X3] if problem.halves and problem.precision == DOTS["highest"] else ()


@dataclass(frozen=True)
class Tiling:
    """A shape of tile, and how rows are grouped."""

    shape: Shape
    tau: int = 0
    strip: int = 0

    @property
    def params(self) -> tuple[tuple[str, int], ...]:
        """What a storage says of the tiles and groups."""
        similar = (("strip", self.strip or STRIP), ("tau", self.tau)) if self.tau else ()
        return (("height", self.shape.height), *similar, ("width", self.shape.width))


def tilings(problem: Problem, named: dict[str, Any], taus: Iterable[int]) -> Iterator[Tiling]:
    """What a request leaves open: shapes of the height and the width that it names, and similarities."""
    ways = (_shapes(problem), _in_halves(problem) if named.get("halves", True) else ())
    shapes = [shape for own in ways if own for shape in _of_height(own, named.get("height"))]
    for tau in (named["tau"],) if "tau" in named else taus:
        for shape in shapes:
            yield Tiling(replace(shape, width=named.get("width", shape.width)), tau, named.get("strip", 0))


def _of_height(shapes: Sequence[Shape], height: int | None) -> Sequence[Shape]:
    """The shapes, or that of the nearest height, by the height that is named."""
    if height is None:
        return shapes
    return [replace(min(shapes, key=lambda shape: abs(shape.height - height)), height=height)]


def cheapest(problem: Problem, found: Iterable[Candidate]) -> Iterator[Candidate]:
    """The candidate that is expected to be fastest, if there is one."""
    each = list(found)

    def seconds(split: Candidate) -> float:
        return sum(in_order(split, problem)[1])  # which shape is best depends on the order of the grid

    if each:
        yield min(each, key=lambda split: seconds(rounded(split, problem, seconds)))


def splits(
    problem: Problem, counts: Counts, name: str, tiling: Tiling, threshold: int | None = None
) -> Iterator[Candidate]:
    """Windows of one kind, by each fill from which a group's rows are taken, or by a number of nonzeros a tile."""
    storage = Storage(item=problem.kept, lane=problem.rest, params=tiling.params)
    windowing = Windowing.of(storage)
    if problem.backend == "triton" and not _multiplies(problem, storage, tiling.shape):
        return
    held = counted(counts, windowing)
    volume = windowing.height * windowing.width
    tried = dict.fromkeys(volume * fill // 100 for fill in FILLS) if threshold is None else [threshold]
    for least in tried:
        own = held.filled(least)
        if own.tiles.numel() or threshold is not None or not counts.nnz:  # what is named may leave all to runs
            for windows, expected in _parts(problem, storage, tiling.shape, own):
                yield _beside_runs(problem, counts, name, windows, expected, least)


def _products_of_rows(problem: Problem) -> bool:
    """Whether columns gather rows of several operands, whose products take longer than the cost model knows.

    On an H200 MTTKRP by windows was 1.1 times as fast as the best other plan at rank 128 in float32 on guanine_TEvv_3d,
    of which windows of 16 rows are a quarter full, and up to 3.8 times as slow elsewhere.
    """
    columns = {problem.letters[m] for m in problem.rest}
    return sum(bool(columns & {*o.rows}) for o in named_operands(problem.bound)[1]) > 1


def _multiplies(problem: Problem, storage: Storage, shape: Shape) -> bool:
    """Whether the tiles make matrix products: what the columns gather does not vary along the rows.

    In halves it must be rows of one operand, else that is an error, of which this is no plan.
    """
    part, none = Part("window", storage, schedule_of(problem, shape)), Statistics(0, 0, 0, 0, problem.itemsize)
    try:
        (cost,) = costs(Candidate(Plan("window", (part,)), (none,)), problem)
    except PlanError:
        if shape.precision != F16X3:
            raise
        return False
    return cost.dot != ZERO


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
        _, nonzeros, tiles = populations(coords, shape, windowing, Rows.of(coords, shape, windowing, counts.cache))
        return Populations(nonzeros.cpu(), tiles.cpu())

    return counts.once(("windows", windowing), count)


def _parts(problem: Problem, storage: Storage, shape: Shape, held: Populations) -> Iterator[tuple[Part, Statistics]]:
    """Groups as a part: whole, and cut where there are few programs, when what items of a row find is added."""
    schedule, volume = schedule_of(problem, shape), shape.height * shape.width
    sizes = {c: problem.bound.by_index[c] for c in dense_axes(problem.bound)}
    programs = prod(-(-size // schedule.block(c)) for c, size in sizes.items())
    tiles, nnz = int(held.tiles.sum()), int(held.nonzeros.sum())
    longest = int(held.tiles.max()) if tiles else 0

    def part(each: int, items: int) -> tuple[Part, Statistics]:
        """Groups in items of so many tiles; 0 for as many as each has."""
        stored = replace(storage, max_item_nnz=each * volume)
        expected = Statistics(
            items, tiles, tiles * volume, nnz, problem.itemsize, chain=each or longest, split_rows=each > 0
        )
        return Part("window", stored, schedule, nnz, label="windows"), expected

    each = max(LEAST_TILES, -(-tiles * programs // PROGRAMS))
    if problem.backend != "triton":
        each = max(1, CPU_ITEM_NNZ // volume)
    yield part(0, held.tiles.numel())
    if longest > each and not problem.deterministic:
        yield part(each, int((-(-held.tiles // each)).sum()))


def _beside_runs(
    problem: Problem, counts: Counts, name: str, windows: Part, expected: Statistics, least: int
) -> Candidate:
    """Windows, and what they leave as short rows a lane each, or as runs."""
    if expected.nnz == counts.nnz:
        return Candidate(Plan(name, (windows,)), (expected,))
    rest = _leftovers(problem, counts)
    options = (("threshold", least), *windows.storage.params)
    parts = (windows, replace(rest.plan.parts[0], label="the other rows"))
    left = rest.expected[0].scaled((counts.nnz - expected.nnz) / counts.nnz)
    return Candidate(Plan(name, parts, False, "row_similarity", options), (expected, left))


def _leftovers(problem: Problem, counts: Counts) -> Candidate:
    """Runs, or a row a lane where rows are short, or where no sum may be cut since it must have one order."""
    if problem.ordered:
        return rows(problem, counts)
    return next(iter(ShortRows().candidates(problem, counts)), None) or coo(problem, counts)


def schedule_of(problem: Problem, shape: Shape) -> Schedule:
    """How a part of windows runs."""
    sizes = {c: problem.bound.by_index[c] for c in dense_axes(problem.bound)}
    padded = {c: 1 << max(n - 1, 0).bit_length() for c, n in sizes.items()}
    if problem.backend != "triton":
        return Schedule(1, tuple(padded.items()), problem.floating, problem.precision)
    blocks = fit({c: max(MIN_DOT, min(n, shape.columns)) for c, n in padded.items()}, list(padded), shape.columns)
    return Schedule(shape.warps, tuple(blocks.items()), True, shape.precision or problem.precision)
