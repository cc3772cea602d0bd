"""Executables alone: programs and tensors, into an output that is made, given or added to; all items or a range."""

from __future__ import annotations

import pytest
import torch
from cases import SIZES, TILED, Problem, explicit_plan
from executable_cases import (
    CASES,
    MTTKRP,
    check_accumulation,
    check_no_items,
    check_output,
    check_ranges,
    check_rows_without_nonzeros,
    made,
)

import sparsetc as stc
from sparsetc.codegen.launch import PartArrays
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.lower import Target, lower
from sparsetc.ir.nest.coordinates import Computed, Field
from sparsetc.ir.nest.nest import runs
from sparsetc.ir.plan import Schedule


@pytest.mark.parametrize("name", CASES)
def test_an_output_is_made_or_overwritten(name: str) -> None:
    check_output(made(name, "torch"))


def test_rows_that_are_added_to_are_zeroed_alone() -> None:
    m = made("long rows added, others stored", "torch")
    assert m.arrays.zeroed is not None
    assert 0 < m.arrays.zeroed.numel() <= m.executable.shape[0] // 2
    assert m.executable.zeroes
    assert m.executable.stores


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("plan", ["coo", "fiber", "rows", *TILED, "coo+rows"])
def test_rows_without_nonzeros_are_zeroed_alone(plan: str, deterministic: bool) -> None:
    check_rows_without_nonzeros(plan, "torch", deterministic)


@pytest.mark.parametrize("name", CASES)
def test_results_are_added_to_an_output(name: str) -> None:
    check_accumulation(made(name, "torch"))


@pytest.mark.parametrize("pieces", [1, 2, 5, 40])
@pytest.mark.parametrize("name", CASES)
def test_ranges_of_items_add_up(name: str, pieces: int) -> None:
    check_ranges(made(name, "torch"), pieces)


@pytest.mark.parametrize("name", CASES)
def test_no_items(name: str) -> None:
    check_no_items(made(name, "torch"))


def test_arrays_are_bound_once() -> None:
    m = made("fiber", "torch")
    m.run()
    first = m.executable._bound
    m.run(items=m.ranges(2)[0])
    m.run()
    assert m.executable._bound is first is not None


def test_ranges_of_equal_chunks_are_refused() -> None:
    x, *dense = Problem(MTTKRP, SIZES, "random").operands()
    plan = explicit_plan("coo", "||012", {"r": 8}, max_item_nnz=8)
    step = stc.compile(MTTKRP, x, *dense, plan=plan, backend="torch").step
    (part,), (program,) = step.arrays.parts, step.programs
    assert program.view.items.counts
    assert part.items > 2
    with pytest.raises(stc.PlanError, match="equal chunks of nonzeros, have no arrays"):
        step.executable.run(step.arrays, step.packed([x.values]) or (), step.canonical.arrange(dense), items=[(0, 2)])


def test_ranges_of_items_whose_coordinate_is_their_number_are_refused() -> None:
    view = runs((Computed(0, "{p}"),), (Field(1, "word", 0, 4, True),))
    program = lower(parse("ij,j->i", [(8, 9), (9,)], [True, False]), view, Schedule(), Target(rows=8))
    pointers, word = torch.arange(9), torch.zeros(8, dtype=torch.int32)
    with pytest.raises(stc.PlanError, match="known by their numbers"):
        PartArrays((pointers, word), 8, 8).some(program, 2, 5)


@pytest.mark.parametrize("items", [(-1, 2), (3, 2), (0, 1000)], ids=str)
def test_ranges_outside_of_the_items_are_refused(items: tuple[int, int]) -> None:
    m = made("coo", "torch")
    with pytest.raises(stc.PlanError, match=rf"has {m.arrays.parts[0].items} items, found the range {items[0]}"):
        m.run(items=[items])


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("n", [5000, 20_000, 65_536, 65_537])
@pytest.mark.parametrize("equation", ["ij,r->r", "ij,rs->rs", "ij,ir,jr->r"])
def test_chunks_of_one_item_are_added_up(equation: str, n: int, deterministic: bool) -> None:
    x = stc.SparseTensor(torch.stack([torch.arange(n) // 256, torch.arange(n) % 256]), torch.ones(n), (400, 256))
    sizes = {"i": 400, "j": 256, "r": 64, "s": 2}
    dense = [torch.ones([sizes[c] for c in term]) for term in equation.split("->")[0].split(",")[1:]]
    for plan in ("auto", "coo"):
        found = stc.einsum(equation, x, *dense, plan=plan, deterministic=deterministic, backend="torch")
        assert found.unique().tolist() == [n]
