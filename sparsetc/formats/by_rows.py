"""``coo+rows`` and ``fiber+rows``: long output rows by one method, short ones a lane each, in one result.

A long row fills the lanes of a work item by itself, short rows run side by side, and no single kernel serves both
(`benchmarks/results/mttkrp_plans.json`: of 11 M nonzeros in rows of about 4, one row an item took 1.5 ms, one row a
lane 0.43).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sparsetc.errors import PlanError
from sparsetc.formats.coo import coo
from sparsetc.formats.fiber import fibers, rows
from sparsetc.ir.plan import Part, Plan
from sparsetc.ir.program.resources import Statistics
from sparsetc.packing.partition import register_partition, row_numbers
from sparsetc.planner import Best, Candidate, Method, Problem, add_plans, blocked, items_of, rounds
from sparsetc.support import Ints
from sparsetc.tensor.coords import of_modes

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
    short_nnz, short_rows = problem.counts.short_share(problem.kept, threshold) if problem.rest else (0, 0)
    if not 0 < short_nnz < problem.nnz:
        return
    short = rows(problem).plan.parts[0]
    short = replace(short, storage=replace(short.storage, max_fiber_len=0), label=f"rows of fewer than {threshold}")
    of_short = blocked(problem, short_nnz, short_rows, 1, short.storage, short.schedule)
    of_short = replace(of_short, chain=rounds(threshold, short.schedule))  # the longest of the short rows
    long_rows = problem.counts.distinct(problem.kept) - short_rows
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
    row = row_numbers(*of_modes(coords, shape, kept))
    return torch.bincount(row)[row]


for _name, _longs in (("coo+rows", lambda problem, best: (coo(problem),)), ("fiber+rows", fibers)):
    add_plans(Method(_name, partial(_hybrids, _name, _longs), partial(_first, _name, _longs), kernels=True))
