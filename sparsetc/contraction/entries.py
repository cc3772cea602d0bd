"""Sums of weighted rows of tables over entries in any order, differentiable: what einsums without a kernel are made of.

In: for each entry, or pair of coordinates, a row of a table, a row of the result and a weight. Out: the result. Loops
and kernels are made once for all patterns: a native loop on a CPU, a kernel of Triton's that adds by atomics on a GPU.
Numbers of 16 bits are added up in float32, of large results by a kernel that goes from one entry of a row to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparsetc.codegen.launch import run_by_hand
from sparsetc.support import cached_property
from sparsetc.support.files import native
from sparsetc.tensor.dtypes import accumulator, add_rows, captured
from sparsetc.tensor.pattern import followed, lasting

NARROW = torch.uint8, torch.int16, torch.int32, torch.int64
"""Types of rows that are sorted: a GPU sorts by one byte after another."""
SMALL = 1 << 23
"""Elements of a result of 16 bits that is added up in float32 by atomics at most: a row that many entries add to is the
work of many programs then. Of more elements the float32 result takes longer to write than rows do one by one."""


class EntryRows:
    """The row, of so many, of each entry: (entries,) int64."""

    def __init__(self, row: Tensor, count: int) -> None:
        self.row = row
        self.count = count

    def sorted(self) -> tuple[Tensor, Tensor]:
        """Return the entries in the order of their rows, and (rows,) int32 where each row ends."""
        narrow = next(dtype for dtype in NARROW if self.count <= torch.iinfo(dtype).max)
        ascending, order = torch.sort(self.row.to(narrow), stable=True)
        numbers = constant(torch.arange, self.count, narrow, ascending)
        return order, torch.searchsorted(ascending, numbers, out_int32=True, right=True)

    @cached_property
    def chains(self) -> tuple[Tensor, Tensor]:
        """(rows,) an entry of each row, -1 of none, and (entries,) the next one of its row, of the last itself."""
        head, after = torch.full((self.count,), -1, device=self.row.device), torch.empty_like(self.row)
        run_by_hand("chain", [self.row, after.shape[0], head, after])
        return head, after


def constant(make: Callable[..., Tensor], count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return `torch.arange` or `torch.ones` of a length, on a device; one that is kept, but for a graph's memory."""
    of = _constant.__wrapped__ if captured(like) else _constant
    return of(make, count, dtype, like.device)


@lru_cache(maxsize=16)
def _constant(make: Callable[..., Tensor], count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with lasting():
        return make(count, dtype=dtype, device=device)


def sums(weights: Tensor | None, table: Tensor, to: EntryRows | None, of: EntryRows | None) -> Tensor:
    """Return, for each row of the result, the sum of ``weights[n] * table[of[n]]`` over the entries n that add `to` it.

    Weights of None are 1. Where `to` or `of` is None, each entry has a row of its own, in their order.
    """
    return (_Sums.apply if followed([weights, table]) else _sums)(weights, table, to, of)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor | None, table: Tensor, to: EntryRows | None, of: EntryRows | None) -> Tensor:
        ctx.places = to, of
        ctx.save_for_backward(weights, table if ctx.needs_input_grad[0] else None)
        return _sums(weights, table, to, of)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (to, of), (weights, table) = ctx.places, ctx.saved_tensors
        of_weights = of_table = None
        if table is not None:
            terms = _rows(upstream, to) * _rows(table, of).conj()
            of_weights = terms.sum(1, dtype=accumulator(terms.dtype)).to(terms.dtype)
        if ctx.needs_input_grad[1]:
            of_table = sums(weights if weights is None else weights.conj(), upstream, of, to)
        return of_weights, of_table, None, None


def _rows(table: Tensor, of: EntryRows | None) -> Tensor:
    return table if of is None else table.index_select(0, of.row)


def _sums(weights: Tensor | None, table: Tensor, to: Any, of: Any) -> Tensor:
    """Compute `sums`."""
    wide, floats = table.dtype == accumulator(table.dtype), table.dtype.is_floating_point
    if to is None and (weights is None or wide or not (floats and table.is_cuda)):
        return _rows(table, of) if weights is None else _rows(table, of) * weights.unsqueeze(1)
    if weights is None:
        weights = constant(torch.ones, to.row.shape[0], table.dtype, table)
    if floats and table.is_cuda and not (wide and of is None):
        return _by_kernel(weights, table, to, of)
    if not table.is_cuda and wide and not table.is_complex():
        column = constant(torch.arange, len(weights), torch.int64, table) if of is None else of.row
        if add := native(_add_rows, table.device, len(column) * table.shape[1]):
            out = table.new_zeros(to.count, table.shape[1])
            add(to.row, column, weights, table.contiguous(), out)
            return out
        if floats:  # a product by which torch adds rows faster than one by one
            pairs, shape = torch.stack([to.row, column]), (to.count, len(table))
            matrix = torch.sparse_coo_tensor(pairs, weights, shape, check_invariants=False, device=table.device)
            return matrix @ table
    terms = (_rows(table, of) * weights.unsqueeze(1)).to(accumulator(table.dtype))
    return add_rows(terms.new_zeros(to.count, terms.shape[1]), to.row, terms).to(table.dtype)


def _by_kernel(weights: Tensor, table: Tensor, to: Any, of: Any) -> Tensor:
    """Compute `sums` by a kernel that serves all patterns: by atomics, or of 16 bits with wide results row by row."""
    weights, table = weights.contiguous(), table.contiguous()
    width, wide = table.shape[1], accumulator(table.dtype)
    if table.dtype == wide or (to and of and to.count * width <= SMALL):
        out, rows = table.new_zeros(to.count, width, dtype=wide), (to.row, of.row)
        run_by_hand("add_rows", [*rows, weights, table, len(weights), width, out], table.dtype)
        return out.to(table.dtype)
    numbers: Any = None
    if to is None or of is None:
        numbers = constant(torch.arange, weights.shape[0], torch.int64, table)
    head, after = to.chains if to else (numbers, numbers)
    at = of.row if of else numbers
    out = table.new_empty(head.shape[0], width)
    run_by_hand("sum_rows", [head, after, at, weights, table, head.shape[0], width, out], width)
    return out


def _add_rows(row: Any, column: Any, weights: Any, table: Any, out: Any) -> None:
    """Add each weight times its row of a table to a row of `out`."""
    for n in range(len(row)):
        to, at = row[n], column[n]
        x = weights[n]
        for c in range(out.shape[1]):
            out[to, c] += x * table[at, c]
