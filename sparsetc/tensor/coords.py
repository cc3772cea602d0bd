"""Arithmetic on coordinates: keys, lexicographic order, numbers for tuples, range checks; by torch, on any device.

In: coordinates (order x nnz, int64) and a shape. Out: int64 keys, permutations, masks, numbers. Nothing here knows of
values. A product of sizes may pass 2**63; then one key is not enough and a list of keys, most significant first, takes
its place, so that no key ever wraps.

Numbers of tuples are in lexicographic order, and comparable between two tensors. Where the sizes allow few tuples,
those that occur are marked and the marks counted, which takes a fraction of a sort; else tuples are sorted.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsetc.errors import CoordinateError, ShapeError
from sparsetc.support import Ints

INT32_MAX = 2**31 - 1
INT64_SIZES = 2**63
"""The number of int64 coordinates: 0 .. 2**63 - 1."""


def checked_shape(shape: Iterable[object]) -> Ints:
    """``shape`` as a tuple of Python ints >= 0 that int64 can index; ShapeError otherwise."""
    try:
        sizes = list(shape)
    except TypeError:
        raise ShapeError(f"shape must be a sequence of ints, found {shape!r}") from None
    return tuple([checked_size(size, f"the size of mode {mode}") for mode, size in enumerate(sizes)])


def checked_size(size: Any, what: str, least: int = 0, error: type[Exception] = ShapeError) -> int:
    """Return a size as a Python int. Raise an error, which says `what` it is, unless int64 can index by it."""
    number = integer(size, what, error)
    if not least <= number < INT64_SIZES:
        fit = f"from {least} on" if number < INT64_SIZES else "below 2**63"
        raise error(f"{what} must be an integer {fit}, found {number}")
    return number


def integer(value: Any, what: str, error: type[Exception] = ShapeError) -> int:
    """Return an integer of any type. Raise an error, which says `what` it is, for others, and for bools, as torch."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise error(f"{what} must be an integer, found {value!r:.80} ({type(value).__name__})") from None


def flat(given: Sequence[Any]) -> list[Any]:
    """Return arguments as a list, or what the only one of them holds."""
    return list(given[0] if len(given) == 1 and hasattr(given[0], "__iter__") else given)


def mode_of(order: int, mode: Any, what: str = "") -> int:
    """Return a mode counted from the first. Raise `ShapeError`, which names `what`, if there is no such mode."""
    try:
        number = operator.index(mode)
    except TypeError:
        number = order
    if not -order <= number < order:
        raise ShapeError(f"{what and what + ': '}a tensor of {order} modes has no mode {mode!r:.80}")
    return number % order


def picked(rows: Tensor, at: Tensor | None) -> Tensor:
    """Return the rows of a tensor at positions; all of them, in order, where positions are None."""
    return rows if at is None else rows.index_select(0, at)


