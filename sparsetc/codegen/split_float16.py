"""Float32 values -> scaled float16 halves, for dots in f16x3, and the verdict on whether those are as exact as float32.

Magnitudes are the bits of absolute values, which are ordered as they are, with infinities and NaN at the end.

In: (nnz,) float32 values and their positions in whole tiles. Out: `SplitOperands`, high and low. Of a row of an operand
(a free position, whatever the tile) the largest magnitude says by which power of two, the row's scale, it is brought
into the range of a float16 (`ir.nest.values`). All 23 bits are there where a row's nonzeros are at least 2**-28 of its
largest: below that bits are lost. The scales of two rows are multiplied to a sum one after the other; of magnitudes
between 2**-80 and 2**80 neither step overflows for sums of fewer than 2**30 terms, nor leaves the normal numbers for a
term. Of anything else the verdict is that halves are not exact enough, or that there is an infinity or a NaN.

An operand of windows has one scale for all its values. Its extremes are found in one pass, and say what the verdict
is; stored values are split by the same kernel (`split_whole`), rows of a dense operand by the dot that takes them.
Beside given blocks each part of a dense operand that a step gathers has a scale, and a kernel that is generated with
the program makes its halves (`codegen.triton.splitting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetc.codegen import BLOCK, LOOKED
from sparsetc.codegen.launch import ALIGNED, run_by_hand
from sparsetc.codegen.parts import InHalves
from sparsetc.ir.nest.values import (
    INEXACT,
    INFINITE,
    INFINITE_BITS,
    LEAST_BITS,
    MOST_BITS,
    SPREAD,
    SPREAD_OF_ALL,
    TOP,
    scaled_halves,
)

WIDE = 2**31
"""Counts from which on kernels take them in 64 bits."""
LOOKS = 1024
"""Programs at most that look for extremes."""


@dataclass(frozen=True)
class TilePositions:
    """The positions of the values of an operand in whole tiles.

    Attributes:
        at: (nnz,) tile * volume + position in it; int32 where all fit, for kernels read little else, or int64.
        line: (tiles,) int32, the row of tiles that each tile is in.
        lines: number of rows of tiles.
        side: rows of a tile, a power of two.
        inner: positions of a row of a tile, a power of two.
    """

    at: Tensor
    line: Tensor
    lines: int
    side: int
    inner: int

    @property
    def rows(self) -> int:
        """Number of rows of the operand."""
        return self.lines * self.side

    @property
    def row(self) -> Tensor:
        """(nnz,) the row of each value."""
        tile = self.at // (self.side * self.inner)
        return self.line.long().index_select(0, tile) * self.side + self.at // self.inner % self.side


@dataclass(frozen=True)
class SplitOperands:
    """Both operands in halves, with the largest magnitudes of their rows and the verdict on their values.

    Attributes:
        arrays: each operand in halves, in rows that were scaled.
        verdict: (1,) int32 on the device, the worse of both operands' verdicts.
        found: the int32 array that the largest magnitudes and `verdict` are pieces of.
    """

    arrays: tuple[InHalves, ...]
    verdict: Tensor
    found: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [self.found, *[half for high, low, _ in self.arrays for half in (high, low)]]
        return sum(a.nbytes for a in arrays)


def split(
    values: Sequence[Tensor], positions: Sequence[TilePositions], room: SplitOperands | None = None
) -> SplitOperands:
    """The halves of both operands; nothing is waited for.

    Args:
        values: (nnz,) float32 of each operand.
        positions: of these values in tiles, of each operand.
        room: halves of other values at the same positions, to be overwritten.
    """
    contiguous = [v.contiguous() for v in values]
    if room is None:
        room = room_for(positions, contiguous[0].device)
    else:
        room.found.zero_()  # other positions of tiles are 0 still
    fill = launched if contiguous[0].is_cuda else computed
    for v, p, halves in zip(contiguous, positions, room.arrays, strict=True):
        fill(v, p, halves, room.verdict)
    return room


def room_for(positions: Sequence[TilePositions], device: torch.device) -> SplitOperands:
    """Halves of zeros, to be filled.

    A call of torch takes as long as a kernel over a million values, so arrays of a type are made at once.
    """
    rows, stored = [p.rows for p in positions], [p.line.numel() * p.side * p.inner for p in positions]
    every_verdict, (verdict, *bits) = _together([1, *rows], torch.int32, device)
    _, high_and_low = _together([n for n in stored for _ in range(2)], torch.float16, device)
    most = [of_operand.view(torch.float32) for of_operand in bits]
    return SplitOperands(tuple(zip(high_and_low[::2], high_and_low[1::2], most, strict=True)), verdict, every_verdict)


def _together(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return zeros in one allocation, and its aligned pieces of these sizes."""
    pieces = [n for size in sizes for n in (size, -size % (ALIGNED // dtype.itemsize))]
    whole = torch.zeros(sum(pieces), dtype=dtype, device=device)
    return whole, list(whole.split(pieces)[::2])


def launched(v: Tensor, p: TilePositions, halves: InHalves, verdict: Tensor) -> None:
    """Fill the halves of an operand by Triton's kernels."""
    high, low, most = halves
    numbers = v.numel(), p.inner.bit_length() - 1, p.side.bit_length() - 1
    read = [*numbers, v, p.at, p.line, most.view(torch.int32)]
    kind, programs = (p.at.dtype, v.numel() >= WIDE), -(-v.numel() // BLOCK)
    run_by_hand("find_most", [*read], kind, programs)
    run_by_hand("split", [*read, verdict, high, low], kind, programs)


def computed(v: Tensor, p: TilePositions, halves: InHalves, verdict: Tensor) -> None:
    """Fill the halves of an operand by torch, to the bits that the kernels give."""
    high, low, most = halves
    row = p.row
    bits = v.view(torch.int32) & TOP
    at = p.at.long()
    top = most.view(torch.int32).scatter_reduce_(0, row, bits, "amax")[row]
    first, second = scaled_halves(v, top.view(torch.float32))
    high.index_copy_(0, at, first)
    low.index_copy_(0, at, second)
    judged = torch.cat([verdict, verdicts(bits, top, SPREAD)])
    verdict.copy_(judged.amax(0, keepdim=True))


def verdicts(bits: Tensor, most: Tensor, spread: int) -> Tensor:
    """Judge magnitudes by the largest that share their scales: verdicts on their halves, int32.

    Args:
        bits: of the magnitudes, int32; a zero asks for nothing.
        most: the bits of the largest.
        spread: exponent of two, how far below the largest a nonzero may be.
    """
    far = (bits > 0) & ((bits < most - (spread << 23)) | (most < LEAST_BITS) | (most > MOST_BITS))
    return torch.where(most >= INFINITE_BITS, INFINITE, far.int() * INEXACT).int()


# -- operands that have one scale: the largest and the smallest magnitude in one pass, then halves ---------------------


def split_whole(values: Tensor, most: Tensor) -> InHalves:
    """Split contiguous float32 values to halves, scaled by `most`, (1,) at least their largest magnitude."""
    high, low = (split_by_kernel if values.is_cuda else scaled_halves)(values, most)
    return high, low, most


def split_by_kernel(values: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """The high and low halves of values that have one scale, by Triton's kernel."""
    high, low = (torch.empty_like(values, dtype=torch.float16) for _ in range(2))
    n = values.numel()
    arguments = [n, 0, 0, values, None, None, most.view(torch.int32), None, high, low]
    run_by_hand("split", arguments, n >= WIDE, -(-n // BLOCK))
    return high, low


def extremes(values: Tensor) -> Tensor:
    """Return (2,) int32: bits of the largest magnitude, and how far below `TOP` the least nonzero one is (or 0).

    Args:
        values: float32, of any shape; a GPU is not waited for.
    """
    bits_of = torch.zeros(2, dtype=torch.int32, device=values.device)
    if values.is_cuda and values.numel():
        find_by_kernel(values.contiguous(), bits_of)
    elif values.numel():
        bits = values.view(torch.int32) & TOP
        bits_of[0] = bits.max()
        bits_of[1] = torch.where(bits > 0, TOP - bits, 0).max()
    return bits_of


def largest(values: Tensor) -> Tensor:
    """(1,) the largest magnitude, float32, on the device; 0 of no values."""
    return extremes(values)[:1].view(torch.float32)


def verdicts_on(tables: Sequence[Tensor]) -> list[int]:
    """The verdict on each table, float32, as an operand that has one scale; the device is waited for once."""
    most, below = torch.stack([extremes(t) for t in tables], 1).cpu()
    return verdicts(torch.where(below > 0, TOP - below, 0), most, SPREAD_OF_ALL).tolist()  # type: ignore[no-any-return]


def find_by_kernel(values: Tensor, out: Tensor) -> None:
    """Fill in what is found, by Triton's kernel."""
    count = values.numel()
    programs = min(LOOKS, -(-count // LOOKED))
    run_by_hand("find", [count, programs, values, out], count >= WIDE, programs)
