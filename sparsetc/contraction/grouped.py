"""Products of entries with matrices that many of them share, as of tokens with experts: one matrix product a group.

In: an einsum of a sparse operand and two dense ones that share letters which neither the sparse operand nor the result
has, and entries in any order. Out: its result, differentiable. In ``te,ti,eio->to`` an entry multiplies row t of one
operand by matrix e of the other. Entries are sorted by matrix, their rows are gathered and multiplied a group at a
time, and the products are added up by row of the result, in float32 where operands have 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsetc.ir.equation.einsum import Bound
from sparsetc.support import Ints, Names, among, outside
from sparsetc.support.lru import cached_property
from sparsetc.tensor.coords import linear_key, narrowed, picked
from sparsetc.tensor.sums import accumulator, add_rows

OF_A_GROUP = 8
"""Entries a group from which a product of matrices beats multiplying one entry after the other..."""
OF_A_MATRIX = 1 << 10
"""...and elements of a matrix."""


@dataclass(frozen=True)
class Grouped:
    """An einsum in which each entry multiplies a row, or a few, by the matrix of its group.

    Attributes:
        kept: modes of the sparse operand that number rows of the result.
        rows, groups: modes that number rows of the one dense operand, and matrices of the other.
        counts: the number of rows of the result, of rows and of groups.
        first: whether the operand of rows comes first.
        orders: permutations of the dense operands: modes, own letters, shared letters; and modes, shared, own letters.
        sizes: elements of the own letters of rows, of the shared letters, and of the own letters of matrices.
        letters: of the result as it is made.
    """

    kept: Modes
    rows: Modes
    groups: Modes
    first: bool
    orders: tuple[Ints, Ints]
    sizes: Ints
    letters: Names

    @classmethod
    def of(cls, bound: Bound) -> Grouped | None:
        """Return the products of groups of an einsum of one sparse operand and two dense ones; None if it has none."""
        e = bound.einsum
        (sparse,) = e.sparse
        letters, shared = e.inputs[sparse], e.dense_contracted
        one, other = e.tables
        if {*shared} - {*one} or {*shared} - {*other} or {*e.free} & {*one} & {*other}:
            return None
        first = bound.elements(among(one, letters)) >= bound.elements(among(other, letters))
        rows, matrices = (one, other) if first else (other, one)
        own = [outside(of, (*letters, *shared)) for of in (rows, matrices)]
        if not among(matrices, letters):
            return None
        orders = (
            tuple(map(rows.index, (*among(rows, letters), *own[0], *shared))),
            tuple(map(matrices.index, (*among(matrices, letters), *shared, *own[1]))),
        )
        return cls(
            kept=Modes.of(bound, letters, e.kept),
            rows=Modes.of(bound, letters, rows),
            groups=Modes.of(bound, letters, matrices),
            first=first,
            orders=orders,
            sizes=tuple(map(bound.elements, (own[0], shared, own[1]))),
            letters=(*e.kept, *own[0], *own[1]),
        )

    def pays(self, count: int, dtype: torch.dtype) -> bool:
        """Return True if groups are the way: of fewer entries they are too small, of more a dense product is faster."""
        few, many = OF_A_GROUP * self.groups.count, self.rows.count * self.groups.count
        numbers = dtype.is_floating_point or dtype.is_complex
        return numbers and few <= count < many and self.sizes[1] * self.sizes[2] >= OF_A_MATRIX

    def result(self, coords: Sequence[Tensor], values: Tensor, dense: Sequence[Tensor]) -> Tensor:
        """Return (rows, elements of a row) of the result."""
        rows, matrices = dense if self.first else dense[::-1]
        each, shared, wide = self.sizes
        rows = rows.permute(self.orders[0]).reshape(self.rows.count, each * shared)
        matrices = matrices.permute(self.orders[1]).reshape(self.groups.count, shared, wide)
        order, ends = self.groups.entries(coords).by_row
        at = self.rows.entries(coords, order)
        to = at if self.rows == self.kept else self.kept.entries(coords, order)
        taken = _Taken.apply(rows, at).view(-1, shared)
        products = _products(taken, matrices, ends[1:] if each == 1 else ends[1:] * each)
        return _Summed.apply(products.view(-1, each * wide), values.index_select(0, order), to)


@dataclass(frozen=True)
class Modes:
    """Modes of a sparse operand, and their sizes, which together number rows."""

    modes: Ints
    sizes: Ints

    @classmethod
    def of(cls, bound: Bound, letters: Names, term: Names) -> Modes:
        """Return those of a sparse operand's letters that a term has, in the order of the term."""
        held = among(term, letters)
        return cls(tuple(map(letters.index, held)), bound.extents(held))

    @cached_property
    def count(self) -> int:
        """The rows that there are."""
        return prod(self.sizes)

    def numbers(self, coords: Sequence[Tensor]) -> Tensor | None:
        """Return (entries,) row-major numbers of the entries' coordinates; None without modes."""
        return linear_key([coords[mode] for mode in self.modes], self.sizes)[0] if self.modes else None

    def entries(self, coords: Sequence[Tensor], order: Tensor | None = None) -> Entries:
        """Return the rows of the entries, which may be put in another order."""
        number = self.numbers(coords)
        return Entries(picked(torch.zeros_like(coords[0]) if number is None else number, order), self.count)


