"""Plans of every format that read dense operands in bfloat16: what all tests of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import SIZES, Problem, explicit_plan, joined, tile_plan

import sparsetc as stc

PlanOf = Callable[[Problem], stc.plans.Plan]
MTTKRP, CHAIN, SPMM = "ijk,jr,kr->ir", "ijk,jr,ks->irs", "ij,jr->ir"


def rounding(plan: stc.plans.Plan, *operands: str, parts: tuple[int, ...] = (0, 1)) -> stc.plans.Plan:
    """The plan at precision bf16, these operands rounded in these of its parts."""
    made = []
    for number, part in enumerate(plan.parts):
        own = operands if number in parts else ()
        made.append(replace(part, schedule=replace(part.schedule, precision="bf16", rounded=own)))
    return replace(plan, parts=tuple(made))


@dataclass(frozen=True)
class Case:
    """An einsum, its plan, and the operands that the plan rounds; those that the dots of all parts take as they are."""

    equation: str
    sizes: dict[str, int]
    plan: PlanOf
    rounded: tuple[str, ...]
    parts: tuple[int, ...] = (0, 1)
    kept: tuple[str, ...] = ()

    @property
    def problem(self) -> Problem:
        return Problem(self.equation, SIZES | self.sizes)

    @property
    def settings(self) -> dict[str, Any]:
        """What the einsum is compiled with."""
        return {"plan": rounding(self.plan(self.problem), *self.rounded, parts=self.parts), "output": "dense"}

    def compiled(self, backend: str = "triton") -> stc.Kernel:
        return stc.compile(self.equation, *self.problem.operands(), backend=backend, **self.settings)

    def as_read(self, operands: list[Any]) -> list[Any]:
        """The operands as every part reads them, where all parts read alike."""
        names = ("X", "B", "C", "D")[: len(operands)]
        return [
            o.to(torch.bfloat16).float() if name in self.rounded else o for name, o in zip(names, operands, strict=True)
        ]


def explicit(format: str, levels: str, precision: str = "", vectors: tuple[int, ...] = (), **blocks: int) -> PlanOf:
    """A plan of one part, whose items take few nonzeros; vectors are of r."""

    def plan(problem: Problem) -> stc.plans.Plan:
        lanes = 16 if precision else 4
        made = explicit_plan(format, levels, blocks, lanes=lanes, max_item_nnz=8, unroll=2, precision=precision)
        (part,) = made.parts
        own = (("r", vectors),) if vectors else ()
        return replace(made, parts=(replace(part, schedule=replace(part.schedule, vectors=own)),))

    return plan


def tiles(format: str) -> PlanOf:
    """A plan of tiles alone."""
    return lambda problem: tile_plan(problem.equation, problem.operands(), "triton", f"{format} planned")


def two(fused: bool) -> PlanOf:
    """Long rows as runs, short ones a lane each."""
    return lambda problem: joined(
        explicit("coo", "0||12", r=16)(problem), explicit("fiber", "|0|12", r=16)(problem), 6, fused
    )


SCALAR: dict[str, Case] = {
    "coo": Case(SPMM, {"r": 40}, explicit("coo", "0||1", r=16), ("B",)),
    "rows": Case(MTTKRP, {}, explicit("fiber", "|0|12", r=8), ("B", "C")),
    "fiber": Case(MTTKRP, {}, explicit("fiber", "0|1|2", r=8), ("C",)),
    "one of the item": Case(MTTKRP, {}, explicit("coo", "01||2", r=8), ("B",)),
    "two vectors": Case(SPMM, {"r": 72}, explicit("coo", "0||1", vectors=(16, 8), r=32), ("B",)),
    "sampled": Case("ijk,ir,jr,kr->ijk", {}, explicit("coo", "||012", r=8), ("C", "D")),
    "summed": Case("ij,ij->", {}, explicit("coo", "||01"), ("B",)),
    "vectors": Case("ijk,j,k->i", {}, explicit("coo", "0||12"), ("B", "C")),
    "fused": Case(MTTKRP, {"r": 16}, two(fused=True), ("B", "C")),
    "apart": Case(MTTKRP, {"r": 16}, two(fused=False), ("C",)),
}
"""Plans without dots, which the interpreter runs."""
MIXED: dict[str, Case] = {
    "fused, the first": Case(MTTKRP, {"r": 16}, two(fused=True), ("B",), (0,)),
    "fused, the second": Case(MTTKRP, {"r": 16}, two(fused=True), ("B", "C"), (1,)),
    "apart, the first": Case(MTTKRP, {"r": 16}, two(fused=False), ("C",), (0,)),
}
"""Plans of two parts, of which one takes as they are the operands that the other has rounded."""
WIDE = {"i": 20, "j": 20, "k": 20, "r": 32, "s": 32}
DOTS: dict[str, Case] = {
    "chain, coo": Case(CHAIN, WIDE, explicit("coo", "0||12", "bf16", r=32, s=32), ("B", "C"), kept=("B",)),
    "chain, fiber": Case(CHAIN, WIDE, explicit("fiber", "0|1|2", "bf16", r=32, s=32), ("B", "C"), kept=("B",)),
    "order 4": Case(
        "ijkl,jr,ks,lt->irst",
        WIDE | {"t": 16, "l": 4},
        explicit("coo", "0||123", "bf16", r=32, s=16, t=16),
        ("B", "C", "D"),
        kept=("B",),
    ),
    "matrix in tiles": Case(SPMM, {"i": 40, "j": 40, "r": 40}, tiles("dense_tile"), ("B",), kept=("B",)),
    "matrix in bitmaps": Case(SPMM, {"i": 40, "j": 40, "r": 40}, tiles("bitmap_tile"), ("B",), kept=("B",)),
    "tiles": Case(MTTKRP, WIDE, tiles("dense_tile"), ("B", "C"), kept=("C",)),
    "chain, tiles": Case(CHAIN, WIDE, tiles("dense_tile"), ("B", "C"), kept=("B", "C")),
    "sampled tiles": Case(
        "ij,ir,jr->ij", {"i": 40, "j": 40, "r": 32}, tiles("dense_tile"), ("B", "C"), kept=("B", "C")
    ),
}
"""Plans with dots in bfloat16, which the interpreter has not."""
