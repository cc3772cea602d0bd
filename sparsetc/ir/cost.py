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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from operator import add, mul

from sparsetc.device.profile import DeviceProfile, by_precision
from sparsetc.ir.tile import Add, Gather, Loop, Product, Scale, Statement, TileProgram, Value, level_of

SYMBOLS = ("L*w", "L", "N*w", "N", "P*w", "P", "w", "")
"""What a count is a sum of, in this order: products of a symbol or 1 and, at even places, the bytes of a value."""


@dataclass(frozen=True)
class Count:
    """A sum of the products in `SYMBOLS`, each times a number."""

    factors: tuple[int, ...]

    def __add__(self, other: Count) -> Count:
        return Count(tuple(map(add, self.factors, other.factors)))

    def __mul__(self, n: int) -> Count:
        return Count(tuple(n * f for f in self.factors))

    __rmul__ = __mul__

    @property
    def bytes(self) -> Count:
        """The bytes of this many values; a count in bytes has none."""
        return Count(tuple(f for plain in self.factors[1::2] for f in (plain, 0)))

    def of(self, symbol: Count) -> int:
        """The factor of one symbol."""
        return self.factors[symbol.factors.index(1)]

    def at(self, symbols: tuple[int, ...]) -> int:
        """The number where each product in `SYMBOLS` has the value given."""
        return sum(map(mul, self.factors, symbols))

    def __str__(self) -> str:
        terms = ((f, s) for f, s in zip(self.factors, SYMBOLS, strict=True) if f)
        return " + ".join(f"{f}*{s}" if s and f != 1 else s or str(f) for f, s in terms) or "0"


FIBERS, STORED, ITEMS, ONE = (Count(tuple(int(at == place) for at in range(8))) for place in (1, 3, 5, 7))
ZERO = Count((0,) * 8)
PER_LEVEL = (ITEMS, FIBERS, STORED)
OVERLAP = 3
"""Exponent of the norm that adds resources' times: 1 would be one after another, infinity perfect overlap."""
TURN_POWER = 0.6
"""Power of its share of a whole tile that a turn over a smaller one takes (H200, TTMc of rank 32 x 32 and matrices in
tiles of 16 x 16; `benchmarks/results/ttmc_tiles.json`, `choices.json`)."""
SECTOR = 32
"""Bytes that reach registers of a gathered row at least."""
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
    split_rows: bool = False
    """Whether a row has several items: then results are added, not stored."""
    split_fibers: bool = False
    """Whether a fiber has several lanes: then results are added too."""

    def scaled(self, share: float) -> Statistics:
        """The statistics of a share of the nonzeros."""

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
    """Warps of a program."""
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
    """Count a program's statements, each as often as its level is visited and its loops turn."""
    p, splits = program, prod(a.programs for a in program.split)
    multiply = dot = sides = added = added_bytes = expanded = ZERO
    gathers, owned = [], True
    stream, registers = (_stored_tiles if p.view.sides else _task_list if p.view.pairs else _stored_words)(p, splits)
    for statement, visits in _visits(p, splits):
        if isinstance(statement, Gather) and statement.operand.rows:
            gathers.append(_gathered(p, statement, visits))
        elif isinstance(statement, Product):
            flops = visits * _flops(p, statement)
            dot, multiply = (dot + flops, multiply) if statement.dot else (dot, multiply + flops)
            if statement.dot and not _tiled(p):
                rows = visits * sum(_cells(p, t.axes) for t in statement.inputs)
                multiply, sides = multiply + rows, sides + rows.bytes
        elif isinstance(statement, Add):
            added = visits * _cells(p, set(statement.source.axes) & set(p.letters) - set(statement.axes))
            added_bytes, owned = (added * _added_width(p, statement)).bytes, statement.owned
        elif isinstance(statement, Scale):
            registers += visits * (p.axis(statement.out.axes[0]).size * SCALE)
            stream += 4 * ITEMS
        elif isinstance(statement, Value) and p.view.pairs:
            positions = visits * prod(p.axis(a).size for a in statement.out.axes)
            registers += positions.bytes
            expanded += positions if p.stored(statement.operand).tiles.bitmap else ZERO
    dense = _dense_programs(p)
    return Cost(
        stream=stream,
        gathers=tuple(gathers),
        registers=registers,
        added_rows=added,
        added_bytes=added_bytes,
        output=added_bytes if p.view.pairs else ONE.bytes * (p.rows * p.width),
        multiply=multiply,
        dot=dot,
        precision=p.precision,
        owned=owned,
        threads=1 if _tiled(p) else prod(1 << (a.block - 1).bit_length() for a in p.axes) // VECTOR,
        programs=splits,
        fibers=p.view.blocks,
        expanded=FIBERS * p.view.volume * dense if p.view.sides and p.view.bitmap else expanded,
        turn=dot.of(FIBERS) // splits if p.view.sides else None,
        taken=p.view.volume * dense // splits * (2 if p.half else 4) if dense < splits else 0,
        volume=p.view.volume,
        warps=p.warps,
        sides=sides,
    )


