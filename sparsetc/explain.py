"""Why a kernel is as it is: parts, costs, rooflines and the plans that were not chosen.

In: a compiled kernel. Out: `Explanation`, which prints as a table and gives the same as data.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sparsetc.ir.cost import Statistics, cost, rates_of
from sparsetc.ir.tile import LANES, Product, TileProgram, walk

if TYPE_CHECKING:
    from sparsetc.kernel import Kernel


@dataclass(frozen=True)
class PartReport:
    """One line of the table."""

    number: int
    format: str
    levels: str
    nnz: int
    share: float
    nbytes: int
    einsum: str
    instruction: str
    predicted_us: float
    roofline_us: float
    bound_by: str
    label: str = ""


@dataclass(frozen=True)
class Explanation:
    """A compiled kernel, explained."""

    equation: str
    plan: str
    reason: str
    backend: str
    device: str
    path: str
    rates: str
    """Whose rates the expected times are computed with."""
    launches: int
    parts: tuple[PartReport, ...]
    considered: tuple[tuple[str, float], ...]
    """(plan, expected microseconds) of every candidate, the cheapest first."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        head = [
            "part",
            "format",
            "item | lane | leaf",
            "nonzeros",
            "share",
            "bytes",
            "tile einsum",
            "instruction",
            "predicted us",
            "floor us",
            "bound by",
        ]
        rows = [
            [
                str(p.number),
                p.format,
                p.levels,
                f"{p.nnz:,}",
                f"{p.share:.1%}",
                f"{p.nbytes:,}",
                p.einsum,
                p.instruction,
                f"{p.predicted_us:.1f}",
                f"{p.roofline_us:.1f}",
                p.bound_by,
            ]
            for p in self.parts
        ]
        widths = [max(len(r[n]) for r in [head, *rows]) for n in range(len(head))]
        lines = [f'"{self.equation}"', f"  plan     {self.plan}, {self.reason}"]
        lines.append(
            f"  runs     {self.backend} on {self.device}, {self.launches} launch{'es' if self.launches > 1 else ''}"
        )
        lines += [f"  rates    {self.rates}", f"  source   {self.path}", ""]
        for row in [head, ["-" * w for w in widths], *rows]:
            lines.append("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
        if self.considered:
            lines += ["", "  considered, expected us:"]
            lines += [f"    {seconds:10.1f}  {name}" for name, seconds in self.considered]
        return "\n".join(lines)


def explain(kernel: Kernel) -> Explanation:
    """The explanation of a kernel."""
    rates = rates_of(kernel.backend)
    total = max(1, sum(p.packed.nnz for p in kernel.parts))
    parts = []
    for bound, part in zip(kernel.parts, kernel.plan.parts, strict=True):
        program, packed = bound.program, bound.packed
        found = cost(program)
        itemsize = kernel.setting.itemsize
        fibers = packed.items
        if packed.view.sides:
            fibers = packed.stored // packed.view.volume
        elif packed.view.blocks:
            fibers = packed.arrays["lane_len"].numel()
        statistics = Statistics(packed.items, fibers, packed.stored, packed.nnz, itemsize)
        if kernel.choice.expected:  # what only the planner counted
            planned = kernel.choice.expected[program.number]
            statistics = replace(statistics, runs=planned.runs, chain=planned.chain)
        resource, floor = found.roofline(statistics, rates)
        parts.append(
            PartReport(
                number=program.number,
                format=part.format,
                levels=" | ".join(
                    "".join(program.letters[m] for m in level) or "-"
                    for level in (part.layout.item, part.layout.lane, part.layout.leaf)
                ),
                nnz=packed.nnz,
                share=packed.nnz / total,
                nbytes=part.nbytes,
                einsum=tile_einsum(program),
                instruction=f"tensor core, {program.precision}"
                if program.dots and kernel.backend == "triton"
                else "matrix product"
                if program.dots
                else "multiply-add",
                predicted_us=1e6 * (rates.launch + found.predicted(statistics, rates)),
                roofline_us=1e6 * floor,
                bound_by=resource,
                label=part.label,
            )
        )
    fused = kernel.plan.fused or len(parts) == 1
    return Explanation(
        equation=kernel.equation,
        plan=kernel.plan.name,
        reason=kernel.plan.reason,
        backend=kernel.backend,
        device=device_name(kernel.canonical.device),
        path=str(kernel.path),
        rates=rates.describe(),
        launches=1 if fused and kernel.backend == "triton" else len(parts),
        parts=tuple(parts),
        considered=tuple((name, 1e6 * seconds) for name, seconds in kernel.choice.considered),
    )


def tile_einsum(program: TileProgram) -> str:
    """The innermost tile einsum, in letters; n stands for the lanes."""
    inner = [s for s, _ in walk(program.body) if isinstance(s, Product)]
    if not inner:
        return "n->n"
    chosen = next((s for s in inner if s.dot), inner[0])
    terms = ["".join("n" if a == LANES else a for a in t.axes) for t in chosen.inputs]
    return f"{','.join(terms)}->{''.join('n' if a == LANES else a for a in chosen.out.axes)}"


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
