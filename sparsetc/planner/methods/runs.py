"""``coo``: runs of nonzeros that share an output row, several lanes of a run at a time."""

from __future__ import annotations

from collections.abc import Iterator

from sparsetc.ir.plan import Plan, Storage
from sparsetc.ir.program.statistics import Statistics
from sparsetc.planner.candidate import Candidate, items_of, max_item_nnz_of, repeats, single
from sparsetc.planner.method import OperandMethod
from sparsetc.planner.problem import Problem
from sparsetc.planner.schedule import schedule_of
from sparsetc.planner.statistics import Counts

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
