"""A way to contract two sparse operands: what it is expected to take, and what runs it."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Protocol

import torch

from sparsetc.codegen.split_float16 import Halves
from sparsetc.ir.plan import Plan
from sparsetc.ir.program.tile import TileProgram
from sparsetc.pair.problem import PairProblem
from sparsetc.planner.candidate import Estimate
from sparsetc.planner.method import Method

Sizes = tuple[tuple[int, int], ...]
"""(nonzeros, bytes of indices) of x and of y as they are read; of a hybrid, those of its branches."""


class NumericPath(Protocol):
    """One way to the values of a result whose pattern is known."""

    @property
    def programs(self) -> tuple[TileProgram, ...]:
        """The tile programs; none of torch's own product."""

    @property
    def source(self) -> str:
        """The text of the generated program."""

    @property
    def path(self) -> Path:
        """The file it lies in."""

    @property
    def nbytes(self) -> int:
        """Bytes kept for later calls."""

    @property
    def sizes(self) -> Sizes:
        """How much of each operand is read."""

    def places(self) -> torch.Tensor:
        """(nnz,) the result's places, ascending; called once, before `run`."""

    def halves(self, x: torch.Tensor, y: torch.Tensor) -> Halves | None:
        """The operands' values in halves, and whether those are exact enough; None where they are multiplied as they
        are.
        """

    def run(self, x: torch.Tensor, y: torch.Tensor, halves: Halves | None = None) -> torch.Tensor:
        """(nnz,) values by place, of the values of the operands' entries, in the order of their `JoinOperand`s.

        Args:
            x: values of the first.
            y: values of the second.
            halves: what `halves` made of both, where they are to be multiplied so.
        """

    def ptx(self, target: str) -> str:
        """The assembly of the kernel."""


class PairMethod(Method[PairProblem]):
    """One way to run a contraction of two sparse operands."""

    @abstractmethod
    def seconds(self, p: PairProblem) -> float | None:
        """Time of a call; None where the operands, stored so, do not fit, or there is no kernel for their type."""

    @abstractmethod
    def plan(self, p: PairProblem) -> Plan:
        """The method's plan for the problem, whatever it takes."""

    @abstractmethod
    def prepare(self, p: PairProblem, plan: Plan) -> NumericPath:
        """What runs the plan; `PlanError` or `OutOfMemoryError` where that cannot be."""

    def estimates(self, problem: PairProblem) -> tuple[Estimate, ...]:
        """The method's one plan."""
        seconds = self.seconds(problem)
        return (Estimate(self.name, self.plan(problem), None if seconds is None else (seconds,)),)

    def requested(self, problem: PairProblem, request: Plan) -> Estimate:
        """The method's plan, unpriced: pricing takes counts that what runs the plan may not need."""
        return Estimate(self.name, self.plan(problem), None)
