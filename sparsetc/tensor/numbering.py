"""Numbers for tuples of coordinates: ranks that never wrap, comparable between two tensors.

In: coordinates, a vector a mode, and sizes, of any number of modes, none included. Out: int64 numbers, whose order is
the lexicographic one. Where the sizes allow few tuples, those that occur are marked and the marks counted, which takes
a fraction of a sort; a product of sizes above that is sorted by, in as many keys as it takes not to wrap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from sparsetc.tensor import coords as crd
from sparsetc.tensor.coords import INT32_MAX

Rows = Sequence[torch.Tensor]
"""Coordinates: int64, (n,) a mode."""
MARKS = 8
"""Possible keys a tuple up to which they are marked, not sorted: a byte to mark and eight to count each."""
FEW = 1 << 12
"""Possible keys that are marked however few tuples there are."""


@dataclass(frozen=True)
class Numbering:
    """Distinct tuples, numbered in lexicographic order.

    Attributes:
        rank: (n,) the number of each tuple.
        coords: (count,) a mode: the tuple of each number.
    """

    rank: torch.Tensor
    coords: tuple[torch.Tensor, ...]
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
        number, representatives = narrow_runs(rows, sizes, like)
        rank = number.long()
    return Numbering(rank, tuple(row[representatives] for row in rows), representatives.numel())


def narrow_ranks(rows: Iterable[torch.Tensor], sizes: Sequence[int], like: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Number tuples in lexicographic order, in little memory.

    Args:
        rows: (n,) a mode, below `sizes`.
        sizes: of the modes.
        like: (n,) int64, on the device wanted.

    Returns:
        (n,) the number of each tuple, int32 where that holds them all; how many different tuples there are.
    """
    return ranked(*linear_key(rows, sizes, like))


def narrow_runs(
    rows: Iterable[torch.Tensor], sizes: Sequence[int], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Number tuples as `narrow_ranks` does, and give the first tuple of each number.

    Returns:
        (n,) the number of each tuple; (numbers,) int64, the first that has the number.
    """
    key, spread = linear_key(rows, sizes, like)
    key = narrowed(key, spread)
    number, order, fresh = _by_sorting(key)
    return torch.empty_like(number).scatter_(0, order, number), order[fresh]


def lexsort(rows: Iterable[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """(n,) int64 stable permutation that puts tuples of at least one mode in lexicographic order."""
    key, spread = linear_key(rows, sizes)
    key = narrowed(key, spread)
    return torch.sort(key, stable=True).indices


def linear_key(
    rows: Iterable[torch.Tensor], sizes: Sequence[int], like: torch.Tensor | None = None
) -> tuple[torch.Tensor, int]:
    """(n,) one int64 key a tuple, whose order is the lexicographic one, and what all keys are below.

    Where sizes multiply to more than 2**63, the first modes are numbered, and their numbers stand for them. The key of
    one mode is the row itself.

    Args:
        rows: (n,) int64 a mode, below `sizes`; made one after the other, where they are made when asked for.
        sizes: of the modes.
        like: (n,) int64, on the device wanted, where there may be no modes.
    """
    key, spread, own = torch.zeros_like(like) if like is not None and not sizes else None, 1, False
    for row, size in zip(rows, sizes, strict=True):
        if key is None:
            key, spread = row, size
            continue
        if spread * size > crd.INT64_SIZES:
            number, spread = ranked(key, spread)
            key, own = number.long(), True
        if spread * size > crd.INT64_SIZES:
            number, size = ranked(row, size)
            row = number.long()
        key = key.mul_(size).add_(row) if own else torch.add(row, key, alpha=size)
        spread, own = spread * size, True
    assert key is not None
    return key, spread


def ranked(key: torch.Tensor, spread: int) -> tuple[torch.Tensor, int]:
    """(n,) the numbers of keys below `spread`, int32 where that holds them; how many different ones there are."""
    n = key.numel()
    dtype = torch.int32 if n <= INT32_MAX else torch.int64
    if not n:
        return key.to(dtype), 0
    if spread <= 2 * n + FEW:
        marked = torch.zeros(spread, dtype=torch.bool, device=key.device).index_fill_(0, key, True)
        number = torch.cumsum(marked, 0, dtype=dtype)
        return number.index_select(0, key).sub_(1), int(number[-1])
    number, order, _ = _by_sorting(narrowed(key, spread))
    return torch.empty_like(number).scatter_(0, order, number), int(number[-1]) + 1


def _by_sorting(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(n,) of keys in order: the number of each, which one it is, and whether it is the first of its number."""
    found, order = torch.sort(key, stable=True)
    fresh = torch.ones_like(found, dtype=torch.bool)
    torch.ne(found[1:], found[:-1], out=fresh[1:])
    dtype = torch.int32 if key.numel() <= INT32_MAX else torch.int64
    del found
    return torch.cumsum(fresh, 0, dtype=dtype).sub_(1), order, fresh


def markable(keys: int, n: int) -> bool:
    """Whether `n` keys below `keys` had better be marked than sorted."""
    return keys <= MARKS * n + FEW


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


def joint_keys(
    left: Rows, right: Rows, sizes: Sequence[int], like: torch.Tensor, n: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys of two sets of `n` tuples; equal, and ordered, across both as the tuples are.

    Returns:
        The keys of both; how many keys are possible, no more than a few a tuple.
    """
    if not left:
        return like.new_zeros(n[0]), like.new_zeros(n[1]), 1
    if markable(prod(sizes), sum(n)):
        return crd.sort_keys(left, sizes)[0], crd.sort_keys(right, sizes)[0], prod(sizes)
    both = numbered([torch.cat(pair) for pair in zip(left, right, strict=True)], sizes, sum(n), like)
    return both.rank[: n[0]], both.rank[n[0] :], both.count


def _decoded(keys: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Coordinates of linear keys, row-major."""
    found = []
    for size in reversed(sizes[1:]):
        found.append(keys % size)
        keys = keys // size
    return (keys, *reversed(found))


def set_bits(words: torch.Tensor, word: int) -> torch.Tensor:
    """Return (tiles, words * word) bool: each bit of words of so many bits, the lowest of a word first."""
    return ((words.to(torch.int64).unsqueeze(2) >> torch.arange(word, device=words.device)) & 1 == 1).flatten(1)
