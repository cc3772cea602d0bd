"""Which of the three paths a contraction takes: each one's expected time, from counts made before any task is.

In: a `Matching`, its unfolded sizes and its cut into blocks. Out: a `Choice`. A path that would not fit, or that the
type has no kernel for, is left out under ``plan="auto"`` and refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsetc.errors import PlanError
from sparsetc.options import Options
from sparsetc.pair.blocks import Cut
from sparsetc.pair.dense import Sizes
from sparsetc.pair.sums import kept_dtype
from sparsetc.pair.symbolic import Budget, Matching

PLANS = ("bcb", "scalar", "dense")
STORAGES = ("auto", "whole", "bitmap")


@dataclass(frozen=True)
class BcbPlan:
    """``bcb`` with sides, or a storage, of one's own; what `plan_bcb` returns."""

    sides: tuple[tuple[str, int], ...] = ()
    storage: str = "auto"


def plan_bcb(storage: str = "auto", **sides: int) -> BcbPlan:
    """Blocks with sides given by letter, as in ``plan_bcb(i=8, j=8, k=32)``; those not named are chosen.

    Args:
        storage: how a GPU reads blocks: ``"whole"``, ``"bitmap"`` (bits and packed values, section III-D), or
            ``"auto"``: whole unless that takes more than a quarter of the memory limit.
        sides: powers of two; letters that both operands keep have side 1 whatever is given.
    """
    if storage not in STORAGES:
        raise PlanError(f"storage must be one of {', '.join(STORAGES)}, found {storage!r}")
    for letter, side in sides.items():
        if not isinstance(side, int) or side < 1 or side & (side - 1):
            raise PlanError(f"the side of {letter!r} must be a power of two, found {side!r}")
    return BcbPlan(tuple(sorted(sides.items())), storage)


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, in the operations that the paths are made of."""

    task: float
    """Tasks of the scalar path, sorted and kept."""
    dense: dict[str, float]
    """Flops of torch's product, by precision."""
    blocks: dict[str, float]
    """Flops of pairs of blocks, padding included, by precision."""
    memory: float
    """Bytes zeroed, scattered or gathered."""
    launch: float
    """Seconds of a call of torch, or of a launch."""


# H200, float32: 290,950 pairs of 64 x 32 . 32 x 64 took 1.03 ms in tf32x3 and 0.445 in tf32; the same as one dense
# product 0.32 ms (ieee) for 18 GFLOP. The rate of tasks is that of five streams of torch vectors through 4 TB/s of
# memory; it has not been measured.
GPU = Rates(
    task=5e10,
    dense={"highest": 40e12, "high": 200e12, "medium": 200e12, "float64": 40e12},
    blocks={"highest": 74e12, "high": 170e12, "medium": 170e12, "float64": 20e12},
    memory=2e12,
    launch=8e-6,
)
# Two x86 cores.
CPU = Rates(
    task=6e7,
    dense=dict.fromkeys(("highest", "high", "medium"), 1e11) | {"float64": 5e10},
    blocks=dict.fromkeys(("highest", "high", "medium"), 3e10) | {"float64": 1.5e10},
    memory=2e9,
    launch=1e-5,
)


@dataclass(frozen=True)
class Choice:
    """A path, and the seconds each was expected to take, the cheapest first; None for one that does not apply."""

    name: str
    storage: str
    reason: str
    considered: tuple[tuple[str, float | None], ...]


def choose(
    matching: Matching, sizes: Sizes, cut: Cut, dtype: torch.dtype, backend: str, settings: Options, budget: Budget
) -> Choice:
    """The plan named in the settings, or the one expected to be fastest."""
    wanted = settings.plan
    named = "bcb" if isinstance(wanted, BcbPlan) else wanted
    if not isinstance(named, str) or named not in ("auto", *PLANS):
        raise PlanError(
            f"plan must be auto, {', '.join(PLANS)} or plan_bcb(...) for two sparse operands, found {wanted!r}"
        )
    asked = wanted.storage if isinstance(wanted, BcbPlan) else "auto"
    width = kept_dtype(dtype).itemsize
    large = cut.elements * width > budget.limit // 4
    storage = "bitmap" if asked == "bitmap" or (asked == "auto" and large and backend == "triton") else "whole"
    rates = GPU if matching.ends.is_cuda else CPU
    precision = "float64" if dtype in (torch.float64, torch.complex128) else settings.effective_precision()
    expected = {
        "scalar": scalar_seconds(matching, rates),
        "dense": dense_seconds(sizes, width, precision, rates) if _dense_fits(sizes, dtype, budget) else None,
        "bcb": block_seconds(cut, width, precision, rates) if storage == "bitmap" or not large else None,
    }
    considered = tuple(sorted(expected.items(), key=lambda item: (item[1] is None, item[1] or 0.0)))
    if named != "auto":
        if named == "dense":
            _check_dense(sizes, dtype, budget)
        return Choice(named, storage, "asked for by name", considered)
    return Choice(considered[0][0], storage, "the cheapest by the cost model", considered)


def scalar_seconds(m: Matching, rates: Rates) -> float:
    """Two gathers, a product and a sum a task."""
    return 6 * rates.launch + m.tasks / rates.task


def dense_seconds(sizes: Sizes, width: int, precision: str, rates: Rates) -> float:
    """Scatter, multiply, gather."""
    return 6 * rates.launch + sizes.flops / rates.dense[precision] + sizes.elements * width / rates.memory


def block_seconds(cut: Cut, width: int, precision: str, rates: Rates) -> float:
    """Scatter, multiply pairs, gather; blocks of the result are as many as pairs, or as rows and columns, at most."""
    r, c, _ = cut.extents
    made = min(cut.pairs.tasks, cut.pairs.rows * cut.pairs.columns) * r * c
    moved = (cut.elements + made) * width
    return 8 * rates.launch + cut.flops / rates.blocks[precision] + moved / rates.memory


def _dense_fits(sizes: Sizes, dtype: torch.dtype, budget: Budget) -> bool:
    return _has_product(dtype, budget.device) and sizes.elements * kept_dtype(dtype).itemsize <= budget.limit // 2


def _has_product(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" or dtype.is_floating_point or dtype.is_complex


def _check_dense(sizes: Sizes, dtype: torch.dtype, budget: Budget) -> None:
    if not _has_product(dtype, budget.device):
        raise PlanError(f'plan "dense" needs a matrix product, which {budget.device.type} has not for {dtype}')
    what = f"{budget.what}, unfolded to {sizes.batch} x {sizes.free_x} x {sizes.contracted} x {sizes.free_y},"
    budget.settings.check_memory(sizes.elements * kept_dtype(dtype).itemsize, budget.device, what)
