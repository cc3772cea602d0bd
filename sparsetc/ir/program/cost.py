"""What a tile program costs by the rates of a device: a roofline over counted resources, and the time that is expected.

In: a `Cost`, which `counting` makes of a program; then a part's `Statistics` and a `DeviceProfile`. Out: seconds a
resource, and of a whole part.

Resources, each with the time it alone would take:

    memory    index words, values and output, once, and what gathers miss in the L2 cache, from device memory
    l2        gathered rows of tables too large for the L1 cache
    l1        all that reaches registers: gathered rows, and index words, which every thread of a row reads
    add       atomic additions of output rows
    multiply  multiplications and additions outside dots, and bits of tiles expanded
    dot       multiplications and additions inside dots, as executed, padding included
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from sparsetc.device.profile import DeviceProfile, by_precision
from sparsetc.ir.plan import F16X3, ROUNDED
from sparsetc.ir.program.counting import FIBERS, STORED, VECTOR, ZERO, Counted, Statistics
from sparsetc.ir.program.tile import TileProgram

OVERLAP = 3
"""Exponent of the norm that adds resources' times: 1 would be one after another, infinity perfect overlap."""
TURN_POWER = 0.6
"""Power of its share of a whole tile that a turn over a smaller one takes (H200, TTMc of rank 32 x 32 and matrices in
tiles of 16 x 16; `benchmarks/results/ttmc_tiles.json`, `choices.json`)."""
WAITS_A_TURN, FIRST_WAITS = 0.55, 4.0
"""Rounds of loads that a turn over a tile waits for, while those of later turns are under way, and that the first turns
wait for beside (H200, SpMM by windows, of 8 tiles an item to 344: `benchmarks/results/windows.json`, `spmm.json`)."""
LISTED_TURN = 0.4
"""What part of a turn over a tile one over a window takes in bfloat16, whose side is loaded for the dot at once (H200,
SpMM at `"medium"`, 16 matrices at 32 to 512 columns: `benchmarks/results/spmm.json`, as what follows)."""
TALL, TALL_WAITS = 4096, 3.0
"""Positions of windows from which those of 16 bits wait for so many rounds of loads more, before the first dot."""
ADDED_FROM_TILES = 3
"""How many times as long as the profile's single rows those take that programs of tiles add, many at once (ditto)."""
UNCROWDED, CROWDING = 16384, 0.35
"""Rows, copies included, from which additions in no order do not wait for one another, and the power of what they lack
by which additions to fewer rows take longer (H200, leaves of MM-CSF at rank 32, copies of which 4, 16 and 64 were
added to: 91 rows 293 to 103 us, 686 rows 353 to 116, 875 rows 590 to 362, 18,154 rows 744 to 670;
`benchmarks/results/one_copy.json`)."""
LANE_WAIT, STORED_RATE = 0.31, 0.68
"""Share of the profile's `fiber` that a lane which stores a row of its own takes for each thread, up to all of it; and
share of the rate at which memory is read at which such lanes store, neighbours in time not lying side by side (H200,
TTV and TTM of rank 16 and 64 of 35 M nonzeros to 22 M rows, within 5 %: `benchmarks/results/rows_stored.json`)."""
LINE, NEAR_WAIT = 128, 0.35
"""Bytes of a cache line; and share of the profile's `wait` that a round of loads over fibers takes where a line of
words serves many rounds and there is little else to load (H200, SpMM by rows of 13 matrices: rounds of 128 bytes of
words at 32 columns took 0.8 to 1.2 us, of 16 bytes 0.33 to 0.4 at 128, 0.8 at 4096; `benchmarks/results/spmm.json`)."""
ROOMY, ROOMY_WAITS = 64, (0.09, 0.78, 0.35)
"""Registers of a thread from which a round's loads are under way together; and the share of the profile's `wait` that a
round then takes where a line of words serves many, where it serves one, and where there is as much else to load as
rounds take (H200, as before: 0.17 us at 128 columns, 0.78 at 32)."""
FAR_WAIT, FAR_BUSY_WAIT = 1.5, 3.0
"""How many of the profile's `wait` a round over fibers takes whose gathered rows lie in device memory, where there is
little else to load, and where there is as much as rounds take (H200, MTTKRP in mode 1 of a tensor like delicious by
rows that are not cut: 1,112 rounds, 4.2 ms; `benchmarks/results/deterministic.json`)."""
LISTED_ROW, LISTED_BYTE = 80, 3.4
"""Bytes that are zeroed in one piece in the time that a row, and each byte of it, takes which is zeroed by its number
(H200: rows of 4 to 16,384 bytes, a tenth and two fifths of them, 0.2 to 1.4 TB/s where all of them went at 4.65)."""
LARGE_TURN, LARGE_SHARE = 1 << 19, 1.25
"""Flops of a turn's dots from which they run at so many times the share of the peak that those of smaller turns do
(H200, SpMM by windows of 64 rows in tf32x3: c2000_5 at 4,096 columns, 527 us, 872 by windows of 16)."""


