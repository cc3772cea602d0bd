"""Why a kernel is as it is: the steps it runs, their parts, costs and rooflines, and the plans that were not chosen.

In: the reports that a kernel's steps hand over. Out: `Explanation`, which prints as a table and gives the same as data.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from html import escape
from math import inf
from textwrap import indent
from typing import Any

import torch


@dataclass(frozen=True)
class StepReport:
    """One contraction: torch's of two dense operands, or a base of what others say of themselves.

    Attributes:
        path: the file of the generated program.
        considered: (plan, expected microseconds) of every candidate, the cheapest first; None for one that does not fit
            or has no kernel.
        timed: (plan, microseconds) of those that were timed, the fastest first.
        dismissed: (kind of plan, microseconds) of those that were not counted: by a sample they take as long at least.
    """

    equation: str
    plan: str
    reason: str
    path: str = ""
    considered: tuple[tuple[str, float | None], ...] = ()
    dismissed: tuple[tuple[str, float | None], ...] = field(default=(), kw_only=True)
    timed: tuple[tuple[str, float], ...] = ()

    def details(self) -> list[str]:
        """Lines of what is known of this kind of step alone."""
        return []


@dataclass(frozen=True)
class PartReport:
    """One line of the table.

    Attributes:
        predicted_us: what was expected of this part, and of a launch if it is the first of one: those of all parts are
            the plan's.
    """

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


COLUMNS = {
    "part": "{number}",
    "format": "{format}",
    "item | lane | leaf": "{levels}",
    "nonzeros": "{nnz:,}",
    "share": "{share:.1%}",
    "bytes": "{nbytes:,}",
    "tile einsum": "{einsum}",
    "instruction": "{instruction}",
    "predicted us": "{predicted_us:.1f}",
    "floor us": "{roofline_us:.1f}",
    "bound by": "{bound_by}",
}
"""The table's columns, and what stands in them of a `PartReport`."""


@dataclass(frozen=True)
class OperandReport(StepReport):
    """An einsum with one sparse operand.

    Attributes:
        tiles: (least nonzeros, tiles, nonzeros) of each class of tiles, a power of two wide; empty without tiles.
    """

    launches: int = 1
    parts: tuple[PartReport, ...] = ()
    tiles: tuple[tuple[int, int, int], ...] = ()

    @property
    def predicted_us(self) -> float:
        """Microseconds that a call was expected to take on the device, launches included."""
        return sum(p.predicted_us for p in self.parts)

    def details(self) -> list[str]:
        """The launches, the table of parts, and how full tiles are."""
        rows = [list(COLUMNS), *([cell.format_map(vars(p)) for cell in COLUMNS.values()] for p in self.parts)]
        most = max((nnz for _, _, nnz in self.tiles), default=0)
        return [
            f"launches {self.launches}",
            "",
            aligned(rows, left=range(len(COLUMNS)), ruled=True),
            *(["", "tiles by nonzeros:"] if self.tiles else []),
            *(
                f"  {least:>5} or more  {count:>10,} tiles  {nnz:>13,} nonzeros  {'#' * round(40 * nnz / most)}"
                for least, count, nnz in self.tiles
            ),
        ]


@dataclass(frozen=True)
class PairReport(StepReport):
    """A contraction of two sparse operands.

    Attributes:
        tasks: pairs of nonzeros that meet.
        pairs: pairs of blocks that meet.
        block: rows, columns and contracted positions of a block.
        unfolded: batch, free of x, contracted and free of y coordinates that meet anything.
        expected: (what takes it, expected microseconds) of the plan.
        threshold: nonzeros from which a block of x is multiplied as a block, in a hybrid.
        shares: (nonzeros of x, pairs) of blocks and of what is not in blocks, in a hybrid.
    """

    roles: str = ""
    tasks: int = 0
    pairs: int = 0
    block: tuple[int, int, int] = (0, 0, 0)
    unfolded: tuple[int, int, int, int] = (0, 0, 0, 0)
    nnz: int = 0
    nbytes: int = 0
    expected: tuple[tuple[str, float], ...] = ()
    threshold: int = 0
    shares: tuple[tuple[int, int], ...] = ()

    def details(self) -> list[str]:
        """Return lines on the operands' roles, the pairs that meet, and the result."""
        r, c, k = self.block
        lines = [
            f"indices  {self.roles or 'none'}",
            f"products {self.tasks:,} pairs of nonzeros; {self.pairs:,} pairs of blocks {r}x{k} . {k}x{c}; "
            f"as matrices {' x '.join(f'{n:,}' for n in self.unfolded)}",
        ]
        if self.shares:
            (filled, pairs), (rest, tasks) = self.shares
            lines += [
                f"split    {filled:,} nonzeros of x in blocks of {self.threshold:,} or more, {pairs:,} pairs of "
                f"blocks; {rest:,} others, {tasks:,} pairs of nonzeros"
            ]
        if self.expected:
            lines.append(f"expected {', '.join(f'{name} {us:.1f} us' for name, us in self.expected)}")
        return [*lines, f"result   {self.nnz:,} nonzeros; {self.nbytes:,} bytes kept for calls"]


