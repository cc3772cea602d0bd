"""What a plan is chosen by: how many distinct rows and fibers the nonzeros make, and how long they are.

In: coordinates. Out: counts, kept for the life of the tensor's pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from sparsetc import coords as crd
from sparsetc.partition.run_length import row_numbers


class Counts:
    """Distinct coordinates of sets of modes, counted once each."""

    def __init__(self, coords: torch.Tensor, shape: tuple[int, ...], memory: dict[Any, Any] | None = None) -> None:
        self.coords, self.shape = coords, shape
        self.nnz = coords.shape[1]
        self._memory = memory if memory is not None else {}

    def distinct(self, modes: tuple[int, ...]) -> int:
        """How many different coordinates the nonzeros have in these modes."""
        modes = tuple(sorted(modes))
        if not modes or self.nnz == 0:
            return min(self.nnz, 1)
        key = ("distinct", modes)
        if key not in self._memory:
            self._memory[key] = self._count(modes)
        return int(self._memory[key])

    def longest(self, modes: tuple[int, ...]) -> int:
        """Most nonzeros that have the same coordinates in these modes; all of them where there are no modes."""
        if not modes or self.nnz == 0:
            return self.nnz
        modes = tuple(sorted(modes))
        key = ("longest", modes)
        if key not in self._memory:
            self._memory[key] = int(torch.bincount(row_numbers(self.coords, self.shape, modes)).max())
        return int(self._memory[key])

    def histogram(self, name: str, values: Callable[[], torch.Tensor], largest: int) -> torch.Tensor:
        """(largest + 1,) how often each value occurs, on the CPU; counted once a name."""
        key = ("histogram", name)
        if key not in self._memory:
            self._memory[key] = torch.bincount(values(), minlength=largest + 1).cpu()
        found: torch.Tensor = self._memory[key]
        return found

    def _count(self, modes: tuple[int, ...]) -> int:
        sizes = [self.shape[m] for m in modes]
        keys = crd.sort_keys(self.coords[list(modes)], sizes)
        span = prod(sizes)
        if len(keys) == 1 and span <= 16 * self.nnz + (1 << 20):
            seen = torch.zeros(span, dtype=torch.bool, device=self.coords.device)
            seen[keys[0]] = True
            return int(seen.sum())
        if modes == tuple(range(len(modes))):  # a prefix of the sort order: runs are already together
            return int(crd.starts_of_runs(keys).sum())
        fresh = crd.sorted_runs(keys)[1] if len(keys) > 1 else crd.starts_of_runs([torch.sort(keys[0]).values])
        return int(fresh.sum())

    def short_share(self, kept: tuple[int, ...], threshold: int) -> tuple[int, int]:
        """(nonzeros, rows) that lie in rows of fewer than `threshold` nonzeros."""
        key = ("short", kept, threshold)
        if key not in self._memory:
            if not kept or self.nnz == 0:
                self._memory[key] = (0, 0)
            else:
                lengths = torch.bincount(row_numbers(self.coords, self.shape, kept))
                short = lengths[(lengths > 0) & (lengths < threshold)]
                self._memory[key] = (int(short.sum()), short.numel())
        return self._memory[key]
