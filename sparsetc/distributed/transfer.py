"""Transfer of rows from the ranks that computed them to their owners, where rows of several ranks are added up.

In: which box of a dense tensor, or which entries of a sparse one, each rank has, and which each shall have. Out: a
`Transfer`: one all-to-all, of which every rank knows beforehand what it sends, what it gets, and where that belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsetc.distributed.cut import Box, Range
from sparsetc.distributed.ranks import Ranks, agreed
from sparsetc.support import Ints
from sparsetc.tensor.coords import picked
from sparsetc.tensor.dtypes import INTEGERS, accumulator, fitted, refuse_wrapped

Region = tuple[Any, Ints]
"""An index of a tensor, slices or numbers of rows, and the sizes of what lies there."""
Parts = list[tuple[Any, Tensor]]


@dataclass(frozen=True)
class Transfer:
    """The rows that this rank sends and receives. Its own rows are not sent, and nothing is copied if nothing moves.

    Attributes:
        spans: for each rank, which rows it is sent.
        width: elements of each of these rows.
        regions: where the part of each rank lies in the result.
        shape: of the result.
        adds: whether parts are added up, on any rank: in order of the ranks, so sums have the same bits at each run.
        moves: whether anything is to be done, on any rank.
        order: (n,) the rows in the order that `spans` count them in; None for as they lie.
    """

    ranks: Ranks
    spans: tuple[Range, ...]
    width: int
    regions: tuple[Region, ...]
    shape: Ints
    adds: bool
    moves: bool = True
    order: Tensor | None = None

    @classmethod
    def of_boxes(cls, ranks: Ranks, boxes: Sequence[Box], targets: Sequence[Range], shape: Sequence[int]) -> Transfer:
        """Make the transfer from boxes of a dense tensor to ranges of its rows.

        Args:
            ranks: as many as there are boxes and ranges.
            boxes: what each rank has; they are equal or do not overlap.
            targets: the rows, of the first mode, that each rank shall have.
            shape: of the whole tensor.
        """
        (rows, *others), (start, stop) = boxes[ranks.rank], targets[ranks.rank]
        parts = [(_common(box[0], (start, stop)), *box[1:]) for box in boxes]
        whole = tuple((0, n) for n in shape[1:])
        full = [box for box in boxes if prod(sizes(box))]
        adds = len(set(full)) < len(full)
        return cls(
            ranks,
            tuple(_from(rows[0], _common(rows, target)) for target in targets),
            prod(sizes(others)),
            tuple(((slice(*_from(start, part[0])), *(slice(*r) for r in part[1:])), sizes(part)) for part in parts),
            (stop - start, *shape[1:]),
            adds,
            adds or any(box != (target, *whole) for box, target in zip(boxes, targets, strict=True)),
        )

    @property
    def sent(self) -> list[int]:
        """Return how many elements each rank is sent; this one none."""
        return [(b - a) * self.width * (rank != self.ranks.rank) for rank, (a, b) in enumerate(self.spans)]

    def __call__(self, local: Tensor, what: str = "", out: Tensor | None = None) -> Tensor:
        """Send the rows of this rank, and return the result, in `out` if rows need no sums; collective.

        Raises:
            DtypeError, DistributedError: an integer does not fit, here or on another rank; names `what`.
        """
        if not self.moves:
            return local
        parts = self._sent(local)
        if self.adds:
            return self._summed(parts, local, what)
        out = local.new_empty(self.shape) if out is None else out
        for index, part in parts:
            out[index] = part
        return out

    def _sent(self, local: Tensor) -> Parts:
        """Send, and return the parts of all ranks."""
        local = torch.atleast_1d(picked(local, self.order))
        rows, me = [local[a:b] for a, b in self.spans], self.ranks.rank
        others = [one for rank, one in enumerate(rows) if rank != me and one.numel()] or [local[:0]]
        sending = others[0] if len(others) == 1 else torch.cat(others)
        counts = [prod(one) * (rank != me) for rank, (_, one) in enumerate(self.regions)]
        buffer = self.ranks.exchanged(sending.reshape(-1), counts, self.sent)
        each = zip(self.regions, buffer.split(counts), strict=True)
        parts = [(index, rows[me] if n == me else part.view(one)) for n, ((index, one), part) in enumerate(each)]
        return [(index, part) for index, part in parts if part.numel()]

    def _summed(self, parts: Parts, like: Tensor, what: str) -> Tensor:
        """Sums rounded once, to the dtype that the parts have."""
        dtype = like.dtype
        sums = self._added_up(parts, like, accumulator(dtype))
        if dtype not in INTEGERS:
            return sums.to(dtype)
        close = self._added_up(parts, like, torch.float64)

        def fitting() -> Tensor:
            refuse_wrapped(sums, close, what)
            return fitted(sums, dtype, what)

        return agreed(self.ranks, what, fitting)

    def _added_up(self, parts: Parts, like: Tensor, dtype: torch.dtype) -> Tensor:
        out = like.new_zeros(self.shape, dtype=dtype)
        for index, part in parts:
            out[index] += part
        return out


def sizes(box: Sequence[Range]) -> Ints:
    """The sizes of a box."""
    return tuple(stop - start for start, stop in box)


def _common(one: Range, other: Range) -> Range:
    """The rows that two ranges have in common."""
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))


def _from(first: int, rows: Range) -> Range:
    """Return a range relative to row `first`; an empty range becomes (0, 0)."""
    return (rows[0] - first, rows[1] - first) if rows[0] < rows[1] else (0, 0)
