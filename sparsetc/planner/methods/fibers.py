"""``fiber``: fibers along one mode, those of an output row side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sparsetc.errors import PlanError
from sparsetc.ir.plan import Plan, Schedule, Storage
from sparsetc.ir.program.statistics import Statistics
from sparsetc.planner.candidate import Candidate, blocked, max_item_nnz_of, single
from sparsetc.planner.method import OperandMethod
from sparsetc.planner.methods.rows import rows
from sparsetc.planner.problem import Problem
from sparsetc.planner.schedule import schedule_of
from sparsetc.planner.statistics import Counts

MAX_FIBER_LEN = 32
"""Longest fiber of a block on a GPU."""
LONG_FIBER = 4
"""Nonzeros a fiber from which the loop over them, not the dot that ends a block, takes the time of matrix products.
Triton lays the loop out for the dot unless its sides are split first: tf32x3 took 0.89 to 0.93 of tf32's time on fibers
of 8 to 32 nonzeros, 1.01 on those of 4, and 1.09 to 1.17 on shorter ones (H200, TTMc of rank 32 x 32;
`benchmarks/results/switches.json`)."""


class Fibers(OperandMethod):
    """Fibers along each mode that is summed away."""

    name = "fiber"

    def candidates(self, problem: Problem, counts: Counts) -> Iterable[Candidate]:
        """A candidate for each summed mode, where there are several."""
        return (fiber(problem, counts, leaf) for leaf in problem.rest if len(problem.rest) > 1)

    def candidate(self, problem: Problem, counts: Counts, request: Plan) -> Candidate:
        """Fibers along the mode that has fewest of them."""
        return fiber(problem, counts, best_leaf(problem, counts))


def best_leaf(problem: Problem, counts: Counts) -> int:
    """The leaf mode with the fewest fibers: of the summed modes where there are any."""
    choice = problem.rest or tuple(range(problem.order))
    return min(choice, key=lambda leaf: counts.distinct(tuple(m for m in range(problem.order) if m != leaf)))


def fiber(problem: Problem, counts: Counts, leaf: int) -> Candidate:
    """Fibers along `leaf`, those of one output row together; a matrix's rows are its fibers."""
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
    found = blocked(problem, counts.nnz, fibers, rows, storage, schedule)
    cut = 0 < storage.max_item_nnz < counts.longest(storage.item)
    return replace(found, split_rows=cut, split_fibers=bool(storage.max_fiber_len))
