"""The cost of a tile program: its resources, priced by the rates of a device.

In: a `TileProgram`; then a part's `Statistics` and a `DeviceProfile`. Out: a `Cost`: what statements read, add and
multiply, counted as often as they run; the seconds of each resource, a roofline, and the time that is expected of the
part. The constants of the formulas are the profile's.

The order of programs decides what gathered rows of a dense operand move through the L2 cache and from device memory.
All columns of the rows must be near; if the grid takes one block of columns after another, one block must.

Resources, each with the time it alone would take:

    memory    index words, values and output, once, and what gathers miss in the L2 cache, from device memory
    l2        gathered rows of tables too large for the L1 cache
    l1        all that reaches registers: gathered rows, and index words, which every thread of a row reads
    add       atomic additions of output rows
    multiply  multiplications and additions outside dots, and bits of tiles expanded
    dot       multiplications and additions inside dots, as executed, padding included
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import lru_cache
from itertools import product
from math import prod

from sparsetc.device.profile import DeviceProfile, by_precision
from sparsetc.ir.nest import ITEM, LANE, LEVELS, PAIRED, TileLoop
from sparsetc.ir.plan import F16, F16X3, ROUNDED
from sparsetc.ir.program.resources import (
    BY_LEVEL,
    FIBERS,
    ITEMS,
    ONE,
    SECTOR,
    STORED,
    VALUE,
    VALUES,
    ZERO,
    Count,
    GatherTerm,
    Statistics,
    moved,
)
from sparsetc.ir.program.tile import Add, Gather, Key, Loop, Product, Scale, Statement, Tile, TileProgram, Value
from sparsetc.support import Letters, cached_property

VECTOR = 4
"""Elements a thread loads at once of a gathered row."""
LINE, CPU_LINE = 128, 64
"""Bytes of a cache line of a GPU, and of a CPU, whose vectors are as long at most."""
RESIDENT = 8
"""Warps of scalar programs that a scheduler holds at once: registers, about 64 a thread, allow no more."""
LONGEST, REGISTERS = 16, 16
"""Elements of the longest vector of native loops, and vectors of sums that are in registers; more are in memory."""
BEFORE = {
    "rounded": "reads {} in bfloat16, cast before the launch",
    "split": "splits {} into float16 halves, scaled by its largest element",
    "halves": "reads {} as float16 halves, split before the launch",
}
"""Lines of `describe` about copies of an operand that are made before the launch."""
WARP = 32
"""Threads of a warp."""
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


class Cost:
    """The resources of a program, counted in symbols, and the time that they take on a device.

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
        gathers: rows that are read of dense operands.
        added_rows, added_bytes: results that are stored or added, and their bytes.
        owned: True if each row of the result is stored once, and nothing is added to it.
        copies: copies of the result that are added to, and summed at the end.
        kept: elements of the largest sum that a program has.
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
    kept = 0
    met = 0
    lane = 0.0
    sparse = False
    native = False
    made: Sequence[tuple[str, str, int]] = ()

    def __init__(self, program: TileProgram) -> None:
        """Count what is stored, then each statement as often as the loops around it turn."""
        self.p = p = program
        self.native = p.schedule.native
        self.sides = {a.letter for a in p.axes} & {*p.letters}
        self.programs = prod([a.programs for a in p.split])
        self.readers = prod([a.programs for a in p.split if a.letter not in self.sides])
        self.passes = self._passes([a.letter for a in p.axes])
        values = ZERO
        if p.view.values.held:
            values = STORED * 2 if p.half else VALUES
        index = self._index()
        self.values = values * self.readers
        self.stream, self.once = self.values + index * self.programs, values + index
        self.registers = self._words() * self.programs
        self.output = VALUE * (p.rows * p.width)
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
    def visit(self, body: Iterable[Statement], visits: Count) -> None:
        """Count statements that run `visits` times, and the statements in their loops."""
        for s in body:
            match s:
                case Loop(axis=TileLoop() as side):
                    self.visit(s.body, visits * -(-side.size // side.step))
                case Loop():  # every program walks all positions
                    self.visit(s.body, BY_LEVEL[s.axis.level] * self.programs)
                case Value():  # read once where each tile is, as often as a list names them where one does
                    stored, pairs = self.p.sparse[PAIRED.index(s.operand)].values, self.p.view.pairs
                    positions = FIBERS * (prod(stored.sides) * self.readers)
                    self.registers += positions.bytes if pairs else self.values
                    self.expanded += positions * int(stored.bitmap)
                case Scale() if s.out.axes:
                    self.registers += visits * (self.p.axis(s.out.axes[0]).size * WORD)
                case Gather() if s.operand.rows:
                    self.gathers = (*self.gathers, self._gathered(s, visits))
                    if self.sides and s.out in self._brought:
                        self.converted += visits * self._cells(s.out.axes)
                case Product():
                    self._product(s, visits)
                case Add():
                    self._add(s, visits)

    @cached_property
    def _brought(self) -> set[Tile]:
        """Return the gathered tiles that dots in bfloat16 must cast first."""
        gathered = {s.out for s in self.p.each(Gather) if not s.operand.rounded}
        dots = self.p.dots if self.p.schedule.precision == ROUNDED else ()
        return gathered & {t for dot in dots for t in dot.inputs}

    def _gathered(self, s: Gather, visits: Count) -> GatherTerm:
        """The rows that a statement gathers."""
        o = s.operand
        width, table = self._cells(o.axes), prod(o.extents)
        size = ONE * 2 if o.rounded else VALUE
        held = prod([min(a.size, a.block) if a.slowest else a.size for a in self.p.axes if a.letter in o.axes])
        if self.sides:
            # All columns: programs that follow one another take a tile's blocks of them in turn.
            rows = visits * self._cells({*self.p.read_along(o.rows)} & {*s.out.axes})
            return GatherTerm(o.name, rows, width, table, held, held, o.width, itemsize=size)
        # A block of the columns: neighbouring rows share most of what they gather, while it is near.
        passes = self._passes(o.axes)
        return GatherTerm(o.name, visits, width, table, width, held, o.width, o.rows, SECTOR, passes, size)

    def _product(self, s: Product, visits: Count) -> None:
        """Multiplications and additions; padding is included in dots and over tiles."""
        if s.accumulate:
            self.kept = max(self.kept, self._cells(s.out.axes))
        if not (s.out.folded and s.summed if self.p.at_once else s.right):
            axes, columns = {a for t in s.inputs for a in t.axes}, {a.letter for a in self.p.axes}
            products = visits * (self._cells(axes) * len(s.inputs))
            self.multiply += products
            if len({frozenset(columns.intersection(t.axes)) for t in s.inputs} - {frozenset()}) > 1:
                self.outer += products
            return
        self.dot += visits * (2 * prod([a.block for a in self.p.axes if a.letter in {*s.out.axes, *s.summed}]))
        # Of what is not stored in halves, they are made.
        not_stored = {*s.inputs} - {v.out for v in self.p.each(Value)}
        self.halved += visits * (int(self.p.view.values.halves) * sum([self._cells(t.axes) for t in not_stored]))
        # What is gathered by lanes is multiplied into the sides.
        if not self.sides and self.p.view.innermost.lanes:
            self.multiply += visits * sum([self._cells(t.axes) for t in s.inputs])

    def _add(self, s: Add, visits: Count) -> None:
        """Rows added to the output, or stored; a block of an item's own is all that the item writes."""
        p = self.p
        self.added_rows = visits * self._cells({*s.source.axes} & {*p.letters} - {*s.axes})
        programs = prod([a.programs for a in p.axes if a.letter in p.output_axes])
        padded = self.sides and not self.sides & {*s.axes}
        self.added_bytes = (self.added_rows * (self._cells(s.axes) if padded else p.width // programs)).bytes
        self.owned, self.copies = s.owned, s.copies
        if not s.owned and s.key.kind == "row" and s.key.level > ITEM and not self.sides:
            own = {p.letters[c.mode] for level in p.view.levels[: s.key.level + 1] for c in level}
            if own != {*s.key.letters}:  # a lane or a nonzero has coordinates that the row lacks
                self.met = p.rows * s.copies
        if s.key == Key("position", ITEM):
            self.output = self.added_bytes
        self.sparse = s.key.kind != "row"
        if s.owned and s.key.level == LANE and not self.sides:
            self.lane = p.schedule.warps * WARP / p.view.lanes

    def _cells(self, axes: Letters) -> int:
        """Elements that a program takes of axes but the lanes; over tiles padding is executed, and counted."""
        return prod([a.block if self.sides else min(a.size, a.block) for a in self.p.axes if a.letter in axes])

    def _passes(self, axes: Letters) -> int:
        """Return the passes of the grid over all items for the blocks of axes."""
        return prod([a.programs for a in self.p.axes if a.slowest and a.letter in axes])

    # -- prices -----------------------------------------------------------------------------------------------------

    @property
    def natively(self) -> Cost:
        """The cost of the same program as native loops."""
        other = copy(self)
        other.native = True
        return other

    def describe(self) -> list[str]:
        """Lines for a reader: each count as an expression."""
        width = "" if self.p.width == 1 else f"{self.p.width}*"
        written = f"rows of {VALUE * self.p.width}" if self.sparse else f"R*{width}w"
        lines = [f"streams {self.stream} bytes, writes {written} bytes"]
        lines += [f"gathers {g.rows} rows of {g.itemsize * g.width} bytes of {g.operand}" for g in self.gathers]
        lines += [BEFORE[how].format(name) for how, name, _ in self.made if how in BEFORE]
        lines.append(f"{'stores' if self.owned else 'adds to'} {self.added_rows} rows of the result")
        lines.append(f"{self.multiply} flops outside dots" + (f", {self.dot} inside" if self.dot.any() else ""))
        return lines

    def work(self, statistics: Statistics, profile: DeviceProfile) -> tuple[int, int, int]:
        """Return (least bytes moved by device memory, bytes moved to registers, flops in dots and outside)."""
        at = statistics.symbols
        moved, flops = self.once @ at + self.output @ at, self.multiply @ at + self.dot @ at
        return moved, self._read(statistics, profile), flops

    def _read(self, statistics: Statistics, profile: DeviceProfile) -> int:
        """Bytes that reach registers."""
        at = statistics.symbols
        row = 1 if self.sides else prod([1 << (a.block - 1).bit_length() for a in self.p.axes]) // VECTOR
        words = self.registers @ at * max(1, min(profile.warp_size, row))
        return words + sum([g.rows @ at * max(g.width * (g.itemsize @ at), g.sector) for g in self.gathers])

    def seconds(self, statistics: Statistics, profile: DeviceProfile) -> dict[str, float]:
        """Seconds each resource alone would take."""
        at = statistics.symbols
        counts = self.once, self.stream, self.output, self.added_bytes, self.multiply, self.expanded, self.dot
        once, stream, output, added, multiply, expanded, dot = [c @ at for c in counts]
        gathered = moved(self.gathers, statistics, profile, self.programs)
        missed, again = sum([missed for _, missed in gathered]), stream - once
        # Blocks of one item follow one another and find its storage near; each pass reads all of it again.
        if self.passes > 1 and once > profile.l2_bytes:
            missed, again = missed + again, 0
        return {
            "memory": (once + output + missed) / profile.memory,
            "l2": (sum([far for far, _ in gathered]) + again) / profile.l2,
            "l1": self._read(statistics, profile) / profile.l1,
            "add": 0.0 if self.owned else added / profile.add,
            "multiply": multiply / profile.multiply + expanded / profile.expand,
            "dot": dot / self._matrix_rate(profile),
        }

    def loops(self, statistics: Statistics, profile: DeviceProfile) -> dict[str, float]:
        """Return how often loops do each thing that takes time, by its name in `DeviceProfile.loops`."""
        at = statistics.symbols
        lines = [g.rows @ at * max(1.0, g.width * (g.itemsize @ at) / CPU_LINE) for g in self.gathers]
        read = moved(self.gathers, statistics, profile, 1)
        dense = [min(a.size, a.block) for a in self.p.axes if a.letter not in self.sides] or [1]
        width = int(dense[-1]) or 1
        of_row = width // LONGEST + (width % LONGEST).bit_count()  # of lengths that are powers of two
        vectors = (self.multiply + self.dot) @ at / 2 * of_row / width
        kept = self.kept * of_row > REGISTERS * width
        return {
            "call": 1.0,
            "nonzero": self.passes * statistics.stored,
            "fiber": self.passes * statistics.fibers if self.p.view.blocks else 0,
            "item": self.passes * statistics.items,
            "vector": 0.0 if kept else vectors,
            "kept_vector": vectors if kept else 0.0,
            "line": sum(lines, 0.0),
            "far_line": sum([near for near, _ in read], 0.0) / CPU_LINE,
            "farther_line": sum([missed for _, missed in read], 0.0) / CPU_LINE,
            "stored_line": self.output @ at / CPU_LINE,
            "added_line": 0.0 if self.owned else self.added_bytes @ at / CPU_LINE,
        }

    def in_panels(self, statistics: Statistics, profile: DeviceProfile) -> float:
        """Return the seconds of native loops, in panels or not, where it is known which gathers miss a cache."""
        at, counts = statistics.symbols, self.loops(statistics, profile)
        tables = [
            g.table_rows * g.whole_width * (g.itemsize @ at) for g in self.gathers if g.held_width < g.whole_width
        ]
        counts["copied_line"] = sum(tables) / CPU_LINE
        return sum([count * profile.constants.get(f"panel_{name}", 0.0) for name, count in counts.items()])

    def _by_loops(self, statistics: Statistics, profile: DeviceProfile) -> dict[str, float]:
        """Return the seconds of each count of `loops`; none where loops are not priced apart."""
        if not profile.loops or self.turn is not None:
            return {}
        rates = profile.loops["native" if self.native else "torch"]
        return {name: count * rates[name] for name, count in self.loops(statistics, profile).items()}

    def stored(self, statistics: Statistics) -> int:
        """Bytes of the rows that the program stores."""
        at = statistics.symbols
        return min(self.output @ at, self.added_bytes @ at) if self.owned else 0

    def roofline(self, statistics: Statistics, profile: DeviceProfile) -> tuple[str, float]:
        """Return the resource that bounds the part, and the seconds it would take alone."""
        each = self._by_loops(statistics, profile) or self.seconds(statistics, profile)
        resource = max(each, key=each.__getitem__)
        return resource, each[resource]

    def predicted(self, statistics: Statistics, profile: DeviceProfile) -> float:
        """Return the expected seconds: resources overlap, but not fully; programs and fibers take time to start.

        Stores of rows are included. Zeros that have to precede additions are not: the caller prices them for all parts.
        """
        if terms := self._by_loops(statistics, profile):
            return sum(terms.values())
        each = self.seconds(statistics, profile)
        at = statistics.symbols
        constants = profile.constants
        rate = (constants["stored_rate"] if self.lane else 1.0) * profile.memory
        each["memory"] += self.stored(statistics) / rate - self.output @ at / profile.memory
        each["multiply"] += (constants["outer"] - 1) * (self.outer @ at) / profile.multiply
        if self.met:
            each["add"] *= max(1, constants["uncrowded"] / self.met) ** constants["crowding"]
        if self.dot.any():
            narrowed = constants["conversion"] * (self.converted @ at) + constants["halving"] * (self.halved @ at)
            each["dot"] += narrowed / profile.multiply
        if self.p.view.blocks:
            share = min(1.0, self.lane * constants["lane_wait"]) if self.lane else 1.0
            each["l1"] += self.programs * statistics.fibers * profile.fiber * share
        if self.turn is not None or self.lane_dots:
            each["add"] *= constants["added_by_dots"]
        if self.turn is not None:
            each["dot"] += self.programs * statistics.fibers * profile.tile * self._turn_share(profile)
        alone = 0.0
        if self.dot.any() and self.turn is None and not self.lane_dots:
            by = {"tf32": constants["entries_tf32"], "tf32x3": constants["entries_tf32x3"]}
            slower = by.get(self.precision, constants["entries"])
            each |= {name: slower * each[name] for name in ("l2", "dot")}
            of_program = self._matrix_rate(profile) / profile.warps * self.p.schedule.warps
            longest = statistics.chain * (self.p.schedule.stages // 2)
            alone = slower * longest * (self.dot @ STORED) / self.programs / of_program
            loaded = sum([g.width * (g.itemsize @ at) for g in self.gathers if g.rows @ STORED])
            share = constants["entries_share"] * profile.memory * profile.rules["issued"] / profile.warps
            each["longest"] = longest * loaded / share  # which the loads of others overlap in part
        if not self.lane:  # whose programs' waits are those of their lanes
            each["programs"] = self.programs * statistics.items * profile.program
        busy = sum([t ** constants["overlap"] for t in each.values()]) ** (1 / constants["overlap"])
        if self.lane_dots:
            waits = constants["fiber_dot_wait"] if self.p.view.blocks else constants["dot_wait"]
            return busy + waits * statistics.chain * profile.wait
        if self.turn is None:
            # Passes follow one another, each with its longest programs; those that all run at once do not.
            at_once = RESIDENT * profile.warps / self.p.schedule.warps
            last = busy * max(1 / self.passes, min(1.0, at_once / (self.programs * max(1, statistics.items))))
            return max(busy, alone, busy - last + self._waited(last, statistics, profile))
        # The last programs run alone, and a tile's dots wait for its loads and for one another.
        alone = self.turn / (self._matrix_rate(profile) / profile.warps * self.p.schedule.warps)
        waits = constants["waits_a_turn"] * statistics.chain + constants["first_waits"]
        tall = self.p.view.values.volume >= constants["tall"]
        if tall and self.listed.any() and self.precision in (ROUNDED, F16X3):
            waits += constants["tall_waits"]
        return busy + waits * profile.wait + statistics.chain * alone

    def _waited(self, busy: float, statistics: Statistics, profile: DeviceProfile) -> float:
        """Seconds of the longest program: its rounds of dependent loads, which take longer while others load.

        Programs that take all rows at once have none.
        """
        if self.p.at_once:
            return 0.0
        chain, constants = statistics.chain * profile.wait, profile.constants
        if not self.p.view.blocks:
            return chain * min(1.0, constants["idle_wait"] * (1 + sum([g.rows @ STORED > 0 for g in self.gathers])))
        near = constants["near_wait"]
        line = 1.0
        among_others = 1.0
        if self.p.schedule.registers >= constants["roomy"]:
            near = constants["roomy_near_wait"]
            line = constants["roomy_line_wait"]
            among_others = constants["roomy_busy_wait"]
        words = self.p.view.lanes * self.p.schedule.unroll * sum(self.p.view.word_bytes[-1])
        idle = near + (line - near) * min(1.0, words / LINE)
        if any(g.far(statistics, profile) for g in self.gathers):
            idle, among_others = constants["far_wait"], constants["far_busy_wait"]
        first = min(profile.wait, chain)  # which finds nothing near
        return first + idle * (chain - first) + max(0.0, among_others - idle) * min(busy, chain)

    def _turn_share(self, profile: DeviceProfile) -> float:
        """Return the overhead of one loop step over a tile, as a share of the profile's `tile`."""
        volume, constants = self.p.view.values.volume, profile.constants
        if self.readers < self.programs:  # each program takes a share of the tile
            nbytes = volume * self.readers // self.programs * (2 if self.p.half else 4)
            return min(1.0, nbytes / constants["whole_turn"]) ** constants["turn_power"]
        smaller = (volume / constants["whole_tile"]) ** constants["turn_power"]
        share = min(1.0, smaller * max(2, self.p.schedule.warps) / constants["turn_warps"])
        return constants["listed_turn"] * share if self.listed.any() and self.precision == ROUNDED else share

    def _matrix_rate(self, profile: DeviceProfile) -> float:
        """Flops a second of dots at this precision."""
        peak = profile.matrix(self.precision)
        if self.turn is None:
            return peak * (by_precision(profile.run_share, self.precision) if self.lane_dots else 1)
        unit = ROUNDED if self.precision == F16X3 else self.precision  # halves go as bfloat16
        large = profile.constants["large_share"] if self.turn >= profile.constants["large_turn"] else 1
        return peak * by_precision(profile.tile_share, unit) * large


@lru_cache(maxsize=1024)
def cost_of(program: TileProgram) -> Cost:
    """Return the cost of a program; formats that run no tile program give a class of their own."""
    kind: type[Cost] = getattr(program, "priced_by", Cost)
    return kind(program)
