"""Numbers for tuples of coordinates: ranks that never wrap, comparable between two tensors.

In: coordinates, a vector a mode, and sizes, of any number of modes, none included. Out: int64 numbers, whose order is
the lexicographic one. Where the sizes allow few tuples, those that occur are marked and the marks counted, which takes
a fraction of a sort; a product of sizes above that is sorted by, in as many keys as it takes not to wrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from sparsetc.formats.base import INT32_MAX
from sparsetc.tensor import coords as crd

Rows = Sequence[torch.Tensor]
"""Coordinates: int64, (n,) a mode."""
MARKS = 8
"""Possible keys a tuple up to which they are marked, not sorted: a byte to mark and eight to count each."""
FEW = 1 << 12
"""Possible keys that are marked however few tuples there are."""


@dataclass(frozen=True)
class Numbering:
    """Distinct tuples, numbered in lexicographic order."""

    rank: torch.Tensor
    """(n,) the number of each tuple."""
    coords: tuple[torch.Tensor, ...]
    """(count,) a mode: the tuple of each number."""
    count: int


def numbered(rows: Rows, sizes: Sequence[int], n: int, like: torch.Tensor, ascending: bool = False) -> Numbering:
    """Number tuples.

    Args:
        rows: (n,) a mode, below `sizes`.
        sizes: of the modes.
        n: tuples.
        like: int64, on the device wanted.
        ascending: whether the tuples are known not to fall.
    """
    if not rows:
        return Numbering(like.new_zeros(n), (), min(n, 1))
    keys = crd.sort_keys(rows, sizes)
    if ascending:
        fresh = crd.starts_of_runs(keys)
        representatives = torch.nonzero(fresh).flatten()
        rank = torch.cumsum(fresh, 0).sub_(1)
    elif markable(prod(sizes), n):
        marked = torch.zeros(prod(sizes), dtype=torch.bool, device=like.device).index_fill_(0, keys[0], True)
        rank = torch.cumsum(marked, 0).sub_(1).index_select(0, keys[0])
        found = torch.nonzero(marked).flatten()
        return Numbering(rank, _decoded(found, sizes), found.numel())
    else:
        order = lexsort(rows, sizes)
        fresh = crd.starts_of_runs([k[order] for k in keys])
        representatives = order[fresh]
        rank = torch.empty_like(order).scatter_(0, order, torch.cumsum(fresh, 0).sub_(1))
    return Numbering(rank, tuple(row[representatives] for row in rows), representatives.numel())


def narrow_ranks(rows: Rows, sizes: Sequence[int], like: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Number tuples in lexicographic order, in little memory.

    Args:
        rows: (n,) a mode, below `sizes`.
        sizes: of the modes.
        like: (n,) int64, on the device wanted.

    Returns:
        (n,) the number of each tuple, int32 where that holds them all; how many different tuples there are.
    """
    return _ranked(*linear_key(rows, sizes, like))


def linear_key(rows: Rows, sizes: Sequence[int], like: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(n,) one int64 key a tuple, whose order is the lexicographic one, and what all keys are below.

    Where sizes multiply to more than 2**63, the first modes are numbered, and their numbers stand for them. The key of
    one mode is the row itself.
    """
    key, spread = torch.zeros_like(like) if not rows else rows[0], sizes[0] if rows else 1
    for own, (row, size) in enumerate(zip(rows[1:], sizes[1:], strict=True)):
        if spread * size > crd.INT64_SIZES:
            number, spread = _ranked(key, spread)
            key = number.long()
        if spread * size > crd.INT64_SIZES:
            number, size = _ranked(row, size)
            row = number.long()
        key = torch.add(row, key, alpha=size) if own == 0 else key.mul_(size).add_(row)
        spread *= size
    return key, spread


def _ranked(key: torch.Tensor, spread: int) -> tuple[torch.Tensor, int]:
    """(n,) the numbers of keys below `spread`, int32 where that holds them; how many different ones there are."""
    n = key.numel()
    dtype = torch.int32 if n <= INT32_MAX else torch.int64
    if not n:
        return key.to(dtype), 0
    if spread <= 2 * n + FEW:
        marked = torch.zeros(spread, dtype=torch.bool, device=key.device).index_fill_(0, key, True)
        number = torch.cumsum(marked, 0, dtype=dtype)
        return number.index_select(0, key).sub_(1), int(number[-1])
    found, order = torch.sort(narrowed(key, spread))
    fresh = torch.ones_like(found, dtype=torch.bool)
    torch.ne(found[1:], found[:-1], out=fresh[1:])
    del found
    number = torch.cumsum(fresh, 0, dtype=dtype).sub_(1)
    return torch.empty_like(number).scatter_(0, order, number), int(number[-1]) + 1


def markable(keys: int, n: int) -> bool:
    """Whether `n` keys below `keys` had better be marked than sorted."""
    return keys <= MARKS * n + FEW


def lexsort(rows: Rows, sizes: Sequence[int]) -> torch.Tensor:
    """(n,) int64 stable permutation that puts tuples of at least one mode in lexicographic order."""
    keys = crd.sort_keys(rows, sizes)
    return crd.lexsort([narrowed(keys[0], prod(sizes))] if len(keys) == 1 else keys)


def narrowed(keys: torch.Tensor, spread: int) -> torch.Tensor:
    """Keys below `spread`, in 32 bits where those hold them: half the passes of a radix sort."""
    return keys.to(torch.int32) if spread <= INT32_MAX else keys


def histogram(key: torch.Tensor, keys: int) -> torch.Tensor:
    """(keys,) int64: how often each key below `keys` occurs. `torch.bincount` would wait for the device."""
    return key.new_zeros(keys).index_add_(0, key, key.new_ones(1).expand(key.numel()))


def sorted_keys(keys: torch.Tensor, spread: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(distinct int64 `keys` below `spread`, ascending; where each was)."""
    n = keys.numel()
    if not markable(spread, n):
        found, order = torch.sort(narrowed(keys, spread))
        return found.long(), order
    number = torch.arange(1, n + 1, dtype=torch.int32 if n <= INT32_MAX else torch.int64, device=keys.device)
    table = torch.zeros(spread, dtype=number.dtype, device=keys.device).index_copy_(0, keys, number)
    found = torch.nonzero(table).flatten()
    return found, table.index_select(0, found).sub_(1)


def joint_keys(left: Rows, right: Rows, sizes: Sequence[int], like: torch.Tensor, n: tuple[int, int]) -> Joint:
    """Keys of two sets of `n` tuples; equal, and ordered, across both as the tuples are."""
    if not left:
        return Joint(like.new_zeros(n[0]), like.new_zeros(n[1]), 1)
    if markable(prod(sizes), sum(n)):
        return Joint(crd.sort_keys(left, sizes)[0], crd.sort_keys(right, sizes)[0], prod(sizes))
    both = [torch.cat(pair) for pair in zip(left, right, strict=True)]
    found = numbered(both, sizes, sum(n), like)
    return Joint(found.rank[: n[0]], found.rank[n[0] :], found.count)


@dataclass(frozen=True)
class Joint:
    """Keys of two sets of tuples."""

    left: torch.Tensor
    right: torch.Tensor
    count: int
    """Possible keys: no more than a few a tuple."""


def _decoded(keys: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Coordinates of linear keys, row-major."""
    found = []
    for size in reversed(sizes[1:]):
        found.append(keys % size)
        keys = keys // size
    return (keys, *reversed(found))
