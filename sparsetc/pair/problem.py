"""A contraction of two sparse operands as the methods to run it see it, and what each of them has to say.

In: a `Join`, the types, the settings, and a `Plan`, whose parts say the sides of blocks and how these are stored, or a
request for one, whose options do. Out: `PairProblem`: what a method is chosen by, and prepares its path from. Forms of
the operands that take counting or sorting are made when they are first asked for. A `PairMethod` is one way to
contract, with what that is expected to take; a `NumericPath` is what runs it. `plan_bcb` is a request for blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sparsetc.codegen.launch import accumulator
from sparsetc.codegen.split_float16 import Halves
from sparsetc.device.profile import DeviceProfile, profile_of
from sparsetc.errors import PlanError
from sparsetc.ir.plan import PAIRED_PLANS, SIDE, Part, Plan, check_threshold, requested
from sparsetc.pair.blocking import Blocking
from sparsetc.pair.join import Join
from sparsetc.pair.symbolic import Budget
from sparsetc.planner.candidate import Candidate
from sparsetc.support.lru import cached_property

BLOCKS, HYBRID = "bcb", "bcb+scalar"
STORAGES = ("auto", "whole", "bitmap")


def check_blocks(storages: object, threshold: object, formats: object, sides: Mapping[str, object]) -> None:
    """Raise `PlanError` unless this is what `plan_bcb` takes, with a storage for each of two operands."""
    if not _two_of(STORAGES, storages):
        raise PlanError(f"storage must be one of {', '.join(STORAGES)}, or a pair of them, found {storages!r}")
    check_threshold(threshold, 1)
    for letter, side in sides.items():
        if not isinstance(side, int) or not 1 <= side < 2**63 or side & (side - 1):
            raise PlanError(f"the side of {letter!r} must be a power of two, below 2**63, found {side!r}")
    if not _two_of(("bcb", "coo"), formats):
        raise PlanError(f'formats must be "bcb" or "coo" for each of two operands, found {formats!r}')


def _two_of(known: tuple[str, ...], found: object) -> bool:
    return isinstance(found, tuple | list) and len(found) == 2 and all(f in known for f in found)


def plan_bcb(
    storage: str | tuple[str, str] = "auto",
    threshold: int | None = None,
    formats: tuple[str, str] = ("bcb", "bcb"),
    **sides: int,
) -> Plan:
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
    storages = (storage, storage) if isinstance(storage, str) else storage
    check_blocks(storages, threshold, formats, sides)
    named = (("storage", tuple(storages)), ("threshold", threshold), ("formats", tuple(formats)))
    chosen = (("auto", "auto"), None, ("bcb", "bcb"))
    options: list[tuple[str, Any]] = [(SIDE + letter, side) for letter, side in sorted(sides.items())]
    options += [own for own, free in zip(named, chosen, strict=True) if own[1] != free]
    return Plan(BLOCKS if threshold is None else HYBRID, options=tuple(options))


def named_sides(plan: Plan) -> dict[str, int]:
    """Sides of blocks by letter, as the options of a request or the parts of a plan name them."""
    if plan.is_request:
        return {name.removeprefix(SIDE): n for name, n in plan.options if name.startswith(SIDE)}
    return {letter: n for part in plan.parts for letter, n in part.sides.items()}


def sides_of(plan: Plan, terms: Sequence[Sequence[str]]) -> dict[str, int]:
    """Sides of blocks by letter, for operands of given letters: an operand in ``coo`` has blocks of one position."""
    formats = plan.option("formats", ("bcb", "bcb"))
    single = [c for term, name in zip(terms, formats, strict=True) if name == "coo" for c in term]
    return named_sides(plan) | dict.fromkeys(single, 1)


def storages_of(plan: Plan) -> tuple[str, str]:
    """How blocks are stored, ``auto``, ``whole`` or ``bitmap``, for each operand in the equation's order."""
    if not plan.parts:
        x, y = plan.option("storage", ("auto", "auto"))
        return x, y
    x, y = ("bitmap" if part.bitmap else "whole" for part in plan.parts[:2])
    return x, y


