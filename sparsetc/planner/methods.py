"""The ways to run an einsum with one sparse operand, by the names of their plans.

In: a `Setting` and counts. Out: the `Candidate` that a name stands for, and those that ``"auto"`` considers: of the
package's own methods, of formats that offer a plan, and of plans that users register.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sparsetc.errors import PlanError
from sparsetc.formats import FORMATS
from sparsetc.formats.tiles import sides_of
from sparsetc.ir.plan import FIXED, Plan
from sparsetc.ir.tile_groups import groups_of
from sparsetc.planner import candidates as make
from sparsetc.planner.candidates import LONG_ROW, LONG_RUN, Candidate, Setting
from sparsetc.planner.registry import PLANS, MakePlan
from sparsetc.planner.statistics import Counts


@dataclass(frozen=True)
class Method:
    """One way to run an einsum with one sparse operand."""

    named: Callable[[Plan, Setting, Counts], Candidate | None]
    """What a request by the method's name stands for; None, or PlanError, where it does not apply."""
    offered: Callable[[Setting, Counts], Iterable[Candidate | None]]
    """What ``"auto"`` considers."""


def _runs(setting: Setting, counts: Counts) -> Iterator[Candidate]:
    """Runs of output rows; and of one mode more, where the nonzeros of such a run fill work items of their own."""
    yield make.coo(setting, counts)
    for mode in setting.rest if len(setting.rest) > 1 and setting.backend == "triton" else ():
        if counts.nnz >= LONG_RUN * counts.distinct((*setting.kept, mode)):
            yield make.coo(setting, counts, (mode,))


def _rows(setting: Setting, counts: Counts) -> Iterator[Candidate]:
    """One row a lane, where rows are short: on a GPU a long one would keep its neighbours' lanes waiting."""
    if not setting.rest or not setting.kept:
        return
    if setting.backend == "torch" or counts.nnz <= 4 * LONG_ROW * counts.distinct(setting.kept):
        yield make.rows(setting, counts)


def _fibers(setting: Setting, counts: Counts) -> Iterable[Candidate]:
    """Fibers along each mode that is summed away."""
    return (make.fiber(setting, counts, leaf) for leaf in setting.rest if len(setting.rest) > 1)


def _by_run_length(setting: Setting, counts: Counts) -> Iterable[Candidate]:
    """Hybrids of long rows, as runs or fibers, and short ones, on a GPU."""
    applies = setting.backend == "triton" and setting.kept and setting.rest and not setting.deterministic
    return make.by_run_length(setting, counts) if applies else ()


def _named_by_run_length(request: Plan, setting: Setting, counts: Counts) -> Candidate:
    """The first of the hybrids that has the name."""
    for found in make.by_run_length(setting, counts):
        if found.plan.name == request.name:
            return found
    raise PlanError(f"plan {request.name!r} needs output rows both of {LONG_ROW} nonzeros or more and of fewer")


def _named_tiles(request: Plan, setting: Setting, counts: Counts) -> Candidate:
    """The hybrid of tiles and other nonzeros, by the threshold named or the cheapest."""
    from sparsetc.planner.hls import hls  # which not every process needs

    return hls(setting, counts, request.option("threshold", None))


def _tiles(setting: Setting, counts: Counts) -> Iterator[Candidate]:
    """The hybrid of tiles and other nonzeros: on a GPU, with dots, and with tiles worth making dense."""
    usable = setting.backend == "triton" and setting.floating and setting.coalesced and not setting.deterministic
    if usable and counts.nnz and groups_of(setting.bound, sides_of(counts.shape)).dot:
        found = _named_tiles(Plan("hls"), setting, counts)
        if any(tiles.nnz for tiles in found.expected[:-1]):
            yield found


OWN = {
    "coo": Method(lambda _, s, c: make.coo(s, c), _runs),
    "rows": Method(lambda _, s, c: make.rows(s, c), _rows),
    "fiber": Method(lambda _, s, c: make.fiber(s, c, make.best_leaf(s, c)), _fibers),
    "coo+rows": Method(_named_by_run_length, _by_run_length),
    "fiber+rows": Method(_named_by_run_length, lambda s, c: ()),  # offered with the other
    "hls": Method(_named_tiles, _tiles),
}
"""The package's methods, in the order in which they are considered."""


def methods() -> dict[str, Method]:
    """Every method, by name; what is registered stands in the place of what it replaces."""
    offers = {name: getattr(known, "offer", None) for name, known in FORMATS.items()}
    makers = PLANS | {name: offer for name, offer in offers.items() if offer and name not in PLANS}
    return OWN | {name: _registered(maker) for name, maker in makers.items()}


def _registered(maker: MakePlan) -> Method:
    return Method(lambda _, s, c: maker(s, c), lambda s, c: (maker(s, c),))


def named(request: Plan, setting: Setting, counts: Counts) -> Candidate:
    """The candidate that a request stands for; `PlanError` where there is no such method, or it does not apply."""
    method = methods().get(request.name)
    if method is None:
        known, called = ", ".join(FIXED), repr(request.name)
        raise PlanError(f"plan {called} has no parts, and no plan is called {called}; known: auto, hls, {known}")
    found = method.named(request, setting, counts)
    if found is None:
        raise PlanError(f'plan {request.name!r} does not apply to "{setting.bound.einsum}" on this tensor')
    return found
