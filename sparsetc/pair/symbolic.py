"""Which nonzeros of two operands meet, and where the result has entries; values play no part (BCB-SpTC, section IV-A).

In: two `Side`s. Out: `Matching`: the tasks, pairs of entries whose shared coordinates are equal, counted before any is
made; and `Pattern`: the result's coordinates. The stages are the paper's (pairing, sorting, compression), which it
takes from expand-sort-compress; `expansion` makes the tasks, a chunk at a time, so memory is bounded however skewed a
contracted index is.

A result's place is a row and a column: ranks among the rows of x and the columns of y that meet anything. Their product
is below 2**63 whatever the sizes of the modes, so a place is one int64, and nothing wraps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sparsetc import coords as crd
from sparsetc.formats.base import index_dtype
from sparsetc.options import Options
from sparsetc.pair.equation import Roles, Side
from sparsetc.pair.keys import joint_keys, keys_of, ranks

TASK_BYTES = 96
"""Bytes that one task takes while a chunk of them is expanded and sorted, at most: a dozen vectors, half of int64."""
CHUNK = 1 << 23
"""Most tasks of a chunk: 800 MB while they are sorted."""
LEAST_CHUNK = 1 << 10
MARKS = 8
"""Places a task up to which they are marked, not sorted: a byte to mark and four to count each."""


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
    """By p, from the first on: what a task's number, counted from `begin`, lacks to its q."""


