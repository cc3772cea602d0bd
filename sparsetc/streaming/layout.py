"""Where the arrays of a chunk lie in its buffer: one stretch of bytes, so that one copy brings all of them.

In: the tensors of a packed chunk. Out: `Chunk`, the places of its arrays; a buffer that holds them; and views of such a
buffer, on whatever device it is, as programs take them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from sparsetc.codegen.launch import PartArrays

ALIGNED = 256
"""Bytes at whose multiples arrays begin, as those that CUDA allocates do: kernels are specialised to 16."""


@dataclass(frozen=True)
class Place:
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
    """Where the arrays of a part lie."""

    index: tuple[Place, ...]
    """The arrays of `PartArrays.index`."""
    values: Place
    items: int
    stored: int


@dataclass(frozen=True)
class Chunk:
    """Some of the nonzeros of a tensor, packed."""

    nnz: int
    nbytes: int
    """Bytes of its buffer."""
    first: int
    """The first row of the result that it adds to, where its rows are numbered from there; else 0."""
    rows: int
    """How many rows it numbers so; 0 where rows are known by coordinates."""
    variant: int
    """Which of the stream's programs it takes."""
    parts: tuple[PartPlaces, ...]

    def views(self, buffer: torch.Tensor) -> tuple[list[PartArrays], list[torch.Tensor]]:
        """The arrays and the values of all parts, as views of (at least `nbytes`,) uint8."""
        arrays = [PartArrays(tuple(p.of(buffer) for p in own.index), own.items, own.stored) for own in self.parts]
        return arrays, [own.values.of(buffer) for own in self.parts]


@dataclass(frozen=True)
class PackedPart:
    """The tensors of a part of a chunk, wherever they lie."""

    arrays: PartArrays
    values: torch.Tensor


def host_bytes(nbytes: int, pinned: bool = False) -> torch.Tensor:
    """(nbytes,) uint8 of host memory, which a GPU copies from at full speed where it is pinned."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def placed(parts: Sequence[PackedPart]) -> tuple[tuple[PartPlaces, ...], int]:
    """Places for the tensors of parts, one after the other, and the bytes that they take."""
    at = 0

    def place(tensor: torch.Tensor) -> Place:
        nonlocal at
        found = Place(tensor.dtype, tuple(tensor.shape), at)
        at = -(-found.end // ALIGNED) * ALIGNED
        return found

    places = tuple(
        PartPlaces(tuple(map(place, p.arrays.index)), place(p.values), p.arrays.items, p.arrays.stored) for p in parts
    )
    return places, at


def fill(buffer: torch.Tensor, places: Sequence[PartPlaces], parts: Sequence[PackedPart]) -> None:
    """Copy the tensors of parts to their places; the bytes between them become 0."""
    end = 0
    for own, part in zip(places, parts, strict=True):
        for place, array in zip((*own.index, own.values), (*part.arrays.index, part.values), strict=True):
            buffer[end : place.offset].zero_()
            place.of(buffer).copy_(array)
            end = place.end
    buffer[end:].zero_()
