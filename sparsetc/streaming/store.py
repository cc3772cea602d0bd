"""Where packed chunks are kept on the host, and how they come from there in the order in which they are streamed.

In: buffers that were filled. Out: a `Store`, of pinned memory here or of a file (`file.py`), and its `Feed`: the bytes
of one chunk after the other, in memory from which the device copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Protocol

import torch

from sparsetc.streaming.layout import Chunk, host_bytes

Release = Callable[[], None]
"""Waits until a buffer has been read."""


class Feed(Protocol):
    """Bytes of chunks, in order."""

    passing: bool
    """Whether the memory they are in goes when the feed ends."""

    def get(self, position: int) -> torch.Tensor:
        """(at least the chunk's bytes,) uint8 of the chunk at a position; it stays while it is not released."""

    def release(self, position: int, wait: Release) -> None:
        """The chunk's bytes are read once `wait` returns, and may be overwritten then."""


class Store(Protocol):
    """Packed chunks on the host."""

    lock: Lock
    """Held by the stream, of those that share the chunks, that is called: there is one feed at a time."""

    @property
    def closed(self) -> bool:
        """Whether they were given up."""

    def feed(self, chunks: Sequence[Chunk], order: Sequence[int], streams: int) -> AbstractContextManager[Feed]:
        """The bytes of these chunks in an order, for a device that may have so many of them at once."""

    def close(self) -> None:
        """Give up what is held."""


class Memory:
    """Chunks in memory, pinned where a GPU copies from it. It is the sink of `cut`, too."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.buffers: list[torch.Tensor] = []
        self.closed, self.lock = False, Lock()

    def buffer(self, nbytes: int) -> torch.Tensor:
        """New memory."""
        return host_bytes(nbytes, self.pinned)

    def put(self, buffer: torch.Tensor) -> None:
        """Keep a chunk."""
        self.buffers.append(buffer)

    @contextmanager
    def feed(self, chunks: Sequence[Chunk], order: Sequence[int], streams: int) -> Iterator[Feed]:
        """The chunks, which nothing need be waited for."""
        yield _Kept([self.buffers[n] for n in order])

    def close(self) -> None:
        """Free the memory."""
        self.closed = True
        self.buffers.clear()


class _Kept:
    """Chunks that are there."""

    passing = False

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers

    def get(self, position: int) -> torch.Tensor:
        """The chunk."""
        return self._buffers[position]

    def release(self, position: int, wait: Release) -> None:
        """Nothing is overwritten."""


def release_pinned() -> None:
    """Give back the pinned memory that torch keeps for later, where it has a way to."""
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()
