"""``dense`` and ``positions``: the plan by which torch multiplies dense matrices, and its price beside kernels.

In: a `Problem`. Out: a `Candidate` of one part: the dense tensor (`dense`), to be multiplied by what is dense already;
or, of a sampled product, the nonzeros' positions in a product of dense operands.

The format ``positions`` stores nonzeros in the operand's order, each with its position in the dense tensor.

        item_ptr   [ 0  nnz ]               one work item of all nonzeros
        word       [ p  p  p  … ]           i * J + j of each, ascending
        values     [ v  v  v  … ]           as they are given

A sampled product of two matrices, ``"ir,jr->ij"`` at the nonzeros, is made whole by torch where that takes less time
than a dot for each nonzero, and its entries are read at these positions. So are the gradients of a pruned layer's
values. What stands at other positions is not read: an infinity or NaN there is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import ClassVar

import torch

from sparsetc.device.profile import DeviceProfile
from sparsetc.errors import PlanError
from sparsetc.formats.dense import DenseProduct, ProductCost, at_positions, setting_of
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.lower import Target
from sparsetc.ir.nest.axes import ITEM
from sparsetc.ir.nest.coordinates import Lookup, Position
from sparsetc.ir.nest.nest import Nest
from sparsetc.ir.plan import DOTS, ROUNDED, Part, Plan, Schedule, Storage
from sparsetc.ir.program.operands import Operand, named_operands
from sparsetc.ir.program.resources import ONE, SECTOR, Statistics
from sparsetc.ir.program.tile import Product, Tile
from sparsetc.packing.base import FORMATS, Packed, index_dtype
from sparsetc.planner.bounds import Best
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.pricing import describe, seconds_of
from sparsetc.planner.problem import Problem
from sparsetc.planner.registry import Method, add_plans, register_format
from sparsetc.support import Ints, Names
from sparsetc.tensor.coords import linear_key
from sparsetc.tensor.sums import accumulator

PACKING = 2 * 8
"""Bytes for each position while values are packed: two int64 arrays."""


@register_format
class Positions:
    """The nonzeros by their positions in the dense tensor."""

    name = "positions"

    def parameters(self, order: int) -> Names:
        """Return no names: the sizes are the tensor's own."""
        return ()

    def view(self, shape: Ints, storage: Storage) -> Nest:
        """Return one run of all nonzeros, whose coordinates are those of their row-major positions.

        Raises:
            FormatError: the shape has more positions than any device holds.
        """
        return at_positions(shape, Storage(), Lookup("word", Position("nonzero")))

    def pack(self, coords: torch.Tensor, shape: Ints, storage: Storage) -> Packed:
        """Number the positions; nothing is sorted, and values stay as they are."""
        nnz, view = coords.shape[1], self.view(shape, storage)
        position = linear_key(coords, shape, coords)[0].to(index_dtype(prod(shape)))
        ends = [0, nnz] if nnz else [0]
        arrays = {"item_ptr": torch.tensor(ends, dtype=index_dtype(nnz), device=coords.device), "word": position}
        return Packed(self.name, storage, shape, nnz, view, arrays, None, nnz, items=len(ends) - 1)

    def lower(self, bound: Bound, part: Part, target: Target, number: int) -> DenseProduct:
        """Return the product that torch makes of two dense operands, read where nonzeros are."""
        sides = sides_of(bound)
        if sides is None or not target.sparse or not target.in_operand_order:
            raise PlanError(
                f'format {self.name!r} is for sampled products of two matrices; "{bound}" is another einsum'
            )
        left, right = [Tile(o.name, (*o.rows, *o.axes), ITEM) for o in sides]
        letters = bound.einsum.sparse_indices
        view = self.view(bound.extents(letters), part.storage)
        view = view.of_ones() if target.ones else view
        body = (Product(Tile("total", letters, ITEM, len(sides[0].rows)), (left,), (right,)),)
        return SampledProduct.of(bound, view, body, part.schedule, target.rows, part.format, number)


