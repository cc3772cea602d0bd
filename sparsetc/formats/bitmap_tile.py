"""``bitmap_tile``: the tensor cut into tiles, a bit for every position of a non-empty tile (HLS-D; HLSTO, section V-A).

        item_ptr   [ 0        3     7 …     tiles of each work item, all of one row of output blocks
        item_word  [ ib0    | ib1 | …       block coordinates the tiles of an item share
        tile_word  [ jk jk jk | …           block coordinates of each tile's other modes
        value_ptr  [ 0 n0 n0+n1 …           first value of each tile
        bits       [ tile 0 | tile 1 | …    a bit a position in the order of their sequence, in words
        values     [ n0 | n1 | …            the nonzeros of each tile, in that order

A word holds the positions that one column of a dot contracts, 32 at most, so that a value's place is the count of the
bits before its word, and in its word.
"""

from __future__ import annotations

import torch

from sparsetc.formats.base import Packed, index_dtype, register_format
from sparsetc.formats.bits import packed_bits
from sparsetc.formats.tiles import coordinates, places_of, sides_named, tiled, tiles_of_nonzeros, view_of
from sparsetc.ir.nest.nest import Nest
from sparsetc.ir.plan import Storage


@register_format
class BitmapTile:
    """Tiles of which the nonzeros are stored."""

    name, even = "bitmap_tile", True

    def parameters(self, order: int) -> tuple[str, ...]:
        """The side of a tile along each mode."""
        return sides_named(order)

    def view(self, shape: tuple[int, ...], storage: Storage) -> Nest:
        """Ranges of tiles that share the item modes' block coordinates."""
        return view_of(shape, storage, bitmap=True)

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
        """Sort tiles by (item, other) modes, and the nonzeros of a tile by position."""
        view, nnz = self.view(shape, storage), coords.shape[1]
        t = tiled(coords, shape, storage, view)
        value_ptr = torch.zeros(t.tiles + 1, dtype=torch.long, device=coords.device)
        value_ptr[1:] = torch.cumsum(torch.bincount(t.tile, minlength=t.tiles), 0)
        arrays = t.arrays | {
            "value_ptr": value_ptr.to(index_dtype(nnz)),
            "bits": packed_bits(t.tile, t.place, t.tiles, view.values.volume, view.values.word).flatten(),
        }
        return t.packed(self.name, storage, shape, arrays, t.by_tile)

    def unpack(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Walk the bits that are set back to coordinates."""
        tile, nonzero = tiles_of_nonzeros(packed)
        return coordinates(packed, tile, places_of(packed)), nonzero
