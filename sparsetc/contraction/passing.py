"""Einsums of patterns that are used once or a few times, such as a new graph at each step, by torch's operations.

In: an einsum of one sparse operand, or of two on a GPU, and how often the patterns were used. Out: its result, dense of
one operand, differentiable; None if a kernel is to be compiled. Sorting, planning and packing take longer than ten
calls, so a kernel pays only for a pattern that stays. Once several patterns in a row were used a few times each, the
next one gets no kernel of its own at first: its rows are gathered, multiplied and added in the order in which the
entries were given, by torch, or, of a single dense operand, by one native loop or kernel that serves all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsetc.contraction.entries import Modes, sums
from sparsetc.contraction.grouped import Grouped
from sparsetc.contraction.operands import Operands, Tensors
from sparsetc.contraction.output import is_sparse
from sparsetc.contraction.passing_pair import product
from sparsetc.errors import EquationError
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.equation.parse import parse
from sparsetc.options import Options
from sparsetc.support import Ints, Names, among, outside
from sparsetc.support.entry import without_autocast
from sparsetc.support.lru import Lru, cached_property
from sparsetc.tensor import readings
from sparsetc.tensor.pattern import Uses, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.tensor.sums import INTEGERS, accumulator

IN_A_ROW = 3
"""Patterns in a row that must have been used only a few times before the next one gets no kernel at first."""
FEW = 8
"""Most uses of a pattern that count as few: more than most networks have layers, and fewer than take the time of a
compilation (`benchmarks/instead.py`, new graphs of 16 K edges)."""
ENTRIES, ELEMENTS = 1 << 20, 1 << 27
"""Most entries of a pattern, and elements of gathered or added rows, before kernels are compiled: compiling then takes
little beside the run, and kernels do not gather rows into memory."""


@dataclass
class LastUse:
    """The pattern that an einsum was last used with, and how many patterns in a row before it were used a few times."""

    uses: Uses | None = None
    passed: int = 0


last_uses: Lru[Any, LastUse] = Lru(256)
"""Einsums that were called with patterns they had no kernel for."""


def passing(text: str, operands: Operands, settings: Options, form: str) -> Tensor | SparseTensor | None:
    """Return the result of an einsum whose pattern is not worth a kernel yet; None if one is to be compiled."""
    sparse = [number for number, o in enumerate(operands) if isinstance(o, SparseTensor)]
    by_rule = transforming() or forward_ad._current_level >= 0 or torch.are_deterministic_algorithms_enabled()
    two = len(sparse) == len(operands) == 2 and operands[0].device.type == "cuda"
    if not (two or len(sparse) == 1) or settings.asks or by_rule:
        return None
    entries = [_entries(operands[number]) for number in sparse]  # type: ignore[arg-type]
    coords, values, uses = min(entries, key=lambda one: one[2].count) if two else entries[0]
    count, dtype, device = values.shape[0], values.dtype, values.device
    others = [entry[1] for entry in entries] if two else [o for o in operands if isinstance(o, Tensor)]
    if dtype in INTEGERS or values.ndim > 1 or any(o.dtype != dtype or o.device != device for o in others):
        return None
    if two and any(entry[1].ndim > 1 for entry in entries):  # of dense modes, or blocks
        return None
    comes_and_goes = _comes_and_goes(text, (coords.shape[0], dtype, device), uses)
    if two:
        return _of_pair(text, operands, form, entries) if comes_and_goes else None
    recipe = Recipe.of(text, tuple([tuple(o.shape) for o in operands]), *sparse, form)
    if not recipe or count > ENTRIES or max(count, recipe.kept.count) * recipe.width > ELEMENTS:
        return None
    as_torch = settings.effective_precision() == torch.get_float32_matmul_precision()
    if not (comes_and_goes if recipe.grouped is None else as_torch and recipe.grouped.pays(count, dtype)):
        return None
    uses.count += 1
    with without_autocast(device):
        return recipe.result(coords.unbind(), values, others)


Given = tuple[Tensor, Tensor, Uses]
"""Coordinates and values of a tensor's entries, in any order, and the counter of uses of the coordinates."""


def _of_pair(text: str, operands: Operands, form: str, entries: Sequence[Given]) -> Tensor | SparseTensor | None:
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


def _entries(x: SparseTensor) -> Given:
    """Return those of a tensor."""
    unsorted = x._unsorted
    if unsorted is None or not unsorted.unchanged:
        return x._pattern.coords, x._values, x._pattern.uses
    return unsorted.reading.coords, unsorted.values, unsorted.reading.uses


def _comes_and_goes(text: str, kind: tuple[int, torch.dtype, torch.device], uses: Uses) -> bool:
    """Return True if this pattern, and several in a row before it, were used a few times only."""
    last = last_uses.once((text, kind), LastUse)
    if last.uses is not uses:
        last.passed = last.passed + 1 if last.uses and last.uses.count <= FEW else 0
        last.uses = uses
        (readings.passing.add if last.passed >= IN_A_ROW else readings.passing.discard)(kind)
    return last.passed >= IN_A_ROW and uses.count < FEW


