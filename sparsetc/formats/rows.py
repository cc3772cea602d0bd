"""``rows``: an output row a lane, stored as fibers side by side (`fiber`).

In: a `Problem` and counts of its pattern. Out: a candidate of one part.

"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sparsetc.errors import PlanError
from sparsetc.ir.plan import Plan, Schedule, Storage
from sparsetc.planner.candidate import (
    CPU_ITEM_NNZ,
    Candidate,
    blocked,
    repeats,
    single,
)
from sparsetc.planner.method import OperandMethod
from sparsetc.planner.problem import Counts, Problem
from sparsetc.planner.registry import add_plans
from sparsetc.planner.schedule import ROW_WARPS, schedule_of

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


add_plans(Rows())
