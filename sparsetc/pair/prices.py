"""What each path is expected to take.

In: counts that are known before any task is made, and a device's profile. Out: seconds.
"""

from __future__ import annotations

from sparsetc.device.profile import DeviceProfile
from sparsetc.ir.program.product_cost import cost_of
from sparsetc.ir.program.statistics import Statistics
from sparsetc.ir.program.tile import TileProgram
from sparsetc.pair.blocking import BlockWork
from sparsetc.pair.blocks import pairs_a_program
from sparsetc.pair.join import UnfoldedSizes
from sparsetc.pair.symbolic import TASK_BYTES, Budget
from sparsetc.pair.tasks import KEPT_BYTES, keeps

SCALAR_LAUNCHES, BLOCK_LAUNCHES, DENSE_LAUNCHES = 4, 6, 7
"""Calls that a path takes: values gathered, or scattered to zeros, the kernel, the result zeroed or read."""
MERGE_LAUNCHES = 7
"""Calls of torch that a hybrid takes beside its branches: values chosen for each, zeros, and two additions."""
HYBRID_LAUNCHES = SCALAR_LAUNCHES + BLOCK_LAUNCHES + MERGE_LAUNCHES


def scalar_seconds(tasks: int, places: int, width: int, budget: Budget, profile: DeviceProfile) -> float:
    """The list streamed, for each task a value of y and one of the result; x's values and columns change seldom."""
    again = 0 if keeps(tasks, budget) else tasks * TASK_BYTES / profile.expanded_bytes
    each = (KEPT_BYTES + 2 * width) / profile.task_bytes
    if budget.settings.deterministic or places < profile.crowded_below:
        each = max(each, profile.crowded)
    return SCALAR_LAUNCHES * profile.call + tasks * each + again


def dense_seconds(sizes: UnfoldedSizes, width: int, precision: str, profile: DeviceProfile) -> float:
    """Seconds of the dense path: scatter, multiply, gather."""
    multiplied, moved = sizes.flops / profile.product[precision], sizes.elements * width / profile.moved
    return DENSE_LAUNCHES * profile.call + multiplied + moved


def block_seconds(work: BlockWork, program: TileProgram, width: int, precision: str, profile: DeviceProfile) -> float:
    """Seconds of pairs of blocks: scatter, multiply, gather."""
    counts = Statistics(work.made, work.pairs, sum(work.elements), work.nnz, width)
    moved, read, flops = cost_of(program).work(counts, profile)
    far = sum(work.elements) * width > profile.near_bytes
    read_rate = profile.far_blocks if far else profile.near_blocks
    rate = profile.block_dot.get(program.precision, profile.block_dot[precision])
    chain = min(pairs_a_program(work.pairs), work.pairs // max(1, work.made)) * profile.pair_turn
    return BLOCK_LAUNCHES * profile.call + max(flops / rate, read / read_rate, chain) + moved / profile.moved
