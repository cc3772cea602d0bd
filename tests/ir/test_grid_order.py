"""Axes slowest on the grid: the order of programs that is printed, who may have it; torch programs know of none."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
from cases import Problem, check
from grid_order_cases import CASES, with_slowest
from matrix_units import CUDA, dealt
from program_checks import verify

import sparsetc as stc

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def compiled(name: str, backend: str = "triton") -> stc.Kernel:
    case = CASES[name]
    return stc.compile(case.equation, *case.problem.operands(), backend=backend, **case.settings)


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_programs(name: str) -> None:
    lines = [line.strip() for line in compiled(name).source.splitlines()]
    first = lines.index(CASES[name].head[0])
    assert lines[first : first + len(CASES[name].head)] == [*CASES[name].head]


@pytest.mark.parametrize("name", CASES)
def test_each_item_meets_each_block_once(name: str) -> None:
    """The printed head, run as Python for all programs of a grid."""
    head, items = "\n".join(CASES[name].head), 7
    (whole,) = re.findall(r"programs // (\d+)", head) or ["1"]
    numbers = re.findall(r"^\w+(?= =)", head, re.MULTILINE)
    met = []
    for pid in range(items * int(whole)):
        found = {"pid": pid, "programs": items * int(whole)}
        exec(head, {}, found)
        met.append(tuple(found[n] for n in numbers))
    assert len(set(met)) == items * int(whole)
    if "items" in numbers:
        assert {own[numbers.index("items")] for own in met} == {items}
        slowest = [own[-1] for own in met]
        assert slowest == sorted(slowest)


def test_what_follows_one_another_in_item_order() -> None:
    case = CASES["both"]
    kernel = stc.compile(case.equation, *case.problem.operands(), plan=case.plan(case.problem), backend="triton")
    assert "programs, " not in kernel.source.split("@triton.jit(")[0]
    assert "item = (pid // 3) // 2" in kernel.source


def test_wide_numbers_of_items() -> None:
    from sparsetc.codegen.triton import module_source

    (program,) = compiled("coo").programs
    text = module_source((replace(program, index64=True),), "tl.float32", False, "", True)
    assert "item = (pid % items).to(tl.int64)" in text


def test_the_program_says_so() -> None:
    assert "axes r = 40 in blocks of 16, slowest on the grid, s = 20 in blocks of 16" in str(
        compiled("one of two, the first").programs[0]
    )
    assert "axes r = 40\n" in str(compiled("of one block").programs[0])


@pytest.mark.parametrize("name", CASES)
def test_torch_programs_have_no_order(name: str) -> None:
    case = CASES[name]
    ordered = check(case.problem, backend="torch", **case.settings)
    settings = case.settings | {"plan": case.plan(case.problem)}
    plain = stc.compile(case.equation, *case.problem.operands(), backend="torch", **settings)
    assert ordered.source.replace(", slowest on the grid", "") == plain.source


def test_slowest_axes_are_dense_and_split() -> None:
    (program,) = compiled("positions over the grid").programs
    for letter in ("i", "s"):  # positions along a side; an axis of one block
        axes = tuple(replace(a, slowest=a.letter == letter) for a in program.axes)
        with pytest.raises(
            stc.PlanError, match=f"axis {letter}: only a dense axis that is split can be slowest on the grid"
        ):
            verify(replace(program, axes=axes))


def test_an_axis_without_a_block_has_no_place_on_the_grid() -> None:
    problem = Problem("ij,jr->ir")
    x, b = problem.operands()
    plan = with_slowest(stc.compile(problem.equation, x, b, plan="coo", backend="triton").plan, "s")
    with pytest.raises(stc.PlanError, match="slowest_axes names axes that have a block, each once, found 's'"):
        stc.compile(problem.equation, x, b, plan=plan, backend="triton")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("name", "target"), dealt(["coo", "fused", "two vectors", "both", "chunks", "positions over the grid"])
)
def test_compiles_for(name: str, target: str) -> None:
    text = compiled(name).ptx(target)
    assert (f".target {target}" if target in CUDA else target) in text
