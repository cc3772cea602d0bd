"""Tiles stored as a bit a position and the values of the bits that are set -> all positions of them."""

from __future__ import annotations

import torch

from sparsetc.tensor.numbering import set_bits


def expanded(
    bits: torch.Tensor, values: torch.Tensor, word: int, volume: int, begins: torch.Tensor | None = None
) -> torch.Tensor:
    """(tiles, volume): the values at the positions whose bits are set, 0 at the others.

    Args:
        bits: (tiles, words) of `word` positions each, the lowest bit first; those past the tile's volume are 0.
        values: of the bits that are set, in order of tiles and positions.
        word: positions that a word stands for.
        volume: positions of a tile.
        begins: (tiles,) where the values of each begin; without it, those of the first tile begin at 0, of any other
            where those before it end.
    """
    has = set_bits(bits, word)
    tiles = values.new_zeros(has.shape)
    tiles[has] = values if begins is None else values[_places(has.sum(1), begins)]
    return tiles if volume == has.shape[1] else tiles[:, :volume].contiguous()


def _places(counts: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """The numbers from each beginning on, as many as its count."""
    owner = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    return (begins - torch.cumsum(counts, 0) + counts)[owner] + torch.arange(owner.numel(), device=counts.device)
