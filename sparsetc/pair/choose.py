"""Which path a contraction takes: each one's expected time, from counts made before any task is.

In: a `Meeting` and its cut into blocks. Out: a `Choice`. A path that would not fit, or that the type has no kernel for,
is left out under ``plan="auto"`` and refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf

import torch

from sparsetc.errors import PlanError
from sparsetc.ir.plan import Plan, requested
from sparsetc.ir.tile import TileProgram
from sparsetc.options import Options
from sparsetc.pair.cut import WHOLE, Bitmaps, BlockWork, Cut
from sparsetc.pair.meeting import Meeting, Sizes
from sparsetc.pair.plans import check_pairs, storages_of
from sparsetc.pair.populations import Populations, Split
from sparsetc.pair.prices import (
    BLOCK_LAUNCHES,
    DENSE_LAUNCHES,
    HYBRID_LAUNCHES,
    MERGE_LAUNCHES,
    Rates,
    block_seconds,
    dense_seconds,
    rates_of,
    scalar_seconds,
)
from sparsetc.pair.sums import kept_dtype
from sparsetc.pair.symbolic import TASK_BYTES, Budget
from sparsetc.planner.requests import HYBRID

FEW_TASKS = 4
"""Tasks a nonzero up to which the scalar path is taken unseen: it then costs no more than cutting into blocks does."""
WORD = 32
"""Bits of a word of a bitmap."""

Expected = tuple[tuple[str, float | None], ...]
"""(path, seconds), the cheapest first; None for one that does not fit, or has no kernel for the type."""


@dataclass(frozen=True)
class Choice:
    """A path, how blocks are stored, and why."""

    name: str
    bitmaps: Bitmaps
    reason: str
    split: Split | None = None
    """Of the hybrid path."""

    def __repr__(self) -> str:
        return f"Choice({self.name!r}, {self.reason})"


@dataclass(frozen=True)
class Question:
    """What a choice is made by. The cut takes counting, so it is asked for where needed."""

    meeting: Meeting
    cut: Callable[[], Cut]
    dtype: torch.dtype
    backend: str
    settings: Options
    budget: Budget
    swapped: bool = False
    """Whether x is the equation's second operand."""

    @property
    def wanted(self) -> Plan:
        """The plan given, or the request for one."""
        return requested(self.settings.plan)

    @property
    def width(self) -> int:
        """Bytes of a value as sums keep it."""
        return kept_dtype(self.dtype).itemsize

    @cached_property
    def populations(self) -> Populations:
        """What thresholds are found by."""
        return Populations.of(self.cut())

    @cached_property
    def rates(self) -> Rates:
        """Of the device."""
        return rates_of(self.meeting.x_key.device, self.settings)

    @property
    def precision(self) -> str:
        """By which rates are named."""
        return "float64" if self.dtype in _DOUBLE else self.settings.effective_precision()

    def bitmaps(self, work: BlockWork | None = None) -> Bitmaps:
        """Which operands' blocks are read as bitmaps: as asked, or whole where that takes a quarter of the memory limit
        or less; else the larger operand's, or both.

        Blocks that do not fill a word of bits are read whole.
        """
        asked = storages_of(self.wanted)
        x, y = reversed(asked) if self.swapped else asked
        own = (x == "bitmap", y == "bitmap")
        if x == y == "auto":
            own = self._largest(work or self.cut().work) if self._has_bitmaps() else WHOLE
        if own == WHOLE:
            return own
        cut = self.cut()
        return own[0] and cut.x.volume >= WORD, own[1] and cut.y.volume >= WORD

    def _largest(self, work: BlockWork) -> Bitmaps:
        x, y = work.elements
        for found in (WHOLE, (x >= y, y > x)):
            if self._fits(work, found):
                return found
        return True, True

    def _fits(self, work: BlockWork, bitmaps: Bitmaps) -> bool:
        """Whether what is read whole takes a quarter of the memory limit or less."""
        whole = sum(n for n, bitmap in zip(work.elements, bitmaps, strict=True) if not bitmap)
        return whole * self.width <= self.budget.limit // 4

    def _has_bitmaps(self) -> bool:
        """Whether there is a kernel that reads them."""
        return self.backend == "triton" and self.dtype.is_floating_point

    def expected(self, every: bool = False) -> Expected:
        """The paths with their expected seconds, the hybrid one where a threshold parts blocks.

        Without `every`, a hybrid whose launches alone take longer than another path is not looked at.
        """
        found = {
            "scalar": self.scalar_seconds(self.meeting.tasks),
            "dense": self._dense_seconds(),
            "bcb": self._block_seconds(self.cut().work),
        }
        best = min(seconds for seconds in found.values() if seconds is not None)
        if (every or best > HYBRID_LAUNCHES * self.rates.launch) and self.split.pure is None:
            found[HYBRID] = self._split_seconds(self.split)
        return tuple(sorted(found.items(), key=lambda item: (item[1] is None, item[1] or 0.0)))

    @cached_property
    def split(self) -> Split:
        """By the threshold asked for, or the one expected to be fastest; of one side only where none parts blocks."""
        threshold, counts = self.wanted.option("threshold", None), self.populations
        if threshold is not None:
            return counts.splits([threshold])[0]
        splits = [s for s in counts.powers() if s.pure is None] or counts.ends()
        return min(splits, key=lambda s: self._split_seconds(s) or inf)

    def _split_seconds(self, split: Split) -> float | None:
        """Both sides, one after the other; None where blocks do not fit."""
        scalar = self.scalar_seconds(split.tasks) if split.tasks else 0.0
        blocks = self._block_seconds(split.blocks) if split.blocks.pairs else 0.0
        if blocks is None:
            return None
        r, c, _ = self.cut().extents
        results = min(split.blocks.made * r * c + split.tasks, self.meeting.rows * self.meeting.columns)
        merged = results * (8 + 3 * self.width) / self.rates.memory  # an entry's slot, its value, and the sum
        return scalar + blocks + merged + MERGE_LAUNCHES * self.rates.launch

    def scalar_seconds(self, tasks: int) -> float:
        """Of so many tasks."""
        return scalar_seconds(tasks, self.meeting.rows * self.meeting.columns, self.width, self.budget, self.rates)

    def _dense_seconds(self) -> float | None:
        if not self.dense_fits():
            return None
        return dense_seconds(self.meeting.sizes, self.width, self.precision, self.rates)

    def _block_seconds(self, work: BlockWork) -> float | None:
        """None where the blocks, or their pairs, do not fit."""
        bitmaps = self.bitmaps(work)
        if not self._fits(work, bitmaps) or work.pairs * TASK_BYTES > self.budget.limit // 2:
            return None
        if bitmaps not in self._programs:
            precision = self.settings.effective_precision()
            parts = self.cut().in_parts(self.dtype, self.backend, precision, bitmaps)
            self._programs[bitmaps] = self.cut().program("", self.dtype, self.backend, precision, bitmaps, parts=parts)
        return block_seconds(work, self._programs[bitmaps], self.width, self.precision, self.rates)

    @cached_property
    def _programs(self) -> dict[Bitmaps, TileProgram]:
        """By storage, what is priced: lowered once, and not for every threshold."""
        return {}

    def dense_fits(self) -> bool:
        """Whether the unfolded operands and product take half of the memory limit or less."""
        elements = self.meeting.sizes.elements
        return _has_product(self.dtype, self.budget.device) and elements * self.width <= self.budget.limit // 2


