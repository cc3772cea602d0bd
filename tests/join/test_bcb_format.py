"""The ``bcb`` format: packing and back, the paper's formula for its size, sizes past 64 bits, what it refuses."""

from __future__ import annotations

from math import ceil, log2, prod

import pytest
import torch
from cases import every_wide_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsetc.errors import FormatError
from sparsetc.ir.nest.nest import tiles_along
from sparsetc.join.blocking import OperandBlocks, in_blocks
from sparsetc.packing import words
from sparsetc.packing.words import bits_of
from sparsetc.tensor.coords import set_bits
from sparsetc.testing import PATTERNS, UNBOUNDED, pattern

SHAPES = {1: (11,), 2: (16, 9), 3: (17, 6, 30), 4: (3, 14, 5, 9), 5: (3, 1, 4, 13, 4), 6: (2, 3, 2, 3, 2, 3)}


def blocks(coords: torch.Tensor, shape: tuple[int, ...], sides: tuple[int, ...]) -> OperandBlocks:
    """Nonzeros in blocks of these sides."""
    return in_blocks(tuple(coords), shape, sides, coords[:0].flatten(), coords.shape[1])


def storage_bits(shape: tuple[int, ...], sides: tuple[int, ...], blocks: int, nnz: int, value_bits: int = 32) -> int:
    """Formula (8): (sum of ceil(log2(S / H)) + product of H) M + w N bits."""
    return (sum(bits_of(n) for n in tiles_along(shape, sides)) + prod(sides)) * blocks + value_bits * nnz


def check(coords: torch.Tensor, shape: tuple[int, ...], sides: tuple[int, ...]) -> OperandBlocks:
    """Every promise of the format, on nonzeros in the order given."""
    packed = blocks(coords, shape, sides)
    nnz, positions = coords.shape[1], packed.positions
    assert torch.equal(positions.sort().values, torch.arange(nnz))
    bits = torch.nonzero(set_bits(packed.bitmap, packed.word)[:, : packed.volume].flatten()).flatten()
    stored_at = packed.at[positions]
    assert torch.equal(bits, stored_at)
    at = torch.stack(packed.block_coords)
    inside = torch.stack(torch.unravel_index(bits % packed.volume, packed.sides))
    sides_along = torch.tensor(packed.sides).unsqueeze(1)
    assert torch.equal(at[:, bits // packed.volume] * sides_along + inside, coords[:, positions])
    assert packed.blocks == at.shape[1]
    assert torch.equal(at, torch.unique(coords // sides_along, dim=1))  # in lexicographic order
    values = torch.arange(1, nnz + 1, dtype=torch.float64)
    assert torch.equal(packed.tile_arrays(values, packed.word)[2], values[positions])
    whole = packed.whole(values)
    assert whole.shape == (packed.blocks, packed.volume)
    assert torch.equal(whole.view(-1)[stored_at], values[positions])
    assert int((whole != 0).sum()) == nnz
    filled = (whole != 0).sum(1)
    assert torch.equal(packed.first.long(), filled.cumsum(0) - filled)
    # Formula (8), with each index in a whole word, and a bitmap in whole bytes.
    fields = words.fields(range(len(shape)), tiles_along(shape, packed.sides), "word")
    index = 8 * sum(a.element_size() for a in words.encode(packed.block_coords, fields).values())
    bitmap = max(8, packed.volume) if packed.volume > 1 else 0
    assert packed.nbytes * 8 == (index + bitmap) * packed.blocks
    exact = storage_bits(shape, packed.sides, packed.blocks, nnz)
    assert exact <= packed.nbytes * 8 + 32 * nnz + (packed.blocks if packed.volume == 1 else 0)
    return packed


@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("order", SHAPES)
def test_every_order_pattern_and_side(order: int, kind: str) -> None:
    coords = pattern(kind, SHAPES[order])
    for side in (1, 2, 4, 8):
        check(coords.flip(1), SHAPES[order], (side,) * order)


@pytest.mark.parametrize("kind", UNBOUNDED)
@every_wide_shape
def test_wide_shapes(shape: tuple[int, ...], kind: str) -> None:
    check(pattern(kind, shape), shape, (2,) * len(shape))


@settings(max_examples=200)
@given(st.data())
def test_any_shape_and_sides(data: st.DataObject) -> None:
    order = data.draw(st.integers(1, 5))
    shape = tuple(data.draw(st.lists(st.integers(1, 20), min_size=order, max_size=order)))
    sides = tuple(data.draw(st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=order, max_size=order)))
    if prod(sides) > 1 << 14:
        return
    kind = data.draw(st.sampled_from([p for p in sorted(PATTERNS) if p in UNBOUNDED or prod(shape) < 5000]))
    coords = pattern(kind, shape, data.draw(st.integers(0, 99)))
    check(coords[:, torch.randperm(coords.shape[1])], shape, sides)


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64, torch.int8, torch.int64, torch.bfloat16], ids=str)
def test_values_of_every_type(dtype: torch.dtype) -> None:
    coords = pattern("random", (20, 30))
    packed = blocks(coords, (20, 30), (8, 8))
    values = torch.arange(1, coords.shape[1] + 1).to(dtype)
    assert packed.whole(values).dtype == dtype
    assert torch.equal(packed.whole(values).view(-1)[packed.at[packed.positions]], values[packed.positions])


def test_the_formula_of_the_paper() -> None:
    """8 x 8 x 8 blocks of a 100 x 60 x 9 tensor: 4 + 3 + 1 bits an index, 512 a bitmap."""
    shape, sides = (100, 60, 9), (8, 8, 8)
    bits = sum(ceil(log2(ceil(s / h))) for s, h in zip(shape, sides, strict=True))
    assert bits == 8
    assert storage_bits(shape, sides, blocks=10, nnz=70) == (8 + 512) * 10 + 32 * 70
    assert storage_bits(shape, sides, 10, 70, value_bits=16) == (8 + 512) * 10 + 16 * 70
    packed = check(pattern("dense", shape), shape, sides)
    assert packed.bitmap.dtype == torch.int64
    assert packed.bitmap.shape == (13 * 8 * 2, 8)
    assert packed.nbytes == packed.blocks * (4 + 64)  # an index is rounded up to 32 bits


def test_what_is_refused() -> None:
    coords = pattern("random", (4, 5))
    with pytest.raises(FormatError, match="powers of two"):
        blocks(coords, (4, 5), (3, 4))
    with pytest.raises(FormatError, match="one a mode"):
        blocks(coords, (4, 5), (4,))
