"""What a tile program does, counted from its own statements: bytes, gathers, additions, flops.

In: a `TileProgram`. Out: a `Cost`: a `Count` of each resource, linear in a part's `Statistics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod

from sparsetc.ir.nest.axes import ITEM, LANE, LEVELS, Axis, Each, Turns
from sparsetc.ir.nest.coordinates import Lookup
from sparsetc.ir.plan import ROUNDED
from sparsetc.ir.program.cost import Cost
from sparsetc.ir.program.count import FIBERS, ITEMS, ONE, STORED, ZERO, Count
from sparsetc.ir.program.gathers import GatherTerm
from sparsetc.ir.program.laws import (
    CONVERSION,
    SECTOR,
    SHORT,
    SPLIT,
    STRUCTURE,
    TILE_WORD,
    VECTOR,
    WARP,
    WORD,
)
from sparsetc.ir.program.tile import (
    Add,
    Gather,
    Loop,
    Position,
    Product,
    Row,
    Scale,
    Statement,
    Tile,
    TileProgram,
    Value,
)
from sparsetc.support.cached import cached_property


@lru_cache(maxsize=1024)
def cost(program: TileProgram) -> Cost:
    """Count a program's statements, each as often as the loops around it turn."""
    walk = _Walk(program)
    for statement, visits in walk.visits(program.body, ITEMS * walk.splits):
        walk.count(statement, visits)
    return walk.cost()


