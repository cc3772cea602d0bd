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
from sparsetc.ir.view import Field, tiles_along

SIDE = 8
"""Positions a mode (BCB-SpTC, section III-C)."""
_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


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
        return out.index_copy_(0, self.dense, self.pack_values(values)).view(self.blocks, self.volume)


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
        return Blocks(
            shape, sides, fields, words.encode(heads, fields), _bitmap(dense, heads.shape[1], volume), order, dense
        )

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
    wide = packed.bitmap.to(torch.int64).unsqueeze(2)
    width = packed.bitmap.element_size() * 8
    shifts = torch.arange(width, device=wide.device)
    bits = ((wide >> shifts) & 1).flatten(1)[:, : packed.volume]
    return torch.nonzero(bits.flatten()).flatten()


def storage_bits(shape: Sequence[int], sides: Sequence[int], blocks: int, nnz: int, value_bits: int = 32) -> int:
    """Formula (8): (sum of ceil(log2(S / H)) + product of H) M + w N bits."""
    index = sum(words.bits_of(n) for n in tiles_along(shape, sides))
    return (index + prod(sides)) * blocks + value_bits * nnz


def _bitmap(dense: torch.Tensor, blocks: int, volume: int) -> torch.Tensor:
    """Set the bits: (blocks, words), in the widest words that a block fills."""
    width = min(64, max(8, volume))
    each = max(1, volume // width)
    block, place = dense // volume, dense % volume
    word = block * each + place // width
    bit = torch.ones_like(place) << (place % width)  # the 64th bit is the sign: adding distinct bits sets them
    found = torch.zeros(blocks * each, dtype=torch.int64, device=dense.device).index_add_(0, word, bit)
    return found.to(_WORDS[width]).view(blocks, each)
