"""The plans worth considering for an einsum: which formats, which levels, which schedules.

In: the canonical einsum and counts of its pattern. Out: `Candidate`s: plans with an estimate of what packing each
part would give, so that all are costed before one is packed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import expm1, prod

from sparsetc.errors import PlanError
from sparsetc.ir.cost import Statistics
from sparsetc.ir.einsum import Bound
from sparsetc.ir.operands import MIN_DOT, dense_axes, joined
from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.planner.statistics import Counts

# Measurements behind these numbers: benchmarks/results/schedule_sweep.json, mttkrp_plans.json, ops.json.
LONG_ROW = 64
"""Nonzeros from which a row is given work items of its own (H200: rows of 15 lost 1.6x by it, of 2,300 won 1.4x)."""
LONG_RUN = 32
"""Nonzeros a run must have on average to be dealt to work items by one more mode than the output's."""
WARP_ELEMENTS = 256
"""Elements of a gathered tile a warp holds: 8 a thread, two 16-byte loads (H200: 8 lanes of rank 32 beat 16 and 32)."""
LANES_PER_WARP = 16
"""Most lanes a warp takes of a two-dimensional tile: Triton reads a word per thread, instead of passing them through
shared memory, only while there are more threads than lanes (rank 5: 32 lanes a warp lost 1.2x)."""
ROW_WARPS = 4
"""Warps of a block of short rows, half as many elements each (H200: 16 rows over 4 warps beat 7 other shapes)."""
MAX_FIBER_LEN = 32
"""Longest fiber of a block on a GPU."""
LONG_FIBER = 4
"""Nonzeros a fiber from which the loop over them, not the dot that ends a block, takes the time of matrix products.
Triton lays the loop out for the dot unless its sides are split first: tf32x3 took 0.89 to 0.93 of tf32's time on fibers
of 8 to 32 nonzeros, 1.01 on those of 4, and 1.09 to 1.17 on shorter ones (H200, TTMc of rank 32 x 32;
`benchmarks/results/switches.json`)."""
PROGRAMS = 1 << 16
"""Programs a large tensor is dealt to; a work item takes as many nonzeros as make that many, within bounds."""
ITEM_NNZ = (128, 512)
"""Fewest and most nonzeros an item takes (H200: 128 won on 1 to 10 M nonzeros, 512 on 77 M)."""
DOT_ITEM_NNZ = (512, 2048)
"""Fewest and most where an item ends by adding a matrix (H200, TTMc of rank 32 x 32: 2,048 beat 512 and 8,192)."""
DOT_LANES = 16
"""Lanes a dot contracts at once; twice as many, one step at a time, where runs are contracted in tf32x3 (H200,
`benchmarks/results/ttmc_stages.json`: 4.24 ms against 4.48)."""
DOT_TILE = 1024
"""Accumulator elements a warp (H200, TTMc of rank 32 x 32: 16 lanes and one warp beat 32 lanes and 2 or 4 by 1.3x)."""
CPU_ITEM_NNZ = 1 << 16
FUSE_BELOW = 4_000_000
"""Nonzeros below which the parts of a plan share one launch."""


@dataclass(frozen=True)
class Setting:
    """What a plan is made for."""

    bound: Bound
    kept: tuple[int, ...]
    order: int
    backend: str
    precision: str
    deterministic: bool
    itemsize: int
    floating: bool = True
    """Whether a GPU has a matrix instruction for the type."""
    memory: int | None = None
    """Bytes that stored tiles may take; None for any."""
    coalesced: bool = True
    """No coordinate occurs twice: tiles hold one value a position."""
    rows: int = 1
    """Rows of the output."""
    distinct: bool = True
    """No two nonzeros have the same coordinates, or each has an output row of its own."""
    finer: tuple[str, ...] = ()
    """Precisions of dots that are more exact than the one asked for, and allowed therefore."""
    products: bool = True
    """Whether the type has a matrix product at all: integers have none."""
    sparse_output: bool = False
    """Whether output rows are those of a pattern."""

    @property
    def letters(self) -> tuple[str, ...]:
        """The sparse operand's letters, by mode."""
        (sparse,) = self.bound.einsum.sparse
        return self.bound.einsum.inputs[sparse]

    @property
    def rest(self) -> tuple[int, ...]:
        """Modes that are summed away."""
        return tuple(m for m in range(self.order) if m not in self.kept)


@dataclass(frozen=True)
class Candidate:
    """A plan and what packing its parts is expected to give."""

    plan: Plan
    expected: tuple[Statistics, ...]


def best_leaf(setting: Setting, counts: Counts) -> int:
    """The leaf mode with the fewest fibers: of the summed modes where there are any."""
    choice = setting.rest or tuple(range(setting.order))
    return min(choice, key=lambda leaf: counts.distinct(tuple(m for m in range(setting.order) if m != leaf)))


