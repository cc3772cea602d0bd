"""The runners of levels 2 and 3: plain torch on the CPU, slow and obviously right, sharing no code with `codegen`.

In: a `TileProgram` with its packed arrays, values and dense tables, or a `Plan` with coordinates, values and dense
operands. Out: what they mean, in float64, int64 or complex128 (level 1's runner is `ir.reference`).

`run_program` takes every work item in turn, and for each block of the dense axes that are split over the grid walks
the statements as the grammar of `ir.tile` says, a lane being an element of a vector. A lane that holds nothing reads 0
and adds nothing. Steps are taken one at a time: `unroll` changes no result. What a packed part promises beyond its
coordinates (`block_full`) is checked on the way.

`run_plan` asks only what a plan stores: it deals the nonzeros, packs and unpacks each part, and adds up what the
reference makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NoReturn

import torch

from sparsetc import coords as crd
from sparsetc.errors import FormatError, PlanError, ShapeError
from sparsetc.formats import get_format, pack
from sparsetc.ir import plan as plans
from sparsetc.ir import reference
from sparsetc.ir.einsum import Bound
from sparsetc.ir.interpret_tiles import TileWalk
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF
from sparsetc.ir.nest.coordinates import AXIS_LEVEL, Reader
from sparsetc.ir.plan import F16X3
from sparsetc.ir.tile import (
    LANES,
    Add,
    Decode,
    Gather,
    Key,
    Loop,
    Position,
    Product,
    Row,
    Scale,
    Slot,
    Statement,
    Sum,
    TileProgram,
    Value,
    Zero,
)
from sparsetc.ir.tile_checks import verify
from sparsetc.ir.view import LOW
from sparsetc.partition import shares
from sparsetc.tensor import SparseTensor

Named = tuple[torch.Tensor, tuple[str, ...]]
"""A tensor and the names of its axes."""


def run_program(
    program: TileProgram,
    arrays: dict[str, torch.Tensor],
    values: torch.Tensor | tuple[torch.Tensor, ...],
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
            stored): high, then low; of a pattern, anything of the type to compute in.
        dense: the dense operands, each (sparse letters, then dense letters) as ``program.operands`` says.
        out: (rows, *sizes of the output's dense letters); zeroed by the caller, or about to be stored to everywhere.
        items: work items.
        nnz: nonzeros stored, padding included: the end of the last of equal chunks.

    Raises:
        PlanError: the program is malformed. FormatError: an array is missing or breaks its promise.
        ShapeError: a dense operand or the output has the wrong number of elements.
    """
    verify(program)
    wanted = [name for name in program.arrays if not name.endswith("values")]
    missing = set(wanted) - set(arrays)
    if missing:
        raise FormatError(f"part {program.number} reads array {', '.join(sorted(missing))}, which is not given")
    index = {name: arrays[name].to(_widest(arrays[name].dtype)) for name in wanted}
    given = (values,) if isinstance(values, torch.Tensor) else values
    dtype = _widest(given[0].dtype)
    own = tuple(each.to(dtype) for each in given)
    tables = {
        o.name: _shaped(o.name, table.to(dtype), (o.nrows, *(program.axis(a).size for a in o.axes)))
        for o, table in zip(program.operands, dense, strict=True)
    }
    target = _shaped("the output", out, (out.shape[0], *(program.axis(a).size for a in program.output_axes)))
    for blocks in product(*(range(axis.programs if axis in program.split else 1) for axis in program.axes)):
        spans = {
            axis.letter: slice(n * axis.block, min((n + 1) * axis.block, axis.size))
            for axis, n in zip(program.axes, blocks, strict=True)
        }
        for item in range(items):
            kind = _TileItem if program.view.sides or program.view.pairs else _Item
            kind(program, index, own, tables, target, spans, item, nnz).run()


