"""Rates and laws of the default profile, fitted to a record of what was timed.

    python benchmarks/refit.py [record ...]

In: records (``sparsetc tune export``), by default that of an H200 in ``results/``. Out: the regret of choices by the
profile and by fits, and what a fit would change: what the plan takes that a profile prices lowest, over what the
fastest takes that was timed of the same problem. Nothing is written.

Few numbers follow from few tensors, so each is held near what it was, by the square of its logarithm; and a fit counts
where it was made without the tensors that it is judged by.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from sparsetc.device.profile import DeviceProfile, default_gpu
from sparsetc.errors import SparsetcError
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.plan import Plan
from sparsetc.ir.program.cost import Cost, Statistics
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.pricing import costs, seconds_of
from sparsetc.planner.problem import Counts, Problem
from sparsetc.planner.registry import PLANS
from sparsetc.tuning.lines import Line, plan_of, read

RECORD = Path(__file__).parent / "results" / "tuning_record.jsonl.gz"

FITTED = ("memory", "l2", "l1", "add", "multiply", "launch", "program", "wait", "fiber", "expand", "tile")
FITTED_TABLES = ("dot", "tile_share", "fused_slowdown", "staged")
NOT_FITTED = ("product_tf32", "product_bf16", "product_unaligned", "product_summed", "rounding_call", "least_gain")
"""Laws of torch's own products, whose calls take longer than their kernels, and of what is chosen by price."""
STEPS = (1.5, 1.2, 1.08)
"""How many times as large, or as small, a number is tried."""
MOST = 10.0
"""How many times what it was a number may become."""
HELD = 0.008
"""What the square of a number's logarithm, beside what it was, costs of the mean logarithm of the regret."""
ACCURACY = 0.05
"""What the mean logarithm of a price's error costs of that."""
SOFT = 0.08
"""Logarithm of prices that the fit hardly tells apart, so that it changes little with little."""
GAIN = 1e-5
"""By how much a change lowers the cost at least."""
CALLS = 5
"""Calls of a time that counts."""


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

    def cost(self, profile: DeviceProfile) -> tuple[float, float]:
        """The mean logarithm of the regret where prices are told apart softly, and of the prices' errors."""
        prices, best = [log(t.price(profile)) for t in self.each], min(t.seconds for t in self.each)
        shares = [exp((min(prices) - own) / SOFT) for own in prices]
        soft = sum(share * log(t.seconds / best) for share, t in zip(shares, self.each, strict=True)) / sum(shares)
        return soft, sum(abs(own - log(t.seconds)) for own, t in zip(prices, self.each, strict=True)) / len(prices)