def coo(setting: Setting, counts: Counts, also: tuple[int, ...] = ()) -> Candidate:
    """Runs of one output row, or equal chunks where there is no row to share (or every nonzero is one).

    Modes in `also` are shared by a run too: their factor rows are read once a run, which is then one of several of
    its output row.
    """
    shared = (*setting.kept, *also) if setting.rest else ()
    leaf = tuple(m for m in range(setting.order) if m not in shared)
    schedule = schedule_of(setting, blocks=False)
    most = _max_item_nnz(setting, counts.nnz, schedule)
    storage = Storage(shared, (), leaf, max_item_nnz=most, narrow=setting.backend == "triton")
    n, distinct = counts.nnz, counts.distinct(shared)
    items = _items(n, distinct if shared else 1, most)
    longest = counts.longest(shared)
    rounds = min(most, longest) // (schedule.lanes * schedule.unroll)
    runs = _runs(setting, counts, storage)
    expected = Statistics(items, items, n, n, setting.itemsize, runs, rounds, longest > most)
    return _single("coo", storage, schedule, expected)


def fiber(setting: Setting, counts: Counts, leaf: int) -> Candidate:
    """Fibers along `leaf`, those of one output row together; a matrix's rows are its fibers."""
    if leaf not in range(setting.order):
        raise PlanError(f"leaf mode {leaf} is not a mode of a tensor of order {setting.order}")
    shared = setting.kept if leaf not in setting.kept else ()
    between = tuple(m for m in range(setting.order) if m != leaf and m not in shared)
    if not between:
        return replace(rows(setting, counts), plan=replace(rows(setting, counts).plan, name="fiber"))
    schedule = schedule_of(setting, blocks=True)
    split = setting.backend == "triton" and not (setting.deterministic and not shared)
    most = _max_item_nnz(setting, counts.nnz, schedule)
    narrow, longest = setting.backend == "triton", MAX_FIBER_LEN if split else 0
    storage = Storage(shared, between, (leaf,), schedule.lanes, longest, most, narrow)
    fibers = counts.distinct((*shared, *between))
    if schedule.dot and setting.precision in ("tf32", "bf16") and counts.nnz >= LONG_FIBER * fibers:
        schedule = replace(schedule, precision="tf32x3")
    expected = _blocked(setting, counts.nnz, fibers, counts.distinct(shared), storage, schedule)
    expected = replace(expected, split_rows=counts.longest(shared) > most, split_fibers=split)
    return _single("fiber", storage, schedule, expected)


def rows(setting: Setting, counts: Counts) -> Candidate:
    """One output row a lane, uncut unless very long."""
    if not setting.kept or not setting.rest:
        raise PlanError('plan "rows" needs an output with some, not all, of the sparse operand\'s modes')
    schedule = schedule_of(setting, blocks=True, rows=True)
    longest = 0 if setting.backend == "torch" or setting.deterministic else 4 * LONG_ROW
    most = schedule.lanes if setting.backend == "triton" else CPU_ITEM_NNZ
    narrow = setting.backend == "triton"
    storage = Storage((), setting.kept, setting.rest, schedule.lanes, longest, most, narrow)
    expected = _blocked(setting, counts.nnz, counts.distinct(setting.kept), 1, storage, schedule)
    split = bool(longest) and counts.longest(setting.kept) > longest
    expected = replace(expected, runs=_runs(setting, counts, storage), split_fibers=split)
    return _single("rows", storage, schedule, expected)


