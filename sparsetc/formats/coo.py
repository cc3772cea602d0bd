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
from sparsetc.formats.words import Nonzeros, Taken
from sparsetc.ir.nest.axes import WHOLE
from sparsetc.ir.nest.nest import Nest, runs
from sparsetc.ir.plan import Storage
from sparsetc.tensor import coords as crd


@register_format
class Coo:
    """Runs of linearised nonzeros."""

    name = "coo"

    def parameters(self, order: int) -> tuple[str, ...]:
        """None."""
        return ()

    def view(self, shape: tuple[int, ...], storage: Storage) -> Nest:
        """Runs of the item modes; equal chunks where there are none."""
        if storage.lane:
            raise FormatError(f"format 'coo' has no lanes that share modes {storage.lane}; deal them to other levels")
        leaf = words.fields(storage.leaf, shape, "word")
        item = words.fields(storage.item, shape, "item_word")
        chunk = 0 if item else storage.max_item_nnz or WHOLE
        return runs(item, leaf, chunk=chunk, narrow=storage.narrow)

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
        """Sort by (item, leaf) modes unless that is the order given; cut runs of `max_item_nnz` nonzeros."""
        nnz, view = coords.shape[1], self.view(shape, storage)
        if not storage.item:
            first = torch.arange(0, nnz, min(view.chunk, max(nnz, 1)), device=coords.device)
            arrays, items = words.encode(coords, view.levels[2], narrow=storage.narrow), first.numel()
            return Packed(self.name, storage, shape, nnz, view, arrays, None, nnz, items, (first, None), items > 1)
        nonzeros = Nonzeros.sorted(coords, shape, (*storage.item, *storage.leaf))
        own, positions = [shape[m] for m in storage.item], nonzeros.positions
        rows = crd.starts_of_runs(crd.sort_keys(nonzeros.rows(storage.item), own))
        starts, _, split = cut_runs(rows, storage.max_item_nnz)
        first, leaves = nonzeros.numbers(starts), coords if positions is None else Taken(coords, positions)
        arrays = {
            "item_ptr": torch.cat([starts, starts.new_full((1,), nnz)]).to(index_dtype(nnz)),
            **words.encode(Taken(coords, first), view.levels[0]),
            **words.encode(leaves, view.levels[2], narrow=storage.narrow),
        }
        items = first.numel()
        return Packed(self.name, storage, shape, nnz, view, arrays, positions, nnz, items, (first, None), split)
