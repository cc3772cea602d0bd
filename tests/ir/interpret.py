"""The runners of levels 2 and 3: plain torch on the CPU, slow and obviously right, sharing no code with `codegen`.

In: a `TileProgram` with its packed arrays, values and dense tables, or a `Plan` with coordinates, values and dense
operands. Out: what they mean, in float64, int64 or complex128 (level 1's runner is `reference`).

`run_program` takes every work item in turn, for each block of the axes that are split over the grid
(`work_item`). Steps are taken one at a time: `unroll` changes no result. What a packed part promises beyond its
coordinates (`block_full`) is checked on the way.

`run_plan` asks only what a plan stores: it divides the nonzeros, packs each part and reads it back, and adds up what
the reference makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import reference
import torch
from program_checks import verify
from work_item import ArgumentMemory, WorkItem

from sparsetc.codegen.split_float16 import largest, split_whole
from sparsetc.errors import FormatError, PlanError, ShapeError
from sparsetc.ir import plan as plans
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.program import names
from sparsetc.ir.program.operands import HALVES
from sparsetc.ir.program.tile import Operand, TileProgram
from sparsetc.packing.base import pack
from sparsetc.packing.partition import divide, shares_of_plan
from sparsetc.tensor import coords as crd
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.testing.conformance import nonzeros


def run_program(
    program: TileProgram,
    arrays: dict[str, torch.Tensor],
    values: torch.Tensor | tuple[torch.Tensor, ...] | None,
    dense: Sequence[torch.Tensor],
    out: torch.Tensor,
    items: int,
    nnz: int,
) -> None:
    """Add (or store, where the program does) one part's results into `out`.

    Args:
        program: what one work item does.
        arrays: the packed index arrays by name, and the output slots under ``program.slot`` where it has them.
        values: (stored,) values in the packed order; of a task list, those of each operand, of tiles in halves (2,
            stored): high, then low; of a pattern, anything. Of one operand in halves, whose
            ``most`` is one of the arrays, (2, stored) too.
        dense: the dense operands, each (sparse letters, then dense letters) as ``program.operands`` says.
        out: (rows, *sizes of the output's dense letters); zeroed by the caller, or about to be stored to everywhere.
        items: work items.
        nnz: nonzeros stored, padding included: the end of the last of equal chunks.

    Raises:
        PlanError: the program is malformed. FormatError: an array is missing or breaks its promise.
        ShapeError: a dense operand or the output has the wrong number of elements.
    """
    verify(program)
    given = values if isinstance(values, tuple) else (values,)
    memory = _memory(program, arrays, given, dense, out, nnz)
    free = [axis for axis in program.axes if axis.letter not in program.looped]
    for blocks in product(*(range(axis.programs) for axis in free)):
        starts = {axis.letter: n * axis.block for axis, n in zip(free, blocks, strict=True)}
        for item in range(items):
            WorkItem(program, memory, starts, item).run(program.body)


def _memory(
    program: TileProgram,
    arrays: dict[str, torch.Tensor],
    values: tuple[torch.Tensor | None, ...],
    dense: Sequence[torch.Tensor],
    out: torch.Tensor,
    nnz: int,
) -> ArgumentMemory:
    """All that a program reads, in wide types; raises where something is missing, or has another shape."""
    dtype = _widest(out.dtype)
    held = {name for operand in program.sparse for name in operand.held}
    missing = set(program.arrays) - set(arrays) - held
    if missing:
        raise FormatError(f"part {program.number} reads array {', '.join(sorted(missing))}, which is not given")
    index = {name: arrays[name].flatten() for name in program.arrays if name not in held}
    known = {name: array.to(_widest(array.dtype)) for name, array in index.items()}
    for operand, own in zip(program.sparse, values, strict=True):
        parts = own if operand.values.halves else (own,)
        known |= {name: part.to(dtype) for name, part in zip(operand.held, parts, strict=False)}  # of a pattern, none
    tables = [_as_read(o, table).to(dtype) for o, table in zip(program.operands, dense, strict=True)]
    rows = {
        o.name: _shaped(o.name, table, (o.nrows, *(program.axis(a).size for a in o.axes))).flatten()
        for o, table in zip(program.operands, tables, strict=True)
    }
    for o in program.operands:
        if o.split or o.halves:
            most = largest(rows[o.name].float())
            halves = split_whole(rows[o.name].float(), most)[:2] if o.halves else ()
            rows |= {f"{o.name}_{half}": table.to(dtype) for half, table in zip(HALVES, halves, strict=False)}
            rows[names.most(o.name)] = most.to(dtype)
    target = _shaped("the output", out, (out.shape[0], *(program.axis(a).size for a in program.output_axes)))
    return ArgumentMemory(known, rows, target.view(-1), nnz, dtype)


def _as_read(o: Operand, table: torch.Tensor) -> torch.Tensor:
    return table.to(torch.bfloat16) if o.rounded else table


def _shaped(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(x.shape) == shape:
        return x
    if x.numel() != prod(shape):
        raise ShapeError(f"{name} has shape {tuple(x.shape)}; expected the elements of {shape}")
    return x.view(shape)


def _widest(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def run_plan(
    plan: plans.Plan, bound: Bound, coords: torch.Tensor, values: torch.Tensor, dense: Sequence[torch.Tensor]
) -> torch.Tensor:
    """What a plan means, however its parts are lowered: the sum of what the reference makes of each part, unpacked.

    Args:
        plan: parts, and the partition that divides among them.
        bound: an einsum with one sparse operand.
        coords: (order, nnz) of the sparse operand, in any order.
        values: (nnz,).
        dense: the dense operands, as the einsum names them.

    Returns:
        The dense result, in float64, int64 or complex128.

    Raises:
        PlanError: the plan is malformed, or its partition does not make one share a part.
    """
    plans.verify(plan)
    e = bound.einsum
    if len(e.sparse) != 1:
        raise PlanError(f'a plan stores one sparse operand; "{e}" has {len(e.sparse)}')
    (position,) = e.sparse
    letters, shape = e.inputs[position], bound.shape(position)
    if coords.shape[1]:  # formats rely on lexicographic order
        order = crd.lexsort(coords, shape)
        coords, values = coords[:, order], values[order]
    kept = tuple(letters.index(c) for c in e.kept)
    shares = shares_of_plan(plan, divide(plan.partition, coords, shape, kept, dict(plan.options)))
    result = values.new_zeros(bound.output_shape, dtype=reference.wide(*(o.dtype for o in (values, *dense))))
    for part, share in zip(plan.parts, shares, strict=True):
        own = coords if share is None else coords[:, share]
        own_values = values if share is None else values[share]
        stored, _, places, _ = nonzeros(pack(own, shape, part.format, part.storage))
        x = SparseTensor(stored, own_values[places], shape, coalesce=False)
        operands: list[SparseTensor | torch.Tensor] = list(dense)
        operands.insert(position, x)
        result += reference.run(e, *operands)
    return result