def timings(lines: Iterable[Line]) -> list[Timings]:
    """The problems of lines, of which ``"auto"`` has two plans or more, by the options that it gives them."""
    found: dict[tuple[str, str], dict[str, Timed]] = {}
    for line in lines:
        try:
            candidate, problem = candidate_of(line), problem_of(line)
            name, stepped = candidate.plan.name, "=" in line.name.rpartition("]")[2]
            if line.calls < CALLS or stepped or not (name in PLANS and PLANS[name].alone) or name == "dense":
                continue
            timed = tuple(costs(candidate, problem)), candidate.expected, problem.backend, line.timing.median
        except (SparsetcError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # damaged
            continue
        found.setdefault((line.tensor, line.key), {})[line.name] = Timed(candidate.plan, *timed)
    return [Timings(tensor, tuple(each.values())) for (tensor, _), each in found.items() if len(each) > 1]


# -- the fit -----------------------------------------------------------------------------------------------------------


def numbers(profile: DeviceProfile) -> dict[str, float]:
    """Return what is fitted, by name: rates, entries of tables and laws."""
    tables = {f"{table} {key}": value for table in FITTED_TABLES for key, value in getattr(profile, table).items()}
    laws = {name: value for name, value in profile.laws.items() if name not in NOT_FITTED}
    return {name: getattr(profile, name) for name in FITTED} | tables | laws


def changed(profile: DeviceProfile, values: Mapping[str, float]) -> DeviceProfile:
    """Return the profile with other numbers, by the names that `numbers` has for them."""
    fields: dict[str, Any] = {name: value for name, value in values.items() if name in FITTED}
    for table in FITTED_TABLES:
        own = getattr(profile, table)
        fields[table] = {key: values.get(f"{table} {key}", value) for key, value in own.items()}
    fields["laws"] = {name: values.get(name, value) for name, value in profile.laws.items()}
    return replace(profile, **fields)


def fitted(problems: Sequence[Timings], profile: DeviceProfile) -> DeviceProfile:
    """The profile whose choices cost least, found by changing one number after another while that gains."""
    usual = {name: value for name, value in numbers(profile).items() if value}

    def cost(values: dict[str, float]) -> float:
        other = changed(profile, values)
        each = [p.cost(other) for p in problems]
        regret, error = (sum(own) / len(each) for own in zip(*each, strict=True))
        return regret + ACCURACY * error + HELD * sum(log(v / usual[name]) ** 2 for name, v in values.items())

    values, least = usual, cost(usual)
    for step in STEPS:
        for name in usual:
            for factor in (step, 1 / step):
                while 1 / MOST < values[name] * factor / usual[name] < MOST:
                    other = values | {name: values[name] * factor}
                    found = cost(other)
                    if found > least - GAIN:
                        break
                    values, least = other, found
    return changed(profile, values)


@dataclass(frozen=True)
class Regret:
    """Of choices: the geometric mean, the worst, and the share above 1.05 and above 1.2."""

    mean: float
    worst: float
    above: tuple[float, float]

    @classmethod
    def of(cls, each: Sequence[float]) -> Regret:
        """Of single choices."""
        above = (sum(r > 1.05 for r in each) / len(each), sum(r > 1.2 for r in each) / len(each))
        return cls(exp(sum(map(log, each)) / len(each)), max(each), above)

    def __str__(self) -> str:
        much, more = self.above
        return f"{self.mean:.3f} times the best, {self.worst:.2f} at worst, above 1.05 in {much:.0%}, 1.2 in {more:.0%}"


def held_out(problems: Sequence[Timings], profile: DeviceProfile) -> tuple[Regret, Regret]:
    """The regret by the profile, and by fits to one half of the tensors of choices of the other half."""
    tensors = sorted({p.tensor for p in problems})
    after = []
    for half in (tensors[::2], tensors[1::2]):
        fit = fitted([p for p in problems if p.tensor in half], profile)
        after += [p.regret(fit) for p in problems if p.tensor not in half]
    return Regret.of([p.regret(profile) for p in problems]), Regret.of(after)


# -- lines -> problems -------------------------------------------------------------------------------------------------


def candidate_of(line: Line) -> Candidate:
    """The candidate of a line, with the sizes that its parts were expected to have."""
    expected = [Statistics(**sizes | {"runs": tuple(map(tuple, sizes["runs"]))}) for sizes in line.expected]
    return Candidate(plan_of(line.plan), tuple(expected), line.name, line.predicted)


def problem_of(line: Line) -> Problem:
    """The problem of a line, with no coordinates."""
    facts, shape, nnz = dict(line.problem), line.pattern["shape"], line.pattern["nnz"]
    sizes, dtype = facts.pop("sizes"), getattr(torch, facts.pop("dtype").removeprefix("torch."))
    terms = line.equation.split("->")[0].replace(" ", "").split(",")
    bound = parse(line.equation, [[sizes[c] for c in term] for term in terms], [n == 0 for n in range(len(terms))])
    counts = Counts(torch.empty(len(shape), 0, dtype=torch.int64), tuple(shape), share=(nnz, lambda: None))
    facts["precisions"] = tuple(facts["precisions"])
    return Problem(bound=bound, dtype=dtype, counts=counts, memory_limit=None, **facts)


def main(paths: list[str]) -> None:
    """Print what fits would change, and what choices by them would cost."""
    texts = [Path(path).read_bytes() for path in paths or [RECORD]]
    found = [line for text in texts for line in read(gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text)]
    problems, profile = timings(found), default_gpu()
    print(f"{len(problems)} problems of {len({p.tensor for p in problems})} tensors")
    before, after = held_out(problems, profile)
    fit = fitted(problems, profile)
    print(f"by the profile                {before}\nby fits without the tensor    {after}")
    print(f"by the fit                    {Regret.of([p.regret(fit) for p in problems])}")
    usual = numbers(profile)
    for name, value in numbers(fit).items():
        if value != usual[name]:
            print(f"  {name:<24} {usual[name]:.3g} -> {value:.3g}")


if __name__ == "__main__":
    main(sys.argv[1:])
