"""``fiber`` and ``rows``: fibers side by side, as in SELL-C-sigma (sliced ELL): a GPU takes `lanes` of them at a step.

A fiber is the nonzeros that share the item and lane modes; a row is the fibers that share the item modes, which are
those of the output. Fibers longer than `max_fiber_len` are cut; those of a row are sorted by falling length, 2^20 at a
time, and `lanes` of them make a block, in which step n takes the n-th nonzero of each:

        item_ptr   [ 0     2 …            blocks of each work item, all of one row; absent where each has one
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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from sparsetc.errors import PlanError
from sparsetc.ir.nest.nest import Nest
from sparsetc.ir.nest.nest import blocks as blocks_nest
from sparsetc.ir.plan import Schedule, Storage
from sparsetc.ir.program.cost import Statistics
from sparsetc.packing import words
from sparsetc.packing.base import Packed, cut_runs, index_dtype, runs
from sparsetc.packing.words import Nonzeros, Taken
from sparsetc.planner.candidate import CPU_ITEM_NNZ, Candidate, blocked, max_item_nnz_of, repeats, single
from sparsetc.planner.problem import Counts, Problem
from sparsetc.planner.registry import Method, add_plans, register_format
from sparsetc.planner.schedule import ROW_WARPS, schedule_of
from sparsetc.tensor import coords as crd

WINDOW = 1 << 20
"""Consecutive fibers of a row that are sorted by length together, a power of two (the sigma of SELL-C-sigma). In larger
windows results of near fibers are not written together, which took 1.4 times as long; in smaller ones long fibers start
late, 1.2 times (H200, TTV; `benchmarks/results/rows_stored.json` and `ttv.json`)."""


def _blocks(
    nonzeros: Nonzeros, shape: tuple[int, ...], storage: Storage
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Put fibers side by side, `lanes` to a block; with several lanes, fibers of each `WINDOW` by falling length.

    Returns:
        (blocks + 1,) the first stored entry of each block, padding included; (blocks,) the number of the row of each,
        since blocks never mix rows; (blocks * lanes,) the place of each lane's first nonzero, -1 for an unused lane,
        and (blocks * lanes,) int32 how many nonzeros it has; whether any fiber is cut, so that it has several lanes.
    """
    start, length, row, split = _pieces(nonzeros, shape, storage)
    lanes, device = storage.lanes, row.device
    if lanes > 1 and row.numel():
        place, row = _side_by_side(row, lanes)
        size = row.numel() * lanes
        start = torch.full((size,), -1, dtype=start.dtype, device=device).scatter_(0, place, start)
        length = torch.zeros(size, dtype=length.dtype, device=device).scatter_(0, place, length)
        del place
    length = length.int()
    steps = length.view(-1, lanes).amax(1) if lanes > 1 else length
    stored = int(steps.sum(dtype=torch.long)) * lanes
    ptr = torch.zeros(steps.numel() + 1, dtype=index_dtype(stored), device=device)
    torch.cumsum(steps, 0, out=ptr[1:])
    return ptr.mul_(lanes), row, start, length, split


def _sources(ptr: torch.Tensor, lane_start: torch.Tensor, lane_len: torch.Tensor, lanes: int) -> torch.Tensor:
    """(stored,) the place of each stored nonzero; -1 for padding.

    Step n of lane l of block b is stored at ``ptr[b] + n * lanes + l``.
    """
    stored, device = int(ptr[-1]), ptr.device
    if lanes == 1:  # lanes are pieces in order, one after the other
        return torch.arange(stored, device=device)
    blocks = torch.arange(ptr.numel() - 1, dtype=ptr.dtype, device=device)
    lane = torch.repeat_interleave(blocks, torch.diff(ptr), output_size=stored)
    step = torch.arange(stored, dtype=ptr.dtype, device=device)
    step -= ptr.index_select(0, lane)
    lane.mul_(lanes).add_(step % lanes)
    step = step.div_(lanes, rounding_mode="floor")
    idle = step >= lane_len.index_select(0, lane)
    return step.add_(lane_start.index_select(0, lane)).masked_fill_(idle, -1)


