"""The intersection and the union of two patterns.

In: two coalesced patterns of one shape. Out: a pattern, and which entries of either operand its entries are; kept with
the first pattern, once the two meet again.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from sparsetc.support.compiled import native
from sparsetc.tensor import coords as crd
from sparsetc.tensor import loops
from sparsetc.tensor.pattern import Later, Pattern

MERGED = 8
"""Two sorted runs are merged if the longer has at most this many times the numbers of the other; else searched."""
Entries = Tensor
"""(n,) int64: which of an operand's entries, or of a result's."""


def intersection(x: Pattern, y: Pattern) -> tuple[Pattern, Entries | None, Entries | None]:
    """Return the pattern of the common entries, and their numbers in x and in y; None for all in order."""
    if x is y:
        return x, None, None

    def made() -> tuple[Pattern, Entries, Entries]:
        if merge := native(loops.intersection, x.device, x.nnz + y.nnz):
            left, right = (x.coords.new_empty(min(x.nnz, y.nnz)) for _ in "xy")
            count = merge(*_ranks(x, y), left, right)
            left, right = left[:count], right[:count]
        else:
            here, there = places(x, y)
            right = there.nonzero()[:, 0]
            left = here[right]
        later = Later(partial(torch.index_select, x.coords, 1, left), len(left), x.device)
        return x.like(later, True), left, right

    return x._again(("meeting", y.number), made)


def union(x: Pattern, y: Pattern) -> tuple[Pattern, Entries | None, Entries | None]:
    """Return the pattern of entries of either, and the places in it of x's and y's (None for all in order)."""
    if x is y:
        return x, None, None

    def made() -> tuple[Pattern, Entries, Entries]:
        merge, interleave = (native(loop, x.device, x.nnz + y.nnz) for loop in (loops.union, loops.interleave))
        if merge and interleave:
            left, right = x.coords.new_empty(x.nnz), x.coords.new_empty(y.nnz)
            count = merge(*_ranks(x, y), left, right)
            of_x, of_y = x.coords, y.coords

            def make() -> Tensor:
                coords = of_x.new_empty(len(of_x), count)
                interleave(left, right, of_x, of_y, coords)
                return coords

            return x.like(Later(make, count, x.device), True), left, right
        here, there = places(x, y)
        added = ~there  # an entry comes behind those of x before it, and those of y before it that x has not
        right = here + added.cumsum(0) - added.to(torch.int64)
        before = here.new_zeros(x.nnz + 1).index_add_(0, here, added.to(torch.int64)).cumsum(0)
        left = torch.arange(x.nnz, device=x.device) + before[:-1]
        coords = x.coords.new_empty(x.order, x.nnz + int(before[-1]))
        for row, of_x, of_y in zip(coords, x.coords, y.coords, strict=True):  # scatter_ along rows is twice as fast
            row.scatter_(0, right, of_y).scatter_(0, left, of_x)
        return x.like(coords, True), left, right

    return x._again(("union", y.number), made)


def places(x: Pattern, y: Pattern) -> tuple[Entries, Tensor]:
    """For each entry of y, return the first entry of x that is not before it, and True if the two are equal."""
    of_x, of_y = _ranks(x, y)
    here = _before(of_x, of_y)
    return here, torch.cat((of_x, of_x.new_full((1,), -1))).index_select(0, here) == of_y  # no number is -1


def _ranks(x: Pattern, y: Pattern) -> list[Tensor]:
    """Numbers for the entries of both, equal and ordered across both as coordinates are."""
    keys = [crd.sort_keys(one.coords, x.shape) for one in (x, y)]
    if len(keys[0]) == 1:
        return [key for (key,) in keys]
    rank = crd.numbered([*torch.cat((x.coords, y.coords), 1)], x.shape, x.nnz + y.nnz, x.coords[0]).rank
    return [rank[: x.nnz], rank[x.nnz :]]


def _before(of_x: Tensor, of_y: Tensor) -> Entries:
    """For each of some ascending numbers, count the smaller ones among other ascending numbers.

    On a CPU two runs of like length are merged, as a stable sort of numpy does: half of a search's time.
    """
    if of_x.is_cuda or MERGED * len(of_y) < len(of_x):
        return torch.searchsorted(of_x, of_y)
    order = np.argsort(np.concatenate((of_y.numpy(), of_x.numpy())), kind="stable")
    places = np.flatnonzero(order < len(of_y))
    return torch.from_numpy(places - np.arange(len(of_y)))
