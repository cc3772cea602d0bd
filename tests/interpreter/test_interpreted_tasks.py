"""The generated Triton source of lists of tasks, and of operands of ones, run by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import PATTERNS, assert_matches, poisoned
from hypothesis import given, settings
from pair_cases import CHAINS, EQUATIONS, SIZES, check_pair, operands, pairs, small_chunks, structural
from pattern_cases import CASES, expected, finished, kernel, without_values, zeros

import sparsetc as stc
from sparsetc.backends import TRITON
from sparsetc.codegen.programs import Programs
from sparsetc.products import scalar
from sparsetc.products import tasks as task_lists


def run(equation: str, given: list[Any], **settings: Any) -> stc.Kernel:
    """Check, and see that it was Triton's source that ran."""
    made = check_pair(equation, given, plan="scalar", **settings)
    assert all(step.backend == "triton" for step in made.contraction.steps)
    assert "import triton" in made.source
    return made


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", EQUATIONS)
def test_equation(name: str, deterministic: bool) -> None:
    for pattern in ("skewed", "dense"):
        given = operands(EQUATIONS[name], pattern, torch.float32, coalesce=False)
        run(EQUATIONS[name], given, deterministic=deterministic)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern(pattern: str) -> None:
    for deterministic in (False, True):
        given = operands("ijk,klm->ijlm", pattern, torch.float64)
        run("ijk,klm->ijlm", given, deterministic=deterministic)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["one-mode", "two-modes", "batch-last", "inner", "elementwise"])
def test_dtype(name: str, dtype: torch.dtype) -> None:
    for deterministic in (False, True):
        run(EQUATIONS[name], operands(EQUATIONS[name], "random", dtype), deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kept", [True, False])
def test_long_runs_and_many_items(kept: bool, deterministic: bool) -> None:
    """40 runs of 60 tasks for each of 2 rows: loops without masks, items that cut runs, fibers that are cut."""
    given = operands("ij,jk->ik", "dense", torch.float64, sizes={"i": 2, "j": 40, "k": 60})
    chunks = mock.patch.object(scalar, "CHUNKS", replace(scalar.CHUNKS, lanes=16, unroll=2))
    items, cap = mock.patch.object(task_lists, "ITEM", 256), mock.patch.object(scalar, "CAP", 8)
    with small_chunks(1000, kept), chunks, items, cap:
        made = run("ij,jk->ik", given, deterministic=deterministic)
        (step,) = made.contraction.steps
        assert step.task_sums.tasks.fits == kept
        g = torch.Generator().manual_seed(0)
        upstream = torch.rand(made.nnz, generator=g, dtype=torch.float64)
        x, y = (o.to_dense() for o in given)
        dense = upstream.view(2, 60)
        torch.testing.assert_close(step.task_sums.of("p")(given[1].values, upstream).view(2, 40), dense @ y.T)
        torch.testing.assert_close(step.task_sums.of("q")(given[0].values, upstream).view(40, 60), x.T @ dense)


@pytest.mark.parametrize("name", CHAINS)
def test_chain(name: str) -> None:
    run(CHAINS[name], operands(CHAINS[name], dtype=torch.float64))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("equation", ["ij,jk->ik", "ijk,ljk->li", "ij,ij->ij", "ij,jk->"])
def test_gradients(equation: str, deterministic: bool) -> None:
    x, y = operands(equation, sizes={**SIZES, "i": 4, "j": 5, "k": 3})
    made = stc.compile(equation, x, y, plan="scalar", deterministic=deterministic)
    given = (x.values.clone().requires_grad_(), y.values.clone().requires_grad_())

    def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found = made(values=[left, right])
        return found.values if isinstance(found, stc.SparseTensor) else found

    assert torch.autograd.gradcheck(run, given)


def test_few_sums_of_many_tasks_are_ordered() -> None:
    """Additions to one address would wait for one another; fibers of pieces of the list add up to the same."""
    given = operands("ijk,ijk->", "dense", torch.float32)
    with mock.patch.object(scalar, "MANY", 16), small_chunks(100, True), mock.patch.object(task_lists, "FRAME", 16):
        made = run("ijk,ijk->", given)
        assert "atomic" not in made.source
        (step,) = made.contraction.steps
        kept = step.task_sums.of("z")._kept
        assert kept is not None
        assert len(kept[1]) == -(-step.task_sums.tasks.join_order.tasks // 96)
    with mock.patch.object(scalar, "MANY", 1000):
        assert "atomic" in run("ijk,ijk->", given).source


def test_deterministic_sums_add_nothing_by_atomics_and_repeat() -> None:
    given = operands("ijk,ljk->il", "dense", torch.float32)
    made = stc.compile("ijk,ljk->il", *given, plan="scalar", deterministic=True)
    assert "atomic" not in made.source
    assert torch.equal(made().values, made().values)
    (step,) = made.contraction.steps
    assert step.task_sums.of("z")._kept is not None
    integers = stc.compile("ij,jk->ik", *operands("ij,jk->ik", dtype=torch.int64), plan="scalar", deterministic=True)
    assert "atomic" in integers.source


@settings(max_examples=30)
@given(pairs((torch.float32, torch.float64, torch.int64), ("scalar",)))
def test_any_pair_agrees_with_the_reference(drawn: Any) -> None:
    given = drawn.operands()
    with poisoned(), drawn.in_pieces(given), stc.options(backend="triton", deterministic=drawn.same):
        found = stc.einsum(drawn.equation, *given, plan="scalar")
    assert_matches(found, drawn.equation, given)
    if isinstance(found, stc.SparseTensor):
        assert torch.equal(found.coords, structural(drawn.equation, given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("lanes", [2, 32])
@pytest.mark.parametrize("name", CASES)
def test_ones_are_not_stored(name: str, lanes: int, dtype: torch.dtype) -> None:
    k, dense = kernel(name, lanes, dtype)
    parts = without_values(k)
    made, folder = [p.program for p in parts], k.contraction.settings.cache_dir
    programs = Programs(made, dtype, TRITON, torch.device("cpu"), folder, name="pattern")
    assert "tl.load(values" not in programs.source
    out = zeros(k, dtype)
    programs.bind([p.arrays for p in parts])([None] * len(parts), k.step.tables(dense), out)
    torch.testing.assert_close(finished(k, out), expected(k, dense), check_dtype=False, rtol=1e-5, atol=1e-5)
