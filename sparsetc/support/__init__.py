"""Helpers for all of the package: short names of types, late imports, caches, cached properties and locks.

`Lru` is the bounded thread-safe mapping behind every cache in memory. No value is made or dropped under its lock.

`cached_property` has no lock, so that no forked child waits for a thread that it does not have: up to Python 3.11
`functools.cached_property` holds a lock of the class while it computes. Two threads that read at once may both compute.
It works on frozen dataclasses too.

`Lock` is a lock that each process has anew. A fork waits until no other thread is importing a module of this package or
of a library that it imports modules of as it runs, since the child could not import that module.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from inspect import Signature, signature
from itertools import filterfalse
from math import prod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

FilePath = str | os.PathLike[str]
"""The path of a file, as `open` takes it."""
Ints = tuple[int, ...]
"""Sizes, positions or numbers of modes, of any number."""
Names = tuple[str, ...]
"""Letters of an einsum, or other names."""
Letters = Iterable[str]
"""Letters of an einsum, in any collection of them."""
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


@functools.lru_cache
def installed(library: str) -> bool:
    """Return True if a library is there to be imported."""
    return find_spec(library) is not None


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


def volume(sizes: Mapping[Any, int] | Ints, axes: Iterable[Any]) -> int:
    """Return the product of the sizes of some axes."""
    return prod(map(sizes.__getitem__, axes))


# -- caches, cached properties and locks -------------------------------------------------------------------------

at_fork: Callable[..., None] = getattr(os, "register_at_fork", lambda **calls: None)  # Windows has no forks


class Lock:
    """A reentrant lock, used as ``with lock.own:``; a forked child gets a new one."""

    def __init__(self) -> None:
        self._renew()
        at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.own = threading.RLock()


LIBRARIES = frozenset(["sparsetc", "torch", "triton", "numba", "llvmlite", "numpy", "sympy", "scipy"])
"""Packages whose imports a fork waits for: these end. A user's module may run, and fork, while it is imported."""


def _finish_imports() -> None:
    importing: Any = vars(importlib)["_bootstrap"]
    ended: set[str] = set()  # or the forking thread's own imports, which do not end here
    while names := {name for name in importing._module_locks.copy() if name.partition(".")[0] in LIBRARIES} - ended:
        for name in names:
            importing._lock_unlock_module(name)  # as an import of a module waits for another thread's import of it
        ended |= names


at_fork(before=_finish_imports)


if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):
        """The value of a method, kept in the instance's ``__dict__`` under the method's name."""

        def __init__(self, method: Callable[[Any], Any]) -> None:
            super().__init__(method)
            self.lock = nullcontext()


K = TypeVar("K")
V = TypeVar("V")

# One lock for all, since a weak reference may call back while another cache is being written to. It can be taken again
# by the thread that holds it, for that same reason.
_lock = Lock()
_clock = itertools.count()


class Lru(Generic[K, V]):
    """A mapping of at most `most` values; those that were not used for the longest are dropped, an eighth at a time.

    Attributes:
        _items: a value, when it was used last, and references whose callbacks drop it, which die with it.
    """

    __slots__ = ("__weakref__", "_items", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._items: dict[K, list[Any]] = {}

    def get(self, key: K) -> V | None:
        """Return the value of a key and mark it as most recently used; None if there is none."""
        kept = self._items.get(key)
        if kept is None:
            return None
        kept[1] = next(_clock)  # no lock, which would take as long as the rest, and which Dynamo does not know
        return kept[0]  # type: ignore[no-any-return]

    def put(self, key: K, value: V, needs: Sequence[object] = ()) -> V:
        """Keep a value while everything in `needs` lives. Return the value kept: another thread's, if it came first.

        Args:
            key: must not refer to `needs` but weakly.
            value: likewise.
            needs: objects that can be referred to weakly; one that dies takes the value with it.
        """
        pop = weakref.WeakMethod(self.pop)

        def forget(_: object) -> None:
            if (living := pop()) is not None:
                living(key)

        new = [value, next(_clock), [weakref.ref(n, forget) for n in needs]]
        gone: list[Any] = []  # dropped when the lock is free again
        with _lock.own:
            kept = self._items.setdefault(key, new)
            if len(self._items) > self.most:  # several, as to look for the oldest takes as long as what a value saves
                oldest = sorted(self._items.copy().items(), key=lambda item: item[1][1])[: 1 + self.most // 8]
                gone += [self._items.pop(old, None) for old, _ in oldest]
        return kept[0]  # type: ignore[no-any-return]

    def once(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, made if there is none."""
        value = self.get(key)
        return self.put(key, make()) if value is None else value

    def pop(self, key: K) -> None:
        """Forget a value, if there is one."""
        with _lock.own:
            gone = self._items.pop(key, None)
        del gone

    def clear(self) -> None:
        """Forget everything."""
        with _lock.own:
            gone, self._items = self._items, {}
        del gone

    def values(self) -> list[V]:
        """The values that are kept now."""
        return [kept[0] for kept in list(self._items.values())]

    def __len__(self) -> int:
        return len(self._items)


Cache = Lru[Any, Any]
"""A cache of keys and things of any kind."""


def given_to(function: Callable[..., Any], cache: Cache | None) -> dict[str, Any]:
    """Return the keyword ``cache`` for a function that has this parameter; no keyword for others."""
    return {} if cache is None or "cache" not in signature_of(function).parameters else {"cache": cache}


@functools.lru_cache
def signature_of(function: Callable[..., Any]) -> Signature:
    """Return the signature of a function, inspected once."""
    return signature(function)
