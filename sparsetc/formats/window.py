"""``window`` and ``1-sa``: tiles over the columns of groups of rows, and other rows as runs (1-SA).

In: a `Problem`, and the options that a request names. Out: a `Candidate` of windows, of neighbouring rows or of rows by
similarity, and of other rows as runs. Shapes of tiles, similarities, and divisions between windows and runs are chosen
by their prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from math import inf
from typing import Any

import numpy as np
from torch import Tensor

from sparsetc.device.profile import DeviceProfile
from sparsetc.errors import PlanError
from sparsetc.formats.coo import coo
from sparsetc.formats.fiber import rows, short_rows
from sparsetc.formats.tiles import populations, tiles_over
from sparsetc.ir.plan import DOTS, F16X3, Part, Plan, Schedule, Storage, check_threshold
from sparsetc.ir.program import MIN_DOT, Statistics, named_operands
from sparsetc.planner import (
    Best,
    Candidate,
    Method,
    Numbers,
    Problem,
    add_plans,
    cheapest,
    costs,
    fit,
    in_blocks,
    least_seconds,
    of_whole_axes,
    padded_axes,
    programs_of,
    rates_of,
    windows_of,
)
from sparsetc.support.checks import check_memory


def value_bytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes of the values that a candidate's tiles store."""
    return candidate.expected[0].stored * problem.itemsize


def considered(name: str, problem: Problem, best: Best) -> Iterator[Candidate]:
    """The best split for each shape of tile and similarity that may win by a sample, where tiles make products.

    1-SA groups rows better than the order that its sample is taken in: all is counted once rows are grouped.
    """
    applies = problem.floating and problem.coalesced and problem.nnz and problem.kept and problem.rest
    if not applies or _products_of_rows(problem):
        return
    rules = problem.rules
    grouped = rules["most_grouped"] // problem.nnz if problem.order == 2 else 0
    most, counted = min(rules["window_bytes"], problem.memory), False
    for number, tau in enumerate(rules["usual_taus"][name]):
        if tau and (number >= grouped or (number and not counted)):
            return
        if counted or best.seconds == inf:
            likely = [(0.0, part) for part in tilings(problem, [tau], {})]
        else:
            likely = sorted(_bounds(problem, tau, best), key=lambda bound: bound[0])
        for least, part in likely:
            if not counted and not best.allows(name, least):
                break
            counted = tau > 0 or best.seconds == inf
            usable = [c for c in splits(problem, name, part) if value_bytes(problem, c) <= most]
            if candidates := [c for c in usable if c.expected[0].stored <= rules["most_stored"] * c.expected[0].nnz]:
                yield cheapest(candidates, problem)


