"""A plan worth considering, and what packing its parts is expected to give.

In: a `Problem` and counts of its pattern. Out: a `Candidate`, or the sizes that one is made of, so that all candidates
are costed before one is packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1

from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.ir.program.statistics import Statistics
from sparsetc.planner.problem import Problem
from sparsetc.planner.statistics import Counts

PROGRAMS = 1 << 16
"""Programs a large tensor is dealt to; a work item takes as many nonzeros as make that many, within bounds."""
ITEM_NNZ = (128, 512)
"""Fewest and most nonzeros an item takes (H200: 128 won on 1 to 10 M nonzeros, 512 on 77 M)."""
DOT_ITEM_NNZ = (512, 2048)
"""Fewest and most where an item ends by adding a matrix (H200, TTMc of rank 32 x 32: 2,048 beat 512 and 8,192)."""
CPU_ITEM_NNZ = 1 << 16
FUSE_BELOW = 4_000_000
"""Nonzeros below which the parts of a plan share one launch."""


@dataclass(frozen=True)
class Candidate:
    """A plan and what packing its parts is expected to give."""

    plan: Plan
    expected: tuple[Statistics, ...]


def max_item_nnz_of(problem: Problem, nnz: int, schedule: Schedule) -> int:
    """Most nonzeros that a work item takes, of a tensor of so many."""
    if problem.backend == "torch":
        return CPU_ITEM_NNZ
    least, most = DOT_ITEM_NNZ if schedule.dot else ITEM_NNZ
    return max(least, min(most, 1 << max(nnz // PROGRAMS, 1).bit_length() - 1))


def repeats(problem: Problem, counts: Counts, storage: Storage) -> tuple[tuple[str, int], ...]:
    """How often each leaf coordinate changes, nonzeros being sorted; only the first two leaf modes can repeat much."""
    letters, shared = problem.letters, [*storage.item, *storage.lane]
    found = []
    for n, mode in enumerate(storage.leaf[:2]):
        if n + 1 < len(storage.leaf):
            found.append((letters[mode], counts.distinct((*shared, *storage.leaf[: n + 1]))))
    return tuple(found)


def items_of(n: int, rows: int, most: int) -> int:
    """Work items of `rows` rows: one at least each, one more for every `most` nonzeros, half of which a row loses."""
    return max(1, rows, rows // 2 + n // most if most else 0) if n else 0


def blocked(problem: Problem, nnz: int, fibers: int, rows: int, storage: Storage, schedule: Schedule) -> Statistics:
    """Expected sizes of blocked fibers: pieces of cut fibers, a last block half empty a row, a little padding."""
    width, longest, most = storage.lanes, storage.max_fiber_len, storage.max_item_nnz
    cuts = fibers / expm1(longest * fibers / nnz) if longest and nnz else 0.0  # lengths spread geometrically
    pieces = fibers + int(cuts)
    lanes = pieces + (rows * width // 2 if width > 1 else 0)
    stored = int(nnz * 1.05) if width > 1 else nnz
    items = min(items_of(stored, rows, most), max(1, lanes // width + rows))
    chain = max(longest, most // width) // schedule.unroll if most or longest else 0
    return Statistics(items, lanes, stored, nnz, problem.itemsize, chain=chain)


def single(name: str, storage: Storage, schedule: Schedule, expected: Statistics) -> Candidate:
    """A plan of one part, as ``coo`` or as fibers."""
    stored_as = "coo" if name == "coo" else "fiber"
    part = Part(stored_as, storage, schedule, expected.nnz)
    return Candidate(Plan(name, (part,)), (expected,))
