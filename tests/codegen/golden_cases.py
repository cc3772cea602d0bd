"""The einsums and plans whose generated source is kept in ``tests/golden``. Nothing here is left to heuristics."""

from __future__ import annotations

from pathlib import Path

import torch
from cases import Problem, explicit_plan, joined
from grid_order_cases import with_slowest
from rounded_cases import rounding

import sparsetc as stc

FOLDER = Path(__file__).parents[1] / "golden"
SIZES = {"i": 100, "j": 200, "k": 300, "l": 40, "r": 32, "s": 16, "t": 16}
SMALL = {**SIZES, "j": 20, "k": 30}
RAGGED = {**SIZES, "r": 200}
HUGE = {**SIZES, "k": 2**60}


COO = explicit_plan("coo", "0||12", {"r": 32}, lanes=8, max_item_nnz=512, unroll=4, name="coo")
FIBER = explicit_plan("fiber", "0|1|2", {"r": 32}, lanes=8, max_fiber_len=32, max_item_nnz=512, unroll=4, name="fiber")
ROWS = explicit_plan("fiber", "|0|12", {"r": 32}, lanes=32, max_item_nnz=32, unroll=2, name="rows")
CHAIN = explicit_plan("coo", "0||12", {"r": 32, "s": 16}, max_item_nnz=512, unroll=2, warps=2, precision="tf32x3")
CHAIN_4 = explicit_plan("coo", "0||123", {"r": 32, "s": 16, "t": 16}, warps=4, precision="bf16")
ONE_LANE = explicit_plan("coo", "0||12", {"r": 32}, lanes=1, name="coo")
FIBER_ONE_LANE = explicit_plan("fiber", "0|1|2", {"r": 32, "s": 16}, lanes=1, precision="ieee", name="fiber")
SAMPLED = explicit_plan("coo", "||012", {"r": 32}, lanes=8, max_item_nnz=512)
SHORT = explicit_plan("fiber", "|12|0", {}, lanes=128, max_item_nnz=128)
ALL = explicit_plan("coo", "||012", {}, lanes=128, max_item_nnz=512)
MATRIX = explicit_plan("coo", "0||1", {"r": 32}, lanes=8, max_item_nnz=512)
CUT = explicit_plan("coo", "0||12", {"r": 128}, lanes=4, max_item_nnz=512)
LONG, SHORT_ROWS = explicit_plan("coo", "0||1", {"r": 64}, lanes=4), explicit_plan("fiber", "|0|1", {"r": 64})
ROUNDED = rounding(joined(LONG, SHORT_ROWS, 5), "B", parts=(0,))
GRID_ORDER = with_slowest(joined(LONG, SHORT_ROWS, 5), "r")
WIDE = explicit_plan("coo", "0||213", {"r": 32}, lanes=8, max_item_nnz=512)
SEMI = explicit_plan("fiber", "01||2", {"r": 32}, lanes=8)


def tiles(**blocks: int) -> stc.plans.Plan:
    """Dense tiles alone."""
    storage = stc.plans.Storage((0,), (1, 2), (), max_item_nnz=8 * 4096)
    schedule = stc.plans.Schedule(1, tuple(blocks.items()), precision="tf32x3")
    return stc.plans.Plan("tiles", (stc.plans.Part("dense_tile", storage, schedule),))


def dense(order: int, precision: str, **blocks: int) -> stc.plans.Plan:
    """The dense tensor, of whose modes the first is kept."""
    modes = tuple(range(order))
    storage = stc.plans.Storage(leaf=modes, sequence=modes, contracted=order - 1)
    schedule = stc.plans.Schedule(1, tuple(blocks.items()), precision=precision)
    return stc.plans.Plan("dense", (stc.plans.Part("dense", storage, schedule),))


