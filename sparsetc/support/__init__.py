"""Helpers for all of the package: caches, locks, names, files, records, warnings; and short names of types."""

import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import filterfalse
from math import prod
from os import PathLike
from typing import Any, TypeVar

FilePath = str | PathLike[str]
"""The path of a file, as `open` takes it."""
Ints = tuple[int, ...]
"""Sizes, positions or numbers of modes, of any number."""
Names = tuple[str, ...]
"""Letters of an einsum, or other names."""
NamedInts = tuple[tuple[str, int], ...]
"""Numbers by letter or name, as what is hashed has them."""


def later(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module of the package, which is imported at the first call."""

    def called(*args: Any, **kwargs: Any) -> Any:
        _load(module)
        return getattr(sys.modules[module], name)(*args, **kwargs)

    module = f"sparsetc.{module}"
    return called


def _load(module: str) -> None:
    import_module(module)


_load._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""Dynamo cannot trace the import."""


def required(module: str, message: str) -> Any:
    """Return a module of a library that the package needs here alone; without it, an `ImportError` with a message."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(message) from error


T = TypeVar("T")


def among(things: Iterable[T], some: Container[T]) -> tuple[T, ...]:
    """Return the things that are among some, in their order."""
    return tuple(filter(some.__contains__, things))


def outside(things: Iterable[T], some: Container[T]) -> tuple[T, ...]:
    """Return the things that are not among some, in their order."""
    return tuple(filterfalse(some.__contains__, things))


def row_major(sizes: Sequence[int]) -> list[int]:
    """Return how far apart neighbours along each mode of a contiguous tensor lie."""
    return [prod(sizes[n + 1 :]) for n in range(len(sizes))]


def volume(sizes: Mapping[Any, int] | Sequence[int], axes: Iterable[Any]) -> int:
    """Return the product of the sizes of some axes."""
    return prod(map(sizes.__getitem__, axes))