class Entries:
    """The row, of so many, that each entry names.

    Attributes:
        row: (entries,) int64.
    """

    def __init__(self, row: Tensor, count: int) -> None:
        self.row = row
        self.count = count

    @cached_property
    def by_row(self) -> tuple[Tensor, Tensor]:
        """The entries in the order of their rows, and (rows + 1,) int32 where each row begins."""
        ascending, order = torch.sort(narrowed(self.row, self.count), stable=True)
        numbers = torch.arange(self.count + 1, dtype=ascending.dtype, device=ascending.device)
        return order, torch.searchsorted(ascending, numbers, out_int32=True)

    def sums(self, terms: Tensor, weights: Tensor | None) -> Tensor:
        """Return (rows, width): the sum of the weighted terms of each row's entries."""
        if terms.is_complex() or not terms.numel():
            terms = terms if weights is None else terms * weights[:, None]
            return add_rows(terms.new_zeros(self.count, terms.shape[1]), self.row, terms)
        order, begins = self.by_row
        weights = None if weights is None else weights.index_select(0, order)
        return torch.embedding_bag(terms, order, begins, False, 0, False, weights, True)[0]


class _Taken(torch.autograd.Function):
    """The row of a table of each entry."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, entries: Entries) -> Tensor:
        ctx.entries = entries
        return table.index_select(0, entries.row)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return _Summed.apply(upstream, None, ctx.entries), None


class _Summed(torch.autograd.Function):
    """The sum of the weighted terms of each row's entries; of terms alone where weights are None."""

    @staticmethod
    def forward(ctx: Any, terms: Tensor, weights: Tensor | None, entries: Entries) -> Tensor:
        ctx.entries = entries
        ctx.save_for_backward(terms if ctx.needs_input_grad[1] else None, weights)
        return entries.sums(terms, weights)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        terms, weights = ctx.saved_tensors
        rows = _Taken.apply(upstream, ctx.entries)
        of_weights = (
            (rows * terms.conj()).sum(1, dtype=accumulator(terms.dtype)).to(terms.dtype)
            if ctx.needs_input_grad[1]
            else None
        )
        return rows if weights is None else rows * weights.conj()[:, None], of_weights, None


def _products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply (n, shared) rows, sorted by group, by the (shared, wide) matrices of their groups, which end there."""
    size, (_, shared, wide) = rows.element_size(), matrices.shape
    served = rows.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if served and not (shared * size % 16 or wide * size % 16) and rows.numel() and matrices.numel():
        return F.grouped_mm(rows, matrices, offs=ends)
    lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(lengths), matrices.unbind(), strict=True)])