F32, F16 = torch.float32, torch.float16
POSITIONS = stc.plans.Plan(
    "dense", (stc.plans.Part("positions", stc.plans.Storage(leaf=(0, 1)), stc.plans.Schedule(precision="tf32")),)
)
CASES: dict[str, tuple[str, dict[str, int], torch.dtype, stc.plans.Plan, str]] = {
    "mttkrp_coo": ("ijk,jr,kr->ir", SIZES, F32, COO, "triton"),
    "mttkrp_fiber": ("ijk,jr,kr->ir", SIZES, F32, FIBER, "triton"),
    "mttkrp_rows": ("ijk,jr,kr->ir", SIZES, F32, ROWS, "triton"),
    "mttkrp_fused": ("ijk,jr,kr->ir", SIZES, F32, joined(FIBER, ROWS, 5), "triton"),
    "mttkrp_ragged": ("ijk,jr,kr->ir", RAGGED, F32, CUT, "triton"),
    "ttmc_dot": ("ijk,jr,ks->irs", SIZES, F32, CHAIN, "triton"),
    "ttmc_order_4": ("ijkl,jr,ks,lt->irst", SIZES, F32, CHAIN_4, "triton"),
    "sampled": ("ijk,ir,jr,kr->ijk", SIZES, F16, SAMPLED, "triton"),
    "ttv_sparse": ("ijk,i->jk", SIZES, F32, SHORT, "triton"),
    "ttm_semi_sparse": ("ijk,kr->ijr", SIZES, F32, SEMI, "triton"),
    "reduction": ("ijk->", SIZES, torch.int32, ALL, "triton"),
    "spmm": ("ij,jr->ir", SIZES, torch.float64, MATRIX, "triton"),
    "spmm_grid_order": ("ij,jr->ir", RAGGED, F32, GRID_ORDER, "triton"),
    "spmm_rounded": ("ij,jr->ir", SIZES, F32, ROUNDED, "triton"),
    "mttkrp_tiles_rounded": ("ijk,jr,kr->ir", SIZES, F32, rounding(tiles(r=32), "B", "C"), "triton"),
    "two_words": ("ijkl,jr,lr->ir", HUGE, F32, WIDE, "triton"),
    "mttkrp_tiles": ("ijk,jr,kr->ir", SIZES, F32, tiles(r=32), "triton"),
    "ttmc_tiles": ("ijk,jr,ks->irs", SIZES, F32, tiles(r=32, s=16), "triton"),
    "spmm_dense": ("ij,jr->ir", SIZES, F32, dense(2, "bf16", r=32), "triton"),
    "mttkrp_dense": ("ijk,jr,kr->ir", SMALL, F32, dense(3, "tf32", r=32), "triton"),
    "sampled_dense": ("ij,ir,jr->ij", SMALL, F16, POSITIONS, "triton"),
    "ttmc_torch_dense": ("ijk,jr,ks->irs", SMALL, F32, dense(3, "ieee", r=32, s=16), "torch"),
    "mttkrp_torch_tiles": ("ijk,jr,kr->ir", SIZES, F32, tiles(r=32), "torch"),
    "mttkrp_torch_coo": ("ijk,jr,kr->ir", SIZES, F32, ONE_LANE, "torch"),
    "ttmc_torch_fiber": ("ijk,jr,ks->irs", SIZES, F32, FIBER_ONE_LANE, "torch"),
    "mttkrp_numba_coo": ("ijk,jr,kr->ir", SIZES, F32, ONE_LANE, "numba"),
    "mttkrp_numba_tiles": ("ijk,jr,kr->ir", SIZES, F32, tiles(r=32), "numba"),
    "ttmc_numba_fiber": ("ijk,jr,ks->irs", SIZES, F32, FIBER_ONE_LANE, "numba"),
    "sampled_numba": ("ijk,ir,jr,kr->ijk", SIZES, F32, SAMPLED, "numba"),
}


def source(name: str) -> str:
    """The text generated for a case."""
    equation, sizes, dtype, plan, backend = CASES[name]
    operands = Problem(equation, sizes, "skewed", dtype).operands()
    return stc.compile(equation, *operands, plan=plan, backend=backend).source


def path(name: str) -> Path:
    """Where it is kept."""
    return FOLDER / f"{name}.py"
