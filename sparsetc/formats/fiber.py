"""``fiber`` and ``rows``: fibers side by side, as in SELL-C-sigma (sliced ELL): a GPU takes `lanes` of them at a step.

A fiber is the nonzeros that share the item and lane modes; a group is the fibers that share the item modes: those of an
output row in the plan ``fiber`` along a summed mode, all fibers where there are no item modes. Fibers longer than
`max_fiber_len` are cut; those of a group are sorted by falling length, 2^20 at a time, and `lanes` of them make a
block, in which step n takes the n-th nonzero of each:

        item_ptr   [ 0     2 …            blocks of each work item, all of one group; absent where each has one
        item_word  [ i0    i1 …           the item modes' coordinates
        block_ptr  [ 0   12   20 …        first stored entry of each block (a multiple of the lanes)
        block_full [ 2   …                steps in which every lane has a nonzero
        lane_word  [ j0 j3 j1 j7 | …      the lane modes' coordinates of each fiber
        lane_len   [  3  3  3  2 | …      nonzeros of each fiber; 0 for a lane that is not used
        word       [ k  k  k  k           step 0 of the block's four fibers
                     k  k  k  k           step 1
                     k  k  k  .           step 2: the last lane is padding
        values       likewise, 0 in padding

Because fibers of like length lie together, a block is padded by little, and only its last steps need a mask; all steps
of a block with an unused lane do. With one lane this is CSF of two levels: block_ptr are the fiber pointers.

The plan ``fiber`` stores fibers along a summed mode so. The plan ``rows`` stores short output rows so, a row a lane,
with no item modes and the output's modes on the lanes.

The plans ``coo+rows`` and ``fiber+rows`` store long output rows as runs or fibers, short ones a lane each, in one
result. A long row fills the lanes of a work item by itself, short rows run side by side, and no single kernel serves
both (`benchmarks/results/mttkrp_plans.json`: of 11 M nonzeros in rows of about 4, one row an item took 1.5 ms, one row
a lane 0.43).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sparsetc.errors import PlanError
from sparsetc.formats.coo import coo
from sparsetc.ir.nest import Nest
from sparsetc.ir.nest import blocks as blocks_nest
from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.ir.program.resources import Statistics
from sparsetc.packing import words
from sparsetc.packing.base import Packed, cut_runs, index_dtype, pointers
from sparsetc.packing.partition import register_partition, row_numbers
from sparsetc.packing.words import Nonzeros
from sparsetc.planner import (
    Best,
    Candidate,
    Method,
    Problem,
    add_plans,
    blocked,
    dot_takes_entries,
    items_of,
    max_item_nnz_of,
    register_format,
    repeats,
    rounds,
    schedule_of,
    single,
)
from sparsetc.support import Ints, Names
from sparsetc.tensor import coords as crd

WINDOW = 1 << 20
"""Consecutive fibers of a group that are sorted by length together, a power of two (sigma of SELL-C-sigma). In larger
windows results of near fibers are not written together, which took 1.4 times as long; in smaller ones long fibers start
late, 1.2 times (H200, TTV; `benchmarks/results/rows_stored.json` and `ttv.json`)."""


def _side_by_side(length: Tensor, begins: Tensor, lanes: int) -> tuple[Tensor, Tensor]:
    """Put fibers side by side, `lanes` to a block of one group, sorted by falling length within each `WINDOW`.

    Args:
        length: (pieces,) how many nonzeros each piece of a fiber has.
        begins: (pieces,) bool: True at the first piece of each group.
        lanes: two or more.

    Returns:
        (pieces,) the lane of each, counted over all blocks; (blocks,) bool: True at a group's first block.
    """
    longest, count = int(length.max()), begins.numel()
    if count <= WINDOW:
        window = torch.cumsum(begins, 0)
    else:
        starts, pieces, _ = cut_runs(begins, WINDOW)
        window, count = torch.repeat_interleave(pieces, output_size=count).long(), starts.numel()
    key = window.mul_(longest + 1).add_(longest).sub_(length)
    order = torch.sort(key.int() if (count + 1) * (longest + 1) < 2**31 else key, stable=True).indices
    del window, key
    first, pieces, _ = cut_runs(begins, lanes)  # of each block
    lane = torch.arange(first.numel(), device=begins.device) * lanes - first
    lane = torch.repeat_interleave(lane, pieces, output_size=begins.numel())
    lane += torch.arange(lane.numel(), device=begins.device)
    return torch.empty_like(lane).scatter_(0, order, lane), begins.index_select(0, first)


def _sources(ptr: Tensor, lane: Tensor, start: Tensor, length: Tensor, lanes: int, stored: int, nnz: int) -> Tensor:
    """(stored,) the place of each stored nonzero of `nnz`; -1 for padding.

    Step n of lane l of block b is stored at ``ptr[b] + n * lanes + l``.

    Args:
        ptr: (blocks + 1,) where each block begins.
        lane: (pieces,) the lane of each piece of a fiber, counted over all blocks.
        start: (pieces,) the place of its first nonzero, ascending.
        length: (pieces,) how many nonzeros it has.
        lanes: of a block.
        stored: how many nonzeros are stored, padding included.
        nnz: how many there are.
    """
    block = torch.div(lane, lanes, rounding_mode="floor")
    first = ptr.index_select(0, block) + lane.sub(block, alpha=lanes)
    ahead = first.sub_(start.long(), alpha=lanes).to(ptr.dtype)  # may wrap around, and the sum below back
    nonzero = torch.arange(nnz, dtype=ptr.dtype, device=ptr.device)
    place = torch.repeat_interleave(ahead, length, output_size=nnz).add_(nonzero, alpha=lanes)
    return ptr.new_full((stored,), -1).scatter_(0, place.long(), nonzero)


@register_format
class Fiber:
    """Blocks of fibers."""

    name = "fiber"

    def parameters(self, order: int) -> Names:
        """Return no names: the format has no parameters of its own."""
        return ()

    def view(self, shape: Ints, storage: Storage) -> Nest:
        """Return blocks of fibers: a block shares the item modes, the nonzeros of a fiber the lane modes too."""
        item = words.fields(storage.item, shape, "item_word")
        lane = words.fields(storage.lane, shape, "lane_word")
        leaf = words.fields(storage.leaf, shape, "word")
        # A block has `lanes` entries or more, padding included, so an item of no more than these is one block.
        alone = 1 < storage.lanes >= storage.max_item_nnz > 0
        return blocks_nest(item, lane, leaf, storage.lanes, alone=alone, narrow=storage.narrow)

    def pack(self, coords: Tensor, shape: Ints, storage: Storage) -> Packed:
        """Sort nonzeros by (item, lane, leaf) modes, cut long fibers, and group fibers to blocks, blocks to items."""
        nnz = coords.shape[1]
        view = self.view(shape, storage)
        lanes = storage.lanes
        nonzeros = Nonzeros.sorted(coords, shape, (*storage.item, *storage.lane, *storage.leaf))
        starts, length, fibers_cut = cut_runs(nonzeros.starts((*storage.item, *storage.lane)), storage.max_fiber_len)
        begins = nonzeros.at(starts, gaps=False).starts(storage.item)
        pieces, lane = (starts, length), None
        if lanes > 1 and nnz:
            lane, begins = _side_by_side(length, begins, lanes)
            count = begins.numel() * lanes
            starts = starts.new_full((count,), -1).scatter_(0, lane, starts)
            length = length.new_zeros(count).scatter_(0, lane, length)
        length = length.int()
        steps = length.view(-1, lanes).amax(1)
        stored = int(steps.sum(dtype=torch.long)) * lanes
        ptr = torch.zeros(steps.numel() + 1, dtype=index_dtype(stored), device=coords.device)
        torch.cumsum(steps, 0, out=ptr[1:])
        of_items = _items(ptr.mul_(lanes), begins, storage.max_item_nnz, stored)
        unused = starts.numel() > pieces[0].numel()
        first = nonzeros.at(starts.index_select(0, of_items * lanes), gaps=False)
        fibers = nonzeros.at(starts, gaps=unused)
        groups_cut = of_items.numel() > int(torch.count_nonzero(begins))
        # In 16 bits, where they fit and only kernels read them.
        short = storage.narrow and length.numel() and int(length.max()) < 1 << 15
        arrays = {
            **dict.fromkeys(view.items.arrays, pointers(of_items, steps.numel(), length.numel())),
            "block_ptr": ptr,
            "block_full": length.view(-1, lanes).amin(1),
            "lane_len": length.short() if short else length,
            **words.encode(first, view.levels[0]),
            **words.encode(fibers, view.levels[1]),
        }
        if lane is None:
            source = torch.arange(stored, device=coords.device)
        else:
            source = _sources(ptr, lane, *pieces, lanes, stored, nnz)
        entries = nonzeros.at(source, gaps=stored > nnz)
        del begins, steps, starts, length, nonzeros, pieces, lane, source
        arrays |= words.encode(entries, view.levels[2], narrow=storage.narrow)
        return Packed(
            self.name,
            storage,
            shape,
            nnz,
            view,
            arrays,
            positions=entries.numbers,
            stored=stored,
            items=of_items.numel(),
            representatives=(first.numbers, fibers.numbers),
            split_rows=groups_cut,
            split_fibers=fibers_cut,
            padded=stored != nnz or unused,
        )


def _items(ptr: Tensor, begins: Tensor, most: int, stored: int) -> Tensor:
    """(items,) the first block of each work item, given True at the first block of each group.

    A group is cut at the first block past each multiple of `most` stored entries; 0 cuts none.
    """
    if 0 < most < stored:
        group = torch.cumsum(begins, 0).sub_(1)
        before = ptr[:-1] - ptr[:-1][begins].index_select(0, group)
        begins = crd.starts_of_runs([group, before.div_(most, rounding_mode="floor")])
    return torch.nonzero(begins).flatten()


def fibers(problem: Problem, best: Best) -> Iterator[Candidate]:
    """Yield the candidates of fibers along each summed mode, if there are several and no dots take entries."""
    if len(problem.rest) > 1 and not dot_takes_entries(problem):
        yield from (fiber(problem, leaf) for leaf in problem.rest)


def best_leaf(problem: Problem) -> int:
    """Return the mode with the fewest fibers among the summed modes, or among all modes if none is summed."""
    choice = problem.rest or tuple(range(problem.order))
    return min(choice, key=lambda leaf: problem.counts.distinct(tuple(m for m in range(problem.order) if m != leaf)))


def fiber(problem: Problem, leaf: int) -> Candidate:
    """Return the candidate of fibers along `leaf`; if it is a summed mode, the fibers of an output row are together.

    Where no mode is left for lanes, as in a matrix, it is that of `rows`. PlanError where `leaf` is no mode, or `rows`
    does not apply.
    """
    if leaf not in range(problem.order):
        raise PlanError(f"leaf mode {leaf} is not a mode of a tensor of order {problem.order}")
    shared = problem.kept if leaf not in problem.kept else ()
    between = tuple(m for m in range(problem.order) if m != leaf and m not in shared)
    if not between:
        return rows(problem, "fiber")
    schedule = schedule_of(problem, blocks=True)
    longest = 0 if problem.deterministic and not shared else problem.rules["fiber_nnz"]
    most = max_item_nnz_of(problem, schedule)
    storage = Storage(shared, between, (leaf,), schedule.lanes, longest, most, narrow=True)
    long = problem.nnz >= problem.rules["long_fiber"] * problem.counts.distinct((*shared, *between))
    if schedule.dot and problem.precision in ("tf32", "bf16") and long:
        schedule = replace(schedule, precision="tf32x3")
    return single("fiber", storage, schedule, expected_fibers(problem, storage, schedule))


def expected_fibers(problem: Problem, storage: Storage, schedule: Schedule) -> Statistics:
    """Estimate the statistics of nonzeros packed as fibers of this storage."""
    fibers, rows = problem.counts.distinct((*storage.item, *storage.lane)), problem.counts.distinct(storage.item)
    statistics = blocked(problem, problem.nnz, fibers, rows, storage, schedule)
    item, fiber = problem.counts.longest(storage.item), problem.counts.longest((*storage.item, *storage.lane))
    chain = min(statistics.chain, max(1, rounds(max(fiber, item // storage.lanes), schedule)))
    cut = 0 < storage.max_item_nnz < item
    return replace(statistics, chain=chain, split_rows=cut, split_fibers=bool(storage.max_fiber_len))


# -- a row a lane -----------------------------------------------------------------------------------------------------


def short_rows(problem: Problem, best: Best | None = None) -> Iterator[Candidate]:
    """One row a lane, for Triton where rows are short: a long one would keep its neighbours' lanes waiting.

    None where dots take entries as they are loaded.
    """
    if not problem.rest or not problem.kept or dot_takes_entries(problem):
        return
    most = problem.rules["lane_nnz"]
    if not most or problem.nnz <= most * problem.counts.distinct(problem.kept):
        yield rows(problem)


def rows(problem: Problem, name: str = "rows") -> Candidate:
    """One output row a lane; for Triton a very long one is cut, unless sums are to be in order."""
    if not problem.kept or not problem.rest:
        why = f'"{problem.equation}" keeps {"all" if problem.kept else "none"} of them'
        raise PlanError(f'plan "{name}" needs an output with some, not all, of the sparse operand\'s modes; {why}')
    schedule = _for_rows(problem, schedule_of(problem, blocks=True, rows=True))
    longest = 0 if problem.deterministic else problem.rules["lane_nnz"]
    most = max(schedule.lanes, problem.rules["rows_item_nnz"])
    storage = Storage((), problem.kept, problem.rest, schedule.lanes, longest, most, narrow=True)
    expected = blocked(problem, problem.nnz, problem.counts.distinct(problem.kept), 1, storage, schedule)
    row = problem.counts.longest(problem.kept)
    split, chain = bool(longest) and row > longest, rounds(row, schedule)
    chain = min(expected.chain, chain) if longest else chain
    expected = replace(expected, chain=chain, runs=repeats(problem, storage), split_fibers=split)
    return single(name, storage, schedule, expected)


def _for_rows(problem: Problem, schedule: Schedule) -> Schedule:
    """Return the schedule for rows of this average length: warps, unrolling, masked unrolling, and registers.

    Half the warps go over lanes of single elements, and over rows so short that a program is over when it has begun:
    more programs are then under way. An H200 took 327 us for a TTV of 22 M rows of 1.6 nonzeros with 4 warps a program
    and 8 steps together, 308 with 4 and 2 masked ones, 274 of these with 2 warps (`rows_schedules.json` in
    `benchmarks/results`); for a TTM of rank 16 by 32 lanes, 946 and 729 with 4 and 2 warps, of rank 64 by 8 lanes 3,299
    and 2,175 (`rows_stored.json`). Where a lane reads several operands, rows are of 5 nonzeros or more, or programs are
    few, 4 warps won by up to 2 (H100, 33,317 rows of 2.2 nonzeros, 16 columns: 17.5 us with 2 warps, 12.8 with 4).
    """
    if problem.backend.at_once:
        return schedule
    steps = 1 << max(1, -(-problem.nnz // max(1, problem.counts.distinct(problem.kept))) - 1).bit_length()
    e = problem.einsum
    gathered = sum(any(c in e.sparse_indices for c in table) for table in e.tables)
    short, few = steps <= problem.rules["short_row"] and gathered <= 1, _few_programs(problem, schedule)
    if not schedule.blocks or (short and not few):
        schedule = replace(schedule, warps=problem.rules["row_warps"] // 2)
    unroll = min(schedule.unroll, 4) if steps < 4 else schedule.unroll
    schedule = replace(schedule, unroll=unroll, masked_unroll=min(schedule.unroll, steps))
    return replace(schedule, registers=_registers(problem, schedule, steps, gathered))


def _registers(problem: Problem, schedule: Schedule, steps: int, gathered: int) -> int:
    """Registers of a thread: few where waiting programs are many, enough for a round's loads where not; 0 for any.

    Left to itself the compiler takes 32 to 40, and lets loads wait for one another (H200, float32, microseconds; MTTKRP
    at rank 32 of rows of 77 nonzeros 341, by 64 registers 306; SpMM at 32 columns of a graph of 19,717 nodes 59 and 41,
    TTM of rank 16 of rows of 1.6 and of 219 nonzeros 802 and 250, by 32 and 40 registers 718 and 213;
    `benchmarks/results/registers.json`). What takes several blocks of columns is left to it.
    """
    e, long_row = problem.einsum, problem.rules["long_row"]
    split = any(problem.bound.by_index[c] > schedule.block(c) for c in e.output if c in dict(schedule.blocks))
    if not schedule.blocks or split or problem.itemsize > 4:
        return 0
    if gathered > 1:
        return 64 if steps > long_row // 4 else 40
    if steps <= problem.rules["short_row"]:
        return 32
    return 64 if _few_programs(problem, schedule) else 40


def _few_programs(problem: Problem, schedule: Schedule) -> bool:
    """Return True if all programs are under way at once, or nearly so."""
    rows = max(problem.counts.distinct(problem.kept), problem.nnz // problem.rules["lane_nnz"])
    return rows // schedule.lanes <= problem.rules["few_programs"]


# -- long rows by one method, short ones a lane each -------------------------------------------------------------------

LongRowPlans = Callable[[Problem, Best], Iterable[Candidate]]
"""The plans of long rows."""


def _first(name: str, longs: LongRowPlans, problem: Problem) -> Candidate:
    """Return the first hybrid candidate. Raise `PlanError` with the missing condition if there is none."""
    for hybrid in _hybrids(name, longs, problem, Best()):
        return hybrid
    threshold = problem.rules["long_row"]
    short_nnz, _ = problem.counts.short_share(problem.kept, threshold)
    if 0 < short_nnz < problem.nnz:
        lacking = f'two modes of the sparse operand or more to be summed; "{problem.equation}" sums fewer'
    else:
        kinds = f"output rows both of {threshold} nonzeros or more and of fewer"
        lacking = f'{kinds}; those of "{problem.equation}" on this tensor are all of one kind'
    raise PlanError(f"plan {name!r} needs {lacking}")


def _hybrids(name: str, longs: LongRowPlans, problem: Problem, best: Best) -> Iterator[Candidate]:
    """Yield hybrid candidates if there are both long and short rows."""
    threshold = problem.rules["long_row"]
    short_nnz, shorts = problem.counts.short_share(problem.kept, threshold) if problem.rest else (0, 0)
    if not 0 < short_nnz < problem.nnz:
        return
    short = rows(problem).plan.parts[0]
    short = replace(short, storage=replace(short.storage, max_fiber_len=0), label=f"rows of fewer than {threshold}")
    of_short = blocked(problem, short_nnz, shorts, 1, short.storage, short.schedule)
    of_short = replace(of_short, chain=rounds(threshold, short.schedule))  # the longest of the short rows
    long_rows = problem.counts.distinct(problem.kept) - shorts
    for long in longs(problem, best):
        first = replace(long.plan.parts[0], label=f"rows of {threshold} nonzeros or more")
        of_long = _of_long_rows(long, problem, problem.nnz - short_nnz, long_rows)
        # One launch has one number of warps; of many nonzeros each part has programs enough for its own launch.
        fused = of_long.nnz + of_short.nnz < problem.rules["fuse_below"]
        second = _with_warps(short, first.schedule.warps) if fused else short
        yield Candidate(
            Plan(name, (first, second), fused, "run_length", (("threshold", threshold),)), (of_long, of_short)
        )


def _with_warps(short: Part, warps: int) -> Part:
    """Return the part with this many warps, the same elements a thread, and the register limit of its launch."""
    lanes = max(4, short.storage.lanes * warps // short.schedule.warps)
    storage = replace(short.storage, lanes=lanes, max_item_nnz=lanes)
    return replace(short, storage=storage, schedule=replace(short.schedule, warps=warps, lanes=lanes, registers=0))


def _of_long_rows(long: Candidate, problem: Problem, nnz: int, rows: int) -> Statistics:
    """Estimate the statistics of the other method's part: its share of the nonzeros, in items of long rows only."""
    whole, storage = long.expected[0], long.plan.parts[0].storage
    share = whole.scaled(nnz / whole.nnz)
    if {*storage.item} != {*problem.kept}:
        return share
    items = min(share.items, items_of(nnz, rows, storage.max_item_nnz))
    return replace(share, items=items, fibers=items if whole.fibers == whole.items else share.fibers)


@register_partition("run_length", whole_rows=True)
def by_run_length(coords: Tensor, shape: Ints, kept: Ints, *, threshold: int) -> list[Tensor | None]:
    """Return [nonzeros in rows of at least `threshold`, the others]. A row has one coordinate in each kept mode."""
    long = row_lengths(coords, shape, kept) >= threshold
    return [torch.nonzero(long).flatten(), torch.nonzero(~long).flatten()]


def row_lengths(coords: Tensor, shape: Ints, kept: Ints) -> Tensor:
    """Return (nnz,) the number of nonzeros in each nonzero's output row."""
    nnz = coords.shape[1]
    if not kept or nnz == 0:
        return torch.full((nnz,), nnz, device=coords.device)
    row = row_numbers(*crd.of_modes(coords, shape, kept))
    return torch.bincount(row)[row]


add_plans(Method("rows", short_rows, rows), Method("fiber", fibers, lambda problem: fiber(problem, best_leaf(problem))))
for _name, _longs in (("coo+rows", lambda problem, best: (coo(problem),)), ("fiber+rows", fibers)):
    add_plans(Method(_name, partial(_hybrids, _name, _longs), partial(_first, _name, _longs), kernels=True))
