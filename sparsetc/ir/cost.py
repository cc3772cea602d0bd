"""What a tile program costs, counted from its own statements: bytes, gathers, additions, flops; and a roofline over it.

In: a `TileProgram`; then a part's `Statistics` and a device's `Rates`. Out: sympy expressions in the statistics; then
seconds a resource. The symbols::

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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

import sympy

from sparsetc import rates_record
from sparsetc.ir.rates import CPU, Rates
from sparsetc.ir.tile import LANES, Add, Gather, Loop, Product, Scale, Statement, Tile, TileProgram, Value, walk
from sparsetc.ir.view import ITEM, LEAF, Consecutive, Field, word_bits

ITEMS, FIBERS, STORED, WIDTH = sympy.symbols("P L N w", positive=True)
PER_LEVEL = (ITEMS, FIBERS, STORED)
OVERLAP = 3
"""Exponent of the norm that adds resources' times: 1 would be one after another, infinity perfect overlap."""
TILE_SHARE = 0.55
"""Of the matrix rate, what dots of tiles reach: 16 positions are contracted at once, and results scaled in between."""
WHOLE_TURN = 8192
"""Bytes of a tile from which a program's turn over a share of it takes `Rates.tile`; over a smaller share less, as the
0.6th power (H200, TTMc of rank 32 x 32: 1.5 ns for 4 KB, 2.4 for 8 KB)."""
WHOLE_TILE, TURN_WARPS = 2048, 3
"""Positions of a tile that a program takes whole from which its turn takes `Rates.tile`; of a smaller one less, as the
0.6th power, for so many warps, and more or less as they are: what waits is a program (H200, matrices in tiles of 16 x
16, beside their dots: 0.40 ns for 2 warps, 0.82 to 1.0 for 4; `benchmarks/results/choices.json`)."""
IDLE_WAIT = 0.25
"""Of `Rates.wait`, what each of the loads of a round of a run takes where memory is not busy: of words, and of the rows
that they name (H200: SpMM 0.3 to 0.5 us a round, MTTKRP of order 3 0.75; `benchmarks/results/choices.json`)."""
SCALE = 4
"""Bytes of a row's scale."""
VECTOR = 4
"""Elements a thread loads at once of a gathered row."""
STAGED = {"tf32": 3}
"""How often a side of a dot of gathered rows passes between registers and shared memory; 4 where it is split, or
rounded, first (H200, TTMc of rank 32 x 32 by runs: 35 ps a nonzero in tf32, 45 in bf16, 58 in tf32x3, six tensors)."""


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
    """Whether a fiber has several lanes: likewise."""

    def scaled(self, share: float) -> Statistics:
        """Those of a share of the nonzeros."""

        def part(n: int) -> int:
            return max(1, int(n * share)) if share else 0

        items, fibers, stored, nnz = (part(n) for n in (self.items, self.fibers, self.stored, self.nnz))
        return replace(self, items=items, fibers=fibers, stored=stored, nnz=nnz)

    def substitutions(self) -> dict[sympy.Symbol, int]:
        """Values of the symbols."""
        return {ITEMS: self.items, FIBERS: self.fibers, STORED: self.stored, WIDTH: self.itemsize}


def rates_of(backend: str) -> Rates:
    """What generated programs of a backend run on: for ``triton`` the current GPU as it was calibrated, if it was."""
    return CPU if backend == "torch" else rates_record.of_current_device() or Rates()


