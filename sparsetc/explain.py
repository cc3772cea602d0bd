"""Why a kernel is as it is: parts, costs, rooflines and the plans that were not chosen.

In: a compiled kernel. Out: `Explanation`, which prints as a table and gives the same as data.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sparsetc.device.lookup import of_backend
from sparsetc.ir.cost import Statistics, cost
from sparsetc.ir.tile import LANES, Product, TileProgram, walk
from sparsetc.planner.pricing import seconds_of

if TYPE_CHECKING:
    from sparsetc.step import Step


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
    """What was expected of this part, and of a launch if it is the first of one: those of all parts are the plan's."""
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
    profile: str
    """The device whose numbers the expected times are computed with, and how many of them were measured there."""
    measured: tuple[str, ...]
    """Those fields of its `DeviceProfile`, by name."""
    launches: int
    parts: tuple[PartReport, ...]
    tiles: tuple[tuple[int, int, int], ...]
    """Of a plan with tiles: (least nonzeros, tiles, nonzeros) of each class of tiles, a power of two wide."""
    considered: tuple[tuple[str, float], ...]
    """(plan, expected microseconds) of every candidate, the cheapest first."""

    @property
    def predicted_us(self) -> float:
        """Microseconds that a call was expected to take on the device, launches included."""
        return sum(p.predicted_us for p in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)

    def __repr__(self) -> str:
        parts = " + ".join(p.format for p in self.parts)
        return f'Explanation("{self.equation}", {self.plan}: {parts}, {self.predicted_us:.1f} us; print it for a table)'

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
        lines += [f"  profile  {self.profile}", f"  source   {self.path}", ""]
        for row in [head, ["-" * w for w in widths], *rows]:
            lines.append("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
        if self.tiles:
            lines += ["", "  tiles by nonzeros:"]
            most = max(nnz for _, _, nnz in self.tiles)
            lines += [
                f"    {least:>5} or more  {count:>10,} tiles  {nnz:>13,} nonzeros  {'#' * round(40 * nnz / most)}"
                for least, count, nnz in self.tiles
            ]
        if self.considered:
            lines += ["", "  considered, expected us:"]
            lines += [f"    {seconds:10.1f}  {name}" for name, seconds in self.considered]
        return "\n".join(lines)


def explain(kernel: Step) -> Explanation:
    """The explanation of a kernel."""
    profile = of_backend(kernel.backend)
    costs = [cost(p.program) for p in kernel.parts]
    statistics = [_statistics(kernel, number) for number in range(len(kernel.parts))]
    if kernel.choice.seconds:
        seconds = [kernel.choice.seconds[n] for n in kernel.filled]
    else:
        seconds = list(seconds_of(kernel.plan, costs, statistics, kernel.backend, profile))
    floors = [found.roofline(own, profile) for found, own in zip(costs, statistics, strict=True)]
    fused = kernel.plan.fused or len(seconds) == 1
    return Explanation(
        equation=kernel.equation,
        plan=kernel.plan.name,
        reason=kernel.plan.reason,
        backend=kernel.backend,
        device=device_name(kernel.canonical.device),
        path=str(kernel.path),
        profile=profile.describe(),
        measured=profile.measured,
        launches=1 if fused and kernel.backend == "triton" else len(seconds),
        parts=tuple(_part(kernel, n, seconds[n], *floors[n]) for n in range(len(seconds))),
        tiles=_tiles(kernel) if any(p.packed.view.sides for p in kernel.parts) else (),
        considered=tuple((name, 1e6 * seconds) for name, seconds in kernel.choice.considered),
    )


def _part(kernel: Step, number: int, seconds: float, resource: str, floor: float) -> PartReport:
    program, packed, part = kernel.parts[number].program, kernel.parts[number].packed, kernel.plan.parts[number]
    instruction = "multiply-add"
    if program.dots:
        instruction = f"tensor core, {program.precision}" if kernel.backend == "triton" else "matrix product"
    return PartReport(
        number=number,
        format=part.format,
        levels=" | ".join("".join(program.letters[m] for m in level) or "-" for level in part.storage.levels),
        nnz=packed.nnz,
        share=packed.nnz / max(1, sum(p.packed.nnz for p in kernel.parts)),
        nbytes=part.nbytes,
        einsum=tile_einsum(program),
        instruction=instruction,
        predicted_us=1e6 * seconds,
        roofline_us=1e6 * floor,
        bound_by=resource,
        label=part.label,
    )


def _statistics(kernel: Step, number: int) -> Statistics:
    """Of a part as it was packed, with what only the planner counted."""
    packed = kernel.parts[number].packed
    fibers = packed.items
    if packed.view.bitmap:
        fibers = packed.arrays["value_ptr"].numel() - 1
    elif packed.view.sides:
        fibers = packed.stored // packed.view.volume
    elif packed.view.blocks:
        fibers = packed.arrays["lane_len"].numel()
    split, itemsize = (packed.split_rows, packed.split_fibers), kernel.setting.itemsize
    found = Statistics(packed.items, fibers, packed.stored, packed.nnz, itemsize, (), 0, *split)
    if not kernel.choice.expected:
        return found
    planned = kernel.choice.expected[kernel.filled[number]]
    return replace(found, runs=planned.runs, chain=planned.chain)


def _tiles(kernel: Step) -> tuple[tuple[int, int, int], ...]:
    """How many tiles there are of each population, in classes of 1, 2 to 3, 4 to 7, … nonzeros."""
    from sparsetc.planner.hls import populations

    histogram = populations(kernel.counts)
    sizes = torch.arange(histogram.numel(), device=histogram.device)
    tiles = histogram // sizes.clamp(min=1)
    found = []
    for n in range(histogram.numel().bit_length()):
        own = (sizes >= 1 << n) & (sizes < 2 << n)
        if int(tiles[own].sum()):
            found.append((1 << n, int(tiles[own].sum()), int(histogram[own].sum())))
    return tuple(found)


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
