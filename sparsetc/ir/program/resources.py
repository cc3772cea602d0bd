"""The resources of a tile program: what its statements read, add and multiply, counted as often as they run.

In: a `TileProgram`; the numbers of a packed storage, or a planner's estimate of them. Out: `Resources`, a `Count` of
each, linear in what a part stores, and `Statistics`, which say how much that is. `Cost` says what time they take. The
symbols of counts::

    P  work items      L  fibers (lanes stored)      N  nonzeros stored, padding included      w  bytes of a value

L counts the stored tiles of a part in tiles, and the pairs of a task list, whose N are the values of both operands. In
text, R are rows of the result. A text has no sizes of modes: one source serves many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np

from sparsetc.device.profile import DeviceProfile
from sparsetc.ir.nest.axes import ITEM, LANE, LEVELS
from sparsetc.ir.plan import F16, ROUNDED
from sparsetc.ir.program import tile as ir
from sparsetc.support import Letters, NamedInts, Names
from sparsetc.support.lru import cached_property

SYMBOLS = ("L*w", "L", "N*w", "N", "P*w", "P", "w", "")
"""Terms of a count, in this order: products of a symbol or 1 and, at even places, the bytes of a value."""


_Array: Any = np.ndarray  # whose operators give counts here, as no type of numpy says


class Count(_Array):  # type: ignore[misc]
    """A sum of the products in `SYMBOLS`: an array of the numbers of each, which adds up and multiplies as one.

    The number where the products have values `symbols` is ``count @ symbols``, of one symbol ``count @ FIBERS``.
    """

    __add__ = __iadd__ = _Array.__add__  # a count that is kept stays as it is
    __mul__ = _Array.__mul__
    __matmul__ = _Array.dot  # which gives a number

    @classmethod
    def of_each(cls, factors: Sequence[int]) -> Count:
        """Return the count of so many of each product."""
        return np.array(factors, dtype=object).view(cls)  # type: ignore[return-value]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Count) and self.tolist() == other.tolist()

    def __hash__(self) -> int:
        return hash(tuple(self))

    @property
    def bytes(self) -> Any:
        """The bytes of this many values; a count in bytes has none."""
        nbytes = self.copy()
        nbytes[::2] = self[1::2]
        nbytes[1::2] = 0
        return nbytes

    def __str__(self) -> str:
        terms = [(f, s) for f, s in zip(self.tolist(), SYMBOLS, strict=True) if f]
        return " + ".join([f"{f}*{s}" if s and f != 1 else s or str(f) for f, s in terms]) or "0"


FIBERS, STORED, ITEMS, ONE = (Count.of_each([int(at == place) for at in range(8)]) for place in (1, 3, 5, 7))
ZERO = Count.of_each([0] * 8)
BY_LEVEL = (ITEMS, FIBERS, STORED)
"""Counts of what each level has; of blocks, their fibers."""


@dataclass(frozen=True)
class Statistics:
    """Counts of a packed part, or estimates of them.

    Attributes:
        runs: for a sparse letter, how often its coordinate changes as stored: a row gathered again at once is in L1.
        chain: rounds of loads that wait for one another in the longest work item.
        split_rows: True if a row has several items: then results are added, not stored.
        split_fibers: True if a fiber has several lanes: then results are added too.
        misses: for a sparse letter, pairs of a number of rows and the share of gathers that miss a cache of so many
            (`Counts.misses`); no pairs where what is gathered stays near, no letter where that is not known.
    """

    items: int
    fibers: int
    stored: int
    nnz: int
    itemsize: int
    runs: NamedInts = ()
    chain: int = 0
    split_rows: bool = False
    split_fibers: bool = False
    misses: tuple[tuple[str, tuple[tuple[int, float], ...]], ...] = ()

    def scaled(self, share: float) -> Statistics:
        """The statistics of a share of the nonzeros."""
        counts = self.items, self.fibers, self.stored, self.nnz
        items, fibers, stored, nnz = [max(1, int(n * share)) if share else 0 for n in counts]
        return replace(self, items=items, fibers=fibers, stored=stored, nnz=nnz)

    @cached_property
    def symbols(self) -> Count:
        """The values of the products of symbols that a `Count` is a sum of."""
        plain = self.fibers, self.stored, self.items, 1
        return Count.of_each([n * w for n in plain for w in (self.itemsize, 1)])


# -- resources ---------------------------------------------------------------------------------------------------------

WARP = 32
"""Threads of a warp."""
SECTOR = 32
"""Bytes that reach registers of a gathered row at least."""
WORD = 4
"""Bytes of an element of an index array, of most kinds, and of a row's scale."""
SHORT = 2
"""Bytes of a fiber's length where kernels alone read it, and fibers are cut before 2**15 nonzeros."""
TILE_WORD = 4
"""Bytes of a tile's place: its coordinates, however many words they take, or its number in a list of pairs. The words
of items were not counted when rates of tiles were measured."""
STRUCTURE = {
    "pair_ptr": 8 * ITEMS,
    "item_x": WORD * ITEMS,
    "item_y": WORD * ITEMS,
    "lane_len": WORD * FIBERS,
    "value_ptr": WORD * FIBERS,
}
"""Bytes of the arrays that hold no coordinates. Of those not here little is read, once an item or a block: such was the
program whose rates were measured."""


