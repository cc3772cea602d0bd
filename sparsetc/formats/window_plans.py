"""Plans of windows by name, and requests of them: ``window`` and ``1-sa``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from sparsetc.errors import PlanError
from sparsetc.formats.window_candidates import considered, splits, tilings, value_bytes
from sparsetc.ir.plan import Plan, check_threshold
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.pricing import cheapest, in_order
from sparsetc.planner.problem import Counts, Problem
from sparsetc.planner.registry import Method, add_plans
from sparsetc.support import memory


def _requested(name: str, problem: Problem, counts: Counts, **named: Any) -> Candidate:
    """Return the best candidate of a request: named options are kept, open ones chosen, all within the memory limit."""
    if not problem.kept or not problem.rest:
        raise PlanError(f'plan "{name}" needs an output with some, not all, of the sparse operand\'s modes')
    check_windows(named)
    parts, threshold = tilings(problem, problem.rules["taus"][name], named), named.get("threshold")
    candidates = [split for part in parts for split in splits(problem, counts, name, part, threshold)]
    if not candidates:
        raise PlanError(f'plan "{name}" needs a matrix product, and finds none in "{problem.bound.einsum}"')
    most, least = problem.memory, min(value_bytes(problem, split) for split in candidates)
    instead = "leave more rows to runs by a higher threshold"
    memory.check(f'tiles of plan "{name}"', least, counts.coords.device, most, instead)
    return cheapest([split for split in candidates if value_bytes(problem, split) <= most], problem, in_order)


def plan_window(
    height: int | None = None, width: int | None = None, threshold: int | None = None, halves: bool = True
) -> Plan:
    """Make a plan of windows: `height` neighbouring output rows, as tiles of `width` of their columns.

    Args:
        height: rows of a window; None takes what the cost model finds best, here and below.
        width: columns of a tile.
        threshold: nonzeros that the tiles of a window need on average; rows of other windows are stored as runs. 0
            stores all rows in windows.
        halves: whether float32 may be multiplied in halves of 16 bits at ``precision="highest"``, where the cost model
            expects that to be faster and a call's operands allow it.

    Examples:
        >>> stc.plans.plan_window(height=16, width=8)
        Plan('window', height=16, width=8)
    """
    return _request("window", height=height, width=width, threshold=threshold, halves=halves)


def plan_1sa(
    tau: int | None = None,
    strip: int | None = None,
    height: int | None = None,
    width: int | None = None,
    threshold: int | None = None,
    halves: bool = True,
) -> Plan:
    """Make a plan of windows as `plan_window`, of rows grouped by similarity (1-SA) instead of neighbouring rows.

    Args:
        tau: the Jaccard similarity that rows of a group have at least, in percent, from 1 to 100.
        strip: columns of a strip; rows are compared by the strips that they touch.
        height: rows of a window.
        width: columns of a tile.
        threshold: nonzeros that the tiles of a window need on average, as for `plan_window`.
        halves: as for `plan_window`.

    Examples:
        >>> stc.plans.plan_1sa(tau=50, height=16)
        Plan('1-sa', tau=50, height=16)
    """
    return _request("1-sa", tau=tau, strip=strip, height=height, width=width, threshold=threshold, halves=halves)


def _request(name: str, **options: int | None) -> Plan:
    """Return the request of the options that differ from their defaults."""
    named = {option: size for option, size in options.items() if size is not None}
    check_windows(named)
    return Plan(
        name, options=tuple((option, size) for option, size in named.items() if (option, size) != ("halves", True))
    )


def check_windows(named: Mapping[str, object]) -> None:
    """Raise `PlanError` unless this is what `plan_window` or `plan_1sa` takes."""
    check_threshold(named.get("threshold"), 0)
    if not isinstance(named.get("halves", True), bool):
        raise PlanError(f"halves must be True or False, found {named['halves']!r}")
    for name, most in (("tau", 100), ("strip", 2**31), ("height", 1024), ("width", 1024)):
        size = named.get(name, 1)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= most:
            raise PlanError(f"{name} must be from 1 to {most:,}{' percent' if name == 'tau' else ''}, found {size!r}")


for _name, _options in (("window", ()), ("1-sa", ("tau", "strip"))):
    _options = ("height", "width", "threshold", "halves", *_options)
    add_plans(Method(_name, partial(considered, _name), partial(_requested, _name), _options, kernels=True))
