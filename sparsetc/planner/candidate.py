"""Candidates: plans considered for an einsum, with the sizes expected of their parts once they are packed.

In: a storage and a schedule, and counts of the pattern. Out: `Statistics` of a part; a `Candidate`; and a `Choice`
among candidates, once they are priced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import expm1, inf

from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.ir.program.cost import Cost
from sparsetc.ir.program.resources import Statistics
from sparsetc.planner.problem import Problem
from sparsetc.support import NamedInts, cached_property


@dataclass(frozen=True)
class Candidate:
    """A plan with the expected sizes of its parts and, once priced, its expected time.

    Attributes:
        expected: what packing each part is expected to give.
        name: the plan, for a reader: its name, and what tells it from others of that name.
        seconds: seconds of each part, launches included, or of each of `terms`; empty where the plan has no price yet,
            does not fit, or has no kernel.
        apart: how many times the fastest plan's seconds this one's must be for the cost model to tell the two apart, if
            by that alone; 0 where it always does.
        costs: costs of the parts' programs, once they are priced.
        terms: what takes the seconds of a join, by name; empty where they are of parts.
    """

    plan: Plan
    expected: tuple[Statistics, ...] = ()
    name: str = ""
    seconds: tuple[float, ...] = ()
    apart: float = 0.0
    costs: tuple[Cost, ...] = field(default=(), compare=False, repr=False)
    terms: tuple[str, ...] = ()

    @cached_property
    def total(self) -> float:
        """Seconds of a call; infinitely many without a price."""
        return sum(self.seconds) if self.seconds else inf


@dataclass(frozen=True, repr=False)
class Choice(Candidate):
    """The candidate whose plan is run, and the seconds expected of the others; of a given plan, the plan alone.

    Attributes:
        considered: (plan, seconds) of all candidates, the cheapest first.
        measured: (plan, seconds) of those that were timed, the fastest first.
        dismissed: (kind of plan, seconds) of those that were not counted, and would have taken as long at least.
    """

    considered: tuple[tuple[str, float], ...] = ()
    measured: tuple[tuple[str, float], ...] = ()
    dismissed: tuple[tuple[str, float], ...] = ()

    def __repr__(self) -> str:
        expected = f"{1e6 * self.total:.1f} us expected, " if self.seconds else ""
        return f"Choice({self.plan.name!r}, {expected}{len(self.considered)} considered)"


@dataclass
class Best:
    """The seconds that candidates have to beat, before they are counted.

    Attributes:
        seconds: below which a plan with tiles is taken for the fastest; infinite where all are to be counted.
        dismissed: what was not counted, and the seconds that it takes at least, by a sample.
    """

    seconds: float = inf
    dismissed: dict[str, float] = field(default_factory=dict)

    def take(self, candidates: Iterable[Candidate]) -> None:
        """Note what candidates are expected to take. A simple plan is preferred to one with tiles that is as fast."""
        for c in candidates:
            self.seconds = min(self.seconds, c.total / (c.apart or 1.0))

    def allows(self, name: str, least: float) -> bool:
        """Return True if `least` seconds would be the best so far; else note the name as dismissed."""
        if least < self.seconds:
            return True
        self.dismissed[name] = min(least, self.dismissed.get(name, inf))
        return False


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort candidates by expected time, those that do not fit last; of near equals one without tiles is first."""
    order = sorted(candidates, key=lambda c: c.total)
    first = next((c for c in order if c.apart and c.total <= c.apart * order[0].total), None)
    return order if first is None else [first, *[c for c in order if c is not first]]


def choice_of(candidates: Sequence[Candidate], reason: str = "", best: Candidate | None = None) -> Choice:
    """Return the choice of `best`, or of the candidate that is expected to be fastest; why, unless `reason` says it."""
    order = ranked(candidates)
    best = best or order[0]
    counted = f"the cheapest of {len(order)} by the cost model" if len(order) > 1 else "the only plan that applies"
    plan = replace(best.plan, reason="; ".join(filter(None, (reason or counted, best.plan.reason))))
    considered = tuple((c.name, c.total) for c in order)
    return Choice(plan, best.expected, best.name, best.seconds, considered=considered)


def single(name: str, storage: Storage, schedule: Schedule, expected: Statistics) -> Candidate:
    """Return a candidate of one part, stored as ``coo`` or as fibers."""
    part = Part("coo" if name == "coo" else "fiber", storage, schedule, expected.nnz)
    return Candidate(Plan(name, (part,)), (expected,))


# -- sizes of parts, expected before they are packed -------------------------------------------------------------------
def max_item_nnz_of(problem: Problem, schedule: Schedule) -> int:
    """Return the most nonzeros of a work item."""
    least, most = problem.rules["dot_item_nnz" if schedule.dot else "item_nnz"]
    return max(least, min(most, 1 << max(problem.nnz // problem.rules["programs"], 1).bit_length() - 1))


def repeats(problem: Problem, storage: Storage) -> NamedInts:
    """Count the changes of each leaf coordinate in sorted order; only the first two leaf modes can repeat much."""
    shared = (*storage.item, *storage.lane)
    prefixes = [storage.leaf[: n + 1] for n in range(len(storage.leaf) - 1)][:2]
    return tuple([(problem.letters[modes[-1]], problem.counts.distinct((*shared, *modes))) for modes in prefixes])


def items_of(n: int, rows: int, most: int) -> int:
    """Return the expected work items of n nonzeros in rows cut after `most`: the last item of a row is half full."""
    if not n:
        return 0
    return max(1, rows, rows // 2 + n // most if most else 0)


def blocked(problem: Problem, nnz: int, fibers: int, rows: int, storage: Storage, schedule: Schedule) -> Statistics:
    """Expected sizes of blocked fibers: pieces of cut fibers, a last block half empty a row, a little padding."""
    width = storage.lanes
    longest = storage.max_fiber_len
    most = storage.max_item_nnz
    cuts = fibers / expm1(longest * fibers / nnz) if longest and nnz else 0.0  # lengths spread geometrically
    pieces = fibers + int(cuts)
    lanes = pieces + (rows * width // 2 if width > 1 else 0)
    stored = int(nnz * 1.05) if width > 1 else nnz
    items = min(items_of(stored, rows, most), max(1, lanes // width + rows))
    chain = rounds(max(longest, most // width) if most or longest else 0, schedule)
    return Statistics(items, lanes, stored, nnz, problem.itemsize, chain=chain)


def rounds(steps: int, schedule: Schedule) -> int:
    """Return the rounds of loads in so many steps: half are expected in the main loop, half in the masked one."""
    return (steps // schedule.unroll + steps // schedule.masked_unroll) // 2
