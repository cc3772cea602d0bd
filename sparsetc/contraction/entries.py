"""Sums of weighted rows of tables over entries in any order, differentiable: what einsums without a kernel are made of.

In: for each entry, or pair of coordinates, a row of a table, a row of the result and a weight. Out: the result. Loops
and kernels are made once for all patterns: a native loop on a CPU, a kernel of Triton's that adds by atomics on a GPU.
Numbers of 16 bits are sorted by row and added up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsetc.codegen.launch import FUSED, launch_of
from sparsetc.ir.equation.einsum import Bound
from sparsetc.support import Ints, Names, among
from sparsetc.support.compiled import native
from sparsetc.support.entry import on_gpu
from sparsetc.support.lru import cached_property
from sparsetc.tensor.coords import linear_key, narrowed, picked
from sparsetc.tensor.sums import accumulator, add_rows

PROGRAMS = 2048
"""Programs that add rows on a GPU, whatever there is to add."""


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

    def entries(self, coords: Sequence[Tensor], order: Tensor | None = None) -> Entries | None:
        """Return the rows of the entries, which may be put in another order; None without modes."""
        if not self.modes:
            return None
        key = linear_key([coords[mode] for mode in self.modes], self.sizes)[0]
        return Entries(picked(key, order), self.count)


class Entries:
    """The row, of so many, of each entry: (entries,) int64."""

    def __init__(self, row: Tensor, count: int) -> None:
        self.row = row
        self.count = count

    @cached_property
    def by_row(self) -> tuple[Tensor, Tensor]:
        """The entries in the order of their rows, and (rows + 1,) int32 where each row begins."""
        ascending, order = torch.sort(narrowed(self.row, self.count), stable=True)
        numbers = torch.arange(self.count + 1, dtype=ascending.dtype, device=ascending.device)
        return order, torch.searchsorted(ascending, numbers, out_int32=True)


class Sums(torch.autograd.Function):
    """For each row of the result, the sum of ``weights[n] * table[of[n]]`` over the entries n that add `to` it.

    Weights of None are 1. Where `to` or `of` is None, each entry has a row of its own, in their order.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor | None, table: Tensor, to: Entries | None, of: Entries | None) -> Tensor:
        ctx.places = to, of
        ctx.save_for_backward(weights, table if ctx.needs_input_grad[0] else None)
        if to is None:
            rows = _rows(table, of)
            return rows if weights is None else rows * weights.unsqueeze(1)
        wide = table.dtype == accumulator(table.dtype) and not table.is_complex()
        if wide and (add := _adder(to, of, table)):
            weights = table.new_ones(len(to.row)) if weights is None else weights
            column = torch.arange(len(to.row)) if of is None else of.row
            sums = table.new_zeros(to.count, table.shape[1])
            add(to.row, column, weights, table.contiguous(), sums)
            return sums
        terms = _rows(table, of)
        if (wide and not table.is_cuda) or (table.element_size() == 2 and terms.numel()):
            order, begins = to.by_row
            weights = None if weights is None else weights.index_select(0, order)
            return torch.embedding_bag(terms, order, begins, False, 0, False, weights, True)[0]
        terms = terms if weights is None else terms * weights.unsqueeze(1)
        return add_rows(terms.new_zeros(to.count, terms.shape[1]), to.row, terms)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (to, of), (weights, table) = ctx.places, ctx.saved_tensors
        of_weights = of_table = None
        if table is not None:
            terms = _rows(upstream, to) * _rows(table, of).conj()
            of_weights = terms.sum(1, dtype=accumulator(terms.dtype)).to(terms.dtype)
        if ctx.needs_input_grad[1]:
            of_table = Sums.apply(weights if weights is None else weights.conj(), upstream, of, to)
        return of_weights, of_table, None, None


def _rows(table: Tensor, of: Entries | None) -> Tensor:
    return table if of is None else table.index_select(0, of.row)


def _adder(to: Entries, of: Entries | None, table: Tensor) -> Callable[..., None] | None:
    """Return what adds weighted rows of a table: a native loop on a CPU, a kernel on a GPU; None where torch does."""
    if not table.is_cuda:
        return native(_add_rows, table.device, len(to.row) * table.shape[1])
    return _add_on_gpu if of is not None and table.dtype.is_floating_point else None


def _add_on_gpu(row: Tensor, column: Tensor, weights: Tensor, table: Tensor, out: Tensor) -> None:
    with on_gpu(out.device):  # Triton launches on the current device
        _launch()([row, column, weights, table, len(row), table.shape[1], out])


@lru_cache(maxsize=1)
def _launch() -> Callable[[list[Any]], None]:
    from sparsetc.codegen.scatter_kernels import add_rows

    return launch_of(add_rows, PROGRAMS, (0, 1, 2, 3, 6), {"num_warps": 4, **FUSED})


def _add_rows(row: Any, column: Any, weights: Any, table: Any, out: Any) -> None:
    """Add each weight times its row of a table to a row of `out`."""
    for n in range(len(row)):
        to, at, x = row[n], column[n], weights[n]
        for c in range(out.shape[1]):
            out[to, c] += x * table[at, c]