class _Item:
    """One work item on one block of the dense axes: the tiles and coordinates it has made, by name."""

    def __init__(
        self,
        program: TileProgram,
        arrays: dict[str, torch.Tensor],
        values: tuple[torch.Tensor, ...],
        tables: dict[str, torch.Tensor],
        out: torch.Tensor,
        spans: dict[str, slice],
        item: int,
        nnz: int,
    ) -> None:
        self.program, self.arrays, self.values = program, arrays, values[0]
        self.tables, self.out, self.spans = tables, out, spans
        device = self.values.device
        self.lane = torch.arange(program.view.lanes, device=device)
        none = torch.zeros_like(self.lane, dtype=torch.bool)
        self.at = [torch.tensor(item, device=device), self.lane, self.lane]
        """Where each level reads its arrays: the item, the fibers of the block, the nonzeros of the step."""
        self.live = [torch.tensor(True, device=device), none, none]
        """Which lanes of each level hold something."""
        chunk = program.view.chunk
        if chunk:
            self.start, self.stop = item * chunk, min((item + 1) * chunk, nnz)
        else:
            self.start, self.stop = (int(arrays[program.arrays[0]][n]) for n in (item, item + 1))
        self.coordinates: dict[str, torch.Tensor] = {}
        self.tiles: dict[str, Named] = {}

    def run(self) -> None:
        for statement in self.program.body:
            self.statement(statement)

    def statement(self, s: Statement) -> None:
        if isinstance(s, Loop):
            for _ in self.blocks() if s.level == LANE else self.steps():
                for inner in s.body:
                    self.statement(inner)
        elif isinstance(s, Decode):
            self.coordinates[s.letter] = self.decode(s)
        elif isinstance(s, Value):
            self.tiles[s.out.name] = self.value(), s.out.axes
        elif isinstance(s, Gather):
            self.tiles[s.out.name] = self.gather(s), s.out.axes
        elif isinstance(s, Zero):
            self.tiles[s.out.name] = self.values.new_zeros([self.size(a) for a in s.out.axes]), s.out.axes
        elif isinstance(s, Sum):
            self.tiles[s.out.name] = self.tiles[s.source.name][0].sum(0), s.out.axes
        elif isinstance(s, Product):
            self.tiles[s.out.name] = self.product(s), s.out.axes
        elif isinstance(s, Add):
            self.add(s)
        else:
            raise PlanError(f"{s.out}: only items of pairs of tiles have scales")

    # -- loops ------------------------------------------------------------------------------------------------------
    def blocks(self) -> Iterator[None]:
        """Every block of the item; its fibers are the lanes."""
        if not self.program.view.blocks:
            raise PlanError("a run of nonzeros has no blocks to loop over")
        for block in range(self.start, self.stop):
            self.block = block
            self.at[LANE] = block * self.program.view.lanes + self.lane
            self.live[LANE] = self.arrays["lane_len"][self.at[LANE]] > 0
            yield

    def steps(self) -> Iterator[None]:
        """Every step of the item's run, or of the block."""
        lanes = self.program.view.lanes
        if not self.program.view.blocks:
            for first in range(self.start, self.stop, lanes):
                self.at[LEAF] = first + self.lane
                self.live[LEAF] = self.at[LEAF] < self.stop
                yield
            return
        first, end = (int(self.arrays["block_ptr"][n]) for n in (self.block, self.block + 1))
        full, length = int(self.arrays["block_full"][self.block]), self.arrays["lane_len"][self.at[LANE]]
        if full % self.program.unroll or int(length.min()) < full or int(length.max()) * lanes > end - first:
            raise FormatError(
                f"block {self.block} has fibers of {length.tolist()} nonzeros in {(end - first) / lanes:g} steps, of "
                f"which {full} cannot be full {self.program.unroll} at a time"
            )
        for step in range((end - first) // lanes):
            self.at[LEAF] = first + step * lanes + self.lane
            self.live[LEAF] = step < length
            yield

    # -- statements -------------------------------------------------------------------------------------------------
    def read(self, array: torch.Tensor, level: int) -> torch.Tensor:
        """An element for the item, or one a lane: 0 where the lane holds nothing."""
        return self.picked(array, self.at[level], level)

    def value(self) -> torch.Tensor:
        if self.program.view.pattern:
            return self.live[LEAF].to(self.values.dtype)
        return self.read(self.values, LEAF)

    def decode(self, s: Decode) -> torch.Tensor:
        own = self.at[s.level]
        reader = Reader(
            lambda axis: self.lane if axis == LANES else self.at[AXIS_LEVEL[axis]],
            lambda mode: self.coordinates[self.program.letters[mode]],
            self.along,
            lambda array, where: self.picked(self.arrays[array], where.expand(own.shape), s.level),
        )
        return own * 0 + s.coordinate.evaluate(reader)

    def along(self, mode: int) -> NoReturn:
        raise PlanError(f"mode {mode} has a side in tiles alone")

    def picked(self, array: torch.Tensor, at: torch.Tensor, level: int) -> torch.Tensor:
        """Elements `at` of an array, or rows of a table, 0 for a lane that holds nothing."""
        live = self.live[level]
        found = array.new_zeros((*at.shape, *array.shape[1:]))
        found[live] = array[at[live]]
        return found

    def gather(self, s: Gather) -> torch.Tensor:
        level, operand = s.out.level, s.operand
        table = self.tables[operand.name][(slice(None), *(self.spans[a] for a in operand.axes))]
        row = torch.zeros_like(self.at[level])
        for letter, extent in zip(operand.rows, operand.extents, strict=True):
            row = row * extent + self.coordinates[letter]
        return self.picked(table, row, level)

    def product(self, s: Product) -> torch.Tensor:
        inputs = [self.tiles[t.name] for t in s.inputs]
        result = _einsum(inputs, s.out.axes)
        if not s.accumulate:
            return result
        total, axes = self.tiles[s.out.name]
        if axes != s.out.axes:
            raise PlanError(f"{s.out}: it was made with axes {axes}")
        return total + result

    def add(self, s: Add) -> None:
        level = s.key.level
        axes = s.axes if level == ITEM else (LANES, *s.axes)
        total, rows = _einsum([self.tiles[s.source.name]], axes), self.rows(s.key)
        span = tuple(self.spans[a] for a in s.axes)
        for n in torch.nonzero(self.live[level]):  # the item itself has one, empty, index
            lane = tuple(n.tolist())
            place = self.out[int(rows[lane])][span]
            result = total[lane].to(self.out.dtype)
            place.copy_(result) if s.owned else place.add_(result)

    def rows(self, key: Key) -> torch.Tensor:
        """The output row of the item, or of each lane."""
        if isinstance(key, Slot):
            return self.read(self.arrays[key.array], key.level)
        if isinstance(key, Row):
            row = torch.zeros_like(self.at[key.level])
            for letter, stride in key.terms:
                row = row + self.coordinates[letter] * stride
            return row
        return self.at[key.level]

    def size(self, axis: str) -> int:
        span = self.spans.get(axis)
        return self.program.view.lanes if span is None else span.stop - span.start


class _TileItem(_Item):
    """One work item of tiles, or of pairs of tiles."""

    def __init__(
        self, program: TileProgram, arrays: dict[str, torch.Tensor], values: tuple[torch.Tensor, ...], *rest: Any
    ) -> None:
        tables, out, spans, item, nnz = rest
        super().__init__(program, arrays, values, tables, out, spans, item, nnz)
        self.walk = TileWalk(program, arrays, values, tables, spans, item)

    def size(self, axis: str) -> int:
        return self.program.axis(axis).block if axis in self.program.letters else super().size(axis)

    def product(self, s: Product) -> torch.Tensor:
        if not s.dot or self.program.precision != F16X3:
            return super().product(s)
        x, y = (self.tiles[t.name] for t in s.inputs)
        high, low = 0, 1

        def dot(x_part: int, y_part: int) -> torch.Tensor:
            return _einsum([(x[0][x_part], x[1][1:]), (y[0][y_part], y[1][1:])], s.out.axes)

        return self.tiles[s.out.name][0] + dot(high, high) + (dot(high, low) + dot(low, high)) / LOW

    def statement(self, s: Statement) -> None:
        if isinstance(s, Loop):
            for n in self.walk.turns(s):
                self.walk.turn(s, n)
                for inner in s.body:
                    self.statement(inner)
        elif isinstance(s, Decode):
            self.walk.decode(s)
        elif isinstance(s, Value):
            self.tiles[s.out.name] = self.walk.value(s), self.walk.axes(s)
        elif isinstance(s, Scale):
            self.tiles[s.out.name] = self.walk.scale(s), s.out.axes
        elif isinstance(s, Gather):
            self.tiles[s.out.name] = self.walk.gather(s), s.out.axes
        elif isinstance(s, Sum):
            self.tiles[s.out.name] = _einsum([self.tiles[s.source.name]], s.out.axes), s.out.axes
        elif isinstance(s, Add) and isinstance(s.key, Position):
            block = _einsum([self.tiles[s.source.name]], s.axes)
            self.out[self.walk.item].copy_(block[tuple(self.spans[a] for a in s.axes)])  # without what was padded
        elif isinstance(s, Add):
            kept = tuple(a for a in self.program.letters if a in s.source.axes)
            axes = (*kept, *s.axes)
            self.walk.add(s, _einsum([self.tiles[s.source.name]], axes), axes, self.out)
        else:
            super().statement(s)


def _einsum(tiles: Sequence[Named], axes: tuple[str, ...]) -> torch.Tensor:
    """The product of the tiles, summed over all axes but these."""
    number = {axis: n for n, axis in enumerate(dict.fromkeys(a for _, own in tiles for a in own))}
    missing = [a for a in axes if a not in number]
    if missing:
        raise PlanError(f"no factor has axis {', '.join(missing)}")
    operands = [x for tile, own in tiles for x in (tile, [number[a] for a in own])]
    return torch.einsum(*operands, [number[a] for a in axes])


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
    plan: plans.Plan,
    bound: Bound,
    coords: torch.Tensor,
    values: torch.Tensor,
    dense: Sequence[torch.Tensor],
) -> torch.Tensor:
    """What a plan means, however its parts are lowered: the sum of what the reference makes of each part, unpacked.

    Args:
        plan: parts, and the partition that deals to them.
        bound: an einsum with one sparse operand.
        coords: (order, nnz) of the sparse operand, in any order.
        values: (nnz,).
        dense: the dense operands, as the einsum names them.

    Returns:
        The dense result, in float64, int64 or complex128.

    Raises:
        PlanError: the plan is malformed, or its partition does not deal one share a part.
    """
    plans.verify(plan)
    e = bound.einsum
    if len(e.sparse) != 1:
        raise PlanError(f'a plan stores one sparse operand; "{e}" has {len(e.sparse)}')
    (position,) = e.sparse
    letters, shape = e.inputs[position], bound.shape(position)
    if coords.shape[1]:  # formats rely on lexicographic order
        order = crd.lexsort(crd.sort_keys(coords, shape))
        coords, values = coords[:, order], values[order]
    kept = tuple(letters.index(c) for c in e.kept)
    dealt = shares(plan, coords, shape, kept)
    result = values.new_zeros(bound.output_shape, dtype=reference.reference_dtype([values, *dense]))
    for part, share in zip(plan.parts, dealt, strict=True):
        own = coords if share is None else coords[:, share]
        own_values = values if share is None else values[share]
        found, places = get_format(part.format).unpack(pack(own, shape, part.format, part.storage))
        x = SparseTensor(found, own_values[places], shape, coalesce=False)
        operands: list[SparseTensor | torch.Tensor] = list(dense)
        operands.insert(position, x)
        result += reference.run(e, *operands)
    return result
