"""What one work item of a tile program does, statement by statement: the meaning of a program, slow and plain.

In: a `TileProgram`, an `ArgumentMemory` of what it reads and writes, the item, and the positions that a program of the
grid has of each axis. Out: the item's results, in the memory's output.

Every tensor here has a dimension for the lanes and one for each of the program's axes, of one element where it does not
vary along the axis; so factors meet by broadcasting, whatever they are of. What is known of positions and coordinates
comes with a guard (`Spread`): which of them stand for something. A lane past the end of a run, a position past a side,
a coordinate past its mode stand for nothing, and neither does what is made of them: there, reading gives 0 and nothing
is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.nest import values as halves
from sparsetc.ir.nest.axes import Axis, Each, Fibers, Run, TileLoop
from sparsetc.ir.nest.coordinates import Expression, Reader
from sparsetc.ir.program import names
from sparsetc.ir.program.operands import Stored
from sparsetc.ir.program.tile import (
    LANES,
    Add,
    Decode,
    Gather,
    Key,
    Loop,
    Product,
    Reduce,
    Scale,
    Statement,
    Tile,
    TileProgram,
    Value,
    Zero,
)


@dataclass(frozen=True)
class ArgumentMemory:
    """What a part's program reads and writes.

    Attributes:
        arrays: index arrays, slots and values, by name.
        tables: dense operands, each (elements,).
        out: (elements,)
        nnz: nonzeros stored, padding included.
        dtype: what is computed in.
    """

    arrays: dict[str, torch.Tensor]
    tables: dict[str, torch.Tensor]
    out: torch.Tensor
    nnz: int
    dtype: torch.dtype


class Spread(NamedTuple):
    """Whole numbers, one for each position of the axes along which they vary.

    Attributes:
        live: which of them stand for something.
    """

    at: torch.Tensor
    live: torch.Tensor


@lru_cache(4096)
def along(rank: int, dim: int, start: int, count: int, end: int, device: torch.device) -> Spread:
    """So many positions along one of the dimensions, made once for all items that take them."""
    shape = [count if n == dim else 1 for n in range(rank)]
    at = torch.arange(start, start + count, device=device).view(shape)
    return Spread(at, at < end)


class HalvesTile(NamedTuple):
    """Values as sums of two: ``high + low / halves.LOW``."""

    high: torch.Tensor
    low: torch.Tensor


class WorkItem:
    """One work item on one block of the axes: what it knows and has made, by name."""

    def __init__(self, program: TileProgram, memory: ArgumentMemory, starts: dict[str, int], item: int) -> None:
        """Nothing is made yet; `starts` has the first position of each axis that no loop takes."""
        self.program, self.memory, self.view = program, memory, program.view
        self.rank = 1 + len(program.axes)
        self.dim = {LANES: 0} | {axis.letter: n + 1 for n, axis in enumerate(program.axes)}
        self.lane = self.along(0, 0, self.view.lanes, self.view.lanes)
        self.numbers = {"item": self.number(item), "lane": self.lane}
        self.positions = {letter: self.block(letter, start) for letter, start in starts.items()}
        self.coordinates: dict[str, Spread] = {}
        self.tiles: dict[str, torch.Tensor | HalvesTile] = {}

    # -- positions --------------------------------------------------------------------------------------------------
    def along(self, dim: int, start: int, count: int, end: int) -> Spread:
        """So many positions along a dimension, of which those before `end` are any."""
        return along(self.rank, dim, start, count, end, self.memory.out.device)

    def number(self, n: int) -> Spread:
        """A number that is the same everywhere."""
        return self.along(0, n, 1, n + 1)

    def block(self, letter: str, start: int) -> Spread:
        """The positions that a program has of an axis at once, from a first one on."""
        axis = self.program.axis(letter)
        return self.along(self.dim[letter], start, axis.block, axis.size)

    def position(self, axis: str) -> Spread:
        """The positions along an axis of the nest."""
        if axis == "fiber":
            at = self.position("block").at * self.view.lanes + self.lane.at
            return Spread(at, self.load(self.memory.arrays["lane_len"], at, self.lane.live) > 0)
        if axis not in self.numbers:
            raise PlanError(f"there is no {axis} outside the loop over {axis}s")
        return self.numbers[axis]

    def side(self, letter: str) -> Spread:
        """The positions along an axis that has a letter."""
        if letter not in self.positions:
            raise PlanError(f"positions of {letter} are taken by a loop, and are read outside it")
        return self.positions[letter]

    def coordinate(self, mode: int) -> Spread:
        """The coordinate of a mode that was read before; of a tile's, that of the tile."""
        letter = self.program.letters[mode]
        tile = names.tile(letter)
        return self.coordinates[tile if tile in self.coordinates else names.at(letter)]

    # -- loops ------------------------------------------------------------------------------------------------------
    def run(self, body: Iterable[Statement]) -> None:
        """Execute statements, loops included."""
        for s in body:
            if isinstance(s, Loop):
                for _ in self.iterations(s.axis):
                    self.run(s.body)
            else:
                self.statement(s)

    def iterations(self, axis: Axis) -> Iterator[None]:
        """Every turn of a loop; in each the axis has its positions, and after the last it has none."""
        if isinstance(axis, TileLoop):
            for start in range(0, axis.size, axis.step):
                self.positions[axis.letter] = self.block(axis.letter, start)
                yield
            self.positions.pop(axis.letter, None)
            return
        for turn in self.walked(axis):
            self.numbers[axis.name] = turn
            yield
        self.numbers.pop(axis.name, None)

    def walked(self, axis: Axis) -> Iterator[Spread]:
        """The positions of each turn along an axis of the nest."""
        match axis:
            case Each():
                yield from map(self.number, range(*self.own_range()))
            case Run():
                (start, end), lanes = self.own_range(), self.view.lanes
                yield from (self.along(0, first, lanes, end) for first in range(start, end, lanes))
            case Fibers():
                yield from self.steps()
            case _:
                raise PlanError(f"no item goes over {axis}")

    def own_range(self) -> tuple[int, int]:
        """What the item has of its outermost axis: an equal chunk, the block of its number, or what pointers say."""
        start, end = self.view.items.range(self.numbers["item"].at, self.memory.arrays, self.memory.nnz)
        return int(start), int(end)

    def between(self, pointers: str, n: int) -> tuple[int, int]:
        """Where range `n` starts and ends."""
        array = self.memory.arrays[pointers]
        return int(array[n]), int(array[n + 1])

    def steps(self) -> Iterator[Spread]:
        """The nonzeros of each step of a block: the next one of every fiber that has one left."""
        lanes, block = self.view.lanes, int(self.position("block").at)
        start, end = self.between("block_ptr", block)
        length = self.load(self.memory.arrays["lane_len"], block * lanes + self.lane.at, self.lane.live)
        full = int(self.memory.arrays["block_full"][block])
        if full % self.program.schedule.unroll or int(length.min()) < full or int(length.max()) * lanes > end - start:
            raise FormatError(
                f"block {block} has fibers of {length.flatten().tolist()} nonzeros in {(end - start) / lanes:g} steps, "
                f"of which {full} cannot be full {self.program.schedule.unroll} at a time"
            )
        for step in range((end - start) // lanes):
            yield Spread(start + step * lanes + self.lane.at, length > step)

    # -- expressions and addresses ----------------------------------------------------------------------------------
    def evaluated(self, e: Expression, own: Spread) -> Spread:
        """An expression where positions are `own`; it stands for something where all that it depends on does."""
        letters = self.program.letters
        live = own.live
        read = *map(self.position, e.axes), *map(self.coordinate, e.modes), *(self.side(letters[m]) for m in e.sides)
        for other in read:
            live = live & other.live
        reader = Reader(
            lambda axis: self.position(axis).at,
            lambda mode: self.coordinate(mode).at,
            lambda mode: self.side(letters[mode]).at,
            lambda array, where: self.load(self.memory.arrays[array], where, live),
        )
        return Spread(own.at * 0 + e.evaluate(reader), live)

    def load(self, array: torch.Tensor, at: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        """The elements of an array at some places; 0 where a place stands for nothing."""
        if not array.numel() and not bool(live.any()):
            array = array.new_zeros(1)  # of an empty one torch reads nothing, not even no element
        return array.take(torch.where(live, at, 0)).where(live, 0)

    def read(self, array: str, at: Spread) -> Spread:
        """Whole numbers that an array holds."""
        return Spread(self.load(self.memory.arrays[array], at.at, at.live), at.live)

    def row_major(self, parts: Sequence[tuple[Spread, int]]) -> Spread:
        """The place of an element, from its position along each dimension of an array and the sizes of those."""
        first, *others = parts or [(self.number(0), 1)]
        place, live = first[0]
        for part, size in others:
            place, live = place * size + part.at, live & part.live
        return Spread(place, live)

    def cells(self, axes: Iterable[str]) -> list[tuple[Spread, int]]:
        """The positions along axes, and their sizes."""
        return [(self.side(a), self.program.axis(a).size) for a in axes]

    # -- statements -------------------------------------------------------------------------------------------------
    def statement(self, s: Statement) -> None:
        """Execute one statement that is no loop."""
        match s:
            case Decode():
                self.decode(s)
            case Value():
                self.tiles[s.out.name] = self.value(s)
            case Scale():
                self.keep(s.out, self.scale(s))
            case Gather():
                halves = names.IN_HALVES if s.operand.halves else ("",)
                gathered = [self.shaped(s.out, self.gather(s, f"{s.operand.name}{half}")) for half in halves]
                self.tiles[s.out.name] = HalvesTile(*gathered) if s.operand.halves else gathered[0]
            case Zero():
                self.keep(s.out, torch.zeros((1,) * self.rank, dtype=self.memory.dtype, device=self.lane.at.device))
            case Product():
                self.keep(s.out, self.product(s))
            case Reduce():
                self.keep(s.out, self.summed(self.tile(s.source), s.out.axes))
            case Add():
                self.add(s)

    def keep(self, out: Tile, x: torch.Tensor) -> None:
        """Make a tile; raises `PlanError` where it varies along an axis that is not its own."""
        self.tiles[out.name] = self.shaped(out, x)

    def shaped(self, out: Tile, x: torch.Tensor) -> torch.Tensor:
        """What a tile holds, at every position of its axes."""
        shape = [1] * self.rank
        for axis in out.axes:
            shape[self.dim[axis]] = self.program.axis(axis).block if self.dim[axis] else self.view.lanes
        try:
            return x.expand(shape)
        except RuntimeError:
            raise PlanError(
                f"{out}: it varies along more than its axes: {tuple(x.shape)} is no {tuple(shape)}"
            ) from None

    def tile(self, tile: Tile) -> torch.Tensor:
        """What a tile that is not in halves holds."""
        found = self.tiles[tile.name]
        if isinstance(found, HalvesTile):
            raise PlanError(f"{tile}: it is in halves, which only dots read")
        return found

    def decode(self, s: Decode) -> None:
        """A coordinate, which stands for nothing at its mode's end and after it."""
        at, live = self.evaluated(s.coordinate, self.position(self.view.positions[s.level]))
        self.coordinates[s.name] = Spread(at, live & (at < s.end) if s.end else live)

    def value(self, s: Value) -> torch.Tensor | HalvesTile:
        """The stored values: 1s where none are stored, 0 where a bitmap has no bit."""
        operand = self.program.stored(s.operand)
        number = self.position(self.view.loops[-1].name)
        number = self.read(f"pair_{operand.name}", number) if operand.name else number
        if not operand.held:
            return self.shaped(s.out, number.live.to(self.memory.dtype))
        at = self.stored_at(operand, number)
        found = (self.load(self.memory.arrays[name], *at) for name in operand.held)
        made = [self.shaped(s.out, x) for x in found]
        return HalvesTile(*made) if operand.values.halves else made[0]

    def stored_at(self, operand: Stored, number: Spread) -> Spread:
        """Where the values of a tile are stored, for each of the positions that are taken of it."""
        tiles = operand.values
        cells = self.cells(operand.letters[mode] for mode in tiles.sequence)
        if not tiles.bitmap:
            return self.row_major([(number, 1), *cells])
        place = self.row_major(cells)
        positions = torch.arange(tiles.volume, device=place.at.device)
        words = self.memory.arrays[operand.array("bits")][int(number.at) * tiles.words + positions // tiles.word]
        bits = words >> positions % tiles.word & 1
        has = Spread(place.at, self.load(bits, *place) == 1)
        first = self.read(operand.array("value_ptr"), number)
        return Spread(first.at + self.load(bits.cumsum(0) - 1, *has), has.live)

    def scale(self, s: Scale) -> torch.Tensor:
        """Powers of two: by which the rows of the item's tiles are to be multiplied, or all of an operand."""
        name = self.program.largest(s)
        most = self.memory.arrays[name] if name in self.memory.arrays else self.memory.tables[name]
        if s.out.axes:
            row = self.read(f"item_{s.operand}", self.position("item"))
            most = self.load(most, *self.row_major([(row, 1), *self.cells(s.out.axes)]))
        else:
            most = most.view((1,) * self.rank)
        return halves.scale(most.float(), s.into).to(self.memory.dtype)

    def gather(self, s: Gather, table: str) -> torch.Tensor:
        """Elements of a dense operand, from a table of its own."""
        o = s.operand
        rows = [(self.coordinates[names.at(letter)], extent) for letter, extent in zip(o.rows, o.extents, strict=True)]
        return self.load(self.memory.tables[table], *self.row_major([*rows, *self.cells(o.axes)]))

    def product(self, s: Product) -> torch.Tensor:
        """The product of tiles, summed over the axes that it lacks, beside what was added up before."""
        factors = [self.tiles[t.name] for t in s.inputs]
        if any(isinstance(f, HalvesTile) for f in factors):
            x, y = map(self.in_halves, factors)
            found = self.contracted(s, x.high, y.high)
            found = found + (self.contracted(s, x.high, y.low) + self.contracted(s, x.low, y.high)) / halves.LOW
        else:
            found = self.contracted(s, *map(self.tile, s.inputs))
        return self.tile(s.out) + found if s.accumulate else found

    def in_halves(self, tile: torch.Tensor | HalvesTile) -> HalvesTile:
        """A side of a dot of halves, which is split where it is not stored so."""
        if isinstance(tile, HalvesTile):
            return tile
        return HalvesTile(*(half.to(self.memory.dtype) for half in halves.halved(tile.float())))

    def contracted(self, s: Product, *factors: torch.Tensor) -> torch.Tensor:
        """The sum of the product of some tensors over the axes that the result lacks."""
        return self.summed(prod(factors[1:], start=factors[0]), s.out.axes)

    def summed(self, x: torch.Tensor, axes: Iterable[str]) -> torch.Tensor:
        """A tensor summed over all axes but these."""
        kept = {self.dim[a] for a in axes}
        return x.sum([n for n in range(self.rank) if n not in kept], keepdim=True) if len(kept) < self.rank else x

    def add(self, s: Add) -> None:
        """Add to the output, or store to it, where rows and positions stand for something."""
        at, live = self.row_major([(self.row(s.key), 1), *self.cells(s.axes)])
        gone = [n for n in range(self.rank) if at.shape[n] == 1]
        total = self.tile(s.source)
        total = total.sum(gone, keepdim=True) if gone else total
        at, live, total = torch.broadcast_tensors(at, live, total.to(self.memory.out.dtype))
        if s.owned:
            self.memory.out[at[live]] = total[live]
        else:
            self.memory.out.index_add_(0, at[live], total[live])

    def row(self, key: Key) -> Spread:
        """The output row."""
        if key.kind == "row":
            row, live = self.number(0)
            for letter, stride in zip(key.letters, key.strides, strict=True):
                at = self.coordinates[names.at(letter)]
                row, live = row + at.at * stride, live & at.live
            return Spread(row, live)
        own = self.position(self.view.positions[key.level])
        if key.kind == "position":
            return own
        row, live = self.read(key.array, self.row_major([(own, 1), *self.cells(key.letters)]))
        return Spread(row, live & (row >= 0))
