"""Einsums with dense axes slowest on the grid, by plans of every format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cases import SIZES, Problem, explicit_plan, joined, tile_plan

import sparsetc as stc

PlanOf = Callable[[Problem], stc.plans.Plan]


def with_slowest(plan: stc.plans.Plan, letters: str) -> stc.plans.Plan:
    """The plan, with these axes slowest on the grid of all parts."""
    parts = (replace(p, schedule=replace(p.schedule, slowest_axes=tuple(letters))) for p in plan.parts)
    return replace(plan, parts=tuple(parts))


@dataclass(frozen=True)
class Case:
    """An einsum and its plan, and what the head of the first part's function says of the order of programs."""

    equation: str
    sizes: dict[str, int]
    plan: PlanOf
    slowest_axes: str
    head: tuple[str, ...]
    dense: bool = False

    @property
    def problem(self) -> Problem:
        return Problem(self.equation, SIZES | self.sizes)

    @property
    def settings(self) -> dict[str, Any]:
        """What the einsum is compiled with."""
        return {
            "plan": with_slowest(self.plan(self.problem), self.slowest_axes),
            "output": "dense" if self.dense else "auto",
        }


def explicit(format: str, levels: str, precision: str = "", vectors: tuple[int, ...] = (), **blocks: int) -> PlanOf:
    """A plan of one part, whose items take few nonzeros; vectors are of r."""

    def plan(problem: Problem) -> stc.plans.Plan:
        made = explicit_plan(format, levels, blocks, lanes=4, max_item_nnz=8, precision=precision)
        (part,) = made.parts
        own = (("r", vectors),) if vectors else ()
        return replace(made, parts=(replace(part, schedule=replace(part.schedule, vectors=own)),))

    return plan


def tiles(format: str, columns: int = 128, **blocks: int) -> PlanOf:
    """A plan of tiles alone."""

    def plan(problem: Problem) -> stc.plans.Plan:
        made = tile_plan(problem.equation, problem.operands(), "triton", format)
        (part,) = made.parts
        schedule = replace(part.schedule, blocks=tuple(blocks.items()), columns=columns)
        return replace(made, parts=(replace(part, schedule=schedule),))

    return plan


def two(fused: bool) -> PlanOf:
    """Long rows as runs, short ones a lane each."""
    return lambda problem: joined(
        explicit("coo", "0||12", r=16)(problem), explicit("fiber", "|0|12", r=16)(problem), 6, fused
    )


MTTKRP, CHAIN, SPMM = "ijk,jr,kr->ir", "ijk,jr,ks->irs", "ij,jr->ir"
ONE = ("items = programs // 3", "item = pid % items", "block_r = pid // items")
CHUNKS = ("items = programs // 2", "item = pid % items", "block_r = pid // items")
TWO = ("items = programs // 6", "item = pid % items", "block_s = (pid // items) % 2", "block_r = (pid // items) // 2")
R_LAST = ("block_s = pid % 2", "items = programs // 6", "item = (pid // 2) % items", "block_r = (pid // 2) // items")
S_LAST = ("block_r = pid % 3", "items = programs // 6", "item = (pid // 3) % items", "block_s = (pid // 3) // items")
POSITIONS = (
    "first_i = pid % 4 * 4",
    "items = programs // 12",
    "item = (pid // 4) % items",
    "block_r = (pid // 4) // items",
)
R, RS = {"r": 40}, {"r": 40, "s": 20}

CASES: dict[str, Case] = {
    "coo": Case(SPMM, R, explicit("coo", "0||1", r=16), "r", ONE),
    "coo, runs of two modes": Case(MTTKRP, R, explicit("coo", "01||2", r=16), "r", ONE),
    "fiber": Case(MTTKRP, R, explicit("fiber", "0|1|2", r=16), "r", ONE),
    "rows": Case(MTTKRP, R, explicit("fiber", "|0|12", r=16), "r", ONE),
    "fused": Case(MTTKRP, R, two(fused=True), "r", ONE),
    "apart": Case(MTTKRP, R, two(fused=False), "r", ONE),
    "two vectors": Case(SPMM, {"r": 72}, explicit("coo", "0||1", vectors=(16, 8), r=32), "r", ONE),
    "chunks": Case("ijk,ijkr->r", R, explicit("coo", "||012", r=32), "r", CHUNKS),
    "chunks, summed over the grid": Case("ijk,ir,jr,kr->ijk", R, explicit("coo", "||012", r=32), "r", CHUNKS),
    "both": Case(CHAIN, RS, explicit("coo", "0||12", "ieee", r=16, s=16), "rs", TWO),
    "both, named otherwise": Case(CHAIN, RS, explicit("fiber", "0|1|2", "ieee", r=16, s=16), "sr", TWO),
    "one of two, the first": Case(CHAIN, RS, explicit("coo", "0||12", "ieee", r=16, s=16), "r", R_LAST),
    "one of two, the second": Case(CHAIN, RS, explicit("coo", "0||12", "ieee", r=16, s=16), "s", S_LAST),
    "of one block": Case(SPMM, R, explicit("coo", "0||1", r=64), "r", ("item = pid",)),
    "dense tiles": Case(MTTKRP, R, tiles("dense_tile", r=16), "r", ONE, dense=True),
    "bitmap tiles": Case(SPMM, R, tiles("bitmap_tile", r=16), "r", ONE, dense=True),
    "positions over the grid": Case(
        CHAIN, {"i": 20, "r": 40, "s": 16}, tiles("dense_tile", 4, r=16, s=16), "r", POSITIONS, dense=True
    ),
}
