"""The report of an einsum with one sparse operand: parts, costs, rooflines, and the candidates of its choice.

In: a `Choice`, and the parts that it was bound to. Out: an `OperandReport`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparsetc.explain import OperandReport, PartReport, in_microseconds
from sparsetc.ir.nest.axes import LANE
from sparsetc.ir.plan import Plan, in_bf16
from sparsetc.ir.program.cost import cost_of
from sparsetc.ir.program.resources import Statistics
from sparsetc.ir.program.text import tile_einsum
from sparsetc.ir.program.tile import Product, TileProgram
from sparsetc.packing.base import FORMATS, Packed
from sparsetc.packing.stored import counts
from sparsetc.packing.tiles import tiles_of_nonzeros
from sparsetc.planner.candidate import Choice
from sparsetc.planner.pricing import seconds_of
from sparsetc.planner.problem import Problem


def report(
    equation: str,
    plan: Plan,
    choice: Choice,
    programs: Sequence[TileProgram],
    packed: Sequence[Packed],
    filled: Sequence[int],
    problem: Problem,
    path: str,
) -> OperandReport:
    """The report of an einsum with one sparse operand.

    Args:
        equation: as it was written.
        plan: of the parts that are run.
        choice: by which the plan was chosen.
        programs: of the plan's parts.
        packed: the parts' arrays.
        filled: for each part, which one of the chosen plan it is.
        problem: what the plan was made for.
        path: of the generated program.
    """
    profile = problem.profile
    costs = [cost_of(program) for program in programs]
    statistics = statistics_of(choice, packed, filled, problem)
    if choice.seconds:
        seconds = [choice.seconds[n] for n in filled]
    else:  # a plan that the caller gave
        seconds = list(seconds_of(plan, costs, statistics, problem.backend, profile))
    nnz, parts = max(1, sum(p.nnz for p in packed)), []
    for n, (part, program) in enumerate(zip(plan.parts, programs, strict=True)):
        resource, floor = costs[n].roofline(statistics[n], profile)
        products, instruction = program.each(Product), "multiply-add"
        if program.dots:
            by_torch = problem.backend == "torch" or program.whole
            instruction = "matrix product" if by_torch else f"tensor core, {program.schedule.precision}"
        if part.schedule.rounded:
            instruction += f", {in_bf16(part.schedule.rounded)}"
        named = " | ".join("".join(program.letters[m] for m in level) or "-" for level in part.storage.levels)
        parts.append(
            PartReport(
                number=n,
                format=part.format,
                levels=named,
                nnz=part.nnz,
                share=part.nnz / nnz,
                nbytes=part.nbytes,
                einsum=tile_einsum(min(products, key=lambda s: not s.dot)) if products else "n->n",
                instruction=instruction,
                predicted_us=1e6 * seconds[n],
                roofline_us=1e6 * floor,
                bound_by=resource,
                label=part.label,
            )
        )
    return OperandReport(
        equation,
        plan.name,
        plan.reason,
        path,
        considered=in_microseconds(choice.considered),
        dismissed=in_microseconds(choice.dismissed),
        timed=tuple((name, 1e6 * taken) for name, taken in choice.measured),
        launches=1 if plan.fused and problem.backend == "triton" else len(packed),
        parts=tuple(parts),
        tiles=_tiles(_populations(packed, problem)),
    )


def statistics_of(
    choice: Choice, packed: Sequence[Packed], filled: Sequence[int], problem: Problem
) -> list[Statistics]:
    """Return the sizes of each part as it was packed, with what only the planner counted."""
    statistics = []
    for n, part in zip(filled, packed, strict=True):
        number = counts(part.view, part.arrays, part.items, part.stored)
        fibers = number.get(part.view.positions[LANE], part.items)
        sizes = Statistics(
            part.items,
            fibers,
            part.stored,
            part.nnz,
            problem.itemsize,
            split_rows=part.split_rows,
            split_fibers=part.split_fibers,
        )
        if choice.expected:
            expected = choice.expected[n]
            sizes = replace(sizes, runs=expected.runs, misses=expected.misses, chain=expected.chain)
        statistics.append(sizes)
    return statistics


def _populations(packed: Sequence[Packed], problem: Problem) -> Tensor:
    """(most + 1,) nonzeros in tiles of each population: in stored windows, or in all of a tensor cut evenly."""
    tiles = [p for p in packed if p.view.along]
    if any(getattr(FORMATS.get(p.format), "even", False) for p in tiles):
        return problem.counts.tiles()
    populations = [tiles_of_nonzeros(p)[0].bincount().cpu() for p in tiles if p.positions is not None]
    held = torch.cat([torch.zeros(1, dtype=torch.long, device="cpu"), *populations])
    return torch.bincount(held) * torch.arange(int(held.max()) + 1, device="cpu")


def _tiles(histogram: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Count the tiles of each population, in classes of 1, 2 to 3, 4 to 7, … nonzeros."""
    sizes = torch.arange(histogram.numel(), device=histogram.device)
    tiles = histogram // sizes.clamp(min=1)
    classes = []
    for n in range(histogram.numel().bit_length()):
        in_class = (sizes >= 1 << n) & (sizes < 2 << n)
        if int(tiles[in_class].sum()):
            classes.append((1 << n, int(tiles[in_class].sum()), int(histogram[in_class].sum())))
    return tuple(classes)