@dataclass(frozen=True)
class Explanation:
    """A compiled kernel, explained. Of one sparse operand, it has the attributes of its one step's report too.

    Attributes:
        profile: the device whose numbers the expected times are computed with, and how many of them were measured
            there; empty where nothing is expected.
        measured: the fields of that `DeviceProfile` that were measured, by name.
        nnz: entries of the result of several sparse operands, or of several steps.
        rewrites: the einsums that are run in its place, one after the other, and why.
    """

    equation: str
    plan: str
    reason: str
    backend: str
    device: str
    profile: str
    measured: tuple[str, ...]
    steps: tuple[StepReport, ...]
    nnz: int | None = None
    rewrites: tuple[str, ...] = ()

    @property
    def step(self) -> OperandReport | None:
        """The report of the only step, if it has one sparse operand; else None."""
        return self.steps[0] if len(self.steps) == 1 and isinstance(self.steps[0], OperandReport) else None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in REPORTED and self.step is not None:
            return getattr(self.step, name)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data: one dict for one sparse operand, and a dict a step for several."""
        data = asdict(self)
        if self.step is None:
            return data
        del data["nnz"]
        return data | data.pop("steps")[0]

    def __repr__(self) -> str:
        if self.step is None:
            said = f"{', '.join(s.plan for s in self.steps)}, {self.nnz:,} nonzeros"
        else:
            said = f"{self.plan}: {' + '.join(p.format for p in self.step.parts)}, {self.step.predicted_us:.1f} us"
        return f'Explanation("{self.equation}", {said}; print it for a table)'

    def _repr_html_(self) -> str:
        """Return the parts as a table, above everything that print says."""
        head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
        parts = () if self.step is None else self.step.parts
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(cell.format_map(vars(part)))}</td>' for cell in COLUMNS.values())}</tr>"
            for part in parts
        )
        table = f"<table><tr>{head}</tr>{rows}</table>" if parts else ""
        title = f"<b>{escape(self.equation)}</b>: {escape(self.plan)}, {escape(self.reason)}"
        return f"<div>{title}{table}<details><summary>all</summary><pre>{escape(str(self))}</pre></details></div>"

    def __str__(self) -> str:
        lines = [f"plan     {self.plan}, {self.reason}", f"runs     {self.backend} on {self.device}"]
        lines += [f"profile  {self.profile}"] if self.profile else []
        lines += [f"run as   {rewrite}" for rewrite in self.rewrites]
        if self.step is not None:
            lines += _step_lines(self.step)
        else:
            lines.append(f"result   {self.nnz:,} nonzeros")
            for number, s in enumerate(self.steps):
                lines += ["", f"step {number}   {s.equation}   {s.plan}, {s.reason}"]
                lines.append(indent("\n".join(_step_lines(s)), "  "))
        return "\n".join([f'"{self.equation}"', indent("\n".join(lines), "  ")])


@dataclass(frozen=True)
class TileReport:
    """The tiles that one pass of an attention or map goes along.

    Attributes:
        result: what is computed: the result, or gradients of rows or columns.
        height: rows of a tile.
        width: columns of a tile.
        gathered: whether a tile holds any columns of its rows, and not neighbouring ones.
        full: tiles without a mask.
        partial: tiles with a mask.
        filled: share of the tiles' places that the pattern has.
        path: the file of the generated program, if there is one yet.
    """

    result: str
    height: int
    width: int
    gathered: bool
    full: int
    partial: int
    filled: float
    path: str = ""

    def __str__(self) -> str:
        kind = "gathered" if self.gathered else "neighbouring"
        lines = [
            f"tiles    {self.full:,} full, {self.partial:,} partial, {self.height} rows x {self.width} {kind} columns, "
            f"filled by {self.filled:.0%}: {self.result}"
        ]
        return "\n".join(lines + ([f"source   {self.path}"] if self.path else []))


@dataclass(frozen=True)
class MapReport:
    """The way that an attention or map ran.

    Attributes:
        name: of the function.
        way: ``in one kernel`` or ``in steps``.
        reason: why it ran in steps; empty in one kernel.
        backend: what kernels are printed for, or steps run with.
        device: where.
        shape: rows and columns.
        patterns: how many patterns the heads have.
        tiles: what passes go along, if there are kernels.
    """

    name: str
    way: str
    reason: str
    backend: str
    device: str
    shape: tuple[int, int]
    patterns: int
    tiles: tuple[TileReport, ...] = ()

    def __str__(self) -> str:
        rows, columns = self.shape
        lines = [f"runs     {self.way}{f': {self.reason}' if self.reason else ''}; {self.backend} on {self.device}"]
        lines.append(f"pairs    {rows:,} rows x {columns:,} columns, {self.patterns:,} pattern(s)")
        return "\n".join([self.name, indent("\n".join([*lines, *map(str, self.tiles)]), "  ")])


@dataclass(frozen=True)
class MapExplanation:
    """The ways that the attentions and maps of a call ran, in order; prints as text."""

    maps: tuple[MapReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(map(str, self.maps))


watched: ContextVar[list[MapReport] | None] = ContextVar("watched", default=None)
"""Where attentions and maps report how they run, while a call is explained."""


def explained(function: Callable[..., Any], *args: Any, **kwargs: Any) -> MapExplanation:
    """Call a function, and return how its attentions and maps ran."""
    reports: list[MapReport] = []
    token = watched.set(reports)
    try:
        function(*args, **kwargs)
    finally:
        watched.reset(token)
    return MapExplanation(tuple(reports))


REPORTED = (*OperandReport.__dataclass_fields__, "predicted_us")
"""The fields of an explanation of a single step with one sparse operand."""


def in_microseconds(considered: Iterable[tuple[str, float]]) -> tuple[tuple[str, float | None], ...]:
    """The candidates of a choice as a report has them, of their seconds: infinitely many where one does not fit."""
    return tuple((name, None if seconds == inf else 1e6 * seconds) for name, seconds in considered)


def _step_lines(step: StepReport) -> list[str]:
    """The file of a step's program, what is particular to it, and the candidates with their expected times."""
    lines = [f"source   {step.path}"] if step.path else []
    lines += step.details()
    if step.timed:
        expected = dict(step.considered)
        lines += ["", "timed, us, and expected us:"]
        for name, micro in step.timed:
            predicted = expected.get(name)
            lines.append(f"  {micro:12.1f}  {'' if predicted is None else f'{predicted:.1f}':>10}  {name}")
    if step.considered:
        lines += ["", "considered, expected us:"]
        for name, predicted in step.considered:
            lines.append(f"  {'does not fit' if predicted is None else f'{predicted:12.1f}'}  {name}")
    if step.dismissed:
        lines += ["", "not counted, least us by a sample:", *(f"  {us:12.1f}  {name}" for name, us in step.dismissed)]
    return lines


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (), ruled: bool = False) -> str:
    """The text of a table, its columns two spaces apart.

    Args:
        rows: cells of each row, the names of the columns first.
        left: columns whose cells stand at the left; those of others stand at the right.
        ruled: put a rule below the names.
    """
    columns = []
    for n, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        names = [column[0], "-" * width] if ruled else [column[0]]
        columns.append([cell.ljust(width) if n in left else cell.rjust(width) for cell in (*names, *column[1:])])
    return "\n".join(["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)])


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
