"""Coordinates sorted, and values of duplicates summed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sparsetc.support import Ints
from sparsetc.support.entry import without_autocast
from sparsetc.tensor import coords as crd
from sparsetc.tensor.dtypes import INTEGERS, exactly, in_order, summed_rows


@dataclass(frozen=True)
class Merge:
    """The map from nonzeros as given to sorted and unique ones.

    Attributes:
        order: (given,) the nonzeros in lexicographic order.
        run: (given,) which of the unique ones each of those adds to; None when there are no duplicates.
        count: how many unique ones there are.
    """

    order: Tensor
    run: Tensor | None
    count: int

    def values(self, values: Tensor) -> Tensor:
        """(count, ...) values, of (given, ...) values; differentiable."""
        values = values.index_select(0, self.order)
        if self.run is None:
            return values
        added = partial(summed_rows, owner=self.run, count=self.count)
        with in_order(True), without_autocast(values.device):
            return exactly(added, values.dtype, "a sum of duplicates", values)


def coalescing_bytes(shape: Sequence[int], n: int, values: Tensor) -> int:
    """Return the most bytes that `coalesced` and `Merge.values` take beyond the n unordered nonzeros themselves.

    Args:
        shape: sizes of the sparse modes; where they multiply to more than 2**63 there are several keys.
        n: how many nonzeros.
        values: of these, or of others of the same dtype and dense modes.
    """
    width = math.prod(values.shape[1:])
    sums = 80 * width if values.dtype in INTEGERS else 3 * width * values.dtype.itemsize
    return n * (8 * len(shape) + 64 + 16 * (math.prod(shape).bit_length() // 48) + sums)


def coalesced(coords: Tensor, shape: Ints) -> tuple[Tensor, Merge | None]:
    """Coordinates sorted and unique, and how values follow; themselves and None if they are so already."""
    keys = crd.sort_keys(coords, shape)
    if len(keys) == 1:
        keys = [crd.narrowed(keys[0], math.prod(shape))]
    if crd.is_sorted_unique(keys):
        return coords, None
    order, fresh = crd.sorted_runs(keys)
    del keys
    kept = torch.nonzero(fresh).squeeze(1)
    if kept.shape[0] == order.shape[0]:
        return coords.index_select(1, order), Merge(order, None, order.shape[0])
    run = torch.cumsum(fresh, 0).sub_(1)
    return coords.index_select(1, order[kept]), Merge(order, run, kept.shape[0])
