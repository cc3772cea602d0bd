"""``scalar``: pairs of nonzeros that meet, a multiplication and an addition each."""

from __future__ import annotations

from pathlib import Path

import torch

from sparsetc.codegen.split_float16 import Halves
from sparsetc.ir.plan import Plan
from sparsetc.ir.program.tile import TileProgram
from sparsetc.pair.method import PairMethod, Sizes
from sparsetc.pair.prices import scalar_seconds
from sparsetc.pair.problem import PairProblem
from sparsetc.pair.scalar import TaskSums


class NonzeroPairs(PairMethod):
    """Pairs of nonzeros are multiplied one by one."""

    name = "scalar"

    def seconds(self, p: PairProblem, tasks: int | None = None) -> float:
        """Time of so many pairs, or of all."""
        tasks = p.join.tasks if tasks is None else tasks
        return scalar_seconds(tasks, p.join.rows * p.join.columns, p.width, p.budget, p.profile)

    def plan(self, p: PairProblem) -> Plan:
        """Coordinates and values of both operands."""
        return Plan(self.name, p.parts("coo"), False)

    def prepare(self, p: PairProblem, plan: Plan) -> ScalarPath:
        """The sums over all tasks."""
        return ScalarPath(p.sums)


class ScalarPath:
    """Tasks of pairs of nonzeros."""

    def __init__(self, sums: TaskSums) -> None:
        self.sums = sums

    @property
    def sizes(self) -> Sizes:
        """The entries that meet any, and the coordinates of all."""
        m = self.sums.tasks.join_order.join
        return (m.x_key.numel(), m.x.nbytes), (m.y_key.numel(), m.y.nbytes)

    def places(self) -> torch.Tensor:
        """(nnz,) the distinct places of all tasks: expand, sort, compress."""
        return self.sums.tasks.places()

    def halves(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """None, since values are multiplied as they are."""

    def run(self, x: torch.Tensor, y: torch.Tensor, halves: Halves | None = None) -> torch.Tensor:
        """Multiply and add up, task by task."""
        return self.sums.product("z", x, y)

    @property
    def programs(self) -> tuple[TileProgram, ...]:
        """The program of the sums."""
        return self.sums.of("z").programs.programs

    @property
    def source(self) -> str:
        """The text of the program."""
        return self.sums.of("z").programs.source

    @property
    def path(self) -> Path:
        """The file it lies in."""
        return self.sums.of("z").programs.path

    @property
    def nbytes(self) -> int:
        """Bytes of the kept tasks."""
        return self.sums.tasks.nbytes

    def ptx(self, target: str) -> str:
        """The assembly of the kernel."""
        return self.sums.of("z").ptx(target)
