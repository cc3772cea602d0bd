"""Plans that several einsums of one sparse operand take together, since they may share a copy of it.

In: the einsums' problems, the plan that is asked for, bytes that copies may take. Out: a `Choice` for each. A plan that
suits one output packs a copy of the nonzeros for it, and ``mm-csf`` one for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import inf

from sparsetc.ir.plan import Plan, requested
from sparsetc.ir.program.cost import Cost
from sparsetc.ir.program.resources import Statistics
from sparsetc.packing.partition import storage_keys
from sparsetc.planner.candidate import Best, Candidate, Choice, choice_of, ranked
from sparsetc.planner.pricing import costs
from sparsetc.planner.problem import Problem
from sparsetc.planner.registry import PLANS, choose, considered, is_shared
from sparsetc.support import outside

BLOCK = 8
"""Bytes of ``block_ptr`` and ``block_full`` for a block of fibers."""
MOST_SETS = 1 << 13
"""Sets of plans that are compared; of many einsums fewer plans of each are considered."""


@dataclass(frozen=True)
class Option:
    """A plan of one of the einsums.

    Attributes:
        copies: bytes of what each part stores, its values included, by what its arrays depend on.
        other: True if another plan was asked for.
        seconds: seconds of a call; infinitely many where the plan does not fit.
    """

    candidate: Candidate
    copies: dict[Hashable, int]
    other: bool
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of the plan's own parts."""
        return sum(self.copies.values())


def choose_together(
    wanted: str | Plan, problems: Sequence[Problem], limit: int
) -> list[tuple[Choice, str | Plan]] | None:
    """Choose a plan for each einsum: the set with the least expected total time whose packed copies fit the limit.

    Where ``"auto"`` is asked for, all plans that it considers of each einsum are weighed, and the shared copy. Where a
    plan is named, it is taken wherever its copies fit, and the shared copy for as many of the others as must be.

    Args:
        wanted: a plan's name, a request or a plan.
        problems: of einsums of one pattern.
        limit: bytes that all packed copies together may take, with their values.

    Returns:
        A choice, and the request by which it is made again, for each einsum.
        None where there is nothing to weigh: of fewer than two einsums, of a plan with its parts, of a shared plan,
        and of a request with a preference.
    """
    request = requested(wanted)
    if not request.is_request or is_shared(request.name) or request.preferred or len(problems) < 2:
        return None
    options = [_options(request, problem) for problem in problems]
    most = max(2, int(MOST_SETS ** (1 / len(options))))
    few = [_worth_trying(each, most) for each in options]
    nth = range(max(map(len, few)))
    uniform = (tuple(each[min(n, len(each) - 1)] for each in few) for n in nth)  # the n-th option of every einsum
    best = _best(product(*few) if most ** len(options) <= MOST_SETS else uniform, limit)
    fastest = [min(each, key=lambda o: (o.other, o.seconds)) for each in few]
    reason = _reason(best, fastest, limit, request.name)
    choices: list[tuple[Choice, str | Plan]] = []
    for one, each in zip(best, options, strict=True):
        plan = one.candidate.plan
        again: str | Plan = Plan(plan.name) if is_shared(plan.name) else plan
        if one is each[0]:
            again = wanted
        choices.append((choice_of([o.candidate for o in each], reason, one.candidate), again))
    return choices


def _options(request: Plan, problem: Problem) -> list[Option]:
    """Return the plans of one einsum, the preferred one first and the shared ones last."""
    shared = [estimate for method in PLANS.values() if not method.alone for estimate in method.estimates(problem)]
    if request.name == "auto":
        first, *others = [_option(e, problem, False) for e in ranked(considered(problem, Best()))]
        least = min((o.seconds for o in others), default=inf)
        # Of plans that the cost model does not tell apart, the first has no tiles.
        first = replace(first, seconds=min(first.seconds, least))
        return [first, *others, *[_option(e, problem, False) for e in shared]]
    return [_option(choose(request, problem), problem, False), *[_option(e, problem, True) for e in shared]]


def _option(candidate: Candidate, problem: Problem, other: bool) -> Option:
    nbytes = map(_stored, costs(candidate, problem), candidate.expected)
    copies = dict(zip(storage_keys(candidate.plan, problem.kept), nbytes, strict=True))
    return Option(candidate, copies, other, candidate.total)


def _stored(cost: Cost, sizes: Statistics) -> int:
    """Return the bytes of a part: its streamed arrays, and those read once a block."""
    if not sizes.nnz:
        return 0
    view = cost.p.view
    return cost.once @ sizes.symbols + BLOCK * sizes.fibers // view.lanes * ("block_ptr" in view.arrays)


def _worth_trying(options: Sequence[Option], most: int) -> list[Option]:
    """The first, the shared ones, the smallest, and of the others the fastest."""
    shared = [o for o in options if is_shared(o.candidate.plan.name)]
    others = outside(options, shared)
    smallest = min(options, key=lambda o: (o.nbytes, o.seconds))
    worth = {id(o): o for o in (*others[:1], *shared, smallest, *others)}  # each once, in this order
    return list(worth.values())[:most]


def copied(chosen: Sequence[Option]) -> int:
    """Bytes of all copies that a set of plans packs."""
    copies: dict[Hashable, int] = {}
    for option in chosen:
        for key, nbytes in option.copies.items():
            copies[key] = max(nbytes, copies.get(key, 0))
    return sum(copies.values())


def _best(sets: Iterable[tuple[Option, ...]], limit: int) -> tuple[Option, ...]:
    """The fastest set of those that fit, or the smallest of all; copies are counted from the fastest on."""
    by_speed = sorted(sets, key=_speed)
    each = (min(alike, key=copied) for _, alike in groupby(by_speed, _speed))
    return next((chosen for chosen in each if copied(chosen) <= limit), None) or min(by_speed, key=copied)


def _speed(chosen: Sequence[Option]) -> tuple[int, float]:
    """The number of plans that were not asked for, and seconds."""
    return sum([o.other for o in chosen]), sum([o.seconds for o in chosen])


def _reason(best: Sequence[Option], fastest: Sequence[Option], limit: int, wanted: str) -> str:
    """Why the set was taken, for a reader of any of its plans."""
    asked = (
        "the fastest of the sets of plans"
        if wanted == "auto"
        else f"most by {wanted!r}, which was asked for, of the sets"
    )
    nbytes, stored = copied(best), [{key for key, nbytes in option.copies.items() if nbytes} for option in best]
    uses = Counter(key for own in stored for key in own)
    shared = sum(all(uses[key] > 1 for key in own) for own in stored)  # einsums whose storages all serve another too
    one = f", one copy serving {shared} of them" if shared > 1 else ""
    said = f"planned together with {len(best) - 1} other einsums, {nbytes:,} bytes stored for all{one}"
    if nbytes > limit:
        return f"{said}: no set of plans fits {limit:,} bytes, and this is the smallest"
    if copied(fastest) > limit:
        return f"{said}: {asked} that fit {limit:,} bytes; without a limit {copied(fastest):,} would be"
    return f"{said}: {'the fastest set of plans' if wanted == 'auto' else 'by name'}"