def by_run_length(setting: Setting, counts: Counts) -> Iterator[Candidate]:
    """Long rows as `coo` or `fiber`, short ones as `rows`, in one fused launch."""
    few, short_rows = counts.short_share(setting.kept, LONG_ROW)
    if not few or few == counts.nnz:
        return
    short = rows(setting, counts)
    share = (counts.nnz - few) / counts.nnz
    longs = [coo(setting, counts)] + [fiber(setting, counts, leaf) for leaf in setting.rest if len(setting.rest) > 1]
    for long in longs:
        first, second = long.plan.parts[0], short.plan.parts[0]
        # One launch needs one number of warps; of many nonzeros each part has programs enough for its own launch.
        fused = counts.nnz < FUSE_BELOW
        parts = tuple(
            replace(
                p, schedule=replace(p.schedule, warps=first.schedule.warps if fused else p.schedule.warps), label=label
            )
            for p, label in (
                (first, f"rows of {LONG_ROW} nonzeros or more"),
                (replace(second, storage=replace(second.storage, max_fiber_len=0)), f"rows of fewer than {LONG_ROW}"),
            )
        )
        plan = Plan(f"{long.plan.name}+rows", parts, fused, "run_length", (("threshold", LONG_ROW),))
        side = _blocked(setting, few, short_rows, 1, parts[1].storage, parts[1].schedule)
        side = replace(side, chain=LONG_ROW // parts[1].schedule.unroll)  # the longest of the short rows
        yield Candidate(plan, (long.expected[0].scaled(share), side))


def schedule_of(setting: Setting, blocks: bool, rows: bool = False) -> Schedule:
    """The schedule for a part of one of the two nestings; its lanes are as many as blocks of fibers should have."""
    bound = setting.bound
    sizes = {c: bound.by_index[c] for c in dense_axes(bound)}
    padded = {c: 1 << max(n - 1, 0).bit_length() for c, n in sizes.items()}
    output = [c for c in bound.einsum.output if c in sizes]
    if setting.backend == "torch":
        return Schedule(1, tuple(padded.items()), True, setting.precision)
    matrix = setting.floating and not rows and bool(setting.rest) and len(output) > 1 and dot_axes(bound)
    if matrix:
        block = {c: max(MIN_DOT, min(n, 64)) for c, n in padded.items()}
        groups = sorted((own for own, _ in _axis_groups(bound)), key=lambda own: -prod(block[c] for c in own))
        apart = (groups[0], set().union(*groups[1:]))  # the sides of a dot: `ir.lower` takes the largest as one
        for shrink in (output, list(block)):  # an axis that is summed, and split, is added by atomics
            block = fit(block, shrink, 4096, apart)
        warps = max(1, min(8, prod(block.values()) // DOT_TILE))
        stages = 1 if setting.precision in ("tf32", "bf16") else 3
        lanes, unroll = (DOT_LANES, 2) if blocks or setting.precision != "tf32x3" else (2 * DOT_LANES, 1)
        return Schedule(warps, tuple(block.items()), True, setting.precision, stages=stages, lanes=lanes, unroll=unroll)
    block = {c: min(n, 128 if c in output else 512) for c, n in padded.items()}
    block = fit(block, list(block), 512)
    width = prod(block.values())
    unroll = 8 if width == 1 else 4 if width <= 64 else 2
    warps = ROW_WARPS if rows else 1
    lanes = max(
        4, min(LANES_PER_WARP * warps if width > 1 else 128, warps * WARP_ELEMENTS // (2 if rows else 1) // width)
    )
    masked = unroll if rows else 1
    return Schedule(
        warps, tuple(block.items()), False, setting.precision, lanes=lanes, unroll=unroll, masked_unroll=masked
    )


def dot_axes(bound: Bound) -> bool:
    """Whether two dense operands with sparse letters have no dense axis in common: a matrix product may form."""
    return len(_axis_groups(bound)) > 1


def _axis_groups(bound: Bound) -> list[tuple[set[str], list[None]]]:
    """Dense axes, those together that an operand has in common."""
    e = bound.einsum
    axes = [{c for c in e.inputs[p] if c not in e.sparse_indices} for p in e.dense]
    return joined((own, None) for own in axes if own)


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
        free = wide or [c for c in shrink if block[c] > 1 and all(_may_halve(c, side, block) for side in apart)]
        if not free:
            break
        block[max(free, key=lambda c: block[c]) if wide else min(free, key=lambda c: block[c])] //= 2
    return block


def _may_halve(axis: str, side: Collection[str], block: dict[str, int]) -> bool:
    return axis not in side or prod(block[c] for c in side) >= 2 * MIN_DOT


def _max_item_nnz(setting: Setting, nnz: int, schedule: Schedule) -> int:
    if setting.backend == "torch":
        return CPU_ITEM_NNZ
    least, most = DOT_ITEM_NNZ if schedule.dot else ITEM_NNZ
    return max(least, min(most, 1 << max(nnz // PROGRAMS, 1).bit_length() - 1))


def _runs(setting: Setting, counts: Counts, storage: Storage) -> tuple[tuple[str, int], ...]:
    """How often each leaf coordinate changes, nonzeros being sorted; only the first two leaf modes can repeat much."""
    letters, shared = setting.letters, [*storage.item, *storage.lane]
    found = []
    for n, mode in enumerate(storage.leaf[:2]):
        if n + 1 < len(storage.leaf):
            found.append((letters[mode], counts.distinct((*shared, *storage.leaf[: n + 1]))))
    return tuple(found)


def _items(n: int, rows: int, most: int) -> int:
    """Work items of `rows` rows: one at least each, one more for every `most` nonzeros, half of which a row loses."""
    return max(1, rows, rows // 2 + n // most if most else 0) if n else 0


def _blocked(setting: Setting, nnz: int, fibers: int, rows: int, storage: Storage, schedule: Schedule) -> Statistics:
    """Expected sizes of blocked fibers: pieces of cut fibers, a last block half empty a row, a little padding."""
    width, longest, most = storage.lanes, storage.max_fiber_len, storage.max_item_nnz
    cuts = fibers / expm1(longest * fibers / nnz) if longest and nnz else 0.0  # lengths spread geometrically
    pieces = fibers + int(cuts)
    lanes = pieces + (rows * width // 2 if width > 1 else 0)
    stored = int(nnz * 1.05) if width > 1 else nnz
    items = min(_items(stored, rows, most), max(1, lanes // width + rows))
    chain = max(longest, most // width) // schedule.unroll if most or longest else 0
    return Statistics(items, lanes, stored, nnz, setting.itemsize, chain=chain)


def _single(name: str, storage: Storage, schedule: Schedule, expected: Statistics) -> Candidate:
    stored_as = "coo" if name == "coo" else "fiber"
    part = Part(stored_as, storage, schedule, expected.nnz)
    return Candidate(Plan(name, (part,)), (expected,))
