"""Plans, their parts, and registration of new ones, for users who choose or extend how the compiler computes.

In: nothing. Out: names of the planner, of formats and of devices, in one place.
"""

from sparsetc.device.profile import DeviceProfile
from sparsetc.formats.hls import plan_hls
from sparsetc.formats.window import plan_1sa, plan_window
from sparsetc.ir.contraction_tree import parse_tree
from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.packing.partition import register_partition
from sparsetc.planner.registry import register_format, register_plan
from sparsetc.products.problem import plan_bcb
from sparsetc.similarity.curve import BlockingCurve, blocking_curve

__all__ = [
    "BlockingCurve",
    "DeviceProfile",
    "Part",
    "Plan",
    "Schedule",
    "Storage",
    "blocking_curve",
    "parse_tree",
    "plan_1sa",
    "plan_bcb",
    "plan_hls",
    "plan_window",
    "register_format",
    "register_partition",
    "register_plan",
]
