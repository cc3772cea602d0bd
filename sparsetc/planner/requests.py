"""Requests for plans: a plan's name, and what of it is not to be chosen; and the plans that users add.

In: what a user names, or a function from a `Problem` and counts to a `Candidate`, None where it does not apply. Out: a
`Plan` with options and no parts, for any number of equations; PlanError for what no plan can have. A registered plan
takes part in ``plan="auto"`` by its expected cost, and is known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sparsetc.errors import PlanError
from sparsetc.formats.base import OWN
from sparsetc.ir.plan import PLAN_NAMES, PREFERRED, SHARED, SIDE, Plan, requested
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.problem import Problem
from sparsetc.planner.statistics import Counts
from sparsetc.support.names import check_free, check_label
from sparsetc.tensor.pattern import clear_patterns

BLOCKS, HYBRID = "bcb", "bcb+scalar"
STORAGES = ("auto", "whole", "bitmap")


def plan_preferring(name: str) -> Plan:
    """The plan of this name where it applies, and elsewhere the one that is expected to be fastest."""
    return Plan("auto", options=((PREFERRED, name),))


def check_threshold(threshold: object, least: int) -> None:
    """Raise `PlanError` unless this is a number of nonzeros, `least` or more, or None."""
    if threshold is not None and not (isinstance(threshold, int) and least <= threshold < 2**63):
        raise PlanError(f"threshold must be a number of nonzeros, {least} or more and below 2**63, found {threshold!r}")


def plan_hls(threshold: int | None = None) -> Plan:
    """The hybrid plan with tiles of at least `threshold` nonzeros dense; without one, the cost model finds it.

    0 or 1 makes every tile dense, a threshold above a tile's volume none.
    """
    check_threshold(threshold, 0)
    return Plan("hls", options=() if threshold is None else (("threshold", threshold),))


def plan_window(
    height: int | None = None, width: int | None = None, threshold: int | None = None, halves: bool = True
) -> Plan:
    """Windows of `height` neighbouring output rows, in tiles of `width` of the columns that they have, compacted.

    Args:
        height: rows of a window; None takes what the cost model finds best, here and below.
        width: columns of a tile.
        threshold: nonzeros a tile, on average over a window, from which its rows are not left to runs; 0 leaves none.
        halves: whether float32 may be multiplied in halves of 16 bits at ``precision="highest"``, where the cost model
            expects that to be faster and a call's operands allow it.
    """
    return Plan(
        "window",
        options=_sizes(height=height, width=width, threshold=threshold, halves=_unless(halves)),
    )


def plan_1sa(
    tau: int | None = None,
    strip: int | None = None,
    height: int | None = None,
    width: int | None = None,
    threshold: int | None = None,
    halves: bool = True,
) -> Plan:
    """Windows as `plan_window` has them, of rows that are grouped by similarity (1-SA), wherever they lie.

    Args:
        tau: the Jaccard similarity that rows of a group have at least, in percent, from 1 to 100.
        strip: columns of a strip; rows are compared by the strips that they touch.
        height: rows of a window.
        width: columns of a tile.
        threshold: nonzeros a tile, from which rows are not left to runs.
        halves: whether float32 may be multiplied in halves of 16 bits.
    """
    sizes = _sizes(
        tau=tau, strip=strip, height=height, width=width, threshold=threshold, halves=None if halves is True else halves
    )
    return Plan("1-sa", options=sizes)


def _unless(allowed: bool) -> bool | None:
    """What an option says that is on by default: nothing where it is."""
    return None if allowed is True else allowed


def _sizes(**named: int | None) -> tuple[tuple[str, int], ...]:
    """Options of what is named."""
    found = tuple((name, size) for name, size in named.items() if size is not None)
    check_windows(dict(found))
    return found


def check_windows(named: Mapping[str, object]) -> None:
    """Raise `PlanError` unless this is what `plan_window` or `plan_1sa` takes."""
    check_threshold(named.get("threshold"), 0)
    if not isinstance(named.get("halves", True), bool):
        raise PlanError(f"halves must be True or False, found {named['halves']!r}")
    for name, most in (("tau", 100), ("strip", 2**31), ("height", 1024), ("width", 1024)):
        size = named.get(name, 1)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= most:
            raise PlanError(f"{name} must be from 1 to {most:,}{' percent' if name == 'tau' else ''}, found {size!r}")


def check_blocks(storages: object, threshold: object, formats: object, sides: Mapping[str, object]) -> None:
    """Raise `PlanError` unless this is what `plan_bcb` takes, with a storage for each of two operands."""
    if not _two_of(STORAGES, storages):
        raise PlanError(f"storage must be one of {', '.join(STORAGES)}, or a pair of them, found {storages!r}")
    check_threshold(threshold, 1)
    for letter, side in sides.items():
        if not isinstance(side, int) or not 1 <= side < 2**63 or side & (side - 1):
            raise PlanError(f"the side of {letter!r} must be a power of two, below 2**63, found {side!r}")
    if not _two_of(("bcb", "coo"), formats):
        raise PlanError(f'formats must be "bcb" or "coo" for each of two operands, found {formats!r}')


def _two_of(known: tuple[str, ...], found: object) -> bool:
    return isinstance(found, tuple | list) and len(found) == 2 and all(f in known for f in found)


def plan_bcb(
    storage: str | tuple[str, str] = "auto",
    threshold: int | None = None,
    formats: tuple[str, str] = ("bcb", "bcb"),
    **sides: int,
) -> Plan:
    """Blocks with sides given by letter, as in ``plan_bcb(i=8, j=8, k=32)``; those not named are chosen.

    Args:
        storage: how a GPU reads blocks: ``"whole"``, ``"bitmap"`` (bits and packed values, section III-D), or
            ``"auto"``: whole unless that takes more than a quarter of the memory limit, when the larger operand, or
            both, are bitmaps. A pair names one for each operand, in the equation's order. Integers are read whole, and
            so is everything on the CPU.
        threshold: nonzeros from which a block of the first operand in the result is multiplied as a block; those of the
            others are multiplied one by one (``bcb+scalar``). None multiplies all as blocks.
        formats: ``"bcb"`` or ``"coo"`` for each of the two operands, in the equation's order. A nonzero in ``coo``
            meets blocks that have side 1 along the letters that both operands have, and scales them.
        sides: powers of two; letters that both operands keep have side 1 whatever is given.
    """
    storages = (storage, storage) if isinstance(storage, str) else storage
    check_blocks(storages, threshold, formats, sides)
    named = (("storage", tuple(storages)), ("threshold", threshold), ("formats", tuple(formats)))
    chosen = (("auto", "auto"), None, ("bcb", "bcb"))
    options: list[tuple[str, Any]] = [(SIDE + letter, side) for letter, side in sorted(sides.items())]
    options += [own for own, free in zip(named, chosen, strict=True) if own[1] != free]
    return Plan(BLOCKS if threshold is None else HYBRID, options=tuple(options))


MakePlan = Callable[[Problem, Counts], Candidate | None]


@dataclass(frozen=True)
class RegisteredPlan:
    """A function and what is known of its plans."""

    name: str
    make: MakePlan
    shared: bool
    """Parts are dealt and stored alike for every einsum."""


PLANS: dict[str, RegisteredPlan] = {}
F = TypeVar("F", bound=MakePlan)


def register_plan(name: str, *, shared: bool = False, replace: bool = False) -> Callable[[F], F]:
    """Decorator: make ``make(problem, counts) -> Candidate | None`` known to plans by `name`.

    Args:
        name: one line of printable characters, without quotes and backslashes, that ``plan=`` takes.
        shared: the plan deals and stores nonzeros alike for every einsum, so that one packed copy serves them all.
            Where it is asked for, gradients and batches take it too, if it applies to them; those of other plans are
            planned anew.
        replace: put the plan in the place of one that comes with the package, or of a format's.

    Raises:
        PlanError: a name that cannot be one, or is taken by the package.
    """
    check_label(name, "a plan", PlanError)

    def register(function: F) -> F:
        check_free(name, "plan", (*PLAN_NAMES, *OWN), replace, PlanError, function)
        PLANS[name] = RegisteredPlan(name, function, shared)
        clear_patterns()
        return function

    return register


def plan_of_derived(wanted: str | Plan) -> str | Plan:
    """The request for einsums that follow from one by this plan, as its gradients do: "auto", or a shared plan first.

    A plan that was chosen for one einsum does not serve another, unless it says so.
    """
    plan = requested(wanted)
    name = plan.preferred or plan.name
    shared = PLANS[name].shared if name in PLANS else name in SHARED
    return plan_preferring(name) if shared else "auto"
