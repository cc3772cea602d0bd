"""The registry of partitions: rules that deal nonzeros to the parts of a plan.

In: coordinates, sizes, the modes the output keeps, the rule's own options. Out: for each part, which nonzeros it takes
(None for all of them); together they are every nonzero once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from sparsetc.errors import PlanError

Deal = Callable[..., list[torch.Tensor | None]]


@dataclass(frozen=True)
class Partition:
    """A rule and what is known of it."""

    name: str
    deal: Deal
    whole_rows: bool
    """The nonzeros of one output row all go to one part, so parts never add to each other's rows."""


PARTITIONS: dict[str, Partition] = {}
F = TypeVar("F", bound=Deal)


def register_partition(name: str, *, whole_rows: bool = False) -> Callable[[F], F]:
    """Decorator: make ``deal(coords, shape, kept, **options) -> [indices or None, …]`` known to plans by `name`."""

    def register(function: F) -> F:
        PARTITIONS[name] = Partition(name, function, whole_rows)
        return function

    return register


def deal(
    name: str, coords: torch.Tensor, shape: tuple[int, ...], kept: tuple[int, ...], options: dict[str, int]
) -> list[torch.Tensor | None]:
    """Deal by the named rule; `PlanError` if it is unknown or loses or repeats a nonzero."""
    if name not in PARTITIONS:
        raise PlanError(f"no partition is called {name!r}; known: {', '.join(sorted(PARTITIONS))}")
    dealt = PARTITIONS[name].deal(coords, shape, kept, **options)
    nnz = coords.shape[1]
    if sum(nnz if part is None else part.numel() for part in dealt) != nnz:
        raise PlanError(f"partition {name!r} must deal each of the {nnz:,} nonzeros to one part")
    return dealt


@register_partition("all", whole_rows=True)
def everything(coords: torch.Tensor, shape: tuple[int, ...], kept: tuple[int, ...]) -> list[torch.Tensor | None]:
    """One part of everything."""
    return [None]
