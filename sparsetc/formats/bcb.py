"""``bcb``: bit coordinates and bitmaps (BCB-SpTC, section III): blocks, a word and a bitmap each, their values packed.

        word    [ ijk | ijk | …        the coordinates of each non-empty block, ceil(log2(S / H)) bits a mode
        bitmap  [ 1001… | 0110… | …    a bit a position, row-major over the block, the first in the lowest bit
        values  [ v v v | v v | …      in the order of the set bits

Blocks are in lexicographic order, so words are too. Where a block's values begin is not stored: it is the number of
bits set in the bitmaps before. The format is read by contractions of two sparse operands (`sparsetc.pair.blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from sparsetc import coords as crd
from sparsetc.errors import FormatError
from sparsetc.formats import words
from sparsetc.formats.base import index_dtype
from sparsetc.formats.bits import narrowed, packed_bits, set_bits
from sparsetc.ir.view import Field, tiles_along

SIDE = 8
"""Positions a mode (BCB-SpTC, section III-C)."""


@dataclass(frozen=True)
class Blocks:
    """A tensor of a pattern, cut into blocks."""

    shape: tuple[int, ...]
    sides: tuple[int, ...]
    """Positions a mode, powers of two."""
    fields: tuple[Field, ...]
    """Where each mode's bits lie in the words."""
    words: dict[str, torch.Tensor]
    """(blocks,) each: ``word``, and ``word_1``, … where more than 63 bits are needed."""
    bitmap: torch.Tensor
    """(blocks, words of a bitmap): unsigned bits, in words of 8 to 64 bits."""
    positions: torch.Tensor
    """(nnz,) the nonzero that each stored value came from."""
    dense: torch.Tensor
    """(nnz,) where each stored value would stand if whole blocks were stored: block * volume + position."""

    @property
    def blocks(self) -> int:
        """Non-empty blocks, M."""
        return self.bitmap.shape[0]

    @property
    def nnz(self) -> int:
        """Nonzeros, N."""
        return self.positions.numel()

    @property
    def volume(self) -> int:
        """Positions of a block."""
        return prod(self.sides)

    @property
    def nbytes(self) -> int:
        """Bytes of words and bitmaps: formula (8) without its last term, each index rounded up to its word."""
        return sum(a.numel() * a.element_size() for a in (*self.words.values(), self.bitmap))

    @cached_property
    def starts(self) -> torch.Tensor:
        """(blocks + 1,) int64, where each block's values begin: the bits set in the bitmaps before."""
        counts = torch.bincount(self.dense // self.volume, minlength=self.blocks)
        return torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])

    @cached_property
    def first(self) -> torch.Tensor:
        """(blocks,) where each block's values begin, in 32 bits where they do."""
        return self.starts[:-1].to(index_dtype(self.nnz))

    def tile_arrays(self, values: torch.Tensor, word: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a kernel reads tiles from (`Tiles.value_arrays`): first values, bits in words of `word`, packed values.

        Args:
            values: (nnz,) in the operand's order.
            word: 8, 16 or 32, and no more than a block has positions, or 8.
        """
        return self.first, narrowed(self.bitmap, word), self.pack_values(values).contiguous()

    def coordinates(self) -> torch.Tensor:
        """(order, blocks) int64, coordinates of blocks."""
        found = words.decode(self.words, self.fields)
        if not found:
            return self.positions.new_zeros((0, self.blocks))
        return torch.stack([found[m] for m in range(len(self.shape))])

    def pack_values(self, values: torch.Tensor) -> torch.Tensor:
        """(nnz,) values in the operand's order -> in the order of the set bits."""
        return values.index_select(0, self.positions)

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """(blocks, volume): all positions, 0 where there is no nonzero; `values` in the operand's order."""
        out = values.new_zeros(self.blocks * self.volume)
        return out.index_copy_(0, self._whole_at, values).view(self.blocks, self.volume)

    @cached_property
    def _whole_at(self) -> torch.Tensor:
        """(nnz,) `dense` in the operand's order."""
        return torch.empty_like(self.dense).index_copy_(0, self.positions, self.dense)


class Bcb:
    """Bitmap blocks."""

    name = "bcb"

    def pack(self, coords: torch.Tensor, shape: Sequence[int], sides: Sequence[int] | None = None) -> Blocks:
        """Cut into blocks.

        Args:
            coords: (order, nnz) int64, without duplicates, in any order.
            shape: sizes of the modes.
            sides: positions of a block a mode, powers of two; 8 each by default.

        Raises:
            FormatError: sides that do not fit the shape, or duplicates.
        """
        shape = tuple(shape)
        sides = tuple(sides) if sides is not None else (SIDE,) * len(shape)
        if len(sides) != len(shape) or any(s < 1 or s & (s - 1) for s in sides):
            raise FormatError(f"sides must be powers of two, one a mode of {shape}, found {sides}")
        volume, grid = prod(sides), tiles_along(shape, sides)
        side = torch.tensor(sides, device=coords.device).unsqueeze(1)
        at = coords // side
        place = torch.zeros(coords.shape[1], dtype=torch.long, device=coords.device)
        for c, s in zip(coords, sides, strict=True):
            place = place * s + c % s
        order = crd.lexsort(crd.sort_keys(torch.cat([at, place.unsqueeze(0)]), (*grid, volume)))
        at = at.index_select(1, order)
        fresh = crd.starts_of_runs(crd.sort_keys(at, grid) or [torch.zeros_like(order)])  # of no modes: one block
        dense = (torch.cumsum(fresh, 0) - 1) * volume + place[order]
        if dense.numel() and bool((dense[1:] == dense[:-1]).any()):
            raise FormatError("blocks hold one value a position: coalesce the operand, which has duplicates")
        fields = words.fields(range(len(shape)), grid, "word")
        heads = at[:, fresh]
        # In the widest words that a block fills.
        bitmap = packed_bits(dense // volume, dense % volume, heads.shape[1], volume, min(64, max(8, volume)))
        return Blocks(shape, sides, fields, words.encode(heads, fields), bitmap, order, dense)

    def unpack(self, packed: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        """(coords (order, nnz), positions (nnz,)): every set bit, and which of the given nonzeros it is."""
        bits = positions_of_bits(packed)
        block, rest = bits // packed.volume, bits % packed.volume
        at = packed.coordinates()[:, block]
        coords = []
        for mode in reversed(range(len(packed.shape))):
            coords.append(at[mode] * packed.sides[mode] + rest % packed.sides[mode])
            rest = rest // packed.sides[mode]
        return torch.stack(coords[::-1]), packed.positions


def positions_of_bits(packed: Blocks) -> torch.Tensor:
    """(nnz,) block * volume + position of every set bit, ascending, read from the bitmaps alone."""
    return torch.nonzero(set_bits(packed.bitmap)[:, : packed.volume].flatten()).flatten()


def storage_bits(shape: Sequence[int], sides: Sequence[int], blocks: int, nnz: int, value_bits: int = 32) -> int:
    """Formula (8): (sum of ceil(log2(S / H)) + product of H) M + w N bits."""
    index = sum(words.bits_of(n) for n in tiles_along(shape, sides))
    return (index + prod(sides)) * blocks + value_bits * nnz
