"""Einsums of patterns that are used once or a few times, such as a new graph at each step, by torch's operations.

In: an einsum of one sparse operand, or of two on a GPU, and how often the patterns were used. Out: its result, dense of
one operand, differentiable; None if a kernel is to be compiled. Sorting, planning and packing take longer than ten
calls, so a kernel pays only for a pattern that stays. Once several patterns in a row were used a few times each, the
next one gets no kernel of its own at first: its rows are gathered, multiplied and added in the order in which the
entries were given, by torch, or, of a single dense operand, by one native loop or kernel that serves all. Entries that
multiply rows by matrices which many of them share, as of tokens with experts, get no kernel in any case: they are
sorted by matrix, and torch multiplies a group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import inf, prod
from operator import mul
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from sparsetc.contraction.entries import EntryRows, _rows, sums
from sparsetc.contraction.request import Operands, Tensors, is_sparse
from sparsetc.errors import EquationError
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.equation.parse import parse
from sparsetc.options import Options
from sparsetc.support import Ints, Lru, Names, among, cached_property, outside
from sparsetc.support.entry import without_autocast
from sparsetc.tensor import readings
from sparsetc.tensor.coords import INT64_SIZES, decoded, joint_keys, linear_key, markable, meeting, narrowed, picked
from sparsetc.tensor.dtypes import INTEGERS, accumulator, add_rows
from sparsetc.tensor.pattern import Pattern, Uses, lasting, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor

IN_A_ROW = 3
"""Patterns in a row that must have been used only a few times before the next one gets no kernel at first."""
FEW = 8
"""Most uses of a pattern that count as few: more than most networks have layers, and fewer than take the time of a
compilation (`benchmarks/instead.py`, new graphs of 16 K edges)."""
ENTRIES, ELEMENTS = 1 << 20, 1 << 27
"""Most entries of a pattern, and elements of gathered or added rows, before kernels are compiled: compiling then takes
little beside the run, and kernels do not gather rows into memory."""
OF_A_GROUP = 8
"""Entries a group from which a product of matrices beats multiplying one entry after the other..."""
OF_A_MATRIX = 1 << 10
"""...and elements of a matrix."""
PAIRS = 1 << 22
"""Most pairs of entries: 400 MB while they are sorted. Planning takes little beside more of them."""
PLACES = 1 << 27
"""Most elements of a dense result."""


@dataclass
class LastUse:
    """The pattern that an einsum was last used with, and how many patterns in a row before it were used a few times.

    Patterns of as `many` entries had too many pairs.
    """

    uses: Uses | None = None
    passed: int = 0
    many: float = inf


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
    kind = coords.shape[0], dtype, device
    last = last_uses.once((text, kind), LastUse)
    comes_and_goes = _comes_and_goes(last, kind, uses)
    if two:
        if not comes_and_goes or count >= last.many:
            return None
        result = _of_pair(text, operands, form, entries)
        last.many = count if result is None else last.many
        return result
    recipe = Recipe.of(text, tuple([tuple(o.shape) for o in operands]), *sparse, form)
    if not recipe or count > ENTRIES or max(count, recipe.kept.shape[0]) * recipe.gathered > ELEMENTS:
        return None
    if recipe.matrices is not None:
        comes_and_goes = recipe.pays(count, dtype)
        comes_and_goes &= settings.effective_precision() == torch.get_float32_matmul_precision()
    if not comes_and_goes:
        return None
    uses.count += 1
    with without_autocast(device):
        return recipe.result(coords.unbind(), values, others)


Given = tuple[Tensor, Tensor, Uses]
"""Coordinates and values of a tensor's entries, in any order, and the counter of uses of the coordinates."""


def _of_pair(text: str, operands: Operands, form: str, entries: Sequence[Given]) -> Tensor | SparseTensor | None:
    """Return the product of two sparse operands from their entries: some thirty launches, where to plan takes 200.

    Pairs of entries with equal shared coordinates are made, sorted by their place in the result, and added up. None of
    an operand without letters or with a repeated one, where there are too many pairs, or shared coordinates to count,
    and of any with labels, which the result would have too.
    """
    patterns = [o._pattern if o._unsorted is None else None for o in operands if isinstance(o, SparseTensor)]
    if any(pattern and pattern.labels for pattern in patterns):
        return None
    coords, values, uses = zip(*entries, strict=True)
    bound = parse(text, [tuple(o.shape) for o in operands], [True, True])
    e, shape = bound.einsum, bound.output_shape
    dtype = values[0].dtype
    places, dense = bound.elements(e.output), not is_sparse(form, e, e.inputs)
    once = all(term and len(set(term)) == len(term) for term in e.inputs)
    if not once or places >= (PLACES if dense else INT64_SIZES):
        return None
    with without_autocast(values[0].device):
        with lasting():
            pairs = _pairs(bound, coords, patterns[1] is not None and patterns[1].is_coalesced)
            if pairs is None:
                return None
            p, q, place = pairs
            count = places
            if not dense:
                distinct, place = torch.unique(narrowed(place, places), return_inverse=True)
                count = len(distinct)
                pattern = Pattern(torch.stack(decoded(distinct.long(), shape)), shape, True)
        x, y = (v.to(accumulator(dtype)) for v in values)
        terms = x.index_select(0, p) * y.index_select(0, q)
        sums = add_rows(terms.new_zeros(count), place, terms).to(dtype)
    for one in {*uses}:
        one.count += 1
    return sums.view(shape) if dense else SparseTensor._make(pattern, sums)


