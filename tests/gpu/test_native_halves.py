"""Tiles in three dots of float16 halves, natively on a GPU."""

from __future__ import annotations

import pytest
import torch
from cases import TILED, assert_matches
from halves_cases import BY_TILES, EVERY_EINSUM, SPMM, SPREAD, TAKEN, compiled, error, problem, tiles

import sparsetc as stc
from sparsetc.codegen.split_float16 import largest, split_whole

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def spmm(rank: int = 64) -> tuple[stc.SparseTensor, torch.Tensor]:
    g = torch.Generator(device="cuda").manual_seed(0)
    dense = torch.randn(700, 900, generator=g, device="cuda")
    x = stc.SparseTensor.from_dense(dense * (torch.rand(700, 900, generator=g, device="cuda") < 0.3))
    return x, torch.randn(900, rank, generator=g, device="cuda")


@EVERY_EINSUM
def test_every_einsum(name: str, request_: stc.plans.Plan) -> None:
    operands = problem(TAKEN[name]).operands("cuda")
    assert_matches(compiled(TAKEN[name], operands, request_)(*operands[1:]), TAKEN[name], operands)


@pytest.mark.parametrize("request_", [tiles(name, least) for name in TILED for least in (0, 40)], ids=str)
@pytest.mark.parametrize("rank", [1, 20, 64, 300])
def test_as_exact_as_float32(rank: int, request_: stc.plans.Plan) -> None:
    x, b = spmm(rank)
    kernel = compiled(SPMM, [x, b], request_)
    assert error(kernel, x, b) < 1e-6
    assert "instead" not in vars(kernel.step)


@BY_TILES
@pytest.mark.parametrize("name", SPREAD)
def test_others_run_in_float32(name: str, request_: stc.plans.Plan) -> None:
    x, b = spmm()
    b = SPREAD[name](b.cpu()).cuda()
    kernel = compiled(SPMM, [x, b], request_)
    assert error(kernel, x, b) < 1e-5
    assert "instead" in vars(kernel.step)


@BY_TILES
def test_a_graph_scales_what_it_finds_when_it_runs(request_: stc.plans.Plan) -> None:
    x, b = spmm()
    kernel = compiled(SPMM, [x, b], request_)
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


@pytest.mark.parametrize("count", [0, 1, 1024, 100_003])
def test_values_of_one_scale_are_split_as_torch_splits_them(count: int) -> None:
    """Bit by bit, wherever they begin, by a largest magnitude that may be of others too."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 2.0**20
    values[::3] *= 2.0**-30
    for own in (values, values[1:]):
        for most in (largest(own), largest(own) * 8):
            found = split_whole(values.cuda()[count - own.numel() :], most.cuda())
            for a, b in zip(found, split_whole(own, most), strict=True):
                assert torch.equal(a.cpu(), b)
