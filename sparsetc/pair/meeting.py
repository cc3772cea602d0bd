"""Which nonzeros of two operands meet, counted by histogram; values play no part (BCB-SpTC, section IV-A).

In: two `Side`s, in any order. Out: `Meeting`: the entries that meet anything, the rows and columns of the result that
they make, and the number of tasks, pairs of entries whose shared coordinates are equal. Nothing is made for each task,
and where sizes allow nothing is sorted: that is for `symbolic.Matching`, which only some paths need.

A result's place is a row and a column: ranks among the rows of x and the columns of y that meet anything. Their product
is below 2**63 whatever the sizes of the modes, so a place is one int64, and nothing wraps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sparsetc.numbering import Numbering, histogram, joint_keys, numbered
from sparsetc.pair.equation import Roles, Side


@dataclass(frozen=True)
class Sizes:
    """Extents of the operands, were they unfolded over the coordinates that meet anything."""

    batch: int
    free_x: int
    contracted: int
    free_y: int

    @property
    def elements(self) -> int:
        """Elements of both operands and the product."""
        pairs = self.free_x * self.contracted + self.contracted * self.free_y + self.free_x * self.free_y
        return self.batch * pairs

    @property
    def flops(self) -> int:
        """Multiplications and additions of the product."""
        return 2 * self.batch * self.free_x * self.contracted * self.free_y


@dataclass(frozen=True)
class Meeting:
    """Who meets whom in ``x,y->output``."""

    roles: Roles
    x: Side
    y: Side
    x_live: torch.Tensor | None
    """(live x,) the entries of x that meet anything, ascending; None for all."""
    y_live: torch.Tensor | None
    """(live y,) likewise of y."""
    x_key: torch.Tensor
    """(live x,) int64, ordered as the shared coordinates are: equal to `y_key` where entries meet."""
    y_key: torch.Tensor
    """(live y,) likewise."""
    y_each: torch.Tensor
    """(keys,) entries of y with each key."""
    counts: torch.Tensor
    """(live x,) tasks of each entry."""
    row: Numbering
    """Numbers of the live entries of x, by the letters that the result keeps."""
    column: Numbering
    """Numbers of the live entries of y, by their free letters."""
    tasks: int
    shared: int
    """Distinct shared coordinates of the live entries."""

    @classmethod
    def of(cls, x: Side, y: Side, roles: Roles) -> Meeting:
        """Count; two or three waits for the device."""
        joint = joint_keys(x.rows(roles.shared), y.rows(roles.shared), x.extents(roles.shared), x.like, (x.n, y.n))
        x_key, y_key = joint.left, joint.right
        x_each, y_each = histogram(x_key, joint.count), histogram(y_key, joint.count)
        each = x_each * y_each  # tasks of each key
        met = each > 0
        tasks, x_n, y_n, shared = torch.stack([each, x_each * met, y_each * met, met]).sum(1).tolist()
        x_live = None if x_n == x.n else torch.nonzero(met.index_select(0, x_key)).flatten()
        y_live = None if y_n == y.n else torch.nonzero(met.index_select(0, y_key)).flatten()
        x_key = x_key if x_live is None else x_key[x_live]
        rows = x.rows(roles.kept_x, x_live), x.extents(roles.kept_x), x_n
        columns = y.rows(roles.free_y, y_live), y.extents(roles.free_y), y_n
        return cls(
            roles,
            x,
            y,
            x_live,
            y_live,
            x_key,
            y_key if y_live is None else y_key[y_live],
            y_each,
            y_each.index_select(0, x_key),
            numbered(*rows, x.like, ascending=x.ordered and x.letters == roles.x),
            numbered(*columns, x.like, ascending=y.ordered and y.letters == roles.free_y),
            tasks,
            shared,
        )

    @property
    def rows(self) -> int:
        """Rows that meet anything."""
        return self.row.count

    @property
    def columns(self) -> int:
        """Columns that meet anything."""
        return self.column.count

    @property
    def most_results(self) -> int:
        """A number of entries that the result does not pass."""
        return min(self.tasks, self.rows * self.columns)

    def least_results(self) -> int:
        """A number of entries that the result has at least: one entry's tasks all have columns of their own."""
        if not self.tasks:
            return 0
        longest = self.counts.new_zeros(self.rows).scatter_reduce(0, self.row.rank, self.counts, "amax")
        return int(longest.sum())

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the unfolded operands."""
        roles, n = self.roles, self.counts.numel()

        def distinct(letters: tuple[str, ...]) -> int:
            own = self.x.rows(letters, self.x_live)
            return numbered(own, self.x.extents(letters), n, self.x.like).count

        if not roles.batch:
            return Sizes(min(n, 1), self.rows, self.shared, self.columns)
        # What x has of the shared letters, where it meets anything, y has too.
        return Sizes(distinct(roles.batch), distinct(roles.free_x), distinct(roles.contracted), self.columns)

    def coordinates(self, places: torch.Tensor, letters: tuple[str, ...]) -> torch.Tensor:
        """(letters, n): the coordinates of results at these places; of letters that the result has."""
        row = places // max(1, self.columns)
        column = places - row * self.columns
        own = dict(zip(self.roles.kept_x, self.row.coords, strict=True))
        other = dict(zip(self.roles.free_y, self.column.coords, strict=True))
        out = places.new_empty((len(letters), places.numel()))
        for line, letter in zip(out, letters, strict=True):
            source, at = (own[letter], row) if letter in own else (other[letter], column)
            torch.index_select(source, 0, at, out=line)
        return out

    def only(self, kept: torch.Tensor) -> Share:
        """Some of x's live entries, and those of y that they meet. kept (live x,) bool."""
        taken = torch.nonzero(kept).flatten()
        entries = taken if self.x_live is None else self.x_live[taken]
        return Share(self, Meeting.of(self.x.only(entries), self.y, self.roles), taken, entries)


@dataclass(frozen=True)
class Share:
    """A part of x as an operand of its own, and where it lies in the whole."""

    whole: Meeting
    part: Meeting
    taken: torch.Tensor
    """(the part's x,) which of the whole's live entries each is."""
    entries: torch.Tensor
    """(the part's x,) which entry of the whole's x."""

    def places(self, own: torch.Tensor) -> torch.Tensor:
        """(n,) the whole's places of the part's, in the same order: both rank rows and columns by coordinates."""
        whole, part = self.whole, self.part
        row = own.new_zeros(part.rows).index_copy_(0, part.row.rank, whole.row.rank[self.taken])
        column = own.new_zeros(part.columns).index_copy_(0, part.column.rank, self._columns())
        of_row = own // max(1, part.columns)
        return row[of_row] * whole.columns + column[own - of_row * part.columns]

    def _columns(self) -> torch.Tensor:
        """(the part's live y,) the whole's column of each."""
        whole, part = self.whole, self.part
        if whole.y_live is None:
            rank = whole.column.rank
        else:
            rank = whole.column.rank.new_zeros(whole.y.n).index_copy_(0, whole.y_live, whole.column.rank)
        return rank if part.y_live is None else rank[part.y_live]
