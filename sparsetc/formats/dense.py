"""``dense`` and ``positions``: storages read by torch's products of dense matrices, and the plan that takes them.

In: a `Problem`. Out: a `Candidate` of one part, priced beside kernels: the dense tensor (format ``dense``), to be
multiplied by what is dense already; or, of a sampled product, the nonzeros' positions in a product of dense operands.
No kernel is generated: a program of torch's products (`by_torch.DenseProduct`) stands in its place.

The format ``dense`` stores every position. A coordinate follows from the position, so none is stored.

        item_ptr   [ 0  n ]                 one work item of all n positions; [ 0 ] for a tensor without nonzeros
        values     [ every position ]       in the order of ``storage.sequence``, 0 at positions without a nonzero

Zeros are multiplied like any other value, and 0 * inf is NaN: an infinity or NaN of a dense operand reaches rows that
have no nonzero there.

The format ``positions`` stores nonzeros in the operand's order, each with its position in the dense tensor.

        item_ptr   [ 0  nnz ]               one work item of all nonzeros
        word       [ p  p  p  … ]           i * J + j of each, ascending
        values     [ v  v  v  … ]           as they are given

A sampled product of two matrices, ``"ir,jr->ij"`` at the nonzeros, is made whole by torch where that takes less time
than a dot for each nonzero, and its entries are read at these positions. So are the gradients of a pruned layer's
values. What stands at other positions is not read: an infinity or NaN there is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch

from sparsetc.errors import FormatError, PlanError
from sparsetc.formats.by_torch import DenseProduct, in_order, products
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.lower import Target
from sparsetc.ir.nest import ITEM, Computed, Lookup, Nest, Position, parsed, runs
from sparsetc.ir.plan import DOTS, F16X3, ROUNDED, Part, Plan, Schedule, Storage
from sparsetc.ir.program import Operand, Product, Statistics, Tile, named_operands
from sparsetc.packing.base import Packed, index_dtype, placed
from sparsetc.planner import Best, Candidate, Method, Problem, add_plans, describe, price, register_format
from sparsetc.support import Ints, Names, row_major
from sparsetc.tensor.dtypes import accumulator

MOST = 2**40
"""Most positions of a dense tensor: no device has memory for more."""
PACKING = 2 * 8
"""Bytes for each position while values are packed: two int64 arrays."""


@register_format
@dataclass(eq=False)
class Dense:
    """The dense tensor; or nonzeros, by their positions in it, at which a product is sampled."""

    name: str = "dense"
    sampled: bool = False

    def parameters(self, order: int) -> Names:
        """Return no names: the sizes are the tensor's own."""
        return ()

    def view(self, shape: Ints, storage: Storage) -> Nest:
        """Return one run of entries whose coordinates follow from their positions in the dense tensor.

        All positions are in the storage's sequence, or row-major where it has none; those of nonzeros are stored.

        Raises:
            FormatError: the shape has more positions than any device holds.
        """
        if prod(shape) > MOST:
            raise FormatError(f"a dense tensor of shape {tuple(shape)} has {prod(shape):,} positions, {MOST:,} at most")
        position, strides = Position("nonzero"), self._strides(shape, storage)
        texts = [f"{{p}} // {strides[m]} % {max(1, n)}" for m, n in enumerate(shape)]
        read = Lookup("word", position) if self.sampled else position
        return runs(leaf=tuple([Computed(m, parsed(text, read)) for m, text in enumerate(texts)]))

    def pack(self, coords: torch.Tensor, shape: Ints, storage: Storage) -> Packed:
        """Find the nonzero of each position, -1 for none, or number their positions; values then stay as they are.

        Raises:
            FormatError: two nonzeros have the same position of all.
        """
        view, nnz = self.view(shape, storage), coords.shape[1]
        place = coords.new_zeros(nnz)
        for mode, stride in self._strides(shape, storage).items():
            place.add_(coords[mode], alpha=stride)
        stored = nnz if self.sampled or not nnz else prod(shape)
        positions = None if self.sampled else placed(place, stored)
        ends = [0, stored] if nnz else [0]
        arrays = {"item_ptr": torch.tensor(ends, dtype=index_dtype(stored), device=coords.device)}
        if self.sampled:
            arrays["word"] = place.to(index_dtype(prod(shape)))
        items = len(ends) - 1
        return Packed(self.name, storage, shape, nnz, view, arrays, positions, stored, items, padded=nnz != stored)

    def _strides(self, shape: Ints, storage: Storage) -> dict[int, int]:
        """Return the stride of each mode, outermost first; an empty mode counts as size 1."""
        sequence = (storage.sequence if not self.sampled else ()) or tuple(range(len(shape)))
        return dict(zip(sequence, row_major([max(1, shape[m]) for m in sequence]), strict=True))

    def lower(self, bound: Bound, part: Part, target: Target, number: int) -> DenseProduct:
        """Return the products of a part by torch. Raise `PlanError` for what torch does not multiply so."""
        if part.schedule.precision == F16X3:
            raise PlanError(f"plan of format {self.name!r}: torch multiplies no float32 in {F16X3}; take tf32 or bf16")
        if self.sampled and not (sides_of(bound) and target.sparse and target.in_operand_order):
            raise PlanError(
                f'format {self.name!r} is for sampled products of two matrices; "{bound}" is another einsum'
            )
        ones = target.ones and self.sampled
        return self._program(bound, part.storage, part.schedule, target.rows, ones, number)

    @lru_cache  # noqa: B019 (of two formats, which stay)
    def _program(
        self, bound: Bound, storage: Storage, schedule: Schedule, rows: int, ones: bool, number: int
    ) -> DenseProduct:
        letters = bound.einsum.sparse_indices
        shape = bound.extents(letters)
        view = self.view(shape, storage)
        if sides := sides_of(bound) if self.sampled else None:
            left, right = [Tile(o.name, (*o.rows, *o.axes), ITEM) for o in sides]
            body: tuple[Product, ...] = (Product(Tile("total", letters, ITEM, len(sides[0].rows)), (left,), (right,)),)
        else:
            body = products(bound, tuple([letters[m] for m in self._strides(shape, storage)]), schedule.dot)
        return DenseProduct.of(bound, view.of_ones() if ones else view, body, schedule, rows, self.name, number)