def in_runs(lengths: Tensor, count: int | None = None, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the run of each element of runs of these lengths, one behind the other, and its place in the run.

    Args:
        lengths: (runs,) int64.
        count: elements of all runs, where it is known: a GPU is then not waited for.
        first: (runs,) the place of the first element of each run; 0 of all where there is none.
    """
    run = torch.repeat_interleave(lengths, output_size=count)
    shift = lengths - torch.cumsum(lengths, 0)
    shift = shift if first is None else shift.add_(first)
    return run, shift.index_select(0, run).add_(torch.arange(run.numel(), device=run.device))


def offset_of(offset: Any) -> int:
    """Return the offset of a diagonal, clamped to int64."""
    return max(-INT64_SIZES, min(integer(offset, "the offset of a diagonal"), INT64_SIZES - 1))


def check_range(coords: Tensor, shape: Sequence[int], what: str = "nonzero") -> None:
    """CoordinateError naming mode, `what`, value and size unless 0 <= coords[m] < shape[m] for every mode m."""
    if coords.shape[1] == 0:
        return
    both = coords.new_empty((2, coords.shape[0]))  # one transfer from the device
    torch.aminmax(coords, dim=1, out=both.unbind())
    lows, highs = both.tolist()
    for mode, (low, high, size) in enumerate(zip(lows, highs, shape, strict=True)):
        if low < 0 or high >= size:
            row = coords[mode]
            at = int(torch.nonzero((row < 0) | (row >= size))[0, 0])
            raise CoordinateError(
                f"coordinate out of range in mode {mode}: {what} {at} has {int(row[at])}, "
                f"but the size of mode {mode} is {size}{' blocks' if what == 'block' else ''} "
                f"(coordinates are 0-based: 0 <= c < {size})"
            )


def of_modes(coords: Tensor, shape: Sequence[int], modes: Sequence[int]) -> tuple[list[Tensor], Ints]:
    """Return the coordinates in some modes, and the sizes of these modes: what keys are made of."""
    return list(map(coords.__getitem__, modes)), tuple(map(shape.__getitem__, modes))


def sort_keys(coords: Iterable[Tensor], shape: Sequence[int]) -> list[Tensor]:
    """Return the fewest int64 keys, most significant first, that sort lexicographically as the coordinates do.

    Each key is the row-major linear index of as many consecutive modes as fit below 2**63; a tensor whose sizes
    multiply to no more than 2**63 has one key.
    """
    keys: list[Tensor] = []
    span = 0
    for row, size in zip(coords, shape, strict=True):
        if keys and span * size <= INT64_SIZES:
            keys[-1] = torch.add(row, keys[-1], alpha=size)  # row + size * key, one pass
            span *= size
        else:
            keys.append(row)
            span = size
    return keys


def with_dense_modes(coords: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return (order + dense modes, nnz * positions): coordinates of each nonzero at every position, row-major."""
    positions, (order, nnz) = prod(sizes), coords.shape
    whole = coords.new_empty((order + len(sizes), nnz * positions))
    whole[:order].view(order, nnz, positions).copy_(coords.unsqueeze(2))
    for mode, size in enumerate(sizes):
        row = whole[order + mode].view(nnz * prod(sizes[:mode]), size, prod(sizes[mode + 1 :]))
        row.copy_(torch.arange(size, device=coords.device).unsqueeze(1))
    return whole


def starts_of_runs(keys: Sequence[Tensor]) -> Tensor:
    """Return (nnz,) bool: True at the first nonzero, and where keys differ from the nonzero before."""
    fresh = torch.ones_like(keys[0], dtype=torch.bool)
    fresh[1:] = keys[0][1:] != keys[0][:-1]
    for key in keys[1:]:
        fresh[1:] |= key[1:] != key[:-1]
    return fresh


def sorted_runs(keys: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a stable (nnz,) int64 permutation that sorts keys, and `starts_of_runs` of the sorted keys.

    One stable sort a key, least significant first, so equal nonzeros keep the order in which they were given.
    """
    ascending, order = torch.sort(keys[-1], stable=True)
    for key in reversed(keys[:-1]):
        order = order[torch.sort(key[order], stable=True).indices]
    return order, starts_of_runs([ascending] if len(keys) == 1 else [key[order] for key in keys])


def on_diagonal(labels: Sequence[Hashable], coords: Tensor) -> Tensor | None:
    """The nonzeros whose coordinates agree in modes of the same label, ascending; None where no two are the same."""
    first = [labels.index(label) for label in labels]
    again = [mode for mode, earlier in enumerate(first) if earlier != mode]
    if not again:
        return None
    return torch.nonzero((coords[again] == coords[[first[mode] for mode in again]]).all(0)).flatten()


def is_sorted_unique(keys: Sequence[Tensor]) -> bool:
    """True if the keys are strictly increasing in lexicographic order; one transfer from the device."""
    if keys[0].shape[0] < 2:
        return True
    rising = keys[-1][1:] > keys[-1][:-1]
    for key in reversed(keys[:-1]):
        rising = (key[1:] > key[:-1]) | ((key[1:] == key[:-1]) & rising)
    return bool(rising.all())


def is_coalesced(coords: Iterable[Tensor], shape: Sequence[int]) -> bool:
    """True if nonzeros are in lexicographic order and unique; one transfer from the device."""
    return is_sorted_unique(sort_keys(coords, shape))


FIRST = 64
"""Coordinates of which some fall where not all of them ascend, most likely."""


def likely_sorted(row: Tensor) -> bool:
    """True if the first coordinates do not fall; one transfer from the device."""
    first = row[:FIRST]
    return not bool((first[1:] < first[:-1]).any())


# -- numbers for tuples -----------------------------------------------------------------------------------------------

Rows = Sequence[Tensor]
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

    rank: Tensor
    coords: tuple[Tensor, ...]
    count: int


def numbered(rows: Rows, sizes: Sequence[int], n: int, like: Tensor, ascending: bool = False) -> Numbering:
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
    keys = sort_keys(rows, sizes)
    if ascending:
        fresh = starts_of_runs(keys)
        representatives = torch.nonzero(fresh).flatten()
        rank = torch.cumsum(fresh, 0).sub_(1)
    elif markable(prod(sizes), n):
        marked = torch.zeros(prod(sizes), dtype=torch.bool, device=like.device).index_fill_(0, keys[0], True)
        rank = torch.cumsum(marked, 0).sub_(1).index_select(0, keys[0])
        distinct = torch.nonzero(marked).flatten()
        return Numbering(rank, decoded(distinct, sizes), distinct.numel())
    else:
        number, representatives = narrow_runs(rows, sizes, like)
        rank = number.long()
    return Numbering(rank, tuple(row[representatives] for row in rows), representatives.numel())


def narrow_runs(rows: Iterable[Tensor], sizes: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Number tuples in lexicographic order, in little memory, and give the first tuple of each number.

    Args:
        rows: (n,) a mode, below `sizes`.
        sizes: of the modes.
        like: (n,) int64, on the device wanted.

    Returns:
        (n,) the number of each tuple, int32 where that holds them all; (numbers,) int64, the first that has the number.
    """
    return _by_sorting(narrowed(*linear_key(rows, sizes, like)))


def lexsort(rows: Iterable[Tensor], sizes: Sequence[int]) -> Tensor:
    """(n,) int64 stable permutation that puts tuples of at least one mode in lexicographic order."""
    return torch.sort(narrowed(*linear_key(rows, sizes)), stable=True).indices


def linear_key(rows: Iterable[Tensor], sizes: Sequence[int], like: Tensor | None = None) -> tuple[Tensor, int]:
    """Return (n,) one int64 key a tuple, ordered as the tuples are, and an upper bound that all keys are below.

    Where sizes multiply to more than 2**63, the first modes are numbered, and their numbers stand for them. The key of
    one mode is the row itself.

    Args:
        rows: (n,) int64 a mode, below `sizes`; made one after the other, where they are made when asked for.
        sizes: of the modes.
        like: (n,) int64, on the device wanted, where there may be no modes.
    """
    key = torch.zeros_like(like) if like is not None and not sizes else None
    spread = 1
    for row, size in zip(rows, sizes, strict=True):
        if key is None:
            key, spread = row, size
            continue
        if spread * size > INT64_SIZES:
            number, spread = ranked(key, spread)
            key = number.long()
        if spread * size > INT64_SIZES:
            number, size = ranked(row, size)
            row = number.long()
        key = torch.add(row, key, alpha=size)
        spread *= size
    assert key is not None
    return key, spread


def ranked(key: Tensor, spread: int) -> tuple[Tensor, int]:
    """(n,) the numbers of keys below `spread`, int32 where that holds them; how many different ones there are."""
    n = key.numel()
    dtype = torch.int32 if n <= INT32_MAX else torch.int64
    if not n:
        return key.to(dtype), 0
    if spread <= 2 * n + FEW:
        marked = torch.zeros(spread, dtype=torch.bool, device=key.device).index_fill_(0, key, True)
        number = torch.cumsum(marked, 0, dtype=dtype)
        return number.index_select(0, key).sub_(1), int(number[-1])
    number, first = _by_sorting(narrowed(key, spread))
    return number, first.numel()


def _by_sorting(key: Tensor) -> tuple[Tensor, Tensor]:
    """Return (n,) the number of each key, and (numbers,) the first key of each number."""
    order, fresh = sorted_runs([key])
    dtype = torch.int32 if key.numel() <= INT32_MAX else torch.int64
    number = torch.cumsum(fresh, 0, dtype=dtype).sub_(1)
    return torch.empty_like(number).scatter_(0, order, number), order[fresh]


def markable(keys: int, n: int) -> bool:
    """True if marking `n` keys below `keys` in a table is better than sorting them."""
    return keys <= MARKS * n + FEW


def narrowed(keys: Tensor, spread: int) -> Tensor:
    """Return keys below `spread` in 32 bits if they fit, which halves the passes of a radix sort."""
    return keys.to(torch.int32) if spread <= INT32_MAX else keys


def histogram(key: Tensor, keys: int) -> Tensor:
    """(keys,) int64: how often each key below `keys` occurs. `torch.bincount` would wait for the device."""
    return key.new_zeros(keys).index_add_(0, key, key.new_ones(1).expand(key.numel()))


def sorted_keys(keys: Tensor, spread: int) -> tuple[Tensor, Tensor]:
    """(distinct int64 `keys` below `spread`, ascending; where each was)."""
    n = keys.numel()
    if not markable(spread, n):
        ascending, order = torch.sort(narrowed(keys, spread))
        return ascending.long(), order
    number = torch.arange(1, n + 1, dtype=torch.int32 if n <= INT32_MAX else torch.int64, device=keys.device)
    table = torch.zeros(spread, dtype=number.dtype, device=keys.device).index_copy_(0, keys, number)
    ascending = torch.nonzero(table).flatten()
    return ascending, table.index_select(0, ascending).sub_(1)


def joint_keys(
    left: Rows, right: Rows, sizes: Sequence[int], like: Tensor, n: tuple[int, int]
) -> tuple[Tensor, Tensor, int]:
    """Keys of two sets of `n` tuples; equal, and ordered, across both as the tuples are.

    Returns:
        The keys of both; how many keys are possible, no more than a few a tuple.
    """
    if not left:
        return like.new_zeros(n[0]), like.new_zeros(n[1]), 1
    if markable(prod(sizes), sum(n)):
        return sort_keys(left, sizes)[0], sort_keys(right, sizes)[0], prod(sizes)
    both = numbered([torch.cat(pair) for pair in zip(left, right, strict=True)], sizes, sum(n), like)
    return both.rank[: n[0]], both.rank[n[0] :], both.count


def meeting(left: Tensor, right: Tensor, keys: int, most: int, ascending: bool = False) -> tuple[Tensor, Tensor] | None:
    """Find the pairs of equal keys of two sets, as `joint_keys` gives them; wait for the device.

    Returns:
        The number of the left key of each pair, not falling, and that of the right one, rising where the other stays;
        None where there are more than `most`. Right keys may be known to be `ascending`.
    """
    order = None
    if not ascending:
        right, order = torch.sort(narrowed(right, keys), stable=True)
    begins = torch.searchsorted(right, torch.arange(keys + 1, dtype=right.dtype, device=right.device))
    first = begins.index_select(0, left)
    lengths = begins[1:].index_select(0, left).sub_(first)
    count = int(lengths.sum())
    if count > most:
        return None
    of_left, of_right = in_runs(lengths, count, first)
    return of_left, of_right if order is None else order.index_select(0, of_right)


def decoded(keys: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Coordinates of linear keys, row-major."""
    columns = []
    for size in reversed(sizes[1:]):
        columns.append(keys % size)
        keys = keys // size
    return (keys, *reversed(columns))


def set_bits(words: Tensor, word: int) -> Tensor:
    """Return (tiles, words * word) bool: each bit of the words, the lowest of a word first."""
    return ((words.to(torch.int64).unsqueeze(2) >> torch.arange(word, device=words.device)) & 1 == 1).flatten(1)
