"""Ranks' results brought together, as the cut says: sums over the ranks that share a block, rows where they stay.

In: an einsum's share, and of a sparse result this rank's pattern. Out: what is sent in a call, and what is made of what
arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from sparsetc.distributed.cut import Cut, Range, shares
from sparsetc.distributed.ranks import Ranks
from sparsetc.distributed.shard import Sharded
from sparsetc.distributed.share import Share
from sparsetc.distributed.transfer import Transfer
from sparsetc.tensor.coords import numbered
from sparsetc.tensor.sparse_tensor import SparseTensor

Combined = tuple[tuple[Transfer, ...], Callable[[Tensor], Any]]
"""Transfers of a dense result, or of the values of a sparse one, in order, and what makes the result of the last's."""


def dense_result(share: Share, gather: bool, ranks: Ranks, device: torch.device) -> Combined:
    """Rows as a DTensor, or the whole on every rank, as a result without letters always is."""
    shape, size = share.bound.output_shape, ranks.size
    full = shape or (1,)
    boxes = [share.block(rank) or ((0, 1),) for rank in range(size)]
    whole, rows = [(0, full[0])] * size, shares((0, full[0]), size)
    transfers = []
    if shape and (not gather or len(share.summing) < size):
        transfers.append(Transfer.of_boxes(ranks, boxes, rows, full))
        boxes = [(one, *((0, n) for n in full[1:])) for one in rows]
    if gather or not shape:
        transfers.append(Transfer.of_boxes(ranks, boxes, whole, full))
    placement: Placement = Shard(0) if shape else Replicate()
    stride = tuple(prod(shape[n + 1 :]) for n in range(len(shape)))

    def wrap(part: Tensor) -> Tensor:
        part = part if shape else part.view(())
        if gather or ranks.group is None:
            return part
        return DTensor.from_local(part, ranks.mesh(device), [placement], shape=torch.Size(shape), stride=stride)

    return tuple(transfers), wrap


def sparse_result(share: Share, local: SparseTensor, ranks: Ranks) -> Combined:
    """Entries that stay in shares; where ranks share a block, each keeps a range of the block's entries; collective.

    Args:
        share: the einsum.
        local: this rank's own result, of any values.
        ranks: all.
    """
    modes = [share.modes.get(letter) for letter in share.bound.einsum.output]
    shape = share.bound.output_shape
    bounds = [(0, n) if m is None else share.cut.bounds[m] for m, n in zip(modes, shape, strict=True)]
    number = {rank: at for part in share.summing for at, rank in enumerate(part)}
    along = [tuple(0 if m is None else place[m] for m in modes) for place in share.cut.places]
    part = next(part for part in share.summing if ranks.rank in part)
    local, transfers = _united(local, part, ranks) if len(part) > 1 else (local, ())
    places = tuple((*at, number[rank]) for rank, at in enumerate(along))
    cut = Cut(shape, tuple(bounds), places, tuple(ranks.objects(local.nnz)))
    return transfers, lambda values: Sharded(cut, local.with_values(values), ranks)


def _united(local: SparseTensor, part: Sequence[int], ranks: Ranks) -> tuple[SparseTensor, tuple[Transfer, ...]]:
    """Split the union of these ranks' entries evenly among them; collective.

    Args:
        local: this rank's entries, of any values.
        part: the ranks, this one among them.
        ranks: all ranks.

    Returns:
        This rank's share of the entries, and how their values come to it.
    """
    every, width = range(ranks.size), local.values.shape[1:]
    counts = [n * (rank in part) for rank, n in enumerate(ranks.objects(local.nnz))]
    rows, sent = local.coords.T.repeat(len(part), 1), [local.nnz * (rank in part) for rank in every]
    coords = ranks.exchanged(rows, counts, sent).T.contiguous()
    union = numbered(coords.unbind(), local.shape[: local.sparse_order], coords.shape[1], coords)
    numbers, spans = union.rank.split(counts), dict(zip(part, shares((0, union.count), len(part)), strict=True))

    def within(rank: int, span: Range) -> Tensor:
        """Return (n,) the numbers of a rank's entries within a span of the union, in the order of sending."""
        return numbers[rank][(numbers[rank] >= span[0]) & (numbers[rank] < span[1])].sort().values

    start, stop = spans[ranks.rank]
    numbers_sent = [within(ranks.rank, spans.get(rank, (0, 0))).numel() for rank in every]
    ends = list(accumulate(numbers_sent))
    places = [(at - start, (at.numel(), *width)) for at in (within(rank, (start, stop)) for rank in every)]
    values = local.values.new_zeros((stop - start, *width))
    transfer = Transfer(
        ranks,
        tuple((end - n, end) for n, end in zip(numbers_sent, ends, strict=True)),
        prod(width),
        tuple(places),
        tuple(values.shape),
        adds=True,
        order=torch.argsort(numbers[ranks.rank]),
    )
    kept = torch.stack(union.coords)[:, start:stop].contiguous()
    return SparseTensor._of(kept, values, local.shape, True), (transfer,)
