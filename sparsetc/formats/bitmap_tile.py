"""``bitmap_tile``: the tensor cut into tiles, a bit for every position of a non-empty tile (HLS-D; HLSTO, section V-A).

        item_ptr   [ 0        3     7 …     tiles of each work item, all of one row of output blocks
        item_word  [ ib0    | ib1 | …       block coordinates the tiles of an item share
        tile_word  [ jk jk jk | …           block coordinates of each tile's other modes
        value_ptr  [ 0 n0 n0+n1 …           first value of each tile
        bits       [ tile 0 | tile 1 | …    a bit a position in the order of ``view.sequence``, in words
        values     [ n0 | n1 | …            the nonzeros of each tile, in that order

A word holds the positions that one column of a dot contracts, 32 at most, so that a value's place is the count of the
bits before its word, and in its word.
"""

from __future__ import annotations

import torch

from sparsetc.formats.base import Packed, index_dtype, register_format
from sparsetc.formats.tiles import coordinates, refuse_duplicates, tiled, tiles_of_nonzeros, view_of
from sparsetc.ir.plan import Layout
from sparsetc.ir.view import View

WORDS = {8: torch.uint8, 16: torch.uint16, 32: torch.int32}


@register_format
class BitmapTile:
    """Tiles of which the nonzeros are stored."""

    name = "bitmap_tile"

    def view(self, shape: tuple[int, ...], layout: Layout) -> View:
        """Ranges of tiles that share the item modes' block coordinates."""
        return view_of(shape, layout, bitmap=True)

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], layout: Layout) -> Packed:
        """Sort tiles by (item, other) modes, and the nonzeros of a tile by position."""
        view, nnz = self.view(shape, layout), coords.shape[1]
        t = tiled(coords, shape, layout, view)
        key, order = torch.sort(t.tile * view.volume + t.place)
        if bool((key[1:] == key[:-1]).any()):
            refuse_duplicates()
        value_ptr = torch.zeros(t.tiles + 1, dtype=torch.long, device=coords.device)
        value_ptr[1:] = torch.cumsum(torch.bincount(t.tile, minlength=t.tiles), 0)
        arrays = t.arrays | {
            "value_ptr": value_ptr.to(index_dtype(nnz)),
            "bits": packed_bits(t.tile, t.place, t.tiles, view),
        }
        return Packed(
            self.name,
            layout,
            shape,
            nnz,
            view,
            arrays,
            t.by_tile[order],
            nnz,
            t.items,
            heads=t.heads,
            cut=(t.cut, False),
        )

    def unpack(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Walk the bits that are set back to coordinates."""
        tile, nonzero = tiles_of_nonzeros(packed)
        return coordinates(packed, tile, places_of(packed)), nonzero


def packed_bits(tile: torch.Tensor, place: torch.Tensor, tiles: int, view: View) -> torch.Tensor:
    """(tiles * volume / word,) words in which the bits of these positions are set."""
    word = view.word
    each = view.words
    sums = torch.zeros(tiles * each, dtype=torch.long, device=tile.device)
    sums.index_add_(0, tile * each + place // word, torch.ones_like(place) << (place % word))
    narrow = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[word]
    wrapped = torch.where(sums >= 1 << (word - 1), sums - (1 << word), sums) if word > 8 else sums
    return wrapped.to(narrow).view(WORDS[word])


def places_of(packed: Packed) -> torch.Tensor:
    """(stored,) the position of every stored value in its tile."""
    view = packed.view
    word = view.word
    bits = packed.arrays["bits"]
    wide = bits.view(torch.int16).long() & 0xFFFF if bits.dtype == torch.uint16 else bits.long() & 0xFFFFFFFF
    set_ = (wide.unsqueeze(1) >> torch.arange(word, device=bits.device)) & 1
    return torch.nonzero(set_.flatten()).flatten() % (view.words * word)
