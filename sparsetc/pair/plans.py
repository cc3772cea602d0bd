"""The plans of a contraction of sparse operands, as a user names them.

In: names, or what `plan_bcb` is given. Out: a name of `PLANS`, or a `BcbPlan`; PlanError for anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sparsetc.errors import PlanError
from sparsetc.ir.plan import PAIRED_PLANS, PairedPlan, Plan
from sparsetc.options import Options

PLANS = PAIRED_PLANS
HYBRID = "bcb+scalar"
STORAGES = ("auto", "whole", "bitmap")


@dataclass(frozen=True)
class BcbPlan(PairedPlan):
    """``bcb``, or ``bcb+scalar``, with sides, a storage, a threshold or formats of one's own: from `plan_bcb`."""

    sides: tuple[tuple[str, int], ...] = ()
    storage: str | tuple[str, str] = "auto"
    threshold: int | None = None
    formats: tuple[str, str] = ("bcb", "bcb")

    @property
    def storages(self) -> tuple[str, str]:
        """Of each operand, in the equation's order."""
        return (self.storage, self.storage) if isinstance(self.storage, str) else self.storage

    def sides_of(self, terms: Sequence[Sequence[str]]) -> dict[str, int]:
        """Sides by letter, for operands of these letters: an operand in ``coo`` has blocks of one position."""
        single = [c for term, name in zip(terms, self.formats, strict=True) if name == "coo" for c in term]
        return dict(self.sides) | dict.fromkeys(single, 1)


StepPlan = str | BcbPlan | Plan | None
"""Of one contraction: of two sparse operands a name or blocks, of a sparse and a dense one a `Plan`, of two dense ones
None."""


@dataclass(frozen=True)
class PairPart:
    """One operand of a contraction of two, as its path reads it."""

    format: str
    """``bcb`` or ``coo``; ``strided`` where it is unfolded to a dense matrix."""
    label: str
    """The operand's letters."""
    nnz: int
    nbytes: int
    """Bytes of its indices and values."""
    sides: tuple[int, ...] = ()
    """Positions of a block along each letter; empty where there are no blocks."""
    storage: str = ""
    """``whole`` or ``bitmap``, of blocks."""

    def __str__(self) -> str:
        blocks = f" in {self.storage} blocks of {'x'.join(map(str, self.sides))}" if self.sides else ""
        return f"{self.format}[{self.label}]{blocks}: {self.nnz:,} nonzeros"


@dataclass(frozen=True)
class PairPlan(PairedPlan):
    """What a `PairKernel` does; given as ``plan=``, it makes the same kernel of the same operands."""

    name: str
    """The first contraction's path."""
    parts: tuple[PairPart, ...]
    """Both operands of each contraction of two sparse ones; of a hybrid, those of its halves."""
    steps: tuple[StepPlan, ...]
    """By contraction, in order."""
    reason: str = field(default="", compare=False)

    def __str__(self) -> str:
        return "\n".join([f"plan {self.name}", *(f"  part {n}: {p}" for n, p in enumerate(self.parts))])

    def __repr__(self) -> str:
        return f"PairPlan({self.name!r}, {' + '.join(f'{p.format}[{p.label}]' for p in self.parts)})"

    def of_step(self, number: int, steps: int) -> StepPlan:
        """The plan of one contraction of so many; `PlanError` where the plan was made for another number of them."""
        if steps != len(self.steps):
            raise PlanError(f"the plan is of {len(self.steps)} contractions, the equation takes {steps}; compile anew")
        return self.steps[number]


def plan_bcb(
    storage: str | tuple[str, str] = "auto",
    threshold: int | None = None,
    formats: tuple[str, str] = ("bcb", "bcb"),
    **sides: int,
) -> BcbPlan:
    """Blocks with sides given by letter, as in ``plan_bcb(i=8, j=8, k=32)``; those not named are chosen.

    Args:
        storage: how a GPU reads blocks: ``"whole"``, ``"bitmap"`` (bits and packed values, section III-D), or
            ``"auto"``: whole unless that takes more than a quarter of the memory limit, when the larger operand, or
            both, are bitmaps. A pair names one for each operand, in the equation's order. Integers are read whole, and
            so is everything on the CPU.
        threshold: nonzeros from which a block of the first operand in the result is multiplied as a block; those of the
            others are multiplied one by one (``bcb+scalar``). None multiplies all as blocks.
        formats: ``"bcb"`` or ``"coo"`` for each of the two operands, in the equation's order. A nonzero in ``coo``
            meets blocks that have side 1 along the letters that both operands have, and scales them.
        sides: powers of two; letters that both operands keep have side 1 whatever is given.
    """
    found = BcbPlan(tuple(sorted(sides.items())), storage, threshold, formats)
    if not set(found.storages) <= set(STORAGES) or len(found.storages) != 2:
        raise PlanError(f"storage must be one of {', '.join(STORAGES)}, or a pair of them, found {storage!r}")
    if threshold is not None and (not isinstance(threshold, int) or threshold < 1):
        raise PlanError(f"threshold must be a number of nonzeros, 1 or more, found {threshold!r}")
    for letter, side in sides.items():
        if not isinstance(side, int) or side < 1 or side & (side - 1):
            raise PlanError(f"the side of {letter!r} must be a power of two, found {side!r}")
    if len(formats) != 2 or not set(formats) <= {"bcb", "coo"}:
        raise PlanError(f'formats must be "bcb" or "coo" for each of two operands, found {formats!r}')
    return found


def plan_name(settings: Options, letters: Iterable[str] | None = None) -> str:
    """``auto`` or one of `PLANS`, a `PairPlan`'s own; PlanError for other plans, or sides of other `letters`."""
    wanted = settings.plan
    if isinstance(wanted, PairPlan):
        return wanted.name
    if isinstance(wanted, BcbPlan):
        unknown = [] if letters is None else sorted({c for c, _ in wanted.sides} - set(letters))
        if unknown:
            raise PlanError(f"the plan gives sides to {', '.join(unknown)}, which the equation does not have")
        return "bcb" if wanted.threshold is None else HYBRID
    if not isinstance(wanted, str) or wanted not in ("auto", *PLANS):
        raise PlanError(
            f"plan must be auto, {', '.join(PLANS)} or plan_bcb(...) for two sparse operands, found {wanted!r}"
        )
    return wanted
