"""Preparation of one step: a plan is divided, packed and lowered, and its programs are generated.

In: a plan, the `Problem` it is of, and the `Output`. Out: its parts, an executable, and the arrays that this reads. No
values of the sparse operand are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from sparsetc.backends import TORCH
from sparsetc.codegen import launch
from sparsetc.codegen.numba import copied
from sparsetc.codegen.parts import PartArrays
from sparsetc.codegen.programs import Programs, stored_dtype
from sparsetc.contraction.request import Output, Request, Tensors
from sparsetc.contraction.rewrites import rewrites_of
from sparsetc.errors import PlanError
from sparsetc.ir.equation.einsum import Einsum, distinct
from sparsetc.ir.lower import Target, lower
from sparsetc.ir.nest.coordinates import Field
from sparsetc.ir.plan import Part, Plan, without_halves
from sparsetc.ir.program.operands import in_runs
from sparsetc.ir.program.tile import TileProgram
from sparsetc.options import Options, in_force
from sparsetc.packing.base import Packed, get_format, index_dtype, slots_along
from sparsetc.packing.partition import PARTITIONS, stored_parts
from sparsetc.planner.candidate import Choice
from sparsetc.planner.pricing import owns
from sparsetc.planner.problem import Problem
from sparsetc.planner.registry import Other, choose
from sparsetc.runtime.executable import Arrays, Executable, SecondPass
from sparsetc.support import Ints, outside
from sparsetc.support.checks import check_memory
from sparsetc.support.entry import on_gpu
from sparsetc.tensor.coords import linear_key, of_modes
from sparsetc.tensor.dtypes import accumulator, resolved


@dataclass(frozen=True)
class BoundPart:
    """One part of a plan: its program, its packed storage, and the arrays the program reads."""

    program: TileProgram
    packed: Packed
    arrays: PartArrays

    @property
    def reads_zeros(self) -> bool:
        """True if the program multiplies positions without a nonzero; an infinity there would give NaN."""
        return self.packed.view.innermost.zeros(self.packed.padded)


Prepared = tuple[Plan, Ints, tuple[BoundPart, ...], Executable, Arrays]


def prepare(plan: Plan, problem: Problem, output: Output, folder: Path | None) -> Prepared:
    """Divide and pack the nonzeros, lower each part, and generate its program.

    Args:
        plan: with parts.
        problem: of the einsum of one sparse operand, as rewrites leave it.
        output: where the results go: rows of a dense tensor, or nonzeros of a pattern.
        folder: of generated sources.

    Returns:
        The plan of the parts that are run, in the form that ``plan=`` takes; for each of them its number in the
        given plan, of which parts without nonzeros are not run; these parts; their executable; and its arrays.

    Raises:
        PlanError: the partition does not divide as the plan says, a schedule has blocks of no dense axis, or
            the plan's sums depend on an order where they must not.
        FormatError: a format does not take its part.
    """
    plan = plan if problem.halves else without_halves(plan)
    filled, parts = bound_parts(plan, problem, output)
    chosen = [plan.parts[n] for n in filled]
    second = None
    if len(parts) == 1 and not problem.backend.at_once:
        parts = [_storing_all(parts[0], problem, output)]
    zeroed = _zeroed(parts, problem, output)
    dtype, backend = problem.dtype, problem.backend
    schedules = [p.program.schedule for p in parts]  # with trees, where the default rule gave them
    if _needs_second_pass(plan, parts, problem):
        second, parts = _in_partial_rows(chosen, parts, problem, output)
    used = tuple(
        replace(
            part,
            schedule=schedule,
            nnz=p.packed.nnz,
            nbytes=p.packed.nbytes + p.packed.stored * stored_dtype(p.program, dtype, backend).itemsize,
        )
        for part, p, schedule in zip(chosen, parts, schedules, strict=True)
    )
    if backend.at_once:
        nbytes = torch.get_num_threads() * dtype.itemsize * max([copied(p.program) for p in parts])
        what = f'panels of tables of "{problem.equation}"'
        check_memory(what, nbytes, problem.device, problem.memory_limit)
    executable = _executable(plan, parts, second is not None, problem, output, folder)
    arrays = Arrays(tuple(p.arrays for p in parts), second, zeroed)
    shares = plan.shares
    if len(used) < len(plan.parts):
        kept = shares or tuple(range(len(plan.parts)))
        shares = tuple(kept[n] for n in filled)
    return replace(plan, parts=used, shares=shares), filled, tuple(parts), executable, arrays


def _in_partial_rows(
    chosen: Sequence[Part], parts: Sequence[BoundPart], problem: Problem, output: Output
) -> tuple[SecondPass, list[BoundPart]]:
    """Give each result that would be added a partial row. Return the second pass, which sums them, and the parts.

    The partial rows of one part follow those of the part before it. Where some parts store rows of the result, all
    rows of the result come before the partial ones.
    """
    rows, adding = _row_of_nonzeros(problem, output), [not p.program.result.owned for p in parts]
    first = 0 if all(adding) else output.rows
    each = [
        p.packed.slots(p.program.result.key.level, rows) if adds else rows[:0]
        for p, adds in zip(parts, adding, strict=True)
    ]
    ends = list(accumulate((rows_of_part.numel() for rows_of_part in each), initial=first))
    count = ends[-1] - first
    nbytes = 2 * count * output.width * accumulator(problem.dtype).itemsize  # as they are stored, and in order
    what = f'partial rows of a deterministic sum, two for each of {count:,} additions of "{problem.equation}"'
    check_memory(what, nbytes, problem.device, problem.memory_limit)
    bound = [
        bound_part(part, old.packed, number, False, problem, output, partial=range(*span), partials=ends[-1])
        if adds
        else old
        for number, (part, old, adds, span) in enumerate(zip(chosen, parts, adding, pairwise(ends), strict=True))
    ]
    return SecondPass.of(torch.cat(each), first), bound


def bound_parts(plan: Plan, problem: Problem, output: Output) -> tuple[Ints, list[BoundPart]]:
    """Pack and lower the parts of a plan that hold nonzeros. Return their numbers in the plan, and the parts.

    Arguments and errors as of `prepare`.
    """
    packed = stored_parts(plan, problem.counts.coords, problem.shape, problem.kept, problem.counts.cache)
    filled = tuple(n for n, p in enumerate(packed) if p.nnz) or (len(packed) - 1,)
    alone = not problem.adding and (len(filled) == 1 or PARTITIONS[plan.partition].whole_rows)
    strides = _output_strides(problem, output) if len(filled) == 1 else ()
    bound = list[BoundPart]()
    for number, n in enumerate(filled):
        part = plan.parts[n]
        try:
            bound.append(bound_part(part, packed[n], number, alone, problem, output, strides))
        except PlanError as error:  # a tree or a schedule that does not fit the einsum
            raise PlanError(
                f'plan {plan.name!r}, part {n} ({part.format}), of "{problem.equation}": {error}'
            ) from error
    return filled, bound


def _output_strides(problem: Problem, output: Output) -> Ints:
    """The strides by which kernels write a dense result in the output's order; none where they write rows."""
    e = problem.einsum
    if not problem.backend.addressed or problem.ordered or problem.adding or output.sparse:
        return ()
    if not in_runs(e.output, (*e.kept, *e.free), problem.bound.by_index):
        return ()
    return output.strides(joined=False) or ()


