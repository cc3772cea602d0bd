"""Dealing by similarity: rows whose group makes well-filled tiles apart from all others (1-SA; DTC-SpMM).

Tiles go to the tensor cores, the rows left over to a scalar part; each output row is of one part.
"""

from __future__ import annotations

from typing import Any

import torch

from sparsetc.errors import PlanError
from sparsetc.formats.row_groups import PARAMETERS, Rows, Windowing
from sparsetc.formats.windows import populations
from sparsetc.ir.plan import Storage
from sparsetc.partition.base import register_partition
from sparsetc.support.lru import Lru


@register_partition("row_similarity", whole_rows=True)
def by_row_similarity(
    coords: torch.Tensor,
    shape: tuple[int, ...],
    kept: tuple[int, ...],
    *,
    threshold: int,
    cache: Lru[Any, Any] | None = None,
    **params: int,
) -> list[torch.Tensor | None]:
    """[nonzeros of the groups of rows whose tiles hold at least `threshold` on average, the others].

    Args:
        coords: (order, nnz).
        shape: sizes of the modes.
        kept: modes that the output keeps, whose fibers are the rows.
        threshold: nonzeros a tile.
        cache: where groups of rows are kept, and found.
        params: ``height``, ``width``, ``tau`` and ``strip``, as the storage of windows has them; where there is no
            ``tau``, neighbouring rows are a group.

    Raises:
        PlanError: an option of another name, or an output that keeps no mode, or all.
    """
    if unknown := set(params) - set(PARAMETERS):
        raise PlanError(f"windows have a height, a width, tau and a strip, found {min(unknown)!r}")
    others = tuple(m for m in range(len(shape)) if m not in kept)
    if not kept or not others:
        raise PlanError("rows are fibers of the modes that the output keeps, columns those of the others: found none")
    s = Windowing.of(Storage(item=kept, lane=others, params=tuple(params.items())))
    group, nonzeros, tiles = populations(coords, shape, s, Rows.of(coords, shape, s, cache))
    filled = (nonzeros // tiles >= threshold)[group]
    return [torch.nonzero(filled).flatten(), torch.nonzero(~filled).flatten()]