def sides_of(bound: Bound) -> tuple[Operand, Operand] | None:
    """Return the dense operands with a result's first modes and with its last, if the whole result is their product."""
    e, operands = bound.einsum, named_operands(bound)[1]
    letters = e.sparse_indices
    if len(operands) != 2 or e.free or len(set(letters)) < len(letters) or e.kept != letters:
        return None
    left, right = _in_order(operands, letters)
    alike = left.axes == right.axes != ()
    return (left, right) if alike and left.rows and right.rows and left.rows + right.rows == letters else None


def _in_order(operands: Sequence[Operand], letters: Names) -> tuple[Operand, Operand]:
    """Return the operand with a result's first mode, and the other."""
    left, right = sorted(operands, key=lambda o: letters[:1] != o.rows[:1])
    return left, right


class SampledCost(ProductCost):
    """Bytes and flops of a dense product that is written whole and read at the entries."""

    def __init__(self, program: SampledProduct) -> None:
        """Count them."""
        super().__init__(program)
        left, right = program.sides
        self.result, self.weighted = (left.nrows, right.nrows), bool(program.view.packed)
        self.moved = ONE.bytes * (self.tables + prod(self.result))
        self.summed, self.lengths = left.width, [left.width, right.nrows]

    def describe(self) -> list[str]:
        """Lines for a reader."""
        left, right = self.result
        product = f"{self.flops} flops in a product of torch, {left} x {right}, read at the entries"
        return [f"reads {self.tables} elements of dense operands", product]

    def seconds(self, statistics: Statistics, profile: DeviceProfile) -> dict[str, float]:
        """Seconds each resource alone would take."""
        size = statistics.itemsize
        entries = statistics.stored
        positions = prod(self.result)
        index = 4 if positions < 2**31 else 8
        read = min(size * positions, SECTOR * entries) + entries * (index + size) + self.weighted * 3 * size * entries
        return super().seconds(statistics, profile) | {"entries": read / profile.memory}

    def stored(self, statistics: Statistics) -> int:
        """Bytes of the result, all of which is stored."""
        return statistics.itemsize * statistics.stored

    def predicted(self, statistics: Statistics, profile: DeviceProfile) -> float:
        """Seconds expected: a product that reads and writes while it multiplies; then entries are read."""
        multiplied, entries = super().predicted(statistics, profile), self.seconds(statistics, profile)["entries"]
        return multiplied + (1 + self.weighted) * profile.launch + entries


class SampledProduct(DenseProduct):
    """A product of two matrices, read at the entries."""

    priced_by: ClassVar[type[ProductCost]] = SampledCost

    @property
    def sides(self) -> tuple[Operand, Operand]:
        """The operands with the result's first modes and with its last."""
        return _in_order(self.operands, self.letters)

    @property
    def is_product(self) -> bool:
        """True if sums are rounded once; sums that are multiplied by values first stay wide."""
        return not self.view.packed

    @property
    def half(self) -> bool:
        """False: values are stored in their own dtype."""
        return False

    def lines(self, dtype: torch.dtype) -> list[str]:
        """Return the text of the function, whose loop runs once, or not at all for a tensor without nonzeros."""
        left, right = self.sides
        out = self.output
        summed = self.operands[0].width
        matrices = f"{left.name}.reshape({left.nrows}, {summed}), {right.name}.reshape({right.nrows}, {summed}).t()"
        text = [
            f'@matmul_precision("{setting_of(self.schedule)}")',
            f"def part_{self.number}({', '.join(['chunks', *self.arrays, *[o.name for o in self.operands], out])}):",
            "    for _ in chunks:",
            f"        made = {out}.new_empty({left.nrows}, {right.nrows})",
            f"        multiply({matrices}, made)",
            f"        torch.index_select(made.view(-1), 0, word, out={out}.view(-1))",
        ]
        return [*text, *[f"        {out}.view(-1).mul_({name})" for name in self.view.packed]]


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
    if fault := _fault(problem):
        raise _refusal(problem, fault)
    return _sampled(problem) if problem.sparse_output else _whole(problem)


