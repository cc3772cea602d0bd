"""``plan_bcb``: a request for blocks of two sparse operands, with what of it is not to be chosen.

In: what a user names. Out: a `Plan` with options and no parts; PlanError for what no such plan can have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsetc.errors import PlanError
from sparsetc.ir.plan import SIDE, Plan, check_threshold

BLOCKS, HYBRID = "bcb", "bcb+scalar"
STORAGES = ("auto", "whole", "bitmap")


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
