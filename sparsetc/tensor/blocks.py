"""Blocks: the layout of dense blocks of one shape in a sparse tensor.

In: sides and sizes, one a mode, and coordinates of blocks. Out: sizes of the grid of blocks, masks of what lies inside
the tensor, blocks cut into smaller ones, and dense tensors split into blocks or joined from them. Values of blocks are
(n, *sides, *dense sizes). Blocks lie side by side from 0 on, so the last of a mode may reach past its end; what they
hold there is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import index
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsetc.errors import FormatError, ShapeError
from sparsetc.support import Ints
from sparsetc.tensor import coords as crd

T = TypeVar("T")


@dataclass(frozen=True)
class Blocks:
    """The sides of blocks, and the sizes of the modes that they divide."""

    sides: Ints
    shape: Ints

    @property
    def grid(self) -> Ints:
        """The number of blocks along each mode."""
        return tuple(-(-n // side) for n, side in zip(self.shape, self.sides, strict=True))

    @property
    def ragged(self) -> Ints:
        """The modes whose last blocks reach past the end."""
        return tuple(m for m, (n, side) in enumerate(zip(self.shape, self.sides, strict=True)) if n % side)

    def permuted(self, modes: Sequence[int]) -> Blocks:
        """Return the layout with the modes in another order."""
        return Blocks(tuple(self.sides[m] for m in modes), tuple(self.shape[m] for m in modes))

    def _interleaved(self, dims: int) -> Ints:
        """The dimensions of (*grid, *sides, *dense sizes), those of a mode beside one another."""
        order = len(self.sides)
        return (*[n for m in range(order) for n in (m, order + m)], *range(2 * order, dims))

    def zeros(self, sizes: Ints, like: Tensor) -> Tensor:
        """Return zeros (*grid, *sides, *dense sizes), which `laid_out` does not have to copy."""
        order = self._interleaved(len(sizes))
        return like.new_zeros([sizes[n] for n in order]).permute(sorted(range(len(order)), key=order.__getitem__))

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Return a tensor (*grid, *sides, *dense sizes) of blocks as (*shape, *dense sizes)."""
        dense = tensor.shape[2 * len(self.sides) :]
        interleaved = tensor.permute(self._interleaved(tensor.ndim))
        return joined(interleaved, (*self.sides, *[0] * len(dense)), (*self.shape, *dense))

    def cut_out(self, tensor: Tensor) -> Tensor:
        """Return a tensor (*shape) as (*grid, *sides) of blocks, zero past the end; the inverse of `laid_out`."""
        pairs = split(tensor, self.sides, self.shape)
        return pairs.permute(*range(0, pairs.ndim, 2), *range(1, pairs.ndim, 2))

    def masks(self, coords: Tensor) -> tuple[Tensor, ...]:
        """Return a bool mask for each ragged mode: True at positions of each block inside the tensor.

        Each has as many dimensions as (n, *sides).
        """
        inside = []
        for mode in self.ragged:
            shape = [1] * len(self.sides)
            shape[mode] = side = self.sides[mode]
            position = coords[mode].unsqueeze(1) * side + torch.arange(side, device=coords.device)
            inside.append((position < self.shape[mode]).reshape(-1, *shape))
        return tuple(inside)

    def cut(self, coords: Tensor, coalesced: bool, sides: Ints) -> tuple[Tensor, Tensor | None]:
        """Cut blocks into smaller ones, whose sides divide theirs; smaller blocks past the end are left out.

        Returns:
            (modes, m) coordinates of the smaller blocks, sorted if those of the larger are `coalesced`; and (m,) the
            number of each, counted one larger block after the other, None if none is cut.
        """
        if sides == self.sides:
            return coords, None
        times = self._times(sides)
        cut = crd.with_dense_modes(coords, times)  # coordinates of the larger, then places in them
        order = len(times)
        factors = torch.tensor(times, device=coords.device).unsqueeze(1)
        cut = cut[:order] * factors + cut[order:]
        grid = Blocks(sides, self.shape).grid
        source = torch.nonzero((cut < torch.tensor(grid, device=coords.device).unsqueeze(1)).all(0)).flatten()
        cut = cut.index_select(1, source)
        if coalesced:
            by_place = crd.lexsort(cut, grid)
            cut, source = cut.index_select(1, by_place), source.index_select(0, by_place)
        return cut.contiguous(), source

    def cut_values(self, values: Tensor, sides: Ints, source: Tensor | None) -> Tensor:
        """Cut values (n, *sides, *dense sizes) to (m, *smaller sides, *dense sizes), as `cut` says; differentiable."""
        if source is None:
            return values
        times, order = self._times(sides), len(sides)
        dense = values.shape[1 + order :]
        pairs = [n for pair in zip(times, sides, strict=True) for n in pair]
        parts = values.reshape(values.shape[0], *pairs, *dense)
        numbers, positions = range(1, 2 * order, 2), range(2, 2 * order + 1, 2)
        moved = parts.permute(0, *numbers, *positions, *range(2 * order + 1, parts.ndim))
        return moved.reshape(values.shape[0] * prod(times), *sides, *dense).index_select(0, source)

    def _times(self, sides: Ints) -> Ints:
        """Return the number of smaller blocks that one has along each mode."""
        return tuple(old // new for old, new in zip(self.sides, sides, strict=True))

    def check_end(self, coords: Tensor, values: Tensor) -> None:
        """Raise `FormatError` unless values past the end are zero; waits for the device if a mode is ragged."""
        inside = inside_only(torch.ones_like(values, dtype=torch.bool), self.masks(coords))
        wrong = ((values.detach() != 0) & ~inside).nonzero() if self.ragged else coords[:0]
        for block, *position in wrong[:1].tolist():
            at = [c * side + n for c, side, n in zip(coords[:, block].tolist(), self.sides, position, strict=False)]
            mode = next(m for m in self.ragged if at[m] >= self.shape[m])
            raise FormatError(
                f"block {block} has a nonzero at coordinate {at[mode]} of mode {mode}, whose size is "
                f"{self.shape[mode]}: what blocks hold past the end of the shape must be zero"
            )


def without_blocks(x: T) -> T:
    """Return a coalesced SparseTensor of single entries; of a tensor in blocks, dense modes become coordinates too."""
    tensor: Any = x
    return (tensor.expand_dense() if tensor.blocksize else tensor).coalesce()  # type: ignore[no-any-return]


def inside_only(values: Tensor, masks: Sequence[Tensor], past: int = 0) -> Tensor:
    """Return values of blocks with zero, or another number, past the end; differentiable."""
    for mask in masks:
        mask = mask.reshape(*mask.shape, *[1] * (values.ndim - mask.ndim))
        values = torch.where(mask, values, torch.full((), past, dtype=values.dtype, device=values.device))
    return values


def checked(sides: Any, shape: Sequence[int]) -> Blocks:
    """Return blocks with these sides. Raise `ShapeError` unless there is one side, 1 or more, for each size."""
    try:
        whole = tuple(map(index, sides))
    except TypeError:  # no numbers
        whole = ()
    if len(whole) != len(shape) or any(side < 1 for side in whole):
        raise ShapeError(f"blocks need a side of 1 or more for each of {len(shape)} modes, found sides {sides!r:.80}")
    return Blocks(whole, tuple(shape))


def split(tensor: Tensor, sides: Sequence[int], sizes: Sequence[int], first: int = 0) -> Tensor:
    """Split each dimension with a side into block number and position in the block; zero-pad the last block.

    Args:
        tensor: dense; a dimension of size 1 that has another full size is broadcast, and stays so.
        sides: of its dimensions from `first` on; 0 where a dimension stays as it is.
        sizes: full ones, of the same dimensions.
        first: the first of them.
    """
    if not any(sides):
        return tensor
    shape, padding = _split_shape(tensor.shape, tuple(sides), tuple(sizes), first)
    return (torch.nn.functional.pad(tensor, padding) if padding else tensor).reshape(shape)


@lru_cache(maxsize=1024)
def _split_shape(whole: Ints, sides: Ints, sizes: Ints, first: int) -> tuple[list[int], list[int]]:
    """Return the shape that `split` gives a tensor, and the padding before, as `torch.nn.functional.pad` takes it."""
    shape, padding = list(whole[:first]), [0] * len(whole)
    for n, (side, full) in enumerate(zip(sides, sizes, strict=True), first):
        size = whole[n]
        if not side:
            shape.append(size)
        elif size == 1 != full:
            shape += [1, 1]
        else:
            blocks = -(-size // side)
            padding[n] = blocks * side - size
            shape += [blocks, side]
    return shape, [p for n in reversed(padding) for p in (0, n)] if any(padding) else []


def joined(tensor: Tensor, sides: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Merge each dimension with a side and the next into one of a given size; the inverse of `split`."""
    tensor = tensor.reshape(_joined_shape(tensor.shape, tuple(sides)))
    return tensor if tensor.shape == tuple(sizes) else tensor[tuple(map(slice, sizes))]


@lru_cache(maxsize=1024)
def _joined_shape(sizes: Ints, sides: Ints) -> list[int]:
    """Return the shape in which each dimension with a side is one with the next."""
    each = iter(sizes)
    return [next(each) * next(each) if side else next(each) for side in sides]
