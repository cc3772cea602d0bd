"""``fiber`` and ``mm-csf``: fibers along one mode, side by side; fibers along every mode, one copy for all einsums.

In: a `Problem` and counts of its pattern. Out: candidates of one part, or of one a mode (MM-CSF, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sparsetc.errors import PlanError
from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.ir.program.statistics import Statistics
from sparsetc.planner.candidate import CPU_ITEM_NNZ, Candidate, blocked, max_item_nnz_of, single
from sparsetc.planner.method import OperandMethod
from sparsetc.planner.methods.rows import rows
from sparsetc.planner.problem import Problem
from sparsetc.planner.schedule import DOT_LANES, schedule_of
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


PARTITION = "mixed_mode"
ITEM_NNZ = 128
"""Most nonzeros of a forest that one work item takes on a GPU (H200, MTTKRP of all modes at rank 32, with 512 and with
128: Uber 326 and 190 us, guanine_TEvv_3d 231 and 186, clustered 658 and 593; `benchmarks/results/one_copy.json`)."""
ALONE = 0.95
"""Share of the nonzeros from which a mode's forest takes all of them. A few fibers fewer would cost a part for each
mode (H200, guanine_TEvv_3d: parts of 1.9 % took a kernel from 31 to 54 us, `benchmarks/results/one_copy.json`)."""
ROOT_BLOCKS = 4
"""Blocks of fibers that a slice must fill on average for slices to be apart. A slice's last block is half empty: with
so many, a tenth is padding at most, and with fewer a forest without a root takes less memory (like nell-2, 2 %: 2.3
bytes a nonzero beside the values in place of 3.5, and 4.0 of values in place of 6.0)."""


class MixedMode(OperandMethod):
    """A forest of fibers for each mode; for a single einsum only where it is asked for."""

    name, alone = "mm-csf", False

    def candidates(self, problem: Problem, counts: Counts) -> Iterable[Candidate]:
        """The one candidate, where it applies."""
        return (mixed_mode(problem, counts),) if problem.order > 1 else ()

    def candidate(self, problem: Problem, counts: Counts, request: Plan) -> Candidate:
        """The candidate, or why there is none."""
        if problem.order < 2:
            why = "a vector has no fibers to choose from"
            raise PlanError(f'plan {self.name!r} does not apply to "{problem.equation}": {why}')
        return mixed_mode(problem, counts)


def mixed_mode(problem: Problem, counts: Counts) -> Candidate:
    """A forest for each mode, of the nonzeros that the partition deals to it; one of all, where it has most of them."""
    schedule, parts, expected = _schedule(problem), [], []
    shares = dict(enumerate(counts.shares(PARTITION)))
    most = max(shares, key=lambda mode: shares[mode].nnz)
    alone = shares[most].nnz >= ALONE * counts.nnz
    for along, share in ({most: counts} if alone else shares).items():
        storage = forest(along, share, problem.backend == "triton")
        parts.append(Part("fiber", storage, schedule, share.nnz, label=f"fibers along mode {along}"))
        expected.append(expected_fibers(problem, share, storage, schedule))
    return Candidate(Plan(MixedMode.name, tuple(parts), partition="all" if alone else PARTITION), tuple(expected))


def _schedule(problem: Problem) -> Schedule:
    """The schedule for blocks of as many fibers as a dot needs, whether there is one: warps of the usual tiles."""
    schedule = schedule_of(problem, blocks=True)
    if schedule.dot:
        return schedule
    return replace(schedule, warps=max(schedule.warps, DOT_LANES // schedule.lanes))


def forest(along: int, share: Counts, on_gpu: bool) -> Storage:
    """Fibers along a mode, those of a slice together; the slices are of the mode that has fewest of them.

    On a GPU there are no slices where they would fill too few blocks of fibers: each fiber then has all of its own
    coordinates, and fibers of one length are together, wherever they lie.
    """
    others = [m for m in range(len(share.shape)) if m != along]
    root = min(others, key=lambda m: share.distinct((m,)))
    apart = len(others) > 1 and (not on_gpu or _fills_blocks(share, tuple(others), root))
    item = (root,) if apart else ()
    middle = tuple(m for m in others if m not in item)
    if on_gpu:
        return Storage(item, middle, (along,), DOT_LANES, MAX_FIBER_LEN, ITEM_NNZ, narrow=True)
    return Storage(item, middle, (along,), max_item_nnz=CPU_ITEM_NNZ)


def _fills_blocks(share: Counts, others: tuple[int, ...], root: int) -> bool:
    pieces = share.distinct(others) + share.nnz // MAX_FIBER_LEN
    return pieces >= ROOT_BLOCKS * DOT_LANES * share.distinct((root,))
