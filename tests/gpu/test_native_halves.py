"""Windows in three dots of float16 halves, natively on a GPU."""

from __future__ import annotations

import pytest
import torch
from cases import assert_matches
from halves_cases import ALL, BESIDE_RUNS, SPMM, SPREAD, TAKEN, compiled, error
from window_cases import problem

import sparsetc as stc

SHAPES = ((16, 32), (64, 64), (128, 64))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def spmm(rank: int = 64) -> tuple[stc.SparseTensor, torch.Tensor]:
    g = torch.Generator(device="cuda").manual_seed(0)
    dense = torch.randn(700, 900, generator=g, device="cuda")
    x = stc.SparseTensor.from_dense(dense * (torch.rand(700, 900, generator=g, device="cuda") < 0.3))
    return x, torch.randn(900, rank, generator=g, device="cuda")


@pytest.mark.parametrize("name", TAKEN)
def test_every_einsum(name: str) -> None:
    operands = problem(TAKEN[name]).operands("cuda")
    assert_matches(compiled(TAKEN[name], operands)(*operands[1:]), TAKEN[name], operands)


@pytest.mark.parametrize(
    "plan",
    [ALL, stc.plan_window(16, 32, 0), stc.plan_window(64, 64, 0), stc.plan_window(128, 64, 0), BESIDE_RUNS],
    ids=str,
)
@pytest.mark.parametrize("rank", [1, 20, 64, 300])
def test_as_exact_as_float32(rank: int, plan: stc.Plan) -> None:
    x, b = spmm(rank)
    kernel = compiled(SPMM, [x, b], plan)
    assert error(kernel, x, b) < 1e-6
    assert not kernel.step._others


@pytest.mark.parametrize("name", SPREAD)
def test_others_run_in_float32(name: str) -> None:
    x, b = spmm()
    b = SPREAD[name](b.cpu()).cuda()
    kernel = compiled(SPMM, [x, b])
    assert error(kernel, x, b) < 1e-5
    assert kernel.step._others


def test_a_graph_scales_what_it_finds_when_it_runs() -> None:
    x, b = spmm()
    kernel = compiled(SPMM, [x, b])
    kernel(b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(b)
    for scale in (1.0, 1e-9, 1e12):
        own = torch.randn_like(b) * scale
        b.copy_(own)
        graph.replay()
        expected = x.to_dense().double() @ own.double()
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * scale)
