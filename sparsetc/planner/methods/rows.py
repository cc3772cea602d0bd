"""``coo``, ``rows``, ``coo+rows``, ``fiber+rows``: runs of an output row, a row a lane, long rows and short ones apart.

In: a `Problem` and counts of its pattern. Out: candidates of one part, or of two: long output rows by one method, short
ones a lane each, in one result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from sparsetc.errors import PlanError
from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.ir.program.statistics import Statistics
from sparsetc.planner.candidate import (
    CPU_ITEM_NNZ,
    FUSE_BELOW,
    Candidate,
    blocked,
    items_of,
    max_item_nnz_of,
    repeats,
    single,
)
from sparsetc.planner.method import OperandMethod
from sparsetc.planner.problem import Problem
from sparsetc.planner.schedule import ROW_WARPS, schedule_of
from sparsetc.planner.statistics import Counts

LONG_ROW = 64
"""Nonzeros from which a row is given work items of its own (H200: rows of 15 lost 1.6x by it, of 2,300 won 1.4x)."""

FEW_PROGRAMS = 8192
"""Programs, at most, that need not all be under way at once."""
SHORT_ROW = 4
"""Nonzeros, on average, of rows so short that a program is over when it has begun."""


class Rows(OperandMethod):
    """One row a lane."""

    name = "rows"

    def candidates(self, problem: Problem, counts: Counts) -> Iterator[Candidate]:
        """One candidate, where rows are short: on a GPU a long one would keep its neighbours' lanes waiting."""
        if not problem.rest or not problem.kept:
            return
        if problem.backend == "torch" or counts.nnz <= 4 * LONG_ROW * counts.distinct(problem.kept):
            yield rows(problem, counts)

    def candidate(self, problem: Problem, counts: Counts, request: Plan) -> Candidate:
        """Rows, however long."""
        return rows(problem, counts)


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
    schedule = replace(schedule, unroll=unroll, masked_unroll=min(schedule.masked_unroll, steps))
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


LONG_RUN = 32
"""Nonzeros a run must have on average to be dealt to work items by one more mode than the output's."""


class Runs(OperandMethod):
    """Runs of output rows; and of one mode more, where the nonzeros of such a run fill work items of their own."""

    name = "coo"

    def candidates(self, problem: Problem, counts: Counts) -> Iterator[Candidate]:
        """Runs of rows, and of rows and each of the summed modes that such runs are long enough for."""
        yield coo(problem, counts)
        for mode in problem.rest if len(problem.rest) > 1 and problem.backend == "triton" else ():
            if counts.nnz >= LONG_RUN * counts.distinct((*problem.kept, mode)):
                yield coo(problem, counts, (mode,))

    def candidate(self, problem: Problem, counts: Counts, request: Plan) -> Candidate:
        """Runs of rows."""
        return coo(problem, counts)


def coo(problem: Problem, counts: Counts, also: tuple[int, ...] = ()) -> Candidate:
    """Runs of one output row, or equal chunks where there is no row to share (or every nonzero is one).

    Modes in `also` are shared by a run too: their factor rows are read once a run, which is then one of several of
    its output row.
    """
    shared = (*problem.kept, *also) if problem.rest else ()
    leaf = tuple(m for m in range(problem.order) if m not in shared)
    schedule = schedule_of(problem, blocks=False)
    most = max_item_nnz_of(problem, counts.nnz, schedule)
    storage = Storage(shared, (), leaf, max_item_nnz=most, narrow=problem.backend == "triton")
    n, distinct = counts.nnz, counts.distinct(shared)
    items = items_of(n, distinct if shared else 1, most)
    longest = counts.longest(shared)
    rounds = min(most, longest) // (schedule.lanes * schedule.unroll)
    runs = repeats(problem, counts, storage)
    expected = Statistics(items, items, n, n, problem.itemsize, runs, rounds, longest > most)
    return single("coo", storage, schedule, expected)


