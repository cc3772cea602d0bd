"""A plan's parts as they are stored: dealt, packed, and kept under what their arrays depend on.

In: a plan, coordinates, a cache of the pattern's. Out: `Packed` parts. A part is known by its share of the nonzeros and
by its storage, so einsums whose plans store nonzeros alike share the arrays, and the values packed for them.
"""

from __future__ import annotations

from typing import Any

import torch

from sparsetc.errors import PlanError
from sparsetc.formats import Packed, pack
from sparsetc.ir.plan import Plan
from sparsetc.lru import Lru
from sparsetc.partition.base import get_partition
from sparsetc.partition.dealing import deal, taken


def stored_parts(
    plan: Plan, coords: torch.Tensor, shape: tuple[int, ...], kept: tuple[int, ...], cache: Lru[Any, Any]
) -> list[Packed]:
    """Each part of a plan, packed, or taken from the cache, where another einsum's plan may have left it.

    Args:
        plan: whose parts are wanted.
        coords: (order, nnz) int64, in lexicographic order.
        shape: sizes of the modes.
        kept: modes that the output keeps.
        cache: of packed parts, and of how partitions dealt the nonzeros.

    Raises:
        PlanError: the partition breaks its promises, or deals nonzeros to a share that the plan has no part for.
        FormatError: a format does not take its part, or packs it wrongly.
    """
    rule = get_partition(plan.partition)
    dealt_by = ("deal", plan.partition, plan.options, kept if rule.by_rows else ())
    found: list[Packed] = []
    for number, part in enumerate(plan.parts):
        key = ("storage", *dealt_by, plan.shares[number] if plan.shares else number, part.format, part.storage)
        packed = cache.get(key)
        if packed is None:
            dealt = cache.get(dealt_by) or deal(plan.partition, coords, shape, kept, dict(plan.options))
            if len(dealt) > 1:
                dealt = cache.put(dealt_by, dealt)
            own = taken(plan, dealt)[number]
            own = None if own is None or own.numel() == coords.shape[1] else own  # all of none, too
            held = coords if own is None else coords[:, own]
            packed = cache.put(key, pack(held, shape, part.format, part.storage).of(own))
        found.append(packed)
    if sum(p.nnz for p in found) != coords.shape[1]:
        raise PlanError(f"plan {plan.name!r} has no part for some shares of its partition, which have nonzeros here")
    return found
