"""Which path a contraction takes: each one's expected time, from counts made before any task is.

In: a `Meeting` and its cut into blocks. Out: a `Choice`. A path that would not fit, or that the
type has no kernel for, is left out under ``plan="auto"`` and refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import torch

from sparsetc.errors import PlanError
from sparsetc.ir.cost import Statistics, cost
from sparsetc.ir.tile import TileProgram
from sparsetc.options import Options
from sparsetc.pair.cut import WHOLE, Bitmaps, BlockWork, Cut
from sparsetc.pair.meeting import Meeting, Sizes
from sparsetc.pair.populations import Populations, Split
from sparsetc.pair.scalar import waits
from sparsetc.pair.sums import kept_dtype
from sparsetc.pair.symbolic import TASK_BYTES, Budget
from sparsetc.pair.tasks import KEPT_BYTES, keeps

HYBRID = "bcb+scalar"
PLANS = ("bcb", "scalar", "dense", HYBRID)
FEW_TASKS = 4
"""Tasks a nonzero up to which the scalar path is taken unseen: it then costs no more than cutting into blocks does."""
WORD = 32
"""Bits of a word of a bitmap."""
STORAGES = ("auto", "whole", "bitmap")
PATH_LAUNCHES = 6
"""Calls that a path takes: zeros made, operands scattered or gathered, the kernel, the result read."""
MERGE_LAUNCHES = 7
"""Calls of torch that a hybrid takes beside its halves: values chosen for each, zeros, and two additions."""
HYBRID_LAUNCHES = 2 * PATH_LAUNCHES + MERGE_LAUNCHES


@dataclass(frozen=True)
class BcbPlan:
    """``bcb``, or ``bcb+scalar``, with sides, a storage, a threshold or formats of one's own: from `plan_bcb`."""

    sides: tuple[tuple[str, int], ...] = ()
    storage: str | tuple[str, str] = "auto"
    threshold: int | None = None
    formats: tuple[str, str] = ("bcb", "bcb")

    @property
    def storages(self) -> tuple[str, str]:
        """Of each operand, in the equation's order."""
        return (self.storage, self.storage) if isinstance(self.storage, str) else self.storage

    def sides_of(self, terms: Sequence[Sequence[str]]) -> dict[str, int]:
        """Sides by letter, for operands of these letters: an operand in ``coo`` has blocks of one position."""
        single = [c for term, name in zip(terms, self.formats, strict=True) if name == "coo" for c in term]
        return dict(self.sides) | dict.fromkeys(single, 1)


def plan_bcb(
    storage: str | tuple[str, str] = "auto",
    threshold: int | None = None,
    formats: tuple[str, str] = ("bcb", "bcb"),
    **sides: int,
) -> BcbPlan:
    """Blocks with sides given by letter, as in ``plan_bcb(i=8, j=8, k=32)``; those not named are chosen.

    Args:
        storage: how a GPU reads blocks: ``"whole"``, ``"bitmap"`` (bits and packed values, section III-D), or
            ``"auto"``: whole unless that takes more than a quarter of the memory limit, when the larger operand, or
            both, are bitmaps. A pair names one for each operand, in the equation's order. Integers are read whole, and
            so is everything on the CPU.
        threshold: nonzeros from which a block of the first operand in the result is multiplied as a block; those of the
            others are multiplied one by one (``bcb+scalar``). None multiplies all as blocks.
        formats: ``"bcb"`` or ``"coo"`` for each of the two operands, in the equation's order. A nonzero in ``coo``
            meets blocks that have side 1 along the letters that both operands have, and scales them.
        sides: powers of two; letters that both operands keep have side 1 whatever is given.
    """
    found = BcbPlan(tuple(sorted(sides.items())), storage, threshold, formats)
    if not set(found.storages) <= set(STORAGES) or len(found.storages) != 2:
        raise PlanError(f"storage must be one of {', '.join(STORAGES)}, or a pair of them, found {storage!r}")
    if threshold is not None and (not isinstance(threshold, int) or threshold < 1):
        raise PlanError(f"threshold must be a number of nonzeros, 1 or more, found {threshold!r}")
    for letter, side in sides.items():
        if not isinstance(side, int) or side < 1 or side & (side - 1):
            raise PlanError(f"the side of {letter!r} must be a power of two, found {side!r}")
    if len(formats) != 2 or not set(formats) <= {"bcb", "coo"}:
        raise PlanError(f'formats must be "bcb" or "coo" for each of two operands, found {formats!r}')
    return found


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, in the operations that the paths are made of."""

    task_bytes: float
    """Bytes of kept tasks a second: what is stored of each, a value read and a value added to."""
    ordered: float
    """Seconds a task takes, where sums are ordered (`scalar.waits`)."""
    expanded_bytes: float
    """Bytes a second of tasks that are made again at each call, `TASK_BYTES` each."""
    dense: dict[str, float]
    """Flops of torch's product, by precision."""
    blocks: dict[str, float]
    """Flops of pairs of blocks, padding included, by precision; ``f16x3`` where they are in parts."""
    pair_bytes: tuple[float, float]
    """Bytes of pairs' blocks read a second: of few blocks, and of so many that neighbours share none in cache."""
    near_bytes: int
    """Bytes of the fewest blocks that are many."""
    memory: float
    """Bytes zeroed, scattered or gathered."""
    launch: float
    """Seconds of a call of torch, or of a launch."""


