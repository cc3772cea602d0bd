"""``dense``: operands unfolded over the coordinates that meet anything, and torch's matrix product, one a batch."""

from __future__ import annotations

from typing import Any

import torch

from sparsetc.codegen import cache
from sparsetc.codegen.launch import source_name
from sparsetc.codegen.split_float16 import Halves
from sparsetc.errors import PlanError
from sparsetc.ir.plan import Plan
from sparsetc.pair.dense import Unfolded
from sparsetc.pair.method import PairMethod, Sizes
from sparsetc.pair.prices import dense_seconds
from sparsetc.pair.problem import PairProblem
from sparsetc.pair.source import dense_source
from sparsetc.pair.symbolic import Budget, picked
from sparsetc.runtime import integer_einsum
from sparsetc.support.precision import matmul_precision


class Matmul(PairMethod):
    """The unfolded operands are multiplied by torch."""

    name = "dense"

    def seconds(self, p: PairProblem) -> float | None:
        """Time of the product, where the unfolded operands and product take half of the memory limit or less."""
        sizes = p.join.sizes
        fits = self._has_product(p) and sizes.elements * p.width <= p.budget.limit // 2
        return dense_seconds(sizes, p.width, p.rated, p.profile) if fits else None

    def plan(self, p: PairProblem) -> Plan:
        """Both operands as dense matrices."""
        return Plan(self.name, p.parts("strided"), False)

    def prepare(self, p: PairProblem, plan: Plan) -> DensePath:
        """The product, in a precision that is exact for values of 16 bits."""
        sizes, device = p.join.sizes, p.budget.device
        if not self._has_product(p):
            raise PlanError(f'plan "dense" needs a matrix product, which {device.type} has not for {p.dtype}')
        unfolded = f"{sizes.batch} x {sizes.free_x} x {sizes.contracted} x {sizes.free_y}"
        p.budget.require(sizes.elements * p.width, f"{p.budget.what}, unfolded to {unfolded},")
        # 16-bit values, held in float32, are exact in tf32.
        exact = p.dtype in (torch.float16, torch.bfloat16) and device.type == "cuda"
        precision = "high" if exact and p.precision == "highest" else p.precision
        return DensePath(p.unfolded, p.equation, p.budget, precision)

    def _has_product(self, p: PairProblem) -> bool:
        return integer_einsum.has_matrix_product(p.dtype, p.budget.device)


class DensePath:
    """One matrix product a batch."""

    def __init__(self, unfolded: Unfolded, equation: str, budget: Budget, precision: str) -> None:
        self.unfolded, self.budget, self.precision = unfolded, budget, precision
        self.programs = ()
        self.source = dense_source(equation, unfolded.join.roles)
        module, self.path = cache.load(self.source, budget.settings.cache_dir, source_name(equation, "dense"))
        self.module: Any = module
        self.at: torch.Tensor | None = None
        """(nnz,) the positions in the product of the results; None for all."""

    @property
    def sizes(self) -> Sizes:
        """The entries that meet any; no coordinates are read."""
        m = self.unfolded.join
        return (m.x_key.numel(), 0), (m.y_key.numel(), 0)

    def places(self) -> torch.Tensor:
        """Where the product of the patterns is not 0."""
        u = self.unfolded
        x, y = (torch.ones(at.numel(), dtype=torch.float32, device=at.device) for at in (u.x_at, u.y_at))
        product = self._product(x, y, None, "highest")
        self.budget.check(int(torch.count_nonzero(product)))
        places = self.unfolded.places_of(product)
        all_in_order = self.unfolded.line_of_row is None and places.numel() == product.numel()
        self.at = None if all_in_order else self.unfolded.positions(places)
        return places

    def halves(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """None, since values are multiplied as they are."""

    def run(self, x: torch.Tensor, y: torch.Tensor, halves: Halves | None = None) -> torch.Tensor:
        """Scatter, multiply, gather."""
        m = self.unfolded.join
        return self._product(picked(x, m.x_matched), picked(y, m.y_matched), self.at, self.precision)

    def _product(self, x: torch.Tensor, y: torch.Tensor, at: torch.Tensor | None, precision: str) -> torch.Tensor:
        u = self.unfolded
        sizes = (u.sizes.batch, u.sizes.free_x, u.sizes.contracted, u.sizes.free_y)
        with matmul_precision(precision):
            return self.module.contract(x, y, u.x_at, u.y_at, sizes, at)

    @property
    def nbytes(self) -> int:
        """Bytes of the positions."""
        return sum(a.numel() * 8 for a in (self.unfolded.x_at, self.unfolded.y_at, self.at) if a is not None)

    def ptx(self, target: str) -> str:
        """Refused: there is none."""
        raise PlanError('plan "dense" runs torch\'s own kernels, which have no PTX; "scalar" and "bcb" have')
