"""The tasks of a contraction in order, and where its result has entries (BCB-SpTC, section IV-A).

In: a `Meeting`. Out: `Matching`: the tasks, pairs of entries whose shared coordinates are equal, counted before any is
made; and `ResultPattern`: the result's coordinates. The stages are the paper's (pairing, sorting, compression), which
it takes from expand-sort-compress; `expansion` makes the tasks, a chunk at a time, so memory is bounded however skewed
a contracted index is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sparsetc import coords as crd
from sparsetc.formats.base import index_dtype
from sparsetc.numbering import histogram, lexsort
from sparsetc.options import Options
from sparsetc.pair.equation import Roles
from sparsetc.pair.meeting import Meeting

TASK_BYTES = 96
"""Bytes that one task takes while a chunk of them is expanded and sorted, at most: a dozen vectors, half of int64."""
CHUNK = 1 << 23
"""Most tasks of a chunk: 800 MB while they are sorted."""
LEAST_CHUNK = 1 << 10


def chunk_size(limit: int) -> int:
    """Tasks taken at a time, so that they take a quarter of `limit` bytes or less."""
    return max(LEAST_CHUNK, min(CHUNK, limit // (4 * TASK_BYTES)))


@dataclass(frozen=True)
class Expanded:
    """Tasks ``begin .. end``, made; int32 where that holds them."""

    begin: int
    end: int
    p: torch.Tensor
    """(n,) places in `x_entry`, not falling."""
    q: torch.Tensor
    """(n,) places in `y_entry`, rising where p stays the same."""
    first: int
    """The first of p."""
    shift: torch.Tensor
    """What a task's number, counted from `begin`, lacks to its q, by p from the first on."""


@dataclass(frozen=True)
class Matching:
    """The tasks of a `Meeting` in the order of x's entries, row by row, each with a run of y's."""

    meeting: Meeting
    x_entry: torch.Tensor | None
    """(live x,) the entries of x that meet anything, in the order of rows; None for all as they are."""
    y_entry: torch.Tensor | None
    """(live y,) likewise of y, in the order of the shared letters, then of columns."""
    first: torch.Tensor
    """(live x,) the first of the live entries of y that each meets."""
    ends: torch.Tensor
    """(live x,) tasks up to and with this entry: counted, not made."""
    row: torch.Tensor
    """(live x,) the rank of its row, not falling."""
    column: torch.Tensor
    """(live y,) the rank of its column."""
    tasks: int

    @classmethod
    def of(cls, meeting: Meeting) -> Matching:
        """Put live entries in order, where they are not."""
        m, keys = meeting, meeting.y_each.numel()
        x, y = m.x.ordered and m.x.letters == m.roles.x, m.y.ordered and m.y.letters == m.roles.y
        by_row = None if x else lexsort([m.row.rank, m.x_key], [m.rows, keys])
        by_key = None if y else lexsort([m.y_key, m.column.rank], [keys, m.columns])
        each = m.y_each if m.y_live is None else histogram(m.y_key, keys)
        before = torch.cumsum(each, 0) - each
        return cls(
            m,
            m.x_live if by_row is None else composed(m.x_live, by_row),
            m.y_live if by_key is None else composed(m.y_live, by_key),
            before.index_select(0, picked(m.x_key, by_row)),
            torch.cumsum(picked(m.counts, by_row), 0),
            picked(m.row.rank, by_row),
            picked(m.column.rank, by_key),
            m.tasks,
        )

    @property
    def roles(self) -> Roles:
        """The letters' parts."""
        return self.meeting.roles

    @property
    def rows(self) -> int:
        """Rows that meet anything."""
        return self.meeting.rows

    @property
    def columns(self) -> int:
        """Columns that meet anything."""
        return self.meeting.columns

    @property
    def live(self) -> tuple[int, int]:
        """Live entries of x and of y."""
        return self.row.numel(), self.column.numel()

    @cached_property
    def row_head(self) -> torch.Tensor:
        """(rows,) the first of the live entries of x in each row."""
        return torch.nonzero(crd.starts_of_runs([self.row])).flatten()

    def expand(self, begin: int, end: int) -> Expanded:
        """Make tasks ``begin .. end``."""
        low, high = 0, self.ends.numel() - 1
        if (begin, end) != (0, self.tasks):
            bounds = self.ends.new_tensor([begin, end - 1])
            low, high = torch.searchsorted(self.ends, bounds, right=True).tolist()
        narrow = index_dtype(max(*self.live, end - begin))
        ends = self.ends[low : high + 1]
        starts = torch.cat([self.ends[low - 1 : low] if low else self.ends.new_zeros(1), ends[:-1]])
        own = ends.clamp(max=end) - starts.clamp(min=begin)
        shift = (self.first[low : high + 1] - starts + begin).to(narrow)
        entry = torch.repeat_interleave(own.to(narrow), output_size=end - begin)
        q = torch.arange(end - begin, dtype=narrow, device=ends.device).add_(shift.index_select(0, entry))
        return Expanded(begin, end, entry.add_(low), q, low, shift)


def picked(given: torch.Tensor, at: torch.Tensor | None) -> torch.Tensor:
    """Elements at these places; all, in order, where there is None."""
    return given if at is None else given.index_select(0, at)


def composed(first: torch.Tensor | None, then: torch.Tensor) -> torch.Tensor:
    """Places of the first, which is None for all in order, at places of the second."""
    return then if first is None else first.index_select(0, then)


@dataclass(frozen=True)
class ResultPattern:
    """Where a result has entries."""

    places: torch.Tensor
    """(nnz,) ascending: row * columns + column."""
    coords: torch.Tensor
    """(letters of the result, nnz), in lexicographic order."""
    order: torch.Tensor | None
    """(nnz,) which place each column of `coords` has; None when they are in the same order."""

    @property
    def nnz(self) -> int:
        """Entries of the result."""
        return self.places.numel()


def pattern_of(meeting: Meeting, places: torch.Tensor) -> ResultPattern:
    """Coordinates of ascending places, in the lexicographic order of the result's letters."""
    roles = meeting.roles
    coords = meeting.coordinates(places, roles.output)
    if roles.output == roles.natural:
        return ResultPattern(places, coords, None)
    sizes = [(meeting.x if c in roles.kept_x else meeting.y).extents([c])[0] for c in roles.output]
    order = lexsort(tuple(coords), sizes)
    return ResultPattern(places, coords[:, order].contiguous(), order)


@dataclass(frozen=True)
class Budget:
    """What a result, and the work towards it, may take."""

    settings: Options
    device: torch.device
    order: int
    itemsize: int
    what: str
    limit: int

    def check_least(self, meeting: Meeting) -> None:
        """OutOfMemoryError where the result has more entries than fit, as far as counts tell."""
        if meeting.most_results * self.entry_bytes > self.limit:
            self.check(meeting.least_results(), least=True)

    def check(self, entries: int, least: bool = False) -> None:
        """OutOfMemoryError, with the number of entries, unless so many fit."""
        count = f"{'at least ' if least else ''}{entries:,} nonzeros"
        self.require(entries * self.entry_bytes, f"{self.what}, {count},")

    def require(self, nbytes: int, what: str) -> None:
        """OutOfMemoryError unless `what` fits."""
        self.settings.check_memory(nbytes, self.device, what, self.limit)

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry of the result: coordinates and a value."""
        return 8 * self.order + self.itemsize

    @property
    def chunk(self) -> int:
        """Tasks taken at a time."""
        return chunk_size(self.limit)