def _pieces(
    nonzeros: Nonzeros, shape: tuple[int, ...], storage: Storage
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Cut fibers into pieces and put these in the order in which they are stored.

    Returns:
        (pieces,) the place of each piece's first nonzero, its length, and the number of its row; whether any fiber is
        cut.
    """
    start, length, split = cut_runs(_fibers(nonzeros, shape, storage), storage.max_fiber_len)
    row = torch.zeros_like(start)
    if storage.item and start.numel():
        fresh = crd.starts_of_runs(crd.sort_keys(nonzeros.rows(storage.item, start), [shape[m] for m in storage.item]))
        row = torch.cumsum(fresh, 0, dtype=start.dtype).sub_(1)
    if storage.lanes > 1 and start.numel():
        longest, window = int(length.max()), _windows(row)
        key = (window.long() * (longest + 1)).add_(longest).sub_(length)
        if (int(window[-1]) + 1) * (longest + 1) < 2**31:
            key = key.int()
        del window
        order = torch.sort(key, stable=True).indices
        del key
        start, length, row = (array.index_select(0, order) for array in (start, length, row))
    return start, length, row, split


def _windows(row: torch.Tensor) -> torch.Tensor:
    """Return the window of each piece, given nondecreasing rows; `row` itself where no row is longer than a window."""
    count = torch.bincount(row)
    windows = (count + WINDOW - 1) // WINDOW
    if windows.numel() == int(windows.sum()):
        return row
    first, place = torch.cumsum(count, 0) - count, torch.arange(row.numel(), device=row.device)
    place.sub_(first.index_select(0, row)).div_(WINDOW, rounding_mode="floor")
    return place.add_((torch.cumsum(windows, 0) - windows).index_select(0, row))


def _fibers(nonzeros: Nonzeros, shape: tuple[int, ...], storage: Storage) -> torch.Tensor:
    """(nnz,) bool: True at the first nonzero of each fiber."""
    nnz, shared = nonzeros.coords.shape[1], (*storage.item, *storage.lane)
    if shared and nnz:
        return crd.starts_of_runs(crd.sort_keys(nonzeros.rows(shared), [shape[m] for m in shared]))
    flags = torch.zeros(nnz, dtype=torch.bool, device=nonzeros.coords.device)
    flags[:1] = True
    return flags


def _side_by_side(row: torch.Tensor, lanes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 place of each piece among all lanes, row of each block), given the rows of pieces, which rise."""
    count = torch.bincount(row)
    blocks = (count + lanes - 1) // lanes
    unused = (torch.cumsum(blocks, 0) - blocks) * lanes - (torch.cumsum(count, 0) - count)
    place = torch.arange(row.numel(), device=row.device).add_(unused.index_select(0, row))
    numbers = torch.arange(count.numel(), dtype=row.dtype, device=row.device)
    return place, torch.repeat_interleave(numbers, blocks)


@register_format
class Fiber:
    """Blocks of fibers."""

    name = "fiber"

    def parameters(self, order: int) -> tuple[str, ...]:
        """None."""
        return ()

    def view(self, shape: tuple[int, ...], storage: Storage) -> Nest:
        """Return blocks of fibers: a block shares the item modes, the nonzeros of a fiber the lane modes too."""
        item = words.fields(storage.item, shape, "item_word")
        lane = words.fields(storage.lane, shape, "lane_word")
        leaf = words.fields(storage.leaf, shape, "word")
        # A block has `lanes` entries or more, padding included, so an item of no more than these is one block.
        alone = 1 < storage.lanes >= storage.max_item_nnz > 0
        return blocks_nest(item, lane, leaf, storage.lanes, alone=alone, narrow=storage.narrow)

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
        """Sort by (item, lane, leaf) modes, cut fibers, deal them to blocks and blocks to items."""
        nnz = coords.shape[1]
        nonzeros = Nonzeros.sorted(coords, shape, (*storage.item, *storage.lane, *storage.leaf))
        ptr, row, lane_start, lane_len, split = _blocks(nonzeros, shape, storage)
        item_ptr, rows = _items(ptr, row, storage.max_item_nnz)
        view, lanes = self.view(shape, storage), storage.lanes
        first = nonzeros.numbers(lane_start.index_select(0, item_ptr[:-1] * lanes))
        lane = nonzeros.numbers(lane_start)
        unused = bool((lane < 0).any())
        # In 16 bits, where they fit and only kernels read them.
        short = storage.narrow and lane_len.numel() and int(lane_len.max()) < 1 << 15
        items = dict.fromkeys(view.items.arrays, item_ptr.to(index_dtype(lane.numel())))
        arrays = {
            **items,
            "block_ptr": ptr,
            "block_full": lane_len.view(-1, lanes).amin(1) if lanes > 1 else lane_len,
            "lane_len": lane_len.short() if short else lane_len.clone(),
            **words.encode(Taken(coords, first), view.levels[0]),
            **words.encode(Taken(coords, lane), view.levels[1]),
        }
        at = nonzeros.numbers(_sources(ptr, lane_start, lane_len, lanes))
        del row, lane_start, lane_len, nonzeros
        arrays |= words.encode(Taken(coords, at), view.levels[2], narrow=storage.narrow)
        stored, split_rows = at.numel(), first.numel() > rows
        about = (self.name, storage, shape, nnz, view, arrays, at, stored, first.numel())
        return Packed(*about, (first, lane), split_rows, split, stored != nnz or unused)


def _items(ptr: torch.Tensor, row: torch.Tensor, most: int) -> tuple[torch.Tensor, int]:
    """Return (items + 1,) the first block of each work item, and the number of rows: no item mixes rows.

    A row is cut at the first block past each multiple of `most` stored entries; 0 cuts none.
    """
    flags = crd.starts_of_runs([row])
    rows = torch.nonzero(flags).flatten()
    if 0 < most < int(ptr[-1]):
        number = ptr[:-1] - ptr.index_select(0, rows).index_select(0, row)
        number = number.div_(most, rounding_mode="floor")
        flags[1:] |= number[1:] != number[:-1]
    return runs(flags), rows.numel()


MAX_FIBER_LEN = 32
"""Longest fiber of a block on a GPU."""
LONG_FIBER = 4
"""Mean nonzeros of a fiber from which tf32x3 is used where tf32 was asked for: by a better layout of Triton's it takes
0.89 to 1.01 of tf32's time there, 1.09 to 1.17 on shorter fibers (H200, TTMc; `benchmarks/results/switches.json`)."""


def fibers(problem: Problem, counts: Counts) -> Iterator[Candidate]:
    """Fibers along each mode that is summed away, where there are several."""
    return (fiber(problem, counts, leaf) for leaf in problem.rest if len(problem.rest) > 1)


def best_leaf(problem: Problem, counts: Counts) -> int:
    """Return the mode with the fewest fibers among the summed modes, or among all modes if none is summed."""
    choice = problem.rest or tuple(range(problem.order))
    return min(choice, key=lambda leaf: counts.distinct(tuple(m for m in range(problem.order) if m != leaf)))


def fiber(problem: Problem, counts: Counts, leaf: int) -> Candidate:
    """Return the plan of fibers along `leaf`, those of one output row together.

    Where no mode is left for lanes, as in a matrix, rows are the fibers. Raises `PlanError` unless `leaf` is a mode.
    """
    if leaf not in range(problem.order):
        raise PlanError(f"leaf mode {leaf} is not a mode of a tensor of order {problem.order}")
    shared = problem.kept if leaf not in problem.kept else ()
    between = tuple(m for m in range(problem.order) if m != leaf and m not in shared)
    if not between:
        return rows(problem, counts, "fiber")
    schedule = schedule_of(problem, blocks=True)
    split = problem.backend == "triton" and not (problem.deterministic and not shared)
    most = max_item_nnz_of(problem, counts.nnz, schedule)
    narrow, longest = problem.backend == "triton", MAX_FIBER_LEN if split else 0
    storage = Storage(shared, between, (leaf,), schedule.lanes, longest, most, narrow)
    long = counts.nnz >= LONG_FIBER * counts.distinct((*shared, *between))
    if schedule.dot and problem.precision in ("tf32", "bf16") and long:
        schedule = replace(schedule, precision="tf32x3")
    return single("fiber", storage, schedule, expected_fibers(problem, counts, storage, schedule))


def expected_fibers(problem: Problem, counts: Counts, storage: Storage, schedule: Schedule) -> Statistics:
    """What packing nonzeros as fibers of this storage is expected to give."""
    fibers, rows = counts.distinct((*storage.item, *storage.lane)), counts.distinct(storage.item)
    statistics = blocked(problem, counts.nnz, fibers, rows, storage, schedule)
    cut = 0 < storage.max_item_nnz < counts.longest(storage.item)
    return replace(statistics, split_rows=cut, split_fibers=bool(storage.max_fiber_len))


# -- a row a lane -----------------------------------------------------------------------------------------------------
LONG_ROW = 64
"""Nonzeros from which a row is given work items of its own (H200: rows of 15 lost 1.6x by it, of 2,300 won 1.4x)."""

FEW_PROGRAMS = 8192
"""Programs, at most, that need not all be under way at once."""
SHORT_ROW = 4
"""Nonzeros, on average, of rows so short that a program is over when it has begun."""


def short_rows(problem: Problem, counts: Counts) -> Iterator[Candidate]:
    """One row a lane, where rows are short: on a GPU a long one would keep its neighbours' lanes waiting."""
    if not problem.rest or not problem.kept:
        return
    if problem.backend == "torch" or counts.nnz <= 4 * LONG_ROW * counts.distinct(problem.kept):
        yield rows(problem, counts)


def rows(problem: Problem, counts: Counts, name: str = "rows") -> Candidate:
    """One output row a lane, uncut unless very long."""
    if not problem.kept or not problem.rest:
        which = "all" if problem.kept else "none"
        why = f'"{problem.equation}" keeps {which} of them'
        raise PlanError(f'plan "{name}" needs an output with some, not all, of the sparse operand\'s modes; {why}')
    schedule = _for_rows(problem, counts, schedule_of(problem, blocks=True, rows=True))
    longest = 0 if problem.backend == "torch" or problem.deterministic else 4 * LONG_ROW
    most = schedule.lanes if problem.backend == "triton" else CPU_ITEM_NNZ
    narrow = problem.backend == "triton"
    storage = Storage((), problem.kept, problem.rest, schedule.lanes, longest, most, narrow)
    expected = blocked(problem, counts.nnz, counts.distinct(problem.kept), 1, storage, schedule)
    row = counts.longest(problem.kept)
    split, rounds = bool(longest) and row > longest, row // schedule.unroll
    chain = min(expected.chain, rounds) if longest else rounds
    expected = replace(expected, chain=chain, runs=repeats(problem, counts, storage), split_fibers=split)
    return single(name, storage, schedule, expected)


def _for_rows(problem: Problem, counts: Counts, schedule: Schedule) -> Schedule:
    """The schedule for rows as long as these: with no more masked steps together than short rows have.

    Half the warps go over lanes of single elements, and over rows so short that a program is over when it has begun:
    more programs are then under way. An H200 took 327 us for a TTV of 22 M rows of 1.6 nonzeros with 4 warps a program
    and 8 steps together, 308 with 4 and 2 masked ones, 274 of these with 2 warps (`rows_schedules.json` in
    `benchmarks/results`); for a TTM of rank 16 by 32 lanes, 946 and 729 with 4 and 2 warps, of rank 64 by 8 lanes 3,299
    and 2,175 (`rows_stored.json`). Where a lane reads several operands, or rows are of 5 nonzeros or more, 4 warps won
    by up to 1.5.
    """
    if problem.backend != "triton":
        return schedule
    steps = 1 << max(1, -(-counts.nnz // max(1, counts.distinct(problem.kept))) - 1).bit_length()
    e = problem.bound.einsum
    gathered = sum(any(c in e.sparse_indices for c in e.inputs[p]) for p in e.dense)
    if not schedule.blocks or (steps <= SHORT_ROW and gathered <= 1):
        schedule = replace(schedule, warps=ROW_WARPS // 2)
    unroll = min(schedule.unroll, 4) if steps < 4 else schedule.unroll
    schedule = replace(schedule, unroll=unroll, masked_unroll=min(schedule.unroll, steps))
    return replace(schedule, registers=_registers(problem, counts, schedule, steps, gathered))


def _registers(problem: Problem, counts: Counts, schedule: Schedule, steps: int, gathered: int) -> int:
    """Registers of a thread: few where waiting programs are many, enough for a round's loads where they are not.

    Left to itself the compiler takes 32 to 40, and lets loads wait for one another (H200, float32, microseconds; MTTKRP
    at rank 32 of rows of 77 nonzeros 341, by 64 registers 306; SpMM at 32 columns of a graph of 19,717 nodes 59 and 41,
    TTM of rank 16 of rows of 1.6 and of 219 nonzeros 802 and 250, by 32 and 40 registers 718 and 213;
    `benchmarks/results/registers.json`). What takes several blocks of columns is left to it.
    """
    e = problem.bound.einsum
    split = any(problem.bound.by_index[c] > schedule.block(c) for c in e.output if c in dict(schedule.blocks))
    if not schedule.blocks or split or problem.itemsize > 4:
        return 0
    if gathered > 1:
        return 64 if steps > LONG_ROW // 4 else 40
    programs = max(counts.distinct(problem.kept), counts.nnz // (4 * LONG_ROW)) // schedule.lanes
    return 32 if steps <= SHORT_ROW else 64 if programs <= FEW_PROGRAMS else 40


add_plans(
    Method("rows", short_rows, rows),
    Method("fiber", fibers, lambda problem, counts: fiber(problem, counts, best_leaf(problem, counts))),
)
