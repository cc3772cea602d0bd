"""What a tile program costs by the rates of a device: a roofline over counted resources, and the time that is expected.

In: a `Cost`, which `counting` makes of a program; then a part's `Statistics` and a `DeviceProfile`. Out: seconds a
resource, and of a whole part. The constants of the formulas are the profile's `laws`.

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

LINE = 128
"""Bytes of a cache line."""


class Cost(Counted):
    """What a program takes of a device's resources."""

    def __init__(self, program: TileProgram) -> None:
        """Count the program's statements."""
        super().__init__(program)
        self.precision = program.schedule.precision
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
        each, at, law = self.seconds(statistics, profile), statistics.symbols, profile.laws
        rate = (law["stored_rate"] if self.lane else 1.0) * profile.memory
        each["memory"] += self.stored(statistics) / rate - self.output.at(at) / profile.memory
        if self.met:
            each["add"] *= max(1, law["uncrowded"] / self.met) ** law["crowding"]
        staged = self.staged.at(at) * by_precision(profile.staged, self.precision)
        narrowed = law["conversion"] * self.converted.at(at) + law["halving"] * self.halved.at(at)
        each["dot"] += staged / profile.l1 + narrowed / profile.multiply
        if self.p.view.blocks:
            share = min(1.0, self.lane * law["lane_wait"]) if self.lane else 1.0
            each["l1"] += self.programs * statistics.fibers * profile.fiber * share
        if self.turn is not None:
            each["add"] *= law["added_from_tiles"]
            each["dot"] += self.programs * statistics.fibers * profile.tile * self._turn_share(profile)
        if not self.lane:  # whose programs' waits are those of their lanes
            each["programs"] = self.programs * statistics.items * profile.program
        busy = sum([t ** law["overlap"] for t in each.values()]) ** (1 / law["overlap"])
        if self.turn is None:
            return max(busy, self._waited(busy, statistics, profile))
        # The last programs run alone, and a tile's dots wait for its loads and for one another.
        alone = self.turn / (self._matrix_rate(profile) / profile.warps * self.p.schedule.warps)
        waits = law["waits_a_turn"] * statistics.chain + law["first_waits"]
        tall = self.p.view.values.volume >= law["tall"]
        if tall and self.listed != ZERO and self.precision in (ROUNDED, F16X3):
            waits += law["tall_waits"]
        return busy + waits * profile.wait + statistics.chain * alone

    def _waited(self, busy: float, statistics: Statistics, profile: DeviceProfile) -> float:
        """Seconds of the longest program: its rounds of dependent loads, which take longer while others load."""
        chain, law = statistics.chain * profile.wait, profile.laws
        if not self.p.view.blocks:
            return chain * min(1.0, law["idle_wait"] * (1 + sum([g.rows.of(STORED) > 0 for g in self.gathers])))
        near, line, among_others = law["near_wait"], 1.0, 1.0
        if self.p.schedule.registers >= law["roomy"]:
            near, line, among_others = law["roomy_near_wait"], law["roomy_line_wait"], law["roomy_busy_wait"]
        words = self.p.view.lanes * self.p.schedule.unroll * sum(self.p.view.word_bytes[-1])
        idle = near + (line - near) * min(1.0, words / LINE)
        if any(g.far(statistics, profile) for g in self.gathers):
            idle, among_others = law["far_wait"], law["far_busy_wait"]
        first = min(profile.wait, chain)  # which finds nothing near
        return first + idle * (chain - first) + max(0.0, among_others - idle) * min(busy, chain)

    def _turn_share(self, profile: DeviceProfile) -> float:
        """What a turn over a tile takes beside its dots, of the profile's `tile`."""
        volume, law = self.p.view.values.volume, profile.laws
        if self.readers < self.programs:  # each program takes a share of the tile
            taken = volume * self.readers // self.programs * (2 if self.p.half else 4)
            return min(1.0, taken / law["whole_turn"]) ** law["turn_power"]
        smaller = (volume / law["whole_tile"]) ** law["turn_power"]
        share = min(1.0, smaller * max(2, self.p.schedule.warps) / law["turn_warps"])
        return law["listed_turn"] * share if self.listed != ZERO and self.precision == ROUNDED else share

    def _matrix_rate(self, profile: DeviceProfile) -> float:
        """Flops a second of dots at this precision."""
        peak = profile.matrix(self.precision)
        if self.turn is None:
            return peak
        unit = ROUNDED if self.precision == F16X3 else self.precision  # halves go as bfloat16
        large = profile.laws["large_share"] if self.turn >= profile.laws["large_turn"] else 1
        return peak * by_precision(profile.tile_share, unit) * large


@lru_cache(maxsize=1024)
def cost_of(program: TileProgram) -> Cost:
    """What a program costs, as its format prices it where no tile program is run."""
    made: type[Cost] = getattr(program, "priced_by", Cost)
    return made(program)
