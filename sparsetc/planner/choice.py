"""From what plans are expected to take to the one that is run, of one sparse operand and of two.

In: an `Estimate` for each plan that applies. Out: a `Choice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparsetc.ir.plan import Plan
from sparsetc.ir.program.statistics import Statistics

APART = 1.05
"""How many times another's a scalar plan's time must be for the cost model to tell them apart; of nearer ones that of
fewest parts is taken (H200, SpMM of pubmed, 32 columns: `coo+rows`, priced 4 % below `coo`, took 2.3 times as long),
and it rather than tiles (192 SpMMs, `benchmarks/results/spmm.json`: 19 in place of 26 took 1.05 times as long as the
fastest plan, or more)."""


@dataclass(frozen=True)
class Estimate:
    """What a plan is expected to take."""

    name: str
    """The plan, for a reader: its name, and what tells it from others of that name."""
    plan: Plan
    seconds: tuple[float, ...] | None
    """Seconds of each part, launches included, or of all; None where the plan does not fit, or has no kernel."""
    expected: tuple[Statistics, ...] = ()
    """What packing each part is expected to give."""
    scalar: bool = False
    """Whether the cost model tells the plan from others of its kind by `APART` only."""

    @property
    def total(self) -> float | None:
        """Seconds of a call."""
        return None if self.seconds is None else sum(self.seconds)


@dataclass(frozen=True)
class Choice:
    """A plan as it is run, and what it and the others were expected to take."""

    plan: Plan
    considered: tuple[tuple[str, float | None], ...] = ()
    """(plan, seconds), the cheapest first; None for one that does not fit. Empty for a plan that the caller gave."""
    expected: tuple[Statistics, ...] = ()
    """What packing each part was expected to give, where parts were packed after the choice."""
    seconds: tuple[float, ...] = ()
    """Seconds of the plan's parts: together what `considered` says of it."""

    def __repr__(self) -> str:
        expected = f"{1e6 * sum(self.seconds):.1f} us expected, " if self.seconds else ""
        return f"Choice({self.plan.name!r}, {expected}{len(self.considered)} considered)"


def ranked(found: Sequence[Estimate]) -> list[Estimate]:
    """The estimates, the cheapest first, those that do not fit last; of plans that are not told apart the simplest."""
    order = sorted(found, key=lambda e: (e.total is None, e.total or 0.0))
    near = [e for e in order if e.scalar and e.total is not None and e.total <= APART * (order[0].total or 0.0)]
    if near:
        simplest = min(near, key=lambda e: len(e.plan.parts))
        order = [simplest, *(e for e in order if e is not simplest)]
    return order


def choice_of(found: Sequence[Estimate], reason: str = "") -> Choice:
    """The plan that is expected to be fastest; why, unless `reason` says it."""
    order = ranked(found)
    counted = f"the cheapest of {len(order)} by the cost model" if len(order) > 1 else "the only plan that applies"
    plan = replace(order[0].plan, reason="; ".join(filter(None, (reason or counted, order[0].plan.reason))))
    return Choice(plan, tuple((e.name, e.total) for e in order), order[0].expected, order[0].seconds or ())
