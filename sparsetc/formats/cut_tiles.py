"""``dense_tile`` and ``bitmap_tile``: the tensor cut into tiles; those with nonzeros are stored (HLS-D; HLSTO).

        item_ptr   [ 0        3     7 …     tiles of each work item, all of one row of output blocks
        item_word  [ ib0    | ib1 | …       block coordinates the tiles of an item share
        tile_word  [ jk jk jk | …           block coordinates of each tile's other modes
    dense_tile, every position of a tile:
        values     [ tile 0 | tile 1 | …    the positions of each tile in the order of their sequence, 0 where empty
    bitmap_tile, a bit for every position (section V-A):
        value_ptr  [ 0 n0 n0+n1 …           first value of each tile
        bits       [ tile 0 | tile 1 | …    a bit a position in the order of their sequence, in words
        values     [ n0 | n1 | …            the nonzeros of each tile, in that order

Sides are `storage.param("side_m")`, else as long as the mode and a volume of 4,096 positions allow, 16 at most. A zero
position of a dense tile is multiplied like any other: an infinity or NaN of a dense operand therefore reaches every row
of its tiles. A word holds the positions that one column of a dot contracts, 32 at most, so that a value's place is the
count of the bits before its word, and in its word.
"""

from __future__ import annotations

import torch

from sparsetc.ir.nest.nest import Nest
from sparsetc.ir.plan import Storage
from sparsetc.packing.base import Packed, index_dtype
from sparsetc.packing.tiles import sides_named, tiled, view_of
from sparsetc.packing.words import packed_bits
from sparsetc.planner.registry import register_format


@register_format
class DenseTile:
    """Dense tiles."""

    name, even = "dense_tile", True

    def parameters(self, order: int) -> tuple[str, ...]:
        """The side of a tile along each mode."""
        return sides_named(order)

    def view(self, shape: tuple[int, ...], storage: Storage) -> Nest:
        """Ranges of tiles that share the item modes' block coordinates."""
        return view_of(shape, storage, bitmap=False)

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
        """Sort tiles by (item, other) modes; cut the tiles of a row at `max_item_nnz` positions."""
        view = self.view(shape, storage)
        t = tiled(coords, shape, storage, view)
        positions = torch.full((t.tiles * view.values.volume,), -1, dtype=torch.long, device=coords.device)
        positions[t.tile.mul_(view.values.volume).add_(t.place)] = t.by_tile
        return t.packed(self.name, storage, shape, t.arrays, positions)


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