class ByRows(OperandMethod):
    """Rows of many nonzeros by another method, all others a lane each."""

    def __init__(self, name: str, longs: Callable[[Problem, Counts], Iterable[Candidate]]) -> None:
        self.name, self.longs = name, longs

    def candidates(self, problem: Problem, counts: Counts) -> Iterable[Candidate]:
        """A hybrid for each candidate of the other method, on a GPU."""
        applies = problem.backend == "triton" and problem.kept and problem.rest
        return self._hybrids(problem, counts) if applies else ()

    def candidate(self, problem: Problem, counts: Counts, request: Plan) -> Candidate:
        """The first of the hybrids."""
        found = next(self._hybrids(problem, counts), None)
        if found is None:
            raise PlanError(f"plan {request.name!r} needs {self._lacking(problem, counts)}")
        return found

    def _lacking(self, problem: Problem, counts: Counts) -> str:
        """What an einsum and a tensor lack of which there is no hybrid."""
        few, _ = counts.short_share(problem.kept, LONG_ROW)
        if 0 < few < counts.nnz:
            return f'two modes of the sparse operand or more to be summed; "{problem.equation}" sums fewer'
        rows = f"output rows both of {LONG_ROW} nonzeros or more and of fewer"
        return f'{rows}; those of "{problem.equation}" on this tensor are all of one kind'

    def _hybrids(self, problem: Problem, counts: Counts) -> Iterator[Candidate]:
        """Hybrids where there are long rows and short ones."""
        few, short_rows = counts.short_share(problem.kept, LONG_ROW)
        if not few or few == counts.nnz:
            return
        short = _short_rows(problem, counts)
        side = blocked(problem, few, short_rows, 1, short.storage, short.schedule)
        side = replace(side, chain=LONG_ROW // short.schedule.unroll)  # the longest of the short rows
        long_rows = counts.distinct(problem.kept) - short_rows
        for long in self.longs(problem, counts):
            yield self._joined(long, _of_long_rows(long, problem, counts.nnz - few, long_rows), short, side)

    def _joined(self, long: Candidate, beside: Statistics, short: Part, side: Statistics) -> Candidate:
        first = replace(long.plan.parts[0], label=f"rows of {LONG_ROW} nonzeros or more")
        # One launch has one number of warps; of many nonzeros each part has programs enough for its own launch.
        fused = beside.nnz + side.nnz < FUSE_BELOW
        if fused:
            short = _with_warps(short, first.schedule.warps)
        plan = Plan(self.name, (first, short), fused, "run_length", (("threshold", LONG_ROW),))
        return Candidate(plan, (beside, side))


def _with_warps(short: Part, warps: int) -> Part:
    """The part with so many warps a program, as many elements a thread as it had, and what registers its launch has."""
    lanes = max(4, short.storage.lanes * warps // short.schedule.warps)
    storage = replace(short.storage, lanes=lanes, max_item_nnz=lanes)
    return replace(short, storage=storage, schedule=replace(short.schedule, warps=warps, lanes=lanes, registers=0))


def _of_long_rows(long: Candidate, problem: Problem, nnz: int, rows: int) -> Statistics:
    """What is expected of the other method's part: its share of the nonzeros, in items of the long rows alone."""
    whole, storage = long.expected[0], long.plan.parts[0].storage
    found = whole.scaled(nnz / whole.nnz)
    if {*storage.item} != {*problem.kept}:
        return found
    items = min(found.items, items_of(nnz, rows, storage.max_item_nnz))
    return replace(found, items=items, fibers=items if whole.fibers == whole.items else found.fibers)


def _short_rows(problem: Problem, counts: Counts) -> Part:
    """The part of short rows, none of which is cut."""
    part = rows(problem, counts).plan.parts[0]
    return replace(part, storage=replace(part.storage, max_fiber_len=0), label=f"rows of fewer than {LONG_ROW}")
