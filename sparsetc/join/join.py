"""The join of two operands: nonzeros of equal shared coordinates, counted by histogram (BCB-SpTC, section IV-A).

In: the letters of two operands and of the result, and coordinates. Out: `Roles`; a `JoinOperand` an operand: distinct
coordinates, letter by letter, and which of its values make up each; `Join`: the matched entries, the rows and columns
of the result that they make, and the number of tasks, pairs of entries that match. The join reads no values; an operand
sums its own to its distinct entries (`JoinOperand.values`). Nothing is made for each task, and where sizes allow
nothing is sorted: that is for `order.JoinOrder`, which only some paths need.

The roles of letters (BCB-SpTC, section II-A, where only the first three occur)::

    free of x      in x and in the result, not in y       I_m
    free of y      in y and in the result, not in x       I_n
    contracted     in x and in y, not in the result       I_k
    batch          in x, in y and in the result           elementwise
    own            in one operand and nowhere else        summed before anything else

A letter that an operand has twice takes its diagonal. Diagonals and own sums are found once, when the pattern is
prepared; a call then gathers and adds values.

A result's place is a row and a column: ranks among the rows of the matched entries of x and the columns of those of y.
Their product is below 2**63 whatever the sizes of the modes, so a place is one int64, and nothing wraps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsetc.ir.equation.einsum import distinct
from sparsetc.join import loops
from sparsetc.support import Ints, Names, among, cached_property, outside
from sparsetc.support.checks import room
from sparsetc.support.entry import bar
from sparsetc.support.files import native
from sparsetc.tensor import coords as crd
from sparsetc.tensor import duplicates
from sparsetc.tensor.coords import Numbering, histogram, joint_keys, numbered
from sparsetc.tensor.dtypes import accumulator, in_order, summed_rows


def add_up(values: Tensor, owner: Tensor, count: int, deterministic: bool = False) -> Tensor:
    """The sum of each owner's values, (count, …), of values (n, …) and owner (n,) int, not falling."""
    with in_order(deterministic):
        return summed_rows(values, owner, count)


@dataclass(frozen=True)
class Roles:
    """The letters of ``x,y->output`` by role; `x` and `y` are the orders in which a join reads its operands.

    Attributes:
        batch: in x, in y and in the result.
        contracted: in x and in y, not in the result.
        kept_x: free of x, and batch, in the result's order: the rows of the result.
        free_y: free of y, in the result's order: the columns of the result.
    """

    output: Names
    kept_x: Names
    free_y: Names
    batch: Names
    contracted: Names

    @classmethod
    def of(cls, x: Sequence[str], y: Sequence[str], output: Sequence[str]) -> Roles:
        """The roles in ``x,y->output``."""
        return cls(
            tuple(output),
            among(output, x),
            outside(output, x),
            tuple(c for c in output if c in x and c in y),
            tuple(c for c in distinct(x) if c in y and c not in output),
        )

    @property
    def free_x(self) -> Names:
        """Letters of the rows that y does not have."""
        return outside(self.kept_x, self.batch)

    @property
    def shared(self) -> Names:
        """Letters whose coordinates must be equal for two nonzeros to match."""
        return (*self.batch, *self.contracted)

    @property
    def x(self) -> Names:
        """Letters of x in the order in which it is read: row by row."""
        return (*self.kept_x, *self.contracted)

    @property
    def y(self) -> Names:
        """The letters of y in reading order: entries that match the same nonzeros of x lie together."""
        return (*self.shared, *self.free_y)

    @property
    def result_order(self) -> Names:
        """Letters in the order in which results are made: rows, then columns."""
        return (*self.kept_x, *self.free_y)

    def __str__(self) -> str:
        named = {"free of x": self.free_x, "free of y": self.free_y, "contracted": self.contracted, "batch": self.batch}
        return ", ".join(f"{name} {''.join(letters)}" for name, letters in named.items() if letters)


