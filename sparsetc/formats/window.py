"""``window`` and ``vbr``: groups of output rows in dense tiles over the columns that they have (1-SA, section 3).

        rows       [ 7 12 40 . | 3 5 9 11 | …      the rows of each group, wherever they lie; . is no row
        item_ptr   [ 0       2          5 | …      the tiles of each work item, all of one group
        window     columns [ 2 3 9 30 | 31 60 . . | …   the next columns that any row of the group has, compacted
        vbr        tile_word [ 0 4 | 1 2 3 | …          strips of consecutive columns, from a multiple of the width on
        values     [ tile 0 | tile 1 | …           height x width a tile, 0 where there is no nonzero

A row of the dense operand is gathered once for all rows of a group. Parameters of the storage are ``height`` and
``width`` of a tile; ``tau``, by which rows are grouped by similarity, in percent, 0 for neighbouring rows as they are;
and ``strip``, the columns of a strip that patterns are compared by.

Rows are fibers of the storage's item modes, and columns those of its lane modes; each mode has a list of its own, as
``rows_1`` of mode 1. Strips are of the last lane mode, and a tile of strips has one coordinate of each other lane mode.
A zero position is multiplied like any other.

The plans ``window`` and ``1-sa`` store windows so, of neighbouring rows and of rows by similarity, and other rows as
runs: shapes of tiles, similarities, and divisions between windows and runs are chosen by their prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetc.device.profile import DeviceProfile
from sparsetc.errors import FormatError, PlanError
from sparsetc.formats.coo import coo
from sparsetc.formats.fiber import rows, short_rows
from sparsetc.ir.nest import Listed, Nest, Whole, tiles, tiles_along
from sparsetc.ir.plan import DOTS, F16X3, Part, Plan, Schedule, Storage, check_threshold
from sparsetc.ir.program import MIN_DOT, Statistics, named_operands
from sparsetc.packing import words
from sparsetc.packing.base import Packed, cut_runs, index_dtype, items_of, placed, pointers
from sparsetc.packing.partition import register_partition
from sparsetc.planner import (
    Best,
    Candidate,
    Method,
    Numbers,
    Problem,
    add_plans,
    cheapest,
    costs,
    different,
    fit,
    in_order,
    least_seconds,
    of_whole_axes,
    padded_axes,
    programs_of,
    rates_of,
    register_format,
    windows_of,
)
from sparsetc.similarity.groups import Groups, group_rows
from sparsetc.support import Cache, Ints, Names, outside
from sparsetc.support.checks import check_memory
from sparsetc.tensor.coords import linear_key, narrow_runs, of_modes, ranked, starts_of_runs

PARAMETERS = ("height", "width", "tau", "strip")
"""Parameters of a storage of windows, and of the partition that divides by them."""


def sizes_of(storage: Storage) -> tuple[int, int, int, int]:
    """Return height, width, tau and strip of a storage of windows, whose item modes are rows and lane modes columns.

    Raises:
        FormatError: the storage is none of windows.
    """
    if not storage.item or not storage.lane or storage.leaf:
        raise FormatError(f"windows have item modes, and all others at the lane; found {storage}")
    params = dict(storage.params)
    height, width = params.get("height", 0), params.get("width", 0)
    if min(height, width) < 1:
        raise FormatError(f"windows need a height and a width of 1 or more; found {params}")
    tau, strip = params.get("tau", 0), params.get("strip", width)
    if not 0 <= tau <= 100 or strip < 1:
        raise FormatError(f"tau is in percent, and a strip has 1 column or more; found {params}")
    return height, width, tau, strip


def ranked_rows(coords: Tensor, shape: Ints, storage: Storage, cache: Cache | None = None) -> tuple[Tensor, int]:
    """Return the place of each nonzero's row, (nnz,), and how many rows have nonzeros; a cache keeps the groups.

    Rows are in the order of their coordinates, or group by group. What whole windows leave of the groups comes after
    them, so that no window but those has rows of several groups.
    """
    (row, count), (height, _, tau, strip) = _ranks(coords, shape, storage.item), sizes_of(storage)
    if not tau:
        return row, count

    def similar() -> Groups:
        columns, width = coords[storage.lane[-1]], shape[storage.lane[-1]]
        if len(storage.lane) > 1:
            columns, width = _ranks(coords, shape, storage.lane)
        return group_rows(row.long(), columns.long(), count, width, width=strip, tau=tau / 100)

    # The groups depend on these beside coordinates and shape, whatever the tiles.
    key = ("similar", storage.item, storage.lane, strip, tau)
    order, size = similar() if cache is None else cache.once(key, similar)
    group = torch.repeat_interleave(size)
    place = torch.arange(count, device=group.device) - (size.cumsum(0) - size)[group]
    left = place >= (size - size % height)[group]
    order = order[torch.sort(left, stable=True).indices]
    places = torch.arange(count, dtype=row.dtype, device=order.device)
    rank = torch.empty_like(places).scatter_(0, order, places)
    return rank.index_select(0, row), count


def _ranks(coords: Tensor, shape: Ints, modes: Ints) -> tuple[Tensor, int]:
    """Return (nnz,) the number of each nonzero's fiber of these modes, and the number of fibers."""
    return ranked(*linear_key(*of_modes(coords, shape, modes), coords[0]))