def check_pairs(wanted: Any, letters: Iterable[str] | None = None) -> Plan:
    """The plan wanted, or PlanError where it is not of two sparse operands, or has sides of other letters."""
    plan = requested(wanted)
    if not plan.pairs and not (plan.is_request and plan.name in ("auto", *PAIRED_PLANS)):
        raise PlanError(
            f"plan must be auto, {', '.join(PAIRED_PLANS)} or plan_bcb(...) for two sparse operands, found {wanted!r}"
        )
    check_threshold(plan.option("threshold", None), 1)
    if plan.is_request:
        storages, formats = plan.option("storage", ("auto", "auto")), plan.option("formats", ("bcb", "bcb"))
        check_blocks(storages, plan.option("threshold", None), formats, named_sides(plan))
    unknown = sorted(set(named_sides(plan)) - set(letters)) if plan.is_request and letters is not None else ()
    if unknown:
        raise PlanError(f"the plan gives sides to {', '.join(unknown)}, which the equation does not have")
    return plan


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PairProblem:
    """``x,y->output`` of two patterns."""

    join: Join
    equation: str
    wanted: Plan
    """The plan given, or the request for one."""
    sides: dict[str, int]
    """Sides of blocks that were asked for, by letter."""
    dtype: torch.dtype
    backend: str
    budget: Budget
    swapped: bool
    """Whether x is the equation's second operand."""

    @cached_property
    def width(self) -> int:
        """Bytes of a value as sums keep it."""
        return accumulator(self.dtype).itemsize

    @cached_property
    def precision(self) -> str:
        """``highest``, ``high`` or ``medium``."""
        return self.budget.settings.effective_precision()

    @property
    def rated(self) -> str:
        """The precision by which rates are named."""
        return "float64" if self.dtype in (torch.float64, torch.complex128) else self.precision

    @cached_property
    def profile(self) -> DeviceProfile:
        """The profile of the device, or of the GPU that Triton programs of operands on a CPU are made for."""
        return profile_of(self.budget.device, self.budget.settings, self.backend)

    @cached_property
    def blocking(self) -> Blocking:
        """The operands cut into blocks, with the sides that the plan names."""
        return Blocking.of(self.join, self.sides)

    @cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What a method makes of the problem: made at the first call with this key, and kept."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    # -- plans ------------------------------------------------------------------------------------------------------
    def given(self, x_and_y: Sequence[T]) -> tuple[T, ...]:
        """What is known of x and y in the equation's order, or the reverse."""
        return tuple(reversed(x_and_y)) if self.swapped else tuple(x_and_y)

    def parts(self, format: str) -> tuple[Part, ...]:
        """Both operands in a format without blocks, in the equation's order; sizes are known once they are packed."""
        operands = self.given((self.join.x, self.join.y))
        return tuple(Part(format, label="".join(own.letters), operand=n) for n, own in enumerate(operands))


Sizes = tuple[tuple[int, int], ...]
"""(nonzeros, bytes of indices) of x and of y as they are read; of a hybrid, those of its branches."""


class NumericPath(ABC):
    """One way to the values of a result whose pattern is known; it has what `Listed` has, too."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes kept for later calls."""

    @property
    @abstractmethod
    def sizes(self) -> Sizes:
        """How much of each operand is read."""

    @abstractmethod
    def places(self) -> torch.Tensor:
        """(nnz,) the result's places, ascending; called once, before `run`."""

    def halves(self, x: torch.Tensor, y: torch.Tensor) -> Halves | None:
        """The operands' values in halves, and whether those are exact enough; None where they are multiplied as they
        are.
        """
        return None

    @abstractmethod
    def run(self, x: torch.Tensor, y: torch.Tensor, halves: Halves | None = None) -> torch.Tensor:
        """(nnz,) values by place, of the values of the operands' entries, in the order of their `JoinOperand`s.

        Args:
            x: values of the first.
            y: values of the second.
            halves: what `halves` made of both, where they are to be multiplied so.
        """


class PairMethod(ABC):
    """One way to run a contraction of two sparse operands."""

    name: str
    """The name of the method's plans."""

    @abstractmethod
    def seconds(self, p: PairProblem) -> float | None:
        """Time of a call; None where the operands, stored so, do not fit, or there is no kernel for their type."""

    @abstractmethod
    def plan(self, p: PairProblem) -> Plan:
        """The method's plan for the problem, whatever it takes."""

    @abstractmethod
    def prepare(self, p: PairProblem, plan: Plan) -> NumericPath:
        """What runs the plan; `PlanError` or `OutOfMemoryError` where that cannot be."""

    def candidate(self, p: PairProblem, priced: bool = True) -> Candidate:
        """The method's one plan; unpriced where pricing takes counts that what runs the plan may not need."""
        seconds = self.seconds(p) if priced else None
        return Candidate(self.plan(p), (), self.name, None if seconds is None else (seconds,))
