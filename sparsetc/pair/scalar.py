"""The scalar path: one multiplication a pair of nonzeros, added up by the result's entry (expand, sort, compress).

In: a `Matching` and a `Pattern`. Out: the result's values, and the gradients of either operand's, which are sums over
the same tasks. The tasks are kept, sorted by result, while they fit a share of the memory limit; beyond it each chunk
is made again at every call, which takes no memory and about four times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsetc import coords as crd
from sparsetc.formats.base import index_dtype
from sparsetc.pair.sums import add_into
from sparsetc.pair.symbolic import Budget, Matching

KEPT_TASKS = 1 << 26
"""Most tasks whose list is kept: about 1 GB."""
KEPT_BYTES = 16
"""Bytes a kept task takes: two places of 32 bits, and the run it belongs to."""


@dataclass(frozen=True)
class Chunk:
    """Tasks of consecutive rows, sorted by the result's entry."""

    p: torch.Tensor
    """(tasks,) places among x's live entries."""
    q: torch.Tensor
    """(tasks,) places among y's."""
    run: torch.Tensor
    """(tasks,) which of `slots` each adds to, not falling."""
    slots: torch.Tensor
    """(runs,) entries of the result, ascending."""


class Tasks:
    """All tasks with the result's entry of each, kept or made again at every pass."""

    def __init__(self, matching: Matching, places: torch.Tensor, budget: Budget) -> None:
        self.matching, self.places, self.chunk = matching, places, budget.chunk
        self.fits = matching.tasks <= min(KEPT_TASKS, budget.limit // (4 * KEPT_BYTES))
        self._kept: list[Chunk] | None = None

    def __iter__(self) -> Iterator[Chunk]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Chunk] = []
        for p, q, place in self.matching.chunks(self.chunk):
            made = self._sorted(p, q, place)
            if self.fits:
                kept.append(made)
            yield made
        if self.fits:
            self._kept = kept

    def _sorted(self, p: torch.Tensor, q: torch.Tensor, place: torch.Tensor) -> Chunk:
        narrow = index_dtype(max(self.matching.x_entry.numel(), self.matching.y_entry.numel()))
        if crd.is_sorted_unique([place]):
            run = torch.arange(place.numel(), device=place.device)
            return Chunk(p.to(narrow), q.to(narrow), run, torch.searchsorted(self.places, place))
        order = torch.argsort(place, stable=True)
        found, run = torch.unique_consecutive(place[order], return_inverse=True)
        return Chunk(p[order].to(narrow), q[order].to(narrow), run, torch.searchsorted(self.places, found))

    @property
    def nbytes(self) -> int:
        """Bytes of the tasks that are kept."""
        return self.matching.tasks * KEPT_BYTES if self.fits else 0


def back_to_x(tasks: Tasks, upstream: torch.Tensor, y: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
    """(live x,) for each entry of x, the sum over its tasks of ``upstream[result] * y``."""
    out = upstream.new_zeros(tasks.matching.x_entry.numel())
    for t in tasks:
        add_into(out, t.p, upstream[t.slots[t.run]] * y.index_select(0, t.q), deterministic)
    return out


def back_to_y(tasks: Tasks, upstream: torch.Tensor, x: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
    """(live y,) likewise for y."""
    out = upstream.new_zeros(tasks.matching.y_entry.numel())
    for t in tasks:
        add_into(out, t.q, upstream[t.slots[t.run]] * x.index_select(0, t.p), deterministic)
    return out
