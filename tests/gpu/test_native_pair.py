"""Contractions of several sparse operands on a GPU: every path, both storages, types, deterministic sums, gradients."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from cases import assert_matches
from pair_cases import EQUATIONS, MIXED, SIZES, operands, small_blocks, structural

import sparsetc as stc
from sparsetc.codegen.split_float16 import TilePositions, split
from sparsetc.products import tasks as task_lists

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PATHS = ("auto", "scalar", "dense", stc.plans.plan_bcb(storage="whole"), stc.plans.plan_bcb(storage="bitmap"))
STORED_DIFFERENTLY = (
    *(stc.plans.plan_bcb(formats=formats) for formats in (("bcb", "coo"), ("coo", "bcb"))),
    *(stc.plans.plan_bcb(storage=storage) for storage in (("whole", "bitmap"), ("bitmap", "whole"))),
)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


def check(
    equation: str, dtype: torch.dtype, plan: str | stc.plans.Plan, dense: tuple[int, ...] = (), **sizes: int
) -> None:
    given = operands(equation, "skewed", dtype, coalesce=False, dense=dense, sizes={**SIZES, **sizes})
    on_gpu = [o.cuda() for o in given]
    for deterministic in (False, True):
        found = stc.einsum(equation, *on_gpu, plan=plan, deterministic=deterministic)
        assert_matches(found, equation, given)
        if isinstance(found, stc.SparseTensor):
            assert torch.equal(found.coords.cpu(), structural(equation, given))


@pytest.mark.parametrize("plan", PATHS, ids=str)
@pytest.mark.parametrize("name", EQUATIONS)
def test_equation(name: str, plan: str | stc.plans.Plan) -> None:
    check(EQUATIONS[name], torch.float32, plan)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("plan", PATHS, ids=str)
def test_dtype(plan: str | stc.plans.Plan, dtype: torch.dtype) -> None:
    check("ijk,klm->ijlm", dtype, plan, i=20, j=20, k=70, l=20)
    check("bij,bjk->bik", dtype, plan, i=20, j=70)


@pytest.mark.parametrize("plan", STORED_DIFFERENTLY, ids=str)
@pytest.mark.parametrize("name", EQUATIONS)
def test_operands_stored_differently(name: str, plan: stc.plans.Plan) -> None:
    check(EQUATIONS[name], torch.float32, plan)
    check(EQUATIONS[name], torch.float64, plan, i=20, j=20, k=70, l=20)


@pytest.mark.parametrize("threshold", [2, 3])
@pytest.mark.parametrize("name", EQUATIONS)
def test_hybrid(name: str, threshold: int) -> None:
    for storage in ("whole", "bitmap"):
        check(EQUATIONS[name], torch.float32, small_blocks(EQUATIONS[name], threshold, 4, storage))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64], ids=str)
def test_dtype_of_a_hybrid(dtype: torch.dtype) -> None:
    check("ijk,klm->ijlm", dtype, small_blocks("ijk,klm->ijlm", 3, 4), i=20, j=20, k=70, l=20)


@pytest.mark.parametrize("plan", ["auto", "scalar", "bcb"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integers(dtype: torch.dtype, plan: str) -> None:
    check("ijk,klm->ijlm", dtype, plan)


@pytest.mark.parametrize("name", MIXED)
def test_with_dense_operands(name: str) -> None:
    check(MIXED[name][0], torch.float64, "auto", MIXED[name][1])


def far_apart(free: int, inner: int) -> tuple[stc.SparseTensor, stc.SparseTensor]:
    """Blocks of 64 x 32, full; rows of both, and contracted coordinates, scaled by up to 2 ** these."""
    g = torch.Generator().manual_seed(0)
    made = []
    for rows, columns in ((150, 300), (130, 300)):
        value = torch.randn(rows, columns, generator=g).clamp(min=-3, max=3)
        value = torch.where(value.abs() < 0.1, 0.5, value)
        row, column = (
            torch.randint(-most, most + 1, (n,), generator=g) for n, most in ((rows, free), (columns, inner))
        )
        made.append(stc.SparseTensor.from_dense(torch.ldexp(value, row[:, None] + column).cuda()))
    return made[0], made[1]


@pytest.mark.parametrize("plan", ["bcb", stc.plans.plan_bcb(threshold=1200)], ids=str)
@pytest.mark.parametrize(("free", "inner", "in_halves"), [(0, 0, True), (50, 0, True), (0, 10, True), (0, 30, False)])
def test_highest_is_as_exact_as_float32(free: int, inner: int, in_halves: bool, plan: str | stc.plans.Plan) -> None:
    """By blocks in halves where values are near enough to their row's largest, else by blocks as they are."""
    x, y = far_apart(free, inner)
    kernel = stc.compile("ik,jk->ij", x, y, plan=plan, precision="highest")
    path = kernel.contraction.steps[0].numeric
    path = path.sides[0] if kernel.plan.name == "bcb+scalar" else path
    with mock.patch.object(path.launch_of_halves, "blocks", wraps=path.launch_of_halves.blocks) as halves:
        found = kernel().to_dense().double()
    assert halves.called == in_halves
    exact, size = (
        x.to_dense().double() @ y.to_dense().double().T,
        x.to_dense().double().abs() @ y.to_dense().double().abs().T,
    )
    assert float(((found - exact).abs() / size).max()) < 1e-6


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite(value: float) -> None:
    x, y = (o.cuda() for o in operands("ijk,klm->ijlm", "skewed", torch.float32))
    x.values[0] = value
    found, expected = (stc.einsum("ijk,klm->ijlm", x, y, plan=plan, precision="highest") for plan in ("bcb", "scalar"))
    torch.testing.assert_close(found.values, expected.values, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [1 << 19, 5000, 0])
