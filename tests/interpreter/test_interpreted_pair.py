"""The generated Triton source of pairs of blocks, run by Triton's interpreter: whole blocks and bitmaps."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from cases import PATTERNS, assert_matches, poisoned
from hypothesis import given, settings
from pair_cases import CHAINS, EQUATIONS, SIZES, check_pair, operands, pairs, small_blocks, structural

import sparsetc as stc
from sparsetc.join import blocking
from sparsetc.products import blocks

STORAGES = ("whole", "bitmap")


def run(equation: str, given: list[Any], storage: str, **settings: Any) -> stc.Kernel:
    """Check, and see that it was Triton's source that ran."""
    kernel = check_pair(equation, given, plan=stc.plans.plan_bcb(storage=storage), **settings)
    assert all(step.backend == "triton" for step in kernel.contraction.steps)
    assert "import triton" in kernel.source
    return kernel


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", EQUATIONS)
def test_equation(name: str, storage: str) -> None:
    for pattern in ("skewed", "dense"):
        run(EQUATIONS[name], operands(EQUATIONS[name], pattern, torch.float32, coalesce=False), storage)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("storage", STORAGES)
def test_pattern(storage: str, pattern: str) -> None:
    run("ijk,klm->ijlm", operands("ijk,klm->ijlm", pattern, torch.float64), storage)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["one-mode", "two-modes", "batch-last", "inner", "elementwise"])
def test_dtype(name: str, storage: str, dtype: torch.dtype) -> None:
    run(EQUATIONS[name], operands(EQUATIONS[name], "random", dtype), storage)


@pytest.mark.parametrize("sides", [(1, 1, 1), (2, 4, 8), (16, 1, 4), (8, 8, 64)], ids=str)
@pytest.mark.parametrize("storage", STORAGES)
def test_sides(storage: str, sides: tuple[int, int, int]) -> None:
    """Words of a bitmap of 8 to 64 positions, sides below 16, blocks past the end of a mode."""
    given = operands("ijk,ljk->il", "random", torch.float64, sizes={**SIZES, "j": 40, "k": 3})
    plan = stc.plans.plan_bcb(storage=storage, i=sides[0], l=sides[1], j=sides[2], k=2)
    check_pair("ijk,ljk->il", given, plan=plan)


