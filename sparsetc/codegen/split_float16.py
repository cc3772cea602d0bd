"""Float32 values -> scaled float16 halves, for dots in f16x3, and the verdict on whether those are as exact as float32.

Magnitudes are the bits of absolute values, which are ordered as they are, with infinities and NaN at the end.

In: (nnz,) float32 values and their positions in whole tiles. Out: `SplitOperands`, high and low. Of a row of an operand
(a free position, whatever the tile) the largest magnitude says by which power of two, the row's scale, it is brought
into the range of a float16 (`ir.nest.values`). All 23 bits are there where a row's nonzeros are at least 2**-28 of its
largest: below that bits are lost. The scales of two rows are multiplied to a sum one after the other; of magnitudes
between 2**-80 and 2**80 neither step overflows for sums of fewer than 2**30 terms, nor leaves the normal numbers for a
term. Of anything else the verdict is that halves are not exact enough, or that there is an infinity or a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch

from sparsetc.ir.nest.values import BIAS, HEAD, RANGE, exponents, halved, power

SPREAD = 28
"""Exponent of two: how far below its row's largest a nonzero may be."""
EXACT, INEXACT, INFINITE = 0, 1, 2
"""Verdicts, from good to bad."""
SPREAD_BITS, INFINITE_BITS = SPREAD << 23, (2 * BIAS + 1) << 23
LEAST_BITS, MOST_BITS = (BIAS - RANGE) << 23, (BIAS + RANGE) << 23
ALIGNED = 16
"""Bytes to which Triton specialises kernels: of arrays that begin at a multiple it loads many elements at once."""
BLOCK = 1024
"""Values a program."""
GROUP = 32
"""Consecutive values of a program, of which one warp finds the largest."""
TOP = 0x7FFFFFFF
"""The largest magnitude that bits can say."""
LOOKED, LOOKS = 4096, 1024
"""Values that a program looks at together for extremes, and programs at most."""


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

    at: torch.Tensor
    line: torch.Tensor
    lines: int
    side: int
    inner: int

    @property
    def rows(self) -> int:
        """Number of rows of the operand."""
        return self.lines * self.side

    @property
    def row(self) -> torch.Tensor:
        """(nnz,) the row of each value."""
        tile = self.at // (self.side * self.inner)
        return self.line.long().index_select(0, tile) * self.side + self.at // self.inner % self.side


@dataclass(frozen=True)
class SplitOperands:
    """Both operands in halves, with the scales of their rows and the verdict on their values.

    Attributes:
        arrays: the high and low halves, (stored,) float16, and the scales, (rows,) float32, of each operand.
        most: (rows,) int32, the bits of the largest magnitude of each row, of each operand.
        verdict: (1,) int32 on the device, the worse of both operands' verdicts.
        found: the int32 array that `most` and `verdict` are pieces of.
    """

    arrays: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
    most: tuple[torch.Tensor, ...]
    verdict: torch.Tensor
    found: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [self.found, *(a for of_operand in self.arrays for a in of_operand)]
        return sum(a.numel() * a.element_size() for a in arrays)


