"""Dealing by threshold: nonzeros of well-filled tiles apart from all others (HLS, section V-A).

Dense tiles go to the tensor cores, the leftovers to a scalar part; both add to the same output rows.
"""

from __future__ import annotations

import torch

from sparsetc.errors import PlanError
from sparsetc.formats.tiles import sides_of
from sparsetc.ir.nest.nest import tiles_along
from sparsetc.partition.base import register_partition
from sparsetc.tensor.numbering import narrow_ranks


@register_partition("threshold")
def by_threshold(
    coords: torch.Tensor, shape: tuple[int, ...], *, threshold: int, whole: int = 0, **sides: int
) -> list[torch.Tensor | None]:
    """[nonzeros of tiles that hold at least `threshold`, the others]; tiles of the default sides, or of `side_m`.

    With `whole`, tiles of at least so many come first, apart from those of at least `threshold`.
    """
    unknown = set(sides) - {f"side_{mode}" for mode in range(len(shape))}
    if unknown:
        raise PlanError(f"partition 'threshold' takes a threshold, whole and a side_m a mode, found {min(unknown)!r}")
    held = tile_populations(coords, shape, sides_of(shape, sides.items()))
    bounds = (*((whole,) if whole else ()), threshold)
    part = torch.stack([held < least for least in bounds]).sum(0)
    return [torch.nonzero(part == n).flatten() for n in range(len(bounds) + 1)]


def tile_populations(coords: torch.Tensor, shape: tuple[int, ...], sides: tuple[int, ...]) -> torch.Tensor:
    """(nnz,) for every nonzero, how many its tile holds."""
    if coords.shape[1] == 0:
        return coords.new_zeros(0)
    rows = (row // side for row, side in zip(coords, sides, strict=True))
    tile, _ = narrow_ranks(rows, tiles_along(shape, sides), coords[0])
    return torch.bincount(tile).index_select(0, tile)