@register_format
@dataclass(eq=False)
class Window:
    """Tiles over the columns that any row of a group has.

    Attributes:
        compacted: whether a tile has the next columns, or a strip of consecutive ones (1-SA): variable block rows.
    """

    name: str = "window"
    compacted: bool = True

    def parameters(self, order: int) -> Names:
        """The sides of a tile, and how rows are grouped."""
        return PARAMETERS

    def view(self, shape: Ints, storage: Storage) -> Nest:
        """Rows are listed for each work item; columns are for each tile, or lie at a multiple of the width."""
        height, width, *_ = sizes_of(storage)
        rows = storage.item
        columns = storage.lane
        sides = tuple([{rows[0]: height, columns[-1]: width}.get(m, 1) for m in range(len(shape))])
        if self.compacted:
            lane: tuple[Listed, ...] | tuple[words.Field, ...] = _listed("columns", columns, width)
        else:
            lane = words.fields(columns, tiles_along(shape, sides), "tile_word")
        sequence = (*rows[1:], *columns[:-1], rows[0], columns[-1])
        return tiles(_listed("rows", rows, height), lane, Whole(sides, sequence))

    def pack(self, coords: Tensor, shape: Ints, storage: Storage, cache: Cache | None = None) -> Packed:
        """Group the rows, number the tiles of each group, and put every nonzero into its tile."""
        height, width, *_ = sizes_of(storage)
        view = self.view(shape, storage)
        nnz = coords.shape[1]
        rank, rows = ranked_rows(coords, shape, storage, cache)
        tile, along, group, first = tiled(coords, shape, storage, rank // height, self.compacted)
        place = tile.long().mul_(height).add_(rank % height).mul_(width).add_(along)
        positions = placed(place, first.numel() * view.values.volume)
        del place
        of_items, split = items_of(starts_of_runs([group]), storage, view)
        arrays = {"item_ptr": pointers(of_items, first.numel(), first.numel())}
        for array, mode in _arrays("rows", storage.item):  # the last window is filled up
            lists = _filled(-(-rows // height) * height, rank, coords[mode], shape[mode])
            arrays[array] = lists.view(-1, height).index_select(0, group.index_select(0, of_items)).flatten()
        if self.compacted:
            at = tile.long().mul_(width).add_(along)
            for array, mode in _arrays("columns", storage.lane):
                arrays[array] = _filled(first.numel() * width, at, coords[mode], shape[mode])
        else:
            arrays |= words.encode(words.Nonzeros(coords, shape, first, view.values.sides), view.levels[1])
        return Packed(
            self.name,
            storage,
            shape,
            nnz,
            view,
            arrays,
            positions,
            stored=positions.numel(),
            items=of_items.numel(),
            representatives=(first.index_select(0, of_items), first),
            split_rows=split,
            padded=positions.numel() != nnz,
        )


register_format(partial(Window, "vbr", compacted=False))


def _filled(size: int, places: Tensor, coordinates: Tensor, none: int) -> Tensor:
    """Return (size,) coordinates at their places, and `none` elsewhere."""
    kind = index_dtype(none)
    lists = torch.full((size,), none, dtype=kind, device=coordinates.device)
    return lists.scatter_(0, places.long(), coordinates.to(kind))


def _arrays(name: str, modes: Ints) -> list[tuple[str, int]]:
    """The arrays of coordinates of each mode, and the mode."""
    return [(f"{name}_{number}" if number else name, mode) for number, mode in enumerate(modes)]


def _listed(name: str, modes: Ints, side: int) -> tuple[Listed, ...]:
    """Return the coordinates listed along one side; the rows' first mode or the columns' last carries the others."""
    carrier = modes[0] if name == "rows" else modes[-1]
    return tuple(
        Listed(mode, array, side, None if mode == carrier else carrier) for array, mode in _arrays(name, modes)
    )


def tiled(
    coords: Tensor, shape: Ints, storage: Storage, group: Tensor, compacted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Number the tiles of each group: of its next columns, or of the strips that it touches.

    Returns:
        (nnz,) the tile of each nonzero, and (nnz,) its place along the tile's columns; (tiles,) the group of each tile,
        in order, and (tiles,) a nonzero of it.
    """
    (*outer, last), (_, width, *_) = storage.lane, sizes_of(storage)
    columns = chain((coords[m] for m in outer), (coords[last] if compacted else coords[last] // width for _ in "c"))
    sizes = [max(1, coords.shape[1]), *[shape[m] for m in storage.lane]]
    # The different columns of each group, or its strips, and the first nonzero of each.
    number, first = narrow_runs(chain((group.long() for _ in "g"), columns), sizes, coords[0])
    if not compacted:
        return number, coords[last] % width, group.index_select(0, first), first
    start, length, _ = cut_runs(starts_of_runs([group.index_select(0, first)]), width)
    tiles = torch.arange(start.numel(), dtype=start.dtype, device=start.device)
    tile = torch.repeat_interleave(tiles, length).index_select(0, number)
    first = first.index_select(0, start)
    return tile, number - start.index_select(0, tile), group.index_select(0, first), first


def populations(coords: Tensor, shape: Ints, storage: Storage, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
    """(nnz,) the window of each nonzero; (windows,) how many nonzeros, and how many columns, each window has."""
    group = ranked_rows(coords, shape, storage, cache)[0] // storage.param("height")
    columns, spread = linear_key(*of_modes(coords, shape, storage.lane))
    nonzeros = torch.bincount(group)
    return group, nonzeros, different(group, columns, spread, nonzeros.numel())


@register_partition("row_similarity", whole_rows=True)
def by_row_similarity(
    coords: Tensor, shape: Ints, kept: Ints, *, threshold: int, cache: Cache | None = None, **params: int
) -> list[Tensor | None]:
    """[nonzeros of the groups of rows whose tiles hold at least `threshold` on average, the others].

    Args:
        coords: (order, nnz).
        shape: sizes of the modes.
        kept: modes that the output keeps, whose fibers are the rows.
        threshold: nonzeros a tile.
        cache: where groups of rows are kept, and found.
        params: ``height``, ``width``, ``tau`` and ``strip``, as the storage of windows has them; where there is no
            ``tau``, neighbouring rows are a group.

    Raises:
        PlanError: an option of another name, or an output that keeps no mode, or all.
    """
    if unknown := set(params) - set(PARAMETERS):
        raise PlanError(f"windows have a height, a width, tau and a strip, found {min(unknown)!r}")
    others = outside(range(len(shape)), kept)
    if not kept or not others:
        raise PlanError("rows are fibers of the modes that the output keeps, columns those of the others: found none")
    storage = Storage(item=kept, lane=others, params=tuple(params.items()))
    group, nonzeros, columns = populations(coords, shape, storage, cache)
    filled = (nonzeros // tiles_of(columns, storage) >= threshold)[group]
    return [torch.nonzero(filled).flatten(), torch.nonzero(~filled).flatten()]


def tiles_of(columns: Tensor, storage: Storage) -> Tensor:
    """Return (windows,) the number of tiles for this many columns."""
    width = storage.param("width")
    return (columns + (width - 1)) // width


# -- plans ------------------------------------------------------------------------------------------------------------


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
                yield cheapest(candidates, problem, in_order)


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
    tiles = tiles_of(columns, part.storage)
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
    return Candidate(Plan(name, parts, False, "row_similarity", options), (expected, left))


def _schedule(problem: Problem, columns: int, warps: int, precision: str) -> Schedule:
    """Return the schedule of a part of windows with this many elements of the dense axes a program."""
    if whole_axes := of_whole_axes(problem):
        return whole_axes
    padded = padded_axes(problem)
    blocks = fit({c: max(MIN_DOT, min(n, columns)) for c, n in padded.items()}, list(padded), columns)
    return Schedule(warps, tuple(blocks.items()), True, precision)


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
    return cheapest([split for split in candidates if value_bytes(problem, split) <= most], problem, in_order)


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
