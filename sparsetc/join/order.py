"""The tasks of a contraction in order, and where its result has entries (BCB-SpTC, section IV-A).

In: a `Join`; for coordinates also the places of the result, which a way to compute it finds. Out: `JoinOrder`: the
tasks, pairs of entries that match, counted and not made; `JoinOrder.expand` makes a chunk of them at a time, so memory
is bounded however skewed a contracted index is. `pattern_of` makes a pattern of places.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from sparsetc.join.join import PIECE, Join, coordinates
from sparsetc.packing.base import index_dtype
from sparsetc.support import Ints
from sparsetc.support.entry import bar
from sparsetc.tensor import coords as crd
from sparsetc.tensor.coords import histogram, lexsort
from sparsetc.tensor.pattern import Pattern

TASK_BYTES = 96
"""Most bytes that one task takes while a chunk of them is expanded and sorted: a dozen vectors, half of int64."""


@dataclass(frozen=True)
class Expanded:
    """Tasks from `begin` up to, and not including, `end` as two vectors, of int32 where that holds them.

    Attributes:
        p: (n,) the position in `x_entry` of the entry of x of each task, not falling.
        q: (n,) the position in `y_entry` of the entry of y of each task, rising where p stays the same.
        first: the first element of p.
        shift: (entries of x with tasks here,) q of a task less its number, from `begin` on, for each p from `first` on.
    """

    begin: int
    end: int
    p: Tensor
    q: Tensor
    first: int
    shift: Tensor


@dataclass(frozen=True)
class JoinOrder:
    """The tasks of a `Join` in the order of the entries of x, row by row: each entry of x has a run of entries of y.

    Attributes:
        x_entry: (matched x,) the matched entries of x in the order of rows; None for all as they are.
        y_entry: (matched y,) the matched entries of y in the order of the shared letters, then of columns; None for
            all.
        first: (matched x,) the first of the ordered entries of y that each entry of x matches.
        ends: (matched x,) number of tasks up to and with each entry: counted, not made.
        row: (matched x,) the rank of the row of each entry, not falling.
        column: (matched y,) the rank of the column of each entry.
    """

    join: Join
    x_entry: Tensor | None
    y_entry: Tensor | None
    first: Tensor
    ends: Tensor
    row: Tensor
    column: Tensor
    tasks: int

    @classmethod
    def of(cls, join: Join) -> JoinOrder:
        """The join with its matched entries put in order, where they are not."""
        m, keys = join, join.y_each.numel()
        x, y = m.x.ordered and m.x.letters == m.roles.x, m.y.ordered and m.y.letters == m.roles.y
        by_row = None if x else lexsort([m.row.rank, m.x_key], [m.rows, keys])
        by_key = None if y else lexsort([m.y_key, m.column.rank], [keys, m.columns])
        each = m.y_each if m.y_matched is None else histogram(m.y_key, keys)
        before = torch.cumsum(each, 0) - each
        return cls(
            m,
            m.x_matched if by_row is None else composed(m.x_matched, by_row),
            m.y_matched if by_key is None else composed(m.y_matched, by_key),
            before.index_select(0, crd.picked(m.x_key, by_row)),
            torch.cumsum(crd.picked(m.counts, by_row), 0),
            crd.picked(m.row.rank, by_row),
            crd.picked(m.column.rank, by_key),
            m.tasks,
        )

    @property
    def matched(self) -> tuple[int, int]:
        """Number of matched entries of x and of y."""
        return self.row.numel(), self.column.numel()

    def expand(self, begin: int, end: int) -> Expanded:
        """Return the tasks ``begin .. end`` as arrays."""
        low, high = 0, self.ends.numel() - 1
        if (begin, end) != (0, self.tasks):
            bounds = self.ends.new_tensor([begin, end - 1])
            low, high = torch.searchsorted(self.ends, bounds, right=True).tolist()
        narrow = index_dtype(max(*self.matched, end - begin))
        ends = self.ends[low : high + 1]
        starts = torch.cat([self.ends[low - 1 : low] if low else self.ends.new_zeros(1), ends[:-1]])
        lengths = ends.clamp(max=end) - starts.clamp(min=begin)
        shift = (self.first[low : high + 1] - starts + begin).to(narrow)
        entry = torch.repeat_interleave(lengths.to(narrow), output_size=end - begin)
        q = torch.arange(end - begin, dtype=narrow, device=ends.device).add_(shift.index_select(0, entry))
        return Expanded(begin, end, entry.add_(low), q, low, shift)


def composed(first: Tensor | None, then: Tensor) -> Tensor:
    """Elements of the first positions, None for all in order, at the second positions."""
    return then if first is None else first.index_select(0, then)


def pattern_of(join: Join, places: Tensor, shape: Ints) -> tuple[Pattern, Tensor | None]:
    """The pattern, of a shape, of a result with entries at ascending places.

    Returns:
        The pattern, in lexicographic order, and (nnz,) the number of each entry's place among `places`; None where they
        are in that order already. Coordinates are then made when they are first asked for.
    """
    roles, n = join.roles, places.numel()
    if roles.output == roles.result_order:
        make = partial(coordinates, places, join.columns, join.lines(roles.output))
        return Pattern(make, shape, True, later=(n, places.device)), None
    sizes = [(join.x if c in roles.kept_x else join.y).extents([c])[0] for c in roles.output]
    coords = torch.empty((len(sizes), n), dtype=torch.int64, device=places.device)
    order = coords.new_empty(n)
    with bar(n, f"order of results over {''.join(roles.output)}", unit="results") as done:
        for begin, end in pairwise(_bounds(join, places)):
            piece = coordinates(places[begin:end], join.columns, join.lines(roles.output))
            by_output = lexsort(tuple(piece), sizes)
            coords[:, begin:end] = piece.index_select(1, by_output)
            torch.add(by_output, begin, out=order[begin:end])
            done(end)
    return Pattern(coords, shape, True), order


def _bounds(join: Join, places: Tensor) -> list[int]:
    """Bounds of pieces of about `PIECE` results, cut where the coordinate changes of the output's first letter, x's."""
    n = places.numel()
    if n <= PIECE:
        return [0, n]
    rows = torch.nonzero(crd.starts_of_runs(join.row.coords[:1])).flatten()
    starts = torch.searchsorted(places, (rows * join.columns).to(places.dtype))
    cuts = torch.searchsorted(starts, torch.arange(PIECE, n, PIECE, device=places.device))
    return sorted({0, n, *torch.cat([starts, starts.new_tensor([n])])[cuts].tolist()})
