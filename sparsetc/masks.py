"""Masks of attention: rules for the keys of each query, combined by ``&``, ``|`` and ``~``, without n x n memory.

In: positions. Out: a `Mask`, which `attention` takes for any number of queries and keys. A mask knows of a rectangle of
pairs whether some or all of them meet, so a kernel's tiles are found without looking at all pairs (`maps.mask_tiles`).

    causal() & sliding_window(256) | global_tokens(64)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsetc.errors import FormatError, ShapeError
from sparsetc.support import cached_property
from sparsetc.support.checks import found_shape
from sparsetc.tensor.coords import checked_size, offset_of
from sparsetc.tensor.pattern import lasting, registered

__all__ = [
    "Mask",
    "block_mask",
    "causal",
    "dense_mask",
    "dilated",
    "documents",
    "everything",
    "global_tokens",
    "prefix",
    "sliding_window",
]

FAR = 1 << 62
"""Farther than any two positions are apart."""
SIDE = 32
"""Rows and columns of the blocks that a boolean tensor is looked at in."""

Rectangle = tuple[Tensor, Tensor, Tensor, Tensor]
"""First and last queries i0 and i1, first and last keys j0 and j1, both ends included; of many rectangles at once."""


@dataclass(frozen=True, eq=False)
class Mask:
    """A rule for the keys j that each query i attends to. Equal masks made twice compare equal.

    Attributes:
        made: the kind of mask and its arguments; masks are equal if these are.
        at: function of tensors of queries i and keys j, which broadcast; True where query i attends to key j.
        some: function of rectangles of pairs; False only where no query attends to a key.
        full: function of rectangles of pairs; True only where every query attends to every key.
        number: an integer by which graphs of torch name the mask.

    Examples:
        >>> mask = stc.masks.causal() & stc.masks.sliding_window(1)
        >>> mask.dense(4).int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """

    made: tuple[Any, ...]
    at: Callable[[Tensor, Tensor], Tensor] = field(repr=False)
    some: Callable[[Rectangle], Tensor] = field(repr=False)
    full: Callable[[Rectangle], Tensor] = field(repr=False)
    number: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", registered(self))

    @cached_property
    def _hash(self) -> int:
        return hash(self.made)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mask) and self.made == other.made)

    def __and__(self, other: Mask) -> Mask:
        return self._with("and", other, operator.and_)

    def __or__(self, other: Mask) -> Mask:
        return self._with("or", other, operator.or_)

    def _with(self, name: str, other: Mask, both: Callable[[Tensor, Tensor], Tensor]) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask(
            (self, name, other),
            lambda i, j: both(self.at(i, j), other.at(i, j)),
            lambda r: both(self.some(r), other.some(r)),
            lambda r: both(self.full(r), other.full(r)),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, self.made

    def __invert__(self) -> Mask:
        return Mask(("not", self), lambda i, j: ~self.at(i, j), lambda r: ~self.full(r), lambda r: ~self.some(r))

    @property
    def turned(self) -> Mask:
        """The mask with queries and keys in each other's place."""

        def turn(r: Rectangle) -> Rectangle:
            return r[2], r[3], r[0], r[1]

        return Mask(
            ("turned", self), lambda i, j: self.at(j, i), lambda r: self.some(turn(r)), lambda r: self.full(turn(r))
        )

    def dense(self, queries: int, keys: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return the mask of all pairs, (queries, keys) bool; as many keys as queries unless they are given."""
        i = torch.arange(checked_size(queries, "the number of queries"), device=device)
        j = i if keys is None else torch.arange(checked_size(keys, "the number of keys"), device=device)
        return self.at(i[:, None], j[None, :]).expand(len(i), len(j)).contiguous()


# -- what users write -------------------------------------------------------------------------------------------------


def causal(offset: int = 0) -> Mask:
    """Return the mask of keys at ``j <= i + offset``: a query's own position and those before.

    Examples:
        >>> stc.attention(torch.zeros(2, 4), torch.zeros(2, 4), torch.eye(2), stc.masks.causal())
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    return _band(-offset_of(offset), FAR)


def sliding_window(before: int, after: int | None = None) -> Mask:
    """Return the mask of keys at ``i - before <= j <= i + after``; as many after as before unless they are given.

    Raises:
        ShapeError: a negative distance.

    Examples:
        >>> stc.masks.sliding_window(1, 0).dense(3).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    before, after = (
        checked_size(n, "a distance of a sliding window") for n in (before, before if after is None else after)
    )
    return _band(-after, before)


@lru_cache(maxsize=64)
def _band(low: int, high: int) -> Mask:
    """Return the mask of pairs with ``low <= i - j <= high``."""
    return Mask(
        ("band", low, high),
        lambda i, j: (i - j >= low) & (i - j <= high),
        lambda r: (r[1] - r[2] >= low) & (r[0] - r[3] <= high),
        lambda r: (r[0] - r[3] >= low) & (r[1] - r[2] <= high),
    )


def everything() -> Mask:
    """Return the mask by which every query meets every key.

    Examples:
        >>> stc.masks.everything().dense(1, 3)
        tensor([[True, True, True]])
    """
    return _band(-FAR, FAR)


def prefix(length: int) -> Mask:
    """Return the mask of the first `length` keys, which every query meets.

    Examples:
        >>> (stc.masks.prefix(2) | stc.masks.causal()).dense(3).int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
    """
    length = checked_size(length, "the number of first keys")
    return Mask(
        ("prefix", length),
        lambda i, j: (j < length).expand(torch.broadcast_shapes(i.shape, j.shape)),
        lambda r: r[2] < length,
        lambda r: r[3] < length,
    )


def global_tokens(count: int) -> Mask:
    """Return the mask of the first `count` positions: they meet every key, and every query meets them.

    Examples:
        >>> stc.masks.global_tokens(1).dense(3).int()
        tensor([[1, 1, 1],
                [1, 0, 0],
                [1, 0, 0]], dtype=torch.int32)
    """
    return prefix(count) | prefix(count).turned


def dilated(step: int) -> Mask:
    """Return the mask of positions that differ by a multiple of `step`.

    Raises:
        ShapeError: a step below 1.

    Examples:
        >>> stc.masks.dilated(2).dense(3).int()
        tensor([[1, 0, 1],
                [0, 1, 0],
                [1, 0, 1]], dtype=torch.int32)
    """
    step = checked_size(step, "the step of a dilated mask", 1)

    def full(r: Rectangle) -> Tensor:
        alone = (r[0] == r[1]) & (r[2] == r[3]) & ((r[0] - r[2]) % step == 0)
        return alone | torch.full_like(alone, step == 1)

    return Mask(
        ("dilated", step), lambda i, j: (i - j) % step == 0, lambda r: (r[1] - r[2]) // step * step >= r[0] - r[3], full
    )


def documents(offsets: Tensor | Sequence[int], keys: Tensor | Sequence[int] | None = None) -> Mask:
    """Return the mask of pairs within one document.

    Args:
        offsets: (documents + 1,) where each document begins and the last one ends, as ``cu_seqlens``. Positions from
            there on are one more document, so padding meets padding alone.
        keys: likewise of the keys, where they are others than the queries.

    Raises:
        ShapeError: offsets that fall, or do not begin at 0, or other numbers of documents.

    Examples:
        >>> stc.masks.documents([0, 1, 3]).dense(3).int()
        tensor([[1, 0, 0],
                [0, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
    """
    of_queries, number = _numbering(offsets)
    of_keys, number_of_key = (of_queries, number) if keys is None else _numbering(keys)
    if len(of_queries) != len(of_keys):
        raise ShapeError(f"documents: {len(of_queries) - 1} of queries and {len(of_keys) - 1} of keys")

    def full(r: Rectangle) -> Tensor:
        first = number(r[0])
        return (first == number(r[1])) & (first == number_of_key(r[2])) & (first == number_of_key(r[3]))

    return Mask(
        ("documents", of_queries, of_keys),
        lambda i, j: number(i) == number_of_key(j),
        lambda r: (number(r[0]) <= number_of_key(r[3])) & (number_of_key(r[2]) <= number(r[1])),
        full,
    )


def _numbering(offsets: Tensor | Sequence[int]) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor]]:
    """Return where documents begin, and the function that gives a position's document."""
    given: Any = offsets.tolist() if isinstance(offsets, Tensor) else offsets
    listed = given if isinstance(given, Iterable) else [given]
    numbers = tuple([checked_size(n, "an offset of a document") for n in listed])
    if numbers[:1] != (0,) or list(numbers) != sorted(numbers):
        raise ShapeError(f"documents takes offsets that begin at 0 and do not fall, found {numbers!r:.80}")

    @lru_cache(maxsize=4)
    def ends(device: torch.device) -> Tensor:
        with lasting():
            return torch.tensor(numbers[1:], device=device)

    return numbers, lambda position: torch.searchsorted(ends(position.device), position.contiguous(), right=True)


def dense_mask(meets: Tensor) -> Mask:
    """Return the mask of a boolean tensor (queries, keys), either size 1 for all positions; it equals no other.

    Raises:
        ShapeError: another tensor, or none.

    Examples:
        >>> padding = torch.tensor([[True, True, False]])
        >>> stc.masks.dense_mask(padding).dense(2, 3).int()
        tensor([[1, 1, 0],
                [1, 1, 0]], dtype=torch.int32)
    """
    boolean = isinstance(meets, Tensor) and meets.dtype == torch.bool and meets.layout == torch.strided
    if not boolean or meets.ndim != 2:
        raise ShapeError(f"dense_mask takes a dense boolean tensor (queries, keys), found {found_shape(meets)}")
    some = full = meets
    for mode, size in enumerate(meets.shape):
        if size > 1:
            past = (0, 0, 0, -size % SIDE) if mode == 0 else (0, -size % SIDE)
            some, full = (functional.pad(t, past, value=fill) for t, fill in ((some, False), (full, True)))
            some, full = some.unflatten(mode, (-1, SIDE)).any(mode + 1), full.unflatten(mode, (-1, SIDE)).all(mode + 1)

    def at(i: Tensor, j: Tensor) -> Tensor:
        i, j = (t if size > 1 else torch.zeros_like(t) for t, size in zip((i, j), meets.shape, strict=True))
        return meets[i, j]

    sides = [SIDE if size > 1 else FAR for size in meets.shape]
    return _in_table(some, full, (sides[0], sides[1]), at)


def block_mask(mask: Any, batch: int = 0, head: int = 0) -> Mask:
    """Return the mask that FlexAttention's `BlockMask` has for a batch and head; it equals no other.

    Examples:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> flex = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
        >>> int(stc.masks.block_mask(flex).dense(128).sum())
        8256
    """
    rows, columns = mask.seq_lengths
    sides = mask.BLOCK_SIZE
    device = mask.kv_num_blocks.device
    grid = -(-rows // sides[0]), -(-columns // sides[1])
    one = batch, head
    whole = _table(mask.full_kv_num_blocks, mask.full_kv_indices, one, grid, device)
    marked = whole | _table(mask.kv_num_blocks, mask.kv_indices, one, grid, device)

    def at(i: Tensor, j: Tensor) -> Tensor:
        i, j = (t.contiguous() for t in torch.broadcast_tensors(i, j))
        row, column = i // sides[0], j // sides[1]
        meets = marked[row, column]
        asked = meets & ~whole[row, column]
        if bool(asked.any()):  # vmap takes no functions of no positions that divide
            q, k = i[asked], j[asked]
            b, h = torch.full_like(q, batch), torch.full_like(q, head)
            meets = meets.masked_scatter(asked, torch.vmap(mask.mask_mod)(b, h, q, k))
        return meets

    return _in_table(marked, whole, sides, at)


def _in_table(some: Tensor, full: Tensor, sides: tuple[int, int], at: Callable[[Tensor, Tensor], Tensor]) -> Mask:
    """Return a mask of blocks: tables (rows, columns) of whether some and whether all pairs of each block meet."""
    grid = some.shape

    def ends(r: Rectangle) -> list[Tensor]:
        blocks = r[0] // sides[0], r[1] // sides[0] + 1, r[2] // sides[1], r[3] // sides[1] + 1
        return [end.clamp(max=grid[n // 2]) for n, end in enumerate(blocks)]

    def counter(table: Tensor) -> Callable[[list[Tensor]], Tensor]:
        before = functional.pad(table.long().cumsum(0).cumsum(1), (1, 0, 1, 0))

        def count(rectangle: list[Tensor]) -> Tensor:
            i0, i1, j0, j1 = rectangle
            return before[i1, j1] - before[i0, j1] - before[i1, j0] + before[i0, j0]

        return count

    of_some, of_full = counter(some), counter(full)

    def is_full(r: Rectangle) -> Tensor:
        i0, i1, j0, j1 = rectangle = ends(r)
        return of_full(rectangle) == (i1 - i0) * (j1 - j0)

    return Mask(("table", object()), at, lambda r: of_some(ends(r)) > 0, is_full)


def _table(
    counts: Tensor | None, indices: Tensor | None, one: tuple[int, int], grid: tuple[int, int], device: torch.device
) -> Tensor:
    """Return which blocks are listed for one batch and head, (rows, columns) of blocks, bool."""
    marked = torch.zeros(grid, dtype=torch.bool, device=device)
    if counts is not None and indices is not None:
        listed = torch.arange(indices.shape[-1], device=device) < counts[one][:, None]
        row, place = listed.nonzero().T
        marked[row, indices[one].long()[row, place]] = True
    return marked


def _again(*made: Any) -> Mask:
    """Return a mask made as `Mask.made` says, for pickles."""
    first, second, *others = made
    if first == "not":
        return ~second  # type: ignore[no-any-return]
    if first == "turned":
        return second.turned  # type: ignore[no-any-return]
    if isinstance(first, Mask):
        return first & others[0] if second == "and" else first | others[0]
    if first == "table":
        raise FormatError("the mask of a BlockMask or tensor cannot be pickled or copied; keep what it was made of")
    makers: dict[Any, Callable[..., Mask]]
    makers = {"band": _band, "prefix": prefix, "dilated": dilated, "documents": documents}
    return makers[first](second, *others)


for _maker in (causal, sliding_window, everything, prefix, global_tokens, dilated):
    vars(_maker)["_dynamo_marked_constant"] = True  # a graph that makes a mask has it as it is