@dataclass(frozen=True)
class Matching:
    """The tasks of ``x,y->output``, in the order of x's entries, each with a run of y's."""

    roles: Roles
    x: Side
    y: Side
    x_entry: torch.Tensor
    """(live x,) the entries of x that meet anything, ascending."""
    y_entry: torch.Tensor
    """(live y,) likewise of y."""
    first: torch.Tensor
    """(live x,) the first of the live entries of y that each meets."""
    ends: torch.Tensor
    """(live x,) tasks up to and with this entry: counted, not made."""
    row: torch.Tensor
    """(live x,) the rank of its row, not falling."""
    column: torch.Tensor
    """(live y,) the rank of its column."""
    row_head: torch.Tensor
    """(rows,) a live entry of x in each row."""
    column_head: torch.Tensor
    """(columns,) a live entry of y in each column."""
    tasks: int

    @classmethod
    def of(cls, x: Side, y: Side, roles: Roles) -> Matching:
        """Match by binary search: nothing is made for each task."""
        sizes = x.extents(roles.shared)
        x_key, y_key = joint_keys(x.rows(roles.shared), y.rows(roles.shared), sizes)
        first, count = _counts(y_key, x_key)
        x_entry = torch.nonzero(count).flatten()
        first, count = first[x_entry], count[x_entry]
        live = _in_runs(y_key, first)
        y_entry = torch.nonzero(live).flatten()
        first = (torch.cumsum(live, 0) - 1)[first]
        ends = torch.cumsum(count, 0)
        starts = crd.starts_of_runs(keys_of(x.rows(roles.kept_x)[:, x_entry], x.extents(roles.kept_x)))
        column, column_head = ranks(y.rows(roles.free_y)[:, y_entry], y.extents(roles.free_y))
        return cls(
            roles,
            x,
            y,
            x_entry,
            y_entry,
            first,
            ends,
            torch.cumsum(starts, 0) - 1,
            column,
            torch.nonzero(starts).flatten(),
            column_head,
            int(ends[-1]) if ends.numel() else 0,
        )

    @property
    def rows(self) -> int:
        """Rows that meet anything."""
        return self.row_head.numel()

    @property
    def columns(self) -> int:
        """Columns that meet anything."""
        return self.column_head.numel()

    @property
    def counts(self) -> torch.Tensor:
        """(live x,) tasks of each entry."""
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1))

    def least_results(self) -> int:
        """A number of entries that the result has at least: one entry's tasks all have columns of their own."""
        if not self.tasks:
            return 0
        longest = self.ends.new_zeros(self.rows).scatter_reduce(0, self.row, self.counts, "amax")
        return int(longest.sum())

    def expand(self, begin: int, end: int) -> Expanded:
        """Make tasks ``begin .. end``."""
        bounds = self.ends.new_tensor([begin, end - 1])
        low, high = torch.searchsorted(self.ends, bounds, right=True).tolist()
        narrow = index_dtype(max(self.x_entry.numel(), self.y_entry.numel(), end - begin))
        ends = self.ends[low : high + 1]
        starts = torch.cat([self.ends[low - 1 : low] if low else self.ends.new_zeros(1), ends[:-1]])
        own = ends.clamp(max=end) - starts.clamp(min=begin)
        shift = (self.first[low : high + 1] - starts + begin).to(narrow)
        entry = torch.repeat_interleave(own.to(narrow), output_size=end - begin)
        q = torch.arange(end - begin, dtype=narrow, device=ends.device).add_(shift.index_select(0, entry))
        return Expanded(begin, end, entry.add_(low), q, low, shift)

    def chunks(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """All tasks, `size` at a time: places in `x_entry` and in `y_entry`, and the place of the result."""
        for begin in range(0, self.tasks, size):
            made = self.expand(begin, min(begin + size, self.tasks))
            yield made.p, made.q, self.row[made.p] * self.columns + self.column[made.q]

    def coordinates(self, places: torch.Tensor) -> torch.Tensor:
        """(letters of ``roles.natural``, n): the coordinates of results at these places."""
        row, column = places // max(1, self.columns), places % max(1, self.columns)
        left = self.x.rows(self.roles.kept_x)[:, self.x_entry[self.row_head[row]]]
        right = self.y.rows(self.roles.free_y)[:, self.y_entry[self.column_head[column]]]
        return torch.cat([left, right])

    def only(self, kept: torch.Tensor) -> Share:
        """Some of x's live entries, and those of y that they meet. kept (live x,) bool."""
        x = torch.nonzero(kept).flatten()
        first, count, row = self.first[x], self.counts[x], self.row[x]
        # Runs of y are met or not as a whole, so what is left of them stays together.
        met = first.new_zeros(self.y_entry.numel() + 1)
        met.index_add_(0, first, torch.ones_like(first)).index_add_(0, first + count, torch.full_like(first, -1))
        live = torch.cumsum(met, 0)[:-1] > 0
        y, ends = torch.nonzero(live).flatten(), torch.cumsum(count, 0)
        starts = crd.starts_of_runs([row])
        column, column_head = ranks(self.column[y].unsqueeze(0), (max(1, self.columns),))
        part = replace(
            self,
            x_entry=self.x_entry[x],
            y_entry=self.y_entry[y],
            first=(torch.cumsum(live, 0) - 1)[first],
            ends=ends,
            row=torch.cumsum(starts, 0) - 1,
            column=column,
            row_head=torch.nonzero(starts).flatten(),
            column_head=column_head,
            tasks=int(ends[-1]) if ends.numel() else 0,
        )
        return Share(self, part, x, y)


@dataclass(frozen=True)
class Share:
    """A part of a matching as a matching of its own, and where it lies in the whole one."""

    whole: Matching
    part: Matching
    x: torch.Tensor
    """(the part's live x,) which of the whole's live entries each is."""
    y: torch.Tensor
    """(the part's live y,) likewise."""

    def places(self, own: torch.Tensor) -> torch.Tensor:
        """(n,) the whole's places of the part's, in the same order: both rank rows and columns by coordinates."""
        columns = max(1, self.part.columns)
        row = self.whole.row[self.x[self.part.row_head[own // columns]]]
        column = self.whole.column[self.y[self.part.column_head[own % columns]]]
        return row * self.whole.columns + column


@dataclass(frozen=True)
class Pattern:
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


def pattern_of(matching: Matching, places: torch.Tensor) -> Pattern:
    """Coordinates of ascending places, in the lexicographic order of the result's letters."""
    roles = matching.roles
    coords = matching.coordinates(places)
    if roles.output == roles.natural:
        return Pattern(places, coords, None)
    coords = coords[[roles.natural.index(c) for c in roles.output]]
    sizes = [
        matching.x.sizes[matching.x.letters.index(c)] if c in roles.kept_x else matching.y.extents([c])[0]
        for c in roles.output
    ]
    order = crd.lexsort(keys_of(coords, sizes))
    return Pattern(places, coords[:, order].contiguous(), order)


@dataclass(frozen=True)
class Budget:
    """What a result, and the work towards it, may take."""

    settings: Options
    device: torch.device
    order: int
    itemsize: int
    what: str
    limit: int

    def check(self, entries: int, least: bool = False) -> None:
        """OutOfMemoryError, with the number of entries, unless so many fit."""
        count = f"{'at least ' if least else ''}{entries:,} nonzeros"
        self.settings.check_memory(entries * (8 * self.order + self.itemsize), self.device, f"{self.what}, {count},")

    @property
    def chunk(self) -> int:
        """Tasks taken at a time."""
        return chunk_size(self.limit)


def _in_runs(keys: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Bool (n,): whether an element of ascending `keys` is in a run of equal ones of which `first` has an element."""
    run = torch.cumsum(crd.starts_of_runs([keys]), 0) - 1
    met = torch.zeros_like(keys, dtype=torch.bool)
    met[run[first]] = True
    return met[run]


def _counts(keys: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(first place, number) of the elements of ascending `keys` that equal each wanted one."""
    first = torch.searchsorted(keys, wanted)
    return first, torch.searchsorted(keys, wanted, right=True) - first
