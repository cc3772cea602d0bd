"""Bitmaps: a bit a position of a tile, in words, the first position in the lowest bit.

In: positions that have a value. Out: words, and positions again, for both formats that have bitmaps.
"""

from __future__ import annotations

import torch

WORDS = {8: torch.uint8, 16: torch.uint16, 32: torch.int32, 64: torch.int64}
"""Types of words by their bits: unsigned where torch has it, so that a kernel loads them with upper bits zero."""
_SIGNED = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def packed_bits(tile: torch.Tensor, place: torch.Tensor, tiles: int, volume: int, word: int) -> torch.Tensor:
    """(tiles, words of a tile): `word` bits each, those of the positions `place` (n,) of tiles `tile` (n,) set."""
    each, bit = -(-volume // word), (place % word).long()
    value = 1 << bit  # of 64 bits the last is the sign already
    if word in (16, 32):
        value.masked_fill_(bit == word - 1, -(1 << (word - 1)))
    del bit
    sums = torch.zeros(tiles * each, dtype=_SIGNED.get(word, torch.uint8), device=tile.device)
    sums.index_add_(0, (tile * each).add_(place // word), value.to(sums.dtype))  # distinct bits, so adding sets them
    return sums.view(WORDS[word]).view(tiles, each)


def narrowed(words: torch.Tensor, word: int) -> torch.Tensor:
    """Bits in words of fewer, as a little-endian machine has them in memory; (tiles, words) likewise."""
    return words.contiguous().view(WORDS[word])


def set_bits(words: torch.Tensor) -> torch.Tensor:
    """(tiles, words) -> (tiles, positions) bool, padding of the last word included."""
    bits = words.element_size() * 8
    wide = (words.view(_SIGNED[bits]) if bits > 8 else words).long()
    return ((wide.unsqueeze(-1) >> torch.arange(bits, device=words.device)) & 1).flatten(1) == 1
