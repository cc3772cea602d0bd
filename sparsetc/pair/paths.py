"""The scalar and the dense path as what `PairStep` runs: find the pattern, then values by place."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from sparsetc.codegen import cache
from sparsetc.codegen.launch import source_name
from sparsetc.errors import PlanError
from sparsetc.pair.dense import Unfolded, matmul_precision
from sparsetc.pair.scalar import Tasks
from sparsetc.pair.source import dense_source, scalar_source
from sparsetc.pair.sums import add_up
from sparsetc.pair.symbolic import Budget, places_by_expansion


class NumericPath(Protocol):
    """One way to the values of a result whose pattern is known."""

    name: str
    source: str
    path: Path

    @property
    def nbytes(self) -> int:
        """Bytes kept for later calls."""
        ...

    def places(self) -> torch.Tensor:
        """(nnz,) the result's places, ascending; called once, before `run`."""
        ...

    def run(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(nnz,) values by place, of the values of the live entries."""
        ...

    def ptx(self, target: str) -> str:
        """The assembly of the kernel."""
        ...


class ScalarPath:
    """Tasks of pairs of nonzeros."""

    name = "scalar"

    def __init__(self, tasks: Tasks, equation: str, budget: Budget, deterministic: bool) -> None:
        self.tasks, self.budget, self.deterministic = tasks, budget, deterministic
        self.source = scalar_source(equation, tasks.matching.roles)
        module, self.path = cache.load(self.source, budget.settings.cache_dir, source_name(equation, "scalar"))
        self.module: Any = module

    def places(self) -> torch.Tensor:
        """Expand, sort, compress."""
        self.tasks.places = places_by_expansion(self.tasks.matching, self.budget)
        return self.tasks.places

    def run(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Multiply and add up, a chunk of tasks at a time."""
        out = x.new_zeros(self.tasks.places.numel())

        def add(values: torch.Tensor, run: torch.Tensor, count: int) -> torch.Tensor:
            return add_up(values, run, count, self.deterministic)

        self.module.contract(self.tasks, x, y, out, add)
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of the kept tasks."""
        return self.tasks.nbytes

    def ptx(self, target: str) -> str:
        """Refused: there is none."""
        raise PlanError('plan "scalar" runs torch\'s own kernels, which have no PTX; plan="bcb" has')


class DensePath:
    """One matrix product a batch."""

    name = "dense"

    def __init__(self, unfolded: Unfolded, equation: str, budget: Budget, precision: str) -> None:
        self.unfolded, self.budget, self.precision = unfolded, budget, precision
        self.source = dense_source(equation, unfolded.matching.roles)
        module, self.path = cache.load(self.source, budget.settings.cache_dir, source_name(equation, "dense"))
        self.module: Any = module
        self.at = torch.zeros(0, dtype=torch.long, device=budget.device)

    def places(self) -> torch.Tensor:
        """Where the product of the patterns is not 0."""
        m = self.unfolded.matching
        x, y = (torch.ones(e.numel(), dtype=torch.float32, device=e.device) for e in (m.x_entry, m.y_entry))
        product = self._product(x, y, None, "highest")
        self.budget.check(int(torch.count_nonzero(product)))
        places = self.unfolded.places_of(product)
        self.at = self.unfolded.positions(places)
        return places

    def run(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Scatter, multiply, gather."""
        return self._product(x, y, self.at, self.precision)

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
        raise PlanError('plan "dense" runs torch\'s own kernels, which have no PTX; plan="bcb" has')
