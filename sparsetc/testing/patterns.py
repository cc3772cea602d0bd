"""Patterns of nonzeros for tests of formats.

In: a pattern's name and a shape. Out: coordinates of nonzeros, sorted and unique.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from random import Random

import torch
from torch import Tensor

from sparsetc.errors import FormatError

Index = tuple[int, ...]
Scatter = Callable[[Index, int, Random], list[Index]]
"""A function of a shape, of a number of nonzeros that most patterns do not exceed, and of what draws; duplicates are
possible."""


def _somewhere(shape: Index, r: Random) -> Index:
    return tuple(r.randrange(size) for size in shape)


def _random(shape: Index, most: int, r: Random) -> list[Index]:
    count = max(1, min(most, prod(shape) // r.choice((1, 2, 3, 8))))
    return [_somewhere(shape, r) for _ in range(count)]


def _skewed(shape: Index, most: int, r: Random) -> list[Index]:
    """A few long rows at small coordinates and many short ones."""
    count = max(1, min(most, prod(shape) // 2))
    return [tuple(min(size - 1, int(r.random() ** 3 * size)) for size in shape) for _ in range(count)]


def _slice(shape: Index, most: int, r: Random) -> list[Index]:
    """Return positions of one slice of some mode."""
    mode = r.randrange(len(shape))
    at = r.randrange(shape[mode])
    return [*product(*map(range, shape[:mode]), [at], *map(range, shape[mode + 1 :]))]


def _fiber(shape: Index, most: int, r: Random) -> list[Index]:
    """Return positions of one fiber along some mode."""
    mode = r.randrange(len(shape))
    at = _somewhere(shape, r)
    return [(*at[:mode], n, *at[mode + 1 :]) for n in range(shape[mode])]


PATTERNS: dict[str, Scatter] = {
    "empty": lambda shape, most, r: [],
    "one": lambda shape, most, r: [_somewhere(shape, r)],
    "corners": lambda shape, most, r: [(0,) * len(shape), tuple(size - 1 for size in shape)],
    "random": _random,
    "skewed": _skewed,
    "slice": _slice,
    "fiber": _fiber,
    "dense": lambda shape, most, r: [*product(*map(range, shape))],
    "row": lambda shape, most, r: [(shape[0] - 1, *place[1:]) for place in _random(shape, most, r)],
}
"""No nonzero, one, the first and the last, some; few long rows and many short; one whole slice; one whole fiber; all;
some of the last slice of the first mode."""
UNBOUNDED = ("empty", "one", "corners", "random", "skewed", "row")
"""The patterns whose nonzeros do not grow with the shape."""
MOST = 100
"""The most nonzeros of a pattern that does not grow."""


def pattern(name: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return the (order, nnz) coordinates of one of `PATTERNS`, sorted and unique; none if the shape is empty.

    Raises:
        FormatError: no pattern has this name.

    Examples:
        >>> stc.testing.pattern("corners", (4, 5))
        tensor([[0, 3],
                [0, 4]])
    """
    if name not in PATTERNS:
        raise FormatError(f"no pattern is called {name!r}; known: {', '.join(PATTERNS)}")
    most = MOST if name in UNBOUNDED else prod(shape)
    places = PATTERNS[name](shape, most, Random(f"{name} {seed}")) if 0 not in shape else []
    coords = torch.tensor(sorted(set(places)), dtype=torch.int64, device="cpu")
    return coords.reshape(-1, len(shape)).T.contiguous()
