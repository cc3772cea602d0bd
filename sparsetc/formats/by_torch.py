"""``dense``: the plan by which torch multiplies dense matrices, and its price beside kernels.

In: a `Problem`. Out: a `Candidate` of one part: the dense tensor (`dense`), to be multiplied by what is dense already;
or, of a sampled product, the nonzeros' positions in a product of dense operands (`positions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import prod

from sparsetc.errors import PlanError
from sparsetc.formats.dense import ProductCost
from sparsetc.formats.positions import sides_of
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.lower import Target
from sparsetc.ir.plan import DOTS, ROUNDED, Part, Plan, Schedule, Storage
from sparsetc.ir.program.resources import Statistics
from sparsetc.packing.base import FORMATS
from sparsetc.planner.bounds import Best
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.pricing import describe, seconds_of
from sparsetc.planner.problem import Problem
from sparsetc.planner.registry import Method, add_plans
from sparsetc.tensor.sums import accumulator

PACKING = 2 * 8
"""Bytes for each position while values are packed: two int64 arrays."""


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