class _Walk:
    """What has been counted of one program.

    Some programs have *sides*, axes that are positions along stored tiles: they execute what is padded, and a thread
    reads its own part of a tile. Others mask what is padded, and all threads of a row read its coordinates.
    """

    def __init__(self, program: TileProgram) -> None:
        """Counts what is stored; the statements are still to be counted."""
        self.p = p = program
        self.sides = {a.letter for a in p.axes} & {*p.letters}
        self.splits = prod(a.programs for a in p.split)
        self.readers = prod(a.programs for a in p.split if a.letter not in self.sides)
        """Grid programs that read the same values."""
        values, index = ZERO if p.view.values.ones else 2 * STORED if p.half else STORED.bytes, self._index()
        self.values, self.once = values * self.readers, values + index
        self.stream, self.registers = self.values + index * self.splits, self._words() * self.splits
        self.gathers: list[GatherTerm] = []
        self.multiply = self.dot = self.staged = self.converted = ZERO
        self.expanded = self.added = self.added_bytes = ZERO
        self.output, self.owned, self.met, self.copies = ONE.bytes * (p.rows * p.width), True, 0, 1
        self.lane, self.sparse = 0.0, False

    # -- what is stored ---------------------------------------------------------------------------------------------
    def _levels(self) -> list[Count]:
        """How often each level is visited: for every item, and for all that the loops of the level go over."""
        counts = [ITEMS] * len(LEVELS)
        for axis in self.p.view.loops:
            counts[axis.level :] = [self._over(axis)] * len(counts[axis.level :])
        return counts

    def _index(self) -> Count:
        """Bytes of index arrays that are streamed."""
        view = self.p.view
        coordinates = {lookup.array for own in view.lookups for lookup in own}
        known = STRUCTURE | ({"lane_len": SHORT * FIBERS} if view.narrow else {})
        found = sum((known.get(array, ZERO) for array in {*view.arrays} - coordinates), start=self._lists())
        if view.values.bitmap:
            found += FIBERS * (view.values.volume // 8)
        if self.sides:
            return found + FIBERS * (TILE_WORD * len(self.p.sparse))
        return sum((n * sum(widths) for n, widths in zip(self._levels(), view.word_bytes, strict=True)), start=found)

    def _lists(self) -> Count:
        """Bytes of the lists of coordinates along sides."""
        read = zip(self._levels(), self.p.view.lookups, strict=True)
        return sum([n * (WORD * lookup.each) for n, own in read for lookup in own], start=ZERO)

    def _words(self) -> Count:
        """Bytes of coordinates that reach a thread's registers."""
        if self.sides:
            return self._lists()
        view, found = self.p.view, ZERO
        for level, count in enumerate(self._levels()):
            looked_up = sum([lookup.every != 1 for lookup in view.lookups[level]])
            found += count * (WORD * (len(view.word_bytes[level]) + looked_up))
        return found

    # -- statements -------------------------------------------------------------------------------------------------
    def visits(self, body: Iterable[Statement], count: Count) -> Iterator[tuple[Statement, Count]]:
        """The statements, each with how often it is executed."""
        for s in body:
            if not isinstance(s, Loop):
                yield s, count
            elif isinstance(s.axis, Turns):
                yield from self.visits(s.body, count * -(-s.axis.size // s.axis.take))
            else:
                yield from self.visits(s.body, self._over(s.axis) * self.splits)

    @staticmethod
    def _over(axis: Axis) -> Count:
        """What a loop that is no side's goes over in all; of blocks, their fibers."""
        return FIBERS if isinstance(axis, Each) else STORED

    def count(self, s: Statement, visits: Count) -> None:
        """Count one statement that is executed so often."""
        match s:
            case Value():
                self._value(s)
            case Scale() if s.by_row:
                self.registers += visits * (self.p.axis(s.out.axes[0]).size * WORD)
            case Gather() if s.operand.rows:
                self.gathers.append(self._gathered(s, visits))
                if self.sides and s.out in self._brought:
                    self.converted += visits * (CONVERSION * self._cells(s.out.axes))
                if s.operand.rounded and not self.p.dots:  # not measured: an instruction widens an element
                    self.multiply += visits * (2 * self._cells(s.out.axes))
            case Product():
                self._product(s, visits)
            case Add():
                self._add(s, visits)

    @cached_property
    def _brought(self) -> set[Tile]:
        """What dots in bfloat16 read and was gathered in another type."""
        gathered = {s.out for s, _ in self.p.statements if isinstance(s, Gather) and not s.operand.rounded}
        dots = self.p.dots if self.p.precision == ROUNDED else ()
        return gathered & {t for dot in dots for t in dot.inputs}

    def _value(self, s: Value) -> None:
        """Values: read once where each tile is, as often as a list names them where one does."""
        stored = self.p.stored(s.operand)
        positions = FIBERS * (stored.values.volume * self.readers)
        named = isinstance(self.p.number_of(stored), Lookup)
        self.registers += positions.bytes if named else self.values
        self.expanded += positions if stored.values.bitmap else ZERO

    def _gathered(self, s: Gather, visits: Count) -> GatherTerm:
        """The rows that a statement gathers."""
        o, width, size = s.operand, self._cells(s.operand.axes), 2 * ONE if s.operand.rounded else ONE.bytes
        held = prod(min(a.size, a.block) if a.slab else a.size for a in self.p.axes if a.letter in o.axes)
        if self.sides:
            # All columns: programs that follow one another take a tile's blocks of them in turn.
            rows = visits * self._cells({*self.p.read_along(o.rows)} & {*s.out.axes})
            return GatherTerm(o.name, rows, width, o.nrows, held, held, o.width, itemsize=size)
        # A block of the columns: neighbouring rows share most of what they gather, while it is near.
        slabs = self._slabs(o.axes)
        return GatherTerm(o.name, visits, width, o.nrows, width, held, o.width, o.rows, SECTOR, slabs, size)

    def _product(self, s: Product, visits: Count) -> None:
        """Multiplications and additions; padding is included in dots and over tiles."""
        if not (s.summed and s.out.folded if self.p.whole else s.dot):
            self.multiply += visits * (self._cells({a for t in s.inputs for a in t.axes}) * len(s.inputs))
            return
        self.dot += visits * (2 * prod(a.block for a in self.p.axes if a.letter in {*s.out.axes, *s.summed}))
        if self.p.view.values.halves:  # of what is not stored in halves, they are made
            made = {*s.inputs} - {v.out for v, _ in self.p.statements if isinstance(v, Value)}
            self.converted += visits * (SPLIT * sum(self._cells(t.axes) for t in made))
        if not self.sides:  # what is gathered by lanes is multiplied into the sides, and stored for the dot to read
            rows = visits * sum(self._cells(t.axes) for t in s.inputs)
            self.multiply, self.staged = self.multiply + rows, self.staged + rows.bytes

    def _add(self, s: Add, visits: Count) -> None:
        """Rows added to the output, or stored; a block of an item's own is all that the item writes."""
        p = self.p
        self.added = visits * self._cells({*s.source.axes} & {*p.letters} - {*s.axes})
        programs = prod(a.programs for a in p.axes if a.letter in p.output_axes)
        padded = self.sides and not self.sides & {*s.axes}
        self.added_bytes = (self.added * (self._cells(s.axes) if padded else p.width // programs)).bytes
        self.owned, self.copies = s.owned, s.copies
        if not s.owned and isinstance(s.key, Row) and s.key.level > ITEM and not self.sides and self._often(s.key):
            self.met = p.rows * s.copies
        if s.key == Position(ITEM):
            self.output = self.added_bytes
        self.sparse = not isinstance(s.key, Row)
        if s.owned and s.key.level == LANE and not self.sides:
            self.lane = p.warps * WARP / p.view.lanes

    def _often(self, key: Row) -> bool:
        """Whether what is added to one row lies apart: a lane, or a nonzero, has coordinates that the row has not."""
        levels = self.p.view.levels[: key.level + 1]
        return {self.p.letters[c.mode] for own in levels for c in own} != {*key.letters}

    def _cells(self, axes: Iterable[str]) -> int:
        """Elements that a program takes of axes but the lanes; over tiles padding is executed, and counted."""
        taken = (a for a in self.p.axes if a.letter in axes)
        return prod(a.block if self.sides else min(a.size, a.block) for a in taken)

    def _slabs(self, axes: Iterable[str]) -> int:
        """Slabs that the grid makes of axes."""
        return prod(a.programs for a in self.p.axes if a.slab and a.letter in axes)

    # -- all --------------------------------------------------------------------------------------------------------
    def cost(self) -> Cost:
        """What was counted."""
        p, volume = self.p, self.p.view.values.volume
        tiles = any(axis.name == "tile" for axis in p.view.loops)
        share = volume * self.readers // self.splits
        return Cost(
            stream=self.stream,
            once=self.once,
            gathers=tuple(self.gathers),
            registers=self.registers,
            added_rows=self.added,
            added_bytes=self.added_bytes,
            output=self.output,
            multiply=self.multiply,
            dot=self.dot,
            precision=p.precision,
            owned=self.owned,
            threads=1 if self.sides else prod(1 << (a.block - 1).bit_length() for a in p.axes) // VECTOR,
            programs=self.splits,
            slabs=self._slabs(a.letter for a in p.axes),
            fibers=p.view.blocks,
            round_bytes=p.view.lanes * p.unroll * sum(p.view.word_bytes[-1]),
            expanded=self.expanded,
            turn=self.dot.of(FIBERS) // self.splits if tiles else None,
            taken=share * (2 if p.half else 4) if self.readers < self.splits else 0,
            volume=volume,
            listed=self._lists() != ZERO,
            warps=p.warps,
            most_registers=p.registers,
            sides=self.staged,
            converted=self.converted,
            met=self.met,
            copies=self.copies,
            lane=self.lane,
            sparse=self.sparse,
            rounded=tuple((o.name, o.nrows * o.width) for o in p.operands if o.rounded),
            split=tuple((o.name, o.nrows * o.width) for o in p.operands if o.split),
        )
