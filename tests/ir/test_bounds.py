"""How much a program holds: bounds that hold for every plan, asked for by name or chosen, and every number of ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod
from typing import Any

import assembler
import pytest
import torch
from cases import Problem

import sparsetc as stc
from sparsetc.codegen.programs import MOST_ELEMENTS
from sparsetc.ir.program.operands import MIN_DOT
from sparsetc.ir.program.tile import LANES, Product, TileProgram, walk
from sparsetc.planner.schedule import fit

SIZES = dict.fromkeys("ijk", 40) | dict.fromkeys("lm", 12)
MOST_BYTES = 32 * 1024
"""Of sums that a warp may keep: 256 registers a thread, as many as there are."""
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "chain": ("ijk,jr,ks->irs", {"r": 32, "s": 32}),
    "long chain": ("ijk,jr,ks->irs", {"r": 300, "s": 500}),
    "chain of order 4": ("ijkl,jr,ks,lt->irst", dict.fromkeys("rst", 16)),
    "chain of order 5": ("ijklm,ja,kb,lc,md->iabcd", dict.fromkeys("abcd", 16)),
    "wide operand": ("ijk,jrst->irst", dict.fromkeys("rst", 128)),
    "wide operands": ("ijk,jrs,krs,ist->rst", dict.fromkeys("rst", 64)),
    "rows of several modes": ("ijkl,jklr->ir", {"r": 256}),
    "sampled": ("ijk,ir,jr,kr->ijk", {"r": 300}),
    "no kept mode": ("ijk,ijkr->r", {"r": 128}),
}


def kept_bytes(program: TileProgram, dtype: torch.dtype) -> int:
    """Bytes of the largest tile that a program sums in, a warp."""
    size = 4 if dtype.is_floating_point and dtype.itemsize <= 4 else 8
    tiles = [s.out for s, _ in walk(program.body) if isinstance(s, Product)]
    elements = [prod(program.view.lanes if a == LANES else program.axis(a).block for a in t.axes) for t in tiles]
    return max(elements) * size // program.schedule.warps


def operands(equation: str, sizes: dict[str, int], dtype: torch.dtype) -> list[Any]:
    """Of dense ones the shapes alone: nothing is run."""
    terms = equation.split("->")[0].split(",")
    x = Problem(f"{terms[0]}->{terms[0][0]}", SIZES, "random", dtype).operands()[0]
    return [x, *(torch.zeros((), dtype=dtype).expand([(SIZES | sizes)[c] for c in t]) for t in terms[1:])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("plan", ["coo", "fiber", "rows", "hls"])
def test_a_program_keeps_to_its_registers(plan: str, name: str, dtype: torch.dtype) -> None:
    equation, sizes = CASES[name]
    if plan == "rows" and name in ("sampled", "no kept mode", "wide operands"):
        pytest.skip("rows are of some modes, not all and not none")
    wanted = stc.plans.plan_hls(1) if plan == "hls" else plan
    output = "dense" if plan == "hls" else "auto"
    settings: dict[str, Any] = {"backend": "triton", "memory_limit": "1TB", "output": output}
    kernel = stc.compile(equation, *operands(equation, sizes, dtype), plan=wanted, **settings)
    for program in kernel.step.programs:
        assert kept_bytes(program, dtype) <= MOST_BYTES, str(program)
        for dot in program.dots:
            sides = dot.out.axes[: dot.out.folded], dot.out.axes[dot.out.folded :]
            assert all(prod(program.axis(a).block for a in side) >= MIN_DOT for side in sides), str(program)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", ["chain", "chain of order 5", "wide operand"])
def test_the_assembler_ends(name: str) -> None:
    pytest.importorskip("triton")
    equation, sizes = CASES[name]
    dtype = torch.int32 if name == "chain" else torch.float32
    given = operands(equation, sizes, dtype)
    kernel = stc.compile(equation, *given, plan=stc.plans.plan_hls(1), backend="triton", memory_limit="1TB")
    with assembler.needed():
        assert ".visible .entry" in kernel.ptx("sm_90")


def test_a_schedule_of_too_large_blocks_is_refused_before_it_is_printed() -> None:
    equation, sizes = CASES["wide operand"]
    given = operands(equation, sizes, torch.float32)
    settings: dict[str, Any] = {"backend": "triton", "memory_limit": "1TB"}
    plan = stc.compile(equation, *given, plan=stc.plans.plan_hls(1), **settings).plan
    part = replace(plan.parts[0], schedule=replace(plan.parts[0].schedule, blocks=tuple((c, 128) for c in "rst")))
    with pytest.raises(stc.PlanError, match=rf"total\[r,s,t,i\] would hold .* elements.* at most {MOST_ELEMENTS:,}"):
        stc.compile(equation, *given, plan=replace(plan, parts=(part,)), **settings)
    stc.compile(equation, *given, plan=replace(plan, parts=(part,)), **settings | {"backend": "torch"})


@pytest.mark.parametrize(
    ("block", "limit", "apart", "expected"),
    [
        ({"r": 128, "s": 32}, 1024, (), {"r": 32, "s": 32}),
        ({"r": 16, "s": 32}, 512, (), {"r": 16, "s": 32}),
        ({"r": 16, "s": 16, "t": 16}, 512, (), {"r": 2, "s": 16, "t": 16}),
        ({"r": 16, "s": 16, "t": 16}, 8, (), {"r": 1, "s": 1, "t": 8}),
        ({"r": 16, "s": 16, "t": 16}, 512, ("r", "st"), {"r": 16, "s": 2, "t": 16}),
        ({"r": 16, "s": 16}, 64, ("r", "s"), {"r": 16, "s": 16}),
    ],
)
def test_blocks_are_halved_until_they_fit(
    block: dict[str, int], limit: int, apart: tuple[str, ...], expected: dict[str, int]
) -> None:
    assert fit(block, list(block), limit, apart) == expected


@pytest.mark.parametrize(
    ("rank", "programs", "vectors"),
    [
        *((rank, 1, ()) for rank in (0, 1, 8, 15, 16, 31, 32, 60, 64, 120, 128)),
        *((17, 1, (16, 8)), (24, 1, (16, 8)), (40, 1, (32, 8)), (48, 1, (32, 16)), (80, 1, (64, 16))),
        *((96, 1, (64, 32)), (100, 1, (64, 32, 8)), (129, 2, (64, 8)), (200, 2, (64, 32, 8)), (256, 2, ())),
    ],
)
def test_a_rank_is_cut_where_padding_would_cost_more(rank: int, programs: int, vectors: tuple[int, ...]) -> None:
    """What is taken covers the rank, and what may pass its end is told from what may not."""
    x, b = stc.SparseTensor([[0, 1], [1, 0]], [1.0, 2.0], (4, 3)), torch.ones(3, rank)
    kernel = stc.compile("ij,jr->ir", x, b, plan="coo", backend="triton")
    (axis,) = kernel.programs[0].axes
    assert (axis.programs, axis.lengths) == (programs, vectors)
    assert sum(length for _, length, _ in axis.vectors) == axis.block
    assert axis.block * programs >= axis.size
    for first, length, ragged in axis.vectors:
        assert ragged == ((axis.programs - 1) * axis.block + first + length > axis.size)


def test_pieces_are_checked() -> None:
    x, b = stc.SparseTensor([[0, 1], [1, 0]], [1.0, 2.0], (4, 3)), torch.ones(3, 48)
    plan = stc.compile("ij,jr->ir", x, b, plan="coo", backend="triton").plan
    for vectors, what in (
        ((("r", (32, 15)),), "a vector of axis r must be a power of two"),
        ((("r", (32, 16)), ("s", (8,))), "one axis"),
    ):
        (part,) = plan.parts
        given = replace(plan, parts=(replace(part, schedule=replace(part.schedule, vectors=vectors)),))
        with pytest.raises(stc.PlanError, match=what):
            stc.compile("ij,jr->ir", x, b, plan=given, backend="triton")
