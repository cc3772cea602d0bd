"""Linearised coordinates: several modes in one stored word, ceil(log2 dim) bits each (HLS, section V-B; BLCO).

In: coordinates and sizes. Out: integer words and the `Field`s that say where each mode's bits lie. The first mode has
the highest bits, so words sort as coordinates do. A set of modes that needs more than 63 bits takes a second word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sparsetc.ir.nest.modes import Field, ModeCoordinate, word_bits


class ByMode(Protocol):
    """Coordinates by mode, (n,) int64 each; a list of them is one."""

    def __getitem__(self, mode: int, /) -> torch.Tensor:
        """The coordinates of a mode."""


WORD_BITS = 63
"""Bits of an int64 word that leave it non-negative, so that a shift need not be masked."""


def bits_of(size: int) -> int:
    """Bits that hold every coordinate of a mode of this size."""
    return max(size - 1, 0).bit_length()


def fields(modes: Sequence[int], shape: Sequence[int], name: str) -> tuple[Field, ...]:
    """Where each mode's bits lie in words called `name`, `name_1`, …"""
    groups: list[list[int]] = [[]]
    for mode in modes:
        if sum(bits_of(shape[m]) for m in groups[-1]) + bits_of(shape[mode]) > WORD_BITS:
            groups.append([])
        groups[-1].append(mode)
    found: list[Field] = []
    for number, group in enumerate(groups):
        array = name if number == 0 else f"{name}_{number}"
        below = sum(bits_of(shape[m]) for m in group)
        for place, mode in enumerate(group):
            bits = bits_of(shape[mode])
            below -= bits
            found.append(Field(mode, array, below, bits, top=place == 0))
    return tuple(found)


def widths(coordinates: Sequence[ModeCoordinate]) -> list[int]:
    """Bytes of an element of each array of words."""
    names = dict.fromkeys(field.word.array for c in coordinates for field in c.fields)
    return [4 if word_bits(coordinates, name) <= 31 else 8 for name in names]


def encode(
    coords: torch.Tensor | ByMode, coordinates: Sequence[ModeCoordinate], narrow: bool = False
) -> dict[str, torch.Tensor]:
    """The words of every nonzero, by array name: uint16 (where `narrow`), int32 or int64, the smallest that serves."""
    words: dict[str, torch.Tensor] = {}
    for mode, field in ((c.mode, field) for c in coordinates for field in c.fields):
        part, name = coords[mode] << field.shift if field.shift else coords[mode], field.word.array
        if name in words:  # what was shifted is no one else's
            part = part.bitwise_or_(words[name]) if field.shift else part | words[name]
        words[name] = part
    return {name: _shrunk(words.pop(name), name, coordinates, narrow) for name in list(words)}


def decode(words: dict[str, torch.Tensor], coordinates: Sequence[ModeCoordinate]) -> dict[int, torch.Tensor]:
    """Coordinates by mode, int64."""
    return {c.mode: field.of(whole(words[field.word.array])) for c in coordinates for field in c.fields}


def whole(word: torch.Tensor) -> torch.Tensor:
    """Words as int64; those of 16 bits are unsigned."""
    return word.view(torch.int16).long() & 0xFFFF if word.dtype == torch.uint16 else word.long()


def _shrunk(word: torch.Tensor, name: str, coordinates: Sequence[ModeCoordinate], narrow: bool) -> torch.Tensor:
    bits = word_bits(coordinates, name)
    if narrow and bits <= 16:  # unsigned, so that a GPU loads it with its upper bits zero and no instruction more
        return word.to(torch.int32).to(torch.int16).view(torch.uint16)
    return word.to(torch.int32 if bits <= 31 else torch.int64).contiguous()
