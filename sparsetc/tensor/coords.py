"""Arithmetic on coordinates: linear keys, lexicographic order, range checks. Torch ops only, on any device.

In: coordinates (order x nnz, int64) and a shape. Out: int64 keys, permutations, masks. Nothing here knows of values.
A product of sizes may pass 2**63; then one key is not enough and a list of keys, most significant first, takes its
place, so that no key ever wraps.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable, Sequence

import torch

from sparsetc.errors import CoordinateError, ShapeError

INT32_MAX = 2**31 - 1
INT64_SIZES = 2**63
"""How many different values an int64 coordinate can take: 0 .. 2**63 - 1."""


def checked_shape(shape: Iterable[object]) -> tuple[int, ...]:
    """``shape`` as a tuple of Python ints >= 0 that int64 can index; ShapeError otherwise."""
    try:
        sizes = list(shape)
    except TypeError:
        raise ShapeError(f"shape must be a sequence of ints, found {shape!r}") from None
    checked = []
    for mode, size in enumerate(sizes):
        try:
            value = operator.index(size)  # type: ignore[arg-type]
        except TypeError:
            raise ShapeError(f"shape must hold ints, found {size!r} ({type(size).__name__}) at mode {mode}") from None
        if isinstance(size, bool) or not 0 <= value < INT64_SIZES:
            raise ShapeError(f"a size must be an int from 0 to 2**63 - 1, found {size!r} at mode {mode}")
        checked.append(value)
    return tuple(checked)


def check_range(coords: torch.Tensor, shape: Sequence[int], what: str = "nonzero") -> None:
    """CoordinateError naming mode, `what`, value and size unless 0 <= coords[m] < shape[m] for every mode m."""
    if coords.shape[1] == 0:
        return
    lows, highs = torch.stack(torch.aminmax(coords, dim=1)).tolist()  # one transfer from the device
    for mode, (low, high, size) in enumerate(zip(lows, highs, shape, strict=True)):
        if low < 0 or high >= size:
            row = coords[mode]
            at = int(torch.nonzero((row < 0) | (row >= size))[0, 0])
            raise CoordinateError(
                f"coordinate out of range in mode {mode}: {what} {at} has {int(row[at])}, "
                f"but the size of mode {mode} is {size}{' blocks' if what == 'block' else ''} "
                f"(coordinates are 0-based: 0 <= c < {size})"
            )


def sort_keys(coords: Iterable[torch.Tensor], shape: Sequence[int]) -> list[torch.Tensor]:
    """The fewest int64 keys, most significant first, whose lexicographic order is that of the coordinates.

    Each key is the row-major linear index of as many consecutive modes as fit below 2**63; a tensor whose sizes
    multiply to no more than 2**63 has one key.
    """
    keys: list[torch.Tensor] = []
    span = 0
    for row, size in zip(coords, shape, strict=True):
        if keys and span * size <= INT64_SIZES:
            keys[-1] = torch.add(row, keys[-1], alpha=size)  # row + size * key, one pass
            span *= size
        else:
            keys.append(row)
            span = size
    return keys


def linear_key(coords: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """Row-major linear index of every nonzero, int64 (nnz,), or None when the product of sizes passes 2**63."""
    if 0 in shape:
        return coords.new_zeros(coords.shape[1])  # of no nonzeros, whatever the other sizes
    return sort_keys(coords, shape)[0] if math.prod(shape) <= INT64_SIZES else None


def with_dense_modes(coords: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """(order + dense modes, nnz * positions): each nonzero's coordinates before those of every position, row-major."""
    positions = math.prod(sizes)
    grid = torch.cartesian_prod(*(torch.arange(n, device=coords.device) for n in sizes)).reshape(positions, len(sizes))
    return torch.cat((coords.repeat_interleave(positions, dim=1), grid.T.repeat(1, coords.shape[1])))


def starts_of_runs(keys: Sequence[torch.Tensor]) -> torch.Tensor:
    """Bool (nnz,): True where a nonzero's keys differ from those of the nonzero before it (and at the first)."""
    fresh = torch.ones_like(keys[0], dtype=torch.bool)
    fresh[1:] = keys[0][1:] != keys[0][:-1]
    for key in keys[1:]:
        fresh[1:] |= key[1:] != key[:-1]
    return fresh


def sorted_runs(keys: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(`lexsort` of the keys, `starts_of_runs` of them in that order)."""
    order = lexsort(keys)
    return order, starts_of_runs([key[order] for key in keys])


def on_diagonal(labels: Sequence[Hashable], coords: torch.Tensor) -> torch.Tensor | None:
    """The nonzeros whose coordinates agree in modes of the same label, ascending; None where no two are the same."""
    first = [labels.index(label) for label in labels]
    again = [mode for mode, own in enumerate(first) if own != mode]
    if not again:
        return None
    return torch.nonzero((coords[again] == coords[[first[mode] for mode in again]]).all(0)).flatten()


def is_sorted_unique(keys: Sequence[torch.Tensor]) -> bool:
    """Whether the keys are strictly increasing in lexicographic order; one transfer from the device."""
    if keys[0].shape[0] < 2:
        return True
    rising = keys[-1][1:] > keys[-1][:-1]
    for key in reversed(keys[:-1]):
        rising = (key[1:] > key[:-1]) | ((key[1:] == key[:-1]) & rising)
    return bool(rising.all())


def lexsort(keys: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stable permutation (nnz,) int64 that puts ``keys`` (most significant first; coordinates will do) in order.

    One stable sort a key, least significant first, so equal nonzeros keep the order in which they were given.
    """
    order = torch.sort(keys[-1], stable=True).indices
    for key in reversed(keys[:-1]):
        order = order[torch.sort(key[order], stable=True).indices]
    return order
