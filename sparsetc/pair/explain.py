"""Why a kernel of several sparse operands is as it is: its steps, what meets in each, and what each path would take.

In: a contraction of `Several`. Out: `PairExplanation`, which prints as a table and gives the same as data.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from sparsetc.explain import device_name
from sparsetc.pair.block_path import BlockPath
from sparsetc.pair.hybrid import HybridPath
from sparsetc.pair.paths import NumericPath
from sparsetc.pair.step import PairStep
from sparsetc.step import Step

if TYPE_CHECKING:
    from sparsetc.pair.several import Several


@dataclass(frozen=True)
class StepReport:
    """One contraction of two operands."""

    equation: str
    plan: str
    reason: str
    roles: str = ""
    tasks: int = 0
    """Pairs of nonzeros that meet."""
    pairs: int = 0
    """Pairs of blocks that meet."""
    block: tuple[int, int, int] = (0, 0, 0)
    """Rows, columns and contracted positions of a block."""
    unfolded: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Batch, free of x, contracted and free of y coordinates that meet anything."""
    nnz: int = 0
    nbytes: int = 0
    path: str = ""
    threshold: int = 0
    """Nonzeros from which a block of x is multiplied as a block, in a hybrid."""
    shares: tuple[tuple[int, int], ...] = ()
    """Of a hybrid: nonzeros of x in blocks and the pairs of those blocks, the other nonzeros and their pairs."""
    considered: tuple[tuple[str, float | None], ...] = ()
    """(path, expected microseconds), the cheapest first; None for one that does not fit or has no kernel."""


@dataclass(frozen=True)
class PairExplanation:
    """A compiled contraction of sparse operands, explained."""

    equation: str
    plan: str
    backend: str
    device: str
    nnz: int
    profile: str
    """The device whose numbers the expected times are computed with, and how many of them were measured there; empty
    where no two sparse operands are contracted."""
    measured: tuple[str, ...]
    """Those fields of its `DeviceProfile`, by name."""
    steps: tuple[StepReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)

    def __repr__(self) -> str:
        steps = ", ".join(s.plan for s in self.steps)
        return f'PairExplanation("{self.equation}", {steps}, {self.nnz:,} nonzeros; print it for a table)'

    def __str__(self) -> str:
        lines = [f'"{self.equation}"', f"  plan     {self.plan}", f"  runs     {self.backend} on {self.device}"]
        lines += [f"  profile  {self.profile}"] if self.profile else []
        lines.append(f"  result   {self.nnz:,} nonzeros")
        for number, s in enumerate(self.steps):
            lines += ["", f"  step {number}   {s.equation}   {s.plan}, {s.reason}"]
            if not s.considered:
                continue
            r, c, k = s.block
            lines += [
                f"    roles     {s.roles or 'none'}",
                f"    meet      {s.tasks:,} pairs of nonzeros; {s.pairs:,} pairs of blocks {r}x{k} . {k}x{c}; "
                f"unfolded {' x '.join(f'{n:,}' for n in s.unfolded)}",
                *_split_lines(s),
                f"    result    {s.nnz:,} nonzeros; {s.nbytes:,} bytes kept for calls",
                f"    source    {s.path}",
                "    considered, expected us:",
            ]
            for name, micro in s.considered:
                lines.append(f"      {'does not fit' if micro is None else f'{micro:12.1f}'}  {name}")
        return "\n".join(lines)


def _split_lines(s: StepReport) -> list[str]:
    if not s.shares:
        return []
    (filled, pairs), (rest, tasks) = s.shares
    return [
        f"    split     {filled:,} nonzeros of x in blocks of {s.threshold:,} or more, {pairs:,} pairs of blocks; "
        f"{rest:,} others, {tasks:,} pairs of nonzeros"
    ]


def explain(kernel: Several) -> PairExplanation:
    """The explanation of a kernel."""
    steps = []
    for step in kernel.chain.steps:
        if isinstance(step.work, PairStep):
            steps.append(_pair(step.work))
        elif isinstance(step.work, Step):
            steps.append(StepReport(step.equation, step.work.plan.name, "a sparse and a dense operand"))
        else:
            steps.append(StepReport(step.equation, "torch.einsum", "two dense operands"))
    profile = kernel.chain.pairs[0].question.profile if kernel.chain.pairs else None
    return PairExplanation(
        equation=kernel.bound.einsum.text,
        plan=kernel.plan.name,
        backend=kernel.backend,
        device=device_name(kernel.device),
        nnz=prod(kernel.shape) if kernel.pattern is None else kernel.pattern.nnz,
        profile=profile.describe() if profile else "",
        measured=profile.measured if profile else (),
        steps=tuple(steps),
    )


def _shares(path: NumericPath) -> tuple[tuple[int, int], ...]:
    if not isinstance(path, HybridPath):
        return ()
    meet = [h.path.cut.pairs.tasks if isinstance(h.path, BlockPath) else h.share.part.tasks for h in path.halves]
    return tuple((h.share.entries.numel(), n) for h, n in zip(path.halves, meet, strict=True))


def _pair(work: PairStep) -> StepReport:
    m, sizes, split = work.meeting, work.meeting.sizes, work.choice.split
    return StepReport(
        equation=work.equation,
        plan=work.choice.name,
        reason=work.choice.reason,
        roles=str(m.roles),
        tasks=m.tasks,
        pairs=work.cut.pairs.tasks,
        block=work.cut.extents,
        unfolded=(sizes.batch, sizes.free_x, sizes.contracted, sizes.free_y),
        nnz=work.nnz,
        nbytes=work.path.nbytes,
        path=str(work.path.path),
        threshold=split.threshold if split else 0,
        shares=_shares(work.path),
        considered=tuple((name, None if t is None else 1e6 * t) for name, t in work.question.expected(every=True)),
    )