def _pairs(bound: Bound, coords: Sequence[Tensor], in_order: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the entry of each operand of each pair, and its row-major place in the result; waits for the device."""
    e = bound.einsum
    shared = among(*e.inputs)
    counts = coords[0].shape[1], coords[1].shape[1]
    if not markable(bound.elements(shared), sum(counts)):
        return None
    x, y = (dict(zip(term, rows, strict=True)) for term, rows in zip(e.inputs, coords, strict=True))
    keys = joint_keys([x[c] for c in shared], [y[c] for c in shared], bound.extents(shared), coords[0], counts)
    pairs = meeting(*keys, PAIRS, in_order and e.inputs[1][: len(shared)] == shared)
    if pairs is None:
        return None
    p, q = pairs
    of_x = among(e.output, x)
    offsets = [
        _offsets(bound, at, letters).index_select(0, entry)
        for at, letters, entry in ((x, of_x, p), (y, outside(e.output, of_x), q))
        if letters
    ]
    return p, q, sum(offsets[1:], start=offsets[0]) if offsets else torch.zeros_like(p)


def _offsets(bound: Bound, at: dict[str, Tensor], letters: Names) -> Tensor:
    """Return what an entry's coordinates in some letters of the result add to the number of its place."""
    output = bound.einsum.output
    strides = [bound.elements(output[output.index(c) + 1 :]) for c in letters]
    first, *others = (at[c] if stride == 1 else at[c] * stride for c, stride in zip(letters, strides, strict=True))
    return sum(others, start=first)


def _entries(x: SparseTensor) -> Given:
    """Return those of a tensor."""
    unsorted = x._unsorted
    if unsorted is None or not unsorted.unchanged:
        return x._pattern.coords, x._values, x._pattern.uses
    return unsorted.reading.coords, unsorted.values, unsorted.reading.uses


def _comes_and_goes(last: LastUse, kind: tuple[int, torch.dtype, torch.device], uses: Uses) -> bool:
    """Return True if this pattern, and several in a row before it, were used a few times only."""
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
    """Rows, or matrices, of a dense operand or of the result, and what numbers them.

    Attributes:
        modes: of the sparse operand, which number the rows.
        sizes: of these modes.
        order: permutation of the operand's dimensions, those that number rows first; None if it changes nothing.
        shape: (rows, *sizes of a row).
    """

    modes: Ints
    sizes: Ints
    order: Ints | None
    shape: Ints

    @classmethod
    def of(cls, bound: Bound, term: Names, row: Names, shape: Sequence[int]) -> Table:
        """Return how the operand of a term is read, from the letters of a row and its shape."""
        numbers, modes = outside(term, row), bound.einsum.sparse_indices
        sizes = bound.extents(numbers)
        return cls(tuple(map(modes.index, numbers)), sizes, _order(term, (*numbers, *row)), (prod(sizes), *shape))

    def read(self, operand: Tensor) -> Tensor:
        """Return the operand as it is read."""
        return _shaped(operand if self.order is None else operand.permute(self.order), self.shape)

    def entries(self, coords: Sequence[Tensor], order: Tensor | None = None) -> EntryRows | None:
        """Return the rows of the entries, which may be put in another order; None without modes."""
        if not self.modes:
            return None
        key = linear_key([coords[mode] for mode in self.modes], self.sizes)[0]
        return EntryRows(picked(key, order), self.shape[0])


@dataclass(frozen=True)
class Recipe:
    """An einsum in which each entry adds to one row of the result the product of one row of each dense operand.

    Where two dense operands share letters that are summed, as in ``te,ti,eio->to``, a row of one is multiplied by a
    matrix of the other. Entries are sorted by matrix then, and rows are multiplied a group at a time.

    Attributes:
        kept: the result.
        tables: the dense operands.
        order: position of each letter of the result among those of `kept`; None where it has this order.
        matrices: which dense operand has matrices; None where rows are multiplied element by element.
    """

    kept: Table
    tables: tuple[Table, ...]
    order: Ints | None
    matrices: int | None

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
        bound, summed, free, matrices = Bound.of(e, sizes), e.dense_contracted, e.free, None
        if not summed:
            rows = [(among(free, term), [sizes[c] if c in term else 1 for c in free]) for term in e.tables]
        else:
            numbers = [among(term, e.sparse_indices) for term in e.tables]
            matrices = int(bound.elements(numbers[0]) >= bound.elements(numbers[1]))
            both = {*e.tables[0]} & {*e.tables[1]}
            if not {*summed} <= both or {*free} & both or not numbers[matrices]:
                return None
            own = [outside(term, (*at, *summed)) for term, at in zip(e.tables, numbers, strict=True)]
            halves = [(summed, own[n]) if n == matrices else ((*own[n], *summed),) for n in range(2)]
            rows = [(sum(of, ()), [*map(bound.elements, of)]) for of in halves]
            free = (*own[1 - matrices], *own[matrices])
        letters = (*e.kept, *free)
        return Recipe(
            kept=Table.of(bound, letters, free, bound.extents(free)),
            tables=tuple([Table.of(bound, term, *row) for term, row in zip(e.tables, rows, strict=True)]),
            order=_order(letters, e.output),
            matrices=matrices,
        )

    @cached_property
    def width(self) -> int:
        """Elements of a row of the result."""
        return prod(self.kept.shape[1:])

    @property
    def gathered(self) -> int:
        """Elements of the longest row that is gathered or added."""
        return self.width if self.matrices is None else max(self.width, self.tables[1 - self.matrices].shape[1])

    def pays(self, count: int, dtype: torch.dtype) -> bool:
        """Return True if groups are the way: of fewer entries they are too small, of more a dense product is faster."""
        assert self.matrices is not None
        (groups, *sizes), (rows, _) = self.tables[self.matrices].shape, self.tables[1 - self.matrices].shape
        numbers = dtype.is_floating_point or dtype.is_complex
        return numbers and OF_A_GROUP * groups <= count < rows * groups and prod(sizes) >= OF_A_MATRIX

    def result(self, coords: Sequence[Tensor], values: Tensor, dense: Tensors) -> Tensor:
        """Compute the einsum from coordinates, values and dense operands."""
        dtype, wide = values.dtype, accumulator(values.dtype)
        if self.matrices is None and dtype != wide:
            values, dense = values.to(wide), [o.to(wide) for o in dense]
        tables, last = [table.read(o) for table, o in zip(self.tables, dense, strict=True)], None
        if self.matrices is None:
            of, to = [table.entries(coords) for table in self.tables], self.kept.entries(coords)
            if len(of) == 1:
                (last,) = of
            else:
                tables = [reduce(mul, map(_rows, tables, of))]
            rows = _shaped(tables[0], (tables[0].shape[0], self.width))
            if last is None:
                rows = rows.expand(values.shape[0], self.width)
        else:
            groups, given = self.tables[self.matrices].entries(coords), self.tables[1 - self.matrices]
            assert groups is not None
            order, ends = groups.sorted()
            to = taken = given.entries(coords, order)
            rows = _products(sums(None, tables[1 - self.matrices], None, taken), tables[self.matrices], ends)
            rows, values = _shaped(rows, (values.shape[0], self.width)), values.index_select(0, order)
            if given.modes != self.kept.modes:
                to = self.kept.entries(coords, order)
        result = sums(values, rows, to, last)
        if to is None:
            result = result.sum(0, dtype=wide)
        result = _shaped(result, (*self.kept.sizes, *self.kept.shape[1:]))
        if self.order is not None:
            result = result.permute(self.order).contiguous()
        return result if result.dtype == dtype else result.to(dtype)


def _order(letters: Names, wanted: Names) -> Ints | None:
    """Return the permutation that brings letters in a wanted order; None where they are in it."""
    return None if letters == wanted else tuple(map(letters.index, wanted))


def _shaped(tensor: Tensor, shape: Ints) -> Tensor:
    """Return a tensor in a shape; itself where it has that, as each view takes the time of a launch."""
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def _products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply (n, each * shared) rows, sorted by group, by the (shared, wide) matrices of their groups."""
    size, (_, shared, wide) = rows.element_size(), matrices.shape
    if rows.shape[1] != shared:
        ends = ends * (rows.shape[1] // shared)
        rows = rows.view(-1, shared)
    served = rows.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if served and not (shared * size % 16 or wide * size % 16) and rows.numel() and matrices.numel():
        return F.grouped_mm(rows, matrices, offs=ends)
    lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(lengths), matrices.unbind(), strict=True)])
