"""What a candidate is expected to cost, before anything is packed.

In: a `Candidate` and its `Setting`. Out: seconds of one call, from the tile programs its parts would be lowered to.
"""

from __future__ import annotations

from sparsetc.formats import get_format
from sparsetc.ir.cost import Cost, cost, rates_of
from sparsetc.ir.lower import lower
from sparsetc.ir.operands import Target
from sparsetc.partition import PARTITIONS
from sparsetc.planner.candidates import Candidate, Setting


def expected_seconds(candidate: Candidate, setting: Setting, sparse_output: bool) -> float:
    """Time of one call: the launch, and the parts one after another (a fused launch overlaps only their ends)."""
    rates = rates_of(setting.backend)
    total = rates.launch * (1 if candidate.plan.fused else len(candidate.plan.parts))
    for part_cost, statistics in zip(costs(candidate, setting, sparse_output), candidate.expected, strict=True):
        if statistics.nnz or len(candidate.expected) == 1:  # an empty part of several is not run
            total += part_cost.predicted(statistics, rates)
    return total


def costs(candidate: Candidate, setting: Setting, sparse_output: bool) -> list[Cost]:
    """Costs of the parts' tile programs, lowered from the views their formats promise."""
    (sparse,) = setting.bound.einsum.sparse
    shape = setting.bound.extents(setting.bound.einsum.inputs[sparse])
    whole_rows = len(candidate.plan.parts) == 1 or PARTITIONS[candidate.plan.partition].whole_rows
    found = []
    for part in candidate.plan.parts:
        view = get_format(part.format).view(shape, part.layout)
        keyed = (
            set(setting.kept) == set(part.layout.item)
            or not setting.rest
            or (not part.layout.item and setting.kept == part.layout.lane)
        )
        target = Target(sparse_output, natural=part.format == "coo", owned=keyed and whole_rows)
        program = lower(setting.bound, view, part.schedule, target, unroll=part.layout.unroll)
        found.append(cost(program))
    return found
