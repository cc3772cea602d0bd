"""Dealing by windows: rows whose group makes well-filled tiles apart from all others (1-SA; DTC-SpMM).

Tiles go to the tensor cores, the rows left over to a scalar part; each output row is of one part.
"""

from __future__ import annotations

import torch

from sparsetc.errors import PlanError
from sparsetc.formats.windows import Windowing, populations
from sparsetc.ir.plan import Storage
from sparsetc.partition.base import register_partition


@register_partition("windows", whole_rows=True)
def by_windows(
    coords: torch.Tensor,
    shape: tuple[int, ...],
    kept: tuple[int, ...],
    *,
    mode: int,
    column: int,
    threshold: int,
    **params: int,
) -> list[torch.Tensor | None]:
    """[nonzeros of the groups of rows whose tiles hold at least `threshold` on average, the others].

    Args:
        coords: (order, nnz).
        shape: sizes of the modes.
        kept: modes that the output keeps, of which `mode` is one, so that no row is of both parts.
        mode: the mode whose rows make groups.
        column: the mode that is cut into tiles.
        threshold: nonzeros a tile.
        params: ``height``, ``width``, ``tau`` and ``strip``, as the storage has them.

    Raises:
        PlanError: a mode whose rows are not the output's, a column that is no other mode, an option of another name.
    """
    if mode not in kept:
        raise PlanError(f"windows are of rows of the output, which has the modes {kept}; found mode {mode}")
    if not 0 <= column < len(shape) or column == mode:
        raise PlanError(f"columns of windows are along a mode from 0 to {len(shape) - 1} beside {mode}, found {column}")
    if unknown := set(params) - {"height", "width", "tau", "strip"}:
        raise PlanError(f"windows have a height, a width, tau and a strip, found {min(unknown)!r}")
    others = tuple(m for m in range(len(shape)) if m not in (mode, column))
    s = Windowing.of(Storage(item=(mode,), lane=(*others, column), params=tuple(params.items())))
    group, nonzeros, tiles = populations(coords, shape, s)
    filled = (nonzeros // tiles >= threshold)[group]
    return [torch.nonzero(filled).flatten(), torch.nonzero(~filled).flatten()]
