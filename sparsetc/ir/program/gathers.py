"""What rows that a program gathers of a dense operand move, through the L2 cache and from device memory.

In: how often rows are gathered, and the table they are of; then a part's `Statistics` and a `DeviceProfile`. Out:
bytes. How much of a table must be near follows from the order of programs: of an axis that is split over the grid, one
block, where the grid takes slabs, and else all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsetc.device.profile import DeviceProfile
from sparsetc.ir.program.count import ONE, Count

if TYPE_CHECKING:
    from sparsetc.ir.program.statistics import Statistics

SLAB_POWER = 0.085
"""Power of the number of slabs by which gathers from the L2 cache are faster than in any order of blocks (H200: rows of
128 bytes were gathered at 11.3, 9.1 and 8.1 TB/s from tables of 1, 13 and 51 MB; SpMM of 4,096 columns in 32 slabs, of
matrices of which all such rows lie in L2, was 1.34 to 1.8 times as fast)."""


@dataclass(frozen=True)
class GatherTerm:
    """Rows of one operand that a program gathers."""

    operand: str
    rows: Count
    width: int
    """Elements of a row."""
    table_rows: int
    table_width: int
    """Elements of a row that caches must hold for it to be found there again by neighbours."""
    held_width: int
    """Elements of a row that one program or another takes at a time: all of it, but of slabs."""
    whole_width: int
    """Elements of a row of the operand."""
    letters: tuple[str, ...] = ()
    """Sparse letters of the operand whose coordinates may repeat as stored."""
    sector: int = 0
    """Bytes that reach registers of a row at least."""
    slabs: int = 1
    """Slabs that the operand is taken in, where these are known to be gathered faster."""
    itemsize: Count = ONE.bytes
    """Bytes of an element: those of a value, or of bfloat16."""

    def far(self, statistics: Statistics, profile: DeviceProfile) -> bool:
        """Whether the table is too large for the L2 cache to hold most of it."""
        held = self.table_rows * self.held_width * self.itemsize.at(statistics.symbols)
        return held > 2 * profile.l2_bytes

    def moved(self, statistics: Statistics, profile: DeviceProfile, programs: int) -> tuple[float, float]:
        """(bytes from the L2 cache, at the profile's rate; those of them from device memory), by programs an item."""
        size, runs = self.itemsize.at(statistics.symbols), dict(statistics.runs)
        rows = self.rows.at(statistics.symbols)
        fresh = max((programs * runs.get(c, statistics.stored) for c in self.letters), default=rows)
        moved = min(rows, fresh) * self.width * size
        own, held, whole = (
            self.table_rows * width * size for width in (self.table_width, self.held_width, self.whole_width)
        )
        far = moved if own > profile.l1_bytes else moved * max(0.0, 1 - profile.l1_bytes / max(1, whole))
        missed = moved * (1 - profile.l2_bytes / held) if held > profile.l2_bytes else min(moved, whole)
        return far * self.slabs**-SLAB_POWER, missed
