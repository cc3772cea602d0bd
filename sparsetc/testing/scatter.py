"""Patterns of nonzeros for tests.

In: a pattern's name, a shape, a random generator. Out: a list of coordinates, a tuple each, duplicates possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import prod
from random import Random

Place = tuple[int, ...]
Scatter = Callable[[Place, int, Random], list[Place]]


def _somewhere(shape: Place, r: Random) -> Place:
    return tuple(r.randrange(size) for size in shape)


def _empty(shape: Place, most: int, r: Random) -> list[Place]:
    return []


def _one(shape: Place, most: int, r: Random) -> list[Place]:
    return [_somewhere(shape, r)]


def _corners(shape: Place, most: int, r: Random) -> list[Place]:
    return [tuple(0 for _ in shape), tuple(size - 1 for size in shape)]


def _random(shape: Place, most: int, r: Random) -> list[Place]:
    count = max(1, min(most, prod(shape) // r.choice((1, 2, 3, 8))))
    return [_somewhere(shape, r) for _ in range(count)]


def _full(shape: Place, most: int, r: Random) -> list[Place]:
    return list(itertools.product(*(range(size) for size in shape)))


def _skewed(shape: Place, most: int, r: Random) -> list[Place]:
    """A few long rows at small coordinates and many short ones."""
    count = max(1, min(most, prod(shape) // 2))
    return [tuple(min(size - 1, int(r.random() ** 3 * size)) for size in shape) for _ in range(count)]


def _slice(shape: Place, most: int, r: Random) -> list[Place]:
    """Return positions of one slice of some mode."""
    mode = r.randrange(len(shape))
    at = r.randrange(shape[mode])
    ranges = [[at] if m == mode else range(size) for m, size in enumerate(shape)]
    return list(itertools.product(*ranges))


def _fiber(shape: Place, most: int, r: Random) -> list[Place]:
    """Return positions of one fiber along some mode."""
    mode = r.randrange(len(shape))
    at = _somewhere(shape, r)
    return [(*at[:mode], n, *at[mode + 1 :]) for n in range(shape[mode])]


SCATTERS: dict[str, Scatter] = {
    "random": _random,
    "skewed": _skewed,
    "full": _full,
    "slice": _slice,
    "fiber": _fiber,
    "corners": _corners,
    "one": _one,
    "empty": _empty,
}
"""Patterns by name."""
