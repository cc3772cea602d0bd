"""Streams of chunks: the generated Triton source that runs them, by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import TILED
from test_stream import assert_same, operands, tensor

import sparsetc as stc


@pytest.mark.parametrize("plan", ["auto", "coo", "rows", "fiber", *TILED, "mm-csf"])
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,j->ki", "ijk,jr,ks->irs", "ijk,ir,jr,kr->ijk"])
def test_as_in_core(plan: str, equation: str, tmp_path: Path) -> None:
    x, dense = tensor(nnz=150), operands(equation)
    try:
        expected = stc.einsum(equation, x, *dense, plan="coo", backend="torch")
        stc.compile(equation, x, *dense, plan=plan)
    except stc.PlanError:
        pytest.skip("the plan is not for this einsum")
    chunk = 1 << 18 if plan in TILED else 4096
    with stc.stream_kernel(equation, x, *dense, plan=plan, chunk_bytes=chunk, file=tmp_path / "x") as s:
        assert s.compiler.backend.name == "triton"
        assert_same(s(*dense), expected)
    with stc.open_stream(tmp_path / "x") as s:
        assert_same(s(*dense), expected)


@pytest.mark.parametrize("equation", ["ijk,k->ij", "ijk,kr->ijr"])
def test_rows_are_copied_back(equation: str) -> None:
    x, dense = tensor(nnz=400), operands(equation)
    expected = stc.einsum(equation, x, *dense, backend="torch")
    limit = 2 * sum(d.numel() * 4 for d in dense) + 4600
    with stc.stream_kernel(equation, x, *dense, plan="coo", memory_limit=limit) as s:
        assert not s.resident
        assert_same(s(*dense), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32])
def test_dtypes(dtype: torch.dtype) -> None:
    x, dense = tensor(nnz=150, dtype=dtype), operands("ijk,jr,kr->ir", dtype)
    expected = stc.einsum("ijk,jr,kr->ir", x, *dense, backend="torch")
    assert_same(stc.stream("ijk,jr,kr->ir", x, *dense, plan="fiber", chunk_bytes=4096), expected)


@pytest.mark.parametrize("plan", TILED)
def test_infinities_reach_only_what_has_nonzeros(plan: str) -> None:
    x, (b, c) = tensor(nnz=150), operands("ijk,jr,kr->ir")
    b[3, 1] = float("inf")
    expected = stc.einsum("ijk,jr,kr->ir", x, b, c, plan="coo", backend="torch")
    found = stc.stream("ijk,jr,kr->ir", x, b, c, plan=plan, chunk_bytes=1 << 18)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_copies_of_the_result_are_summed_once() -> None:
    """Each chunk adds to the copies that its plan asks for; where there is no memory for them, to one."""
    x, dense = tensor(nnz=300), operands("ijk,jr,kr->ir")
    expected = stc.einsum("ijk,jr,kr->ir", x, *dense, backend="torch")
    plan = stc.compile("ijk,jr,kr->ir", x, *dense, plan="fiber").plan
    plan = replace(plan, parts=tuple(replace(p, schedule=replace(p.schedule, copies=4)) for p in plan.parts))
    with stc.stream_kernel("ijk,jr,kr->ir", x, *dense, plan=plan, chunk_bytes=4096) as s:
        assert {p.result.copies for v in s.cut.variants for p in v.programs} == {4}
        assert_same(s(*dense), expected)
    with stc.stream_kernel("ijk,jr,kr->ir", x, *dense, plan=plan, memory_limit=6000) as s:
        assert {p.result.copies for v in s.cut.variants for p in v.programs} == {1}
        assert_same(s(*dense), expected)


def test_operands_may_be_rounded() -> None:
    x, dense = tensor(nnz=300), operands("ijk,jr,kr->ir")
    expected = stc.einsum("ijk,jr,kr->ir", x, *dense, backend="torch")
    for limit in (None, 6000):
        found = stc.stream("ijk,jr,kr->ir", x, *dense, precision="medium", memory_limit=limit, chunk_bytes=4096)
        assert_same(found, expected)