def _sampled(problem: Problem) -> Candidate:
    """A product of two dense matrices, read at the operand's nonzeros; torch rounds no float32 to bfloat16."""
    precision = {DOTS["highest"]: "ieee", ROUNDED: DOTS["high"]}.get(problem.precision, problem.precision)
    storage, nnz = Storage(leaf=tuple(range(problem.order))), problem.nnz
    part = Part("positions", storage, Schedule(dot=True, precision=precision), nnz)
    product_bytes = accumulator(problem.dtype).itemsize * prod(problem.shape)
    if product_bytes > problem.memory // 2:  # a library's product may take as much beside it
        raise _refusal(
            problem, f"the product takes {product_bytes:,} bytes, more than half of the limit, {problem.memory:,}"
        )
    return _priced(problem, part, Statistics(1, 1, nnz, nnz, problem.itemsize))


def _whole(problem: Problem) -> Candidate:
    """The dense tensor times dense operands."""
    # Torch multiplies float32 as exactly as tf32x3 does only without tf32.
    part, cost = _of_precision(problem, "ieee" if problem.precision == DOTS["highest"] else problem.precision)
    if problem.precision == ROUNDED and not cost.matrices:  # torch.einsum takes float32, in tf32 at most
        part, cost = _of_precision(problem, DOTS["high"])
    nbytes = (problem.itemsize + PACKING) * prod(problem.shape) + problem.itemsize * cost.formed
    if nbytes > problem.memory:
        on_the_way = " and what is made on the way" if cost.formed else ""
        fault = f"the dense tensor, with what packs it{on_the_way}, takes {nbytes:,} bytes, the limit is"
        raise _refusal(problem, f"{fault} {problem.memory:,}")
    return _priced(problem, part, Statistics(1, 1, max(1, prod(problem.shape)), problem.nnz, problem.itemsize))


def _priced(problem: Problem, part: Part, expected: Statistics) -> Candidate:
    plan, cost = Plan("dense", (part,)), _cost(problem, part)
    seconds = seconds_of(plan, [cost], (expected,), problem.backend, problem.profile)
    return Candidate(plan, (expected,), describe(plan, problem), seconds)


def _refusal(problem: Problem, fault: str) -> PlanError:
    return PlanError(f'plan "dense" does not apply to "{problem.equation}": {fault}')


def _fault(problem: Problem) -> str:
    """Why the operand is not multiplied as a dense tensor, whatever it takes; empty where it may be."""
    rows_of_entries = not problem.rest and problem.rows == max(1, problem.nnz)
    if problem.sparse_output and not (rows_of_entries and sides_of(problem.bound)):
        return "its result is sparse, and no product of two matrices that is read at the operand's nonzeros"
    if not problem.coalesced:
        return "a dense tensor holds one value a position, and the operand has duplicates; take its coalesce()"
    if problem.adding:
        return "a stream does not store its chunks as whole tensors"
    if problem.backend == "triton" and not problem.products:
        return "torch has no matrix product of integers on a GPU"
    return ""


def _of_precision(problem: Problem, precision: str) -> tuple[Part, ProductCost]:
    """Return the part and its cost; positions of modes that the result keeps, in its order, are before the others.

    They are behind them where that is the tensor's own order, in which one copy of a matrix serves both its products.
    """
    output, order = problem.einsum.output, tuple(range(problem.order))
    kept = sorted(problem.kept, key=lambda mode: output.index(problem.letters[mode]))
    sequence = order if (*problem.rest, *kept) == order else (*kept, *problem.rest)
    storage = Storage(leaf=order, sequence=sequence)
    part = Part("dense", storage, Schedule(dot=problem.products, precision=precision), problem.nnz)
    return part, _cost(problem, part)


def _cost(problem: Problem, part: Part) -> ProductCost:
    return _cost_of(problem.bound, replace(part, nnz=0), problem.rows, problem.sparse_output, problem.ones)


@lru_cache(maxsize=256)
def _cost_of(bound: Bound, part: Part, rows: int, sparse: bool, ones: bool) -> ProductCost:
    """Return the cost of a part, which is the same for every tensor of these sizes."""
    target = Target(sparse=sparse, in_operand_order=True, rows=rows, whole=True, ones=ones)
    program = FORMATS[part.format].lower(bound, part, target, 0)  # type: ignore[attr-defined]
    return program.priced_by(program)  # type: ignore[no-any-return]


add_plans(Method("dense", _considered, dense))
