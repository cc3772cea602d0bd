"""Einsums of patterns that are used once or a few times, such as a new graph at each step, by torch's operations.

In: an einsum of one sparse operand, or of two on a GPU, and how often the patterns were used. Out: its result, dense of
one operand, differentiable; None if a kernel is to be compiled. Sorting, planning and packing take longer than ten
calls, so a kernel pays only for a pattern that stays. Once several patterns in a row were used a few times each, the
next one gets no kernel at first: its rows are gathered, multiplied and added by torch, on a CPU by one native loop that
serves all, in the order in which the entries were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsetc.contraction.operands import Operands, Tensors
from sparsetc.contraction.output import is_sparse
from sparsetc.contraction.passing_pair import product
from sparsetc.errors import EquationError
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.equation.parse import parse
from sparsetc.options import Options
from sparsetc.support import Ints, among, outside
from sparsetc.support.compiled import native
from sparsetc.support.entry import without_autocast
from sparsetc.support.lru import Lru
from sparsetc.tensor import readings
from sparsetc.tensor.coords import linear_key, picked
from sparsetc.tensor.pattern import Uses, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import INTEGERS, accumulator, add_rows

IN_A_ROW = 3
"""Patterns in a row that must have been used only a few times before the next one gets no kernel at first."""
FEW = 8
"""Most uses of a pattern that count as few: more than most networks have layers, and fewer than take the time of a
compilation (`benchmarks/instead.py`, new graphs of 16 K edges)."""
ENTRIES, ELEMENTS = 1 << 20, 1 << 27
"""Most entries of a pattern, and elements of gathered or added rows, before kernels are compiled: compiling then takes
little beside the run, and kernels do not gather rows into memory."""


@dataclass(frozen=True)
class LastUse:
    """The pattern that an einsum was last used with, and how many patterns in a row before it were used a few times."""

    uses: Uses
    passed: int


last_uses: Lru[Any, LastUse] = Lru(256)
"""Einsums that were called with patterns they had no kernel for."""


def passing(text: str, operands: Operands, settings: Options, form: str) -> Tensor | SparseTensor | None:
    """Return the result of an einsum whose pattern is not worth a kernel yet; None if one is to be compiled."""
    sparse = [number for number, o in enumerate(operands) if isinstance(o, SparseTensor)]
    by_rule = transforming() or forward_ad._current_level >= 0 or torch.are_deterministic_algorithms_enabled()
    two = len(sparse) == len(operands) == 2 and operands[0].device.type == "cuda"
    if not (two or len(sparse) == 1) or settings.asks or by_rule:
        return None
    entries = [_entries(o) for o in operands if isinstance(o, SparseTensor)]
    coords, values, uses = min(entries, key=lambda one: one[2].count)
    kind = values.dtype, values.device
    rows = any(one[1].ndim > 1 for one in entries)  # of dense modes, or blocks
    if rows or kind[0] in INTEGERS or any((o.dtype, o.device) != kind for o in operands):
        return None
    if not _comes_and_goes(text, (len(coords), *kind), uses):
        return None
    if two:
        return _of_pair(text, operands, form, entries)
    recipe = Recipe.of(text, tuple(o.ndim if isinstance(o, Tensor) else o.order for o in operands), *sparse)
    bound = recipe and recipe.bound(operands)
    if not recipe or not bound or is_sparse(form, bound.einsum, [bound.einsum.inputs[sparse[0]]]):
        return None
    width = bound.elements(recipe.free)
    count = len(values)
    if count > ENTRIES or max(count, bound.elements(recipe.kept)) * width > ELEMENTS:
        return None
    uses.count += 1
    dense = [o for o in operands if isinstance(o, Tensor)]
    with without_autocast(values.device):
        return recipe.result(bound, coords.unbind(), values, dense)


Entries = tuple[Tensor, Tensor, Uses]
"""Coordinates and values of a tensor's entries, in any order, and the counter of uses of the coordinates."""


def _of_pair(text: str, operands: Operands, form: str, entries: Sequence[Entries]) -> Tensor | SparseTensor | None:
    """Return the product of two sparse operands; None of any with labels, which the result would have too."""
    patterns = [o._pattern if o._unsorted is None else None for o in operands if isinstance(o, SparseTensor)]
    if any(pattern and pattern.labels for pattern in patterns):
        return None
    bound = parse(text, [tuple(o.shape) for o in operands], [True, True])
    in_order = patterns[1] is not None and patterns[1].is_coalesced
    coords, values, uses = zip(*entries, strict=True)
    with without_autocast(values[0].device):
        result = product(bound, coords, values, form, in_order)
    for one in {*uses} if result is not None else ():
        one.count += 1
    return result


def _entries(x: SparseTensor) -> Entries:
    """Return those of a tensor."""
    unsorted = x._unsorted
    if unsorted is None or not unsorted.unchanged:
        return x._pattern.coords, x._values, x._pattern.uses
    return unsorted.reading.coords, unsorted.values, unsorted.reading.uses


def _comes_and_goes(text: str, kind: tuple[int, torch.dtype, torch.device], uses: Uses) -> bool:
    """Return True if this pattern, and several in a row before it, were used a few times only."""
    last = last_uses.get((text, kind))
    if last is None or last.uses is not uses:
        passed = last.passed + 1 if last and last.uses.count <= FEW else 0
        last_uses.pop((text, kind))
        last = last_uses.put((text, kind), LastUse(uses, passed))
        (readings.passing.add if passed >= IN_A_ROW else readings.passing.discard)(kind)
    return last.passed >= IN_A_ROW and uses.count < FEW


