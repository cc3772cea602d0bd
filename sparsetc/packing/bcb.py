"""``bcb``: bit coordinates and bitmaps (BCB-SpTC, section III): blocks, a word and a bitmap each, their values packed.

        word    [ ijk | ijk | …        the coordinates of each non-empty block, ceil(log2(S / H)) bits a mode
        bitmap  [ 1001… | 0110… | …    a bit a position, row-major over the block, the first in the lowest bit
        values  [ v v v | v v | …      in the order of the set bits

Blocks are in lexicographic order, so words are too. Where a block's values begin is not stored: it is the number of
bits set in the bitmaps before. The format is read by contractions of two sparse operands (`sparsetc.pair.blocking`),
which know where blocks lie from the list of pairs: the words count in `Blocks.nbytes`, and no kernel reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from sparsetc.errors import FormatError
from sparsetc.ir.nest.nest import tiles_along
from sparsetc.packing.base import index_dtype
from sparsetc.packing.words import fields, narrowed, packed_bits, widths
from sparsetc.support.cached import cached_property
from sparsetc.tensor.numbering import histogram, numbered


@dataclass(frozen=True)
class Blocks:
    """A pattern in blocks."""

    shape: tuple[int, ...]
    sides: tuple[int, ...]
    """Positions a mode, powers of two."""
    block_coords: tuple[torch.Tensor, ...]
    """(blocks,) int64 a mode: coordinates of the non-empty blocks, in lexicographic order."""
    blocks: int
    """Non-empty blocks, M."""
    block: torch.Tensor
    """(nnz,) int64, the block that each nonzero is in; in the operand's order."""
    place: torch.Tensor
    """(nnz,) int64, the position in it, row-major."""

    @property
    def nnz(self) -> int:
        """Nonzeros, N."""
        return self.block.numel()

    @cached_property
    def volume(self) -> int:
        """Positions of a block."""
        return prod(self.sides)

    @cached_property
    def word(self) -> int:
        """Bits of a word of the bitmaps: the widest that a block fills."""
        return min(64, max(8, self.volume))

    @cached_property
    def format(self) -> str:
        """``bcb``, or ``coo`` where blocks have one position: a word of coordinates and a value each."""
        return "bcb" if self.volume > 1 else "coo"

    @property
    def nbytes(self) -> int:
        """Bytes of words and bitmaps: formula (8) without its last term, each index rounded up to its word; blocks of
        one position need no bitmap.
        """
        bitmap = -(-self.volume // self.word) * self.word // 8 if self.volume > 1 else 0
        index = fields(range(len(self.shape)), tiles_along(self.shape, self.sides), "word")
        return self.blocks * (sum(widths(index)) + bitmap)

    @cached_property
    def bitmap(self) -> torch.Tensor:
        """(blocks, words of a bitmap): unsigned bits, in words of 8 to 64 bits."""
        return packed_bits(self.block, self.place, self.blocks, self.volume, self.word)

    @cached_property
    def at(self) -> torch.Tensor:
        """(nnz,) where each nonzero stands if whole blocks are stored: block * volume + position."""
        return torch.add(self.place, self.block, alpha=self.volume)

    @cached_property
    def positions(self) -> torch.Tensor:
        """(nnz,) the nonzero that each stored value came from: the order of the set bits."""
        return torch.argsort(self.at)

    @property
    def dense(self) -> torch.Tensor:
        """(nnz,) where each stored value stands if whole blocks are stored."""
        return self.at.index_select(0, self.positions)

    @cached_property
    def counts(self) -> torch.Tensor:
        """(blocks,) int64 nonzeros of each."""
        return histogram(self.block, self.blocks)

    @property
    def starts(self) -> torch.Tensor:
        """(blocks + 1,) int64, where each block's values begin: the bits set in the bitmaps before."""
        return torch.cat([self.counts.new_zeros(1), torch.cumsum(self.counts, 0)])

    @cached_property
    def first(self) -> torch.Tensor:
        """(blocks,) where each block's values begin, in 32 bits where they do."""
        return self.starts[:-1].to(index_dtype(self.nnz))

    def tile_arrays(self, values: torch.Tensor, word: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a kernel reads tiles from (`ir.nest.values`): first values, bits in words of `word`, packed values.

        Args:
            values: (nnz,) in the operand's order.
            word: 8, 16 or 32, and no more than a block has positions, or 8.
        """
        return self.first, narrowed(self.bitmap, word), self.pack_values(values).contiguous()

    def pack_values(self, values: torch.Tensor) -> torch.Tensor:
        """(nnz,) values in the operand's order -> in the order of the set bits."""
        return values.index_select(0, self.positions)

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """(blocks, volume): all positions, 0 where there is no nonzero; `values` in the operand's order."""
        out = values.new_zeros(self.blocks * self.volume)
        return out.index_copy_(0, self.at, values).view(self.blocks, self.volume)


def in_blocks(
    rows: Sequence[torch.Tensor], shape: Sequence[int], sides: Sequence[int], like: torch.Tensor, n: int
) -> Blocks:
    """Put nonzeros in blocks.

    Args:
        rows: (n,) int64 a mode, on the device of `like`: coordinates, all distinct, in any order.
        shape: sizes of the modes.
        sides: positions of a block a mode, powers of two.
        like: what has the device, where there is no mode.
        n: nonzeros.

    Raises:
        FormatError: sides that do not fit the shape.
    """
    shape, sides = tuple(shape), tuple(sides)
    if len(sides) != len(shape) or any(s < 1 or s & (s - 1) for s in sides):
        raise FormatError(f"sides must be powers of two, one a mode of {shape}, found {sides}")
    inside = [(row & (s - 1), s) for row, s in zip(rows, sides, strict=True) if s > 1]
    place = inside[0][0] if inside else like.new_zeros(n)
    for row, side in inside[1:]:
        place = torch.add(row, place, alpha=side)
    at = [row >> (s.bit_length() - 1) if s > 1 else row for row, s in zip(rows, sides, strict=True)]
    found = numbered(at, tiles_along(shape, sides), n, like)
    return Blocks(shape, sides, found.coords, found.count, found.rank, place)
