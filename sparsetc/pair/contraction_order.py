"""The order in which several operands are contracted, by sizes that sparse intermediates are expected to have.

In: letters, sizes and numbers of nonzeros. Out: an order in opt_einsum's form, found through `opt_einsum.contract_path`
by an optimiser of its own kind (`opt_einsum.paths.PathOptimizer`), since its cost is not one of dense sizes: nonzeros
are taken to lie anywhere with equal probability, so a contraction has as many tasks as pairs of nonzeros are expected
to agree, and a result as many nonzeros as tasks are expected to hit different positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, inf, log, log1p
from typing import Any

import opt_einsum

MOST_EXHAUSTIVE = 9
"""Operands up to which every order is tried: 3**9 splits."""


@dataclass(frozen=True)
class _Expected:
    """An operand as it is expected to be; its count is a logarithm, since sizes and counts may pass any float."""

    letters: frozenset[str]
    nonzeros: float


class SparseOrder(opt_einsum.paths.PathOptimizer):
    """The order of the fewest expected tasks: the best of all for few operands, pair by pair for many."""

    def __init__(self, nonzeros: Sequence[int]) -> None:
        self.nonzeros = tuple(nonzeros)

    def __call__(
        self,
        inputs: list[Any],
        output: Any,
        size_dict: dict[str, int],
        memory_limit: int | None = None,
    ) -> list[tuple[int, ...]]:
        """The order as a path of opt_einsum, whose memory limit is not followed: `Options` has one."""
        self.sizes = {c: log(max(1, n)) for c, n in size_dict.items()}
        self.inputs, self.output = [frozenset(t) for t in inputs], frozenset(output)
        terms = [_Expected(t, log(max(1, n))) for t, n in zip(self.inputs, self.nonzeros, strict=True)]
        ssa = self._exhaustive(terms) if len(terms) <= MOST_EXHAUSTIVE else self._greedy(terms)
        return list(opt_einsum.paths.ssa_to_linear(ssa))

    def _kept(self, members: frozenset[int]) -> frozenset[str]:
        """Letters of some operands that the output or another operand has too."""
        inside = frozenset().union(*(self.inputs[n] for n in members))
        outside = self.output.union(*(t for n, t in enumerate(self.inputs) if n not in members))
        return inside & outside

    def _span(self, letters: frozenset[str]) -> float:
        return sum(self.sizes[c] for c in letters)

    def _contracted(self, a: _Expected, b: _Expected, kept: frozenset[str]) -> tuple[float, _Expected]:
        """The logarithm of the expected tasks of a contraction, and its expected result."""
        tasks = a.nonzeros + b.nonzeros - self._span(a.letters & b.letters)
        span = self._span(kept)
        # positions * (1 - exp(-tasks / positions))
        found = tasks if tasks - span < -30 else span + (log1p(-exp(-exp(tasks - span))) if tasks - span < 30 else 0.0)
        return tasks, _Expected(kept, max(0.0, found))

    def _exhaustive(self, terms: list[_Expected]) -> list[tuple[int, ...]]:
        best: dict[frozenset[int], tuple[float, _Expected, tuple[frozenset[int], frozenset[int]] | None]] = {}
        everyone = range(len(terms))
        for n, t in enumerate(terms):
            best[frozenset([n])] = (0.0, t, None)
        for count in range(2, len(terms) + 1):
            for chosen in combinations(everyone, count):
                members = frozenset(chosen)
                kept, found = self._kept(members), (inf, terms[0], None)
                for left in _splits(chosen):
                    right = members - left
                    tasks, term = self._contracted(best[left][1], best[right][1], kept)
                    cost = best[left][0] + best[right][0] + exp(min(tasks, 700.0))
                    if cost < found[0]:
                        found = (cost, term, (left, right))  # type: ignore[assignment]
                best[members] = found
        ssa: list[tuple[int, ...]] = []

        def emit(members: frozenset[int]) -> int:
            split = best[members][2]
            if split is None:
                return min(members)
            pair = (emit(split[0]), emit(split[1]))
            ssa.append(pair)
            return len(terms) + len(ssa) - 1

        emit(frozenset(everyone))
        return ssa

    def _greedy(self, terms: list[_Expected]) -> list[tuple[int, ...]]:
        left = {n: (frozenset([n]), t) for n, t in enumerate(terms)}
        ssa: list[tuple[int, ...]] = []
        while len(left) > 1:

            def expense(pair: tuple[int, int]) -> float:
                (m, a), (n, b) = left[pair[0]], left[pair[1]]
                return self._contracted(a, b, self._kept(m | n))[0]

            pair = min(combinations(sorted(left), 2), key=expense)
            (m, a), (n, b) = left.pop(pair[0]), left.pop(pair[1])
            ssa.append(pair)
            left[len(terms) + len(ssa) - 1] = (m | n, self._contracted(a, b, self._kept(m | n))[1])
        return ssa


def _splits(chosen: Sequence[int]) -> list[frozenset[int]]:
    """The first of both sets, for every way to split some operands in two."""
    first, rest = chosen[0], chosen[1:]
    return [frozenset((first, *some)) for size in range(len(rest)) for some in combinations(rest, size)]
