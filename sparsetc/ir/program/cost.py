"""What a tile program costs, counted from its own statements: bytes, gathers, additions, flops; and a roofline over it.

In: a `TileProgram`; then a part's `Statistics` and a `DeviceProfile`. Out: a `Count` of each resource, linear in the
statistics; then seconds a resource.

Resources, each with the time it alone would take:

    memory    index words, values and output, once, and what gathers miss in the L2 cache, from device memory
    l2        gathered rows of tables too large for the L1 cache
    l1        all that reaches registers: gathered rows, and index words, which every thread of a row reads
    add       atomic additions of output rows
    multiply  multiplications and additions outside dots, and bits of tiles expanded
    dot       multiplications and additions inside dots, as executed, padding included
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from sparsetc.device.profile import DeviceProfile, by_precision
from sparsetc.ir.nest.axes import ITEM, LANE, LEVELS, Axis, Each, Fibers, Turns
from sparsetc.ir.nest.coordinates import Lookup
from sparsetc.ir.plan import F16X3, ROUNDED
from sparsetc.ir.program.count import FIBERS, ITEMS, ONE, STORED, ZERO, Count
from sparsetc.ir.program.gathers import GatherTerm
from sparsetc.ir.program.laws import (
    ADDED_FROM_TILES,
    CONVERSION,
    CROWDING,
    FIRST_WAITS,
    LANE_WAIT,
    LARGE_SHARE,
    LARGE_TURN,
    LISTED_TURN,
    OVERLAP,
    SECTOR,
    SHORT,
    SPLIT,
    STORED_RATE,
    STRUCTURE,
    TALL,
    TALL_WAITS,
    TILE_WORD,
    TURN_POWER,
    UNCROWDED,
    VECTOR,
    WAITS_A_TURN,
    WARP,
    WORD,
)
from sparsetc.ir.program.statistics import Statistics
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


@dataclass(frozen=True)
class Cost:
    """What a program does, counted in the symbols."""

    stream: Count
    gathers: tuple[GatherTerm, ...]
    registers: Count
    """Bytes that each of a row's threads reads into registers, beside gathered rows."""
    added_rows: Count
    added_bytes: Count
    output: Count
    multiply: Count
    dot: Count
    precision: str
    owned: bool
    threads: int = 1
    """Threads of a row, were a warp as large."""
    programs: int = 1
    """Grid programs an item."""
    slabs: int = 1
    """Programs of an item that are apart on the grid, since an axis is taken in slabs."""
    once: Count = ZERO
    """What of `stream` is read by the first of these programs."""
    fibers: bool = False
    """Whether nonzeros are reached through fibers."""
    expanded: Count = ZERO
    """Positions of bitmap tiles."""
    turn: int | None = None
    """Flops of dots in one turn of a program over a tile; None where there are no tiles."""
    taken: int = 0
    """Bytes of a tile that a program takes in one turn, where it does not take all."""
    volume: int = 0
    """Positions of a tile."""
    listed: bool = False
    """Whether lists say which coordinates a tile has, as those of windows do."""
    warps: int = 1
    """Warps of a program."""
    sides: Count = ZERO
    """Bytes of gathered rows that are sides of dots."""
    converted: Count = ZERO
    """Multiplications that take as long as bringing elements of gathered rows to 16 bits for dots."""
    met: int = 0
    """Rows, copies included, that are added to in no order; 0 where results are stored, or added in order."""
    copies: int = 1
    """Copies of the output that are added to, and summed afterwards."""
    rounded: tuple[tuple[str, int], ...] = ()
    """The operands that are rounded before the program runs, and how many elements each has."""
    lane: float = 0.0
    """Threads that a lane has which stores a row of its own; 0 where lanes do not."""
    sparse: bool = False
    """Whether the result has the rows alone to which something is added."""
    split: tuple[tuple[str, int], ...] = ()
    """The operands whose largest magnitude is found before the program runs, and how many elements each has."""

    def describe(self) -> list[str]:
        """Lines for a reader: each count as an expression."""
        lines = [f"streams {self.stream} bytes, writes {self.output} bytes"]
        lines += [f"gathers {g.rows} rows of {g.itemsize * g.width} bytes of {g.operand}" for g in self.gathers]
        lines += [f"reads {name} in bfloat16, to which {n} elements are rounded first" for name, n in self.rounded]
        lines += [f"splits {name}, of whose {n} elements the largest is found first" for name, n in self.split]
        lines.append(f"{'stores' if self.owned else 'adds'} {self.added_rows} rows")
        lines.append(f"{self.multiply} flops outside dots" + (f", {self.dot} inside" if self.dot != ZERO else ""))
        return lines

    def work(self, statistics: Statistics, profile: DeviceProfile) -> tuple[int, int, int]:
        """(bytes that device memory moves at least, bytes that reach registers, flops in dots and outside)."""
        at = statistics.symbols
        moved, flops = self.once.at(at) + self.output.at(at), self.multiply.at(at) + self.dot.at(at)
        return moved, self._read(statistics, profile), flops

    def _read(self, statistics: Statistics, profile: DeviceProfile) -> int:
        """Bytes that reach registers."""
        at = statistics.symbols
        own = self.registers.at(at) * max(1, min(profile.warp_size, self.threads))
        return own + sum(g.rows.at(at) * max(g.width * g.itemsize.at(at), g.sector) for g in self.gathers)

    def seconds(self, statistics: Statistics, profile: DeviceProfile) -> dict[str, float]:
        """Seconds each resource alone would take."""
        at = statistics.symbols
        gathered = [g.moved(statistics, profile, self.programs) for g in self.gathers]
        missed, again = sum(missed for _, missed in gathered), self.stream.at(at) - self.once.at(at)
        # Blocks of one item follow one another and find its storage near; slabs read all of it again.
        if self.slabs > 1 and self.once.at(at) > profile.l2_bytes:
            missed, again = missed + again, 0
        return {
            "memory": (self.once.at(at) + self.output.at(at) + missed) / profile.memory,
            "l2": (sum(far for far, _ in gathered) + again) / profile.l2,
            "l1": self._read(statistics, profile) / profile.l1,
            "add": 0.0 if self.owned else self.added_bytes.at(at) / profile.add,
            "multiply": self.multiply.at(at) / profile.multiply + self.expanded.at(at) / profile.expand,
            "dot": self.dot.at(at) / self._matrix_rate(profile),
        }

    def roofline(self, statistics: Statistics, profile: DeviceProfile) -> tuple[str, float]:
        """(resource, seconds): the one that bounds the part, and the time it alone would take."""
        each = self.seconds(statistics, profile)
        resource = max(each, key=lambda name: each[name])
        return resource, each[resource]

    def predicted(self, statistics: Statistics, profile: DeviceProfile) -> float:
        """Seconds expected: resources overlap, but not fully; programs and fibers take time to start.

        The output is written, by zeros, before the programs run; rows that lanes store are written while they do.
        """
        each, at = self.seconds(statistics, profile), statistics.symbols
        rows = min(self.output.at(at), self.added_bytes.at(at)) if self.sparse else self.output.at(at)
        each["memory"] -= self.output.at(at) / profile.memory
        written = self.copies * rows / profile.memory
        if self.lane:
            each["memory"] += self.added_bytes.at(at) / (STORED_RATE * profile.memory)
            written = 0.0 if self.sparse else written
        if self.met:
            each["add"] *= max(1, UNCROWDED / self.met) ** CROWDING
        staged = self.sides.at(statistics.symbols) * by_precision(profile.staged, self.precision)
        each["dot"] += staged / profile.l1 + self.converted.at(statistics.symbols) / profile.multiply
        if self.fibers:
            share = min(1.0, self.lane * LANE_WAIT) if self.lane else 1.0
            each["l1"] += self.programs * statistics.fibers * profile.fiber * share
        if self.turn is not None:
            each["add"] *= ADDED_FROM_TILES
            each["dot"] += self.programs * statistics.fibers * profile.tile * self._turn_share(profile)
        if not self.lane:  # whose programs' waits are those of their lanes
            each["programs"] = self.programs * statistics.items * profile.program
        busy = sum(t**OVERLAP for t in each.values()) ** (1 / OVERLAP)
        if self.turn is None:
            return written + max(busy, statistics.chain * profile.wait * self._idle_share(profile))
        # The last programs run alone, and a tile's dots wait for its loads and for one another.
        alone = self.turn / (self._matrix_rate(profile) / profile.warps * self.warps)
        waits = WAITS_A_TURN * statistics.chain + FIRST_WAITS
        if self.listed and self.precision in (ROUNDED, F16X3) and self.volume >= TALL:
            waits += TALL_WAITS
        return written + busy + waits * profile.wait + statistics.chain * alone

    def _idle_share(self, profile: DeviceProfile) -> float:
        """What a round of dependent loads takes, of the profile's `wait`, while memory has little to do."""
        if self.fibers:
            return 1.0
        return min(1.0, profile.idle_wait * (1 + sum(g.rows.of(STORED) > 0 for g in self.gathers)))

    def _turn_share(self, profile: DeviceProfile) -> float:
        """What a turn over a tile takes beside its dots, of the profile's `tile`."""
        if self.taken:
            return min(1.0, self.taken / profile.whole_turn) ** TURN_POWER
        share = min(1.0, (self.volume / profile.whole_tile) ** TURN_POWER * max(2, self.warps) / profile.turn_warps)
        return LISTED_TURN * share if self.listed and self.precision == ROUNDED else share

    def _matrix_rate(self, profile: DeviceProfile) -> float:
        """Flops a second of dots at this precision."""
        peak = profile.matrix(self.precision)
        if self.turn is None:
            return peak
        unit = ROUNDED if self.precision == F16X3 else self.precision  # halves go as bfloat16
        return peak * by_precision(profile.tile_share, unit) * (LARGE_SHARE if self.turn >= LARGE_TURN else 1)


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
        values, index = ZERO if p.view.pattern else 2 * STORED if p.half else STORED.bytes, self._index()
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
        coordinates = {lookup.array for level in range(len(LEVELS)) for lookup in view.lookups(level)}
        known = STRUCTURE | ({"lane_len": SHORT * FIBERS} if view.narrow else {})
        found = sum((known.get(array, ZERO) for array in {*view.arrays} - coordinates), start=self._lists())
        if view.bitmap:
            found += FIBERS * (view.volume // 8)
        if self.sides:
            return found + FIBERS * (TILE_WORD * len(self.p.sparse))
        return sum((n * sum(widths) for n, widths in zip(self._levels(), view.word_bytes, strict=True)), start=found)

    def _lists(self) -> Count:
        """Bytes of the lists of coordinates along sides."""
        levels = enumerate(self._levels())
        return sum((n * (WORD * look.each) for at, n in levels for look in self.p.view.lookups(at)), start=ZERO)

    def _words(self) -> Count:
        """Bytes of coordinates that reach a thread's registers."""
        if self.sides:
            return self._lists()
        view, found = self.p.view, ZERO
        for level, count in enumerate(self._levels()):
            looked_up = sum(lookup.every != 1 for lookup in view.lookups(level))
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
        positions = FIBERS * (stored.tiles.volume * self.readers)
        named = isinstance(self.p.number_of(stored), Lookup)
        self.registers += positions.bytes if named else self.values
        self.expanded += positions if stored.tiles.bitmap else ZERO

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
        if not s.dot:
            self.multiply += visits * (self._cells(s.out.axes) * len(s.inputs))
            return
        self.dot += visits * (2 * prod(a.block for a in self.p.axes if a.letter in {*s.out.axes, *s.contracted}))
        if self.p.view.halves:  # of what is not stored in halves, they are made
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
        p, volume = self.p, self.p.view.volume
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
            fibers=any(isinstance(axis, Fibers) for axis in p.view.loops),
            expanded=self.expanded,
            turn=self.dot.of(FIBERS) // self.splits if tiles else None,
            taken=share * (2 if p.half else 4) if self.readers < self.splits else 0,
            volume=volume,
            listed=self._lists() != ZERO,
            warps=p.warps,
            sides=self.staged,
            converted=self.converted,
            met=self.met,
            copies=self.copies,
            lane=self.lane,
            sparse=self.sparse,
            rounded=tuple((o.name, o.nrows * o.width) for o in p.operands if o.rounded),
            split=tuple((o.name, o.nrows * o.width) for o in p.operands if o.split),
        )
