"""The registry of partitions: rules that deal nonzeros to the parts of a plan.

In: coordinates, sizes, the rule's own options, and the modes the output keeps where the rule asks for them. Out: for
each part, which nonzeros it takes (None for all of them); together they are every nonzero once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from sparsetc.errors import PlanError
from sparsetc.support.names import check_free, check_label
from sparsetc.tensor.pattern import clear_patterns

Deal = Callable[..., list[torch.Tensor | None]]


@dataclass(frozen=True)
class Partition:
    """A rule and what is known of it."""

    name: str
    deal: Deal
    by_rows: bool
    """How nonzeros are dealt depends on the modes that the output keeps."""
    whole_rows: bool
    """The nonzeros of one output row all go to one part, so parts never add to each other's rows."""


PARTITIONS: dict[str, Partition] = {}
OWN = ("all", "mixed_mode", "row_similarity", "run_length", "threshold")
"""Names of the rules that come with the package."""
F = TypeVar("F", bound=Deal)


def register_partition(
    name: str, *, by_rows: bool = False, whole_rows: bool = False, replace: bool = False
) -> Callable[[F], F]:
    """Decorator: make ``deal(coords, shape, **options) -> [indices or None, …]`` known to plans by `name`.

    Args:
        name: one line of printable characters, without quotes and backslashes.
        by_rows: the rule deals by the output's rows: it is called as ``deal(coords, shape, kept, **options)``, with the
            modes that the output keeps. Other rules deal once for all outputs, whose plans then share packed parts.
        whole_rows: the rule never deals nonzeros of one output row to two parts, so one item may store the row. Such a
            rule deals by rows.
        replace: put the rule in the place of one that comes with the package.

    Raises:
        PlanError: a name that cannot be one, or is taken by the package.
    """
    check_label(name, "a partition", PlanError)

    def register(function: F) -> F:
        check_free(name, "partition", OWN, replace, PlanError, function)
        PARTITIONS[name] = Partition(name, function, by_rows or whole_rows, whole_rows)
        clear_patterns()
        return function

    return register


def get_partition(name: str) -> Partition:
    """The rule of this name; `PlanError` lists the known ones."""
    try:
        return PARTITIONS[name]
    except KeyError:
        raise PlanError(f"no partition is called {name!r}; known: {', '.join(sorted(PARTITIONS))}") from None


@register_partition("all")
def everything(coords: torch.Tensor, shape: tuple[int, ...]) -> list[torch.Tensor | None]:
    """One part of everything."""
    return [None]