def bound_part(
    part: Part,
    packed: Packed,
    number: int,
    alone: bool,
    problem: Problem,
    output: Output,
    strides: Ints = (),
    partial: range | None = None,
    partials: int = 0,
) -> BoundPart:
    """Lower one part.

    Args:
        part: of a plan.
        packed: the part as it is stored.
        number: the part's place among those that are run.
        alone: whether no other part adds to the same rows.
        problem: of the einsum.
        output: of the einsum.
        strides: by which the part writes a dense result, where it does not lie as rows.
        partial: the partial rows, one for each result that the part would add; None where results are added.
        partials: how many rows there are with the partial ones of all parts, behind those that other parts store.
    """
    target = Target(
        sparse=output.sparse or partial is not None,
        in_operand_order=partial is None and packed.positions is None and packed.source is None and output.slot is None,
        owned=partial is not None or owns(packed.view, problem, packed, alone),
        rows=output.rows if partial is None else partials,
        index64=packed.index64,
        at_once=problem.backend.at_once,
        ones=problem.ones,
        strides=strides,
    )
    lower_part, bound = getattr(get_format(part.format), "lower", None), problem.bound
    if lower_part is None:
        program = lower(bound, packed.view, part.schedule, target, number=number, format=part.format)
    else:
        program = lower_part(bound, part, target, number)
    slot = None
    if program.slot:
        if partial is not None:
            slot = torch.arange(partial.start, partial.stop, device=problem.device)
        elif (key := program.result.key).letters:
            slot = slots_along(packed, problem.kept, key.level, _rows_of_part(packed, problem, output))
        else:
            slot = packed.slots(key.level, _row_of_nonzeros(problem, output))
        if problem.backend.narrow:  # torch's own functions take 64 bits
            slot = slot.to(index_dtype(target.rows))
    if program.dots and problem.dtype == torch.float64:
        # Triton 3.6 and 3.7 abort on a float64 dot of rows addressed by words of 16 bits.
        wide = {name: a.int() if a.element_size() == 2 else a for name, a in packed.arrays.items()}
        packed = replace(packed, arrays=wide)
    packed = packed.unrolled(program.schedule.unroll)
    return BoundPart(program, packed, PartArrays.of(program, packed, slot))