# H200, float32: 290,950 pairs of 64 x 32 . 32 x 64 took 1.03 ms in tf32x3 and 0.445 in tf32, 1.2 M pairs of 800 MB of
# blocks 4.7 and 3.4; dense products of 12 to 377 GFLOP went at 40 and at 75 to 110 TFLOP/s; 17 to 577 M tasks took 3.6
# to 8.2 ps each, ordered ones 16 to 20 (whole contractions: `benchmarks/results/pair.json`; each of these alone:
# `benchmarks/results/switches.json`).
GPU = Rates(
    task_bytes=2.2e12,
    ordered=18e-12,
    expanded_bytes=1.4e12,
    dense={"highest": 40e12, "high": 95e12, "medium": 95e12, "float64": 40e12},
    blocks={"f16x3": 74e12, "highest": 74e12, "high": 170e12, "medium": 170e12, "float64": 20e12},
    pair_bytes=(10e12, 5.8e12),
    near_bytes=400_000_000,
    memory=1.5e12,
    launch=8e-6,
)
# Two x86 cores; 17 M tasks of an R-MAT graph took 0.24 s on one of them, and 4 s to expand.
CPU = Rates(
    task_bytes=9e8,
    ordered=0.0,
    expanded_bytes=4e8,
    dense=dict.fromkeys(("highest", "high", "medium"), 1e11) | {"float64": 5e10},
    blocks=dict.fromkeys(("highest", "high", "medium"), 3e10) | {"float64": 1.5e10},
    pair_bytes=(2e10, 2e10),
    near_bytes=0,
    memory=2e9,
    launch=1e-5,
)


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
    def width(self) -> int:
        """Bytes of a value as sums keep it."""
        return kept_dtype(self.dtype).itemsize

    @cached_property
    def populations(self) -> Populations:
        """What thresholds are found by."""
        return Populations.of(self.cut())

    @property
    def rates(self) -> Rates:
        """Of the device."""
        return GPU if self.meeting.x_key.is_cuda else CPU

    @property
    def precision(self) -> str:
        """By which rates are named."""
        return "float64" if self.dtype in _DOUBLE else self.settings.effective_precision()

    def bitmaps(self, work: BlockWork | None = None) -> Bitmaps:
        """Which operands' blocks are read as bitmaps: as asked, or whole where that takes a quarter of the memory limit
        or less; else the larger operand's, or both.

        Blocks that do not fill a word of bits are read whole.
        """
        wanted = self.settings.plan
        asked = wanted.storages if isinstance(wanted, BcbPlan) else ("auto", "auto")
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

    def expected(self) -> Expected:
        """The paths with their expected seconds; the hybrid where a threshold parts blocks, and its launches pay."""
        found = {
            "scalar": self._scalar_seconds(self.meeting.tasks),
            "dense": self._dense_seconds(),
            "bcb": self._block_seconds(self.cut().work),
        }
        best = min(seconds for seconds in found.values() if seconds is not None)
        if best > HYBRID_LAUNCHES * self.rates.launch and self.split.pure is None:
            found[HYBRID] = self._split_seconds(self.split)
        return tuple(sorted(found.items(), key=lambda item: (item[1] is None, item[1] or 0.0)))

    @cached_property
    def split(self) -> Split:
        """By the threshold asked for, or the one expected to be fastest; of one side only where none parts blocks."""
        wanted, counts = self.settings.plan, self.populations
        if isinstance(wanted, BcbPlan) and wanted.threshold is not None:
            return counts.splits([wanted.threshold])[0]
        splits = [s for s in counts.powers() if s.pure is None] or counts.ends()
        return min(splits, key=lambda s: self._split_seconds(s) or inf)

    def _split_seconds(self, split: Split) -> float | None:
        """Both sides, one after the other; None where blocks do not fit."""
        scalar = self._scalar_seconds(split.tasks) if split.tasks else 0.0
        blocks = self._block_seconds(split.blocks) if split.blocks.pairs else 0.0
        if blocks is None:
            return None
        r, c, _ = self.cut().extents
        results = min(split.blocks.made * r * c + split.tasks, self.meeting.rows * self.meeting.columns)
        merged = results * (8 + 3 * self.width) / self.rates.memory  # an entry's slot, its value, and the sum
        return scalar + blocks + merged + MERGE_LAUNCHES * self.rates.launch

    def _scalar_seconds(self, tasks: int) -> float:
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