def test_parts_are_those_of_the_twin(count: int, dtype: torch.dtype) -> None:
    """Of an operand with sorted rows, and one without an order, which may have no values; as x and as y."""
    g = torch.Generator().manual_seed(0)
    at = torch.randperm(1 << 20, generator=g)
    line = torch.randint(0, 40, (512,), generator=g).int()
    places = [TilePositions(own.to(dtype), line, 40, 64, 32) for own in (at[: 1 << 19].sort().values, at[:count])]
    values = [torch.randn(p.at.numel(), generator=g) for p in places]
    for own in (slice(None), slice(None, None, -1)):
        expected = split(values[own], places[own])
        moved = [replace(p, at=p.at.cuda(), line=p.line.cuda()) for p in places[own]]
        found = split([v.cuda() for v in values[own]], moved)
        assert int(found.verdict) == int(expected.verdict)
        for a, b in zip(found.arrays, expected.arrays, strict=True):
            assert all(torch.equal(left.cpu(), right) for left, right in zip(a, b, strict=True))


@pytest.mark.parametrize("plan", ["scalar", "dense", "bcb"])
def test_gradients(plan: str) -> None:
    x, y = (o.cuda() for o in operands("ijk,ljk->li", sizes={**SIZES, "i": 3, "j": 4}))
    kernel = stc.compile("ijk,ljk->li", x, y, plan=plan)
    given = (x.values.clone().requires_grad_(), y.values.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: kernel(values=[a, b]).values, given, nondet_tol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_deterministic_sums_repeat(dtype: torch.dtype) -> None:
    """80,000 tasks on 160 entries of the result, in one list and in many; values and gradients, bit by bit."""
    x, y = (o.cuda() for o in operands("ij,jk->ik", "dense", dtype, sizes={"i": 16, "j": 500, "k": 10}))
    for limit in (None, 300_000):
        kernel = stc.compile("ij,jk->ik", x, y, plan="scalar", deterministic=True, memory_limit=limit)
        assert kernel.contraction.steps[0].task_sums.tasks.fits == (limit is None)
        found = []
        for _ in range(5):
            given = [o.values.clone().requires_grad_() for o in (x, y)]
            z = kernel(values=given).values
            z.square().sum().backward()
            found.append((z.detach(), *(v.grad for v in given)))
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
        torch.testing.assert_close(found[0][0].view(16, 10), x.to_dense() @ y.to_dense())


@pytest.mark.parametrize("plan", ["scalar", "dense", "bcb"])
def test_calls_are_captured_in_a_graph(plan: str) -> None:
    x, y = (o.cuda() for o in operands("ijk,klm->ijlm", "dense", torch.float32))
    kernel = stc.compile("ijk,klm->ijlm", x, y, plan=plan)
    values = [o.values.clone() for o in (x, y)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kernel(values=values)  # compiled, and allocated, outside
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(values=values).values
    for v in values:
        v.mul_(2)
    graph.replay()
    torch.testing.assert_close(found, kernel(values=values).values, rtol=1e-4, atol=1e-4)


def test_a_deterministic_hybrid_repeats() -> None:
    """Blocks of 16 x 16, more and less than half full, in many runs of pairs and of tasks."""
    g = torch.Generator().manual_seed(0)
    full = torch.rand(16, 2000, generator=g) ** 2
    x = stc.SparseTensor.from_dense((full * (torch.rand(16, 2000, generator=g) < full)).cuda())
    y = stc.SparseTensor.from_dense(torch.rand(2000, 10, generator=g).cuda())
    plan = stc.plans.plan_bcb(threshold=80, i=16, j=16, k=16)
    kernel = stc.compile("ij,jk->ik", x, y, plan=plan, deterministic=True)
    assert kernel.plan.name == "bcb+scalar"
    found = [kernel().values for _ in range(5)]
    assert all(torch.equal(found[0], other) for other in found[1:])
    torch.testing.assert_close(found[0].view(16, 10), x.to_dense() @ y.to_dense())


def rmat(scale: int, degree: int) -> torch.Tensor:
    """(2, n) coordinates of a graph with few rows of many, recursively."""
    n, shares = degree << scale, torch.tensor([0.57, 0.19, 0.19, 0.05])
    quadrant = torch.multinomial(shares, n * scale, True, generator=torch.Generator().manual_seed(0)).view(scale, n)
    weight = 1 << torch.arange(scale)[:, None]
    return torch.unique(torch.stack([(weight * (quadrant // 2)).sum(0), (weight * (quadrant % 2)).sum(0)]), dim=1)


def star(n: int) -> torch.Tensor:
    """A row, a column and a diagonal: a row of the square meets everything, and an entry of most rows one."""
    zeros, at = torch.zeros(n, dtype=torch.long), torch.arange(n)
    return torch.unique(torch.cat([torch.stack(c) for c in ((zeros, at), (at, zeros), (at, at))], 1), dim=1)


def scattered(n: int, nonzeros: int) -> torch.Tensor:
    """So many places, with few tasks, that 33 bits number them."""
    return torch.unique(torch.randint(0, n, (2, nonzeros), generator=torch.Generator().manual_seed(1)), dim=1)


@pytest.mark.parametrize(
    "coords",
    [rmat(12, 8), rmat(10, 32), star(3000), scattered(100_000, 300_000)],
    ids=["R-MAT", "R-MAT, many tasks", "star", "scattered"],
)
def test_marks_and_groups_make_the_same_list(coords: torch.Tensor) -> None:
    n = int(coords.max()) + 1
    x = stc.SparseTensor(coords, torch.ones(coords.shape[1]), (n, n)).cuda()
    with mock.patch.object(task_lists, "SPREAD", 1 << 14):
        (step,) = stc.compile("ij,jk->ik", x, x, plan="scalar").contraction.steps
        assert task_lists.markable(step.problem)
    made = []
    for marked in (True, False):
        with mock.patch.object(task_lists, "markable", return_value=marked):
            tasks = task_lists.Tasks(step.problem)
            made.append((tasks.places(), *tasks))
    (places, one), (expected, other) = made
    assert torch.equal(places, expected)
    for name in ("x_word", "x_base", "y_shift", "z_word"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("plan", ["steps", "one-pass"])
def test_a_path_in_a_cuda_graph(plan: str) -> None:
    """A path is launches alone, as one pass is, so a graph replays it on what its operands hold then."""
    g = torch.Generator().manual_seed(0)
    x = stc.SparseTensor(
        torch.stack([torch.randint(0, n, (6000,), generator=g) for n in (200, 300, 240)]),
        torch.rand(6000, generator=g),
        (200, 300, 240),
    ).to("cuda")
    tables = [torch.rand(n, 8, generator=g).cuda() for n in x.shape]
    kernel = stc.compile("ijk,ip,jr,ks->prs", x, *tables, plan=plan)
    expected = torch.einsum("ijk,ip,jr,ks->prs", x.to_dense().double(), *(t.double() for t in tables))
    with torch.cuda.stream(torch.cuda.Stream()):
        kernel(*tables)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = kernel(*tables)
    tables[0].mul_(2)
    graph.replay()
    torch.testing.assert_close(result.double(), 2 * expected, rtol=1e-4, atol=1e-3)
