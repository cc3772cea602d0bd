"""Where nonzeros lie: patterns that a random sparse operand may have.

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
    if prod(shape) > most:
        return _blocks(shape, most, r)
    return list(itertools.product(*(range(size) for size in shape)))


def _skewed(shape: Place, most: int, r: Random) -> list[Place]:
    """A few long rows at small coordinates and many short ones."""
    count = max(1, min(most, prod(shape) // 2))
    return [tuple(min(size - 1, int(r.random() ** 3 * size)) for size in shape) for _ in range(count)]


def _slice(shape: Place, most: int, r: Random) -> list[Place]:
    """Positions of one slice of some mode."""
    mode = r.randrange(len(shape))
    at = r.randrange(shape[mode])
    ranges = [[at] if m == mode else range(size) for m, size in enumerate(shape)]
    if prod(len(part) for part in ranges) <= most:
        return list(itertools.product(*ranges))
    return [(*p[:mode], at, *p[mode + 1 :]) for p in _random(shape, most, r)]


def _long(shape: Place, most: int, r: Random) -> list[Place]:
    """One slice with most of the nonzeros, the others anywhere."""
    mode, count = r.randrange(len(shape)), int(0.85 * most)
    at = r.randrange(shape[mode])
    rest = prod(size for m, size in enumerate(shape) if m != mode)
    row = {(*p[:mode], at, *p[mode + 1 :]) for p in (_somewhere(shape, r) for _ in range(min(2 * count, 4 * rest)))}
    return sorted(row)[:count] + [_somewhere(shape, r) for _ in range(most - count)]


def _fiber(shape: Place, most: int, r: Random) -> list[Place]:
    """Positions of one fiber along some mode."""
    mode = r.randrange(len(shape))
    at = _somewhere(shape, r)
    return [(*at[:mode], n, *at[mode + 1 :]) for n in range(min(shape[mode], most))]


def _blocks(shape: Place, most: int, r: Random) -> list[Place]:
    """A few dense blocks."""
    found: list[Place] = []
    for _ in range(r.choice((1, 2, 4))):
        low = _somewhere(shape, r)
        side = max(1, int((most / 4) ** (1 / len(shape))))
        ranges = [range(a, min(size, a + side)) for a, size in zip(low, shape, strict=True)]
        if prod(len(part) for part in ranges) <= most:
            found += itertools.product(*ranges)
    return found[:most]


def _diagonal(shape: Place, most: int, r: Random) -> list[Place]:
    """The diagonal of all modes, and nonzeros beside it."""
    along = [tuple([n] * len(shape)) for n in range(min(*shape, most) if len(shape) > 1 else min(shape[0], most))]
    return along + _random(shape, max(1, most - len(along)), r)[: len(along)]


SCATTERS: dict[str, Scatter] = {
    "random": _random,
    "skewed": _skewed,
    "full": _full,
    "blocks": _blocks,
    "diagonal": _diagonal,
    "slice": _slice,
    "fiber": _fiber,
    "long": _long,
    "corners": _corners,
    "one": _one,
    "empty": _empty,
}
"""Patterns by name."""


def scattered(name: str, shape: Place, most: int, r: Random) -> list[Place]:
    """Coordinates of a pattern, at most so many, in lexicographic order or not; none where the shape is empty."""
    if 0 in shape:
        return []
    found = SCATTERS[name](shape, most, r)[:most]
    if r.random() < 0.4:
        r.shuffle(found)
    else:
        found.sort()
    return found


def duplicated(places: list[Place], most: int, r: Random) -> list[Place]:
    """Some of the places again, anywhere."""
    if not places:
        return places
    found = (places + [r.choice(places) for _ in range(r.randint(1, len(places)))])[:most]
    r.shuffle(found)
    return found
