"""Tiles as bits and packed values, expanded by what generated torch programs call."""

from __future__ import annotations

import pytest
import torch

from sparsetc.packing.words import packed_bits
from sparsetc.runtime.calls import expanded


@pytest.mark.parametrize(("volume", "word"), [(8, 8), (40, 16), (64, 32), (5, 8)])
def test_tiles_are_expanded_in_order_or_from_where_their_values_begin(volume: int, word: int) -> None:
    g = torch.Generator().manual_seed(volume)
    whole = torch.randint(1, 9, (6, volume), generator=g) * (torch.rand(6, volume, generator=g) < 0.4)
    tile, place = torch.nonzero(whole, as_tuple=True)
    bits = packed_bits(tile, place, 6, volume, word).view(6, -1)
    values = whole[tile, place]
    assert torch.equal(expanded(bits, values, word, volume), whole)
    begins = torch.searchsorted(tile, torch.arange(6))
    some = torch.tensor([4, 0, 4])
    assert torch.equal(expanded(bits[some], values, word, volume, begins[some]), whole[some])
