"""Masks -> the tiles of pairs that they meet.

In: a `Mask`. Out: full tiles, and partial ones with their bits. They are found by halving squares of which some pairs
meet and not all, so the time that this takes grows with the border of a mask, and not with its pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetc.masks import Mask
from sparsetc.support import Cache

SQUARES = 1 << 16
"""Squares of tiles that a search begins with: as many at once take a GPU no longer than a few."""
AT_ONCE = 2048
"""Tiles whose pairs are looked at together."""
KEPT = 256
"""Tiles, entries and kernels that are kept. Not measured: a few masks of a model, in both orders of their modes."""

Tiles = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Rows and columns of full tiles; rows, columns and words of bits of partial ones."""
kept = Cache(KEPT)
"""Results made of masks; a mask is found again by an equal one."""


def tiles_of(mask: Mask, shape: tuple[int, int], height: int, width: int, device: torch.device) -> Tiles:
    """Return the tiles that a mask meets, of `height` queries by `width` keys, 64 at most."""
    size = 1
    while -(-shape[0] // (size * height)) * -(-shape[1] // (size * width)) > SQUARES:
        size *= 2
    squares = [
        torch.arange(-(-n // (size * side)), device=device) for n, side in zip(shape, (height, width), strict=True)
    ]
    row, column = torch.cartesian_prod(*squares).T
    whole: list[Tensor] = []
    while True:
        i0, j0 = row * size * height, column * size * width
        i1, j1 = i0 + size * height - 1, j0 + size * width - 1
        rectangle = i0, i1.clamp(max=shape[0] - 1), j0, j1.clamp(max=shape[1] - 1)
        full = mask.full(rectangle) & (i1 < shape[0]) & (j1 < shape[1])
        mixed = mask.some(rectangle) & ~full
        whole_row, whole_column = _only(full, row, column)
        whole.append(_divided(whole_row, whole_column, size))
        row, column = _only(mixed, row, column)
        if size == 1:
            break
        size //= 2
        row, column = _divided(row, column, 2)
        row, column = _only((row * size * height < shape[0]) & (column * size * width < shape[1]), row, column)
    bits = _words(mask, row, column, shape, height, width)
    some, all_ones = (bits != 0).any(1), (bits == (-1 if width == 64 else (1 << width) - 1)).all(1)
    full_row, full_column = torch.cat([*whole, torch.stack(_only(all_ones, row, column))], 1)
    part_row, part_column, part_bits = _only(some & ~all_ones, row, column, bits)
    return (full_row, full_column), (part_row, part_column, part_bits)


def _only(kept: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return the elements of tensors, or rows, where `kept` is True, for which a GPU is waited for once."""
    at = kept.nonzero().squeeze(1)
    return [tensor[at] for tensor in tensors]


def _divided(row: Tensor, column: Tensor, times: int) -> Tensor:
    """Return (2, n) rows and columns of squares cut into ``times ** 2`` each."""
    if times == 1:
        return torch.stack((row, column))
    each = torch.arange(times, device=row.device)
    rows = (row[:, None, None] * times + each[None, :, None]).expand(-1, times, times)
    columns = (column[:, None, None] * times + each[None, None, :]).expand(-1, times, times)
    return torch.stack((rows.flatten(), columns.flatten()))


def _words(mask: Mask, row: Tensor, column: Tensor, shape: tuple[int, int], height: int, width: int) -> Tensor:
    """Return (tiles, height) words, whose bit c says whether the row meets the tile's column c."""
    device = row.device
    words = [torch.zeros((0, height), dtype=torch.int64, device=device)]
    within, across = torch.arange(height, device=device), torch.arange(width, device=device)
    for rows, columns in zip(row.split(AT_ONCE), column.split(AT_ONCE), strict=True):
        i = ((rows * height)[:, None] + within)[:, :, None]
        j = ((columns * width)[:, None] + across)[:, None, :]
        i, j = torch.broadcast_tensors(i, j)
        meets = mask.at(i.clamp(max=shape[0] - 1), j.clamp(max=shape[1] - 1)) & (i < shape[0]) & (j < shape[1])
        words.append((meets.long() << across).sum(-1))
    return torch.cat(words)


def turned_tiles(tiles: Tiles) -> Tiles:
    """Return the tiles of the transposed mask; tiles must be square."""
    (row, column), (part_row, part_column, bits) = tiles
    across = torch.arange(bits.shape[1], device=bits.device)
    words = [((word[:, :, None] >> across & 1) << across[:, None]).sum(1) for word in bits.split(AT_ONCE)]
    return (column, row), (part_column, part_row, torch.cat(words))
