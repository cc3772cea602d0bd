"""The join of two operands: nonzeros of equal shared coordinates, counted by histogram (BCB-SpTC, section IV-A).

In: two `JoinOperand`s, in any order. Out: `Join`: the matched entries, the rows and columns of the result that they
make, and the number of tasks, pairs of entries that match. Values play no part. Nothing is made for each task, and
where sizes allow nothing is sorted: that is for `symbolic.JoinOrder`, which only some paths need.

A result's place is a row and a column: ranks among the rows of the matched entries of x and the columns of those of y.
Their product is below 2**63 whatever the sizes of the modes, so a place is one int64, and nothing wraps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsetc.pair.join_operand import JoinOperand, Roles
from sparsetc.support.cached import cached_property
from sparsetc.support.progress import bar
from sparsetc.tensor.numbering import Numbering, histogram, joint_keys, numbered

PIECE = 1 << 23
"""Results whose coordinates are written at a time: tenths of a second, and 200 MB."""


@dataclass(frozen=True)
class UnfoldedSizes:
    """Extents that the operands have when they are unfolded over the coordinates of matched entries."""

    batch: int
    free_x: int
    contracted: int
    free_y: int

    @property
    def elements(self) -> int:
        """Elements of both unfolded operands and of their product."""
        pairs = self.free_x * self.contracted + self.contracted * self.free_y + self.free_x * self.free_y
        return self.batch * pairs

    @property
    def flops(self) -> int:
        """Multiplications and additions of the dense product."""
        return 2 * self.batch * self.free_x * self.contracted * self.free_y


@dataclass(frozen=True)
class Join:
    """The entries of two operands that match in ``x,y->output``, and the rows and columns that they make."""

    roles: Roles
    x: JoinOperand
    y: JoinOperand
    x_matched: torch.Tensor | None
    """(matched x,) the entries of x that match any of y, ascending; None for all."""
    y_matched: torch.Tensor | None
    """(matched y,) the entries of y that match any of x, ascending; None for all."""
    x_key: torch.Tensor
    """(matched x,) int64, ordered as the shared coordinates are: equal to `y_key` where entries match."""
    y_key: torch.Tensor
    """(matched y,) int64, the key of each entry of y."""
    y_each: torch.Tensor
    """(keys,) number of entries of y with each key."""
    counts: torch.Tensor
    """(matched x,) number of tasks of each entry."""
    row: Numbering
    """Numbers of the matched entries of x, by the letters that the result has."""
    column: Numbering
    """Numbers of the matched entries of y, by their free letters."""
    tasks: int
    shared: int
    """Number of distinct shared coordinates of the matched entries."""

    @classmethod
    def of(cls, x: JoinOperand, y: JoinOperand, roles: Roles) -> Join:
        """The join of two operands, after two or three waits for the device."""
        joint = joint_keys(x.rows(roles.shared), y.rows(roles.shared), x.extents(roles.shared), x.like, (x.n, y.n))
        x_key, y_key = joint.left, joint.right
        x_each, y_each = histogram(x_key, joint.count), histogram(y_key, joint.count)
        each = x_each * y_each  # tasks of each key
        matched = each > 0
        tasks, x_n, y_n, shared = torch.stack([each, x_each * matched, y_each * matched, matched]).sum(1).tolist()
        x_matched = None if x_n == x.n else torch.nonzero(matched.index_select(0, x_key)).flatten()
        y_matched = None if y_n == y.n else torch.nonzero(matched.index_select(0, y_key)).flatten()
        x_key = x_key if x_matched is None else x_key[x_matched]
        rows = x.rows(roles.kept_x, x_matched), x.extents(roles.kept_x), x_n
        columns = y.rows(roles.free_y, y_matched), y.extents(roles.free_y), y_n
        return cls(
            roles,
            x,
            y,
            x_matched,
            y_matched,
            x_key,
            y_key if y_matched is None else y_key[y_matched],
            y_each,
            y_each.index_select(0, x_key),
            numbered(*rows, x.like, ascending=x.ordered and x.letters == roles.x),
            numbered(*columns, x.like, ascending=y.ordered and y.letters == roles.free_y),
            tasks,
            shared,
        )

    @property
    def rows(self) -> int:
        """Number of rows of the matched entries of x."""
        return self.row.count

    @property
    def columns(self) -> int:
        """Number of columns of the matched entries of y."""
        return self.column.count

    @property
    def most_results(self) -> int:
        """An upper bound on the entries of the result."""
        return min(self.tasks, self.rows * self.columns)

    def least_results(self) -> int:
        """A lower bound on the entries of the result: the tasks of one entry all have columns of their own."""
        if not self.tasks:
            return 0
        longest = self.counts.new_zeros(self.rows).scatter_reduce(0, self.row.rank, self.counts, "amax")
        return int(longest.sum())

    @cached_property
    def sizes(self) -> UnfoldedSizes:
        """Extents of the unfolded operands."""
        roles, n = self.roles, self.counts.numel()

        def distinct(letters: tuple[str, ...]) -> int:
            own = self.x.rows(letters, self.x_matched)
            return numbered(own, self.x.extents(letters), n, self.x.like).count

        if not roles.batch:
            return UnfoldedSizes(min(n, 1), self.rows, self.shared, self.columns)
        # Matched entries of x and y have the same coordinates of the shared letters.
        return UnfoldedSizes(distinct(roles.batch), distinct(roles.free_x), distinct(roles.contracted), self.columns)

    def coordinates(self, places: torch.Tensor, letters: tuple[str, ...]) -> torch.Tensor:
        """(letters, n) the coordinates of results at these places, for letters that the result has."""
        own = dict(zip(self.roles.kept_x, self.row.coords, strict=True))
        other = dict(zip(self.roles.free_y, self.column.coords, strict=True))
        n = places.numel()
        out = places.new_empty((len(letters), n))
        with bar(n, f"coordinates over {''.join(letters)}", unit="results") as done:
            for begin in range(0, n, PIECE):
                piece = places[begin : begin + PIECE]
                row = piece // max(1, self.columns)
                column = piece - row * self.columns
                for line, letter in zip(out[:, begin : begin + PIECE], letters, strict=True):
                    source, at = (own[letter], row) if letter in own else (other[letter], column)
                    torch.index_select(source, 0, at, out=line)
                done(begin + piece.numel())
        return out

    def only(self, kept: torch.Tensor) -> JoinSubset:
        """The join of some matched entries of x with the entries of y that match them. kept (matched x,) bool."""
        taken = torch.nonzero(kept).flatten()
        entries = taken if self.x_matched is None else self.x_matched[taken]
        return JoinSubset(self, Join.of(self.x.only(entries), self.y, self.roles), taken, entries)


@dataclass(frozen=True)
class JoinSubset:
    """The join of some of the entries of x, and where they lie in the whole join."""

    whole: Join
    join: Join
    taken: torch.Tensor
    """(x of the subset,) which of the whole's matched entries each is."""
    entries: torch.Tensor
    """(x of the subset,) which entry of the whole's x each is."""

    def places(self, own: torch.Tensor) -> torch.Tensor:
        """(n,) the whole's places of the subset's, in the same order: both rank rows and columns by coordinates."""
        whole, join = self.whole, self.join
        row = own.new_zeros(join.rows).index_copy_(0, join.row.rank, whole.row.rank[self.taken])
        column = own.new_zeros(join.columns).index_copy_(0, join.column.rank, self._columns())
        of_row = own // max(1, join.columns)
        return row[of_row] * whole.columns + column[own - of_row * join.columns]

    def _columns(self) -> torch.Tensor:
        """(matched y of the subset,) the whole's column of each."""
        whole, join = self.whole, self.join
        if whole.y_matched is None:
            rank = whole.column.rank
        else:
            rank = whole.column.rank.new_zeros(whole.y.n).index_copy_(0, whole.y_matched, whole.column.rank)
        return rank if join.y_matched is None else rank[join.y_matched]