def split(
    values: Sequence[torch.Tensor], positions: Sequence[TilePositions], room: SplitOperands | None = None
) -> SplitOperands:
    """The halves of both operands, by two launches; nothing is waited for.

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
    (launched if contiguous[0].is_cuda else computed)(contiguous, positions, room)
    return room


def room_for(positions: Sequence[TilePositions], device: torch.device) -> SplitOperands:
    """Halves of zeros, to be filled.

    A call of torch takes as long as a kernel over a million values, so arrays of a type are made at once.
    """
    rows, stored = [p.rows for p in positions], [p.line.numel() * p.side * p.inner for p in positions]
    maxima, (verdict, *most) = _together([1, *rows], torch.int32, device)
    _, high_and_low = _together([n for n in stored for _ in range(2)], torch.float16, device)
    _, scales = _together(rows, torch.float32, device)
    arrays = tuple(zip(high_and_low[::2], high_and_low[1::2], scales, strict=True))
    return SplitOperands(arrays, tuple(most), verdict, maxima)


def _together(
    sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Zeros in one allocation, and its pieces of these sizes, each aligned."""
    pieces = [n for size in sizes for n in (size, -size % (ALIGNED // dtype.itemsize))]
    whole = torch.zeros(sum(pieces), dtype=dtype, device=device)
    return whole, list(whole.split(pieces)[::2])


def launched(values: Sequence[torch.Tensor], positions: Sequence[TilePositions], halves: SplitOperands) -> None:
    """Fill halves by Triton's kernels."""
    from sparsetc.codegen import split_float16_kernels as kernels

    read = [
        (v, p.at, p.line, m, v.numel(), p.inner.bit_length() - 1, p.side.bit_length() - 1)
        for v, p, m in zip(values, positions, halves.most, strict=True)
    ]
    x, y = ((*arguments, *arrays, p.rows) for arguments, arrays, p in zip(read, halves.arrays, positions, strict=True))
    with torch.cuda.device_of(values[0]):  # Triton launches on the current device
        of_x, of_y = (-(-v.numel() // BLOCK) for v in values)
        kernels.find_most[(of_x + of_y,)](of_x, *read[0], *read[1])
        of_x, of_y = (-(-max(v.numel(), p.rows) // BLOCK) for v, p in zip(values, positions, strict=True))
        kernels.split[(of_x + of_y,)](of_x, halves.verdict, *x, *y)


def computed(values: Sequence[torch.Tensor], positions: Sequence[TilePositions], halves: SplitOperands) -> None:
    """Fill halves by torch, to the bits that the kernels give."""
    for v, p, m, arrays in zip(values, positions, halves.most, halves.arrays, strict=True):
        (high, low, scales), at = arrays, p.at.long()
        row, bits = p.row, v.view(torch.int32) & TOP
        top = m.scatter_reduce_(0, row, bits, "amax")[row]
        first, second = halved(v * power(2 * BIAS + HEAD - exponents(top)))
        high.index_copy_(0, at, first)
        low.index_copy_(0, at, second)
        scales.copy_(power(exponents(m) - HEAD))
        far = (bits > 0) & ((bits < top - SPREAD_BITS) | (top < LEAST_BITS) | (top > MOST_BITS))
        verdicts = torch.where(top >= INFINITE_BITS, INFINITE, far.int() * INEXACT)
        halves.verdict.copy_(torch.cat([halves.verdict, verdicts.int()]).amax(0, keepdim=True))


# -- the largest and the smallest magnitude of all values, in one pass ------------------------------------------------


def extremes(values: torch.Tensor) -> torch.Tensor:
    """(2,) int32: the bits of the largest magnitude, and how far those of the smallest but 0 are below `TOP`; or 0.

    Args:
        values: float32, of any shape; a GPU is not waited for.
    """
    found = torch.zeros(2, dtype=torch.int32, device=values.device)
    if values.is_cuda and values.numel():
        find_by_kernel(values.contiguous(), found)
    elif values.numel():
        bits = values.view(torch.int32) & TOP
        found[0] = bits.max()
        found[1] = torch.where(bits > 0, TOP - bits, 0).max()
    return found


def largest(values: torch.Tensor) -> torch.Tensor:
    """(1,) the largest magnitude, float32, on the device; 0 of no values."""
    return extremes(values)[:1].view(torch.float32)


def read_extremes(found: Sequence[torch.Tensor]) -> list[list[float]]:
    """Return the largest and the smallest magnitude that `extremes` found of each table; one device is waited for once.

    The largest is infinite or NaN where a value is, the smallest is that of values but 0, infinite where there is none.
    """
    if not found:
        return []
    most, below = torch.stack(list(found)).cpu().unbind(1)
    least = torch.where(below > 0, (TOP - below).view(torch.float32), inf)
    return torch.stack([most.view(torch.float32), least], 1).tolist()  # type: ignore[no-any-return]


def find_by_kernel(values: torch.Tensor, found: torch.Tensor) -> None:
    """Fill in what is found, by Triton's kernel."""
    from sparsetc.codegen.split_float16_kernels import find

    programs = min(LOOKS, -(-values.numel() // LOOKED))
    with torch.cuda.device_of(values):
        find[(programs,)](values, found, values.numel(), programs)
