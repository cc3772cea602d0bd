"""``coo``: linearised nonzeros, one word each (HLS-S; BLCO), sorted so that the nonzeros of an output row are a run.

        item_word  [ i0      | i0      | i1 | …        the row of each work item
        item_ptr   [ 0         256       301 …         its range of nonzeros; a long row is several items
        word       [ jk jk jk … jk jk … jk … ]         the other modes, ceil(log2 dim) bits each
        values     [ v  v  v  … v  v  … v  … ]

With no item modes and a `max_item_nnz`, items are equal chunks in the operand's own order, and no pointers are stored.
"""

from __future__ import annotations

import torch

from sparsetc.errors import FormatError
from sparsetc.formats import words
from sparsetc.formats.base import Packed, cut_runs, index_dtype, register_format
from sparsetc.ir.nest.view import WHOLE, View
from sparsetc.ir.plan import Storage
from sparsetc.tensor import coords as crd


@register_format
class Coo:
    """Runs of linearised nonzeros."""

    name = "coo"

    def parameters(self, order: int) -> tuple[str, ...]:
        """None."""
        return ()

    def view(self, shape: tuple[int, ...], storage: Storage) -> View:
        """Runs of the item modes; equal chunks where there are none."""
        if storage.lane:
            raise FormatError(f"format 'coo' has no lanes that share modes {storage.lane}; deal them to other levels")
        leaf = words.fields(storage.leaf, shape, "word")
        item = words.fields(storage.item, shape, "item_word")
        chunk = 0 if item else storage.max_item_nnz or WHOLE
        return View(len(shape), item, (), leaf, blocks=False, chunk=chunk, narrow=storage.narrow)

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
        """Sort by (item, leaf) modes unless that is the order given; cut runs of `max_item_nnz` nonzeros."""
        nnz, view, most = coords.shape[1], self.view(shape, storage), storage.max_item_nnz
        arrays: dict[str, torch.Tensor] = {}
        if storage.item:
            coords, positions = _sorted(coords, shape, (*storage.item, *storage.leaf))
            rows = crd.starts_of_runs(crd.sort_keys(coords[list(storage.item)], [shape[m] for m in storage.item]))
            item_ptr = cut_runs(rows, most)
            starts = item_ptr[:-1]
            arrays = {"item_ptr": item_ptr.to(index_dtype(nnz)), **words.encode(coords[:, starts], view.item)}
            split = bool(most) and starts.numel() > int(rows.sum())
        else:
            positions, starts = None, torch.arange(0, nnz, min(view.chunk, max(nnz, 1)), device=coords.device)
            split = starts.numel() > 1
        arrays |= words.encode(coords, view.leaf, narrow=storage.narrow)
        items, first = starts.numel(), starts if positions is None else positions[starts]
        return Packed(self.name, storage, shape, nnz, view, arrays, positions, nnz, items, (first, None), split)

    def unpack(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the words; an item's coordinates are repeated for each of its nonzeros."""
        leaf = words.decode(packed.arrays, packed.view.leaf)
        device = next(iter(packed.arrays.values())).device
        found = dict(leaf)
        if packed.view.item:
            lengths = torch.diff(packed.arrays["item_ptr"].long())
            for mode, value in words.decode(packed.arrays, packed.view.item).items():
                found[mode] = torch.repeat_interleave(value, lengths)
        coords = torch.stack([found[m] for m in range(len(packed.shape))])
        positions = packed.positions
        return coords, torch.arange(packed.nnz, device=device) if positions is None else positions


def _sorted(
    coords: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Coordinates sorted by the modes in `order`, and the permutation, None when they are so already."""
    if order == tuple(range(len(shape))):
        return coords, None
    positions = crd.lexsort(crd.sort_keys(coords[list(order)], [shape[m] for m in order]))
    return coords[:, positions], positions