@dataclass(frozen=True)
class GatherTerm:
    """The rows of one operand that a program gathers.

    Attributes:
        width: elements of a row.
        table_width: elements of a row that caches must hold for it to be found there again by neighbours.
        held_width: elements of a row that one program or another takes at a time: all of it, or the block of a pass.
        whole_width: elements of a row of the operand.
        letters: sparse letters of the operand whose coordinates may repeat as stored.
        sector: bytes that reach registers of a row at least.
        passes: over all items, each for one block of the rows, where these are known to be gathered faster.
        itemsize: bytes of an element: those of a value, or of bfloat16.
    """

    operand: str
    rows: Count
    width: int
    table_rows: int
    table_width: int
    held_width: int
    whole_width: int
    letters: Names = ()
    sector: int = 0
    passes: int = 1
    itemsize: Count = ONE.bytes

    def far(self, statistics: Statistics, profile: DeviceProfile) -> bool:
        """Return True if the table is too large for the L2 cache to hold most of it."""
        held = self.table_rows * self.held_width * (self.itemsize @ statistics.symbols)
        return held > 2 * profile.l2_bytes

    def moved(self, statistics: Statistics, profile: DeviceProfile, programs: int) -> tuple[float, float]:
        """Return (bytes from the L2 cache, bytes from device memory) with `programs` programs an item."""
        size, runs = self.itemsize @ statistics.symbols, dict(statistics.runs)
        rows = self.rows @ statistics.symbols
        fresh = max([programs * runs.get(c, statistics.stored) for c in self.letters], default=rows)
        moved = min(rows, fresh) * self.width * size
        table = self.table_rows * size
        taken_at_once = table * self.table_width
        held = table * self.held_width
        whole = table * self.whole_width
        far = moved if taken_at_once > profile.l1_bytes else moved * max(0.0, 1 - profile.l1_bytes / max(1, whole))
        missed = moved * (1 - profile.l2_bytes / held) if held > profile.l2_bytes else min(moved, whole)
        if len(self.letters) == 1 and self.letters[0] in (known := dict(statistics.misses)):
            pairs = known[self.letters[0]]
            near = int(profile.constants.get("panel_cache", profile.l1_bytes))
            far = moved * missing(pairs, near // (size * self.table_width))
            missed = moved * missing(pairs, profile.l2_bytes // (size * self.held_width)) if pairs else missed
        return far * self.passes ** -profile.constants["slab_power"], missed


def missing(pairs: Sequence[tuple[int, float]], rows: int) -> float:
    """Return the share of gathers that miss a cache of so many rows."""
    return next((share for held, share in pairs if held >= rows), pairs[-1][1] if pairs else 0.0)


class Resources:
    """The resources that a program uses, counted in symbols.

    Some programs have *sides*, axes that are positions along stored tiles: they execute what is padded, and a thread
    reads its own part of a tile. Others mask what is padded, and all threads of a row read its coordinates.

    Attributes:
        programs: grid programs an item.
        readers: grid programs that read the same values.
        passes: over all items, one for each block of the axes that are slowest on the grid.
        stream, once: bytes of what is stored, as all programs read it, and as the first of an item does.
        registers: bytes that each of a row's threads reads into registers, beside gathered rows.
        multiply, dot: multiplications and additions outside dots, and inside them.
        outer: those outside dots of rows with other rows, of which each has axes of its own.
        converted, halved: elements of dots' sides that are brought to 16 bits, and those of which halves are made.
        expanded: positions of bitmap tiles.
        met: rows, copies included, that are added to in no order; 0 where results are stored, or added in order.
        lane: threads that a lane has which stores a row of its own; 0 where lanes do not.
        native: True if it is priced as native loops.
        sparse: True if the result has the rows alone to which something is added.
        lane_dots: whether dots contract the lanes of runs or fibers, not tiles.
        turn: flops of dots in one turn of a program over a tile; None where there are no tiles.
        made: what is made of operands before the program runs: the attribute of `Operand` that says it (it is rounded,
            its largest magnitude is found, halves are made of it, it is copied in another order), its name and
            elements.
    """

    multiply = outer = dot = converted = halved = expanded = registers = added_rows = added_bytes = ZERO
    gathers: Sequence[GatherTerm] = ()
    owned = True
    copies = 1
    met = 0
    lane = 0.0
    sparse = False
    native = False
    made: Sequence[tuple[str, str, int]] = ()

    def __init__(self, program: ir.TileProgram) -> None:
        """Count what is stored, then each statement as often as the loops around it turn."""
        self.p = p = program
        self.native = p.schedule.native
        self.sides = {a.letter for a in p.axes} & {*p.letters}
        self.programs = prod([a.programs for a in p.split])
        self.readers = prod([a.programs for a in p.split if a.letter not in self.sides])
        self.passes = self._passes([a.letter for a in p.axes])
        values = ZERO
        if p.view.values.held:
            values = STORED * 2 if p.half else STORED.bytes
        index = self._index()
        self.values = values * self.readers
        self.stream, self.once = self.values + index * self.programs, values + index
        self.registers = self._words() * self.programs
        self.output = ONE.bytes * (p.rows * p.width)
        self.visit(p.body, ITEMS * self.programs)
        self.precision = ROUNDED if program.schedule.precision == F16 else program.schedule.precision  # of one rate
        tiles = "tile" in [axis.name for axis in program.view.loops]
        self.turn = self.dot @ FIBERS // self.programs if tiles else None
        self.lane_dots = self.dot.any() and not tiles and bool(program.view.innermost.lanes)
        made = product(("rounded", "split", "halves", "arranged"), p.operands)
        self.made = tuple([(how, o.name, o.nrows * o.width) for how, o in made if getattr(o, how)])

    # -- what is stored ---------------------------------------------------------------------------------------------
    @cached_property
    def _levels(self) -> list[Count]:
        """Visits of each level: one for every item, and for all that the loops of the level go over."""
        counts = [ITEMS] * len(LEVELS)
        for axis in self.p.view.loops:
            counts[axis.level :] = [BY_LEVEL[axis.level]] * len(counts[axis.level :])
        return counts

    def _index(self) -> Count:
        """Bytes of index arrays that are streamed."""
        view = self.p.view
        coordinates = {lookup.array for own in view.lookups for lookup in own}
        structure = STRUCTURE | ({"lane_len": SHORT * FIBERS} if view.narrow else {})
        nbytes = sum([structure.get(array, ZERO) for array in {*view.arrays} - coordinates], start=self.listed)
        if "bits" in view.arrays:
            nbytes += FIBERS * (view.values.volume // 8)
        if self.sides:
            return nbytes + FIBERS * (TILE_WORD * len(self.p.sparse))
        return sum([n * sum(widths) for n, widths in zip(self._levels, view.word_bytes, strict=True)], start=nbytes)

    @cached_property
    def listed(self) -> Count:
        """The bytes of coordinate lists along sides, such as those of windows."""
        if not self.sides:
            return ZERO
        read = zip(self._levels, self.p.view.lookups, strict=True)
        return sum([n * (WORD * lookup.each) for n, own in read for lookup in own], start=ZERO)

    def _words(self) -> Count:
        """Bytes of coordinates that reach a thread's registers."""
        if self.sides:
            return self.listed
        view, nbytes = self.p.view, ZERO
        for level, count in enumerate(self._levels):
            looked_up = sum([lookup.every != 1 for lookup in view.lookups[level]])
            nbytes += count * (WORD * (len(view.word_bytes[level]) + looked_up))
        return nbytes

    # -- statements -------------------------------------------------------------------------------------------------
    def visit(self, body: Iterable[ir.Statement], visits: Count) -> None:
        """Count statements that run `visits` times, and the statements in their loops."""
        for s in body:
            match s:
                case ir.Loop():
                    self.visit(s.body, s.axis.visits(visits, BY_LEVEL, self.programs))
                case ir.Value():
                    self._value(s)
                case ir.Scale() if s.out.axes:
                    self.registers += visits * (self.p.axis(s.out.axes[0]).size * WORD)
                case ir.Gather() if s.operand.rows:
                    self.gathers = (*self.gathers, self._gathered(s, visits))
                    if self.sides and s.out in self._brought:
                        self.converted += visits * self._cells(s.out.axes)
                case ir.Product():
                    self._product(s, visits)
                case ir.Add():
                    self._add(s, visits)

    @cached_property
    def _brought(self) -> set[ir.Tile]:
        """Return the gathered tiles that dots in bfloat16 must cast first."""
        gathered = {s.out for s in self.p.each(ir.Gather) if not s.operand.rounded}
        dots = self.p.dots if self.p.schedule.precision == ROUNDED else ()
        return gathered & {t for dot in dots for t in dot.inputs}

    def _value(self, s: ir.Value) -> None:
        """Values: read once where each tile is, as often as a list names them where one does."""
        stored = self.p.stored(s.operand)
        positions = FIBERS * (stored.values.volume * self.readers)
        self.registers += positions.bytes if stored.name else self.values
        self.expanded += positions * int(stored.values.bitmap)

    def _gathered(self, s: ir.Gather, visits: Count) -> GatherTerm:
        """The rows that a statement gathers."""
        o = s.operand
        width = self._cells(s.operand.axes)
        size = ONE * 2 if s.operand.rounded else ONE.bytes
        held = prod([min(a.size, a.block) if a.slowest else a.size for a in self.p.axes if a.letter in o.axes])
        if self.sides:
            # All columns: programs that follow one another take a tile's blocks of them in turn.
            rows = visits * self._cells({*self.p.read_along(o.rows)} & {*s.out.axes})
            return GatherTerm(o.name, rows, width, o.nrows, held, held, o.width, itemsize=size)
        # A block of the columns: neighbouring rows share most of what they gather, while it is near.
        passes = self._passes(o.axes)
        return GatherTerm(o.name, visits, width, o.nrows, width, held, o.width, o.rows, SECTOR, passes, size)

    def _product(self, s: ir.Product, visits: Count) -> None:
        """Multiplications and additions; padding is included in dots and over tiles."""
        if not (s.summed and s.out.folded if self.p.whole else s.dot):
            axes, columns = {a for t in s.inputs for a in t.axes}, {a.letter for a in self.p.axes}
            products = visits * (self._cells(axes) * len(s.inputs))
            self.multiply += products
            if len({frozenset(columns.intersection(t.axes)) for t in s.inputs} - {frozenset()}) > 1:
                self.outer += products
            return
        self.dot += visits * (2 * prod([a.block for a in self.p.axes if a.letter in {*s.out.axes, *s.summed}]))
        # Of what is not stored in halves, they are made.
        not_stored = {*s.inputs} - {v.out for v in self.p.each(ir.Value)}
        self.halved += visits * (int(self.p.view.values.halves) * sum([self._cells(t.axes) for t in not_stored]))
        # What is gathered by lanes is multiplied into the sides.
        if not self.sides and self.p.view.innermost.lanes:
            self.multiply += visits * sum([self._cells(t.axes) for t in s.inputs])

    def _add(self, s: ir.Add, visits: Count) -> None:
        """Rows added to the output, or stored; a block of an item's own is all that the item writes."""
        p = self.p
        self.added_rows = visits * self._cells({*s.source.axes} & {*p.letters} - {*s.axes})
        programs = prod([a.programs for a in p.axes if a.letter in p.output_axes])
        padded = self.sides and not self.sides & {*s.axes}
        self.added_bytes = (self.added_rows * (self._cells(s.axes) if padded else p.width // programs)).bytes
        self.owned, self.copies = s.owned, s.copies
        if not s.owned and s.key.kind == "row" and s.key.level > ITEM and not self.sides and self._often(s.key):
            self.met = p.rows * s.copies
        if s.key == ir.Key("position", ITEM):
            self.output = self.added_bytes
        self.sparse = s.key.kind != "row"
        if s.owned and s.key.level == LANE and not self.sides:
            self.lane = p.schedule.warps * WARP / p.view.lanes

    def _often(self, key: ir.Key) -> bool:
        """True if the additions to one row lie apart: a lane or a nonzero has coordinates that the row lacks."""
        levels = self.p.view.levels[: key.level + 1]
        return {self.p.letters[c.mode] for coordinates in levels for c in coordinates} != {*key.letters}

    def _cells(self, axes: Letters) -> int:
        """Elements that a program takes of axes but the lanes; over tiles padding is executed, and counted."""
        return prod([a.block if self.sides else min(a.size, a.block) for a in self.p.axes if a.letter in axes])

    def _passes(self, axes: Letters) -> int:
        """Return the passes of the grid over all items for the blocks of axes."""
        return prod([a.programs for a in self.p.axes if a.slowest and a.letter in axes])
