"""Plans for patterns that are used once or a few times: similar patterns share one plan.

In: a `Problem`, and a function that chooses a plan for it by all that can be counted. Out: a `Choice`. Patterns are of
one kind where the einsum and the dense sizes are the same, sizes and counts of nonzeros and of rows within two fifths,
the longest row within a factor of two, and as many nonzeros have a neighbour. A choice is repeated where several
patterns in turn took the same plan; one in `AGAIN`, later one in `SELDOM`, is counted in full, so that a kind follows
what its patterns are like.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from math import log2
from typing import Any

from sparsetc.planner.candidate import Choice
from sparsetc.planner.problem import Problem
from sparsetc.support.lru import Lru

AGREED = 3
"""Choices one after the other that must be of one plan before it is repeated."""
AGAIN = 16
"""Patterns of a kind of which one is counted in full; twice as many after each time that it took the same plan..."""
SELDOM = 256
"""...up to so many."""
STEPS = 2
"""Steps to a factor of two in which sizes and counts are rounded."""


Kind = tuple[Choice, int, int]
"""The last choice made in full, how many of these in turn were of its plan, and how often it was repeated since."""
kinds: Lru[Hashable, Kind] = Lru(256)
"""The kinds of patterns that were planned last."""


def recurring(problem: Problem, choose: Callable[[], Choice]) -> Choice:
    """Return the choice of similar problems if several in turn agreed, else that of `choose()`.

    What is asked to be deterministic, or to keep within a memory limit, is planned by its own pattern alone.
    """
    if problem.deterministic or problem.adding or problem.memory_limit is not None or not problem.nnz:
        return choose()
    key = _kind_of(problem)
    last, agreed, repeats = kinds.get(key) or (None, 0, 0)
    if last and repeats < _turns(agreed):
        _keep(key, (last, agreed, repeats + 1))
        reason = f"as for the last patterns of its kind, {last.plan.reason}"
        return replace(last, plan=replace(last.plan, reason=reason))
    choice = choose()
    alike = last is not None and _walks(last) == _walks(choice)
    _keep(key, (choice, agreed * alike + 1, 0))
    return choice


def _turns(agreed: int) -> int:
    """Return how often a choice is repeated of which so many in turn were alike."""
    return 0 if agreed < AGREED else min(AGAIN << agreed - AGREED, SELDOM) - 1


def _keep(key: Hashable, kind: Kind) -> None:
    kinds.pop(key)
    kinds.put(key, kind)


def _walks(choice: Choice) -> list[Any]:
    """Return what tells plans apart for a kind: the formats of their parts, and how each walks the modes."""
    plan = choice.plan
    return [plan.name, plan.path, *[(p.format, p.storage.levels, p.schedule.precision) for p in plan.parts]]


def _kind_of(problem: Problem) -> Hashable:
    einsum, counts = problem.bound.einsum, problem.counts
    sparse, kept = set(einsum.sparse_indices), problem.kept if problem.rest else ()  # a nonzero is no row to count
    sizes = tuple([_rounded(size) if letter in sparse else size for letter, size in problem.bound.sizes])
    longest = counts.longest(kept)  # first, as it counts the rows on the way
    counted = tuple(map(_rounded, (counts.nnz, counts.distinct(kept), problem.rows)))
    shape = _rounded(longest) // 2, round(8 * counts.neighbours)  # which vary more among random patterns
    asked = problem.backend, problem.dtype, problem.precisions, problem.halves, problem.coalesced, problem.sparse_output
    return einsum, sizes, counted, shape, asked, problem.ones, problem.profile


def _rounded(count: int) -> int:
    """The logarithm of a count, in steps."""
    return round(STEPS * log2(count)) if count else -1
