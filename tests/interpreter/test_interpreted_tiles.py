"""The generated Triton source of dense tiles, and of the hybrid plan's fused launch, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from cases import tile_plan
from test_tiles import CASES, SPARSE_CASES, TILE_FORMATS, expected, operands

import sparsetc as stc


@pytest.mark.parametrize("format", TILE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_tiles(name: str, dtype: torch.dtype, format: str) -> None:
    if format != "dense_tile" and dtype != torch.float32:
        pytest.skip("bitmaps are expanded before types matter")
    padded = name in ("ttmc-order-4", "ttmc-scaled")
    if (format == "bitmap_tile" and name not in ("spmm", "spmm-short-mode")) or (format != "dense_tile" and padded):
        pytest.skip("a search for each value is slow here")
    one_by_one = dtype == torch.int64 or name in ("vectors", "total", "order-1")  # thousands of steps a tile
    equation, given = operands(name, nnz=4 if one_by_one else 40)
    if dtype == torch.int64:
        given = [given[0].with_values((3 * given[0].values).round()), *((3 * d).round() for d in given[1:])]
    cast = [o.to(dtype) for o in given]
    reference = expected(equation, [o.to(torch.float64) for o in cast])
    k = stc.compile(equation, *cast, plan=tile_plan(equation, cast, "triton", format), output="dense", backend="triton")
    found = k(*cast[1:]).to(torch.float64)
    tolerance = {torch.float16: 2e-3, torch.float32: 1e-5}.get(dtype, 1e-12)
    assert (found - reference).norm() <= tolerance * reference.norm()


@pytest.mark.parametrize("name", SPARSE_CASES)
def test_sparse_outputs(name: str) -> None:
    equation, given = operands(name, nnz=2 if name in ("sampled", "ttv", "ttv-order-4", "ttmc-semi-sparse") else 8)
    other = stc.einsum(equation, *given, plan="coo", output="sparse", backend="torch")
    formats = ("dense_tile",) if name == "ttmc-semi-sparse" else ("dense_tile", "bitmap_tile planned")
    plans = [tile_plan(equation, given, "triton", format) for format in formats]
    for plan in (*plans, stc.plans.plan_hls(5)):
        found = stc.einsum(equation, *given, plan=plan, output="sparse", backend="triton")
        torch.testing.assert_close(found.values, other.values)


@pytest.mark.parametrize("threshold", [None, 1, 20])
@pytest.mark.parametrize("name", ["mttkrp-0", "mttkrp-2", "ttmc-0", "spmm", "all-summed"])
def test_the_fused_launch(name: str, threshold: int | None) -> None:
    equation, given = operands(name, nnz=60)
    plan = "hls" if threshold is None else stc.plans.plan_hls(threshold)
    k = stc.compile(equation, *given, plan=plan, backend="triton")
    torch.testing.assert_close(k(*given[1:]), expected(equation, given))


@pytest.mark.parametrize("block", [16, 32])
def test_ranks_split_over_the_grid(block: int) -> None:
    equation, given = operands("mttkrp-0")
    plan = tile_plan(equation, given, "triton")
    (part,) = plan.parts
    split = stc.plans.Part("dense_tile", part.storage, stc.plans.Schedule(1, (("r", block),)))
    k = stc.compile(equation, *given, plan=stc.plans.Plan("tiles", (split,)), backend="triton")
    torch.testing.assert_close(k(*given[1:]), expected(equation, given))
