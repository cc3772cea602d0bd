"""Rates of a device's profile, fitted to a record of what was timed, so that choices by it cost less.

In: lines of one device. Out: a profile, and the regret of choices: what the plan takes that a profile prices lowest,
over what the fastest takes that was timed of the same problem. A fit counts by problems of tensors that it was made
without, and each rate is held near what it was, since few numbers follow from few tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import exp, log
from typing import Any

import torch

from sparsetc.device.profile import MEASURED, RATES, TABLES, DeviceProfile, calibrated
from sparsetc.errors import PlanError
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.plan import Plan
from sparsetc.ir.program.cost import Cost, Statistics
from sparsetc.planner.pricing import costs, seconds_of
from sparsetc.planner.problem import Counts, Problem
from sparsetc.planner.registry import PLANS
from sparsetc.tuning.known import DAMAGED, candidate_of
from sparsetc.tuning.lines import Line

STEPS = (1.5, 1.2, 1.08)
"""How many times as large, or as small, a rate is tried."""
MOST = 10.0
"""How many times what it was a rate may become."""
HELD = 0.008
"""What the square of a rate's logarithm, beside what it was, costs of the mean logarithm of the regret."""
ACCURACY = 0.05
"""What the mean logarithm of a price's error costs of that."""
SOFT = 0.08
"""Logarithm of prices that the fit hardly tells apart, so that it changes little with little."""
GAIN = 1e-5
"""By how much a change lowers the cost at least."""
CALLS, TENSORS = 5, 4
"""Calls of a time that counts, and tensors of a record that can be fitted to, at least."""


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


@dataclass(frozen=True)
class Timings:
    """What was timed of one problem.

    Attributes:
        tensor: that the problem is of.
    """

    tensor: str
    each: tuple[Timed, ...]

    def regret(self, profile: DeviceProfile) -> float:
        """How many times what the fastest takes the one does that is priced lowest."""
        return min(self.each, key=lambda t: t.price(profile)).seconds / min(t.seconds for t in self.each)

    def cost(self, profile: DeviceProfile) -> float:
        """The logarithm of the regret where prices are told apart softly, and a share of that of prices' errors."""
        prices, best = [log(t.price(profile)) for t in self.each], min(t.seconds for t in self.each)
        shares = [exp((min(prices) - own) / SOFT) for own in prices]
        soft = sum(share * log(t.seconds / best) for share, t in zip(shares, self.each, strict=True)) / sum(shares)
        off = sum(abs(own - log(t.seconds)) for own, t in zip(prices, self.each, strict=True)) / len(prices)
        return soft + ACCURACY * off


@dataclass(frozen=True)
class Regret:
    """Of choices: the geometric mean, the worst, and the share above 1.2."""

    mean: float
    worst: float
    above: float

    @classmethod
    def of(cls, each: Sequence[float]) -> Regret:
        """Of single choices."""
        return cls(exp(sum(map(log, each)) / len(each)), max(each), sum(r > 1.2 for r in each) / len(each))

    def __str__(self) -> str:
        return f"{self.mean:.3f} times the best, {self.worst:.2f} at worst, above 1.2 in {self.above:.0%}"


@dataclass(frozen=True)
class Refit:
    """A fit to all problems, and the regret by the profile before, and by fits that have not seen a tensor."""

    profile: DeviceProfile
    problems: int
    tensors: int
    before: Regret
    held_out: Regret

    @property
    def better(self) -> bool:
        """Whether the worst choice and the mean of all are better by fits that have not seen them."""
        return self.held_out.worst < self.before.worst and self.held_out.mean <= self.before.mean


def refit(lines: Iterable[Line], profile: DeviceProfile, day: str) -> Refit:
    """Fit the rates of a profile, of a day; `PlanError` where lines are of fewer than `TENSORS` tensors."""
    problems = timings(lines)
    tensors = sorted({p.tensor for p in problems})
    if len(tensors) < TENSORS:
        raise PlanError(
            f"a fit needs plans timed for {TENSORS} tensors or more on {profile.name}, found {len(tensors)}: compile "
            'with tune="now" first, or name a file of a record'
        )
    after: list[float] = []
    for half in tensors[::2], tensors[1::2]:
        fit = fitted([p for p in problems if p.tensor in half], profile, day)
        after += [p.regret(fit) for p in problems if p.tensor not in half]
    before, every = Regret.of([p.regret(profile) for p in problems]), fitted(problems, profile, day)
    return Refit(every, len(problems), len(tensors), before, Regret.of(after))


def fitted(problems: Sequence[Timings], profile: DeviceProfile, day: str) -> DeviceProfile:
    """The profile whose choices cost least, found by changing one rate after another while that gains."""
    usual = {(name, key): number for name in RATES for key, number in _entries(getattr(profile, name)).items()}

    def of(values: Mapping[tuple[str, str], float]) -> DeviceProfile:
        measured = {name: getattr(profile, name) for name in MEASURED}
        for (name, key), number in values.items():
            measured[name] = measured[name] | {key: number} if name in TABLES else number
        return calibrated(profile.name, day, measured, "tune refit")

    def cost(values: Mapping[tuple[str, str], float]) -> float:
        other = of(values)
        held = HELD * sum(log(number / usual[name]) ** 2 for name, number in values.items())
        return sum(p.cost(other) for p in problems) / len(problems) + held

    values, least = usual, cost(usual)
    for step in STEPS:
        for name in usual:
            for factor in step, 1 / step:
                while 1 / MOST < values[name] * factor / usual[name] < MOST:
                    other = values | {name: values[name] * factor}
                    found = cost(other)
                    if found > least - GAIN:
                        break
                    values, least = other, found
    return of(values)


def _entries(value: Any) -> Mapping[str, float]:
    return value if isinstance(value, Mapping) else {"": value}


# -- lines -> problems -------------------------------------------------------------------------------------------------


def timings(lines: Iterable[Line]) -> list[Timings]:
    """The problems of lines, of which ``"auto"`` has two plans or more, by the options that it gives them."""
    found: dict[tuple[str, str], dict[str, Timed]] = {}
    for line in lines:
        with suppress(*DAMAGED):
            candidate, problem = candidate_of(line), problem_of(line)
            name, stepped = candidate.plan.name, "=" in line.name.rpartition("]")[2]
            # What torch multiplies takes longer by the clock than its price: its calls, which others do not wait for.
            if line.calls >= CALLS and not stepped and name in PLANS and PLANS[name].alone and name != "dense":
                timed = tuple(costs(candidate, problem)), candidate.expected, problem.backend, line.timing.median
                found.setdefault((line.tensor, line.key), {})[line.name] = Timed(candidate.plan, *timed)
    return [Timings(tensor, tuple(each.values())) for (tensor, _), each in found.items() if len(each) > 1]


def problem_of(line: Line) -> Problem:
    """The problem of a line, with no coordinates."""
    facts, shape, nnz = dict(line.problem), line.pattern["shape"], line.pattern["nnz"]
    sizes, dtype = facts.pop("sizes"), getattr(torch, facts.pop("dtype").removeprefix("torch."))
    terms = line.equation.split("->")[0].replace(" ", "").split(",")
    bound = parse(line.equation, [[sizes[c] for c in term] for term in terms], [n == 0 for n in range(len(terms))])
    counts = Counts(torch.empty(len(shape), 0, dtype=torch.int64), tuple(shape), share=(nnz, lambda: None))
    facts["precisions"] = tuple(facts["precisions"])
    return Problem(bound=bound, dtype=dtype, counts=counts, memory_limit=None, **facts)
