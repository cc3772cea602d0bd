"""Einsums of given blocks that run by dots of operands as they are loaded, and their results without the package."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

import sparsetc as stc

SIZES = {"r": 40, "s": 24}
"""Sizes of letters that no block has."""
EXACT = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6}
"""Errors beside float64, as shares of the largest element."""


class BlockDot(NamedTuple):
    """An einsum of blocks, which lie in a grid, and dense operands."""

    equation: str
    grid: tuple[int, ...]
    sides: tuple[int, ...]

    @property
    def terms(self) -> list[str]:
        """The letters of all operands."""
        return self.equation.split("->")[0].split(",")

    def operands(
        self, dtype: torch.dtype, device: str = "cpu", share: float = 0.5
    ) -> tuple[stc.SparseTensor, list[torch.Tensor]]:
        """A tensor of random blocks, and random dense operands."""
        g = torch.Generator().manual_seed(0)
        coords = (torch.rand(self.grid, generator=g) < share).nonzero().T.contiguous()
        values = torch.randn(coords.shape[1], *self.sides, generator=g).to(device, dtype)
        shape = tuple(n * side for n, side in zip(self.grid, self.sides, strict=True))
        sizes = SIZES | dict(zip(self.terms[0], shape, strict=True))
        dense = [torch.randn([sizes[c] for c in term], generator=g).to(device, dtype) for term in self.terms[1:]]
        return stc.SparseTensor.from_blocks(coords.to(device), values, shape), dense

    def __str__(self) -> str:
        return f"{self.equation} {'x'.join(map(str, self.sides))}"


def check(found: torch.Tensor | stc.SparseTensor, want: torch.Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    """Compare a result, or a gradient, with that of float64."""
    dense = found.to_dense() if isinstance(found, stc.SparseTensor) else found
    assert dense.dtype == dtype
    error = (dense.double() - want).abs().max() / want.abs().max()
    assert error < times * EXACT[dtype], f"an error of {error:.1e}"


def expected(equation: str, x: stc.SparseTensor, dense: list[torch.Tensor]) -> torch.Tensor:
    """The result in float64, by torch."""
    return torch.einsum(equation, x.to_dense().double(), *(d.double() for d in dense))


def in_halves(plan: stc.plans.Plan) -> stc.plans.Plan:
    """The plan with its dots of float32 in halves."""
    (part,) = plan.parts
    return replace(plan, parts=(replace(part, schedule=replace(part.schedule.by_rule(), precision="f16x3")),))


SPMM = "ij,jr->ir"
CASES = [
    *(BlockDot(SPMM, (4, 4), (side, side)) for side in (8, 16, 32, 64, 128)),
    BlockDot(SPMM, (3, 2), (20, 48)),
    BlockDot("ij,ir->jr", (4, 3), (16, 32)),
    BlockDot("ij,rj->ri", (4, 4), (16, 16)),
    BlockDot("ij,jrs->isr", (4, 4), (32, 16)),
    BlockDot("ij,ir,jr->ij", (4, 4), (16, 16)),
    BlockDot("ijk,jr,kr->ir", (2, 2, 2), (16, 16, 16)),
    BlockDot("ijk,ir,kr->jr", (2, 2, 2), (16, 8, 4)),
    BlockDot("ijk,ir,jr->kr", (2, 2, 2), (8, 16, 16)),
    BlockDot("ijk,jr,ks->irs", (2, 2, 2), (16, 16, 16)),
    BlockDot("ijk,kr->ijr", (2, 2, 2), (8, 16, 16)),
    BlockDot(SPMM, (4, 2), (16, 320)),
    BlockDot("ij,ir,jr->ij", (3, 4), (32, 16)),
    BlockDot("ij,jr,ir->ir", (4, 4), (16, 16)),
    BlockDot("ij,jr,s->irs", (4, 4), (16, 16)),
]
