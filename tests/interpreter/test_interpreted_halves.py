"""Tiles in three dots of float16 halves: the generated Triton source, run by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import TILED, assert_matches, explicit_plan, random_values
from halves_cases import BY_TILES, EVERY_EINSUM, FIT, SPMM, SPREAD, TAKEN, compiled, error, problem, spmm, tiles

import sparsetc as stc
from sparsetc.ir.plan import F16X3

NEAR = 1e-6
"""As exact as float32, a sum relative to its terms."""
LOST = 2.0**-12
"""What operands may lose that are just fit."""


@EVERY_EINSUM
def test_every_einsum(name: str, request_: stc.plans.Plan) -> None:
    operands = problem(TAKEN[name]).operands()
    assert_matches(compiled(TAKEN[name], operands, request_)(*operands[1:]), TAKEN[name], operands)


@pytest.mark.parametrize("request_", [tiles(name, least) for name in TILED for least in (0, 40)], ids=str)
def test_as_exact_as_float32(request_: stc.plans.Plan) -> None:
    x, b = spmm(i=40, j=150, r=20)
    kernel = compiled(SPMM, [x, b], request_)
    assert error(kernel, x, b) < NEAR
    assert "instead" not in vars(kernel.step)


@pytest.mark.parametrize("name", TILED)
def test_one_launch_with_runs(name: str) -> None:
    x, b = spmm(i=40, j=150, r=20)
    plan = compiled(SPMM, [x, b], tiles(name, 140)).plan
    assert len(plan.parts) == 2
    parts = tuple(replace(p, schedule=replace(p.schedule, warps=2)) for p in plan.parts)
    for own in (parts, parts[::-1]):
        shares = tuple(parts.index(p) for p in own)
        kernel = stc.compile(SPMM, x, b, plan=replace(plan, parts=own, shares=shares, fused=True))
        assert kernel.source.count("def kernel") == 1
        assert error(kernel, x, b) < NEAR
        assert "instead" not in vars(kernel.step)
        assert error(kernel, x, SPREAD["wide"](b)) < NEAR
        assert "instead" in vars(kernel.step)


def test_other_tiles_than_windows() -> None:
    x, b = spmm(i=20, j=30, r=16)
    plan = explicit_plan("dense_tile", "0|1|", {"r": 16}, precision=F16X3)
    kernel = stc.compile(SPMM, x, b, plan=plan)
    assert kernel.source.count("tl.dot(") == 3
    assert error(kernel, x, b) < NEAR


# --- what operands hold -----------------------------------------------------------------------------------------------


@BY_TILES
@pytest.mark.parametrize("which", ["values", "table"])
@pytest.mark.parametrize("name", FIT)
def test_operands_that_are_fit(name: str, which: str, request_: stc.plans.Plan) -> None:
    change: Callable[[torch.Tensor], torch.Tensor] = FIT[name]
    x, b = spmm()
    x, b = (x.with_values(change(x.values)), b) if which == "values" else (x, change(b))
    kernel = compiled(SPMM, [x, b], request_)
    assert error(kernel, x, b) < NEAR
    assert "instead" not in vars(kernel.step)


@BY_TILES
@pytest.mark.parametrize("which", ["values", "table"])
@pytest.mark.parametrize("name", SPREAD)
def test_others_run_in_float32(name: str, which: str, request_: stc.plans.Plan) -> None:
    change: Callable[[torch.Tensor], torch.Tensor] = SPREAD[name]
    x, b = spmm()
    x, b = (x.with_values(change(x.values)), b) if which == "values" else (x, change(b))
    kernel = compiled(SPMM, [x, b], request_)
    assert error(kernel, x, b) < NEAR
    assert [p.schedule.precision for p in vars(kernel.step)["instead"].programs] == ["tf32x3"]


@BY_TILES
def test_what_is_just_fit(request_: stc.plans.Plan) -> None:
    x, b = spmm()
    b = (b.abs() % 1 + 1) * torch.where(torch.arange(b.shape[1]) == 0, 2.0**-34, 1.0)
    kernel = compiled(SPMM, [x, b], request_)
    assert error(kernel, x, b) < LOST
    assert "instead" not in vars(kernel.step)


@BY_TILES
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_infinities_reach_what_reads_them(bad: float, request_: stc.plans.Plan) -> None:
    x, b = spmm()
    b[3, 2] = bad
    kernel = compiled(SPMM, [x, b], request_)
    torch.testing.assert_close(kernel(b), stc.einsum(SPMM, x, b, plan="coo"), equal_nan=True)
    b[3, 2] = 1.0
    assert error(kernel, x, b) < NEAR
    x.values[5] = bad
    torch.testing.assert_close(compiled(SPMM, [x, b], request_)(b), stc.einsum(SPMM, x, b, plan="coo"), equal_nan=True)


@BY_TILES
def test_a_change_is_noticed(request_: stc.plans.Plan) -> None:
    """Operands are looked at again where torch counted a change, and the largest is found at each call."""
    x, b = spmm()
    kernel = compiled(SPMM, [x, b], request_)
    assert error(kernel, x, b) < NEAR
    b *= 1000
    assert error(kernel, x, b) < NEAR
    b.data.mul_(1000)
    assert error(kernel, x, b) < NEAR
    b[0] *= 2.0**-60
    assert error(kernel, x, b) < NEAR
    assert "instead" in vars(kernel.step)


@BY_TILES
def test_what_is_known_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch, request_: stc.plans.Plan) -> None:
    x, b = spmm()
    kernel, seen = compiled(SPMM, [x, b], request_), []
    test = kernel.step.guard.test
    monkeypatch.setattr(kernel.step.guard, "test", lambda tables: seen.append(len(tables)) or test(tables))
    for _ in range(3):
        kernel(b)
    times = 1 if b.is_cuda else 3  # an ndarray may change what lies on a CPU, which leaves no trace
    assert seen == times * [2], "values and the table, together"
    b[0] = torch.inf
    for _ in range(3):
        kernel(b)
    assert seen == 2 * times * [2], "nor what is not fit"


# --- values -----------------------------------------------------------------------------------------------------------


@BY_TILES
def test_new_values(request_: stc.plans.Plan) -> None:
    x, b = spmm()
    kernel = compiled(SPMM, [x, b], request_)
    for scale in (1e-12, 1.0, 1e9):
        values = scale * random_values((x.nnz,), torch.float32, 5)
        own = x.with_values(values)
        expected = own.to_dense().double() @ b.double()
        for found in (kernel.with_values(values)(b), kernel(b, values=values)):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@BY_TILES
def test_a_pattern_of_ones_and_no_nonzeros(request_: stc.plans.Plan) -> None:
    x, b = spmm()
    ones = x.with_values(torch.ones(x.nnz))
    kernel = compiled(SPMM, [ones, b], request_)
    assert error(kernel, ones, b) < NEAR
    empty = stc.SparseTensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), x.shape)
    found = stc.compile(SPMM, empty, b, plan=kernel.plan)(b)
    assert not found.any()


@BY_TILES
def test_gradients(request_: stc.plans.Plan) -> None:
    x, b = spmm()
    values, table = x.values.clone().requires_grad_(), b.clone().requires_grad_()
    plan = compiled(SPMM, [x, b], request_).plan
    expected = torch.autograd.grad((x.with_values(values).to_dense() @ table).square().sum(), (values, table))
    found = stc.einsum(SPMM, x.with_values(values), table, plan=plan)
    assert isinstance(found, torch.Tensor)
    for one, other in zip(torch.autograd.grad(found.square().sum(), (values, table)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@BY_TILES
def test_transforms_of_torch(request_: stc.plans.Plan) -> None:
    x, b = spmm()
    plan = compiled(SPMM, [x, b], request_).plan

    def total(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        found = stc.einsum(SPMM, x.with_values(values), table, plan=plan)
        assert isinstance(found, torch.Tensor)
        return found.sum()

    of_values, of_table = torch.func.grad(total, (0, 1))(x.values, b)
    dense = x.to_dense()
    torch.testing.assert_close(of_table, dense.sum(0)[:, None].expand_as(b), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_values, b.sum(1)[x.coords[1]], rtol=1e-5, atol=1e-5)
