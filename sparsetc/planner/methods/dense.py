"""``dense``: the operand as a dense tensor, and torch's product, where so much of it is filled that this pays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import prod

from sparsetc.errors import PlanError
from sparsetc.ir.plan import DOTS, ROUNDED, Part, Plan, Schedule, Storage
from sparsetc.ir.program.operands import dense_axes
from sparsetc.ir.program.product_cost import ProductCost
from sparsetc.ir.program.statistics import Statistics
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.method import OperandMethod
from sparsetc.planner.pricing import costs
from sparsetc.planner.problem import Problem
from sparsetc.planner.statistics import Counts

SPARSEST = 8
"""Positions a nonzero, at most, that are made dense without being asked for: more multiply, and take, mostly zeros."""
FEWEST, FEW = 2**12, 2**22
"""Positions below which any plan is over in the time of a call of torch; and that are so few that it is considered to
make them dense, however few are filled: 16 MB in float32."""
PACKING = 2 * 8
"""Bytes a position by which values are packed: which nonzero it has, and where that is read."""
EXACT = {DOTS["highest"]: "ieee"}
"""How torch multiplies float32 where that is to be as exact as it is."""


class Dense(OperandMethod):
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
