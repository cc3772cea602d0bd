"""``fiber``: compressed fibers, side by side (any leaf modes; CSF as in MM-CSF, laid out as sliced ELL for a GPU).

A fiber is the nonzeros that share the item and lane modes. Fibers longer than `max_fiber_len` are cut; those of an item
are ordered by length, and `lanes` of them make a block, in which step n takes the n-th nonzero of each:

        item_ptr   [ 0     2 …            blocks of each work item, all of one row
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

from dataclasses import dataclass

import torch

from sparsetc.formats import words
from sparsetc.formats.base import Packed, cut_runs, index_dtype, register_format, runs
from sparsetc.ir.nest.view import View
from sparsetc.ir.plan import Storage
from sparsetc.tensor import coords as crd


@dataclass(frozen=True)
class _Pieces:
    """Fibers after cutting, in the order they are stored: first nonzero (sorted order), length, row number."""

    start: torch.Tensor
    length: torch.Tensor
    row: torch.Tensor
    split: bool


@register_format
class Fiber:
    """Blocks of fibers."""

    name = "fiber"

    def parameters(self, order: int) -> tuple[str, ...]:
        """None."""
        return ()

    def view(self, shape: tuple[int, ...], storage: Storage) -> View:
        """Blocks of fibers that share the item and lane modes."""
        item = words.fields(storage.item, shape, "item_word")
        lane = words.fields(storage.lane, shape, "lane_word")
        leaf = words.fields(storage.leaf, shape, "word")
        return View(len(shape), item, lane, leaf, blocks=True, lanes=storage.lanes, narrow=storage.narrow)

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
        """Sort by (item, lane, leaf) modes, cut fibers, deal them to blocks and blocks to items."""
        order = (*storage.item, *storage.lane, *storage.leaf)
        in_operand_order = order == tuple(range(len(shape)))
        keys = crd.sort_keys(coords[list(order)], [shape[m] for m in order])
        positions = None if in_operand_order else crd.lexsort(keys)
        sorted_coords = coords if positions is None else coords[:, positions]
        pieces = _pieces(sorted_coords, shape, storage)
        return self._deal(sorted_coords, positions, shape, storage, pieces)

    def _deal(
        self,
        coords: torch.Tensor,
        positions: torch.Tensor | None,
        shape: tuple[int, ...],
        storage: Storage,
        pieces: _Pieces,
    ) -> Packed:
        lanes, nnz, device = storage.lanes, coords.shape[1], coords.device
        fiber, n_blocks, block_row = _blocks(pieces, lanes)
        lane_len = torch.zeros(n_blocks * lanes, dtype=torch.long, device=device)
        lane_len[fiber] = pieces.length
        table = lane_len.view(n_blocks, lanes)
        steps, full = (table.amax(1), table.amin(1)) if n_blocks else (lane_len, lane_len)
        block_ptr = torch.zeros(n_blocks + 1, dtype=torch.long, device=device)
        torch.cumsum(steps * lanes, 0, out=block_ptr[1:])
        stored = int(block_ptr[-1])
        padded = stored != nnz
        # Where each nonzero goes: step n of lane l of block b is stored at block_ptr[b] + n*lanes + l.
        owner = torch.repeat_interleave(torch.arange(pieces.length.numel(), device=device), pieces.length)
        step = torch.arange(nnz, device=device) - (torch.cumsum(pieces.length, 0) - pieces.length)[owner]
        source = pieces.start[owner] + step
        place = block_ptr[fiber[owner] // lanes] + step * lanes + fiber[owner] % lanes
        gathered = torch.full((stored,), -1, dtype=torch.long, device=device)
        gathered[place] = source
        lane_start = torch.full((n_blocks * lanes,), -1, dtype=torch.long, device=device)
        lane_start[fiber] = pieces.start
        item_flags = crd.starts_of_runs([block_row]) if n_blocks else torch.zeros(0, dtype=torch.bool, device=device)
        rows = item_flags
        if storage.max_item_nnz:
            item_flags = item_flags | _cut_rows(block_ptr, item_flags, storage.max_item_nnz)
        item_ptr = runs(item_flags)
        starts = lane_start[item_ptr[:-1] * lanes]
        view = self.view(shape, storage)
        leaves = _taken(coords, gathered) if padded or lanes > 1 else coords
        arrays = {
            "item_ptr": item_ptr.to(index_dtype(n_blocks * lanes)),
            "block_ptr": block_ptr.to(index_dtype(stored)),
            "block_full": full.int(),
            "lane_len": lane_len.int(),
            **words.encode(coords[:, starts], view.item),
            **words.encode(_taken(coords, lane_start), view.lane),
            **words.encode(leaves, view.leaf, narrow=storage.narrow),
        }
        at, first, lane = (_original(places, positions) for places in (gathered, starts, lane_start))
        items, padded = starts.numel(), padded or bool((lane_start < 0).any())
        own = (self.name, storage, shape, nnz, view, arrays, at, stored, items)
        return Packed(*own, (first, lane), items > int(rows.sum()), pieces.split, padded)

    def unpack(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Walk blocks back to nonzeros: position -> block -> lane and step."""
        a, lanes, device = packed.arrays, packed.view.lanes, packed.arrays["block_ptr"].device
        block_ptr = a["block_ptr"].long()
        at = torch.arange(packed.stored, device=device)
        block = torch.repeat_interleave(torch.arange(block_ptr.numel() - 1, device=device), torch.diff(block_ptr))
        fiber = block * lanes + (at - block_ptr[block]) % lanes
        live = (at - block_ptr[block]) // lanes < a["lane_len"][fiber].long()
        item = torch.repeat_interleave(torch.arange(packed.items, device=device), torch.diff(a["item_ptr"].long()))[
            block
        ]
        found = {}
        for level, index in zip(packed.view.levels, (item, fiber, at), strict=True):
            for mode, value in words.decode(a, level).items():
                found[mode] = value[index][live]
        positions = packed.positions if packed.positions is not None else at
        return torch.stack([found[m] for m in range(len(packed.shape))]), positions[live]


