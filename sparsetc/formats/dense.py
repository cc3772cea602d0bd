"""``dense``: the tensor as one tile of all its positions, which torch multiplies as it does any other dense tensor.

        item_ptr   [ 0  1 ]                 one work item, which has the one tile; no item where there is no nonzero
        values     [ every position ]       in the order of ``view.values.sequence``, 0 where there is no nonzero

A position along a side is a coordinate, so none is stored, and nothing is gathered by one. A zero position is
multiplied like any other: an infinity or NaN of a dense operand therefore reaches every row.
"""

from __future__ import annotations

from math import prod

import torch

from sparsetc.errors import FormatError
from sparsetc.formats.base import Packed, register_format
from sparsetc.formats.tiles import refuse_duplicates
from sparsetc.ir.nest.coordinates import Along
from sparsetc.ir.nest.modes import Computed
from sparsetc.ir.nest.nest import Nest, tiles
from sparsetc.ir.nest.values import Whole
from sparsetc.ir.plan import Storage

MOST = 2**40
"""Positions of a dense tensor, at most: more fit no device."""


@register_format
class Dense:
    """The dense tensor."""

    name = "dense"

    def parameters(self, order: int) -> tuple[str, ...]:
        """None: the sides are the tensor's own."""
        return ()

    def view(self, shape: tuple[int, ...], storage: Storage) -> Nest:
        """One tile, whose positions are stored in the storage's sequence, or row-major where it has none.

        Raises:
            FormatError: the shape has more positions than any device holds.
        """
        modes = tuple(range(len(shape)))
        if prod(shape) > MOST:
            raise FormatError(f"a dense tensor of shape {tuple(shape)} has {prod(shape):,} positions, {MOST:,} at most")
        sides = tuple([max(1, n) for n in shape])
        read = tuple([Computed(m, Along(m)) for m in modes])
        return tiles((), read, Whole(sides, storage.sequence or modes, storage.contracted))

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
        """Number the nonzeros by position; raises `FormatError` where two have the same."""
        view, nnz = self.view(shape, storage), coords.shape[1]
        stored, tiles = (view.values.volume, 1) if nnz else (0, 0)
        place, numbers = coords.new_zeros(nnz), torch.arange(nnz, device=coords.device)
        for row, stride in zip(coords, view.values.strides, strict=True):
            place.add_(row, alpha=stride)
        positions = coords.new_full((stored,), -1)
        positions[place] = numbers
        if not torch.equal(positions[place], numbers):
            refuse_duplicates()
        arrays = {"item_ptr": torch.arange(tiles + 1, dtype=torch.int32, device=coords.device)}
        known = (self.name, storage, shape, nnz, view, arrays, positions, stored)
        return Packed(*known, items=tiles, padded=nnz != stored)