def plan_name(settings: Options, letters: Iterable[str] | None = None) -> str:
    """``auto`` or one of `PLANS`; PlanError for any other plan, or sides of other `letters`."""
    wanted = settings.plan
    if isinstance(wanted, BcbPlan):
        unknown = [] if letters is None else sorted({c for c, _ in wanted.sides} - set(letters))
        if unknown:
            raise PlanError(f"the plan gives sides to {', '.join(unknown)}, which the equation does not have")
        return "bcb" if wanted.threshold is None else HYBRID
    if not isinstance(wanted, str) or wanted not in ("auto", *PLANS):
        raise PlanError(
            f"plan must be auto, {', '.join(PLANS)} or plan_bcb(...) for two sparse operands, found {wanted!r}"
        )
    return wanted


def choose(q: Question) -> Choice:
    """The plan named in the settings, or the one expected to be fastest."""
    named = plan_name(q.settings)
    if named == "dense":
        _check_dense(q.meeting.sizes, q.dtype, q.budget)
    if named != "auto":
        return _choice(q, named, "asked for by name")
    m = q.meeting
    if m.tasks <= FEW_TASKS * (m.x_key.numel() + m.y_key.numel()):
        return Choice("scalar", WHOLE, f"at most {FEW_TASKS} tasks a nonzero")
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


def scalar_seconds(tasks: int, places: int, width: int, budget: Budget, rates: Rates) -> float:
    """The list streamed, for each task a value of y and one of the result; x's values and columns change seldom."""
    again = 0 if keeps(tasks, budget) else tasks * TASK_BYTES / rates.expanded_bytes
    each = (KEPT_BYTES + 2 * width) / rates.task_bytes
    if budget.settings.deterministic or waits(places, tasks):  # sums are ordered; there are as many as places, about
        each = max(each, rates.ordered)
    return PATH_LAUNCHES * rates.launch + tasks * each + again


def dense_seconds(sizes: Sizes, width: int, precision: str, rates: Rates) -> float:
    """Scatter, multiply, gather."""
    return 7 * rates.launch + sizes.flops / rates.dense[precision] + sizes.elements * width / rates.memory


def block_seconds(work: BlockWork, program: TileProgram, width: int, precision: str, rates: Rates) -> float:
    """Scatter, multiply pairs, gather."""
    counts = Statistics(work.made, work.pairs, sum(work.elements), work.nnz, width)
    moved, read, flops = cost(program).work(counts)
    read_rate = rates.pair_bytes[sum(work.elements) * width > rates.near_bytes]
    rate = rates.blocks.get(program.precision, rates.blocks[precision])
    return PATH_LAUNCHES * rates.launch + max(flops / rate, read / read_rate) + moved / rates.memory


def _has_product(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" or dtype.is_floating_point or dtype.is_complex


def _check_dense(sizes: Sizes, dtype: torch.dtype, budget: Budget) -> None:
    if not _has_product(dtype, budget.device):
        raise PlanError(f'plan "dense" needs a matrix product, which {budget.device.type} has not for {dtype}')
    what = f"{budget.what}, unfolded to {sizes.batch} x {sizes.free_x} x {sizes.contracted} x {sizes.free_y},"
    budget.require(sizes.elements * kept_dtype(dtype).itemsize, what)
