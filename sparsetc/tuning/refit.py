"""Rates of a device's profile, fitted to a record of timings, so that choices cost less.

In: lines of one device. Out: a profile, and the regret of choices: what the plan takes that a profile prices lowest,
over what the fastest takes that was timed of the same problem. A fit counts by problems of tensors that it was made
without, and each rate is held near what it was, since few numbers follow from few tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import exp, inf, log
from typing import Any

import torch

from sparsetc.backends import BACKENDS
from sparsetc.device.profile import MEASURED, RATES, TABLES, DeviceProfile, calibrated, default_gpu, today
from sparsetc.errors import PlanError
from sparsetc.ir.equation.parse import parse
from sparsetc.planner import PLANS, Counts, Problem, costs, seconds_of
from sparsetc.tensor.dtypes import NAMED
from sparsetc.tuning.record import DAMAGED, Line, candidate_of

STEPS = (1.5, 1.2, 1.08)
"""Factors to try on a rate, up and down."""
MOST = 10.0
"""The largest factor by which a rate may change."""
HELD = 0.008
"""Weight of the squared logarithm of a rate's change, beside the mean logarithm of the regret."""
ACCURACY = 0.05
"""Weight of the mean logarithm of a price's error, beside the same."""
SOFT = 0.08
"""Logarithm of prices that the fit hardly tells apart, so that it changes little with little."""
GAIN = 1e-5
"""By how much a change lowers the cost at least."""
CALLS, TENSORS = 5, 4
"""Calls of a time that counts, and tensors of a record that can be fitted to, at least."""
Price = Callable[[DeviceProfile], float]


Timings = tuple[str, tuple[float, ...], tuple[Price, ...]]
"""A tensor, seconds of each plan of one problem of it, and the plan's price by any profile."""


def regret(problem: Timings, profile: DeviceProfile) -> float:
    """Return the slowdown of the plan with the lowest price: its measured seconds over the fastest plan's."""
    _, seconds, of_plans = problem
    prices = [price(profile) for price in of_plans]
    return seconds[prices.index(min(prices))] / min(seconds)


def cost(problem: Timings, profile: DeviceProfile) -> float:
    """Return the logarithm of a smoothed regret, and a share of the errors of prices."""
    _, seconds, of_plans = problem
    prices, took = [log(price(profile)) for price in of_plans], [*map(log, seconds)]
    shares = [exp((min(prices) - own) / SOFT) for own in prices]
    soft = sum(share * (own - min(took)) for share, own in zip(shares, took, strict=True)) / sum(shares)
    return soft + ACCURACY * sum(abs(p - t) for p, t in zip(prices, took, strict=True)) / len(took)


def refit(lines: Iterable[Line], profile: DeviceProfile) -> tuple[DeviceProfile, list[float], list[float], str]:
    """Fit the rates of a profile.

    Returns:
        The fit to all problems; the `regret` of each by the profile, and by the fit to that half of the tensors that
        the problem is not of; and how much was fitted to.

    Raises:
        PlanError: the lines are of fewer than `TENSORS` tensors.
    """
    problems = timings(lines)
    tensors = sorted({tensor for tensor, *_ in problems})
    if len(tensors) < TENSORS:
        raise PlanError(
            f"a fit needs plans timed for {TENSORS} tensors or more on {profile.name}, found {len(tensors)}: compile "
            'with tune="now" first, or name a file of a record'
        )
    held_out: list[float] = []
    for half in tensors[::2], tensors[1::2]:
        fit = fitted([p for p in problems if p[0] in half], profile)
        held_out += [regret(p, fit) for p in problems if p[0] not in half]
    before, about = [regret(p, profile) for p in problems], f"{len(problems)} problems of {len(tensors)} tensors"
    return fitted(problems, profile), before, held_out, about


def fitted(problems: Sequence[Timings], profile: DeviceProfile) -> DeviceProfile:
    """Return the profile with the cheapest choices, found by changing one rate after another while that gains."""
    measured: dict[str, Any] = {name: getattr(profile, name) for name in MEASURED}
    usual = {
        (name, key): n
        for name in RATES
        for key, n in (measured[name].items() if name in TABLES else [("", measured[name])])
    }

    def of(values: dict[tuple[str, str], float]) -> DeviceProfile:
        plain = {name: number for (name, key), number in values.items() if not key}
        tables = {
            name: measured[name] | {k: n for (own, k), n in values.items() if own == name}
            for name in TABLES
            if name in RATES
        }
        return calibrated(profile.name, today(), measured | plain | tables, "tune refit")

    def total(values: dict[tuple[str, str], float]) -> float:
        other = of(values)
        held = HELD * sum(log(number / usual[name]) ** 2 for name, number in values.items())
        return sum(cost(p, other) for p in problems) / len(problems) + held

    values, least = usual, total(usual)
    for name, factor in ((name, factor) for step in STEPS for name in usual for factor in (step, 1 / step)):
        while 1 / MOST < values[name] * factor / usual[name] < MOST:
            other = values | {name: values[name] * factor}
            changed = total(other)
            if changed > least - GAIN:
                break
            values, least = other, changed
    return of(values)


# -- lines -> problems -------------------------------------------------------------------------------------------------


def timings(lines: Iterable[Line]) -> list[Timings]:
    """Return the problems with two or more timed plans that ``"auto"`` considers."""
    by_problem: dict[tuple[str, str], dict[str, tuple[float, Price]]] = {}
    for line in lines:
        plan = line.name.partition(":")[0]
        # What torch multiplies takes longer by the clock than its price: its calls, which others do not wait for.
        considered = plan in PLANS and PLANS[plan].alone and plan != "dense"
        if considered and line.calls >= CALLS and "=" not in line.name.rpartition("]")[2]:
            with suppress(*DAMAGED):
                by_problem.setdefault((line.tensor, line.key), {})[line.name] = line.timing.median, price_of(line)
    several = []
    for (tensor, _), by_plan in by_problem.items():
        if len(by_plan) > 1:
            seconds, prices = zip(*by_plan.values(), strict=True)
            several.append((tensor, seconds, prices))
    return several


def price_of(line: Line) -> Price:
    """Return the price function of the plan of a line. Raise one of `DAMAGED` if the line holds none."""
    facts = dict(line.problem)
    shape = line.pattern["shape"]
    nnz = line.pattern["nnz"]
    sizes, dtype = facts.pop("sizes"), NAMED[facts.pop("dtype").removeprefix("torch.")]
    terms = line.equation.split("->")[0].replace(" ", "").split(",")
    bound = parse(line.equation, [[sizes[c] for c in term] for term in terms], [n == 0 for n in range(len(terms))])
    counts = Counts(torch.empty(len(shape), 0, dtype=torch.int64), tuple(shape), share=(nnz, lambda: None))
    facts |= {"backend": BACKENDS[facts["backend"]], "precisions": tuple(facts["precisions"]), "deterministic": False}
    problem = Problem(bound=bound, dtype=dtype, counts=counts, memory_limit=None, **facts)
    candidate = candidate_of(line)
    about = candidate.plan, tuple(costs(candidate, problem)), candidate.expected
    if not 0 < sum(seconds_of(*about, default_gpu())) < inf:
        raise ValueError("sizes that no plan has")
    return lambda profile: sum(seconds_of(*about, profile))
