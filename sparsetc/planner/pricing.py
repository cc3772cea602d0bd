"""What a candidate is expected to cost, before anything is packed, and whether its work items own the rows they write.

In: a `Candidate` and its `Problem`. Out: seconds of one call, by part, from the tile programs that its parts would be
lowered to; and the answer to whether a row has one owner, which the kernel asks for here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from sparsetc.device.profile import DeviceProfile, by_precision, of_backend
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.lower import Target, drafted
from sparsetc.ir.nest.nest import ITEM, LANE, LEAF, Nest
from sparsetc.ir.plan import Part, Plan, Schedule
from sparsetc.ir.program.cost import Cost, cost_of
from sparsetc.ir.program.counting import Statistics
from sparsetc.packing.base import FORMATS, Packed, get_format
from sparsetc.packing.deal import PARTITIONS
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.problem import Problem


def owns(view: Nest, problem: Problem, how: Packed | Statistics, *, alone: bool, padded: bool) -> bool:
    """Whether no two work items of any part add to the same output row.

    Args:
        view: of the part.
        problem: whose output has the rows.
        how: the part as it was packed, or is expected to be.
        alone: whether no other part adds to the same rows.
        padded: whether zeros are stored beside the nonzeros.
    """
    kept = set(problem.kept)
    if not alone:
        return False
    if padded and view.loops[-1].strays and (problem.sparse_output or LEAF in map(view.level_of, kept)):
        return False
    shared: set[int] = set()
    for level, coordinates in enumerate(view.levels):
        shared |= {c.mode for c in coordinates}
        if not kept <= shared:
            continue
        if level == ITEM:
            chunks = view.items.counts and not view.levels[0] and how.items > 1
            return shared == kept and not how.split_rows and not chunks
        return shared == kept and (not how.split_fibers if level == LANE else problem.distinct)
    return False


ROUNDING = 4 + 2
"""Bytes that are read and written of an element of an operand that is rounded."""
LARGEST = 4
"""Bytes that are read of an element of an operand whose largest magnitude is found."""


class Priced(NamedTuple):
    """The parts of a candidate, and what they are expected to take."""

    parts: tuple[Part, ...]
    costs: tuple[Cost, ...]
    seconds: tuple[float, ...]
    """Of one call: see `seconds_of`."""


def price(candidate: Candidate, problem: Problem) -> Priced:
    """What a candidate is expected to take."""
    found, profile = costs(candidate, problem), of_backend(problem.backend)
    seconds = seconds_of(candidate.plan, found, candidate.expected, problem.backend, profile)
    return Priced(candidate.plan.parts, tuple(found), seconds)


def seconds_of(
    plan: Plan, parts: Sequence[Cost], statistics: Sequence[Statistics], backend: str, profile: DeviceProfile
) -> tuple[float, ...]:
    """Time of one call, by part: 0 for one that has no nonzeros. What a launch takes is its first part's.

    Parts run one after another; a fused launch overlaps only their ends. Torch programs have a launch each.
    Operands that parts read rounded are rounded first, by a call of torch each, and of those that dots split the
    largest magnitude is found. Rows that no part stores are zeros first.
    """
    run = [n for n, s in enumerate(statistics) if s.nnz] or [len(parts) - 1]
    beside_tiles = plan.fused and len(run) > 1 and any(parts[n].turn is not None for n in run)
    found = [0.0] * len(parts)
    for launch in [run] if plan.fused and backend == "triton" else [[n] for n in run]:
        found[launch[0]] += profile.launch
        if all(parts[n].turn is None for n in launch):
            found[launch[0]] += profile.laws["starting_waits"] * profile.wait
    for _, elements in {operand for n in run for operand in parts[n].rounded}:  # once, whatever parts read it
        found[run[0]] += profile.launch + ROUNDING * elements / profile.memory
    for _, elements in {operand for n in run for operand in parts[n].split}:
        found[run[0]] += profile.launch + LARGEST * elements / profile.memory
    most = max([parts[n] for n in run], key=lambda part: part.copies)
    if most.copies > 1:  # summed once, whatever parts add to them
        found[run[0]] += profile.launch + most.copies * most.output.at(statistics[run[0]].symbols) / profile.l2
    listed_byte = profile.laws["listed_byte"]
    found[run[0]] += _zeroed([parts[n] for n in run], [statistics[n] for n in run], listed_byte) / profile.memory
    for n in run:
        part = parts[n]
        slowed = by_precision(profile.fused_slowdown, part.precision) if beside_tiles and part.turn is None else 1.0
        found[n] += slowed * part.predicted(statistics[n], profile)
    return tuple(found)


def _zeroed(parts: Sequence[Cost], statistics: Sequence[Statistics], listed_byte: float) -> float:
    """Bytes of the result that are zeros before programs run: all copies, or what no part stores, if that is little."""
    both = list(zip(parts, statistics, strict=True))
    output, stored = parts[0].output.at(statistics[0].symbols), sum([part.stored(own) for part, own in both])
    if not stored:
        return max([part.copies for part in parts]) * output
    if parts[0].sparse:  # of which every row is stored or added to
        return sum([min(output, part.added_bytes.at(own.symbols)) for part, own in both if not part.owned])
    return max(0, min(output, listed_byte * (output - stored) // 1))


def views(candidate: Candidate, problem: Problem) -> list[tuple[Nest, bool]]:
    """The view that each part's format promises, and whether it is expected to store, as the kernel will decide."""
    plan, expected = candidate.plan, candidate.expected
    alone = sum([s.nnz > 0 for s in expected]) <= 1 or PARTITIONS[plan.partition].whole_rows
    made = [get_format(part.format).view(problem.shape, part.storage) for part in plan.parts]
    each = zip(made, expected, strict=True)
    return [(view, owns(view, problem, s, alone=alone, padded=s.stored > s.nnz)) for view, s in each]


def orderly(candidate: Candidate, problem: Problem) -> bool:
    """Whether no sum depends on the order in which programs finish, or a second pass can see to that.

    Rows have one owner each, or parts of nonzeros alone add them up.
    """
    found = views(candidate, problem)
    return all(own for _, own in found) or all(view.loops[-1].ordered for view, _ in found)


def costs(candidate: Candidate, problem: Problem) -> list[Cost]:
    """Costs of the parts' tile programs, lowered from the views their formats promise."""
    found = []
    for p, (view, own) in zip(candidate.plan.parts, views(candidate, problem), strict=True):
        whole = problem.backend == "torch" and not view.values.sides  # which pay as the programs of a GPU take them
        target = Target(problem.sparse_output, p.format == "coo", own, problem.rows, whole=whole)
        lower = getattr(FORMATS[p.format], "lower", None)
        own_cost = lower and cost_of(lower(problem.bound, p, target, 0))
        found.append(own_cost or _cost(problem.bound, view, p.schedule, target))
    return found


@lru_cache(maxsize=1024)
def _cost(bound: Bound, view: Nest, schedule: Schedule, target: Target) -> Cost:
    """The cost of a program, which is the same for every tensor of these sizes that is stored so."""
    return cost_of(drafted(bound, view, schedule, target))
