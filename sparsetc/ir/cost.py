"""What a tile program costs, counted from its own statements: bytes, gathers, additions, flops; and a roofline over it.

In: a `TileProgram`; then a part's `Statistics` and a `DeviceProfile`. Out: a `Count` of each resource, linear in the
statistics; then seconds a resource. The symbols::

    P  work items      L  fibers (lanes stored)      N  nonzeros stored, padding included      w  bytes of a value

Of tiles, L are those stored, of a task list its pairs; N are then the values of both operands.

Resources, each with the time it alone would take:

    memory    index words, values and output, once, and what gathers miss in the L2 cache, from device memory
    l2        gathered rows of tables too large for the L1 cache
    l1        all that reaches registers: gathered rows, and index words, which every thread of a row reads
    add       atomic additions of output rows
    multiply  multiplications and additions outside dots, and bits of tiles expanded
    dot       multiplications and additions inside dots, as executed, padding included
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from sparsetc.device.profile import DeviceProfile, by_precision
from sparsetc.ir.count import FIBERS, ITEMS, ONE, STORED, ZERO, Count
from sparsetc.ir.tile import LANES, Add, Gather, Loop, Product, Scale, Statement, Tile, TileProgram, Value, walk
from sparsetc.ir.view import ITEM, LEAF, Consecutive, Field, word_bits

PER_LEVEL = (ITEMS, FIBERS, STORED)
OVERLAP = 3
"""Exponent of the norm that adds resources' times: 1 would be one after another, infinity perfect overlap."""
TURN_POWER = 0.6
"""Power of its share of a whole tile that a turn over a smaller one takes (H200, TTMc of rank 32 x 32 and matrices in
tiles of 16 x 16; `benchmarks/results/ttmc_tiles.json`, `choices.json`)."""
SECTOR = 32
"""Bytes of which a gathered row takes whole ones."""
SCALE = 4
"""Bytes of a row's scale."""
VECTOR = 4
"""Elements a thread loads at once of a gathered row."""


@dataclass(frozen=True)
class Statistics:
    """What a packed part (or an estimate of one) looks like."""

    items: int
    fibers: int
    stored: int
    nnz: int
    itemsize: int
    runs: tuple[tuple[str, int], ...] = ()
    """For a sparse letter, how often its coordinate changes as stored: a row gathered again at once is in L1."""
    chain: int = 0
    """Rounds of loads that wait for one another in the longest work item."""
    cut: tuple[bool, bool] = (False, False)
    """Whether a row has several items, and whether a fiber has several lanes: then results are added, not stored."""

    def scaled(self, share: float) -> Statistics:
        """Those of a share of the nonzeros."""

        def part(n: int) -> int:
            return max(1, int(n * share)) if share else 0

        items, fibers, stored, nnz = (part(n) for n in (self.items, self.fibers, self.stored, self.nnz))
        return replace(self, items=items, fibers=fibers, stored=stored, nnz=nnz)

    @cached_property
    def symbols(self) -> tuple[int, ...]:
        """The values of the products of symbols that a `Count` is a sum of."""
        plain = self.fibers, self.stored, self.items, 1
        return tuple(n * w for n in plain for w in (self.itemsize, 1))


