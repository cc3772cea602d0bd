"""A way to run a step, be its sparse operands one or two: what it is expected to take, and what its name stands for.

In: a problem. Out: `Estimate`s, from which the chooser makes a `Choice`. A method of two operands prepares what runs
its plan too; parts of one operand say all of how they are stored and run, so one function prepares every plan of them
(`sparsetc.contraction.prepare`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Generic, TypeVar

from sparsetc.errors import PlanError
from sparsetc.ir.plan import Plan
from sparsetc.planner.candidate import Candidate, Estimate
from sparsetc.planner.estimate import estimates, without_idle_precision
from sparsetc.planner.problem import Problem
from sparsetc.planner.statistics import Counts

P = TypeVar("P")
S = TypeVar("S")


class Method(ABC, Generic[P]):
    """One way to run a step."""

    name: str
    """The name of the method's plans."""
    alone: bool = True
    """Whether ``"auto"`` considers the method for an einsum by itself, and not only for several that share a copy."""

    @abstractmethod
    def estimates(self, problem: P) -> Iterable[Estimate]:
        """What ``"auto"`` considers of the method, and what that is expected to take."""

    @abstractmethod
    def requested(self, problem: P, request: Plan) -> Estimate:
        """What a request by the method's name stands for; `PlanError` where the method does not apply."""


class Hybrid(Method[P]):
    """Nonzeros of one operand dealt to two methods, whose results add up: an einsum is linear in each operand."""

    def best(self, problem: P, splits: Iterable[S], seconds: Callable[[S], float | None]) -> S:
        """The way of dealing that is expected to be fastest, the first of equals; one that does not fit is the last."""

        def time(split: S) -> float:
            found = seconds(split)
            return inf if found is None else found

        return min(splits, key=time)


class OperandMethod(Method[Problem]):
    """One way to run an einsum with one sparse operand: its plans are candidates, costed before one is packed."""

    @abstractmethod
    def candidates(self, problem: Problem, counts: Counts) -> Iterable[Candidate]:
        """The plans worth considering; none where the method does not apply."""

    @abstractmethod
    def candidate(self, problem: Problem, counts: Counts, request: Plan) -> Candidate | None:
        """What a request stands for; None, or `PlanError`, where the method does not apply."""

    def estimates(self, problem: Problem) -> Iterable[Estimate]:
        """Every candidate, at the precision asked for and at those that are more exact, and with operands rounded.

        A lower precision thus adds candidates and takes none away, so it is never expected to be slower.
        """
        found: dict[Plan, list[Estimate]] = {}
        for precision in (problem.precision, *problem.finer):
            own = replace(problem, precision=precision)
            for candidate in self.candidates(own, problem.counts):
                key = without_idle_precision(candidate.plan)
                if key not in found:
                    found[key] = estimates(candidate, problem)
        return chain(*found.values())

    def requested(self, problem: Problem, request: Plan) -> Estimate:
        """The candidate that is named, with operands rounded where that pays, and what it is expected to take."""
        found = self.candidate(problem, problem.counts, request)
        if found is None:
            said = f'plan {request.name!r} does not apply to "{problem.equation}" on this tensor'
            raise PlanError(f'{said}: the function that makes it gave None, and no candidate; "auto" takes another')
        return estimates(found, problem)[-1]
