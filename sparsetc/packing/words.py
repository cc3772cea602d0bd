"""Stored coordinates: nonzeros in a format's order, words of several coordinates, and bitmaps.

In: coordinates, and which nonzeros; modes and sizes; positions of a tile that have a value. Out: rows of coordinates,
of which few are held at a time; integer words with ceil(log2 size) bits a mode or more (HLS, section V-B; BLCO) and the
`Field`s that say where these lie; bits, one a position of a tile, the first in the lowest bit of a word. The first mode
has the highest bits, so words sort as coordinates do; modes that need more than 63 bits take a second word. Bits that a
word has to spare go to its modes, so that shifts, and with them generated source, are the same for other sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from sparsetc.ir.nest import Field, ModeCoordinate, word_bits
from sparsetc.support import Ints
from sparsetc.tensor import coords as crd


@dataclass(frozen=True)
class Nonzeros:
    """Nonzeros in some order; indexing by a mode computes their (n,) coordinates.

    Attributes:
        coords: (order, nnz) of all nonzeros of a part, in lexicographic order.
        shape: sizes of the modes; where there are sides, how many tiles there are along each.
        numbers: (n,) which nonzero each is, -1 for none, whose coordinates are 0; None for all in the order given.
        sides: sides of the tiles whose coordinates are asked for; empty for the nonzeros' own.
        gaps: whether a number may be -1.
    """

    coords: Tensor
    shape: Ints
    numbers: Tensor | None = None
    sides: Ints = ()
    gaps: bool = True

    @classmethod
    def sorted(cls, coords: Tensor, shape: Ints, modes: Ints) -> Nonzeros:
        """Return all nonzeros, sorted by their modes in another order."""
        if modes == tuple(range(len(shape))):
            return cls(coords, shape)
        rows, sizes = crd.of_modes(coords, shape, modes)
        if crd.likely_sorted(rows[0]) and crd.is_coalesced(rows, sizes):
            return cls(coords, shape)
        return cls(coords, shape, crd.lexsort(rows, sizes))

    def __getitem__(self, mode: int) -> Tensor:
        row = self.coords[mode]
        if self.numbers is not None:
            if not row.numel():
                return torch.zeros_like(self.numbers)
            row = row.index_select(0, self.numbers.clamp(min=0) if self.gaps else self.numbers)
            row = row.masked_fill_(self.numbers < 0, 0) if self.gaps else row
        return row // self.sides[mode] if self.sides else row

    def at(self, places: Tensor, gaps: bool = True) -> Nonzeros:
        """Return the nonzeros at these places of the order; with `gaps`, a place of -1 holds none."""
        if self.numbers is None or not self.numbers.numel():
            return replace(self, numbers=places.long(), gaps=gaps)
        numbers = self.numbers.index_select(0, places.clamp(min=0) if gaps else places)
        return replace(self, numbers=numbers.masked_fill_(places < 0, -1) if gaps else numbers, gaps=gaps)

    def starts(self, modes: Ints) -> Tensor:
        """Return (n,) bool: True at the first nonzero and wherever these modes' coordinates change."""
        n = self.coords.shape[1] if self.numbers is None else self.numbers.numel()
        if not modes:
            fresh = torch.zeros(n, dtype=torch.bool, device=self.coords.device)
            fresh[:1] = True
            return fresh
        return crd.starts_of_runs(crd.sort_keys((self[m] for m in modes), [self.shape[m] for m in modes]))


WORD_BITS = 63
"""Bits of a non-negative int64 word: a shift needs no mask."""


def bits_of(size: int) -> int:
    """Bits that hold every coordinate of a mode of this size."""
    return max(size - 1, 0).bit_length()


def fields(modes: Sequence[int], shape: Sequence[int], name: str) -> tuple[Field, ...]:
    """Return the bit range of each mode in words called `name`, `name_1`, …"""
    return _fields(tuple(modes), tuple(shape), name)


