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

from dataclasses import dataclass

from sparsetc.device.profile import DeviceProfile, by_precision
from sparsetc.ir.plan import F16X3, ROUNDED
from sparsetc.ir.program.count import STORED, ZERO, Count
from sparsetc.ir.program.gathers import GatherTerm
from sparsetc.ir.program.laws import (
    ADDED_FROM_TILES,
    CROWDING,
    FAR_BUSY_WAIT,
    FAR_WAIT,
    FIRST_WAITS,
    LANE_WAIT,
    LARGE_SHARE,
    LARGE_TURN,
    LINE,
    LISTED_TURN,
    NEAR_WAIT,
    OVERLAP,
    ROOMY,
    ROOMY_WAITS,
    STORED_RATE,
    TALL,
    TALL_WAITS,
    TURN_POWER,
    UNCROWDED,
    WAITS_A_TURN,
)
from sparsetc.ir.program.statistics import Statistics


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
    round_bytes: int = LINE
    """Bytes of the words that a round of loads begins with, of nonzeros that are reached through fibers."""
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
    most_registers: int = 0
    """Registers that a thread may have; 0 where the compiler decides."""
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
            return max(busy, self._waited(busy, statistics, profile))
        # The last programs run alone, and a tile's dots wait for its loads and for one another.
        alone = self.turn / (self._matrix_rate(profile) / profile.warps * self.warps)
        waits = WAITS_A_TURN * statistics.chain + FIRST_WAITS
        if self.listed and self.precision in (ROUNDED, F16X3) and self.volume >= TALL:
            waits += TALL_WAITS
        return busy + waits * profile.wait + statistics.chain * alone

    def _waited(self, busy: float, statistics: Statistics, profile: DeviceProfile) -> float:
        """Seconds of the longest program: its rounds of dependent loads, which take longer while others load."""
        chain = statistics.chain * profile.wait
        if not self.fibers:
            return chain * min(1.0, profile.idle_wait * (1 + sum(g.rows.of(STORED) > 0 for g in self.gathers)))
        near, line, among_others = ROOMY_WAITS if self.most_registers >= ROOMY else (NEAR_WAIT, 1.0, 1.0)
        idle = near + (line - near) * min(1.0, self.round_bytes / LINE)
        if any(g.far(statistics, profile) for g in self.gathers):
            idle, among_others = FAR_WAIT, FAR_BUSY_WAIT
        first = min(profile.wait, chain)  # which finds nothing near
        return first + idle * (chain - first) + max(0.0, among_others - idle) * min(busy, chain)

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
