"""Dense tiles and the hybrid plan's fused launch, natively on a GPU."""

from __future__ import annotations

import pytest
import torch
from cases import tile_plan
from test_tiles import CASES, SPARSE_CASES, TILE_FORMATS, expected, large_turns, operands

import sparsetc as stc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PRECISION = {"highest": 1e-5, "high": 4e-3, "medium": 3e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("format", TILE_FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_tiles(name: str, format: str, dtype: torch.dtype) -> None:
    planned = format == "bitmap_tile planned" and name not in ("ttmc-order-4", "ttmc-scaled")
    if format != "dense_tile" and (dtype != torch.float32 or not planned) and name != "spmm":
        pytest.skip("bitmaps are expanded before types matter, and a search for each value takes long to compile")
    equation, given = operands(name)
    if dtype == torch.int64:
        given = [given[0].with_values((3 * given[0].values).round()), *((3 * d).round() for d in given[1:])]
    cast = [o.to(dtype).to("cuda") for o in given]
    reference = expected(equation, [o.to(torch.float64) for o in cast])
    # One would keep 100 KB of sums a thread, of which a GPU sets 29 GB aside; more swap sums in shared memory.
    warps = 8 if dtype == torch.int64 and name in ("ttmc-0", "ttmc-hadamard") else 1
    k = stc.compile(equation, *cast, plan=tile_plan(equation, cast, "triton", format, warps), output="dense")
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}.get(dtype, 1e-12)
    assert (k(*cast[1:]).to(torch.float64) - reference).norm() <= tolerance * reference.norm()


def test_turns_whose_dots_together_pass_shared_memory() -> None:
    equation, (a, x) = large_turns("cuda")
    found = stc.einsum(equation, a, x, plan=stc.plans.plan_hls(4), output="dense")
    torch.testing.assert_close(found, torch.einsum(equation, a, x.to_dense()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SPARSE_CASES)
def test_sparse_outputs(name: str, dtype: torch.dtype) -> None:
    equation, given = operands(name)
    other = stc.einsum(equation, *given, plan="coo", output="sparse", backend="torch").values
    cast = [o.to(dtype).to("cuda") for o in given]
    plans = [tile_plan(equation, cast, "triton", format) for format in ("dense_tile", "bitmap_tile planned")]
    for plan in (*plans, stc.plans.plan_hls(40)):
        found = stc.einsum(equation, *cast, plan=plan, output="sparse").values.double().cpu()
        assert (found - other).norm() <= (1e-5 if dtype == torch.float32 else 1e-12) * other.norm()


@pytest.mark.parametrize("precision", PRECISION)
@pytest.mark.parametrize("threshold", [None, 0, 1, 40, 5000])
@pytest.mark.parametrize("name", ["mttkrp-0", "mttkrp-1", "mttkrp-2", "mttkrp-order-4", "ttmc-0", "spmm", "all-summed"])
def test_the_fused_launch(name: str, threshold: int | None, precision: str) -> None:
    equation, given = operands(name)
    cast = [o.to(torch.float32).to("cuda") for o in given]
    reference = expected(equation, [o.to(torch.float64) for o in cast])
    plan = "hls" if threshold is None else stc.plans.plan_hls(threshold)
    found = stc.einsum(equation, *cast, plan=plan, precision=precision)
    assert (found.double() - reference).norm() <= PRECISION[precision] * reference.norm()
