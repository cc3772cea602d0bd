"""Products of entries with matrices that many of them share, as of tokens with experts: one matrix product a group.

In: an einsum of a sparse operand and two dense ones that share letters which neither the sparse operand nor the result
has, and entries in any order. Out: its result, differentiable. In ``te,ti,eio->to`` an entry multiplies row t of one
operand by matrix e of the other. Entries are sorted by matrix, their rows are gathered and multiplied a group at a
time, and the products are added up by row of the result, in float32 where operands have 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsetc.contraction.entries import Modes, sums
from sparsetc.ir.equation.einsum import Bound
from sparsetc.support import Ints, Names, among, outside

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
        rows = _arranged(rows, self.orders[0], (self.rows.count, each * shared))
        matrices = _arranged(matrices, self.orders[1], (self.groups.count, shared, wide))
        groups = self.groups.entries(coords)
        assert groups is not None
        order, begins = groups.by_row
        of = self.rows.entries(coords, order)
        to = of if self.rows == self.kept else self.kept.entries(coords, order)
        taken, ends = sums(None, rows, None, of), begins[1:]
        if each == 1:
            products = _products(taken, matrices, ends)
        else:
            products = _products(taken.view(-1, shared), matrices, ends * each).view(-1, each * wide)
        weights = values.index_select(0, order)
        if to is None:
            return weights.unsqueeze(0) @ products
        return sums(weights, products, to, None)


def _arranged(operand: Tensor, order: Ints, shape: Ints) -> Tensor:
    """Return an operand in an order and a shape; itself where it has them, as each view takes the time of a launch."""
    if [*order] != sorted(order):
        operand = operand.permute(order)
    return operand if operand.shape == shape else operand.reshape(shape)


def _products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply (n, shared) rows, sorted by group, by the (shared, wide) matrices of their groups, which end there."""
    size, (_, shared, wide) = rows.element_size(), matrices.shape
    served = rows.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if served and not (shared * size % 16 or wide * size % 16) and rows.numel() and matrices.numel():
        return F.grouped_mm(rows, matrices, offs=ends)
    lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(lengths), matrices.unbind(), strict=True)])