def _pieces(coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> _Pieces:
    """Fibers of the sorted nonzeros, cut at `max_fiber_len`, those of a row ordered by falling length."""
    nnz, device = coords.shape[1], coords.device
    shared = [*storage.item, *storage.lane]
    fibers = torch.zeros(nnz, dtype=torch.bool, device=device)
    if nnz:
        fibers[0] = True
    if shared and nnz:
        fibers = crd.starts_of_runs(crd.sort_keys(coords[shared], [shape[m] for m in shared]))
    bounds = cut_runs(fibers, storage.max_fiber_len)
    start, length = bounds[:-1], torch.diff(bounds)
    split = start.numel() > int(fibers.sum())
    row = torch.zeros_like(start)
    if storage.item and start.numel():
        keys = crd.sort_keys(coords[list(storage.item)][:, start], [shape[m] for m in storage.item])
        row = torch.cumsum(crd.starts_of_runs(keys), 0) - 1
    if storage.lanes > 1 and start.numel():
        longest = int(length.max())
        order = torch.argsort(row * (longest + 1) + (longest - length), stable=True)
        start, length, row = start[order], length[order], row[order]
    return _Pieces(start, length, row, split)


def _blocks(pieces: _Pieces, lanes: int) -> tuple[torch.Tensor, int, torch.Tensor]:
    """(place of each piece among all lanes, number of blocks, row of each block): blocks never mix rows."""
    if pieces.row.numel() == 0:
        return pieces.row, 0, pieces.row
    bounds = runs(crd.starts_of_runs([pieces.row]))
    count = (torch.diff(bounds) + lanes - 1) // lanes
    first = torch.cumsum(count, 0) - count
    fiber = first[pieces.row] * lanes + torch.arange(pieces.row.numel(), device=pieces.row.device) - bounds[pieces.row]
    rows = torch.arange(count.numel(), device=count.device)
    return fiber, int(count.sum()), torch.repeat_interleave(rows, count)


def _cut_rows(block_ptr: torch.Tensor, rows: torch.Tensor, most: int) -> torch.Tensor:
    """True at the blocks that begin another `most` stored nonzeros of their row."""
    start = block_ptr[:-1]
    row_start = torch.cummax(torch.where(rows, start, 0), 0).values
    number = (start - row_start) // most
    flags = torch.zeros_like(rows)
    flags[1:] = number[1:] != number[:-1]
    return flags


def _taken(coords: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Coordinates of the nonzeros at `places`; all 0 where padded."""
    if coords.shape[1] == 0:
        return coords.new_zeros((coords.shape[0], places.numel()))
    return torch.where(places < 0, 0, coords[:, places.clamp(min=0)])


def _original(places: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Places in sorted order -> nonzeros as given; -1 stays."""
    if positions is None or places.numel() == 0 or positions.numel() == 0:
        return places
    return torch.where(places < 0, places, positions[places.clamp(min=0)])
