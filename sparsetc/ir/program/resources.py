"""Numbers of costs: a `Count`, linear in the stored numbers of a part, and `Statistics`, which are these numbers.

In: the numbers of a packed storage, or a planner's estimate of them. Out: what a program reads, adds and multiplies, of
which `Cost` counts how often and says how long it takes. The symbols of counts::

    P  work items      L  fibers (lanes stored)      N  nonzeros stored, padding included      w  bytes of a value

L counts the stored tiles of a part in tiles, and the pairs of a task list, whose N are the values of both operands. In
text, R are rows of the result. A text has no sizes of modes: one source serves many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsetc.device.profile import DeviceProfile
from sparsetc.support import NamedInts, Names, cached_property

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
VALUE, VALUES = ONE.bytes, STORED.bytes
"""The bytes of one value, and of those that are stored."""
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

SECTOR = 32
"""Bytes that reach registers of a gathered row at least."""


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
    itemsize: Count = VALUE

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


def moved(
    gathers: Iterable[GatherTerm], statistics: Statistics, profile: DeviceProfile, programs: int
) -> list[tuple[float, float]]:
    """Return what each term moves."""
    return [g.moved(statistics, profile, programs) for g in gathers]


def missing(pairs: Sequence[tuple[int, float]], rows: int) -> float:
    """Return the share of gathers that miss a cache of so many rows."""
    return next((share for held, share in pairs if held >= rows), pairs[-1][1] if pairs else 0.0)