@dataclass(frozen=True)
class GatherTerm:
    """Rows of one operand that a program gathers."""

    operand: str
    rows: sympy.Expr
    row_bytes: sympy.Expr
    table_rows: int
    table_bytes: sympy.Expr
    """What caches must hold for a row to be found there again."""
    letters: tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """Counts as expressions of the statistics."""

    stream: sympy.Expr
    gathers: tuple[GatherTerm, ...]
    registers: sympy.Expr
    added_rows: sympy.Expr
    added_bytes: sympy.Expr
    output: sympy.Expr
    multiply: sympy.Expr
    dot: sympy.Expr
    precision: str
    owned: bool
    programs: int = 1
    """Grid programs an item."""
    fibers: bool = False
    """Whether nonzeros are reached through fibers."""
    expanded: sympy.Expr = sympy.S.Zero
    """Positions of bitmap tiles."""
    turn: sympy.Expr | None = None
    """Flops of dots in one turn of a program over a tile; None where there are no tiles."""
    taken: int = 0
    """Bytes of a tile that a program takes in one turn, where it does not take all."""
    volume: int = 0
    """Positions of a tile."""
    warps: int = 1
    """Of a program."""
    sides: sympy.Expr = sympy.S.Zero
    """Bytes of gathered rows that are sides of dots."""

    def describe(self) -> list[str]:
        """Lines for a reader: each count as an expression."""
        lines = [f"streams {self.stream} bytes, writes {self.output} bytes"]
        lines += [f"gathers {g.rows} rows of {g.row_bytes} bytes of {g.operand}" for g in self.gathers]
        lines.append(f"{'stores' if self.owned else 'adds'} {self.added_rows} rows")
        lines.append(f"{self.multiply} flops outside dots" + (f", {self.dot} inside" if self.dot != 0 else ""))
        return lines

    def work(self, statistics: Statistics) -> tuple[float, float, float]:
        """(bytes that device memory moves at least, bytes that reach registers, flops in dots and outside)."""
        moved, read, flops = self._counted(*(float(n) for n in statistics.substitutions().values()))
        return moved, read, flops

    @cached_property
    def _counted(self) -> Callable[..., tuple[float, float, float]]:
        """`work` as a function of the symbols: it is asked for at many thresholds."""
        counts = (self.stream + self.output, self.registers, self.multiply + self.dot)
        counted: Callable[..., tuple[float, float, float]] = sympy.lambdify(
            (ITEMS, FIBERS, STORED, WIDTH), counts, "math"
        )
        return counted

    def seconds(self, statistics: Statistics, rates: Rates) -> dict[str, float]:
        """Seconds each resource alone would take."""
        at = statistics.substitutions()

        def value(expression: sympy.Expr) -> float:
            return float(expression.xreplace(at))

        missed = l2 = 0.0
        runs = dict(statistics.runs)
        for g in self.gathers:
            rows = value(g.rows)
            fresh = max((self.programs * runs.get(c, statistics.stored) for c in g.letters), default=rows)
            moved = min(rows, fresh) * value(g.row_bytes)
            table = value(g.table_bytes)
            if table > rates.l1_bytes:
                l2 += moved
            missed += max(moved * (1 - rates.l2_bytes / table), 0.0) if table > rates.l2_bytes else min(moved, table)
        return {
            "memory": (value(self.stream + self.output) + missed) / rates.memory,
            "l2": l2 / rates.l2,
            "l1": value(self.registers) / rates.l1,
            "add": 0.0 if self.owned else value(self.added_bytes) / rates.add,
            "multiply": value(self.multiply) / rates.multiply + value(self.expanded) / rates.expand,
            "dot": value(self.dot) / self._matrix_rate(rates),
        }

    def roofline(self, statistics: Statistics, rates: Rates) -> tuple[str, float]:
        """(resource, seconds): the one that bounds the part, and the time it alone would take."""
        each = self.seconds(statistics, rates)
        resource = max(each, key=lambda name: each[name])
        return resource, each[resource]

    def predicted(self, statistics: Statistics, rates: Rates) -> float:
        """Seconds expected: resources overlap, but not fully; programs and fibers take time to start.

        The output is written, by zeros, before the programs run.
        """
        each = self.seconds(statistics, rates)
        written = float(self.output.xreplace(statistics.substitutions())) / rates.memory
        each["memory"] -= written
        staged = float(self.sides.xreplace(statistics.substitutions())) * STAGED.get(self.precision, 4)
        each["dot"] += staged / rates.l1
        if self.fibers:
            each["l1"] += self.programs * statistics.fibers * rates.fiber
        if self.turn is not None:
            each["dot"] += self.programs * statistics.fibers * rates.tile * self._turn_share
        each["programs"] = self.programs * statistics.items * rates.program
        busy = sum(t**OVERLAP for t in each.values()) ** (1 / OVERLAP)
        if self.turn is None:
            return written + max(busy, statistics.chain * rates.wait * self._idle_share)
        # The last programs run alone, and a tile's dots wait for its loads and for one another.
        alone = float(self.turn) / (self._matrix_rate(rates) / rates.warps * self.warps)
        return written + busy + statistics.chain * (rates.wait + alone)

    @property
    def _idle_share(self) -> float:
        """What a round of dependent loads takes, of `Rates.wait`, while memory has little to do."""
        if self.fibers:
            return 1.0
        return min(1.0, IDLE_WAIT * (1 + sum(STORED in g.rows.free_symbols for g in self.gathers)))

    @property
    def _turn_share(self) -> float:
        """What a turn over a tile takes beside its dots, of `Rates.tile`."""
        if self.taken:
            return min(1.0, self.taken / WHOLE_TURN) ** 0.6
        return min(1.0, (self.volume / WHOLE_TILE) ** 0.6 * max(2, self.warps) / TURN_WARPS)

    def _matrix_rate(self, rates: Rates) -> float:
        """Flops a second of dots at this precision."""
        peak = rates.matrix(self.precision)
        return peak if self.turn is None else peak * TILE_SHARE