@dataclass(frozen=True)
class GatherTerm:
    """Rows of one operand that a program gathers."""

    operand: str
    rows: Count
    width: int
    """Elements of a row."""
    table_rows: int
    table_width: int
    """Elements of a row that caches must hold for it to be found there again."""
    letters: tuple[str, ...]
    sector: int = 0
    """Bytes that reach registers of a row at least."""


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
    warps: int = 1
    """Of a program."""
    sides: Count = ZERO
    """Bytes of gathered rows that are sides of dots."""

    def describe(self) -> list[str]:
        """Lines for a reader: each count as an expression."""
        lines = [f"streams {self.stream} bytes, writes {self.output} bytes"]
        lines += [f"gathers {g.rows} rows of {g.width * ONE.bytes} bytes of {g.operand}" for g in self.gathers]
        lines.append(f"{'stores' if self.owned else 'adds'} {self.added_rows} rows")
        lines.append(f"{self.multiply} flops outside dots" + (f", {self.dot} inside" if self.dot != ZERO else ""))
        return lines

    def work(self, statistics: Statistics, profile: DeviceProfile) -> tuple[int, int, int]:
        """(bytes that device memory moves at least, bytes that reach registers, flops in dots and outside)."""
        at = statistics.symbols
        moved, flops = self.stream.at(at) + self.output.at(at), self.multiply.at(at) + self.dot.at(at)
        return moved, self._read(statistics, profile), flops

    def _read(self, statistics: Statistics, profile: DeviceProfile) -> int:
        """Bytes that reach registers."""
        at, width = statistics.symbols, statistics.itemsize
        own = self.registers.at(at) * max(1, min(profile.warp_size, self.threads))
        return own + sum(g.rows.at(at) * max(g.width * width, g.sector) for g in self.gathers)

    def seconds(self, statistics: Statistics, profile: DeviceProfile) -> dict[str, float]:
        """Seconds each resource alone would take."""
        at = statistics.symbols
        missed = l2 = 0.0
        runs = dict(statistics.runs)
        for g in self.gathers:
            rows = g.rows.at(at)
            fresh = max((self.programs * runs.get(c, statistics.stored) for c in g.letters), default=rows)
            moved = min(rows, fresh) * g.width * statistics.itemsize
            table = g.table_rows * g.table_width * statistics.itemsize
            if table > profile.l1_bytes:
                l2 += moved
            far = table > profile.l2_bytes
            missed += max(moved * (1 - profile.l2_bytes / table), 0.0) if far else min(moved, table)
        return {
            "memory": (self.stream.at(at) + self.output.at(at) + missed) / profile.memory,
            "l2": l2 / profile.l2,
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

        The output is written, by zeros, before the programs run.
        """
        each = self.seconds(statistics, profile)
        written = self.output.at(statistics.symbols) / profile.memory
        each["memory"] -= written
        staged = self.sides.at(statistics.symbols) * by_precision(profile.staged, self.precision)
        each["dot"] += staged / profile.l1
        if self.fibers:
            each["l1"] += self.programs * statistics.fibers * profile.fiber
        if self.turn is not None:
            each["dot"] += self.programs * statistics.fibers * profile.tile * self._turn_share(profile)
        each["programs"] = self.programs * statistics.items * profile.program
        busy = sum(t**OVERLAP for t in each.values()) ** (1 / OVERLAP)
        if self.turn is None:
            return written + max(busy, statistics.chain * profile.wait * self._idle_share(profile))
        # The last programs run alone, and a tile's dots wait for its loads and for one another.
        alone = self.turn / (self._matrix_rate(profile) / profile.warps * self.warps)
        return written + busy + statistics.chain * (profile.wait + alone)

    def _idle_share(self, profile: DeviceProfile) -> float:
        """What a round of dependent loads takes, of the profile's `wait`, while memory has little to do."""
        if self.fibers:
            return 1.0
        return min(1.0, profile.idle_wait * (1 + sum(g.rows.of(STORED) > 0 for g in self.gathers)))

    def _turn_share(self, profile: DeviceProfile) -> float:
        """What a turn over a tile takes beside its dots, of the profile's `tile`."""
        if self.taken:
            return min(1.0, self.taken / profile.whole_turn) ** TURN_POWER
        return min(1.0, (self.volume / profile.whole_tile) ** TURN_POWER * max(2, self.warps) / profile.turn_warps)

    def _matrix_rate(self, profile: DeviceProfile) -> float:
        """Flops a second of dots at this precision."""
        peak = profile.matrix(self.precision)
        return peak if self.turn is None else peak * profile.tile_share


@lru_cache(maxsize=1024)
def cost(program: TileProgram) -> Cost:
    """Count a program's statements, each as often as its level is visited."""
    if program.view.sides:
        return _tile_cost(program)
    if program.view.pairs:
        return _pair_cost(program)
    p = program
    splits = prod(a.programs for a in p.axes)
    gathers, registers = [], ZERO
    multiply = dot = staged = added = added_bytes = ZERO
    owned = True
    for statement, _ in walk(p.body):
        if isinstance(statement, Gather) and statement.operand.rows:
            count = PER_LEVEL[statement.out.level] * splits
            width = _width(p, statement.out)
            o = statement.operand
            # A block of the columns: neighbouring rows share most of what they gather, while it is near.
            gathers.append(GatherTerm(o.name, count, width, o.nrows, width, o.rows, SECTOR))
        elif isinstance(statement, Product):
            level = max((t.level for t in statement.inputs), default=ITEM)
            flops = PER_LEVEL[level] * splits * len(statement.inputs) * _width(p, statement.out)
            if statement.dot:
                dot += 2 * PER_LEVEL[level] * splits * _blocks(p, statement.out)
                sides = sum(_width(p, t) for t in statement.inputs)
                multiply += PER_LEVEL[level] * splits * sides
                staged += (PER_LEVEL[level] * splits * sides).bytes
            else:
                multiply += flops
        elif isinstance(statement, Add):
            added = PER_LEVEL[statement.key.level] * splits
            added_bytes = (added * (p.width // prod(a.programs for a in p.axes if a.letter in p.output_axes))).bytes
            owned = statement.owned
        elif isinstance(statement, Value) and not p.view.pattern:
            registers += STORED.bytes * splits
    stream = ZERO if p.view.pattern else STORED.bytes * splits
    for level, coordinates in enumerate(p.view.levels):
        widths = {c.array: _word_bytes(p, level, c.array) for c in coordinates if isinstance(c, Field)}
        stream += PER_LEVEL[level] * sum(widths.values()) * splits
        looked_up = sum(isinstance(c, Consecutive) or bool(isinstance(c, Field) and c.base) for c in coordinates)
        registers += PER_LEVEL[level] * splits * VECTOR * (len(widths) + looked_up)
    if p.view.blocks:
        stream += FIBERS * 4 * splits
    output = ONE.bytes * (p.rows * p.width)
    return Cost(
        stream=stream,
        gathers=tuple(gathers),
        registers=registers,
        added_rows=added,
        added_bytes=added_bytes,
        output=output,
        multiply=multiply,
        dot=dot,
        precision=p.precision,
        owned=owned,
        threads=prod(a.block for a in p.axes) // VECTOR,
        programs=splits,
        fibers=p.view.blocks,
        sides=staged,
    )


def _tile_cost(p: TileProgram) -> Cost:
    """Count a program over tiles: N positions stored, L tiles, each statement as often as its loops turn."""
    splits = prod(a.programs for a in p.split)
    gathers = []
    multiply = dot = ZERO
    for statement, turns in _turns(p):
        visits = FIBERS * splits * turns
        if isinstance(statement, Gather) and statement.operand.rows:
            rows = visits * prod(p.axis(c).block for c in statement.operand.rows if c in statement.out.axes)
            width = prod(p.axis(a).block for a in statement.operand.axes)
            o = statement.operand
            # All columns: programs that follow one another take a tile's blocks of them in turn.
            gathers.append(GatherTerm(o.name, rows, width, o.nrows, o.width, ()))
        elif isinstance(statement, Product):
            flops = visits * _flops(p, statement)
            dot, multiply = (dot + flops, multiply) if statement.dot else (dot, multiply + flops)
        elif isinstance(statement, Add):
            added, owned = ITEMS * splits, statement.owned
            added *= prod(p.axis(a).block for a in statement.source.axes if a in p.letters)
            added_bytes = (added * prod(p.axis(a).block for a in statement.axes)).bytes
    dense = prod(a.programs for a in p.split if a.letter not in p.letters)
    taken = p.view.volume * dense // splits * (2 if p.half else 4)
    values = (2 * STORED if p.half else STORED.bytes) * dense
    index = FIBERS * (4 + (4 + p.view.volume // 8 if p.view.bitmap else 0))
    return Cost(
        stream=values + index * splits,
        expanded=FIBERS * p.view.volume * dense if p.view.bitmap else ZERO,
        gathers=tuple(gathers),
        registers=values,
        added_rows=added,
        added_bytes=added_bytes,
        output=ONE.bytes * (p.rows * p.width),
        multiply=multiply,
        dot=dot,
        precision=p.precision,
        owned=owned,
        programs=splits,
        turn=dot.of(FIBERS) // splits,
        taken=taken if dense < splits else 0,
        volume=p.view.volume,
        warps=p.warps,
    )


def _pair_cost(p: TileProgram) -> Cost:
    """Count a program over a task list: P blocks of the result, L pairs, N values stored by both operands."""
    multiply = dot = read = expanded = rows = ZERO
    for statement, turns in _turns(p):
        visits = FIBERS * turns
        if isinstance(statement, Product):
            of_item = all(t.level == ITEM for t in statement.inputs)
            flops = (ITEMS if of_item else visits) * _flops(p, statement)
            dot, multiply = (dot + flops, multiply) if statement.dot else (dot, multiply + flops)
        elif isinstance(statement, Scale):
            read += ITEMS * p.axis(statement.out.axes[0]).size * SCALE
            rows += ITEMS * 4
        elif isinstance(statement, Value):
            positions = prod(p.axis(a).size for a in statement.out.axes)
            read += (visits * positions).bytes
            expanded += visits * positions if p.stored(statement.operand).tiles.bitmap else ZERO
    return Cost(
        stream=STORED.bytes + FIBERS * 4 * len(p.view.pairs) + ITEMS * 8 + rows,
        gathers=(),
        registers=read,
        added_rows=ITEMS,
        added_bytes=(ITEMS * p.width).bytes,
        output=(ITEMS * p.width).bytes,
        multiply=multiply,
        dot=dot,
        precision=p.precision,
        owned=True,
        expanded=expanded,
        warps=p.warps,
    )


def _turns(p: TileProgram) -> Iterator[tuple[Statement, int]]:
    """The statements of a program over tiles, each with the turns that loops over positions take around it."""
    turns: list[int] = []
    for statement, depth in walk(p.body):
        del turns[depth:]
        if isinstance(statement, Loop):
            turns.append(p.axis(statement.letter).programs if statement.letter else 1)
        else:
            yield statement, prod(turns)


def _flops(p: TileProgram, s: Product) -> int:
    """Multiplications and additions of a product over tiles, padding included."""
    cells = prod(p.axis(a).block for a in s.out.axes)
    if not s.dot:
        return cells * len(s.inputs)
    return 2 * cells * prod(p.axis(a).block for a in s.right[-1].axes if a not in s.out.axes)


def _width(p: TileProgram, tile: Tile) -> int:
    """Elements of one lane of a tile, whole axes."""
    return prod(min(p.axis(a).size, p.axis(a).block) for a in tile.axes if a != LANES)


def _blocks(p: TileProgram, tile: Tile) -> int:
    """Elements of one lane of a tile as executed, padding included."""
    return prod(p.axis(a).block for a in tile.axes if a != LANES)


def _word_bytes(p: TileProgram, level: int, array: str) -> int:
    bits = word_bits(p.view.levels[level], array)
    if any(isinstance(c, Field) and c.array == array and c.frame and bits <= 8 for c in p.view.levels[level]):
        return 1
    return 2 if bits <= 16 and level == LEAF and p.view.lanes > 1 else 4 if bits <= 31 else 8
