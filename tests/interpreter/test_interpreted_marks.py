"""Patterns and lists of tasks that kernels make of marks, against those made of groups of tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import PATTERNS, poisoned
from hypothesis import given, settings
from pair_cases import EQUATIONS, operands, pairs, structural

import sparsetc as stc
from sparsetc.contraction.pair import Pair
from sparsetc.products import tasks as task_lists
from sparsetc.products.problem import JoinProblem
from sparsetc.products.tasks import NonzeroPairList, Tasks, markable


def step_of(equation: str, given: list[Any], **settings: object) -> Pair:
    (step,) = stc.compile(equation, *given, plan="scalar", **settings).contraction.steps
    return step


def made(step: Pair, marked: bool) -> tuple[torch.Tensor, NonzeroPairList]:
    """(places, list), by marks or by groups."""
    with mock.patch.object(task_lists, "markable", return_value=marked), poisoned():
        tasks = Tasks(step.problem)
        places = tasks.places()
        (one,) = tasks
        # A list made again, of a pattern that another path has found.
        again = Tasks(step.problem)
        again.nnz = tasks.nnz
        (other,) = again
    assert one.nnz == tasks.nnz == places.numel()
    same(one, other)
    return places, one


def same(left: NonzeroPairList, right: NonzeroPairList) -> None:
    for name in ("x_word", "x_base", "y_shift", "z_word"):
        a, b = getattr(left, name), getattr(right, name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), name
    assert (left.nnz, left.begin, left.end) == (right.nnz, right.begin, right.end)


def check(step: Pair) -> None:
    assert markable(step.problem) == (step.task_sums.tasks.join_order.tasks > 0)
    places, one = made(step, False)
    if step.task_sums.tasks.join_order.tasks:
        found, other = made(step, True)
        assert found.dtype == places.dtype == torch.int64
        assert torch.equal(found, places)
        same(one, other)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", EQUATIONS)
def test_equation(name: str, pattern: str) -> None:
    check(step_of(EQUATIONS[name], operands(EQUATIONS[name], pattern, coalesce=False)))


@settings(max_examples=50)
@given(pairs((torch.float64,), ("scalar",)))
def test_any_pair(drawn: Any) -> None:
    operands = drawn.operands()
    step = step_of(drawn.equation, operands)
    check(step)
    if step.bound.einsum.output:
        assert torch.equal(step._pattern.coords, structural(drawn.equation, operands))


@pytest.mark.parametrize("frame", [1, 4, 256])
@pytest.mark.parametrize("sizes", [(16, 1), (64, 8), (1024, 64)])
def test_programs_and_frames_of_any_size(sizes: tuple[int, int], frame: int) -> None:
    """Runs of one entry over several programs, and programs of many entries."""
    block, words = max(sizes[0], frame), sizes[1]
    with (
        mock.patch.object(task_lists, "FRAME", frame),
        mock.patch.object(task_lists, "BLOCK", block),
        mock.patch.object(task_lists, "WORDS", words),
    ):
        for name in ("one-mode", "batch", "inner", "outer-permuted"):
            check(step_of(EQUATIONS[name], operands(EQUATIONS[name], "skewed")))


def test_one_row_with_most_of_the_tasks() -> None:
    """A row, a column and a contracted index that meet everything, beside rows of one task; the other way about too."""
    n = 100
    zeros, at = torch.zeros(n, dtype=torch.long), torch.arange(n)
    lines = [torch.stack([zeros, at]), torch.stack([at, zeros]), torch.stack([at, at])]
    for flipped in (False, True):
        coords = torch.unique(torch.cat([n - 1 - c if flipped else c for c in lines], 1), dim=1)
        x = stc.SparseTensor(coords, torch.ones(coords.shape[1]), (n, n))
        step = step_of("ij,jk->ik", [x, x])
        assert step.task_sums.tasks.join_order.tasks > n * n
        check(step)


def test_runs_longer_than_programs() -> None:
    """Each entry of x meets 3,000 of y; the result takes every bit of its words."""
    x = stc.SparseTensor.from_dense(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    y = stc.SparseTensor.from_dense(torch.ones(2, 3000))
    step = step_of("ij,jk->ik", [x, y])
    check(step)
    assert step.nnz == 6000


def test_one_task_and_none() -> None:
    one = stc.SparseTensor(torch.tensor([[3], [5]]), torch.ones(1), (7, 7))
    step = step_of("ij,kj->ik", [one, one])
    assert step.task_sums.tasks.join_order.tasks == 1
    check(step)
    none = step_of("ij,jk->ik", [one, one])
    assert none.task_sums.tasks.join_order.tasks == 0
    check(none)


def test_marks_are_for_places_that_are_few_a_task_and_fit() -> None:
    step = step_of("ij,jk->ik", operands("ij,jk->ik", "skewed"))
    m, places = step.task_sums.tasks.join_order, step.join.rows * step.join.columns
    with mock.patch.object(task_lists, "FEW", 0):
        for spread, wanted in [(places // m.tasks + 1, True), (0, False)]:
            with mock.patch.object(task_lists, "SPREAD", spread):
                assert markable(step.problem) == wanted
    for limit, wanted in [(places, True), (places - 1, False)]:  # a quarter of a byte a place, a quarter of the limit
        assert markable(replace(step.problem, limit=limit)) == wanted
    other = step_of("ij,jk->ik", operands("ij,jk->ik", "skewed"), backend="torch")
    assert not markable(other.problem)


def test_the_count_is_checked_before_places_are_made() -> None:
    x, y = operands("i,j->ij", "dense", sizes={"i": 10, "j": 1})
    step = step_of("i,j->ij", [x, y])
    tasks, too_many = Tasks(step.problem), stc.OutOfMemoryError("too many")
    with (
        mock.patch.object(tasks, "_launch", wraps=tasks._launch) as launch,
        mock.patch.object(JoinProblem, "check", side_effect=too_many) as check,
        pytest.raises(stc.OutOfMemoryError),
    ):
        tasks.places()
    check.assert_called_once_with(10)
    assert [call.args[0] for call in launch.call_args_list] == ["mark", "count"]
