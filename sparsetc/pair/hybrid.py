"""The hybrid path: well-filled blocks of x by the block path, its other nonzeros by the scalar path, one result.

In: the `Share`s of a `Meeting` that the two take, and their paths. Out: the result's values by place. The pattern is
the union of both patterns. Where they overlap values are added, two to an entry, so bits do not depend on an order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sparsetc.codegen.split_pairs import Parts
from sparsetc.pair.block_path import BlockPath
from sparsetc.pair.meeting import Share
from sparsetc.pair.paths import ScalarPath


@dataclass(frozen=True)
class Half:
    """One of the two paths, and what it takes."""

    share: Share
    path: BlockPath | ScalarPath

    def places(self) -> torch.Tensor:
        """Places of its results, ascending, among those of the whole."""
        return self.share.places(self.path.places())

    def parts(self, x: torch.Tensor, y: torch.Tensor) -> Parts | None:
        """Its values in parts, of the values of all entries."""
        return self.path.parts(x.index_select(0, self.share.entries), y)

    def run(self, x: torch.Tensor, y: torch.Tensor, parts: Parts | None = None) -> torch.Tensor:
        """Values by place of its own, of the values of all entries."""
        return self.path.run(x.index_select(0, self.share.entries), y, parts)


class HybridPath:
    """Both, one after the other."""

    name = "bcb+scalar"

    def __init__(self, blocks: Half, rest: Half) -> None:
        self.halves = (blocks, rest)
        self.slots: list[torch.Tensor] = []
        """Of each half's results, the entries of the result."""
        self.nnz = 0

    def places(self) -> torch.Tensor:
        """The union."""
        found = [half.places() for half in self.halves]
        places = torch.unique(torch.cat(found))
        self.slots = [torch.searchsorted(places, own) for own in found]
        self.nnz = places.numel()
        return places

    def parts(self, x: torch.Tensor, y: torch.Tensor) -> Parts | None:
        """Of the values that are multiplied in blocks."""
        return self.halves[0].parts(x, y)

    def run(self, x: torch.Tensor, y: torch.Tensor, parts: Parts | None = None) -> torch.Tensor:
        """Multiply blocks, then nonzeros; an entry gets one value of each at most."""
        out = x.new_zeros(self.nnz)
        for half, slots, own in zip(self.halves, self.slots, (parts, None), strict=True):
            out.index_add_(0, slots, half.run(x, y, own))
        return out

    @property
    def shares(self) -> tuple[tuple[int, int], ...]:
        """By half, the nonzeros of x that it takes, and the pairs of blocks, or of nonzeros, that they make."""
        return tuple((half.share.entries.numel(), half.path.pairs) for half in self.halves)

    @property
    def source(self) -> str:
        """Both programs."""
        return "\n\n".join(half.path.source for half in self.halves)

    @property
    def path(self) -> Path:
        """The file of the blocks' program."""
        return self.halves[0].path.path

    @property
    def nbytes(self) -> int:
        """Bytes of both lists of tasks, and of where their values go."""
        own = [half.share.entries for half in self.halves] + self.slots
        return sum(half.path.nbytes for half in self.halves) + sum(a.numel() * 8 for a in own)

    def ptx(self, target: str) -> str:
        """The assembly of both kernels."""
        return "\n".join(half.path.ptx(target) for half in self.halves)
