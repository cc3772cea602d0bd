"""Nonzeros brought to the ranks that a cut deals them to.

In: nonzeros, the same on every rank or others on each, and a cut. Out: this rank's own, counted from where its box
begins. Pieces of a box are equal ranges of its nonzeros in the order in which ranks have them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsetc.distributed.choose import box_of
from sparsetc.distributed.cut import Cut
from sparsetc.distributed.ranks import Ranks

Nonzeros = tuple[torch.Tensor, torch.Tensor]
"""(sparse order, n) coordinates and (n, *dense sizes) values."""


def owners(coords: torch.Tensor, cut: Cut, before: torch.Tensor | None = None) -> torch.Tensor:
    """(n,) int64 the rank of each nonzero.

    Args:
        coords: (sparse order, n) of the whole tensor.
        cut: what they are cut by.
        before: (boxes,) int64 how many nonzeros of each box earlier ranks have.
    """
    box, pieces = box_of(coords, cut.bounds), cut.grid[-1]
    if pieces == 1:
        return box
    counts = torch.tensor(cut.nnz, device=coords.device).view(-1, pieces).sum(1)
    order = torch.argsort(box, stable=True)
    sizes = torch.bincount(box, minlength=counts.shape[0])
    first = sizes.cumsum(0) - sizes
    number = torch.empty_like(box)
    number[order] = torch.arange(box.shape[0], device=box.device) - first[box[order]]
    if before is not None:
        number += before[box]
    # Piece k has numbers from n k / pieces on; what rounds to it from below is the next one's.
    piece = ((number + 1) * pieces - 1) // counts[box]
    return box * pieces + piece


def taken(whole: Nonzeros, cut: Cut, rank: int) -> Nonzeros:
    """A rank's own of nonzeros that every rank has, in their order."""
    coords, values = whole
    own = torch.nonzero(owners(coords, cut) == rank).flatten()
    return coords.index_select(1, own), values.index_select(0, own)


def exchanged(mine: Nonzeros, cut: Cut, ranks: Ranks) -> Nonzeros:
    """A rank's own of nonzeros of which every rank has others, by all-to-all; in order of the ranks that had them."""
    coords, values = mine
    before = None
    if cut.grid[-1] > 1:
        per_box = torch.bincount(box_of(coords, cut.bounds), minlength=cut.size // cut.grid[-1])
        before = ranks.gathered(per_box[None])[: ranks.rank].sum(0)
    rank = owners(coords, cut, before)
    sent = torch.bincount(rank, minlength=ranks.size)
    counts = ranks.gathered(sent[None]).tolist()
    order = torch.argsort(rank, stable=True)
    routes = counts[ranks.rank], [row[ranks.rank] for row in counts]
    moved = [ranks.exchanged(row.index_select(0, order), *routes) for row in coords]
    return torch.stack(moved), ranks.exchanged(values.index_select(0, order), *routes)


def moved(coords: torch.Tensor, cut: Cut, rank: int, whole: Sequence[int] = ()) -> torch.Tensor:
    """Coordinates of the whole tensor counted from where a rank's box begins, but for the modes in `whole`."""
    starts = [0 if m in whole else cut.ranges(rank)[m][0] for m in range(coords.shape[0])]
    return coords - torch.tensor(starts, device=coords.device)[:, None]