@dataclass(frozen=True)
class Table:
    """A dense operand as a table of rows to gather.

    Attributes:
        letters: letters shared with the sparse operand, which number the rows.
        order: permutation of its dimensions: these letters first, then letters of the result in the result's order.
        free: for each dense letter of the result, whether the operand has it.
    """

    letters: str
    order: Ints
    free: tuple[bool, ...]


@dataclass(frozen=True)
class Recipe:
    """An einsum in which each entry adds to one row of the result the product of one row of each dense operand.

    Attributes:
        einsum: the letters of each operand.
        kept: letters of the result that the sparse operand has.
        free: letters of the result that only dense operands have.
        tables: the dense operands.
        order: position of each letter of the result in `kept` and `free` together.
    """

    einsum: Einsum
    kept: str
    free: str
    tables: tuple[Table, ...]
    order: Ints

    @staticmethod
    @lru_cache
    def of(text: str, orders: Ints, sparse: int) -> Recipe | None:
        """Return the recipe of an einsum of operands of these orders; None if it has none."""
        try:
            e = parse(text, [(2,) * order for order in orders], [n == sparse for n in range(len(orders))]).einsum
        except EquationError:
            return None
        if len(orders) == 1 or e.dense_contracted or any(len(set(term)) < len(term) for term in e.inputs):
            return None
        tables = []
        for term in e.tables:
            letters = outside(term, e.free)
            order = [term.index(c) for c in (*letters, *among(e.free, term))]
            tables.append(Table("".join(letters), tuple(order), tuple(c in term for c in e.free)))
        at_end = (*e.kept, *e.free)
        order = [at_end.index(c) for c in e.output]
        return Recipe(e, "".join(e.kept), "".join(e.free), tuple(tables), tuple(order))

    def bound(self, operands: Operands) -> Bound | None:
        """Return the einsum with the size of each letter; None if operands disagree, or one would be broadcast."""
        sizes: dict[str, int] = {}
        for term, operand in zip(self.einsum.inputs, operands, strict=True):
            for letter, size in zip(term, operand.shape, strict=True):
                if sizes.setdefault(letter, size) != size:
                    return None
        return Bound.of(self.einsum, sizes)

    def result(self, bound: Bound, coords: Sequence[Tensor], values: Tensor, dense: Tensors) -> Tensor:
        """Compute the einsum from coordinates, values and dense operands."""
        wide = accumulator(values.dtype)
        at = dict(zip(self.einsum.inputs[self.einsum.sparse[0]], coords, strict=True))
        tables = [self._rows(table, bound, o.to(wide)) for table, o in zip(self.tables, dense, strict=True)]
        numbers = [_numbers(table.letters, bound, at) for table in self.tables]
        weights, row = values.to(wide), _numbers(self.kept, bound, at)
        shape, width = bound.extents((*self.kept, *self.free)), bound.elements(self.free)
        if row is None:
            sums = self._product(weights, tables, numbers).sum(0)
        elif weights.is_cuda or weights.is_complex():
            terms = self._product(weights, tables, numbers)
            sums = add_rows(terms.new_zeros((bound.elements(self.kept), *terms.shape[1:])), row, terms)
        else:  # where torch adds rows one element after the other, but multiplies by a sparse matrix better
            column, terms = numbers[0], tables[0]
            if len(tables) > 1 or column is None or weights.requires_grad:
                terms = self._product(weights, tables, numbers)
                weights, column = torch.ones_like(weights), torch.arange(len(weights), device=weights.device)
            size = bound.elements(self.kept), len(terms)
            sums = _Multiplied.apply(row, column, weights, size, terms.reshape(len(terms), width))
        return sums.view(shape).permute(self.order).to(values.dtype).contiguous()

    def _rows(self, table: Table, bound: Bound, operand: Tensor) -> Tensor:
        """Return a table as (rows, *dense letters of the result), with size 1 for each letter that it lacks."""
        free = [bound.by_index[c] if has else 1 for c, has in zip(self.free, table.free, strict=True)]
        return operand.permute(table.order).reshape(bound.elements(table.letters), *free)

    def _product(self, weights: Tensor, tables: list[Tensor], numbers: list[Tensor | None]) -> Tensor:
        """Return (entries, *dense sizes of the result): each value times its row of each table."""
        product = weights.view(-1, *[1] * len(self.free))
        for table, number in zip(tables, numbers, strict=True):
            product = product * picked(table, number)
        return product


class _Multiplied(torch.autograd.Function):
    """The product of a sparse matrix of these rows, columns and weights with a table. Autocast is ignored."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, column: Tensor, weights: Tensor, size: tuple[int, int], table: Tensor) -> Tensor:
        ctx.size = size
        ctx.save_for_backward(row, column, weights)
        if add := native(_add_rows, row.device, len(row) * table.shape[1]):
            sums = table.new_zeros(size[0], table.shape[1])
            add(row, column, weights, table.contiguous(), sums)
            return sums
        kind: dict[str, Any] = {"device": row.device, "check_invariants": False}  # whatever device is the default
        with without_autocast(table.device):
            return torch.mm(torch.sparse_coo_tensor(torch.stack([row, column]), weights, size, **kind), table)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None, None, None, Tensor]:
        row, column, weights = ctx.saved_tensors
        return None, None, None, None, _Multiplied.apply(column, row, weights, ctx.size[::-1], upstream)


def _add_rows(row: Any, column: Any, weights: Any, table: Any, out: Any) -> None:
    """Add each weight times its row of a table to a row of `out`."""
    for n in range(len(row)):
        to, at, x = row[n], column[n], weights[n]
        for c in range(out.shape[1]):
            out[to, c] += x * table[at, c]


def _numbers(letters: str, bound: Bound, at: dict[str, Tensor]) -> Tensor | None:
    """Return (entries,) row-major numbers of the entries' coordinates in these letters; None without letters."""
    return linear_key([at[c] for c in letters], bound.extents(letters))[0] if letters else None
