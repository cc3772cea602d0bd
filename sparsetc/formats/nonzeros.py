"""Coordinates of nonzeros in another order, or of some of them, taken mode by mode when they are asked for.

In: coordinates, and which nonzeros. Out: rows of coordinates, of which few are held at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsetc.tensor.numbering import lexsort


@dataclass(frozen=True)
class Nonzeros:
    """Nonzeros in the order in which they are stored."""

    coords: torch.Tensor
    positions: torch.Tensor | None
    """(nnz,) which nonzero each is; None in the order given."""

    @classmethod
    def sorted(cls, coords: torch.Tensor, shape: Sequence[int], modes: tuple[int, ...]) -> Nonzeros:
        """Nonzeros that are given in lexicographic order, sorted by their modes in another order."""
        if modes == tuple(range(len(shape))):
            return cls(coords, None)
        return cls(coords, lexsort((coords[m] for m in modes), [shape[m] for m in modes]))

    def rows(self, modes: Sequence[int], places: torch.Tensor | None = None) -> list[torch.Tensor]:
        """(n,) for each of these modes, the coordinates of the nonzeros at some places of the order, or at all."""
        own = self.positions if places is None else places if self.positions is None else self.positions[places]
        return [self.coords[m] if own is None else self.coords[m].index_select(0, own) for m in modes]

    def numbers(self, places: torch.Tensor) -> torch.Tensor:
        """Places of the order -> which nonzeros these are, int64; -1 stays."""
        if self.positions is None or not self.positions.numel():
            return places.long()
        return self.positions.index_select(0, places.clamp(min=0)).masked_fill_(places < 0, -1)


@dataclass(frozen=True)
class Taken:
    """Coordinates by mode of some nonzeros, each mode taken when it is asked for; 0 for a nonzero -1."""

    coords: torch.Tensor
    nonzeros: torch.Tensor

    def __getitem__(self, mode: int) -> torch.Tensor:
        if not self.coords.shape[1]:
            return torch.zeros_like(self.nonzeros)
        found = self.coords[mode].index_select(0, self.nonzeros.clamp(min=0))
        return found.masked_fill_(self.nonzeros < 0, 0)
