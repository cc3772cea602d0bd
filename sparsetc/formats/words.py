"""Linearised coordinates: several modes in one stored word, ceil(log2 dim) bits each (HLS, section V-B; BLCO).

In: coordinates and sizes. Out: integer words and the `Field`s that say where each mode's bits lie. The first mode has
the highest bits, so words sort as coordinates do. A set of modes that needs more than 63 bits takes a second word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsetc.ir.view import Coordinate, Field, word_bits

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


def widths(coordinates: Sequence[Coordinate]) -> list[int]:
    """Bytes of an element of each array of words."""
    stored = [c for c in coordinates if isinstance(c, Field)]
    return [4 if word_bits(stored, name) <= 31 else 8 for name in dict.fromkeys(f.array for f in stored)]


def encode(
    coords: torch.Tensor | Sequence[torch.Tensor], coordinates: Sequence[Coordinate], narrow: bool = False
) -> dict[str, torch.Tensor]:
    """The words of every nonzero, by array name: uint16 (where `narrow`), int32 or int64, the smallest that serves."""
    stored = [c for c in coordinates if isinstance(c, Field)]
    words: dict[str, torch.Tensor] = {}
    for field in stored:
        part = coords[field.mode] << field.shift if field.shift else coords[field.mode]
        words[field.array] = words[field.array] | part if field.array in words else part
    return {name: _shrunk(word, name, stored, narrow) for name, word in words.items()}


def decode(words: dict[str, torch.Tensor], coordinates: Sequence[Coordinate]) -> dict[int, torch.Tensor]:
    """Coordinates by mode, int64."""
    stored = [c for c in coordinates if isinstance(c, Field)]
    return {f.mode: (_long(words[f.array]) >> f.shift) & ((1 << f.bits) - 1) for f in stored}


def _long(word: torch.Tensor) -> torch.Tensor:
    return word.view(torch.int16).long() & 0xFFFF if word.dtype == torch.uint16 else word.long()


def _shrunk(word: torch.Tensor, name: str, coordinates: Sequence[Field], narrow: bool) -> torch.Tensor:
    bits = word_bits(coordinates, name)
    if narrow and bits <= 16:  # unsigned, so that a GPU loads it with its upper bits zero and no instruction more
        return word.to(torch.int32).to(torch.int16).view(torch.uint16)
    return word.to(torch.int32 if bits <= 31 else torch.int64).contiguous()
