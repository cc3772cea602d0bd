"""The generated Triton source, compiled ahead of time for named targets; no GPU is needed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import OPERATIONS, SIZES, Problem, explicit_plan, joined, tile_plan
from fiber_window_cases import plan as fiber_windows
from matrix_units import CUDA, MATRIX, dealt, in_turn, other_types
from test_tiles import CASES as TILE_CASES
from test_tiles import TILE_FORMATS, large_turns
from test_tiles import operands as tile_operands

import sparsetc as stc

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

EIGHT, SIXTEEN, THIRTY_TWO = ({**SIZES, **dict.fromkeys("rst", n)} for n in (8, 16, 32))


def compiled(
    equation: str, plan: stc.plans.Plan, sizes: dict[str, int], dtype: torch.dtype = torch.float32
) -> stc.Kernel:
    operands = Problem(equation, sizes, "random", dtype).operands()
    return stc.compile(equation, *operands, plan=plan, backend="triton")


def coo_rows(precision: str = "", **blocks: int) -> stc.plans.Plan:
    """One row of the first mode an item."""
    return explicit_plan(
        "coo", "0||12", blocks, max_item_nnz=512, unroll=2, warps=4 if precision else 1, precision=precision
    )


def fibers(precision: str = "", **blocks: int) -> stc.plans.Plan:
    """Fibers along the last mode, of one row of the first."""
    warps = 4 if precision else 1
    return explicit_plan(
        "fiber", "0|1|2", blocks, max_fiber_len=32, max_item_nnz=512, unroll=2, warps=warps, precision=precision
    )


def short_rows(**blocks: int) -> stc.plans.Plan:
    """One row of the first mode a lane."""
    return explicit_plan("fiber", "|0|12", blocks, max_item_nnz=32, unroll=2)


ORDER_4 = explicit_plan("coo", "0||123", {"r": 16, "s": 16, "t": 16}, unroll=1, warps=4, precision="tf32x3")
CASES: dict[str, tuple[str, stc.plans.Plan, dict[str, int], torch.dtype]] = {
    "mttkrp-coo": (OPERATIONS["mttkrp-3-0"], coo_rows(r=32), THIRTY_TWO, torch.float32),
    "mttkrp-fiber": (OPERATIONS["mttkrp-3-0"], fibers(r=32), THIRTY_TWO, torch.float32),
    "mttkrp-rows": (OPERATIONS["mttkrp-3-0"], short_rows(r=32), THIRTY_TWO, torch.float32),
    "mttkrp-fused": (OPERATIONS["mttkrp-3-0"], joined(fibers(r=32), short_rows(r=32), 4), THIRTY_TWO, torch.float32),
    "mttkrp-ragged": (OPERATIONS["mttkrp-3-0"], coo_rows(r=64), {**SIZES, "r": 200}, torch.float32),
    "mttkrp-fp64": (OPERATIONS["mttkrp-3-0"], coo_rows(r=32), THIRTY_TWO, torch.float64),
    "mttkrp-fp16": (OPERATIONS["mttkrp-3-0"], fibers(r=32), THIRTY_TWO, torch.float16),
    "mttkrp-bf16": (OPERATIONS["mttkrp-3-0"], coo_rows(r=32), THIRTY_TWO, torch.bfloat16),
    "mttkrp-int32": (OPERATIONS["mttkrp-3-0"], coo_rows(r=32), THIRTY_TWO, torch.int32),
    "ttmc-4": (OPERATIONS["ttmc-4-0"], ORDER_4, SIXTEEN, torch.float32),
    "ttmc-fp64": (OPERATIONS["ttmc-3-0"], coo_rows("ieee", r=16, s=16), SIXTEEN, torch.float64),
    "ttmc-fp16": (OPERATIONS["ttmc-3-0"], fibers("tf32", r=32, s=32), THIRTY_TWO, torch.float16),
    "ttmc-int64": (OPERATIONS["ttmc-3-0"], coo_rows("ieee", r=16, s=16), SIXTEEN, torch.int64),
    "sampled": (
        OPERATIONS["sampled"],
        explicit_plan("coo", "||012", {"r": 32}, max_item_nnz=512),
        THIRTY_TWO,
        torch.float32,
    ),
    "ttv": (OPERATIONS["ttv-0"], explicit_plan("fiber", "|12|0", {}, max_item_nnz=32), SIZES, torch.float32),
    "reduction": (OPERATIONS["reduction"], explicit_plan("coo", "||012", {}, max_item_nnz=512), SIZES, torch.float32),
}


@pytest.mark.parametrize(("name", "target"), dealt(CASES))
def test_compiles_for(name: str, target: str) -> None:
    text = compiled(*CASES[name]).ptx(target)
    if target in CUDA:
        assert f".target {target}" in text
    else:
        assert target in text


TTMC: dict[str, Callable[[str], stc.plans.Plan]] = {
    "coo": lambda precision: coo_rows(precision, r=32, s=32),
    "fiber": lambda precision: fibers(precision, r=32, s=32),
}


@pytest.mark.parametrize(("form", "precision", "target"), dealt(TTMC, ["tf32x3", "tf32", "bf16"]))
def test_a_ttm_chain_runs_on_the_matrix_units(form: str, precision: str, target: str) -> None:
    kernel = compiled("ijk,jr,ks->irs", TTMC[form](precision), THIRTY_TWO)
    assert kernel.step.programs[0].dots
    text = kernel.ptx(target)
    assert re.search(MATRIX[target], text)
    if target == "sm_80":
        assert (".bf16.bf16." if precision == "bf16" else ".tf32.tf32.") in text


def test_dots_that_hold_more_than_shared_memory_are_not_unrolled() -> None:
    equation, (a, x) = large_turns("cpu")
    source = stc.compile(equation, a, x, plan=stc.plans.plan_hls(4), backend="triton").source
    assert "tl.dot" in source
    assert " in range(16)" in source


@pytest.mark.parametrize(("precision", "target"), dealt(["highest", "high", "medium"]))
def test_the_planner_gives_a_ttm_chain_to_the_matrix_units(precision: str, target: str) -> None:
    operands = Problem("ijk,jr,ks->irs", THIRTY_TWO).operands()
    kernel = stc.compile("ijk,jr,ks->irs", *operands, plan="coo", precision=precision, backend="triton")
    assert re.search(MATRIX[target], kernel.ptx(target))


@pytest.mark.parametrize(
    ("dtype", "target", "instruction", "plan"),
    in_turn(other_types(MATRIX), "coo", "fiber", "fiber", "coo", "fiber"),
    ids=str,
)
def test_other_types_run_on_the_matrix_units(dtype: torch.dtype, target: str, instruction: str, plan: str) -> None:
    operands = Problem("ijk,jr,ks->irs", THIRTY_TWO, dtype=dtype).operands()
    kernel = stc.compile("ijk,jr,ks->irs", *operands, plan=plan, backend="triton")
    assert re.search(instruction, kernel.ptx(target))


@pytest.mark.parametrize(("ranks", "target"), dealt([(16, 16, 16), (5, 20, 3)]), ids=str)
def test_a_ttm_chain_of_order_4_runs_on_the_matrix_units(ranks: tuple[int, int, int], target: str) -> None:
    kernel = compiled("ijkl,jr,ks,lt->irst", ORDER_4, {**SIZES, **dict(zip("rst", ranks, strict=True))})
    assert kernel.step.programs[0].dots
    assert re.search(MATRIX[target], kernel.ptx(target))


@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("name", ["mttkrp-coo", "mttkrp-fiber", "mttkrp-rows", "mttkrp-fused"])
def test_mttkrp_loads_16_bytes_a_thread_and_keeps_to_registers(name: str, target: str) -> None:
    text = compiled(*CASES[name]).ptx(target)
    assert re.search(r"ld\.global\.v4|ld\.global\.\S*v4", text)
    assert not re.search(r"\.local\b", text)


@pytest.mark.parametrize("name", ["mttkrp-coo", "mttkrp-fiber", "mttkrp-rows", "mttkrp-fused", "sampled"])
def test_the_assembler_spills_nothing(name: str, tmp_path: os.PathLike[str]) -> None:
    import triton

    assembler = triton.knobs.nvidia.ptxas.path
    source = os.path.join(tmp_path, "kernel.ptx")
    with open(source, "w", encoding="utf-8") as file:
        file.write(compiled(*CASES[name]).ptx("sm_90"))
    arguments = [assembler, "-v", "--gpu-name=sm_90a", source, "-o", os.path.join(tmp_path, "kernel.cubin")]
    report = subprocess.run(arguments, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in report


def test_registers_are_limited_where_the_schedule_says_so() -> None:
    operands = Problem("ij,jr->ir", {"i": 60, "j": 50, "r": 32}, "random").operands()
    kernel = stc.compile("ij,jr->ir", *operands, plan="rows", backend="triton")
    (part,) = kernel.plan.parts
    assert part.schedule.registers
    assert f".maxnreg {part.schedule.registers}" in kernel.ptx("sm_90")
    assert "amdgcn" in kernel.ptx("gfx942"), "where there is no such limit"
    free = replace(kernel.plan, parts=(replace(part, schedule=replace(part.schedule, registers=0)),))
    assert ".maxnreg" not in stc.compile("ij,jr->ir", *operands, plan=free, backend="triton").ptx("sm_90")


def test_products_and_sums_are_fused_whatever_triton_does_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.language, "default_fp_fusion", False, raising=False)
    assert "fma.rn.f32" in compiled(*CASES["mttkrp-coo"]).ptx("sm_90")


def test_parts_run_apart_are_compiled_apart() -> None:
    plan = joined(fibers(r=32), short_rows(r=32), 14, fused=False)
    kernel = compiled(OPERATIONS["mttkrp-3-0"], plan, {**THIRTY_TWO, "i": 4})
    assert len(kernel.plan.parts) == 2
    assert kernel.ptx("sm_90").count(".visible .entry") == 2


def test_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(stc.PlanError, match=r"unknown target 'sm_12'.*sm_90.*gfx942"):
        compiled(*CASES["mttkrp-coo"]).ptx("sm_12")


def test_without_a_gpu_ptx_is_that_of_the_kernels_a_gpu_would_run() -> None:
    operands = Problem("ij,jr->ir", SIZES).operands()
    k = stc.compile("ij,jr->ir", *operands, backend="torch")
    assert ".visible .entry" in k.ptx()
    complex_operands = [o.to(torch.complex64) for o in operands]
    with pytest.raises(stc.PlanError, match="complex"):
        stc.compile("ij,jr->ir", *complex_operands).ptx()


@pytest.mark.parametrize(
    ("equation", "precision", "target"),
    dealt(["ijk,jr,kr->ir", "ijk,jr,ks->irs", "ij,jr->ir"], ["highest", "high", "medium"]),
)
def test_dense_tiles_run_on_the_matrix_units(equation: str, precision: str, target: str) -> None:
    letters, *terms = equation.split("->")[0].split(",")
    sizes = {"i": 48, "j": 64, "k": 80, "r": 32, "s": 32}
    coords = torch.stack([torch.randint(0, sizes[c], (2000,)) for c in letters])
    x = stc.SparseTensor(coords, torch.randn(2000), [sizes[c] for c in letters])
    dense = [torch.randn([sizes[c] for c in t]) for t in terms]
    k = stc.compile(equation, x, *dense, plan=stc.plans.plan_hls(2), precision=precision, backend="triton")
    assert k.step.programs[0].dots
    assert re.search("v_mfma" if target.startswith("gfx") else r"mma|tcgen05", k.ptx(target))


@pytest.mark.parametrize("precision", ["tf32x3", "tf32", "bf16"])
@pytest.mark.parametrize("layout", ["columns", "rows", "odd-columns", "aligned", "bitmaps"])
def test_windows_of_fibers_run_on_the_matrix_units(layout: str, precision: str) -> None:
    equation = "ijk,jr,kr->ir"
    operands = Problem(equation, THIRTY_TWO).operands()
    k = stc.compile(equation, *operands, plan=fiber_windows(layout, equation, precision), backend="triton")
    assert re.search("mma", k.ptx("sm_90"))


@pytest.mark.parametrize(
    ("name", "format"),
    [*product(TILE_CASES, TILE_FORMATS[:1]), *in_turn([(name,) for name in TILE_CASES], *TILE_FORMATS[1:])],
)
def test_every_schedule_of_tiles_compiles(name: str, format: str) -> None:
    equation, given = tile_operands(name, nnz=60)
    given = [o.to(torch.float32) for o in given]
    plan = tile_plan(equation, given, "triton", format)
    k = stc.compile(equation, *given, plan=plan, output="dense", backend="triton")
    # By one warp the assembler takes seven times as long, but where two dots of order 4 follow one another.
    if k.step.programs[0].dots and name != "ttmc-order-4":
        plan = replace(plan, parts=tuple(replace(p, schedule=replace(p.schedule, warps=4)) for p in plan.parts))
        k = stc.compile(equation, *given, plan=plan, output="dense", backend="triton")
    assert ("popc" in k.ptx("sm_90")) == (format != "dense_tile")