def _visits(p: TileProgram, splits: int) -> Iterator[tuple[Statement, Count]]:
    """The statements of a program, each with how often it is executed: below the item, tiles and pairs are counted."""
    levels = (ITEMS, FIBERS, FIBERS) if _tiled(p) else PER_LEVEL
    turns: list[int] = []
    for statement, depth in p.statements:
        del turns[depth:]
        if isinstance(statement, Loop):
            turns.append(p.axis(statement.letter).programs if statement.letter else 1)
        else:
            yield statement, levels[level_of(statement)] * (splits * prod(turns))


def _stored_words(p: TileProgram, splits: int) -> tuple[Count, Count]:
    """Bytes that are streamed, and that reach a thread's registers, of values and words of runs and of fibers."""
    stream = ZERO if p.view.pattern else STORED.bytes
    registers = stream
    for level, (count, widths) in enumerate(zip(PER_LEVEL, p.view.word_bytes, strict=True)):
        stream += count * sum(widths)
        looked_up = sum(lookup.every != 1 for lookup in p.view.lookups(level))
        registers += count * (VECTOR * (len(widths) + looked_up))
    if p.view.blocks:
        stream += FIBERS * 4
    return stream * splits, registers * splits


def _stored_tiles(p: TileProgram, splits: int) -> tuple[Count, Count]:
    """Bytes that are streamed, and that reach registers, of tiles."""
    values = (2 * STORED if p.half else STORED.bytes) * _dense_programs(p)
    return values + FIBERS * ((4 + (4 + p.view.volume // 8 if p.view.bitmap else 0)) * splits), values


def _task_list(p: TileProgram, splits: int) -> tuple[Count, Count]:
    """Bytes that are streamed, and that reach registers, of a task list and the values of both operands."""
    return STORED.bytes + FIBERS * 4 * len(p.view.pairs) + ITEMS * 8, ZERO


def _dense_programs(p: TileProgram) -> int:
    """Grid programs that read the same positions of a tile."""
    return prod(a.programs for a in p.split if a.letter not in p.letters)


def _gathered(p: TileProgram, s: Gather, visits: Count) -> GatherTerm:
    """The rows that a statement gathers."""
    o, width = s.operand, _cells(p, s.operand.axes)
    if _tiled(p):
        # All columns: programs that follow one another take a tile's blocks of them in turn.
        return GatherTerm(o.name, visits * _cells(p, set(o.rows) & set(s.out.axes)), width, o.nrows, o.width, ())
    # A block of the columns: neighbouring rows share most of what they gather, while it is near.
    return GatherTerm(o.name, visits, width, o.nrows, width, o.rows, SECTOR)


def _flops(p: TileProgram, s: Product) -> int:
    """Multiplications and additions of a product; padding is included in dots and over tiles."""
    if s.dot:
        return 2 * prod(a.block for a in p.axes if a.letter in {*s.out.axes, *s.contracted})
    return _cells(p, s.out.axes) * len(s.inputs)


def _added_width(p: TileProgram, s: Add) -> int:
    """Elements of a row that a program adds."""
    if p.view.sides:
        return _cells(p, s.axes)
    return p.width // prod(a.programs for a in p.axes if a.letter in p.output_axes)


def _cells(p: TileProgram, axes: Iterable[str]) -> int:
    """Elements that a program takes of axes but the lanes; over tiles padding is executed, and counted."""
    taken = (a for a in p.axes if a.letter in axes)
    return prod(a.block if _tiled(p) else min(a.size, a.block) for a in taken)


def _tiled(p: TileProgram) -> bool:
    """Whether a program takes tiles, or pairs of them."""
    return bool(p.view.sides or p.view.pairs)