_DOUBLE = (torch.float64, torch.complex128)


def choose(q: Question) -> Choice:
    """The plan named in the settings, or the one expected to be fastest."""
    named = check_pairs(q.wanted).name
    if named == "dense":
        _check_dense(q.meeting.sizes, q.dtype, q.budget)
    if named != "auto":
        return _choice(q, named, "asked for by name")
    m = q.meeting
    if m.tasks <= FEW_TASKS * (m.x_key.numel() + m.y_key.numel()):
        return Choice("scalar", WHOLE, f"at most {FEW_TASKS} tasks a nonzero")
    if q.scalar_seconds(m.tasks) <= min(BLOCK_LAUNCHES, DENSE_LAUNCHES) * q.rates.launch:
        return Choice("scalar", WHOLE, "no other path is launched in as little time")
    expected = q.expected()
    return _choice(q, expected[0][0], f"the cheapest of {len(expected)} by the cost model")


def _choice(q: Question, name: str, reason: str) -> Choice:
    """A path with what it needs to know; a hybrid one of whose sides is empty goes by the name of the other."""
    if name == HYBRID and q.split.pure is None:
        return Choice(name, q.bitmaps(q.split.blocks), reason, q.split)
    if name == HYBRID:
        name = q.split.pure or name
        blocks = "no block" if name == "scalar" else "every block"
        reason = f"{reason}; {blocks} of x has {q.split.threshold:,} nonzeros or more"
    return Choice(name, q.bitmaps() if name == "bcb" else WHOLE, reason)


def _has_product(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" or dtype.is_floating_point or dtype.is_complex


def _check_dense(sizes: Sizes, dtype: torch.dtype, budget: Budget) -> None:
    if not _has_product(dtype, budget.device):
        raise PlanError(f'plan "dense" needs a matrix product, which {budget.device.type} has not for {dtype}')
    what = f"{budget.what}, unfolded to {sizes.batch} x {sizes.free_x} x {sizes.contracted} x {sizes.free_y},"
    budget.require(sizes.elements * kept_dtype(dtype).itemsize, what)
