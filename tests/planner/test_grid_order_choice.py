"""Which order of the grid the planner takes, and what it expects of each: counted, nothing is run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grid_order_cases import CASES
from test_choice import matrix

import sparsetc as stc
from sparsetc.device.profile import default_gpu
from sparsetc.ir.program.cost import cost_of
from sparsetc.ir.program.resources import STORED, GatherTerm, Statistics
from sparsetc.ir.program.tile import TileProgram
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.pricing import price

WIDE = torch.zeros(())


def spmm(x: stc.SparseTensor, columns: int, plan: str | stc.plans.Plan = "coo", backend: str = "triton") -> stc.Kernel:
    return stc.compile("ij,jr->ir", x, WIDE.expand(x.shape[1], columns), plan=plan, backend=backend)


def slowest_axes(kernel: stc.Kernel) -> list[tuple[str, ...]]:
    return [part.schedule.slowest_axes for part in kernel.plan.parts]


def in_item_order(kernel: stc.Kernel) -> float:
    """Microseconds expected of the plan in the other order."""
    choice = kernel.step.choice
    parts = tuple(replace(p, schedule=replace(p.schedule, slowest_axes=())) for p in choice.plan.parts)
    candidate = Candidate(replace(choice.plan, parts=parts), choice.expected)
    return 1e6 * sum(price(candidate, kernel.step.problem).seconds)


@pytest.mark.parametrize(
    ("rows", "columns", "share", "before", "after"),
    [(2048, 512, 0.1, 167, 117), (2048, 2048, 0.3, 2061, 1540), (2000, 2000, 0.5, 3024, 1657)],
    ids=["2048 x 512", "2048 x 2048", "2000 x 2000"],
)
def test_many_columns_take_passes(rows: int, columns: int, share: float, before: int, after: int) -> None:
    """As an H200 took (us), before and after, of 4,096 columns; the third is denser and gains more than expected."""
    kernel = spmm(matrix(rows, columns, share), 4096)
    assert slowest_axes(kernel) == [("r",)]
    assert "items = programs // 32" in kernel.source
    assert 0.8 * before < in_item_order(kernel) < 1.2 * before
    assert 0.8 * after < 1e6 * sum(kernel.step.choice.seconds) < 1.65 * after


@pytest.mark.parametrize("plan", ["coo", "rows", "fiber"])
@pytest.mark.parametrize(("nodes", "columns", "expected"), [(2000, 512, 0), (60_000, 512, 1), (2000, 128, 0)])
def test_passes_over_fewer_columns_are_of_larger_tables(plan: str, nodes: int, columns: int, expected: int) -> None:
    g = torch.Generator().manual_seed(0)
    x = stc.SparseTensor(torch.randint(0, nodes, (2, 1_500_000), generator=g), torch.ones(1_500_000), (nodes, nodes))
    assert slowest_axes(spmm(x, columns, plan)) == [("r",) * expected]


def test_what_is_not_split_takes_one_pass() -> None:
    x = matrix(2048, 512, 0.1)
    assert slowest_axes(spmm(x, 4096, backend="torch")) == [()]
    assert slowest_axes(spmm(x, 1)) == [()]


def test_all_axes_that_are_split() -> None:
    x = matrix(2048, 2048, 0.1)
    kernel = stc.compile("ij,jrst->irst", x, WIDE.expand(2048, 2, 128, 128), plan="coo", backend="triton")
    assert [a.programs > 1 for a in kernel.programs[0].axes] == [False, True, True]
    assert slowest_axes(kernel) == [("s", "t")]


def test_a_plan_that_is_given_is_taken_as_it_is() -> None:
    x = matrix(2048, 512, 0.1)
    found = spmm(x, 4096).plan
    plain = replace(found, parts=tuple(replace(p, schedule=replace(p.schedule, slowest_axes=())) for p in found.parts))
    assert slowest_axes(spmm(x, 4096, found)) == [("r",)]
    assert slowest_axes(spmm(x, 4096, plain)) == [()]


# -- what is counted ---------------------------------------------------------------------------------------------------

GPU = default_gpu()
STATISTICS = Statistics(items=10**4, fibers=10**4, stored=10**6, nnz=10**6, itemsize=4)
BLOCK = GatherTerm("B", 32 * STORED, 128, 20_000, 128, held_width=128, whole_width=4096, passes=32)


def test_what_a_pass_gathers_comes_from_device_memory_once() -> None:
    moved, whole = 32 * 10**6 * 128 * 4, 20_000 * 4096 * 4
    far, missed = BLOCK.moved(STATISTICS, GPU, 32)
    assert missed == whole
    assert far == pytest.approx(moved * 32**-0.085)
    far, missed = replace(BLOCK, held_width=4096, passes=1).moved(STATISTICS, GPU, 32)
    assert far == moved
    assert missed == pytest.approx(moved * (1 - GPU.l2_bytes / whole))


def test_a_table_near_the_l1_cache_is_partly_in_it() -> None:
    small = replace(BLOCK, table_rows=300)
    moved, whole = 32 * 10**6 * 128 * 4, 300 * 4096 * 4
    assert small.moved(STATISTICS, GPU, 32)[0] == pytest.approx(moved * (1 - GPU.l1_bytes / whole) * 32**-0.085)
    assert replace(small, whole_width=128).moved(STATISTICS, GPU, 32)[0] == 0


def in_order(name: str, passes: bool) -> TileProgram:
    case = CASES[name]
    (program,) = stc.compile(case.equation, *case.problem.operands(), backend="triton", **case.settings).programs
    return replace(program, axes=tuple(replace(a, slowest=passes and a.slowest) for a in program.axes))


@pytest.mark.parametrize("name", ["coo", "fiber", "rows", "dense tiles", "bitmap tiles"])
def test_every_format_is_priced_in_both_orders(name: str) -> None:
    """Tables of which only a block fits the L2 cache make the item order dearer, long storage makes passes dearer."""
    few, many = (Statistics(items=10**n, fibers=10**n, stored=10**n, nnz=10**n, itemsize=4) for n in (5, 9))
    passes, plain = (cost_of(in_order(name, passes)) for passes in (True, False))
    assert passes.describe() == plain.describe()
    assert passes.seconds(few, GPU)["memory"] == plain.seconds(few, GPU)["memory"]
    (table, *_) = plain.gathers
    assert (passes.gathers[0].held_width, table.held_width) == (16, 40)
    between = replace(GPU, l2_bytes=table.table_rows * 20 * few.itemsize)
    assert passes.gathers[0].moved(few, between, 3)[1] < table.moved(few, between, 3)[1]
    again = passes.seconds(many, GPU)["memory"] - plain.seconds(many, GPU)["memory"]
    assert again * GPU.memory == pytest.approx(passes.stream @ many.symbols * 2 / 3)