@pytest.mark.parametrize(
    "plan",
    [
        {"formats": ("bcb", "coo")},
        {"formats": ("coo", "bcb")},
        {"storage": ("whole", "bitmap")},
        {"storage": ("bitmap", "whole")},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["one-mode", "two-modes", "batch-last", "inner", "elementwise", "outer-permuted"])
def test_operands_stored_differently(name: str, plan: dict[str, tuple[str, str]]) -> None:
    for pattern in ("skewed", "dense"):
        given = operands(EQUATIONS[name], pattern, torch.float32)
        assert "import triton" in check_pair(EQUATIONS[name], given, plan=stc.plans.plan_bcb(**plan)).source


@pytest.mark.parametrize("storage", STORAGES)
def test_a_long_run_of_pairs_is_shared_by_programs(storage: str) -> None:
    """40 pairs of blocks for each of 4 blocks of the result, 3 a program."""
    given = operands("ij,jk->ik", "dense", torch.float64, sizes={"i": 8, "j": 40, "k": 8})
    with mock.patch.object(blocking, "PAIRS_A_PROGRAM", 3):
        kernel = check_pair("ij,jk->ik", given, plan=stc.plans.plan_bcb(storage=storage, i=4, j=1, k=4))
    (buffer,) = kernel.contraction.steps[0].numeric._buffers
    assert buffer.owner is not None
    assert buffer.ptr.numel() == 1 + 4 * 14


@pytest.mark.parametrize("storage", STORAGES)
def test_few_blocks_of_the_result_are_made_at_a_time(storage: str) -> None:
    """4 blocks of the result in buffers of 3; no more programs than a buffer has room for, but where runs are cut."""
    given = operands("ij,jk->ik", "dense", torch.float64, sizes={"i": 8, "j": 40, "k": 8})
    with mock.patch.object(blocking, "PAIRS_A_PROGRAM", 3), mock.patch.object(blocks, "BUFFER_BYTES", 4 * 4 * 8 * 3):
        kernel = check_pair("ij,jk->ik", given, plan=stc.plans.plan_bcb(storage=storage, i=4, j=1, k=4))
    first, second = kernel.contraction.steps[0].numeric._buffers
    assert (first.start, first.blocks, second.start, second.blocks) == (0, 3, 3, 1)
    assert first.owner is None
    assert second.owner is not None
    assert second.ptr.tolist() == [120, 133, 146, 159, 160]


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_precision(precision: str) -> None:
    given = operands("ijk,klm->ijlm", "dense", torch.float32)
    kernel = stc.compile("ijk,klm->ijlm", *given, plan="bcb", precision=precision)
    assert ("x_high_values" if precision == "highest" else 'input_precision="tf32"') in kernel.source
    assert_matches(kernel(), "ijk,klm->ijlm", given, 1e-5 if precision == "highest" else 2e-3)


def test_highest_reads_bitmaps_as_they_are() -> None:
    for storage, expected in (("whole", False), ("bitmap", True)):
        given = operands("ijk,klm->ijlm", "dense", torch.float32)
        kernel = stc.compile("ijk,klm->ijlm", *given, plan=stc.plans.plan_bcb(storage=storage), precision="highest")
        assert ('input_precision="tf32x3"' in kernel.source) == expected


def component_error(found: Any, equation: str, given: list[Any]) -> float:
    """The greatest error of an entry over the sum of absolute products it is made of, in float64."""
    exact = [o.to_dense().double() for o in given]
    size = torch.einsum(equation, *(o.abs() for o in exact))
    off = (found.to_dense().double() - torch.einsum(equation, *exact)).abs()
    assert bool((off[size == 0] == 0).all())
    return float((off / size.clamp(min=1e-300)).max())


def scaled(o: stc.SparseTensor, mode: int, low: int, high: int, seed: int) -> stc.SparseTensor:
    """An operand whose coordinates of a mode are scaled by random powers of two."""
    g = torch.Generator().manual_seed(seed)
    powers = torch.randint(low, high + 1, (o.shape[mode],), generator=g)
    return o.with_values(torch.ldexp(o.values, powers[o.coords[mode]]))


PLANS_OF_BLOCKS = {"bcb": "bcb", "bcb+scalar": small_blocks("ijk,klm->ijlm", 2, 2)}


@pytest.mark.parametrize("name", PLANS_OF_BLOCKS)
@pytest.mark.parametrize(
    ("free", "inner", "in_halves"),
    [((0, 0), (0, 0), True), ((-60, 60), (-6, 6), True), ((0, 0), (-60, 60), False), ((-120, -100), (0, 0), False)],
    ids=["alike", "rows-far-apart", "values-far-apart", "tiny"],
)
def test_values_decide_whether_blocks_are_in_halves(
    free: tuple[int, int], inner: tuple[int, int], in_halves: bool, name: str
) -> None:
    """Rows of x, and contracted coordinates, of very different size: exact either way."""
    equation = "ijk,klm->ijlm"
    x, y = operands(equation, "dense", torch.float32)
    x, y = scaled(scaled(x, 0, *free, 1), 2, *inner, 2), scaled(y, 0, *inner, 3)
    kernel = stc.compile(equation, x, y, plan=PLANS_OF_BLOCKS[name], precision="highest")
    path = kernel.contraction.steps[0].numeric
    path = path if name == "bcb" else path.sides[0]
    with mock.patch.object(path.launch_of_halves, "blocks", wraps=path.launch_of_halves.blocks) as halves:
        assert component_error(kernel(), equation, [x, y]) < 1e-6
    assert halves.called == in_halves
    assert ("launch" in vars(path)) != in_halves  # the program of blocks as they are is made when asked for


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_reach_their_own_entries_only(value: float) -> None:
    equation = "ijk,klm->ijlm"
    x, y = operands(equation, "skewed", torch.float32)
    x.values[0] = value
    kernel, path = (stc.compile(equation, x, y, plan=plan, precision="highest") for plan in ("bcb", "scalar"))
    torch.testing.assert_close(kernel().values, path().values, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_few_blocks_in_halves_are_made_at_a_time() -> None:
    """Rows of blocks of each buffer, and of shares of runs."""
    given = operands("ij,jk->ik", "dense", torch.float32, sizes={"i": 12, "j": 40, "k": 8})
    given = [scaled(given[0], 0, -40, 40, 1), scaled(given[1], 1, -40, 40, 2)]
    for least in (4 * 4 * 4 * 4, 1 << 31):
        with mock.patch.object(blocking, "PAIRS_A_PROGRAM", 3), mock.patch.object(blocks, "BUFFER_BYTES", least):
            kernel = stc.compile("ij,jk->ik", *given, plan=stc.plans.plan_bcb(i=4, j=1, k=4), precision="highest")
        path = kernel.contraction.steps[0].numeric
        assert (len(path._buffers) > 1) == (least < 1 << 31)
        assert any(b.owner is not None for b in path._buffers)
        assert component_error(kernel(), "ij,jk->ik", given) < 1e-6


@pytest.mark.parametrize("name", CHAINS)
def test_chain(name: str) -> None:
    run(CHAINS[name], operands(CHAINS[name], dtype=torch.float64), "whole")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["one-mode", "two-modes", "batch-last", "own-letters"])
def test_hybrid(name: str, storage: str, dtype: torch.dtype, deterministic: bool) -> None:
    equation = EQUATIONS[name]
    given = operands(equation, "skewed", dtype, coalesce=False)
    kernel = check_pair(equation, given, plan=small_blocks(equation, 2, 2, storage), deterministic=deterministic)
    assert kernel.plan.name == "bcb+scalar"
    assert kernel.backend == "triton"
    assert kernel.source.count("import triton\n") == 2


def test_gradients() -> None:
    x, y = operands("ij,jk->ik", sizes={"i": 4, "j": 5, "k": 3})
    kernel = stc.compile("ij,jk->ik", x, y, plan="bcb")
    given = (x.values.clone().requires_grad_(), y.values.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: kernel(values=[a, b]).values, given)


@settings(max_examples=30)
@given(pairs((torch.float32, torch.float64, torch.int64), ("bcb",)))
def test_any_pair_agrees_with_the_reference(drawn: Any) -> None:
    given = drawn.operands()
    plan = stc.plans.plan_bcb(storage="bitmap" if drawn.kept else "whole")
    with poisoned(), stc.options(backend="triton"):
        found = stc.einsum(drawn.equation, *given, plan=plan)
    assert_matches(found, drawn.equation, given)
    if isinstance(found, stc.SparseTensor):
        assert torch.equal(found.coords, structural(drawn.equation, given))


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("plan", ["scalar", "bcb", stc.plans.plan_bcb(storage="bitmap"), "bcb+scalar"], ids=repr)
def test_a_call_leaves_no_tensor_to_the_collector(plan: str | stc.plans.Plan, precision: str) -> None:
    """Blocks of one call can take most of a GPU's memory: they go when it ends, by reference counts."""
    given = operands("ijk,klm->ijlm", "random", torch.float32)
    kernel = stc.compile("ijk,klm->ijlm", *given, plan=plan, precision=precision)
    kernel()
    gc.collect()
    gc.freeze()  # what was there before need not be looked at, by this test or those after it
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        kernel()
        gc.collect()
        left = [one for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left
