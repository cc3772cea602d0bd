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
    each = -(-volume // word)
    sums = torch.zeros(tiles * each, dtype=torch.long, device=tile.device)
    # Distinct bits, so adding sets them; the 64th is the sign.
    sums.index_add_(0, tile * each + place // word, torch.ones_like(place) << (place % word))
    if word == 8:
        return sums.to(torch.uint8).view(tiles, each)
    wrapped = torch.where(sums >= 1 << (word - 1), sums - (1 << word), sums) if word < 64 else sums
    return wrapped.to(_SIGNED[word]).view(WORDS[word]).view(tiles, each)


def narrowed(words: torch.Tensor, word: int) -> torch.Tensor:
    """Bits in words of fewer, as a little-endian machine has them in memory; (tiles, words) likewise."""
    return words.contiguous().view(WORDS[word])


def set_bits(words: torch.Tensor) -> torch.Tensor:
    """(tiles, words) -> (tiles, positions) bool, padding of the last word included."""
    bits = words.element_size() * 8
    wide = (words.view(_SIGNED[bits]) if bits > 8 else words).long()
    return ((wide.unsqueeze(-1) >> torch.arange(bits, device=words.device)) & 1).flatten(1) == 1