def _bounds(problem: Problem, tau: int, best: Best) -> Iterator[tuple[float, Part]]:
    """Estimate from a sample the least seconds of windows of each kind, for any division between windows and runs."""
    parts, programs, rates = _rates(problem.of_any_pattern, tau, problem.profile)
    least, *_ = rates  # of a single tile
    if (least < best.seconds).any():
        sides = np.array([[part.storage.param("height"), part.storage.param("width")] for part in parts])
        windows = windows_of(problem.counts, problem.kept, problem.rest, tau > 0).at(sides[:, 0].tolist())
        tiles, surely = windows.tiles(sides[:, 1:])
        fullest = sides.prod(1)[:, None] * np.array(problem.rules["fills"]) // 100
        # (ways, fills, windows)
        filled = (windows.nonzeros // tiles.clip(1))[:, None] >= fullest[:, :, None]
        held, each = windows.nonzeros * windows.weight, tiles * windows.weight
        left = (~filled * held[:, None]).sum(2) / held.sum(1, keepdims=True)
        count = (filled * each[:, None]).sum(2)
        longest = (filled * surely[:, None]).max(2)
        if tau:  # 1-SA leaves fewer windows with rows of several groups
            weight = filled * (surely * windows.weight)[:, None]
            longest = (weight * surely[:, None]).sum(2) / weight.sum(2).clip(1)
        turns = np.minimum(longest, _most_tiles(problem, sides.prod(1)[:, None], programs[:, None], count)).clip(1) - 1
        least = least_seconds(rates, problem, best, count, left, turns, launched=True)
    bounds = dict[Part, float]()
    for seconds, part in zip(least.tolist(), parts, strict=True):
        bounds[part] = min(seconds, bounds.get(part, inf))
    return ((seconds, part) for part, seconds in bounds.items())


@lru_cache
def _rates(problem: Problem, tau: int, profile: DeviceProfile) -> tuple[list[Part], Numbers, Numbers]:
    """Ways to run each shape of tile of a similarity that makes matrix products: parts, programs, rates."""
    tiles = []
    for part in tilings(problem, [tau], {}):
        if _multiplies(problem, part):
            volume = part.storage.param("height") * part.storage.param("width")
            tiles.append((part, Statistics(1, 1, volume, 1, problem.itemsize, chain=1)))
    rates, owner = rates_of(problem, tiles)
    parts = [tiles[number][0] for number in owner]
    return parts, np.array([programs_of(problem, part.schedule) for part in parts]), rates


def tilings(problem: Problem, taus: Iterable[int], named: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the parts that a request leaves open: combinations of tile sides, tau and strip it does not fix.

    Values of 16 bits are multiplied as they are. Float32 is multiplied in halves too, where that is as exact as what is
    asked for.
    """
    ways = {"bf16" if problem.itemsize == 2 else problem.precision: problem.precision_as_loaded}
    if problem.halves and problem.precision == DOTS["highest"] and named.get("halves", True):
        ways[F16X3] = F16X3
    for tau in (named["tau"],) if "tau" in named else taus:
        for way, precision in ways.items():
            tiles = problem.rules["window_tiles"][way]
            if "height" in named:
                nearest = min(tiles, key=lambda tile: abs(tile[0] - named["height"]))
                tiles = [(named["height"], *nearest[1:])]
            similar = (("strip", named.get("strip", problem.rules["strip"])), ("tau", tau)) if tau else ()
            for height, width, columns, warps in tiles:
                params = (("height", height), *similar, ("width", named.get("width", width)))
                storage = Storage(item=problem.kept, lane=problem.rest, params=params)
                yield Part("window", storage, _schedule(problem, columns, warps, precision), label="windows")


def splits(problem: Problem, name: str, part: Part, threshold: int | None = None) -> Iterator[Candidate]:
    """Yield candidates of windows of one kind, for each fill above which a group's rows become windows."""
    if problem.backend.tensor_cores and not _multiplies(problem, part):
        return

    counts = problem.counts

    def count() -> tuple[Tensor, ...]:
        _, *numbers = populations(counts.coords, counts.shape, part.storage, counts.cache)
        return tuple([n.cpu() for n in numbers])

    # Whatever the width of a tile, a window has these columns.
    grouping = tuple([(name, size) for name, size in part.storage.params if name != "width"])
    nonzeros, columns = counts.once(("windows", replace(part.storage, params=grouping)), count)
    tiles = tiles_over(columns, part.storage)
    volume = part.storage.param("height") * part.storage.param("width")
    tried = dict.fromkeys(volume * fill // 100 for fill in problem.rules["fills"]) if threshold is None else [threshold]
    for least in tried:
        filled = nonzeros // tiles >= least
        if bool(filled.any()) or threshold is not None or not problem.nnz:  # what is named may leave all to runs
            for windows, expected in _parts(problem, part, volume, nonzeros[filled], tiles[filled]):
                yield _beside_runs(problem, name, windows, expected, least)


def _products_of_rows(problem: Problem) -> bool:
    """True if columns gather rows of several operands; their products take longer than the cost model predicts.

    On an H200 MTTKRP by windows was 1.1 times as fast as the best other plan at rank 128 in float32 on guanine_TEvv_3d,
    of which windows of 16 rows are a quarter full, and up to 3.8 times as slow elsewhere.
    """
    columns = {problem.letters[m] for m in problem.rest}
    return sum(bool(columns & {*o.rows}) for o in named_operands(problem.bound)[1]) > 1


def _multiplies(problem: Problem, part: Part) -> bool:
    """Return True where the tiles make matrix products: what the columns gather does not vary along the rows.

    In halves it must be rows of one operand, else that is an error, of which this is no plan.
    """
    none = Statistics(0, 0, 0, 0, problem.itemsize)
    try:
        (cost,) = costs(Candidate(Plan("window", (part,)), (none,)), problem)
    except PlanError:
        if part.schedule.precision != F16X3:
            raise
        return False
    return bool(cost.dot.any())


def _parts(
    problem: Problem, part: Part, volume: int, nonzeros: Tensor, tiles: Tensor
) -> Iterator[tuple[Part, Statistics]]:
    """Yield the part of groups with these nonzeros and tiles, also cut if there are few programs.

    What items of a row find is added.
    """
    count, nnz = int(tiles.sum()), int(nonzeros.sum())
    longest = int(tiles.max()) if count else 0
    most = int(_most_tiles(problem, volume, programs_of(problem, part.schedule), np.array(count)))
    cuts = longest > most and not problem.deterministic
    for each in (0, most) if cuts else (0,):  # tiles of an item; 0 for as many as a group has
        items = int((-(-tiles // each)).sum()) if each else tiles.numel()
        storage, chain = replace(part.storage, max_item_nnz=each * volume), each or longest
        expected = Statistics(items, count, count * volume, nnz, problem.itemsize, chain=chain, split_rows=each > 0)
        yield replace(part, storage=storage, nnz=nnz), expected


def _most_tiles(problem: Problem, volume: int | Numbers, programs: int | Numbers, tiles: Numbers) -> Numbers:
    """Return the most tiles of a work item where windows are cut so that there are enough programs."""
    rules = problem.rules
    least = np.maximum(rules["least_tiles"], rules["tile_item_nnz"] // volume)
    return np.maximum(least, -(-tiles * programs // rules["window_programs"]))


def _beside_runs(problem: Problem, name: str, windows: Part, expected: Statistics, least: int) -> Candidate:
    """Windows, and what they leave as short rows a lane each, or as runs."""
    if expected.nnz == problem.nnz:
        return Candidate(Plan(name, (windows,)), (expected,))
    # A row a lane where no sum may be cut since it must have one order.
    rest = rows(problem) if problem.ordered else next(short_rows(problem), None) or coo(problem)
    options = (("threshold", least), *windows.storage.params)
    parts = (windows, replace(rest.plan.parts[0], label="the other rows"))
    left = rest.expected[0].scaled((problem.nnz - expected.nnz) / problem.nnz)
    plan = Plan(name, parts, fused=False, partition="row_similarity", options=options)
    return Candidate(plan, (expected, left))


def _schedule(problem: Problem, columns: int, warps: int, precision: str) -> Schedule:
    """Return the schedule of a part of windows with this many elements of the dense axes a program."""
    if whole_axes := of_whole_axes(problem):
        return whole_axes
    padded = padded_axes(problem)
    blocks = fit({c: max(MIN_DOT, min(n, columns)) for c, n in padded.items()}, list(padded), columns)
    return in_blocks(problem, blocks, warps, precision=precision)


# -- requests ---------------------------------------------------------------------------------------------------------


def _requested(name: str, problem: Problem, **named: Any) -> Candidate:
    """Return the best candidate of a request: named options are kept, open ones chosen, all within the memory limit."""
    if not problem.kept or not problem.rest:
        raise PlanError(f'plan "{name}" needs an output with some, not all, of the sparse operand\'s modes')
    check_windows(named)
    parts, threshold = tilings(problem, problem.rules["taus"][name], named), named.get("threshold")
    candidates = [split for part in parts for split in splits(problem, name, part, threshold)]
    if not candidates:
        raise PlanError(f'plan "{name}" needs a matrix product, and finds none in "{problem.einsum}"')
    most, least = problem.memory, min(value_bytes(problem, split) for split in candidates)
    instead = "leave more rows to runs by a higher threshold"
    check_memory(f'tiles of plan "{name}"', least, problem.counts.coords.device, most, instead)
    return cheapest([split for split in candidates if value_bytes(problem, split) <= most], problem)


def plan_window(
    height: int | None = None, width: int | None = None, threshold: int | None = None, halves: bool = True
) -> Plan:
    """Make a plan of windows: `height` neighbouring output rows, as tiles of `width` of their columns.

    Args:
        height: rows of a window; None takes what the cost model finds best, here and below.
        width: columns of a tile.
        threshold: nonzeros that the tiles of a window need on average; rows of other windows are stored as runs. 0
            stores all rows in windows.
        halves: whether float32 may be multiplied in halves of 16 bits at ``precision="highest"``, where the cost model
            expects that to be faster and a call's operands allow it.

    Examples:
        >>> stc.plans.plan_window(height=16, width=8)
        Plan('window', height=16, width=8)
    """
    return _request("window", height=height, width=width, threshold=threshold, halves=halves)


def plan_1sa(
    tau: int | None = None,
    strip: int | None = None,
    height: int | None = None,
    width: int | None = None,
    threshold: int | None = None,
    halves: bool = True,
) -> Plan:
    """Make a plan of windows as `plan_window`, of rows grouped by similarity (1-SA) instead of neighbouring rows.

    Args:
        tau: the Jaccard similarity that rows of a group have at least, in percent, from 1 to 100.
        strip: columns of a strip; rows are compared by the strips that they touch.
        height: rows of a window.
        width: columns of a tile.
        threshold: nonzeros that the tiles of a window need on average, as for `plan_window`.
        halves: as for `plan_window`.

    Examples:
        >>> stc.plans.plan_1sa(tau=50, height=16)
        Plan('1-sa', tau=50, height=16)
    """
    return _request("1-sa", tau=tau, strip=strip, height=height, width=width, threshold=threshold, halves=halves)


def _request(name: str, **options: int | None) -> Plan:
    """Return the request of the options that differ from their defaults."""
    named = {option: size for option, size in options.items() if size is not None}
    check_windows(named)
    return Plan(
        name, options=tuple((option, size) for option, size in named.items() if (option, size) != ("halves", True))
    )


def check_windows(named: Mapping[str, object]) -> None:
    """Raise `PlanError` unless this is what `plan_window` or `plan_1sa` takes."""
    check_threshold(named.get("threshold"), 0)
    if not isinstance(named.get("halves", True), bool):
        raise PlanError(f"halves must be True or False, found {named['halves']!r}")
    for name, most in (("tau", 100), ("strip", 2**31), ("height", 1024), ("width", 1024)):
        size = named.get(name, 1)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= most:
            raise PlanError(f"{name} must be from 1 to {most:,}{' percent' if name == 'tau' else ''}, found {size!r}")


for _name, _options in (("window", ()), ("1-sa", ("tau", "strip"))):
    _options = ("height", "width", "threshold", "halves", *_options)
    add_plans(Method(_name, partial(considered, _name), partial(_requested, _name), _options, kernels=True))
