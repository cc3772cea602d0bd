"""A plan's parts as they are stored: dealt, packed, and kept under what their arrays depend on.

In: a plan, coordinates, a cache of the pattern's. Out: `Packed` parts. A part is known by its share of the nonzeros and
by its storage, so einsums whose plans store nonzeros alike share the arrays, and the values packed for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from sparsetc.errors import PlanError
from sparsetc.formats import Packed, pack
from sparsetc.ir.plan import Plan
from sparsetc.partition.base import deal, get_partition, taken
from sparsetc.support.lru import Lru


@dataclass(frozen=True)
class Dealing:
    """What the shares of a pattern's nonzeros depend on; they are kept with the pattern under it."""

    partition: str
    options: tuple[tuple[str, Any], ...]
    kept: tuple[int, ...]
    """Modes that the output keeps; empty where the rule does not deal by rows."""

    @classmethod
    def of(cls, partition: str, options: Iterable[tuple[str, Any]], kept: tuple[int, ...]) -> Dealing:
        """The dealing by a named rule, for an output that keeps these modes."""
        return cls(partition, tuple(sorted(options)), kept if get_partition(partition).by_rows else ())

    def shares(self, coords: torch.Tensor, shape: tuple[int, ...], cache: Lru[Any, Any]) -> list[torch.Tensor | None]:
        """The nonzeros of each share, as `deal` gives them, or as the cache of the pattern has them."""
        found: list[torch.Tensor | None] | None = cache.get(self)
        if found is None:
            found = deal(self.partition, coords, shape, self.kept, dict(self.options), cache)
            if len(found) > 1:
                found = cache.put(self, found)
        return found


def storage_keys(plan: Plan, kept: tuple[int, ...]) -> list[Hashable]:
    """What the arrays of each part depend on: parts of one key are packed once, whatever plans they are of."""
    dealing, shares = Dealing.of(plan.partition, plan.options, kept), plan.shares or range(len(plan.parts))
    return [("storage", dealing, n, p.format, p.storage) for n, p in zip(shares, plan.parts, strict=True)]


def stored_parts(
    plan: Plan, coords: torch.Tensor, shape: tuple[int, ...], kept: tuple[int, ...], cache: Lru[Any, Any]
) -> list[Packed]:
    """Each part of a plan, packed, or taken from the cache, where another einsum's plan may have left it.

    Args:
        plan: whose parts are wanted.
        coords: (order, nnz) int64, in lexicographic order.
        shape: sizes of the modes.
        kept: modes that the output keeps.
        cache: of packed parts, and of how partitions dealt the nonzeros. A part of nothing takes no place in it.

    Raises:
        PlanError: the partition breaks its promises, or deals nonzeros to a share that the plan has no part for.
        FormatError: a format does not take its part, or packs it wrongly.
    """
    dealing = Dealing.of(plan.partition, plan.options, kept)
    found: list[Packed] = []
    for number, key in enumerate(storage_keys(plan, kept)):
        part, packed = plan.parts[number], cache.get(key)
        if packed is None:
            own = taken(plan, dealing.shares(coords, shape, cache))[number]
            own = None if own is None or own.numel() == coords.shape[1] else own  # all of none, too
            held = coords if own is None else coords[:, own]
            packed = pack(held, shape, part.format, part.storage, cache if own is None else None).of(own)
            if packed.nnz:
                packed = cache.put(key, packed)
        found.append(packed)
    if sum(p.nnz for p in found) != coords.shape[1]:
        raise PlanError(f"plan {plan.name!r} has no part for some shares of its partition, which have nonzeros here")
    return found
