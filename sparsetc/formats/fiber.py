"""``fiber``: compressed fibers, side by side (any leaf modes; CSF as in MM-CSF, laid out as sliced ELL for a GPU).

A fiber is the nonzeros that share the item and lane modes. Fibers longer than `max_fiber_len` are cut; those of a row
are ordered by length, 2^20 at a time, and `lanes` of them make a block, in which step n takes the n-th nonzero of
each:

        item_ptr   [ 0     2 …            blocks of each work item, all of one row; absent where each has one
        block_ptr  [ 0   12   20 …        first stored nonzero of each block (a multiple of the lanes)
        lane_word  [ j0 j3 j1 j7 | …      the coordinates the nonzeros of a fiber share
        lane_len   [  3  3  3  2 | …
        word       [ k  k  k  k           step 0 of the block's four fibers
                     k  k  k  k           step 1
                     k  k  k  .           step 2: the last lane is padding
        values       likewise, 0 in padding

Because fibers of like length lie together, a block is padded by little, and all but its last steps need no mask.
With one lane this is plain CSF: block_ptr are the fiber pointers. With no item modes and the output's modes on the
lanes, a lane is a short output row.
"""

from __future__ import annotations

import torch

from sparsetc.formats import words
from sparsetc.formats.base import Packed, index_dtype, register_format, runs
from sparsetc.formats.fiber_blocks import Blocks, blocks_of
from sparsetc.formats.nonzeros import Nonzeros, Taken
from sparsetc.ir.nest.nest import Nest
from sparsetc.ir.nest.nest import blocks as blocks_nest
from sparsetc.ir.plan import Storage
from sparsetc.tensor import coords as crd


@register_format
class Fiber:
    """Blocks of fibers."""

    name = "fiber"

    def parameters(self, order: int) -> tuple[str, ...]:
        """None."""
        return ()

    def view(self, shape: tuple[int, ...], storage: Storage) -> Nest:
        """Blocks of fibers that share the item and lane modes."""
        item = words.fields(storage.item, shape, "item_word")
        lane = words.fields(storage.lane, shape, "lane_word")
        leaf = words.fields(storage.leaf, shape, "word")
        # A block has a nonzero a lane or more, so that an item of so few has no other.
        alone = 1 < storage.lanes >= storage.max_item_nnz > 0
        return blocks_nest(item, lane, leaf, storage.lanes, alone=alone, narrow=storage.narrow)

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
        """Sort by (item, lane, leaf) modes, cut fibers, deal them to blocks and blocks to items."""
        nnz = coords.shape[1]
        nonzeros = Nonzeros.sorted(coords, shape, (*storage.item, *storage.lane, *storage.leaf))
        blocks = blocks_of(nonzeros, shape, storage)
        item_ptr, rows = _items(blocks, storage.max_item_nnz)
        view, lanes = self.view(shape, storage), storage.lanes
        first = nonzeros.numbers(blocks.lane_start.index_select(0, item_ptr[:-1] * lanes))
        lane, lane_len = nonzeros.numbers(blocks.lane_start), blocks.lane_len
        unused = bool((lane < 0).any())
        items = {} if view.items.size else {"item_ptr": item_ptr.to(index_dtype(lane.numel()))}
        arrays = {
            **items,
            "block_ptr": blocks.ptr,
            "block_full": lane_len.view(-1, lanes).amin(1) if lanes > 1 else lane_len,
            "lane_len": _lengths(lane_len, storage.narrow),
            **words.encode(Taken(coords, first), view.levels[0]),
            **words.encode(Taken(coords, lane), view.levels[1]),
        }
        split_rows, split, stored = first.numel() > rows, blocks.split, blocks.stored
        at = nonzeros.numbers(blocks.sources())
        del blocks, nonzeros
        arrays |= words.encode(Taken(coords, at), view.levels[2], narrow=storage.narrow)
        own = (self.name, storage, shape, nnz, view, arrays, at, stored, first.numel())
        return Packed(*own, (first, lane), split_rows, split, stored != nnz or unused)

    def unpack(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Walk blocks back to nonzeros: position -> block -> lane and step."""
        a, lanes, device = packed.arrays, packed.view.lanes, packed.arrays["block_ptr"].device
        block_ptr = a["block_ptr"].long()
        at = torch.arange(packed.stored, device=device)
        block = torch.repeat_interleave(torch.arange(block_ptr.numel() - 1, device=device), torch.diff(block_ptr))
        fiber = block * lanes + (at - block_ptr[block]) % lanes
        live = (at - block_ptr[block]) // lanes < a["lane_len"][fiber].long()
        item = block
        if not packed.view.items.size:
            blocks = torch.diff(a["item_ptr"].long())
            item = torch.repeat_interleave(torch.arange(packed.items, device=device), blocks)[block]
        found = {}
        for level, index in zip(packed.view.levels, (item, fiber, at), strict=True):
            for mode, value in words.decode(a, level).items():
                found[mode] = value[index][live]
        positions = packed.positions if packed.positions is not None else at
        return torch.stack([found[m] for m in range(len(packed.shape))]), positions[live]


def _lengths(lane_len: torch.Tensor, narrow: bool) -> torch.Tensor:
    """Nonzeros of each lane in 16 bits, where they fit and only kernels read them."""
    fits = narrow and lane_len.numel() and int(lane_len.max()) < 1 << 15
    return lane_len.short() if fits else lane_len.clone()


def _items(blocks: Blocks, most: int) -> tuple[torch.Tensor, int]:
    """(items + 1,) the first block of each work item, and how many rows there are: no item mixes rows.

    A row of more than `most` stored nonzeros is cut where its blocks begin another so many; 0 cuts none.
    """
    flags = crd.starts_of_runs([blocks.row]) if blocks.row.numel() else blocks.row.bool()
    rows = torch.nonzero(flags).flatten()
    if 0 < most < blocks.stored:
        number = blocks.ptr[:-1] - blocks.ptr.index_select(0, rows).index_select(0, blocks.row)
        number = number.div_(most, rounding_mode="floor")
        flags[1:] |= number[1:] != number[:-1]
    return runs(flags), rows.numel()
