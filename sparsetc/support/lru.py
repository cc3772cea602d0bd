"""Lru: a bounded mapping that threads share. What every cache in memory is kept in.

In: hashable keys, values, and the objects without which a value is of no use. Out: the value, until it is the least
recently used of too many or one of those objects dies. No value is made or dropped while the lock is held.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Generic, TypeVar

from sparsetc.support.locks import Lock

K = TypeVar("K")
V = TypeVar("V")

# One lock for all, since a weak reference may call back while another cache is being written to. It can be taken again
# by the thread that holds it, for that same reason.
_lock = Lock()
_clock = itertools.count()


@dataclass
class _Kept(Generic[V]):
    value: V
    used: int
    needs: tuple[weakref.ref[object], ...]
    """References whose callbacks drop the value; they die with it."""


class Lru(Generic[K, V]):
    """At most `most` values; the least recently used goes first."""

    __slots__ = ("__weakref__", "_items", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._items: dict[K, _Kept[V]] = {}

    def get(self, key: K) -> V | None:
        """The value kept under a key, now the most recently used; None where there is none."""
        found = self._items.get(key)
        if found is None:
            return None
        found.used = next(_clock)
        return found.value

    def put(self, key: K, value: V, needs: Sequence[object] = ()) -> V:
        """Keep a value while everything in `needs` lives; returns what is kept: another thread's, if that came first.

        Args:
            key: must not refer to `needs` but weakly.
            value: likewise.
            needs: objects that can be referred to weakly; one that dies takes the value with it.
        """
        new = _Kept(value, next(_clock), tuple(weakref.ref(n, self._forgetting(key)) for n in needs))
        gone: list[_Kept[V] | None] = []  # dropped when the lock is free again
        with _lock.own:
            found = self._items.setdefault(key, new)
            while len(self._items) > self.most:
                items = self._items.copy()
                gone.append(self._items.pop(min(items, key=lambda k: items[k].used), None))
        return found.value

    def once(self, key: K, make: Callable[[], V]) -> V:
        """The value kept under a key, made where there is none."""
        found = self.get(key)
        return self.put(key, make()) if found is None else found

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
        return [kept.value for kept in list(self._items.values())]

    def __len__(self) -> int:
        return len(self._items)

    def _forgetting(self, key: K) -> Callable[[object], None]:
        cache = weakref.ref(self)

        def forget(_: object) -> None:
            own = cache()
            if own is not None:
                own.pop(key)

        return forget


def given_to(function: Callable[..., Any], cache: Lru[Any, Any] | None) -> dict[str, Any]:
    """The keyword by which a function that has a parameter ``cache`` is given one; no keyword for others."""
    return {} if cache is None or "cache" not in signature(function).parameters else {"cache": cache}