@lru_cache(maxsize=1024)
def _fields(modes: Ints, shape: Ints, name: str) -> tuple[Field, ...]:
    groups: list[list[int]] = [[]]
    for mode in modes:
        if sum([bits_of(shape[m]) for m in groups[-1]]) + bits_of(shape[mode]) > WORD_BITS:
            groups.append([])
        groups[-1].append(mode)
    word_fields: list[Field] = []
    for number, group in enumerate(groups):
        array = name if number == 0 else f"{name}_{number}"
        bits = _spread([bits_of(shape[m]) for m in group])
        for place, mode in enumerate(group):
            word_fields.append(Field(mode, array, sum(bits[place + 1 :]), bits[place], top=place == 0))
    return tuple(word_fields)


WORD_WIDTHS = (16, 31, WORD_BITS)
"""Bits of the words that fields are put in, the signs of all but the first left out."""
STEPS = (8, 4, 2, 1)
"""Bits of fields after the first are rounded up to one of these: the largest that the word has room for."""


def _spread(bits: list[int]) -> list[int]:
    """Widen fields to fill their word; the first field gets the bits that the others, rounded up, leave."""
    width = next(width for width in WORD_WIDTHS if sum(bits) <= width)
    for step in STEPS:
        rounded = [-(-n // step) * step for n in bits[1:]]
        if bits[:1] and sum(rounded) + bits[0] <= width:
            return [width - sum(rounded), *rounded]
    return bits


def widths(coordinates: Sequence[ModeCoordinate]) -> list[int]:
    """Bytes of an element of each array of words."""
    names = dict.fromkeys(field.word.array for c in coordinates for field in c.fields)
    return [4 if word_bits(coordinates, name) <= 31 else 8 for name in names]


def encode(
    coords: Tensor | Nonzeros | Sequence[Tensor], coordinates: Sequence[ModeCoordinate], narrow: bool = False
) -> dict[str, Tensor]:
    """The words of every nonzero, by array name: uint16 (where `narrow`), int32 or int64, the smallest that serves."""
    words: dict[str, Tensor] = {}
    for mode, field in ((c.mode, field) for c in coordinates for field in c.fields):
        part, name = coords[mode] << field.shift if field.shift else coords[mode], field.word.array
        if name in words:  # what was shifted is no one else's
            part = part.bitwise_or_(words[name]) if field.shift else part | words[name]
        words[name] = part
    return {name: _shrunk(words.pop(name), name, coordinates, narrow) for name in list(words)}


def whole(word: Tensor) -> Tensor:
    """Return words as int64; words of 16 bits are unsigned."""
    return word.view(torch.int16).long() & 0xFFFF if word.dtype == torch.uint16 else word.long()


def _shrunk(word: Tensor, name: str, coordinates: Sequence[ModeCoordinate], narrow: bool) -> Tensor:
    bits = word_bits(coordinates, name)
    if narrow and bits <= 16:  # unsigned, so that a GPU loads it with its upper bits zero and no instruction more
        return word.to(torch.int32).to(torch.int16).view(torch.uint16)
    return word.to(torch.int32 if bits <= 31 else torch.int64).contiguous()


WORDS = {8: torch.uint8, 16: torch.uint16, 32: torch.int32, 64: torch.int64}
"""Types of words by their bits: unsigned if torch has it, so that a kernel loads them with upper bits zero."""
_SIGNED = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def packed_bits(tile: Tensor, place: Tensor, tiles: int, volume: int, word: int) -> Tensor:
    """Return the bitmaps (tiles, words a tile) of `word` bits, with the bit of each position `place` of `tile` set."""
    each, bit = -(-volume // word), (place % word).long()
    value = 1 << bit  # of 64 bits the last is the sign already
    if word in (16, 32):
        value.masked_fill_(bit == word - 1, -(1 << (word - 1)))
    del bit
    sums = torch.zeros(tiles * each, dtype=_SIGNED.get(word, torch.uint8), device=tile.device)
    sums.index_add_(0, (tile * each).add_(place // word), value.to(sums.dtype))  # distinct bits, so adding sets them
    return sums.view(WORDS[word]).view(tiles, each)


def narrowed(words: Tensor, word: int) -> Tensor:
    """Bits in words of fewer, as a little-endian machine has them in memory; (tiles, words) likewise."""
    return words.contiguous().view(WORDS[word])
