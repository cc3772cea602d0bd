"""``dense_tile``: the tensor cut into tiles, every position of a non-empty tile stored (HLS-D without its bitmap).

        item_ptr   [ 0        3     7 …     tiles of each work item, all of one row of output blocks
        item_word  [ ib0    | ib1 | …       block coordinates the tiles of an item share
        tile_word  [ jk jk jk | …           block coordinates of each tile's other modes
        values     [ tile 0 | tile 1 | …    row-major, 0 where there is no nonzero

Sides are `layout.param("side_m")`, else as long as the mode and a volume of 4,096 positions allow, 16 at most. A zero
position is multiplied like any other: an infinity or NaN of a dense operand therefore reaches every row of its tiles.
"""

from __future__ import annotations

from math import prod

import torch

from sparsetc import coords as crd
from sparsetc.errors import FormatError
from sparsetc.formats import words
from sparsetc.formats.base import Packed, index_dtype, place_in_run, register_format, runs
from sparsetc.ir.plan import Layout
from sparsetc.ir.view import View, tiles_along

VOLUME = 4096
"""Positions of a tile: 16 a mode of a third-order tensor (HLSTO, section VII-A3)."""
SIDE = 16


def sides_of(shape: tuple[int, ...], layout: Layout | None = None) -> tuple[int, ...]:
    """The sides a layout names, or the largest powers of two that suit the sizes and the volume."""
    given = dict(layout.params) if layout else {}
    sides = [min(SIDE, 1 << max(n - 1, 0).bit_length()) for n in shape]
    while prod(sides) > VOLUME:
        sides[sides.index(max(sides))] //= 2
    return tuple(given.get(f"side_{m}", side) for m, side in enumerate(sides))


def sorted_by_tile(
    coords: torch.Tensor, shape: tuple[int, ...], sides: tuple[int, ...], order: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nonzeros sorted by their tiles' coordinates, modes in `order`.

    Returns (tile coordinates (order, nnz), which nonzero each is, True at the first of each tile).
    """
    blocks = coords // torch.tensor(sides, device=coords.device).unsqueeze(1)
    grid = tiles_along(shape, sides)
    keys = crd.sort_keys(blocks[list(order)], [grid[m] for m in order])
    by_tile = crd.lexsort(keys)
    return blocks[:, by_tile], by_tile, crd.starts_of_runs([k[by_tile] for k in keys])


@register_format
class DenseTile:
    """Dense tiles."""

    name = "dense_tile"

    def view(self, shape: tuple[int, ...], layout: Layout) -> View:
        """Ranges of tiles that share the item modes' block coordinates."""
        sides = sides_of(shape, layout)
        grid = tiles_along(shape, sides)
        item = words.fields(layout.item, grid, "item_word")
        tile = words.fields((*layout.lane, *layout.leaf), grid, "tile_word")
        return View(len(shape), item, tile, (), blocks=False, lanes=1, sides=sides)

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], layout: Layout) -> Packed:
        """Sort tiles by (item, other) modes; cut the tiles of a row at `grain` positions."""
        view, nnz, device = self.view(shape, layout), coords.shape[1], coords.device
        order = (*layout.item, *layout.lane, *layout.leaf)
        blocks, by_tile, starts = sorted_by_tile(coords, shape, view.sides, order)
        tile = torch.cumsum(starts, 0) - 1
        slot = torch.zeros(nnz, dtype=torch.long, device=device)
        for mode, side in enumerate(view.sides):
            slot = slot * side + coords[mode, by_tile] % side
        heads = torch.nonzero(starts).flatten()
        tiles = heads.numel()
        positions = torch.full((tiles * view.volume,), -1, dtype=torch.long, device=device)
        positions[tile * view.volume + slot] = by_tile
        if int((positions >= 0).sum()) != nnz:
            raise FormatError("dense tiles hold one value a position: coalesce the operand, which has duplicates")
        of_tiles = blocks[:, heads]
        grid = view.stored_shape(shape)
        item_keys = crd.sort_keys(of_tiles[list(layout.item)], [grid[m] for m in layout.item]) if layout.item else []
        rows = crd.starts_of_runs(item_keys) if item_keys else torch.arange(tiles, device=device) == 0
        grain = max(1, layout.grain // view.volume) if layout.grain else 0
        flags = rows | (place_in_run(rows) % grain == 0) if grain else rows
        item_ptr = runs(flags)
        of_items = item_ptr[:-1]
        arrays = {
            "item_ptr": item_ptr.to(index_dtype(tiles)),
            **words.encode(of_tiles[:, of_items], view.item),
            **words.encode(of_tiles, view.lane),
        }
        first = by_tile[heads]
        return Packed(
            self.name,
            layout,
            shape,
            nnz,
            view,
            arrays,
            positions,
            positions.numel(),
            of_items.numel(),
            heads=(first[of_items], first),
            cut=(of_items.numel() > int(rows.sum()), False),
            padded=positions.numel() != nnz,
        )

    def unpack(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Walk positions back to coordinates; those that came from a nonzero are kept."""
        view, positions = packed.view, packed.positions
        assert positions is not None
        device = positions.device
        at = torch.nonzero(positions >= 0).flatten()
        tile = at // view.volume
        item = torch.repeat_interleave(
            torch.arange(packed.items, device=device), torch.diff(packed.arrays["item_ptr"].long())
        )
        found = {m: c[item[tile]] for m, c in words.decode(packed.arrays, view.item).items()}
        found |= {m: c[tile] for m, c in words.decode(packed.arrays, view.lane).items()}
        rest = at % view.volume
        coords = []
        for mode in reversed(range(view.order)):
            coords.append(found[mode] * view.sides[mode] + rest % view.sides[mode])
            rest = rest // view.sides[mode]
        return torch.stack(coords[::-1]), positions[at]