@dataclass(frozen=True)
class JoinOperand:
    """Distinct coordinates of an operand, by letter; in its own order if they are known to be distinct, else sorted.

    Attributes:
        letters: the letters of its modes, in the order in which they are read.
        sizes: the sizes of these modes.
        coords: (n,) int64 a letter.
        n: number of distinct entries.
        ordered: whether the entries are known to be in lexicographic order of `letters`.
        source: (m,) which of the operand's values take part, sorted by entry; None for all, as they are.
        owner: (m,) the entry that each value of `source` adds to; None when each is an entry of its own.
        like: an int64 tensor on the operand's device.
    """

    letters: Names
    sizes: Ints
    coords: tuple[Tensor, ...]
    n: int
    ordered: bool
    source: Tensor | None
    owner: Tensor | None
    like: Tensor

    def rows(self, letters: Sequence[str], entries: Tensor | None = None) -> list[Tensor]:
        """The coordinates of each letter, (n,), or (len(entries),) for some entries only."""
        rows = [self.coords[self.letters.index(c)] for c in letters]
        return rows if entries is None else [row.index_select(0, entries) for row in rows]

    def extents(self, letters: Sequence[str]) -> Ints:
        """Return the sizes of the modes with these letters."""
        return tuple(self.sizes[self.letters.index(c)] for c in letters)

    def only(self, entries: Tensor) -> JoinOperand:
        """Return the operand restricted to these entries, ascending; its values are given for them alone."""
        rows = tuple(row.index_select(0, entries) for row in self.coords)
        return replace(self, coords=rows, n=entries.numel(), source=None, owner=None)

    def values(self, given: Tensor, deterministic: bool = False) -> Tensor:
        """(n,) the operand's values, entry by entry, in the type that sums are kept in; differentiable."""
        parts = crd.picked(given.to(accumulator(given.dtype)), self.source)
        return parts if self.owner is None else add_up(parts, self.owner, self.n, deterministic)

    @property
    def nbytes(self) -> int:
        """Bytes of the index arrays."""
        return sum(a.nbytes for a in (*self.coords, self.source, self.owner) if a is not None)


def prepared(
    letters: Sequence[str], coords: Tensor, sizes: dict[str, int], order: Sequence[str], coalesced: bool = False
) -> JoinOperand:
    """An operand of a join with the letters `order`: its diagonal, with all other letters summed away.

    Args:
        letters: of the operand's modes; one may repeat.
        coords: (modes, nnz) int64, in any order, duplicates allowed.
        sizes: of all letters.
        order: the letters to keep, each one of `letters`.
        coalesced: whether the coordinates are known to be distinct, and in lexicographic order.
    """
    letters = tuple(letters)
    order = tuple(order)
    extents = tuple(sizes[c] for c in order)
    source = crd.on_diagonal(letters, coords)
    owner, ordered = None, True
    rows = tuple(crd.picked(coords[letters.index(c)], source) for c in order)
    n = coords.shape[1] if source is None else source.numel()
    if coalesced and sorted(letters) == sorted(order):  # no letter twice, and none summed away
        ordered = letters == order
    elif not rows:  # all are summed to one entry, if there are any
        owner, n = None if n < 2 else coords.new_zeros(n), min(n, 1)
    else:
        distinct_coords, merge = duplicates.coalesced(torch.stack(rows), extents)
        rows, n = tuple(distinct_coords), distinct_coords.shape[1]
        if merge is not None:
            source, owner = merge.order if source is None else source[merge.order], merge.run
    return JoinOperand(order, extents, rows, n, ordered, source, owner, coords)


PIECE = 1 << 23
"""Results whose coordinates are written at a time: tenths of a second, and 200 MB."""


