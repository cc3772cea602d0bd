"""The bounded mapping that caches are made of: what goes first, what goes with what, and threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from sparsetc.support import Lru, given_to


class Thing:
    """Something that can be referred to weakly."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Memory returns by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_the_least_recently_used_goes_first() -> None:
    cache: Lru[str, int] = Lru(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert [cache.get(k) for k in "abc"] == [1, None, 3]
    assert len(cache) == 2


def test_what_came_first_is_kept() -> None:
    cache: Lru[str, int] = Lru(2)
    assert cache.put("a", 1) == 1
    assert cache.put("a", 2) == 1
    cache.pop("a")
    cache.pop("a")
    assert cache.put("a", 2) == 2
    cache.clear()
    assert len(cache) == 0


def test_what_is_made_once_is_given_each_time() -> None:
    cache: Lru[str, int] = Lru(2)
    assert [cache.once("a", lambda n=n: n) for n in (1, 2)] == [1, 1]  # type: ignore[misc]


def test_who_takes_a_cache_is_given_it() -> None:
    def takes(cache: Lru[str, int] | None = None) -> None:
        pass

    cache: Lru[str, int] = Lru(2)
    assert given_to(takes, cache) == {"cache": cache}
    assert given_to(takes, None) == {}
    assert given_to(len, cache) == {}


@pytest.mark.usefixtures("no_collector")
def test_a_value_goes_with_what_it_needs() -> None:
    cache: Lru[str, Thing] = Lru(4)
    first, second = Thing(), Thing()
    cache.put("both", Thing(), needs=[first, second])
    cache.put("second", Thing(), needs=[second])
    del first
    assert cache.get("both") is None
    assert cache.get("second") is not None
    del second
    assert len(cache) == 0


@pytest.mark.usefixtures("no_collector")
def test_a_cache_is_not_kept_by_what_its_values_need() -> None:
    cache: Lru[str, Thing] = Lru(4)
    need, value = Thing(), Thing()
    gone = threading.Event()
    cache.put("a", value, needs=[need])
    weakref.finalize(value, gone.set)
    del value, cache
    assert gone.is_set()


def test_threads_share_a_cache() -> None:
    cache: Lru[int, int] = Lru(8)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for n in range(3000):
                key = (seed * n) % 23
                found = cache.get(key)
                assert found in (None, key)
                assert cache.put(key, key) == key
                if n % 50 == 0:
                    cache.pop(key)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (3, 5, 7, 11)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert len(cache) <= 8
