"""Masks of attention, combined by ``&``, ``|`` and ``~``: which queries meet which keys, without a tensor of all pairs.

In: positions. Out: a `Mask`, which `attention` takes for any number of queries and keys. A mask knows of a rectangle of
pairs whether some or all of them meet, so a kernel's tiles are found by halving squares that are mixed. The time that
this takes grows with the border of a mask, and not with its pairs.

    causal() & sliding_window(256) | global_tokens(64)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparsetc.errors import FormatError, ShapeError
from sparsetc.support.lru import Lru
from sparsetc.tensor.pattern import Pattern, lasting

__all__ = ["Mask", "block_mask", "causal", "dilated", "documents", "global_tokens", "prefix", "sliding_window"]

FAR = 1 << 62
"""Farther than any two positions are apart."""
AT_ONCE = 2048
"""Tiles whose pairs are looked at together."""
KEPT = 64
"""Lists of tiles, and patterns, that are kept. Not measured: a few masks of a model, in both orders of their modes."""

Tiles = tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Rows and columns of full tiles; rows, columns and words of bits of partial ones."""


class Mask(ABC):
    """Which queries i meet which keys j. Masks that are made alike are equal.

    Examples:
        >>> mask = stc.masks.causal() & stc.masks.sliding_window(1)
        >>> mask.dense(4).int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """

    @abstractmethod
    def at(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """Return whether query i meets key j, of positions that broadcast."""

    @abstractmethod
    def some(self, i0: torch.Tensor, i1: torch.Tensor, j0: torch.Tensor, j1: torch.Tensor) -> torch.Tensor:
        """Return False only where no query of ``i0 .. i1`` meets a key of ``j0 .. j1``, both ends included."""

    @abstractmethod
    def full(self, i0: torch.Tensor, i1: torch.Tensor, j0: torch.Tensor, j1: torch.Tensor) -> torch.Tensor:
        """Return True only where all of them meet."""

    def __and__(self, other: Mask) -> Mask:
        return _And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return _Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return _Not(self)

    def dense(self, queries: int, keys: int | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the mask of all pairs, (queries, keys) bool; as many keys as queries unless they are given."""
        i = torch.arange(queries, device=device)
        j = i if keys is None else torch.arange(keys, device=device)
        return self.at(i[:, None], j[None, :]).expand(len(i), len(j)).contiguous()


@dataclass(frozen=True)
class _And(Mask):
    left: Mask
    right: Mask

    def at(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return self.left.at(i, j) & self.right.at(i, j)

    def some(self, *rectangle: torch.Tensor) -> torch.Tensor:
        return self.left.some(*rectangle) & self.right.some(*rectangle)

    def full(self, *rectangle: torch.Tensor) -> torch.Tensor:
        return self.left.full(*rectangle) & self.right.full(*rectangle)


@dataclass(frozen=True)
class _Or(Mask):
    left: Mask
    right: Mask

    def at(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return self.left.at(i, j) | self.right.at(i, j)

    def some(self, *rectangle: torch.Tensor) -> torch.Tensor:
        return self.left.some(*rectangle) | self.right.some(*rectangle)

    def full(self, *rectangle: torch.Tensor) -> torch.Tensor:
        return self.left.full(*rectangle) | self.right.full(*rectangle)


@dataclass(frozen=True)
class _Not(Mask):
    mask: Mask

    def at(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return ~self.mask.at(i, j)

    def some(self, *rectangle: torch.Tensor) -> torch.Tensor:
        return ~self.mask.full(*rectangle)

    def full(self, *rectangle: torch.Tensor) -> torch.Tensor:
        return ~self.mask.some(*rectangle)


@dataclass(frozen=True)
class _Turned(Mask):
    """A mask with queries and keys in each other's place."""

    mask: Mask

    def at(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return self.mask.at(j, i)

    def some(self, i0: torch.Tensor, i1: torch.Tensor, j0: torch.Tensor, j1: torch.Tensor) -> torch.Tensor:
        return self.mask.some(j0, j1, i0, i1)

    def full(self, i0: torch.Tensor, i1: torch.Tensor, j0: torch.Tensor, j1: torch.Tensor) -> torch.Tensor:
        return self.mask.full(j0, j1, i0, i1)


@dataclass(frozen=True)
class _Band(Mask):
    """Pairs with ``low <= i - j <= high``."""

    low: int
    high: int

    def at(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (i - j >= self.low) & (i - j <= self.high)

    def some(self, i0: torch.Tensor, i1: torch.Tensor, j0: torch.Tensor, j1: torch.Tensor) -> torch.Tensor:
        return (i1 - j0 >= self.low) & (i0 - j1 <= self.high)

    def full(self, i0: torch.Tensor, i1: torch.Tensor, j0: torch.Tensor, j1: torch.Tensor) -> torch.Tensor:
        return (i0 - j1 >= self.low) & (i1 - j0 <= self.high)


@dataclass(frozen=True)
class _Keys(Mask):
    """Pairs of any query with the first keys."""

    count: int

    def at(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (j < self.count).expand(torch.broadcast_shapes(i.shape, j.shape))

    def some(self, i0: torch.Tensor, i1: torch.Tensor, j0: torch.Tensor, j1: torch.Tensor) -> torch.Tensor:
        return j0 < self.count

    def full(self, i0: torch.Tensor, i1: torch.Tensor, j0: torch.Tensor, j1: torch.Tensor) -> torch.Tensor:
        return j1 < self.count


@dataclass(frozen=True)
class _Dilated(Mask):
    """Pairs whose positions differ by a multiple of a step."""

    step: int

    def at(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (i - j) % self.step == 0

    def some(self, i0: torch.Tensor, i1: torch.Tensor, j0: torch.Tensor, j1: torch.Tensor) -> torch.Tensor:
        return (i1 - j0) // self.step * self.step >= i0 - j1

    def full(self, i0: torch.Tensor, i1: torch.Tensor, j0: torch.Tensor, j1: torch.Tensor) -> torch.Tensor:
        alone = (i0 == i1) & (j0 == j1) & self.at(i0, j0)
        return alone | torch.full_like(alone, self.step == 1)


@dataclass(frozen=True)
class _Documents(Mask):
    """Pairs within one document, of which each ends where the next begins."""

    ends: tuple[int, ...]

    def _number(self, position: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor(self.ends, device=position.device)
        return torch.searchsorted(ends, position.contiguous(), right=True)

    def at(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return self._number(i) == self._number(j)

    def some(self, i0: torch.Tensor, i1: torch.Tensor, j0: torch.Tensor, j1: torch.Tensor) -> torch.Tensor:
        return (self._number(i0) <= self._number(j1)) & (self._number(j0) <= self._number(i1))

    def full(self, i0: torch.Tensor, i1: torch.Tensor, j0: torch.Tensor, j1: torch.Tensor) -> torch.Tensor:
        first = self._number(i0)
        return (first == self._number(i1)) & (first == self._number(j0)) & (first == self._number(j1))


@dataclass(frozen=True, eq=False)
class _OfFlex(Mask):
    """FlexAttention's block mask of one batch and head: tables of blocks, and a function of positions in others.

    Attributes:
        function: of batch, head, query and key, asked of blocks that are marked and not full.
        sides: of blocks.
        marked: (rows + 1, columns + 1) how many blocks are marked above and left of each.
        whole: likewise of those that are full.
    """

    function: Any
    sides: tuple[int, int]
    marked: torch.Tensor
    whole: torch.Tensor

    def _count(self, table: torch.Tensor, rectangle: Sequence[torch.Tensor]) -> torch.Tensor:
        i0, i1, j0, j1 = self._ends(rectangle)
        return table[i1, j1] - table[i0, j1] - table[i1, j0] + table[i0, j0]

    def _ends(self, rectangle: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        (rows, columns), (i0, i1, j0, j1) = self.sides, rectangle
        height, width = self.marked.shape[0] - 1, self.marked.shape[1] - 1
        last_row, last_column = (i1 // rows + 1).clamp(max=height), (j1 // columns + 1).clamp(max=width)
        return (i0 // rows).clamp(max=height), last_row, (j0 // columns).clamp(max=width), last_column

    def at(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        i, j = torch.broadcast_tensors(i, j)
        flat_i, flat_j = i.flatten(), j.flatten()
        rectangle = (flat_i, flat_i, flat_j, flat_j)
        whole, meets = self._count(self.whole, rectangle) > 0, self._count(self.marked, rectangle) > 0
        asked = meets & ~whole
        if bool(asked.any()):  # vmap takes no functions of no positions that divide
            zero = torch.zeros_like(flat_i[asked])
            meets = meets.masked_scatter(asked, torch.vmap(self.function)(zero, zero, flat_i[asked], flat_j[asked]))
        return meets.view(i.shape)

    def some(self, *rectangle: torch.Tensor) -> torch.Tensor:
        return self._count(self.marked, rectangle) > 0

    def full(self, *rectangle: torch.Tensor) -> torch.Tensor:
        i0, i1, j0, j1 = self._ends(rectangle)
        return self._count(self.whole, rectangle) == (i1 - i0) * (j1 - j0)


# -- what users write -------------------------------------------------------------------------------------------------


def causal(offset: int = 0) -> Mask:
    """Return the mask of keys at ``j <= i + offset``: a query's own position and those before."""
    return _Band(-offset, FAR)


def sliding_window(before: int, after: int | None = None) -> Mask:
    """Return the mask of keys at ``i - before <= j <= i + after``; as many after as before unless they are given."""
    after = before if after is None else after
    if before < 0 or after < 0:
        raise ShapeError(f"a sliding window takes distances of 0 or more, found {before} and {after}")
    return _Band(-after, before)


def prefix(length: int) -> Mask:
    """Return the mask of the first `length` keys, which every query meets."""
    return _Keys(length)


def global_tokens(count: int) -> Mask:
    """Return the mask of the first `count` positions: they meet every key, and every query meets them."""
    return _Keys(count) | _Turned(_Keys(count))


def dilated(step: int) -> Mask:
    """Return the mask of positions that differ by a multiple of `step`."""
    if step < 1:
        raise ShapeError(f"a dilated mask takes a step of 1 or more, found {step}")
    return _Dilated(step)


def documents(offsets: torch.Tensor | Sequence[int]) -> Mask:
    """Return the mask of pairs within one document.

    Args:
        offsets: (documents + 1,) where each document begins and the last one ends, as ``cu_seqlens``. Positions from
            there on are one more document, so padding meets padding alone.

    Raises:
        ShapeError: offsets that fall, or do not begin at 0.

    Examples:
        >>> stc.masks.documents([0, 1, 3]).dense(3).int()
        tensor([[1, 0, 0],
                [0, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
    """
    numbers = [int(n) for n in (offsets.tolist() if isinstance(offsets, torch.Tensor) else offsets)]
    if numbers[:1] != [0] or numbers != sorted(numbers):
        raise ShapeError(f"documents takes offsets that begin at 0 and do not fall, found {numbers!r:.80}")
    return _Documents(tuple(numbers[1:]))


def block_mask(mask: Any) -> Mask:
    """Return the mask of FlexAttention's `BlockMask` of one batch and head.

    Raises:
        FormatError: of several batches or heads.
    """
    if mask.kv_num_blocks.shape[:2].numel() != 1:
        raise FormatError("attention: a BlockMask must be of one batch and head; take a mask a call for others")
    rows, columns = mask.kv_num_blocks.shape[-1], -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])

    def table(counts: torch.Tensor | None, indices: torch.Tensor | None) -> torch.Tensor:
        marked = torch.zeros((rows, columns), dtype=torch.bool, device=mask.kv_num_blocks.device)
        if counts is not None and indices is not None:
            listed = torch.arange(indices.shape[-1], device=marked.device) < counts[0, 0][:, None]
            row, place = listed.nonzero().T
            marked[row, indices[0, 0].long()[row, place]] = True
        return marked

    whole = table(mask.full_kv_num_blocks, mask.full_kv_indices)
    marked = whole | table(mask.kv_num_blocks, mask.kv_indices)
    counts = [torch.nn.functional.pad(t.long().cumsum(0).cumsum(1), (1, 0, 1, 0)) for t in (marked, whole)]
    return _OfFlex(mask.mask_mod, tuple(mask.BLOCK_SIZE), counts[0], counts[1])


# -- tiles and entries ------------------------------------------------------------------------------------------------

_kept: Lru[object, object] = Lru(KEPT)


def turned(mask: Mask) -> Mask:
    """Return the mask with queries and keys in each other's place."""
    return mask.mask if isinstance(mask, _Turned) else _Turned(mask)


def tiles_of(mask: Mask, shape: tuple[int, int], height: int, width: int, device: torch.device) -> Tiles:
    """Return the tiles that a mask meets, of `height` queries by `width` keys, 64 at most."""
    size = 1
    while size * height < shape[0] or size * width < shape[1]:
        size *= 2
    row = column = torch.zeros(1, dtype=torch.int64, device=device)
    whole: list[torch.Tensor] = []
    while True:
        i0, j0 = row * size * height, column * size * width
        begins = (i0 < shape[0]) & (j0 < shape[1])
        row, column, i0, j0 = row[begins], column[begins], i0[begins], j0[begins]
        i1, j1 = i0 + size * height - 1, j0 + size * width - 1
        rectangle = i0, i1.clamp(max=shape[0] - 1), j0, j1.clamp(max=shape[1] - 1)
        full = mask.full(*rectangle) & (i1 < shape[0]) & (j1 < shape[1])
        mixed = mask.some(*rectangle) & ~full
        whole.append(_divided(row[full], column[full], size))
        row, column = row[mixed], column[mixed]
        if size == 1:
            break
        row, column = _divided(row, column, 2)
        size //= 2
    bits = _words(mask, row, column, shape, height, width)
    some, all_ones = (bits != 0).any(1), (bits == (-1 if width == 64 else (1 << width) - 1)).all(1)
    part = some & ~all_ones
    full_row, full_column = torch.cat([*whole, torch.stack((row[all_ones], column[all_ones]))], 1)
    return (full_row, full_column), (row[part], column[part], bits[part])


def _divided(row: torch.Tensor, column: torch.Tensor, times: int) -> torch.Tensor:
    """Return (2, n) rows and columns of squares cut into ``times ** 2`` each."""
    each = torch.arange(times, device=row.device)
    rows = (row[:, None, None] * times + each[None, :, None]).expand(-1, times, times)
    columns = (column[:, None, None] * times + each[None, None, :]).expand(-1, times, times)
    return torch.stack((rows.flatten(), columns.flatten()))


def _words(
    mask: Mask, row: torch.Tensor, column: torch.Tensor, shape: tuple[int, int], height: int, width: int
) -> torch.Tensor:
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


def pattern_of(mask: Mask, shape: tuple[int, int], device: torch.device) -> Pattern:
    """Return the entries of a mask, made once for a shape; they take 16 bytes each."""

    def made() -> Pattern:
        with lasting():
            (row, column), (part_row, part_column, bits) = tiles_of(mask, shape, 64, 64, device)
            across = torch.arange(64, device=device)
            words = torch.cat((torch.full((len(row), 64), -1, device=device), bits))
            tile, i, j = (((words[:, :, None] >> across) & 1) != 0).nonzero().T
            place = torch.cat((row, part_row))[tile] * 64 + i, torch.cat((column, part_column))[tile] * 64 + j
            keys = torch.sort(place[0] * shape[1] + place[1]).values
            return Pattern(torch.stack((keys // shape[1], keys % shape[1])), shape, True)

    return _kept.once(("pattern", mask, shape, device), made)  # type: ignore[return-value]