def verify_axes(plan: Plan, e: Einsum, written: Einsum | None) -> None:
    """Raise `PlanError` where a schedule has blocks or vectors of a letter that no dense operand alone has.

    A letter that is summed before kernels run, or is broadcast, is one of the einsum as written.

    Args:
        plan: with parts.
        e: the einsum that is run.
        written: the einsum before rewrites; None where there were none.
    """
    axes = distinct(outside((*(written or e).indices, *e.indices), e.sparse_indices))
    for number, part in enumerate(plan.parts):
        for letter, _ in (*part.schedule.blocks, *part.schedule.vectors):
            if letter not in axes:
                dense_letters = ", ".join(axes) or "none"
                raise PlanError(
                    f"plan {plan.name!r}, part {number} ({part.format}): the schedule has a block of axis "
                    f'{letter!r}; "{e.text or e}" has these dense axes: {dense_letters}'
                )


def _executable(
    plan: Plan, parts: Sequence[BoundPart], second_pass: bool, problem: Problem, output: Output, folder: Path | None
) -> Executable:
    programs = tuple(p.program for p in parts)
    covered = [p.covers for p in programs]
    if any(covered) and len(covered) > 1:
        raise PlanError(f"plan {plan.name!r}: a part that is the whole tensor, dense, is a plan's only part")
    backend, operand_dtype = TORCH if covered[0] else problem.backend, problem.dtype
    generated_programs = Programs(programs, operand_dtype, backend, problem.device, folder, plan.fused)
    # Sums that are stored once need not be kept wide: registers hold them, or torch's product of matrices does.
    once = not problem.backend.widens and (not backend.widens or programs[0].is_product)
    narrow = once and not second_pass and all(p.result.owned for p in programs) and operand_dtype.is_floating_point
    dtype = operand_dtype if narrow else accumulator(operand_dtype)
    covers = output.sparse or (covered[0] and bool(parts[0].packed.items))
    strides = programs[0].strides or None
    if covered[0] and not output.sparse:
        strides = output.strides(joined=True)
    return Executable(generated_programs, output.rows, output.width_shape, dtype, covers, strides)


def _needs_second_pass(plan: Plan, parts: Sequence[BoundPart], problem: Problem) -> bool:
    """Return True if `deterministic=True` needs a second pass in place of atomics; sums of integers never do."""
    if not problem.ordered or all(p.program.result.owned or not p.packed.nnz for p in parts):
        return False
    if not all(p.packed.view.innermost.ordered for p in parts):
        raise PlanError('dense tiles add by atomics, which is not deterministic; take "coo", "fiber" or "rows"')
    if any(a.letter not in p.program.output_axes for p in parts for a in p.program.split):
        raise PlanError(
            f"plan {plan.name!r} adds to output rows from several blocks at once, which is "
            'not deterministic; take "coo", "fiber", "rows" or "auto"'
        )
    return True


def dense_tables(dense: Tensors, problem: Problem, contiguous: bool = True) -> list[Tensor]:
    """Return dense operands in full: contiguous, as kernels read them, or as views for torch.

    Raises:
        OutOfMemoryError: the copy of a broadcast operand would pass the memory limit.
    """
    tables = []
    for operand, (shape, order, strided) in zip(dense, problem.readings, strict=True):
        table = operand if operand.shape == shape else operand.expand(shape)
        table = table if order is None or (strided and contiguous) else table.permute(order)
        if table.is_conj() or table.is_neg():
            table = resolved(table)
        if contiguous and not table.is_contiguous():
            if 0 in table.stride():
                what = f"a broadcast operand of shape {shape}, which kernels read whole,"
                check_memory(what, table.nbytes, table.device, problem.memory_limit)
            table = launch.contiguous(table)
        tables.append(table)
    return tables