@lru_cache(maxsize=1024)
def cost(program: TileProgram) -> Cost:
    """Count a program's statements, each as often as its level is visited."""
    if program.view.sides:
        return _tile_cost(program)
    if program.view.pairs:
        return _pair_cost(program)
    p = program
    splits = prod(a.programs for a in p.axes)
    gathers, registers = [], sympy.Integer(0)
    multiply = dot = staged = added = added_bytes = sympy.Integer(0)
    threads = max(1, min(32, prod(a.block for a in p.axes) // VECTOR))
    owned = True
    for statement, _ in walk(p.body):
        if isinstance(statement, Gather) and statement.operand.rows:
            count = PER_LEVEL[statement.out.level] * splits
            width = _width(p, statement.out)
            o = statement.operand
            # A block of the columns: neighbouring rows share most of what they gather, while it is near.
            gathers.append(GatherTerm(o.name, count, width * WIDTH, o.nrows, o.nrows * width * WIDTH, o.rows))
            registers += count * sympy.Max(width * WIDTH, 32)
        elif isinstance(statement, Product):
            level = max((t.level for t in statement.inputs), default=ITEM)
            flops = PER_LEVEL[level] * splits * len(statement.inputs) * _width(p, statement.out)
            if statement.dot:
                dot += 2 * PER_LEVEL[level] * splits * _blocks(p, statement.out)
                sides = sum(_width(p, t) for t in statement.inputs)
                multiply += PER_LEVEL[level] * splits * sides
                staged += PER_LEVEL[level] * splits * sides * WIDTH
            else:
                multiply += flops
        elif isinstance(statement, Add):
            added = PER_LEVEL[statement.key.level] * splits
            added_bytes = added * (p.width // prod(a.programs for a in p.axes if a.letter in p.output_axes)) * WIDTH
            owned = statement.owned
        elif isinstance(statement, Value) and not p.view.pattern:
            registers += STORED * splits * threads * WIDTH
    stream = sympy.Integer(0) if p.view.pattern else STORED * WIDTH * splits
    for level, coordinates in enumerate(p.view.levels):
        widths = {c.array: _word_bytes(p, level, c.array) for c in coordinates if isinstance(c, Field)}
        stream += PER_LEVEL[level] * sum(widths.values()) * splits
        looked_up = sum(isinstance(c, Consecutive) or bool(isinstance(c, Field) and c.base) for c in coordinates)
        registers += PER_LEVEL[level] * splits * threads * VECTOR * (len(widths) + looked_up)
    if p.view.blocks:
        stream += FIBERS * 4 * splits
    output = sympy.Integer(p.rows * p.width) * WIDTH
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
        programs=splits,
        fibers=p.view.blocks,
        sides=staged,
    )


def _tile_cost(p: TileProgram) -> Cost:
    """Count a program over tiles: N positions stored, L tiles, each statement as often as its loops turn."""
    splits = prod(a.programs for a in p.split)
    gathers, registers = [], sympy.Integer(0)
    multiply = dot = sympy.Integer(0)
    for statement, turns in _turns(p):
        visits = FIBERS * splits * turns
        if isinstance(statement, Gather) and statement.operand.rows:
            rows = visits * prod(p.axis(c).block for c in statement.operand.rows if c in statement.out.axes)
            width = prod(p.axis(a).block for a in statement.operand.axes)
            o = statement.operand
            # All columns: programs that follow one another take a tile's blocks of them in turn.
            gathers.append(GatherTerm(o.name, rows, width * WIDTH, o.nrows, o.nrows * o.width * WIDTH, ()))
            registers += rows * width * WIDTH
        elif isinstance(statement, Product):
            flops = visits * _flops(p, statement)
            dot, multiply = (dot + flops, multiply) if statement.dot else (dot, multiply + flops)
        elif isinstance(statement, Add):
            rows = prod(p.axis(a).block for a in statement.source.axes if a in p.letters)
            width = prod(p.axis(a).block for a in statement.axes)
            added, added_bytes, owned = ITEMS * splits * rows, ITEMS * splits * rows * width * WIDTH, statement.owned
    dense = prod(a.programs for a in p.split if a.letter not in p.letters)
    taken = p.view.volume * dense // splits * (2 if p.half else 4)
    element = sympy.Integer(2) if p.half else WIDTH
    index = FIBERS * (4 + (4 + p.view.volume // 8 if p.view.bitmap else 0))
    return Cost(
        stream=STORED * element * dense + index * splits,
        expanded=FIBERS * p.view.volume * dense if p.view.bitmap else sympy.Integer(0),
        gathers=tuple(gathers),
        registers=registers + STORED * element * dense,
        added_rows=added,
        added_bytes=added_bytes,
        output=sympy.Integer(p.rows * p.width) * WIDTH,
        multiply=multiply,
        dot=dot,
        precision=p.precision,
        owned=owned,
        programs=splits,
        turn=dot / (FIBERS * splits),
        taken=taken if dense < splits else 0,
        volume=p.view.volume,
        warps=p.warps,
    )


def _pair_cost(p: TileProgram) -> Cost:
    """Count a program over a task list: P blocks of the result, L pairs, N values stored by both operands."""
    multiply = dot = read = expanded = rows = sympy.Integer(0)
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
            read += visits * positions * WIDTH
            expanded += visits * positions if p.stored(statement.operand).tiles.bitmap else 0
    return Cost(
        stream=STORED * WIDTH + FIBERS * 4 * len(p.view.pairs) + ITEMS * 8 + rows,
        gathers=(),
        registers=read,
        added_rows=ITEMS,
        added_bytes=ITEMS * p.width * WIDTH,
        output=ITEMS * p.width * WIDTH,
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
    return 2 if bits <= 16 and level == LEAF and p.view.narrow else 4 if bits <= 31 else 8
