"""A contraction of two sparse operands, as the methods to run it see it.

In: a `Join`, the types and the settings. Out: `PairProblem`: what a method is chosen by, and prepares its path from.
Forms of the operands that take counting or sorting are made when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from sparsetc.device.profile import DeviceProfile
from sparsetc.device.record import profile_of
from sparsetc.ir.plan import SIDE, Part, Plan, Storage
from sparsetc.ir.program.tile import TileProgram
from sparsetc.pair.blocking import Bitmaps, Blocking
from sparsetc.pair.dense import Unfolded
from sparsetc.pair.join import Join
from sparsetc.pair.populations import Populations
from sparsetc.pair.scalar import TaskSums
from sparsetc.pair.sums import kept_dtype
from sparsetc.pair.symbolic import Budget, JoinOrder
from sparsetc.pair.tasks import Tasks
from sparsetc.support.cached import cached_property

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

    @property
    def width(self) -> int:
        """Bytes of a value as sums keep it."""
        return kept_dtype(self.dtype).itemsize

    @property
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

    def block_program(self, bitmaps: Bitmaps) -> TileProgram:
        """What a pair of blocks is priced by: lowered once a storage, and not for every threshold."""
        how = (self.dtype, self.backend, self.precision, bitmaps)
        return self.once(bitmaps, lambda: self.blocking.program("", *how, halves=self.blocking.in_halves(*how)))

    @cached_property
    def unfolded(self) -> Unfolded:
        """The operands' places, were they dense."""
        return Unfolded(self.join)

    @cached_property
    def populations(self) -> Populations:
        """What thresholds are found by."""
        return Populations.of(self.blocking)

    @cached_property
    def sums(self) -> TaskSums:
        """Sums over the tasks of all nonzeros."""
        tasks = Tasks(JoinOrder.of(self.join), self.budget)
        return TaskSums(tasks, self.equation, kept_dtype(self.dtype), self.backend, self.budget.settings)

    def of(self, join: Join) -> PairProblem:
        """The problem of some of the nonzeros that meet."""
        return replace(self, join=join)

    # -- plans ------------------------------------------------------------------------------------------------------
    def given(self, x_and_y: Sequence[T]) -> tuple[T, ...]:
        """What is known of x and y in the equation's order, or the reverse."""
        return tuple(reversed(x_and_y)) if self.swapped else tuple(x_and_y)

    def parts(self, format: str) -> tuple[Part, ...]:
        """Both operands in a format without blocks, in the equation's order; sizes are known once they are packed."""
        operands = self.given((self.join.x, self.join.y))
        return tuple(Part(format, label="".join(own.letters), operand=n) for n, own in enumerate(operands))

    def block_parts(self, bitmaps: Bitmaps) -> tuple[Part, ...]:
        """Both operands in blocks, in the equation's order; sizes are known once they are packed."""
        blocking = self.blocking
        lengths = dict((*blocking.rows, *blocking.columns, *blocking.inner))
        stored = self.given(list(zip((blocking.x, blocking.y), bitmaps, strict=True)))
        return tuple(
            replace(
                part,
                format=blocks.format,
                storage=Storage(params=(("bitmap", int(bitmap)), *((SIDE + c, lengths[c]) for c in part.label))),
            )
            for part, (blocks, bitmap) in zip(self.parts("bcb"), stored, strict=True)
        )