# -- rows of the result -----------------------------------------------------------------------------------------
def _row_of_nonzeros(problem: Problem, output: Output) -> Tensor:
    """(nnz,) the output row each nonzero adds to."""
    coords = problem.counts.coords
    if not output.sparse:
        return linear_key(*of_modes(coords, problem.shape, problem.kept), coords[0])[0]
    return torch.arange(problem.nnz, device=problem.device) if output.slot is None else output.slot


def _rows_of_part(packed: Packed, problem: Problem, output: Output) -> Tensor:
    """(nnz of the part,) the output row each nonzero adds to."""
    rows = _row_of_nonzeros(problem, output)
    return rows if packed.source is None else rows[packed.source]


def _zeroed(parts: Sequence[BoundPart], problem: Problem, output: Output) -> Tensor | None:
    """List the rows of the result to be zeroed before a run; None where they are not listed: all are, or none.

    These are the rows that no part stores: parts add to them, or they have no nonzeros. Zeros for a result of
    2.7 GB take as long as its rows, and those that are not stored may be one in thousands.
    """
    storing, adding = ([p.packed for p in parts if p.program.result.owned == stores] for stores in (True, False))
    count, sparse = output.rows, output.sparse
    if not storing or parts[0].program.covers or (sparse and not adding):
        return None
    if not sparse and sum(p.nnz for p in storing) < count // 2:
        return None
    if not sparse and not adding and count in (storing[0].items, problem.counts.distinct(problem.kept)):
        return torch.empty(0, dtype=torch.long, device=problem.device)
    reached = torch.zeros(count, dtype=torch.bool, device=problem.device)
    for packed in adding if sparse else storing:  # every row of a sparse result has a nonzero
        reached.index_fill_(0, _rows_of_part(packed, problem, output), True)
    zeroed = torch.nonzero(reached if sparse else ~reached).flatten()
    row = output.width * accumulator(problem.dtype).itemsize
    constants = problem.profile.constants
    listed = zeroed.numel() * (constants["listed_row"] + constants["listed_byte"] * row)
    return zeroed if listed <= count * row else None


def _storing_all(part: BoundPart, problem: Problem, output: Output) -> BoundPart:
    """Give a part an item for each row without nonzeros, which stores zeros: none need be written before a run.

    Left as they are: parts whose items are not rows, each with its number stored; parts with no such row; and parts
    of which most rows are such.
    """
    packed, rows = part.packed, output.rows
    shared, ends = packed.view.levels[0], packed.view.items.arrays
    named = [at.array for at in shared if isinstance(at, Field) and at.top and not at.shift]
    numbered = [at.mode for at in shared] == [*problem.kept] and len(named) == len(ends) == 1
    fits = part.program.result.owned and not (output.sparse or packed.view.values.sides)
    if not (fits and numbered) or not packed.items < rows <= 2 * packed.items:
        return part
    empty = torch.ones(rows, dtype=torch.bool, device=problem.device)
    empty = empty.index_fill_(0, _rows_of_part(packed, problem, output), False).nonzero().flatten()
    end, numbers = packed.arrays[ends[0]], packed.arrays[named[0]]
    end = torch.cat([end, end[-1:].expand(len(empty))])
    arrays = {**packed.arrays, ends[0]: end, named[0]: torch.cat([numbers, empty.to(numbers.dtype)])}
    whole = replace(packed, arrays=arrays, items=rows)
    return replace(part, packed=whole, arrays=PartArrays.of(part.program, whole))


# -- the choice of a plan -----------------------------------------------------------------------------------------


def rewritten_problem(request: Request) -> Problem:
    """Return the planning problem of the einsum that rewrites lead to."""
    return rewrites_of(request)[1].problem


def chosen_for(request: Request, other: Other | None = None) -> Choice:
    """Choose the plan of an einsum of one sparse operand by its options; `other` is as of `choose`."""
    settings = request.settings
    with in_force_on(settings, request.like.device):
        return choose(settings.plan, rewritten_problem(request), request.of_call and not settings.timed, other)


@contextmanager
def in_force_on(settings: Options, device: torch.device) -> Iterator[None]:
    """Put options in force in this block, and make a GPU the current one, so that its profile is looked up."""
    with in_force(settings), on_gpu(device):
        yield
