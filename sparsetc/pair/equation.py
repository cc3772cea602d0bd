"""The letters of a contraction of two sparse operands, by the part they play; and the operands as it reads them.

In: the letters of two operands and of the result. Out: `Roles`, and a `Side` an operand: distinct coordinates in the
order that the contraction wants, and which of the operand's values make up each. The roles (BCB-SpTC, section II-A,
where only the first three occur)::

    free of x      in x and in the result                 I_m
    free of y      in y and in the result                 I_n
    contracted     in x and in y, not in the result       I_k
    batch          in x, in y and in the result           elementwise
    own            in one operand alone                   summed before anything else

A letter that an operand has twice takes its diagonal. Both are done once, when the pattern is prepared; a call then
gathers and adds values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsetc import coords as crd
from sparsetc.ir.einsum import distinct
from sparsetc.pair.keys import keys_of
from sparsetc.pair.sums import add_up, kept_dtype


@dataclass(frozen=True)
class Roles:
    """Letters by role. `x` and `y` are the operands' letters, without those summed in one operand alone."""

    output: tuple[str, ...]
    kept_x: tuple[str, ...]
    """Free of x, and batch, in the result's order: the rows of the result."""
    free_y: tuple[str, ...]
    """Free of y, in the result's order: its columns."""
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
        """Rows' letters that y does not have."""
        return tuple(c for c in self.kept_x if c not in self.batch)

    @property
    def shared(self) -> tuple[str, ...]:
        """What must be equal for two nonzeros to meet."""
        return (*self.batch, *self.contracted)

    @property
    def x(self) -> tuple[str, ...]:
        """The order in which x is read: row by row."""
        return (*self.kept_x, *self.contracted)

    @property
    def y(self) -> tuple[str, ...]:
        """The order in which y is read: what meets the same nonzeros of x lies together."""
        return (*self.shared, *self.free_y)

    @property
    def natural(self) -> tuple[str, ...]:
        """The order in which results are made."""
        return (*self.kept_x, *self.free_y)

    def __str__(self) -> str:
        named = {"free of x": self.free_x, "free of y": self.free_y, "contracted": self.contracted, "batch": self.batch}
        return ", ".join(f"{name} {''.join(letters)}" for name, letters in named.items() if letters)


@dataclass(frozen=True)
class Side:
    """One operand's pattern: sorted, distinct coordinates, one mode a letter."""

    letters: tuple[str, ...]
    sizes: tuple[int, ...]
    coords: torch.Tensor
    """(letters, n) int64, in lexicographic order."""
    source: torch.Tensor | None
    """(m,) which of the operand's values take part, those of one entry together; None for all, as they are."""
    owner: torch.Tensor | None
    """(m,) the entry each of them adds to; None when it is one each."""

    @property
    def n(self) -> int:
        """Distinct entries."""
        return self.coords.shape[1]

    def rows(self, letters: Sequence[str]) -> torch.Tensor:
        """(letters, n) coordinates of these letters."""
        return self.coords[[self.letters.index(c) for c in letters]]

    def extents(self, letters: Sequence[str]) -> tuple[int, ...]:
        """Sizes of these letters."""
        return tuple(self.sizes[self.letters.index(c)] for c in letters)

    def values(self, given: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
        """(n,) the operand's values, entry by entry, in the type that sums are kept in; differentiable."""
        wide = given.to(kept_dtype(given.dtype))
        taken = wide if self.source is None else wide.index_select(0, self.source)
        return taken if self.owner is None else add_up(taken, self.owner, self.n, deterministic)

    @property
    def nbytes(self) -> int:
        """Bytes of the index arrays."""
        return sum(a.numel() * a.element_size() for a in (self.coords, self.source, self.owner) if a is not None)


def prepared(letters: Sequence[str], coords: torch.Tensor, sizes: dict[str, int], order: Sequence[str]) -> Side:
    """The operand as a `Side` of the letters `order`: its diagonal, the letters it alone has summed away.

    Args:
        letters: of the operand's modes; one may repeat.
        coords: (modes, nnz) int64, in any order, duplicates allowed.
        sizes: of all letters.
        order: the letters to keep, each one of `letters`.
    """
    source = _on_diagonal(letters, coords)
    modes = coords[[letters.index(c) for c in order]]
    modes = modes if source is None else modes[:, source]
    extents = tuple(sizes[c] for c in order)
    keys = keys_of(modes, extents)
    if crd.is_sorted_unique(keys):
        return Side(tuple(order), extents, modes.contiguous(), source, None)
    by_key = crd.lexsort(keys)
    fresh = crd.starts_of_runs([k[by_key] for k in keys])
    heads = by_key[fresh]
    owner = None if heads.numel() == by_key.numel() else torch.cumsum(fresh, 0) - 1
    source = by_key if source is None else source[by_key]
    return Side(tuple(order), extents, modes[:, heads].contiguous(), source, owner)


def _on_diagonal(letters: Sequence[str], coords: torch.Tensor) -> torch.Tensor | None:
    """The nonzeros whose coordinates agree wherever a letter repeats; None where none does."""
    if len(set(letters)) == len(letters):
        return None
    on = torch.ones(coords.shape[1], dtype=torch.bool, device=coords.device)
    for mode, letter in enumerate(letters):
        on &= coords[mode] == coords[letters.index(letter)]
    return torch.nonzero(on).flatten()
