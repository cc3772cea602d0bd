"""``dense``: the tensor as one tile of all its positions, which torch multiplies as it does any other dense tensor.

        item_ptr   [ 0  1 ]                 one work item, which has the one tile; no item where there is no nonzero
        values     [ every position ]       in the order of ``view.values.sequence``, 0 where there is no nonzero

A position along a side is a coordinate, so none is stored, and nothing is gathered by one. A zero position is
multiplied like any other: an infinity or NaN of a dense operand therefore reaches every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import prod

import torch

from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.nest.coordinates import Along, Computed
from sparsetc.ir.nest.nest import Nest, tiles
from sparsetc.ir.nest.values import Whole
from sparsetc.ir.plan import DOTS, ROUNDED, Part, Plan, Schedule, Storage
from sparsetc.ir.program.counting import Statistics
from sparsetc.ir.program.operands import dense_axes
from sparsetc.ir.program.product_cost import ProductCost
from sparsetc.packing.base import Packed
from sparsetc.packing.tiles import refuse_duplicates
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.method import OperandMethod
from sparsetc.planner.pricing import costs
from sparsetc.planner.problem import Problem
from sparsetc.planner.registry import add_plans, register_format
from sparsetc.planner.statistics import Counts

MOST = 2**40
"""Positions of a dense tensor, at most: more fit no device."""


@register_format
class Dense:
    """The dense tensor."""

    name = "dense"

    def parameters(self, order: int) -> tuple[str, ...]:
        """None: the sides are the tensor's own."""
        return ()

    def view(self, shape: tuple[int, ...], storage: Storage) -> Nest:
        """One tile, whose positions are stored in the storage's sequence, or row-major where it has none.

        Raises:
            FormatError: the shape has more positions than any device holds.
        """
        modes = tuple(range(len(shape)))
        if prod(shape) > MOST:
            raise FormatError(f"a dense tensor of shape {tuple(shape)} has {prod(shape):,} positions, {MOST:,} at most")
        sides = tuple([max(1, n) for n in shape])
        read = tuple([Computed(m, Along(m)) for m in modes])
        return tiles((), read, Whole(sides, storage.sequence or modes, storage.contracted))

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
        """Number the nonzeros by position; raises `FormatError` where two have the same."""
        view, nnz = self.view(shape, storage), coords.shape[1]
        stored, tiles = (view.values.volume, 1) if nnz else (0, 0)
        place, numbers = coords.new_zeros(nnz), torch.arange(nnz, device=coords.device)
        for row, stride in zip(coords, view.values.strides, strict=True):
            place.add_(row, alpha=stride)
        positions = coords.new_full((stored,), -1)
        positions[place] = numbers
        if not torch.equal(positions[place], numbers):
            refuse_duplicates()
        arrays = {"item_ptr": torch.arange(tiles + 1, dtype=torch.int32, device=coords.device)}
        known = (self.name, storage, shape, nnz, view, arrays, positions, stored)
        return Packed(*known, items=tiles, padded=nnz != stored)


SPARSEST = 8
"""Positions a nonzero, at most, that are made dense without being asked for: more multiply, and take, mostly zeros."""
FEWEST, FEW = 2**12, 2**22
"""Positions below which any plan is over in the time of a call of torch; and that are so few that it is considered to
make them dense, however few are filled: 16 MB in float32."""
PACKING = 2 * 8
"""Bytes a position by which values are packed: which nonzero it has, and where that is read."""
EXACT = {DOTS["highest"]: "ieee"}
"""How torch multiplies float32 where that is to be as exact as it is."""


class DensePlan(OperandMethod):
    """The dense tensor in one part, for torch to multiply."""

    name = "dense"

    def candidates(self, problem: Problem, counts: Counts) -> Iterator[Candidate]:
        """The dense tensor, on a GPU, where enough of it is filled or there is little to fill."""
        filled = FEWEST <= prod(problem.shape) <= max(FEW, SPARSEST * counts.nnz)
        if problem.backend == "triton" and filled:
            with suppress(PlanError):
                yield dense(problem, counts)

    def candidate(self, problem: Problem, counts: Counts, request: Plan) -> Candidate:
        """The dense tensor, however much of it is filled."""
        return dense(problem, counts)


def dense(problem: Problem, counts: Counts) -> Candidate:
    """One tile that is the whole tensor; `PlanError` says why there can be none."""
    if fault := _fault(problem):
        raise _refusal(problem, fault)
    made = _of_precision(problem, counts, EXACT.get(problem.precision, problem.precision))
    (found,) = costs(made, problem)
    assert isinstance(found, ProductCost)
    if problem.precision == ROUNDED and found.products != 1:  # what is made on the way is not rounded
        made = _of_precision(problem, counts, DOTS["high"])
    taken = (problem.itemsize + PACKING) * prod(problem.shape) + problem.itemsize * found.formed
    if taken > problem.memory:
        on_the_way = " and what is made on the way" if found.formed else ""
        fault = f"the dense tensor, with what packs it{on_the_way}, takes {taken:,} bytes, the limit is"
        raise _refusal(problem, f"{fault} {problem.memory:,}")
    return made


def _refusal(problem: Problem, fault: str) -> PlanError:
    return PlanError(f'plan "dense" does not apply to "{problem.equation}": {fault}')


def _fault(problem: Problem) -> str:
    """Why the operand is not multiplied as a dense tensor, whatever it takes; empty where it may be."""
    if problem.sparse_output:
        return "its result is sparse, and torch's product has every position"
    if not problem.coalesced:
        return "a dense tensor holds one value a position, and the operand has duplicates; take its coalesce()"
    if problem.adding:
        return "a stream does not store its chunks as whole tensors"
    if problem.backend == "triton" and not problem.products:
        return "torch has no matrix product of integers on a GPU"
    return ""


def _of_precision(problem: Problem, counts: Counts, precision: str) -> Candidate:
    """The candidate: positions of the modes that the result keeps, in its order, are before those that are summed."""
    output, order = problem.bound.einsum.output, tuple(range(problem.order))
    kept = sorted(problem.kept, key=lambda mode: output.index(problem.letters[mode]))
    storage = Storage(leaf=order, sequence=(*kept, *problem.rest), contracted=len(problem.rest))
    sizes = ((c, max(1, problem.bound.by_index[c])) for c in dense_axes(problem.bound))
    blocks = tuple((c, 1 << (n - 1).bit_length()) for c, n in sizes)
    schedule = Schedule(blocks=blocks, dot=problem.products, precision=precision)
    expected = Statistics(1, 1, max(1, prod(problem.shape)), counts.nnz, problem.itemsize)
    return Candidate(Plan("dense", (Part("dense", storage, schedule, counts.nnz),)), (expected,))


add_plans(DensePlan())
