"""Rates and laws of a profile, fitted to a record of what was timed.

In: lines, and the profile that plans are priced by. Out: the profile with other numbers, and what choices by it cost
beside the best ones, of tensors that it was fitted to and of tensors that were held out.

A choice costs its regret: what the plan takes that the profile prices lowest, over what the fastest one takes that was
timed of the same problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import torch

from sparsetc.device.profile import DeviceProfile
from sparsetc.errors import SparsetcError
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.plan import Plan
from sparsetc.ir.program.cost import Cost, Statistics
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.pricing import costs, seconds_of
from sparsetc.planner.problem import Counts, Problem
from sparsetc.tuning.lines import Line, plan_of


@dataclass(frozen=True)
class Timed:
    """A candidate that was timed, and all that its price follows from."""

    plan: Plan
    costs: tuple[Cost, ...]
    expected: tuple[Statistics, ...]
    backend: str
    seconds: float

    def price(self, profile: DeviceProfile) -> float:
        """Seconds that are expected of it."""
        return sum(seconds_of(self.plan, self.costs, self.expected, self.backend, profile))


Problems = list[tuple[str, list[Timed]]]
"""The candidates of each problem, and the tensor that it is of."""


def problems(lines: Iterable[Line]) -> Problems:
    """The problems of lines, of which two candidates or more can be priced again."""
    found: dict[tuple[str, str], dict[str, Timed]] = {}
    for line in lines:
        try:
            candidate, problem = candidate_of(line), problem_of(line)
            of_parts = tuple(costs(candidate, problem))
        except (SparsetcError, ValueError, TypeError, KeyError, RecursionError):
            continue
        timed = Timed(candidate.plan, of_parts, candidate.expected, problem.backend, line.timing.median)
        found.setdefault((line.tensor, line.key), {})[line.name] = timed
    return [(tensor, [*each.values()]) for (tensor, _), each in found.items() if len(each) > 1]
