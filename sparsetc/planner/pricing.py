"""What a candidate is expected to cost, before anything is packed.

In: a `Candidate` and its `Setting`. Out: seconds of one call, from the tile programs its parts would be lowered to.
"""

from __future__ import annotations

from sparsetc.formats import get_format
from sparsetc.ir.cost import Cost, cost, rates_of
from sparsetc.ir.lower import lower
from sparsetc.ir.operands import Target
from sparsetc.ir.rates import Rates
from sparsetc.partition import PARTITIONS
from sparsetc.planner.candidates import Candidate, Setting

FUSED_SLOWDOWN = {"bf16": 1.4, "tf32": 1.5}
"""Of scalar programs in one launch with tiles, whose registers they are given; 1.9 elsewhere (H200: 1.3 to 1.9)."""

STARTING_WAITS = 3
"""Dependent loads before a launch of scalar programs has all its work under way (pointer, words, rows)."""


def expected_seconds(candidate: Candidate, setting: Setting, sparse_output: bool) -> float:
    """Time of one call: the launch, and the parts one after another (a fused launch overlaps only their ends)."""
    return seconds_of(candidate, costs(candidate, setting, sparse_output), rates_of(setting.backend))


def seconds_of(candidate: Candidate, parts: list[Cost], rates: Rates) -> float:
    """The same, given the costs of the parts."""
    run = [(c, s) for c, s in zip(parts, candidate.expected, strict=True) if s.nnz or len(parts) == 1]
    beside_tiles = candidate.plan.fused and len(run) > 1 and any(c.turn is not None for c, _ in run)
    launches = 1 if candidate.plan.fused else len(run)
    total = rates.launch * launches
    total += STARTING_WAITS * rates.wait * (launches - any(c.turn is not None for c, _ in run))
    for part, statistics in run:
        slowed = FUSED_SLOWDOWN.get(part.precision, 1.9) if beside_tiles and part.turn is None else 1.0
        total += slowed * part.predicted(statistics, rates)
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
