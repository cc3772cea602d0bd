"""Schedules of programs over nonzeros (lanes, unrolling, warps, blocks of dense axes).

In: a `Problem`. Out: a `Schedule`, from the sizes of the dense axes, the backend, the dtype and the precision, whatever
the pattern of the sparse operand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from sparsetc.ir.equation.einsum import Bound, joined
from sparsetc.ir.plan import F16X3, Schedule
from sparsetc.ir.program.operands import MIN_DOT, WARPGROUP
from sparsetc.planner.problem import Problem
from sparsetc.support import Ints, Names, among, outside, volume

MOST_WHOLE = 4096
"""Most positions of summed axes for one program, if sums must have an order."""


def padded_axes(problem: Problem) -> dict[str, int]:
    """Return the dense axes with their sizes, each rounded up to a power of two."""
    return {c: 1 << max(problem.bound.by_index[c] - 1, 0).bit_length() for c in problem.einsum.axes}


def of_whole_axes(problem: Problem) -> Schedule | None:
    """Return the one schedule of a backend whose programs take whole axes; None for other backends."""
    if not problem.backend.at_once:
        return None
    return in_blocks(problem, padded_axes(problem), 1)


def in_blocks(problem: Problem, block: Mapping[str, int], warps: int, **options: Any) -> Schedule:
    """Return the schedule of these blocks of dense axes; dots have the precision asked for unless options name one."""
    return Schedule(warps, tuple(block.items()), **{"precision": problem.precision} | options)


def schedule_of(problem: Problem, blocks: bool, rows: bool = False, shared: Collection[int] = ()) -> Schedule:
    """Return the schedule of a part in blocks of fibers or in runs; its lanes are the fibers that a block should have.

    Args:
        problem: what it is for.
        blocks: the part is blocks of fibers, else runs.
        rows: each lane adds to an output row of its own.
        shared: modes whose coordinates a run shares, so that their operands are multiplied once a run, after dots.
    """
    if whole_axes := of_whole_axes(problem):
        return whole_axes
    bound = problem.bound
    padded = padded_axes(problem)
    rules = problem.rules
    sizes = {c: bound.by_index[c] for c in padded}
    output = bound.einsum.free
    summed = outside(padded, output)
    # Programs that share a sum add to it, in no order.
    unsplit = summed if problem.ordered and volume(padded, summed) <= MOST_WHOLE else []
    products = problem.floating and not rows and len(output) > 1
    alone = products and problem.ones and not blocks  # an entry a step, of which nothing but tables is read
    products = products and (bool(problem.rest) or alone)
    if products and (deep := _met_axes(problem, sizes, alone)):
        return _of_single_blocks(problem, padded, deep) if alone else _of_blocks(problem, padded, deep)
    if alone and (entry_axes := _entry_axes(problem)):
        return _of_entries(problem, padded, entry_axes)
    if products and dot_may_form(bound):
        block = {c: n if c in unsplit else min(n, 64) for c, n in padded.items()}
        once = {problem.letters[m] for m in shared}
        groups = _axis_groups(bound, once)
        if len(groups) < 2:
            groups = _axis_groups(bound)
        groups.sort(key=lambda group: -volume(block, group))
        apart = (groups[0], set().union(*groups[1:]))  # the sides of a dot: `ir.lower` takes the largest as one
        for side in apart:
            widest = max(side, key=lambda c: block[c])
            block[widest] *= max(1, MIN_DOT // volume(block, side))  # padded to what a dot needs
        # An axis that is summed, and split, is added by atomics.
        for shrink in (output, outside(block, unsplit)):
            block = fit(block, shrink, 4096, apart)
        of_dots, formed = set().union(*apart), volume(block, apart[1])
        warps = max(1, min(8, volume(block, of_dots) // rules["dot_tile"]))
        lanes, unroll = rules["dot_lanes"], 2
        if len(groups) > 2:  # a side is multiplied together from several operands, in registers
            lanes, unroll = max(lanes, min(4 * lanes, rules["formed"] // formed)), 1
            warps = max(1, min(4, lanes * formed // rules["dot_tile"]))
        elif not blocks and problem.precision == "tf32x3":
            lanes, unroll = 2 * lanes, 1
        # Loads ahead of a loop pay where what is loaded is a side of the dot, whole, and one warp waits for it.
        ahead = len(groups) == 2 and warps == 1 and all(block[c] == sizes[c] for c in of_dots)
        stages = 3 if ahead and problem.precision == "tf32x3" and len(of_dots) == len(block) else 1
        return in_blocks(problem, block, warps, stages=stages, lanes=lanes, unroll=unroll)
    most = {c: 128 if c in output else 512 for c in padded}
    block = {c: n if c in unsplit else min(n, most[c]) for c, n in padded.items()}
    block = fit(block, outside(block, unsplit), 512)
    vectors = _vectors(problem, {c: block[c] for c in output})
    width = prod((block | {c: sum(sizes) for c, sizes in vectors}).values())
    unroll = 4 if width <= 64 else 2
    if width == 1:
        unroll = 8
    warps = rules["row_warps"] if rows else 1
    most_lanes = rules["warp_lanes"] * warps if width > 1 else 128
    lanes = max(4, min(most_lanes, warps * rules["warp_elements"] // (2 if rows else 1) // width))
    lanes = 1 << lanes.bit_length() - 1  # a width in vectors is no power of two
    return in_blocks(problem, block, warps, dot=False, lanes=lanes, unroll=unroll, vectors=vectors)


def dot_takes_entries(problem: Problem) -> bool:
    """Return True if a run's entries are given to a dot one by one, just as they are loaded.

    Lanes of fibers would have to rearrange them, which no price covers: blocks of 128 took 109 us at 16 columns by
    fibers, and 37 by runs; at one column 63 by rows side by side, and 37 (H100, 62 MB of blocks in float16).
    """
    return problem.ones and not schedule_of(problem, blocks=False).lanes


def programs_of(problem: Problem, schedule: Schedule) -> int:
    """Return the programs of a work item, over the blocks of its dense axes."""
    return prod(-(-problem.bound.by_index[c] // schedule.block(c)) for c in problem.einsum.axes)


def _met_axes(problem: Problem, sizes: dict[str, int], alone: bool) -> Names:
    """Return the dense axes over which a dot sums the product of two operands; none where no dot fits them.

    Both operands have these axes, the output has none of them, and each operand has enough of the output's axes for a
    side of a dot. Operands whose entries are blocks are such a pair: a product of two blocks is a matrix product. Where
    entries are taken `alone`, an operand with all its letters in the output is multiplied after the dot. Beside the
    entries a dot may then have few columns, since reading entries takes longest; and the axes may be long unless sums
    have an order, since several programs share them and add.
    """
    e = problem.einsum
    axes = {p: {c for c in e.inputs[p] if c in sizes} for p in e.dense}
    after = [p for p in e.dense if alone and {*e.inputs[p]} <= {*e.output}]
    meeting = [p for p in e.dense if axes[p] and p not in after]
    if len(meeting) != 2:
        return ()
    shared = axes[meeting[0]] & axes[meeting[1]]
    free = {p: axes[p] & {*e.output} for p in meeting}
    beyond = {c for p in after for c in axes[p]} - set().union(*free.values())
    if not shared or beyond or shared & {*e.output} or free[meeting[0]] & free[meeting[1]]:
        return ()
    entries = [p for p in meeting if alone and all(free.values()) and problem.letters[0] in e.inputs[p]]
    wide = all(2 * volume(sizes, free[p]) >= MIN_DOT for p in entries or meeting)
    deep = volume(sizes, shared) <= problem.rules["most_deep"] or (alone and not problem.ordered)
    return tuple(sorted(shared)) if wide and deep else ()


def _of_blocks(problem: Problem, padded: dict[str, int], deep: Names) -> Schedule:
    """Return the schedule of one matrix product for a few nonzeros, summed over lanes and shared axes of blocks."""
    e, rules = problem.einsum, problem.rules
    output = among(e.output, padded)
    sides = [among(output, table) for table in e.tables]
    block = {c: padded[c] for c in deep}
    for side in filter(None, sides):
        fitted = fit({c: padded[c] for c in side}, side, rules["block_side"], [side])
        short = max(1, MIN_DOT // prod(fitted.values()))  # padded to what a dot needs
        block |= fitted | {side[-1]: fitted[side[-1]] * short}
    lanes = max(2, rules["block_deep"] // volume(block, deep))
    warps = max(1, min(8, volume(block, output) // rules["dot_tile"]))
    return in_blocks(problem, block, warps, stages=1, lanes=lanes)


WIDE = 128
"""Most columns of a block for one program alone on a multiprocessor; wider blocks are halved until two programs fit."""
STAGES = 3, 5
"""Stages of a loop over entries that holds one buffer of tables, or two; coordinates are loaded two steps ahead."""
ENTRY = 1 << 14
"""Bytes of a whole entry for each warp of its program: cubes of 32 take 20 us by 4 warps in float16 and 21 by 8, in
float32 at "highest" 537 by 4, as registers do not hold them, and 35 by 8 (NVIDIA H200)."""
BUFFERS = 7
"""Most buffers of a loop over entries, where few programs wait for their loads (`deepened`)."""
ENOUGH = 3
"""Programs that must fit beside one another for each to have two buffers: blocks of 64, with 3.6 programs for each
multiprocessor of an H100, take 21.1 us if four fit, with one buffer, and 19.0 if three fit, with two
(`benchmarks/results/given_blocks_parts.json`)."""


def _of_single_blocks(problem: Problem, padded: dict[str, int], deep: Names) -> Schedule:
    """Return the schedule of a matrix product for each entry, whose sides are loaded as the dot takes them.

    The rows are the side that an entry has, whole where there is room for their sums; the columns, which many entries
    read, are wide.
    """
    e = problem.einsum
    rules = problem.rules
    number = problem.letters[0]
    terms = sorted([t for t in e.tables if {*t} & {*deep}], key=lambda term: number not in term)
    rows, columns = [[c for c in e.output if c in padded and c in term] for term in terms]
    block = fit({c: padded[c] for c in deep}, deep, rules["most_deep"], [deep])
    block |= fit({c: padded[c] for c in rows}, rows, rules["dot_rows"], [rows])
    high = volume(block, rows)
    share = rules["dot_share"].get(problem.precision, (1, 1))[high >= WARPGROUP]
    room = rules["dot_sums"] // (share * max(1, problem.itemsize // 4))
    doubled = problem.precision == F16X3 and high > WARPGROUP  # eight warps: four have the rows of one instruction
    least = WARPGROUP if high >= WARPGROUP else MIN_DOT
    width = max(least, min(rules["dot_columns"], room * (1 + doubled) // max(MIN_DOT, high)))
    block |= fit({c: padded[c] for c in columns}, columns, width, [columns])
    for side in (deep, rows, columns):  # padded to what a dot needs
        block[side[-1]] *= max(1, MIN_DOT // volume(block, side))

    def fit_in(programs: int, buffers: int) -> bool:
        return programs * buffers * _sides(problem, block, columns)[1] < problem.shared

    fewest = 1 + (_sides(problem, block, columns)[0] >= WARPGROUP)  # that the fewer stages hold
    while (wide := volume(block, columns)) > MIN_DOT:
        if fit_in(1, 2) and (wide <= WIDE or fit_in(2, fewest)):
            break
        block[max(columns, key=block.__getitem__)] //= 2
    # Two programs with one buffer less are faster than one, which is faster with more (NVIDIA H100).
    more = fit_in(2, fewest + 1) or (fit_in(1, fewest + 1) and not fit_in(2, fewest))
    warps = 8 if doubled and high * wide > room else 4
    precision, slowest_axes = problem.precision_as_loaded, tuple(columns)
    return in_blocks(
        problem, block, warps, precision=precision, stages=STAGES[more], lanes=0, slowest_axes=slowest_axes
    )


def _sides(problem: Problem, block: Mapping[str, int], columns: Collection[str]) -> tuple[int, int]:
    """Return the rows of a dot over blocks, and the bytes of both of its sides, the contents of a buffer."""
    high, deep = (
        prod(n for c, n in block.items() if c not in columns and (c in problem.einsum.output) == kept)
        for kept in (True, False)
    )
    return high, problem.itemsize * deep * (high + volume(block, columns))


def deepened(problem: Problem, schedule: Schedule, programs: int, steps: int) -> Schedule:
    """Deepen the schedule's pipeline for this number of programs, each with at most `steps` steps.

    Two buffers, and four warps, suffice where other programs fill the waits of one. Where there are few, they load as
    many steps ahead as there is room for: blocks of 16 to 128 in float16 times 16 to 256 columns take .55 to .8 of the
    time so, with a warp for 16 rows (NVIDIA H200).
    """
    profile = problem.profile
    rows, nbytes = _sides(problem, dict(schedule.blocks), schedule.slowest_axes)
    warps = max(1, min(schedule.warps, rows // MIN_DOT))
    if not schedule.slowest_axes or programs * warps > problem.rules["deepened"] * profile.warps:
        return schedule
    side_by_side = max(1, -(-programs * problem.rules["issued"] // profile.warps))
    each, several = (problem.shared // (n * nbytes) - (rows >= WARPGROUP) for n in (side_by_side, ENOUGH))
    buffers = min(BUFFERS, steps, max(each, min(2, several)))
    return replace(schedule, warps=warps, stages=max(schedule.stages, 2 * buffers + 1))


def _entry_axes(problem: Problem) -> Names:
    """Return the dense modes of an entry that is taken whole, if another operand sums some of them; else none.

    An entry of two dense modes needs one dot, which `_of_single_blocks` schedules.
    """
    e, number = problem.einsum, problem.letters[0]
    tables = [table for table in e.tables if number in table]
    others = set[str]().union(*outside(e.tables, tables))
    axes = among(tables[0], e.axes) if len(tables) == 1 and number not in e.output else ()
    met = [c for c in axes if c in others and c not in e.output]
    fits = MIN_DOT <= problem.bound.elements(axes) <= problem.rules["dot_entry"]
    return axes if met and len(axes) > 2 and fits else ()


def _of_entries(problem: Problem, padded: dict[str, int], own: Names) -> Schedule:
    """Return the schedule of one whole entry a step; other axes are in blocks, as large as registers hold sums."""
    e = problem.einsum
    block = {c: padded[c] for c in (*own, *e.axes)}
    others = outside(e.axes, own)
    tables = [{*table} & {*e.axes} for table in reversed(e.tables) if problem.letters[0] not in table]
    tables.sort(key=lambda table: -volume(block, table & {*own} - {*e.output}))

    def kept() -> int:
        """Return the elements that dots leave, one after the other, of an entry and the tables met so far."""
        axes, count = {*own}, 0
        for table in tables:
            axes = {c for c in axes | table if c in e.output or c not in table}
            count += volume(block, axes)
        return count

    while 2 * kept() >= 3 * problem.rules["dot_sums"] and max(block[c] for c in others) > MIN_DOT:
        block[max(reversed(others), key=block.__getitem__)] //= 2
    # In MTTKRP a warp has 16 rows, so that what is summed beside the dot crosses no threads, where its registers hold
    # the entry; of chains four warps are faster than eight (`benchmarks/results/given_blocks_parts.json`).
    nbytes = problem.itemsize * volume(block, own)
    most = 8 if all({*others} <= table for table in tables) else 4
    warps = max(1, min(most, volume(block, others) // MIN_DOT), min(8, nbytes // ENTRY))
    stages = STAGES[2 * nbytes < problem.shared]
    return in_blocks(problem, block, warps, precision=problem.precision_as_loaded, stages=stages, lanes=0)


def _vectors(problem: Problem, block: dict[str, int]) -> tuple[tuple[str, Ints], ...]:
    """Return vectors of several lengths for the axis that its block pads most, by a fifth or more; else none."""
    by_axis, least = {}, problem.rules["least_vector"]
    for c, most in block.items():
        size = problem.bound.by_index[c]
        programs = max(1, -(-size // most))
        padded = least * -(-size // (programs * least))
        vectors = tuple([1 << n for n in reversed(range(padded.bit_length())) if padded >> n & 1])
        if 1 < len(vectors) <= problem.rules["most_vectors"] and 5 * most >= 6 * padded:
            by_axis[c] = vectors
    return tuple(sorted(by_axis.items(), key=lambda axis: -block[axis[0]] / sum(axis[1]))[:1])


@lru_cache(maxsize=256)
def dot_may_form(bound: Bound) -> bool:
    """Return True if a matrix product may form: two dense operands with sparse letters have no dense axis in common."""
    return len(_axis_groups(bound)) > 1


def _axis_groups(bound: Bound, once: Collection[str] = ()) -> list[set[str]]:
    """Group the dense axes that share an operand; operands with all sparse letters in `once` do not count."""
    e = bound.einsum
    met = [i for i in e.tables if not once or not set(once) >= {c for c in i if c in e.sparse_indices}]
    axes = [{c for c in i if c not in e.sparse_indices} for i in met]
    return [own for own, _ in joined((together, None) for together in axes if together)]


def fit(
    block: dict[str, int], shrink: Sequence[str], limit: int, apart: Sequence[Collection[str]] = ()
) -> dict[str, int]:
    """Halve the largest of the blocks that may shrink until a tile has at most `limit` elements.

    Args:
        block: elements of each axis that a program takes.
        shrink: axes that may be taken in smaller blocks.
        limit: most elements of them all.
        apart: axes that make a side of a dot, which stays as long as a dot's must be.
    """
    block = dict(block)
    while prod(block.values()) > limit:
        wide = [c for c in shrink if block[c] > MIN_DOT]
        # Where all are short, one axis after the other goes: the sides of a dot are then spread over the others.
        short = set[str]().union(*[side for side in apart if volume(block, side) < 2 * MIN_DOT])
        free = wide or [c for c in shrink if block[c] > 1 and c not in short]
        if not free:
            break
        block[(max if wide else min)(free, key=block.__getitem__)] //= 2
    return block