@lru_cache
def _einsum_of(text: str, orders: Ints, sparse: int) -> Einsum | None:
    """Return the einsum of operands of these orders; None if it is more than products of rows that are added up."""
    try:
        e = parse(text, [(2,) * order for order in orders], [n == sparse for n in range(len(orders))]).einsum
    except EquationError:
        return None
    more = (
        len(orders) == 1
        or (e.dense_contracted and len(orders) != 3)
        or any(len(set(term)) < len(term) for term in e.inputs)
    )
    return None if more else e


@dataclass(frozen=True)
class Table:
    """A dense operand as a table of rows to gather.

    Attributes:
        numbers: what numbers the rows.
        order: permutation of its dimensions: those that number rows first, then letters of the result in its order;
            None where they lie so.
        shape: (rows, *dense sizes of the result), with size 1 for each letter that the operand lacks.
    """

    numbers: Modes
    order: Ints | None
    shape: Ints


@dataclass(frozen=True)
class Recipe:
    """An einsum in which each entry adds to one row of the result the product of one row of each dense operand.

    Attributes:
        kept: what numbers the rows of the result.
        free: the dense sizes of the result.
        tables: the dense operands.
        order: position of each letter of the result among those of `kept` and `free`; None where it has this order.
        grouped: how entries multiply rows by matrices that many of them share; None where they do not.
    """

    kept: Modes
    free: Ints
    tables: tuple[Table, ...]
    order: Ints | None
    grouped: Grouped | None = None

    @staticmethod
    @lru_cache(maxsize=256)
    def of(text: str, shapes: tuple[Ints, ...], sparse: int, form: str) -> Recipe | None:
        """Return the recipe for operands of these shapes.

        None if there is none, operands disagree or are broadcast, or the result is sparse.
        """
        e = _einsum_of(text, tuple(map(len, shapes)), sparse)
        if e is None or is_sparse(form, e, [e.inputs[sparse]]):
            return None
        sizes = dict[str, int]()
        for term, shape in zip(e.inputs, shapes, strict=True):
            for letter, size in zip(term, shape, strict=True):
                if sizes.setdefault(letter, size) != size:
                    return None
        bound, letters = Bound.of(e, sizes), e.inputs[sparse]
        if e.dense_contracted:
            grouped = Grouped.of(bound)
            if grouped is None:
                return None
            free = bound.extents(outside(grouped.letters, e.kept))
            return Recipe(grouped.kept, free, (), _order(grouped.letters, e.output), grouped)
        tables = []
        for term in e.tables:
            shared = outside(term, e.free)
            width = [sizes[c] if c in term else 1 for c in e.free]
            order = _order(term, (*shared, *among(e.free, term)))
            tables.append(Table(Modes.of(bound, letters, shared), order, (bound.elements(shared), *width)))
        return Recipe(
            Modes.of(bound, letters, e.kept), bound.extents(e.free), tuple(tables), _order((*e.kept, *e.free), e.output)
        )

    @cached_property
    def width(self) -> int:
        """Elements of a row of the result, and of a row that is gathered for it."""
        return max(prod(self.free), prod(self.grouped.sizes[:2]) if self.grouped else 0)

    def result(self, coords: Sequence[Tensor], values: Tensor, dense: Tensors) -> Tensor:
        """Compute the einsum from coordinates, values and dense operands."""
        if self.grouped is not None:
            rows = self.grouped.result(coords, values, dense)
            return _reordered(rows.view((*self.kept.sizes, *self.free)), self.order)
        dtype, wide = values.dtype, accumulator(values.dtype)
        if dtype != wide:
            values, dense = values.to(wide), [o.to(wide) for o in dense]
        tables = [_reordered(o, table.order).reshape(table.shape) for table, o in zip(self.tables, dense, strict=True)]
        of = [table.numbers.entries(coords) for table in self.tables]
        to = self.kept.entries(coords)
        if to is None or len(tables) > 1 or of[0] is None:
            terms = values.view(-1, *[1] * len(self.free))
            for table, entries in zip(tables, of, strict=True):
                terms = terms * (table if entries is None else table.index_select(0, entries.row))
            terms = terms.reshape(values.shape[0], self.width)
            rows = terms.sum(0) if to is None else sums(None, terms, to, None)
        else:
            rows = sums(values, tables[0].reshape(-1, self.width), to, of[0])
        result = _reordered(rows.view((*self.kept.sizes, *self.free)), self.order)
        return result if dtype == wide else result.to(dtype)


def _order(letters: Names, wanted: Names) -> Ints | None:
    """Return the permutation that brings letters in a wanted order; None where they are in it."""
    return None if letters == wanted else tuple(map(letters.index, wanted))


def _reordered(tensor: Tensor, order: Ints | None) -> Tensor:
    return tensor if order is None else tensor.permute(order).contiguous()
