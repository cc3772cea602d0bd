"""What the tests of values in halves share: operands of tiles, and the values that halves stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from tile_pairs import spread_values

from sparsetc.codegen.split_float16 import TilePositions
from sparsetc.ir.nest.values import LOW, scale

Operand = tuple[torch.Tensor, TilePositions]
"""Values, and where they stand."""
NO_VALUES: Operand = (
    torch.zeros(0),
    TilePositions(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.int32), 0, 4, 4),
)


@dataclass(frozen=True)
class Drawn:
    """Random values in tiles."""

    side: int
    inner: int
    tiles: int
    spread: int
    density: float
    seed: int

    def operand(self) -> Operand:
        """Values, and where they stand; tile n is in row n % 2 of tiles, or there is one row."""
        x = spread_values((self.side, self.inner), self.tiles, self.spread, self.density, self.seed)
        at = torch.nonzero(x.flatten()).flatten()
        lines = min(2, self.tiles)
        line = torch.arange(self.tiles, dtype=torch.int32) % lines
        return x.flatten()[at], TilePositions(at, line, lines, self.side, self.inner)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Tiles of 1 x 1 to 16 x 16, up to five; values as far apart in a row as they may be."""
    sides = st.sampled_from([1, 2, 4, 16])
    spread, density = st.sampled_from([0, 5, 26, 27]), st.sampled_from([0.0, 0.2, 1.0])
    return Drawn(
        draw(sides), draw(sides), draw(st.integers(1, 5)), draw(spread), draw(density), draw(st.integers(0, 999))
    )


def operand(x: torch.Tensor) -> Operand:
    """A matrix of powers of two as one tile, all of it stored."""
    rows, columns = x.shape
    side = 1 << (rows - 1).bit_length()
    return x.flatten(), TilePositions(torch.arange(x.numel()), torch.zeros(1, dtype=torch.int32), 1, side, columns)


def rows_of(rows: int, length: int) -> Operand:
    """Rows of so many values each, sorted, in a tile a row; every fifth value is 0."""
    inner = 1 << (length - 1).bit_length()
    values = torch.randn(rows * length, generator=torch.Generator().manual_seed(length))
    values[::5] = 0
    at = (torch.arange(rows).unsqueeze(1) * inner + torch.arange(length)).flatten()
    return values, TilePositions(at, torch.arange(rows, dtype=torch.int32), rows, 1, inner)


def value_of(halves: tuple[torch.Tensor, torch.Tensor, torch.Tensor], places: TilePositions) -> torch.Tensor:
    """(nnz,) float64: what halves stand for."""
    high, low, most = halves
    scales = scale(most, into=False).double()
    return (high.double() + low.double() / LOW)[places.at] * scales[places.row]
