"""Where packed chunks are kept on the host, and how they come from there in the order in which they are streamed.

In: buffers that were filled. Out: `ChunkMemory` here, pinned where a GPU copies from it, or an open file
(`file.ChunkFile`). Both have a lock, which the stream that is called holds, and a ``feed``, whose two functions take a
chunk's position in the order of the run: ``get(position)`` gives its bytes, in memory from which the device copies;
``release(position, wait)`` lets them be overwritten once the wait is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import TypeAlias

import torch

from sparsetc.codegen.launch import PartArrays

ALIGNED = 256
"""Bytes at whose multiples arrays begin, as those that CUDA allocates do: kernels are specialised to 16."""


@dataclass(frozen=True)
class ArrayPlace:
    """Where an array lies in a buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + prod(self.shape) * self.dtype.itemsize

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The array, as a view of (bytes,) uint8."""
        return buffer[self.offset : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class PartPlaces:
    """Where the arrays of a part lie.

    Attributes:
        index: the arrays of `PartArrays.index`.
    """

    index: tuple[ArrayPlace, ...]
    values: ArrayPlace
    items: int
    stored: int


@dataclass(frozen=True)
class Chunk:
    """Some of the nonzeros of a tensor, packed.

    Attributes:
        nbytes: bytes of its buffer.
        first: the first row of the result that it adds to, where its rows are numbered from there; else 0.
        rows: how many rows it numbers so; 0 where rows are known by coordinates.
        variant: which of the stream's programs it takes.
    """

    nnz: int
    nbytes: int
    first: int
    rows: int
    variant: int
    parts: tuple[PartPlaces, ...]

    def views(self, buffer: torch.Tensor) -> tuple[list[PartArrays], list[torch.Tensor]]:
        """The arrays and the values of all parts, as views of (at least `nbytes`,) uint8."""
        arrays = [PartArrays(tuple(p.of(buffer) for p in own.index), own.items, own.stored) for own in self.parts]
        return arrays, [own.values.of(buffer) for own in self.parts]


PackedPart: TypeAlias = tuple[PartArrays, torch.Tensor]
"""The arrays and the values of a part of a chunk, wherever they lie."""


def host_bytes(nbytes: int, pinned: bool = False) -> torch.Tensor:
    """(nbytes,) uint8 of host memory, which a GPU copies from at full speed where it is pinned."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def placed(parts: Sequence[PackedPart]) -> tuple[tuple[PartPlaces, ...], int]:
    """Places for the tensors of parts, one after the other, and the bytes that they take."""
    at = 0

    def place(tensor: torch.Tensor) -> ArrayPlace:
        nonlocal at
        found = ArrayPlace(tensor.dtype, tuple(tensor.shape), at)
        at = -(-found.end // ALIGNED) * ALIGNED
        return found

    places = tuple(
        PartPlaces(tuple(map(place, arrays.index)), place(values), arrays.items, arrays.stored)
        for arrays, values in parts
    )
    return places, at


def fill(buffer: torch.Tensor, places: Sequence[PartPlaces], parts: Sequence[PackedPart]) -> None:
    """Copy the tensors of parts to their places; the bytes between them become 0."""
    end = 0
    for own, (arrays, values) in zip(places, parts, strict=True):
        for place, array in zip((*own.index, own.values), (*arrays.index, values), strict=True):
            buffer[end : place.offset].zero_()
            place.of(buffer).copy_(array)
            end = place.end
    buffer[end:].zero_()


Release: TypeAlias = Callable[[], None]
"""Waits until a buffer has been read."""
Feed: TypeAlias = tuple[Callable[[int], torch.Tensor], Callable[[int, Release], None]]
"""What gives a chunk's bytes, and what is told where they are read once a wait is over."""


class ChunkMemory:
    """Chunks in memory, pinned where a GPU copies from it. It is the sink of `cut`, too.

    Attributes:
        passing: True if the memory that chunks are in goes when a feed ends.
    """

    passing = False

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
        buffers = [self.buffers[n] for n in order]
        yield buffers.__getitem__, lambda position, wait: None

    def close(self) -> None:
        """Free the memory."""
        self.closed = True
        self.buffers.clear()


def release_pinned() -> None:
    """Give back the pinned memory that torch keeps for later, where it has a way to."""
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()
