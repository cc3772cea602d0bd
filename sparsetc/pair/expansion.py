"""Tasks, made a chunk at a time and grouped by the entry of the result that each adds to.

In: a `JoinOrder`, which has counted them. Out: `TaskGroup`s, in the order of the tasks, with the places of the result
that each is the first to reach. Chunks are of whole rows: rows come in order, so what a chunk reaches follows all that
was reached before, nothing is sorted twice, and one sort gives both the pattern and each task's entry of it. A row with
more tasks than a chunk is gone through twice, in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsetc.formats.base import index_dtype
from sparsetc.pair.symbolic import Expanded, JoinOrder
from sparsetc.tensor import coords as crd
from sparsetc.tensor import numbering
from sparsetc.tensor.coords import INT32_MAX


@dataclass(frozen=True)
class TaskGroup:
    """Consecutive tasks, and the entries of the result that they add to."""

    tasks: Expanded
    slot: torch.Tensor
    """(n,) the entry of the result that each task adds to."""
    fresh: torch.Tensor
    """(m,) int64, ascending: the places that no group before has reached."""


@dataclass(frozen=True)
class Span:
    """All tasks of rows ``row .. last`` of the result: ``begin .. end``."""

    begin: int
    end: int
    row: int
    last: int


def spans(join_order: JoinOrder, size: int) -> Iterator[Span]:
    """Spans of as many whole rows as have `size` tasks, or of one row that has more."""
    if not join_order.tasks:
        return
    starts = join_order.row_starts
    ends = join_order.ends[torch.cat([starts[1:], starts.new_tensor([join_order.matched[0]])]) - 1].cpu()
    begin, row = 0, 0
    while begin < join_order.tasks:
        last = max(row + 1, int(torch.searchsorted(ends, begin + size, right=True)))
        end = int(ends[last - 1])
        yield Span(begin, end, row, last)
        begin, row = end, last


def groups(join_order: JoinOrder, size: int) -> Iterator[TaskGroup]:
    """All tasks of a join in groups of about `size`."""
    narrow = index_dtype(max(join_order.rows, join_order.columns))
    row, column = join_order.row.to(narrow), join_order.column.to(narrow)
    reached = 0
    for span in spans(join_order, size):
        found = _long_row if span.end - span.begin > size else _whole_rows
        for group in found(join_order, span, size, (row, column), reached):
            reached += group.fresh.numel()
            yield group


def _whole_rows(
    join_order: JoinOrder, span: Span, size: int, lines: tuple[torch.Tensor, torch.Tensor], reached: int
) -> Iterator[TaskGroup]:
    row, column = lines
    spread = (span.last - span.row) * join_order.columns
    tasks = join_order.expand(span.begin, span.end)
    key = row.index_select(0, tasks.p).to(torch.int32 if spread <= INT32_MAX else torch.int64)
    key = key.sub_(span.row).mul_(join_order.columns).add_(column.index_select(0, tasks.q))
    fresh, slot = distinct(key, spread, reached)
    yield TaskGroup(tasks, slot, fresh.long() + span.row * join_order.columns)


def _long_row(
    join_order: JoinOrder, span: Span, size: int, lines: tuple[torch.Tensor, torch.Tensor], reached: int
) -> Iterator[TaskGroup]:
    column = lines[1]
    pieces = [(begin, min(begin + size, span.end)) for begin in range(span.begin, span.end, size)]
    fresh = column[:0]
    for piece in pieces:
        own, _ = distinct(column.index_select(0, join_order.expand(*piece).q), join_order.columns)
        fresh = torch.unique(torch.cat([fresh, own.to(fresh.dtype)]))
    places = fresh.long() + span.row * join_order.columns
    for number, piece in enumerate(pieces):
        tasks = join_order.expand(*piece)
        rank = torch.searchsorted(fresh, column.index_select(0, tasks.q))
        yield TaskGroup(tasks, rank + reached, places[:0] if number else places)


def distinct(key: torch.Tensor, spread: int, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct keys of some below `spread`, ascending, and which of them each key is, counted from `offset`.

    Where few keys are possible each is marked, a byte a possible one, and the marks are counted; else keys are sorted.
    """
    if numbering.markable(spread, key.numel()):
        marked = torch.zeros(spread, dtype=torch.bool, device=key.device)
        marked[key] = True
        rank = torch.cumsum(marked, 0, dtype=index_dtype(offset + spread)).add_(offset - 1)
        return torch.nonzero(marked).flatten(), rank.index_select(0, key)
    if crd.is_sorted_unique([key]):
        return key, torch.arange(offset, offset + key.numel(), device=key.device)
    fresh, rank = torch.unique(key, return_inverse=True)
    return fresh, rank.add_(offset)
