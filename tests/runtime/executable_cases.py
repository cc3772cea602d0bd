"""Executables without a kernel around them: programs of each kind, and the tensors that they are run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import SIZES, Problem, explicit_plan, poisoned, tile_plan, two_parts

import sparsetc as stc
from sparsetc.codegen.parts import Values
from sparsetc.runtime.executable import Arrays, Executable

MTTKRP, SAMPLED, TTV = "ijk,jr,kr->ir", "ijk,ir,jr->ijk", "ijk,k->ij"
PlanOf = Callable[[str, list[Any]], stc.plans.Plan]


def explicit(format: str, levels: str, **how: Any) -> PlanOf:
    return lambda equation, operands: explicit_plan(format, levels, {"r": 8} if "r" in equation else {}, **how)


def in_copies(copies: int, format: str, levels: str, **how: Any) -> PlanOf:
    """A plan of one part whose items add to copies of the output in turn."""

    def plan(equation: str, operands: list[Any]) -> stc.plans.Plan:
        whole = explicit(format, levels, **how)(equation, operands)
        (part,) = whole.parts
        return replace(whole, parts=(replace(part, schedule=replace(part.schedule, copies=copies)),))

    return plan


def long_rows_added(kept: str, summed: str, most: int = 2) -> PlanOf:
    """A plan whose longest rows are cut and added to, and whose other rows are stored, a lane each."""

    def plan(equation: str, operands: list[Any]) -> stc.plans.Plan:
        rows = operands[0].coords[[int(mode) for mode in kept]]
        longest = max(torch.unique(rows, dim=1, return_counts=True)[1].tolist())
        long = explicit("coo", f"{kept}||{summed}", max_item_nnz=most, lanes=4)(equation, operands).parts[0]
        short = explicit("fiber", f"|{kept}|{summed}", max_item_nnz=4, lanes=4)(equation, operands).parts[0]
        return stc.plans.Plan("coo+rows", (long, short), False, "run_length", (("threshold", longest),))

    return plan


CASES: dict[str, tuple[str, PlanOf]] = {
    "coo": (MTTKRP, explicit("coo", "0||12", max_item_nnz=3, lanes=4)),
    "fiber": (MTTKRP, explicit("fiber", "0|1|2", max_item_nnz=3, lanes=4)),
    "rows": (MTTKRP, explicit("fiber", "|0|12", lanes=4, max_item_nnz=8)),
    "rows, an item a block": (MTTKRP, explicit("fiber", "|0|12", lanes=4, max_item_nnz=4)),
    "sparse rows, an item a block": (TTV, explicit("fiber", "|01|2", lanes=4, max_item_nnz=4)),
    "long rows added, others stored": (TTV, long_rows_added("01", "2")),
    "long rows added, others stored, dense": (MTTKRP, long_rows_added("0", "12")),
    "added by lanes": (MTTKRP, explicit("fiber", "1|0|2", lanes=4)),
    "added by nonzeros": ("ijk,ir,jr->kr", explicit("coo", "0||12", max_item_nnz=3, lanes=4)),
    "lanes, in copies": (MTTKRP, in_copies(4, "fiber", "1|0|2", lanes=4)),
    "nonzeros, in copies": ("ijk,ir,jr->kr", in_copies(2, "coo", "0||12", max_item_nnz=3, lanes=4)),
    "stored, in copies": (MTTKRP, in_copies(4, "coo", "0||12", lanes=4)),
    "rows, owned": (MTTKRP, explicit("coo", "0||12", lanes=4)),
    "dense tiles": (MTTKRP, lambda equation, operands: tile_plan(equation, operands, "triton")),
    "sampled": (SAMPLED, explicit("coo", "0||12", max_item_nnz=3, lanes=4)),
    "sampled, fibers": (SAMPLED, explicit("fiber", "0|1|2", max_item_nnz=3, lanes=4)),
    "sparse rows": (TTV, explicit("fiber", "0|1|2", lanes=4)),
    "forests": (MTTKRP, lambda equation, operands: stc.plans.Plan("mm-csf")),
    "two parts": (MTTKRP, lambda equation, operands: two_parts(equation, operands, "fiber", fused=False)),
}
ADDED_BY_A_SECOND_PASS = (
    "coo",
    "fiber",
    "added by lanes",
    "added by nonzeros",
    "nonzeros, in copies",
    "forests",
    "long rows added, others stored",
    "long rows added, others stored, dense",
)


@dataclass(frozen=True)
class Made:
    """An executable and everything that it is run on."""

    executable: Executable
    arrays: Arrays
    values: Values
    tables: list[torch.Tensor]
    expected: torch.Tensor
    """(rows, *width) by the kernel."""

    def run(self, **how: Any) -> torch.Tensor:
        return self.executable.run(self.arrays, self.values, self.tables, **how)

    def random(self) -> torch.Tensor:
        """An output of no meaning."""
        g = torch.Generator().manual_seed(3)
        return torch.rand(self.executable.shape, generator=g, dtype=torch.float64).to(self.executable.dtype)


def made(name: str, backend: str, deterministic: bool = False) -> Made:
    equation, plan = CASES[name]
    rows = 40 if name == "dense tiles" else 12  # more than one tile
    operands = Problem(equation, {**SIZES, "i": rows}, "random", torch.float64).operands()
    x, *dense = operands
    settings: dict[str, Any] = {"backend": backend, "deterministic": deterministic}
    kernel = stc.compile(equation, *operands, plan=plan(equation, operands), **settings)
    step = kernel.step
    values = step.packed(x.values)
    assert values is not None
    expected = step.rows(x.values, dense)
    assert bool(expected.any())
    return Made(step.executable, step.arrays, values, step.tables(dense), expected)


def check_output(m: Made) -> None:
    """What is made, of memory that holds anything, and what is overwritten."""
    with poisoned():
        torch.testing.assert_close(m.run(), m.expected)
    out = torch.full_like(m.expected, torch.nan)
    for _ in range(2):
        assert m.run(out=out) is out
        torch.testing.assert_close(out, m.expected)


def check_accumulation(m: Made) -> None:
    """Sums are added to what is there, as often as they are asked for."""
    out = m.random()
    before = out.clone()
    for times in (1, 2):
        assert m.run(out=out, accumulate=True) is out
        torch.testing.assert_close(out, before + times * m.expected)
    torch.testing.assert_close(m.run(accumulate=True), m.expected)


def check_rows_without_nonzeros(plan: str | PlanOf, backend: str, deterministic: bool, added: int = 0) -> Arrays:
    """Of a dense result they are zeroed, with those that are added to; the others are stored."""
    x = torch.zeros(40, 200)
    x[:32, 7], x[5:7, ::2] = 1.0, 2.0  # short rows, two of which are long, and eight empty ones
    b = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    x = stc.SparseTensor.from_dense(x[torch.arange(40).roll(4)])
    plan = plan if isinstance(plan, str) else plan("ij,jr->ir", [x, b])
    kernel = stc.compile("ij,jr->ir", x, b, plan=plan, backend=backend, deterministic=deterministic)
    arrays = kernel.step.arrays
    assert arrays.zeroed is not None
    assert arrays.zeroed.numel() == 8 + added
    with poisoned():
        torch.testing.assert_close(kernel(b), x.to_dense() @ b)
    return arrays
