"""What a candidate is expected to cost, before anything is packed.

In: a `Candidate` and its `Setting`. Out: seconds of one call, by part, from the tile programs that its parts would be
lowered to.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsetc.device.lookup import of_backend
from sparsetc.device.profile import DeviceProfile, by_precision
from sparsetc.formats import get_format
from sparsetc.ir.cost import Cost, Statistics, cost
from sparsetc.ir.lower import lower
from sparsetc.ir.operands import Target
from sparsetc.ir.plan import Plan
from sparsetc.ir.view import View
from sparsetc.partition import PARTITIONS
from sparsetc.planner.candidates import Candidate, Setting
from sparsetc.planner.ownership import Circumstances, owns


def expected_seconds(candidate: Candidate, setting: Setting) -> tuple[float, ...]:
    """Time of one call by part: see `seconds_of`."""
    return seconds_of(
        candidate.plan,
        costs(candidate, setting),
        candidate.expected,
        setting.backend,
        of_backend(setting.backend),
    )


def seconds_of(
    plan: Plan, parts: Sequence[Cost], statistics: Sequence[Statistics], backend: str, profile: DeviceProfile
) -> tuple[float, ...]:
    """Time of one call, by part: 0 for one that has no nonzeros. What a launch takes is its first part's.

    Parts run one after another; a fused launch overlaps only their ends. Torch programs have a launch each.
    """
    run = [n for n, s in enumerate(statistics) if s.nnz] or [len(parts) - 1]
    beside_tiles = plan.fused and len(run) > 1 and any(parts[n].turn is not None for n in run)
    found = [0.0] * len(parts)
    for launch in [run] if plan.fused and backend == "triton" else [[n] for n in run]:
        found[launch[0]] += profile.launch
        if all(parts[n].turn is None for n in launch):
            found[launch[0]] += profile.starting_waits * profile.wait
    for n in run:
        part = parts[n]
        slowed = by_precision(profile.fused_slowdown, part.precision) if beside_tiles and part.turn is None else 1.0
        found[n] += slowed * part.predicted(statistics[n], profile)
    return tuple(found)


def views(candidate: Candidate, setting: Setting) -> list[View]:
    """The view that each part's format promises."""
    (sparse,) = setting.bound.einsum.sparse
    shape = setting.bound.extents(setting.bound.einsum.inputs[sparse])
    return [get_format(part.format).view(shape, part.storage) for part in candidate.plan.parts]


def owned(candidate: Candidate, setting: Setting) -> tuple[bool, ...]:
    """Whether each part's results are expected to be stored, by the rule that the kernel goes by."""
    plan, expected = candidate.plan, candidate.expected
    alone = sum(s.nnz > 0 for s in expected) <= 1 or PARTITIONS[plan.partition].whole_rows
    at = Circumstances(setting.kept, setting.backend, setting.sparse_output, setting.distinct, alone)
    return tuple(
        owns(view, at, s, padded=s.stored > s.nnz) for view, s in zip(views(candidate, setting), expected, strict=True)
    )


def costs(candidate: Candidate, setting: Setting) -> list[Cost]:
    """Costs of the parts' tile programs, lowered from the views their formats promise."""
    found = []
    stores = owned(candidate, setting)
    for part, view, own in zip(candidate.plan.parts, views(candidate, setting), stores, strict=True):
        target = Target(setting.sparse_output, in_operand_order=part.format == "coo", owned=own, rows=setting.rows)
        program = lower(setting.bound, view, part.schedule, target)
        found.append(cost(program))
    return found