@dataclass(frozen=True)
class Join:
    """The matching entries of two operands in ``x,y->output``, with the rows and columns they make.

    Attributes:
        x_matched: (matched x,) the entries of x that match any of y, ascending; None for all.
        y_matched: (matched y,) the entries of y that match any of x, ascending; None for all.
        x_key: (matched x,) int64, ordered as the shared coordinates are: equal to `y_key` where entries match.
        y_key: (matched y,) int64, the key of each entry of y.
        y_each: (keys,) number of entries of y, matched or not, with each key, a number of shared coordinates.
        counts: (matched x,) number of tasks of each entry.
        row: numbers of the matched entries of x, by the letters that the result has.
        column: numbers of the matched entries of y, by their free letters.
        tasks: number of pairs of entries that match.
        shared: number of distinct shared coordinates of the matched entries.
    """

    roles: Roles
    x: JoinOperand
    y: JoinOperand
    x_matched: Tensor | None
    y_matched: Tensor | None
    x_key: Tensor
    y_key: Tensor
    y_each: Tensor
    counts: Tensor
    row: Numbering
    column: Numbering
    tasks: int
    shared: int

    @classmethod
    def of(cls, x: JoinOperand, y: JoinOperand, roles: Roles) -> Join:
        """The join of two operands; waits for the device for counts, and where entries are unmatched or numbered."""
        rows = x.rows(roles.shared), y.rows(roles.shared)
        x_key, y_key, count = joint_keys(*rows, x.extents(roles.shared), x.like, (x.n, y.n))
        x_each, y_each = histogram(x_key, count), histogram(y_key, count)
        each = x_each * y_each  # tasks of each key
        matched = each > 0
        tasks, x_n, y_n, shared = torch.stack([each, x_each * matched, y_each * matched, matched]).sum(1).tolist()
        x_matched = None if x_n == x.n else torch.nonzero(matched.index_select(0, x_key)).flatten()
        y_matched = None if y_n == y.n else torch.nonzero(matched.index_select(0, y_key)).flatten()
        x_key = crd.picked(x_key, x_matched)
        kept = x.rows(roles.kept_x, x_matched), x.extents(roles.kept_x), x_n
        columns = y.rows(roles.free_y, y_matched), y.extents(roles.free_y), y_n
        return cls(
            roles,
            x,
            y,
            x_matched,
            y_matched,
            x_key,
            crd.picked(y_key, y_matched),
            y_each,
            y_each.index_select(0, x_key),
            numbered(*kept, x.like, ascending=x.ordered and x.letters == roles.x),
            numbered(*columns, x.like, ascending=y.ordered and y.letters == roles.free_y),
            tasks,
            shared,
        )

    @cached_property
    def rows(self) -> int:
        """Number of rows of the matched entries of x."""
        return self.row.count

    @cached_property
    def columns(self) -> int:
        """Number of columns of the matched entries of y."""
        return self.column.count

    @property
    def most_results(self) -> int:
        """An upper bound on the entries of the result."""
        return min(self.tasks, self.rows * self.columns)

    def least_results(self) -> int:
        """A lower bound of the result's nonzeros: the products of one nonzero of x all have different columns."""
        if not self.tasks:
            return 0
        longest = self.counts.new_zeros(self.rows).scatter_reduce(0, self.row.rank, self.counts, "amax")
        return int(longest.sum())

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """Distinct coordinates of matched entries: batch, free of x, contracted, free of y."""
        roles, n = self.roles, self.counts.numel()

        def distinct(letters: Names) -> int:
            rows = self.x.rows(letters, self.x_matched)
            return numbered(rows, self.x.extents(letters), n, self.x.like).count

        if not roles.batch:
            return min(n, 1), self.rows, self.shared, self.columns
        # Matched entries of x and y have the same coordinates of the shared letters.
        return distinct(roles.batch), distinct(roles.free_x), distinct(roles.contracted), self.columns

    def lines(self, letters: Names) -> list[tuple[bool, Tensor]]:
        """Return for each letter of the result whether it goes by rows, not columns, and its coordinate in each."""
        of_rows = dict(zip(self.roles.kept_x, self.row.coords, strict=True))
        coords = of_rows | dict(zip(self.roles.free_y, self.column.coords, strict=True))
        return [(letter in of_rows, coords[letter]) for letter in letters]

    def only(self, kept: Tensor) -> tuple[Join, Tensor]:
        """Return the join restricted to some matched entries of x, and their numbers; `kept` is a mask (matched x,)."""
        numbers = torch.nonzero(kept).flatten()
        entries = numbers if self.x_matched is None else self.x_matched[numbers]
        return Join.of(self.x.only(entries), self.y, self.roles), entries

    def places_in(self, whole: Join, entries: Tensor, places: Tensor) -> Tensor:
        """Convert places of this join, restricted to `entries` of x, to places of `whole`."""
        rows = _by_entry(whole.row.rank, whole.x.n, whole.x_matched)[entries]
        columns = _by_entry(whole.column.rank, whole.y.n, whole.y_matched)
        columns = columns if self.y_matched is None else columns[self.y_matched]
        row = rows.new_zeros(self.rows).index_copy_(0, self.row.rank, rows)
        column = columns.new_zeros(self.columns).index_copy_(0, self.column.rank, columns)
        of_row = places // max(1, self.columns)
        return row[of_row] * whole.columns + column[places - of_row * self.columns]


def coordinates(places: Tensor, columns: int, lines: Sequence[tuple[bool, Tensor]]) -> Tensor:
    """Return (letters, n) the coordinates of the results at places of so many columns; `lines` as `Join` gives them."""
    n = places.numel()
    out = room(places.device, torch.int64, len(lines), n)
    if write := native(loops.coordinates, places.device, n):
        for to, (by_row, line) in zip(out, lines, strict=True):
            write(places, columns, by_row, line, to)
        return out
    with bar(n, "coordinates of results", unit="results") as done:
        for begin in range(0, n, PIECE):
            piece = places[begin : begin + PIECE]
            row = piece // max(1, columns)
            column = piece - row * columns
            for to, (by_row, line) in zip(out[:, begin : begin + PIECE], lines, strict=True):
                torch.index_select(line, 0, row if by_row else column, out=to)
            done(begin + piece.numel())
    return out


def _by_entry(ranks: Tensor, entries: int, matched: Tensor | None) -> Tensor:
    """(entries,) the rank of each that is matched."""
    return ranks if matched is None else ranks.new_zeros(entries).index_copy_(0, matched, ranks)
