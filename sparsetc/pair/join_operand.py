"""The operands of a join as it reads them, and the letters of a contraction of two sparse operands by role.

In: the letters of two operands and of the result. Out: `Roles`, and a `JoinOperand` an operand: distinct coordinates,
letter by letter, and which of the operand's values make up each. The roles (BCB-SpTC, section II-A, where only the
first three occur)::

    free of x      in x and in the result                 I_m
    free of y      in y and in the result                 I_n
    contracted     in x and in y, not in the result       I_k
    batch          in x, in y and in the result           elementwise
    own            in one operand alone                   summed before anything else

A letter that an operand has twice takes its diagonal. Diagonals and own sums are found once, when the pattern is
prepared; a call then gathers and adds values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sparsetc.ir.equation.einsum import distinct
from sparsetc.pair.sums import add_up, kept_dtype
from sparsetc.tensor import coords as crd
from sparsetc.tensor.numbering import lexsort


@dataclass(frozen=True)
class Roles:
    """Letters by role; `x` and `y` are the operands' letters without those summed in one operand alone."""

    output: tuple[str, ...]
    kept_x: tuple[str, ...]
    """Free of x, and batch, in the result's order: the rows of the result."""
    free_y: tuple[str, ...]
    """Free of y, in the result's order: the columns of the result."""
    batch: tuple[str, ...]
    contracted: tuple[str, ...]

    @classmethod
    def of(cls, x: Sequence[str], y: Sequence[str], output: Sequence[str]) -> Roles:
        """The roles in ``x,y->output``."""
        return cls(
            tuple(output),
            tuple(c for c in output if c in x),
            tuple(c for c in output if c not in x),
            tuple(c for c in output if c in x and c in y),
            tuple(c for c in distinct(x) if c in y and c not in output),
        )

    @property
    def free_x(self) -> tuple[str, ...]:
        """Letters of the rows that y does not have."""
        return tuple(c for c in self.kept_x if c not in self.batch)

    @property
    def shared(self) -> tuple[str, ...]:
        """Letters whose coordinates must be equal for two nonzeros to match."""
        return (*self.batch, *self.contracted)

    @property
    def x(self) -> tuple[str, ...]:
        """Letters of x in the order in which it is read: row by row."""
        return (*self.kept_x, *self.contracted)

    @property
    def y(self) -> tuple[str, ...]:
        """Letters of y in the order in which it is read: what matches the same nonzeros of x lies together."""
        return (*self.shared, *self.free_y)

    @property
    def result_order(self) -> tuple[str, ...]:
        """Letters in the order in which results are made: rows, then columns."""
        return (*self.kept_x, *self.free_y)

    def __str__(self) -> str:
        named = {"free of x": self.free_x, "free of y": self.free_y, "contracted": self.contracted, "batch": self.batch}
        return ", ".join(f"{name} {''.join(letters)}" for name, letters in named.items() if letters)


@dataclass(frozen=True)
class JoinOperand:
    """The pattern of an operand of a join: distinct coordinates by letter, in its own order where that serves."""

    letters: tuple[str, ...]
    sizes: tuple[int, ...]
    coords: tuple[torch.Tensor, ...]
    """(n,) int64 a letter."""
    n: int
    """Number of distinct entries."""
    ordered: bool
    """Whether the entries are known to be in lexicographic order of `letters`."""
    source: torch.Tensor | None
    """(m,) which of the operand's values take part, sorted by entry; None for all, as they are."""
    owner: torch.Tensor | None
    """(m,) the entry that each value of `source` adds to; None when each is an entry of its own."""
    like: torch.Tensor
    """An int64 tensor on the operand's device."""

    def rows(self, letters: Sequence[str], entries: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The coordinates of each letter, (n,), or (len(entries),) for some entries only."""
        found = [self.coords[self.letters.index(c)] for c in letters]
        return found if entries is None else [row.index_select(0, entries) for row in found]

    def extents(self, letters: Sequence[str]) -> tuple[int, ...]:
        """Sizes of the modes that these letters name."""
        return tuple(self.sizes[self.letters.index(c)] for c in letters)

    def only(self, entries: torch.Tensor) -> JoinOperand:
        """An operand of some of the entries, ascending, whose values are theirs."""
        rows = tuple(row.index_select(0, entries) for row in self.coords)
        return replace(self, coords=rows, n=entries.numel(), source=None, owner=None)

    def values(self, given: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
        """(n,) the operand's values, entry by entry, in the type that sums are kept in; differentiable."""
        own = given.to(kept_dtype(given.dtype))
        taken = own if self.source is None else own.index_select(0, self.source)
        return taken if self.owner is None else add_up(taken, self.owner, self.n, deterministic)

    @property
    def nbytes(self) -> int:
        """Bytes of the index arrays."""
        return sum(a.numel() * a.element_size() for a in (*self.coords, self.source, self.owner) if a is not None)


def prepared(
    letters: Sequence[str], coords: torch.Tensor, sizes: dict[str, int], order: Sequence[str], coalesced: bool = False
) -> JoinOperand:
    """An operand of a join with the letters `order`: its diagonal, with all other letters summed away.

    Args:
        letters: of the operand's modes; one may repeat.
        coords: (modes, nnz) int64, in any order, duplicates allowed.
        sizes: of all letters.
        order: the letters to keep, each one of `letters`.
        coalesced: whether the coordinates are known to be distinct, and in lexicographic order.
    """
    letters, order, extents = tuple(letters), tuple(order), tuple(sizes[c] for c in order)
    source = crd.on_diagonal(letters, coords)
    rows = tuple(coords[letters.index(c)] for c in order)
    rows = rows if source is None else tuple(row[source] for row in rows)
    n = coords.shape[1] if source is None else source.numel()
    if coalesced and sorted(letters) == sorted(order):  # no letter twice, and none summed away
        return JoinOperand(order, extents, rows, n, letters == order, None, None, coords)
    if not rows:
        found = _summed(n, source, coords)
        return JoinOperand(order, extents, (), min(n, 1), True, *found, coords)
    keys = crd.sort_keys(rows, extents)
    if crd.is_sorted_unique(keys):
        return JoinOperand(order, extents, rows, n, True, source, None, coords)
    by_key = lexsort(rows, extents)
    fresh = crd.starts_of_runs([k[by_key] for k in keys])
    representatives = by_key[fresh]
    n_distinct = representatives.numel()
    owner = None if n_distinct == n else torch.cumsum(fresh, 0) - 1
    source = by_key if source is None else source[by_key]
    return JoinOperand(
        order, extents, tuple(row[representatives] for row in rows), n_distinct, True, source, owner, coords
    )


def _summed(
    n: int, source: torch.Tensor | None, coords: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Source and owner of an operand all of whose letters are summed away to one entry, or none."""
    return (source, None) if n < 2 else (source, coords.new_zeros(n))