register_format(partial(Dense, "positions", sampled=True))


def sides_of(bound: Bound) -> tuple[Operand, Operand] | None:
    """Return the dense operands with a result's first modes and with its last, if the whole result is their product."""
    e, operands = bound.einsum, named_operands(bound)[1]
    letters = e.sparse_indices
    if len(operands) != 2 or e.free or len(set(letters)) < len(letters) or e.kept != letters:
        return None
    left, right = in_order(operands, letters)
    alike = left.axes == right.axes != ()
    return (left, right) if alike and left.rows and right.rows and left.rows + right.rows == letters else None


# -- the plan ---------------------------------------------------------------------------------------------------------


def _considered(problem: Problem, best: Best) -> Iterator[Candidate]:
    """Yield the dense tensor wherever it fits, unless all plans of so few positions take the time of a call."""
    profile, positions = problem.profile, prod(problem.shape)
    least = profile.launch + problem.itemsize * positions / profile.memory
    if problem.rules["fewest"] <= positions and best.allows("dense", least):
        with suppress(PlanError):
            yield dense(problem)


def dense(problem: Problem) -> Candidate:
    """Return the priced candidate of dense products by torch. Raise `PlanError` with the reason if there is none."""
    refused = f'plan "dense" does not apply to "{problem.equation}"'
    if fault := _fault(problem):
        raise PlanError(f"{refused}: {fault}")
    # Torch multiplies float32 as exactly as tf32x3 does only without tf32.
    candidate = _candidate(problem, "ieee" if problem.precision == DOTS["highest"] else problem.precision)
    cost: Any = candidate.costs[0]
    if problem.precision == ROUNDED and (problem.sparse_output or not cost.matrices):  # only a product of matrices is
        candidate = _candidate(problem, DOTS["high"])
    positions = prod(problem.shape)
    if problem.sparse_output:
        what = "the product, and as much as a library may take beside it,"
        nbytes = 2 * accumulator(problem.dtype).itemsize * positions
    else:
        what = f"the dense tensor, with what packs it{' and what is made on the way' if cost.formed else ''},"
        nbytes = (problem.itemsize + PACKING) * positions + problem.itemsize * cost.formed
    if nbytes > problem.memory:
        raise PlanError(f"{refused}: {what} takes {nbytes:,} bytes, the limit is {problem.memory:,}")
    return candidate


def _fault(problem: Problem) -> str:
    """Why the operand is not multiplied as a dense tensor, whatever it takes; empty where it may be."""
    rows_of_entries = not problem.rest and problem.rows == max(1, problem.nnz)
    if problem.sparse_output and not (rows_of_entries and sides_of(problem.bound)):
        return "its result is sparse, and no product of two matrices that is read at the operand's nonzeros"
    if not problem.coalesced:
        return "a dense tensor holds one value a position, and the operand has duplicates; take its coalesce()"
    if problem.adding:
        return "a stream does not store its chunks as whole tensors"
    if problem.backend.gpu and not problem.products:
        return "torch has no matrix product of integers on a GPU"
    return ""


def _candidate(problem: Problem, precision: str) -> Candidate:
    """Return the priced candidate; positions of modes that the result keeps, in its order, are before the others.

    They are behind them where that is the tensor's own order, in which one copy of a matrix serves both its products.
    """
    order, nnz = tuple(range(problem.order)), problem.nnz
    if problem.sparse_output:
        part = Part("positions", Storage(leaf=order), Schedule(precision=precision), nnz)
        stored = nnz
    else:
        output = problem.einsum.output
        kept = sorted(problem.kept, key=lambda mode: output.index(problem.letters[mode]))
        sequence = order if (*problem.rest, *kept) == order else (*kept, *problem.rest)
        schedule = Schedule(dot=problem.products, precision=precision)
        part = Part("dense", Storage(leaf=order, sequence=sequence), schedule, nnz)
        stored = max(1, prod(problem.shape))
    plan = Plan("dense", (part,))
    expected = Statistics(1, 1, stored, nnz, problem.itemsize)
    return price(Candidate(plan, (expected,), describe(plan, problem)), problem)


add_plans(Method("dense", _considered, dense))
