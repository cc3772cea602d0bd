"""The scalar and the dense path as what `PairStep` runs: find the pattern, then values by place."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from sparsetc.codegen import cache
from sparsetc.codegen.launch import source_name
from sparsetc.codegen.split_pairs import Parts
from sparsetc.dense import matmul_precision
from sparsetc.errors import PlanError
from sparsetc.pair.dense import Unfolded
from sparsetc.pair.scalar import TaskSums
from sparsetc.pair.source import dense_source
from sparsetc.pair.symbolic import Budget, picked


class NumericPath(Protocol):
    """One way to the values of a result whose pattern is known."""

    name: str

    @property
    def source(self) -> str:
        """The text of the generated program."""
        ...

    @property
    def path(self) -> Path:
        """The file it lies in."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes kept for later calls."""
        ...

    def places(self) -> torch.Tensor:
        """(nnz,) the result's places, ascending; called once, before `run`."""
        ...

    def parts(self, x: torch.Tensor, y: torch.Tensor) -> Parts | None:
        """The operands' values in parts, and whether those are exact enough; None where they are multiplied as they
        are.
        """
        ...

    def run(self, x: torch.Tensor, y: torch.Tensor, parts: Parts | None = None) -> torch.Tensor:
        """(nnz,) values by place, of the values of the operands' entries, in the order of their `Side`s.

        Args:
            x: values of the first.
            y: values of the second.
            parts: what `parts` made of both, where they are to be multiplied so.
        """
        ...

    def ptx(self, target: str) -> str:
        """The assembly of the kernel."""
        ...


class ScalarPath:
    """Tasks of pairs of nonzeros."""

    name = "scalar"

    def __init__(self, sums: TaskSums) -> None:
        self.sums = sums

    @property
    def pairs(self) -> int:
        """Pairs of nonzeros that are multiplied."""
        return self.sums.tasks.matching.tasks

    def places(self) -> torch.Tensor:
        """Expand, sort, compress."""
        return self.sums.tasks.places()

    def parts(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """None."""

    def run(self, x: torch.Tensor, y: torch.Tensor, parts: Parts | None = None) -> torch.Tensor:
        """Multiply and add up, task by task."""
        return self.sums.product("z", x, y)

    @property
    def source(self) -> str:
        """The text of the program."""
        return self.sums.of("z").launch.source

    @property
    def path(self) -> Path:
        """The file it lies in."""
        return self.sums.of("z").launch.path

    @property
    def nbytes(self) -> int:
        """Bytes of the kept tasks."""
        return self.sums.tasks.nbytes

    def ptx(self, target: str) -> str:
        """The assembly of the kernel."""
        return self.sums.of("z").ptx(target)


class DensePath:
    """One matrix product a batch."""

    name = "dense"

    def __init__(self, unfolded: Unfolded, equation: str, budget: Budget, precision: str) -> None:
        self.unfolded, self.budget, self.precision = unfolded, budget, precision
        self.source = dense_source(equation, unfolded.meeting.roles)
        module, self.path = cache.load(self.source, budget.settings.cache_dir, source_name(equation, "dense"))
        self.module: Any = module
        self.at = torch.zeros(0, dtype=torch.long, device=budget.device)

    def places(self) -> torch.Tensor:
        """Where the product of the patterns is not 0."""
        u = self.unfolded
        x, y = (torch.ones(at.numel(), dtype=torch.float32, device=at.device) for at in (u.x_at, u.y_at))
        product = self._product(x, y, None, "highest")
        self.budget.check(int(torch.count_nonzero(product)))
        places = self.unfolded.places_of(product)
        self.at = self.unfolded.positions(places)
        return places

    def parts(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """None."""

    def run(self, x: torch.Tensor, y: torch.Tensor, parts: Parts | None = None) -> torch.Tensor:
        """Scatter, multiply, gather."""
        m = self.unfolded.meeting
        return self._product(picked(x, m.x_live), picked(y, m.y_live), self.at, self.precision)

    def _product(self, x: torch.Tensor, y: torch.Tensor, at: torch.Tensor | None, precision: str) -> torch.Tensor:
        u = self.unfolded
        sizes = (u.sizes.batch, u.sizes.free_x, u.sizes.contracted, u.sizes.free_y)
        with matmul_precision(precision):
            return self.module.contract(x, y, u.x_at, u.y_at, sizes, at)

    @property
    def nbytes(self) -> int:
        """Bytes of the positions."""
        return sum(a.numel() * 8 for a in (self.unfolded.x_at, self.unfolded.y_at, self.at))

    def ptx(self, target: str) -> str:
        """Refused: there is none."""
        raise PlanError('plan "dense" runs torch\'s own kernels, which have no PTX; "scalar" and "bcb" have')
