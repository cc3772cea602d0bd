"""What each path is expected to take: rates of a device, and seconds from counts.

In: counts that are known before any task is made. Out: seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sparsetc import rates_record
from sparsetc.ir.cost import Statistics, cost
from sparsetc.ir.rates import CPU as CORES
from sparsetc.ir.rates import Rates as DeviceRates
from sparsetc.ir.tile import TileProgram
from sparsetc.options import Options, in_force
from sparsetc.pair.blocks import pairs_a_program
from sparsetc.pair.cut import BlockWork
from sparsetc.pair.meeting import Sizes
from sparsetc.pair.symbolic import TASK_BYTES, Budget
from sparsetc.pair.tasks import KEPT_BYTES, keeps

H200 = DeviceRates(
    memory=4.373e12,
    l2=9.255e12,
    add=3.805e12,
    multiply=60.01e12,
    dot=(("ieee", 13.8e12), ("tf32x3", 117.8e12), ("tf32", 459.7e12), ("bf16", 624e12)),
    l2_bytes=52_428_800,
    launch=3.968e-6,
)
"""The GPU that paths were timed on, as `calibrate` finds it (`benchmarks/results/rates_h200.json`)."""
SCALAR_LAUNCHES, BLOCK_LAUNCHES, DENSE_LAUNCHES = 4, 6, 7
"""Calls that a path takes: values gathered, or scattered to zeros, the kernel, the result zeroed or read."""
MERGE_LAUNCHES = 7
"""Calls of torch that a hybrid takes beside its halves: values chosen for each, zeros, and two additions."""
CROWDED = 1 << 18
"""Places below which additions wait for one another, or are ordered: 4,096 to 73,455 sums of 220 tasks or more took 14
to 32 ps a task, 1.4 M took 5 (H200, `benchmarks/results/switches.json`)."""
HYBRID_LAUNCHES = SCALAR_LAUNCHES + BLOCK_LAUNCHES + MERGE_LAUNCHES


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, in the operations that the paths are made of."""

    whose: str
    """The device, and whether it was calibrated, for a reader."""
    task_bytes: float
    """Bytes of kept tasks a second: what is stored of each, a value read and a value added to."""
    crowded: float
    """Seconds a task takes, where sums are few or ordered."""
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
    turn: float
    """Seconds of a pair of blocks, of those that a program takes one after another."""
    memory: float
    """Bytes zeroed, scattered or gathered."""
    launch: float
    """Seconds of a call of torch, or of a launch."""


# H200, float32: 290,950 pairs of 64 x 32 . 32 x 64 took 0.55 ms in f16x3 and 0.45 in tf32, 1.2 M pairs of 900 MB of
# blocks 3.6 in either; dense products of 12 to 378 GFLOP went at 42 to 48 and at 73 to 112 TFLOP/s; 17 to 577 M tasks
# took 3.7 to 9.4 ps each, ordered ones 13 to 35 (`benchmarks/results/switches.json`; whole contractions: `pair.json`).
GPU = Rates(
    whose=H200.describe(),
    task_bytes=2.2e12,
    crowded=18e-12,
    expanded_bytes=1.4e12,
    dense={"highest": 40e12, "high": 95e12, "medium": 95e12, "float64": 40e12},
    blocks={"f16x3": 132e12, "highest": 74e12, "high": 170e12, "medium": 170e12, "float64": 20e12},
    pair_bytes=(10e12, 5.8e12),
    near_bytes=400_000_000,
    turn=0.5e-6,
    memory=1.5e12,
    launch=8e-6,
)
# Two x86 cores; 17 M tasks of an R-MAT graph took 0.24 s on one of them, and 4 s to expand.
CPU = Rates(
    whose=CORES.describe(),
    task_bytes=9e8,
    crowded=0.0,
    expanded_bytes=4e8,
    dense=dict.fromkeys(("highest", "high", "medium"), 1e11) | {"float64": 5e10},
    blocks=dict.fromkeys(("highest", "high", "medium"), 3e10) | {"float64": 1.5e10},
    pair_bytes=(2e10, 2e10),
    near_bytes=0,
    turn=0.0,
    memory=2e9,
    launch=1e-5,
)


def rates_of(device: torch.device, settings: Options) -> Rates:
    """Of the device that operands are on; of a GPU as it was calibrated, if it was."""
    if device.type != "cuda":
        return CPU
    with in_force(settings), torch.cuda.device(device):  # whose record it is, and where records lie
        measured = rates_record.of_current_device()
    return GPU if measured is None else calibrated(measured)


def calibrated(measured: DeviceRates) -> Rates:
    """The rates of a GPU that `calibrate` measured.

    What the paths are made of was timed on an H200 alone. Of each rate another GPU is taken to reach the share of its
    own device memory, L2 cache, additions, dots or launches that the H200 reached of its. What `calibrate` has no rate
    for, products of float64 and a pair's turn, stays the H200's.
    """
    memory, l2, add = (getattr(measured, name) / getattr(H200, name) for name in ("memory", "l2", "add"))
    dot = {name: rate / dict(H200.dot)[name] for name, rate in measured.dot}
    own = {"f16x3": dot["bf16"], "highest": dot["tf32x3"], "high": dot["tf32"], "medium": dot["bf16"]}
    torch_dot = {"highest": measured.multiply / H200.multiply, "high": dot["tf32"], "medium": dot["tf32"]}
    near, far = GPU.pair_bytes
    return replace(
        GPU,
        whose=measured.describe(),
        task_bytes=GPU.task_bytes * memory,
        crowded=GPU.crowded / add,
        expanded_bytes=GPU.expanded_bytes * memory,
        dense={name: rate * torch_dot.get(name, 1.0) for name, rate in GPU.dense.items()},
        blocks={name: rate * own.get(name, 1.0) for name, rate in GPU.blocks.items()},
        pair_bytes=(near * l2, far * memory),
        near_bytes=int(GPU.near_bytes * measured.l2_bytes / H200.l2_bytes),
        memory=GPU.memory * memory,
        launch=GPU.launch * measured.launch / H200.launch,
    )


def scalar_seconds(tasks: int, places: int, width: int, budget: Budget, rates: Rates) -> float:
    """The list streamed, for each task a value of y and one of the result; x's values and columns change seldom."""
    again = 0 if keeps(tasks, budget) else tasks * TASK_BYTES / rates.expanded_bytes
    each = (KEPT_BYTES + 2 * width) / rates.task_bytes
    if budget.settings.deterministic or places < CROWDED:
        each = max(each, rates.crowded)
    return SCALAR_LAUNCHES * rates.launch + tasks * each + again


def dense_seconds(sizes: Sizes, width: int, precision: str, rates: Rates) -> float:
    """Scatter, multiply, gather."""
    return DENSE_LAUNCHES * rates.launch + sizes.flops / rates.dense[precision] + sizes.elements * width / rates.memory


def block_seconds(work: BlockWork, program: TileProgram, width: int, precision: str, rates: Rates) -> float:
    """Scatter, multiply pairs, gather."""
    counts = Statistics(work.made, work.pairs, sum(work.elements), work.nnz, width)
    moved, read, flops = cost(program).work(counts)
    read_rate = rates.pair_bytes[sum(work.elements) * width > rates.near_bytes]
    rate = rates.blocks.get(program.precision, rates.blocks[precision])
    chain = min(pairs_a_program(work.pairs), work.pairs // max(1, work.made)) * rates.turn
    return BLOCK_LAUNCHES * rates.launch + max(flops / rate, read / read_rate, chain) + moved / rates.memory