class Cost(Counted):
    """What a program takes of a device's resources."""

    def __init__(self, program: TileProgram) -> None:
        """Count the program's statements."""
        super().__init__(program)
        self.precision = program.precision
        tiles = "tile" in [axis.name for axis in program.view.loops]
        self.turn = self.dot.of(FIBERS) // self.programs if tiles else None
        """Flops of dots in one turn of a program over a tile; None where there are no tiles."""
        self.rounded = tuple([(o.name, o.nrows * o.width) for o in program.operands if o.rounded])
        """The operands that are rounded before the program runs, and how many elements each has."""
        self.split = tuple([(o.name, o.nrows * o.width) for o in program.operands if o.split])
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
        row = 1 if self.sides else prod([1 << (a.block - 1).bit_length() for a in self.p.axes]) // VECTOR
        own = self.registers.at(at) * max(1, min(profile.warp_size, row))
        return own + sum([g.rows.at(at) * max(g.width * g.itemsize.at(at), g.sector) for g in self.gathers])

    def seconds(self, statistics: Statistics, profile: DeviceProfile) -> dict[str, float]:
        """Seconds each resource alone would take."""
        at = statistics.symbols
        gathered, once = [g.moved(statistics, profile, self.programs) for g in self.gathers], self.once.at(at)
        missed, again = sum([missed for _, missed in gathered]), self.stream.at(at) - once
        # Blocks of one item follow one another and find its storage near; slabs read all of it again.
        if self.slabs > 1 and once > profile.l2_bytes:
            missed, again = missed + again, 0
        return {
            "memory": (once + self.output.at(at) + missed) / profile.memory,
            "l2": (sum([far for far, _ in gathered]) + again) / profile.l2,
            "l1": self._read(statistics, profile) / profile.l1,
            "add": 0.0 if self.owned else self.added_bytes.at(at) / profile.add,
            "multiply": self.multiply.at(at) / profile.multiply + self.expanded.at(at) / profile.expand,
            "dot": self.dot.at(at) / self._matrix_rate(profile),
        }

    def stored(self, statistics: Statistics) -> int:
        """Bytes of the rows that the program stores."""
        at = statistics.symbols
        return min(self.output.at(at), self.added_bytes.at(at)) if self.owned else 0

    def roofline(self, statistics: Statistics, profile: DeviceProfile) -> tuple[str, float]:
        """(resource, seconds): the one that bounds the part, and the time it alone would take."""
        each = self.seconds(statistics, profile)
        resource = max(each, key=lambda name: each[name])
        return resource, each[resource]

    def predicted(self, statistics: Statistics, profile: DeviceProfile) -> float:
        """Seconds expected: resources overlap, but not fully; programs and fibers take time to start.

        Rows that are stored are written meanwhile; what must be zeros before is left to whoever knows all parts.
        """
        each, at = self.seconds(statistics, profile), statistics.symbols
        rate = (STORED_RATE if self.lane else 1.0) * profile.memory
        each["memory"] += self.stored(statistics) / rate - self.output.at(at) / profile.memory
        if self.met:
            each["add"] *= max(1, UNCROWDED / self.met) ** CROWDING
        staged = self.staged.at(at) * by_precision(profile.staged, self.precision)
        each["dot"] += staged / profile.l1 + self.converted.at(at) / profile.multiply
        if self.p.view.blocks:
            share = min(1.0, self.lane * LANE_WAIT) if self.lane else 1.0
            each["l1"] += self.programs * statistics.fibers * profile.fiber * share
        if self.turn is not None:
            each["add"] *= ADDED_FROM_TILES
            each["dot"] += self.programs * statistics.fibers * profile.tile * self._turn_share(profile)
        if not self.lane:  # whose programs' waits are those of their lanes
            each["programs"] = self.programs * statistics.items * profile.program
        busy = sum([t**OVERLAP for t in each.values()]) ** (1 / OVERLAP)
        if self.turn is None:
            return max(busy, self._waited(busy, statistics, profile))
        # The last programs run alone, and a tile's dots wait for its loads and for one another.
        alone = self.turn / (self._matrix_rate(profile) / profile.warps * self.p.warps)
        waits = WAITS_A_TURN * statistics.chain + FIRST_WAITS
        tall = self.p.view.values.volume >= TALL
        if tall and self.listed != ZERO and self.precision in (ROUNDED, F16X3):
            waits += TALL_WAITS
        return busy + waits * profile.wait + statistics.chain * alone

    def _waited(self, busy: float, statistics: Statistics, profile: DeviceProfile) -> float:
        """Seconds of the longest program: its rounds of dependent loads, which take longer while others load."""
        chain = statistics.chain * profile.wait
        if not self.p.view.blocks:
            return chain * min(1.0, profile.idle_wait * (1 + sum([g.rows.of(STORED) > 0 for g in self.gathers])))
        near, line, among_others = ROOMY_WAITS if self.p.registers >= ROOMY else (NEAR_WAIT, 1.0, 1.0)
        words = self.p.view.lanes * self.p.unroll * sum(self.p.view.word_bytes[-1])
        idle = near + (line - near) * min(1.0, words / LINE)
        if any(g.far(statistics, profile) for g in self.gathers):
            idle, among_others = FAR_WAIT, FAR_BUSY_WAIT
        first = min(profile.wait, chain)  # which finds nothing near
        return first + idle * (chain - first) + max(0.0, among_others - idle) * min(busy, chain)

    def _turn_share(self, profile: DeviceProfile) -> float:
        """What a turn over a tile takes beside its dots, of the profile's `tile`."""
        volume = self.p.view.values.volume
        if self.readers < self.programs:  # each program takes a share of the tile
            taken = volume * self.readers // self.programs * (2 if self.p.half else 4)
            return min(1.0, taken / profile.whole_turn) ** TURN_POWER
        share = min(1.0, (volume / profile.whole_tile) ** TURN_POWER * max(2, self.p.warps) / profile.turn_warps)
        return LISTED_TURN * share if self.listed != ZERO and self.precision == ROUNDED else share

    def _matrix_rate(self, profile: DeviceProfile) -> float:
        """Flops a second of dots at this precision."""
        peak = profile.matrix(self.precision)
        if self.turn is None:
            return peak
        unit = ROUNDED if self.precision == F16X3 else self.precision  # halves go as bfloat16
        return peak * by_precision(profile.tile_share, unit) * (LARGE_SHARE if self.turn >= LARGE_TURN else 1)


@lru_cache(maxsize=1024)
def cost_of(program: TileProgram) -> Cost:
    """What a program costs, as its format prices it where no tile program is run."""
    made: type[Cost] = getattr(program, "priced_by", Cost)
    return made(program)
