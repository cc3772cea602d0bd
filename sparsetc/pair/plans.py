"""The sides of blocks, and how those are stored, as the plan of a contraction of two sparse operands says.

In: a `Plan`, whose parts say it, or a request for one, whose options do. Out: sides by letter, storages by operand;
PlanError for plans that are not of two operands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sparsetc.errors import PlanError
from sparsetc.ir.plan import PAIRED_PLANS, SIDE, Plan, requested
from sparsetc.planner.requests import check_blocks


def named_sides(plan: Plan) -> dict[str, int]:
    """Sides of blocks by letter, as the options of a request or the parts of a plan name them."""
    if plan.is_request:
        return {name.removeprefix(SIDE): n for name, n in plan.options if name.startswith(SIDE)}
    return {letter: n for part in plan.parts for letter, n in part.sides.items()}


def sides_of(plan: Plan, terms: Sequence[Sequence[str]]) -> dict[str, int]:
    """Sides of blocks by letter, for operands of given letters: an operand in ``coo`` has blocks of one position."""
    formats = plan.option("formats", ("bcb", "bcb"))
    single = [c for term, name in zip(terms, formats, strict=True) if name == "coo" for c in term]
    return named_sides(plan) | dict.fromkeys(single, 1)


def storages_of(plan: Plan) -> tuple[str, str]:
    """How blocks are stored, ``auto``, ``whole`` or ``bitmap``, for each operand in the equation's order."""
    if not plan.parts:
        x, y = plan.option("storage", ("auto", "auto"))
        return x, y
    x, y = ("bitmap" if part.bitmap else "whole" for part in plan.parts[:2])
    return x, y


def check_pairs(wanted: Any, letters: Iterable[str] | None = None) -> Plan:
    """The plan wanted, or PlanError where it is not of two sparse operands, or has sides of other letters."""
    plan = requested(wanted)
    if not plan.pairs and not (plan.is_request and plan.name in ("auto", *PAIRED_PLANS)):
        raise PlanError(
            f"plan must be auto, {', '.join(PAIRED_PLANS)} or plan_bcb(...) for two sparse operands, found {wanted!r}"
        )
    if plan.is_request:
        storages, formats = plan.option("storage", ("auto", "auto")), plan.option("formats", ("bcb", "bcb"))
        check_blocks(storages, plan.option("threshold", None), formats, named_sides(plan))
    unknown = sorted(set(named_sides(plan)) - set(letters)) if plan.is_request and letters is not None else ()
    if unknown:
        raise PlanError(f"the plan gives sides to {', '.join(unknown)}, which the equation does not have")
    return plan
