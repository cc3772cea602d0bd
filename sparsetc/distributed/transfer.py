"""Rows sent from the ranks that computed them to the ranks that keep them, added up where several have the same.

In: which box of a dense tensor, or which entries of a sparse one, each rank has, and which each shall have. Out: a
`Transfer`: one all-to-all, of which every rank knows beforehand what it sends, what it gets, and where that belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from sparsetc.distributed.agree import agreed
from sparsetc.distributed.cut import Box, Range
from sparsetc.distributed.ranks import Ranks
from sparsetc.tensor.sums import INTEGERS, accumulator, fitted, refuse_wrapped

Place = tuple[Any, tuple[int, ...]]
"""An index of a tensor, slices or numbers of rows, and the sizes of what lies there."""


@dataclass(frozen=True)
class Transfer:
    """What this rank sends and gets. Where ranks send the same elements, sums are made in order of the ranks.

    Attributes:
        sent: for each rank, how many elements it is sent.
        rows: (n,) which rows are sent, in order of the rank that they are for; None for all as they lie.
        places: where the part of each rank that sends something lies in the result.
        shape: of the result.
        adds: whether parts are added up, on any rank.
        in_order: whether parts as they come are the result.
        moves: whether anything is to be done, on any rank.
    """

    ranks: Ranks
    sent: tuple[int, ...]
    received: tuple[int, ...]
    rows: torch.Tensor | None
    places: tuple[Place, ...]
    shape: tuple[int, ...]
    adds: bool
    in_order: bool = False
    moves: bool = True

    @classmethod
    def of_boxes(
        cls, ranks: Ranks, boxes: Sequence[Box], targets: Sequence[Range], shape: Sequence[int], device: torch.device
    ) -> Transfer:
        """From boxes of a dense tensor to ranges of its rows.

        Args:
            ranks: as many as there are boxes and ranges.
            boxes: what each rank has; they are equal or do not overlap.
            targets: the rows, of the first mode, that each rank shall have.
            shape: of the whole tensor.
            device: where it is.
        """
        (rows, *others), (start, stop) = boxes[ranks.rank], targets[ranks.rank]
        spans = [_common(rows, target) for target in targets]
        numbers = [torch.arange(a - rows[0], b - rows[0], device=device) for a, b in spans]
        parts = [(_common(box[0], (start, stop)), *box[1:]) for box in boxes]
        there = [part for part in parts if elements(part)]
        whole = tuple((0, n) for n in shape[1:])
        full = [box for box in boxes if elements(box)]
        adds = len(set(full)) < len(full)
        return cls(
            ranks,
            tuple((b - a) * elements(others) for a, b in spans),
            tuple(map(elements, parts)),
            None if _follow(spans, rows) else torch.cat(numbers),
            tuple((_slices(part, start), sizes(part)) for part in there),
            (stop - start, *shape[1:]),
            adds,
            all(part[1:] == whole for part in there) and _follow([part[0] for part in there], (start, stop)),
            len(set(full)) < len(full)
            or any(box != (target, *whole) for box, target in zip(boxes, targets, strict=True)),
        )

    @property
    def elements(self) -> int:
        """How many elements this rank sends to others."""
        return sum(self.sent) - self.sent[self.ranks.rank] if self.moves else 0

    def __call__(self, local: torch.Tensor, what: str = "") -> torch.Tensor:
        """Send this rank's part, and return the result; collective.

        Raises:
            DtypeError, DistributedError: an integer does not fit, here or on another rank; names `what`.
        """
        finish, found = self.begin(local)
        finish()
        return self._summed(found, what) if self.adds else self._placed(found)

    def begin(self, local: torch.Tensor, out: torch.Tensor | None = None) -> tuple[Callable[[], None], torch.Tensor]:
        """Begin to send this rank's part; collective.

        Args:
            local: the part.
            out: contiguous; gets the parts of all ranks.

        Returns:
            What, when called, has the stream wait for the end, and the parts of all ranks.
        """
        if not self.moves:
            return lambda: None, local
        local = torch.atleast_1d(local)
        rows = local.contiguous() if self.rows is None else local.index_select(0, self.rows)
        found = local.new_empty(sum(self.received)) if out is None else out
        return self.ranks.exchange(found, rows.view(-1), self.received, self.sent), found

    def _placed(self, found: torch.Tensor) -> torch.Tensor:
        if self.in_order or not self.moves:
            return found.view(self.shape)
        out = found.new_empty(self.shape)
        for index, part in self._parts(found):
            out[index] = part
        return out

    def _summed(self, found: torch.Tensor, what: str) -> torch.Tensor:
        """Sums rounded once, to the dtype that the parts have."""
        sums = self._added_up(found, accumulator(found.dtype))
        if found.dtype not in INTEGERS:
            return sums.to(found.dtype)
        close = self._added_up(found, torch.float64)

        def fitting() -> torch.Tensor:
            refuse_wrapped(sums, close, what)
            return fitted(sums, found.dtype, what)

        return agreed(self.ranks, what, fitting)

    def _added_up(self, found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if all(one == self.shape for _, one in self.places):
            return found.view(len(self.places), *self.shape).sum(0, dtype=dtype)
        out = found.new_zeros(self.shape, dtype=dtype)
        for index, part in self._parts(found):
            out[index] += part
        return out

    def _parts(self, found: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
        parts = found.split([prod(one) for _, one in self.places])
        return [(index, part.view(one)) for (index, one), part in zip(self.places, parts, strict=True)]


def sizes(box: Sequence[Range]) -> tuple[int, ...]:
    """The sizes of a box."""
    return tuple(stop - start for start, stop in box)


def elements(box: Sequence[Range]) -> int:
    """How many elements a box has."""
    return prod(sizes(box))


def shares(rows: Range, ranks: int) -> list[Range]:
    """A range in equal parts, of which the last may be shorter, or empty: as a DTensor is cut."""
    start, stop = rows
    share = -(-(stop - start) // ranks)
    return [(min(stop, start + share * n), min(stop, start + share * (n + 1))) for n in range(ranks)]


def _slices(box: Box, start: int) -> tuple[slice, ...]:
    """The index of a box in a tensor whose first row is row `start` of the whole."""
    (first, last), *others = box
    return slice(first - start, last - start), *(slice(*r) for r in others)


def _common(one: Range, other: Range) -> Range:
    """The rows that two ranges have in common."""
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))


def _follow(spans: Sequence[Range], rows: Range) -> bool:
    """Whether ranges, but for the empty ones, follow one another and are all of `rows`."""
    spans = [(start, stop) for start, stop in spans if start < stop]
    return [rows[0], *(stop for _, stop in spans)] == [*(start for start, _ in spans), rows[1]]
