"""What a plan is chosen by: the program that runs, at its price, and never a dearer one for asking less precision."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from cases import Problem

import sparsetc as stc
from sparsetc.formats import tiles
from sparsetc.ir.plan import Storage
from sparsetc.ir.program.tile import Add, TileProgram, walk
from sparsetc.planner.bounds import HEIGHTS, STRIPS, similar_order, tiles_of, windows_of
from sparsetc.planner.candidate import Best, ranked
from sparsetc.planner.problem import Counts
from sparsetc.planner.registry import PLANS as METHODS
from sparsetc.planner.registry import considered

SIZES = {"i": 60, "j": 50, "k": 40, "r": 32, "s": 32}
EQUATIONS = ("ijk,jr,kr->ir", "ijk,jr,ks->irs", "ijk,kr->ijr", "ijk,k->ij", "ijk,ir,jr,kr->ijk", "ijk,i,j,k->")
PLANS = ("coo", "fiber", "rows", "coo+rows", "hls")


@lru_cache
def filled(equation: str, pattern: str = "dense") -> list[Any]:
    return Problem(equation, SIZES, pattern, torch.float32).operands()


@lru_cache
def matrix(rows: int, columns: int, share: float) -> stc.SparseTensor:
    """The same tensor at every call: its pattern keeps what planning counts."""
    g = torch.Generator().manual_seed(0)
    return stc.SparseTensor.from_dense((torch.rand(rows, columns, generator=g) < share).float())


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 8, 32, 128, 512, 4096])
@pytest.mark.parametrize("share", [0.5, 0.1, 0.02])
def test_less_precision_is_never_expected_to_take_longer(share: float, columns: int) -> None:
    x, b = matrix(800, 800, share), torch.zeros(()).expand(800, columns)
    steps = {p: stc.compile("ij,jr->ir", x, b, precision=p, backend="triton").step for p in PRECISIONS}
    seconds = [sum(steps[p].choice.seconds) for p in PRECISIONS]
    assert seconds == sorted(seconds, reverse=True)
    allowed = {p: {c.name for m in METHODS.values() if m.alone for c in m.estimates(steps[p].problem)} for p in steps}
    for exact, coarse in (("highest", "high"), ("high", "medium")):
        assert {name for name in allowed[exact] if "tf32x3" in name or "coo[" in name[:8]} <= allowed[coarse]


PRECISIONS = ("highest", "high", "medium")


@pytest.mark.parametrize("equation", EQUATIONS)
def test_nor_for_tensors(equation: str) -> None:
    given = filled(equation)
    choices = [stc.compile(equation, *given, precision=p, backend="triton").step.choice for p in PRECISIONS]
    least = [min(seconds for _, seconds in c.considered if seconds is not None) for c in choices]
    assert least == sorted(least, reverse=True)
    for choice, cheapest in zip(choices, least, strict=True):  # of plans as near as this one without tiles is taken
        assert sum(choice.seconds) <= 1.05 * cheapest


def test_tiles_of_a_half_filled_matrix_are_multiplied_whole() -> None:
    """On an H200, at 512 columns: 127, 79 and 85 us by tiles, 399 by runs, by torch 28, 16."""
    x, b = matrix(2048, 2048, 0.5), torch.zeros(()).expand(2048, 512)
    for precision, measured in (("highest", 127e-6), ("high", 79e-6), ("medium", 85e-6)):
        choice = stc.compile("ij,jr->ir", x, b, precision=precision, backend="triton", plan="hls").step.choice
        assert 0.7 * measured < sum(choice.seconds) < 1.4 * measured
        best = stc.compile("ij,jr->ir", x, b, precision=precision, backend="triton")
        assert precision == "highest" or best.plan.name == "dense"
    runs = stc.compile("ij,jr->ir", x, b, plan="coo", backend="triton").step.choice
    assert 0.7 * 399e-6 < sum(runs.seconds) < 1.4 * 399e-6


def test_few_nonzeros_a_tile_are_not() -> None:
    """At 512 columns and a share of 2 %: 126 us by tiles, 21 by runs; by torch 100, 28 and 16 by precision."""
    x, b = matrix(2048, 2048, 0.02), torch.zeros(()).expand(2048, 512)
    for precision in PRECISIONS:
        best = stc.compile("ij,jr->ir", x, b, precision=precision, backend="triton").plan.name
        assert best == ("dense" if precision == "medium" else "coo")


# --- the program that runs --------------------------------------------------------------------------------------------


def owned(kernel: stc.Kernel) -> list[bool]:
    return stored(kernel.step.programs)


def stored(programs: Iterable[TileProgram]) -> list[bool]:
    return [s.owned for p in programs for s, _ in walk(p.body) if isinstance(s, Add)]


def priced(kernel: stc.Kernel) -> list[bool]:
    """As it was priced: of the parts that run."""
    from sparsetc.planner import pricing
    from sparsetc.planner.candidate import Candidate

    candidate = Candidate(kernel.step.choice.plan, kernel.step.choice.expected)
    found = pricing.costs(candidate, kernel.step.problem)
    return stored(found[n].p for n in kernel.step.filled)


@pytest.mark.parametrize("pattern", ["dense", "random", "skewed"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_what_stores_its_rows_is_priced_so(equation: str, plan: str, pattern: str) -> None:
    given = filled(equation, pattern)
    try:
        kernel = stc.compile(equation, *given, plan=plan, backend="triton", output="dense")
    except stc.PlanError:
        pytest.skip("the plan does not apply")
    assert priced(kernel) == owned(kernel)


def test_rows_that_several_items_add_to_are_priced_as_additions() -> None:
    x, b = matrix(40, 2000, 0.5), torch.zeros(()).expand(2000, 32)
    kernel = stc.compile("ij,jr->ir", x, b, plan="coo", backend="triton")
    for found in (kernel.step.parts[0].packed, kernel.step.choice.expected[0]):
        assert (found.split_rows, found.split_fibers) == (True, False)
    assert owned(kernel) == priced(kernel) == [False]


def test_a_plan_of_which_one_part_is_left_stores_its_rows() -> None:
    x, b = matrix(300, 300, 0.05), torch.zeros(()).expand(300, 32)
    kernel = stc.compile("ij,jr->ir", x, b, plan=stc.plans.plan_hls(5000), backend="triton")
    assert [p.format for p in kernel.plan.parts] == ["coo"]
    assert owned(kernel) == priced(kernel) == [True]


def test_the_output_is_priced_by_its_rows() -> None:
    few, many = (
        stc.compile("ij,jr->ir", stc.SparseTensor([[0], [0]], [1.0], (rows, 4)), torch.zeros(4, 64), backend="triton")
        for rows in (10, 10**6)
    )
    assert few.step.problem.rows == 10
    written = 4 * 64 * 10**6 / 4.4e12
    assert sum(many.step.choice.seconds) - sum(few.step.choice.seconds) == pytest.approx(written, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,jr,ks->irs", "ijk,i->jk", "ij,ir,jr->ij"])
def test_the_program_that_is_priced_is_the_one_that_runs(equation: str, backend: str, dtype: torch.dtype) -> None:
    from sparsetc.planner.candidate import Candidate
    from sparsetc.planner.pricing import costs

    given = Problem(equation, SIZES, "skewed", dtype).operands()
    for plan, output in itertools.product(("auto", *PLANS), ("sparse", "dense")):
        try:
            kernel = stc.compile(equation, *given, plan=plan, backend=backend, output=output)
        except stc.PlanError:
            continue
        priced = costs(Candidate(kernel.step.choice.plan, kernel.step.choice.expected), kernel.step.problem)
        programs = zip((priced[n].p for n in kernel.step.filled), kernel.programs, strict=True)
        assert all(replace(own, number=p.number, format=p.format) == p for own, p in programs)


def test_integers_are_priced_without_dots() -> None:
    """A plan that is given, or chosen, for a type with no matrix product has none before it is priced."""
    x, b = matrix(60, 50, 0.2), torch.ones(50, 32)
    given = stc.compile("ij,jr->ir", x, b, plan="coo", backend="torch").plan
    assert given.parts[0].schedule.dot
    x, b = x.with_values(torch.ones(x.nnz)).to(torch.int64), b.to(torch.int64)
    for plan in ("auto", given):
        kernel = stc.compile("ij,jr->ir", x, b, plan=plan, backend="torch")
        assert not kernel.step.choice.plan.parts[0].schedule.dot
        assert kernel.plan.parts[0].schedule == kernel.step.choice.plan.parts[0].schedule


# --- what explain says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("plan", ["auto", *PLANS, "plan_hls(200)"])
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,jr,ks->irs"])
def test_one_time_is_expected_of_a_plan(equation: str, plan: str, backend: str) -> None:
    wanted = stc.plans.plan_hls(200) if plan.startswith("plan_hls") else plan
    given = filled(equation, "skewed")
    try:
        explained = stc.explain(equation, *given, plan=wanted, backend=backend)
    except stc.PlanError:
        pytest.skip("the plan does not apply")
    assert sum(p.predicted_us for p in explained.parts) == pytest.approx(explained.considered[0][1])
    assert explained.predicted_us == pytest.approx(explained.considered[0][1])


def test_parts_of_one_launch_are_charged_one() -> None:
    dense = torch.ones(200, 300)
    dense[20:, 5:] = 0  # 20 long rows, and 180 short ones
    x, b = stc.SparseTensor.from_dense(dense), torch.zeros(()).expand(300, 32)
    kernel = stc.compile("ij,jr->ir", x, b, plan="coo+rows", backend="triton")
    assert x.nnz < kernel.step.problem.rules["fuse_below"]
    assert kernel.explain().launches == 1
    apart = stc.plans.Plan(kernel.plan.name, kernel.plan.parts, False, kernel.plan.partition, kernel.plan.options)
    two = stc.explain("ij,jr->ir", x, b, plan=apart, backend="triton")
    one = stc.explain("ij,jr->ir", x, b, plan=kernel.plan, backend="triton")
    assert (one.launches, two.launches) == (1, 2)
    launch_and_waits = 4 + 3 * 1
    assert two.predicted_us - one.predicted_us == pytest.approx(launch_and_waits, rel=0.01)


def test_modes_are_letters_everywhere() -> None:
    given = filled("ijk,jr,kr->ir")
    texts = [
        str(stc.explain("ijk,jr,kr->ir", *given, backend="triton", plan=p)) for p in ("auto", stc.plans.plan_hls(1))
    ]
    assert "coo[i | - | jk]" in texts[0]
    assert "dense_tile[i | jk | -] tf32x3 + coo[i | - | jk]" in texts[1]
    for text in texts:
        assert not any(f"[{n}" in text or f"| {n}" in text for n in range(3))


# --- what is counted --------------------------------------------------------------------------------------------------


def graph(nodes: int, edges: int, seed: int) -> stc.SparseTensor:
    """R-MAT: each edge in one of four quarters, again and again."""
    g, levels = torch.Generator().manual_seed(seed), (nodes - 1).bit_length()
    u = torch.rand(levels, edges, generator=g)
    bits = torch.stack([u > 0.76, ((u > 0.57) & (u <= 0.76)) | (u > 0.95)]).long()
    ends = (bits << torch.arange(levels)[:, None]).sum(1) % nodes
    return stc.SparseTensor(ends, torch.ones(edges), (nodes, nodes)).coalesce()


def uniform(nodes: int, edges: int) -> stc.SparseTensor:
    ends = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))
    return stc.SparseTensor(ends, torch.ones(edges), (nodes, nodes)).coalesce()


def blocks(side: int, grid: int, each: int) -> stc.SparseTensor:
    """Full blocks, so many of each row of a grid of them; then the rows are shuffled."""
    g = torch.Generator().manual_seed(0)
    filled = torch.rand(grid, grid, generator=g).argsort(1) < each
    dense = filled.repeat_interleave(side, 0).repeat_interleave(side, 1)
    return stc.SparseTensor.from_dense(dense[torch.randperm(grid * side, generator=g)].float())


@pytest.mark.parametrize(
    "make", [lambda: uniform(4000, 32_000), lambda: graph(4096, 60_000, 0)], ids=["uniform", "R-MAT"]
)
def test_what_cannot_win_is_not_counted(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tiles nor windows, nor are rows grouped, where a sample says that they lose."""
    x = make()
    b = torch.empty(x.shape[1], 64)
    monkeypatch.setattr(tiles, "group_rows", lambda *_, **__: pytest.fail("rows were grouped"))
    kernel = stc.compile("ij,jr->ir", x, b, backend="triton")
    counted = {name if isinstance(name, str) else name[0] for name in x.pattern.counts}
    assert not {"tiles", "windows"} & counted
    assert {name for name, _ in kernel.step.choice.dismissed} == {"dense", "hls", "window", "1-sa"}
    assert "not counted, least us by a sample:\n" in str(kernel.explain())


def test_no_choice_is_lost_to_a_sample() -> None:
    """Rows that are alike are found wherever they lie; and what is chosen costs what the best of all plans does."""
    shuffled = blocks(16, 256, 4)
    tensors = [shuffled, uniform(500, 20_000), graph(1000, 30_000, 1), matrix(800, 800, 0.1)]
    for x, columns in itertools.product(tensors, (32, 128)):
        b = torch.empty(x.shape[1], columns)
        problem = stc.compile("ij,jr->ir", x, b, backend="triton").step.problem
        chosen = ranked(considered(problem, Best()))[0]
        every = ranked([c for method in METHODS.values() if method.alone for c in method.estimates(problem)])[0]
        assert chosen.total == pytest.approx(every.total, rel=0.03)
        if x is shuffled and columns == 128:
            assert chosen.plan.name == "1-sa"


@pytest.mark.parametrize("similar", [False, True])
def test_a_sample_of_everything_is_exact(similar: bool) -> None:
    """A small pattern is taken whole; of similar rows the order differs, not what there is."""
    x = graph(300, 3000, 2)
    counts = Counts(x.coords, x.shape)
    rows: dict[int, set[int]] = {}
    for i, j in x.coords.T.tolist():
        rows.setdefault(i, set()).add(j)
    order = sorted(rows)
    if similar:
        row, lengths = torch.searchsorted(torch.tensor(order), x.coords[0]), len(order)
        order = [order[n] for n in similar_order(row, x.coords[1] >> STRIPS[0], lengths).tolist()]
    windows = windows_of(counts, (0,), (1,), similar)
    for height in HEIGHTS:
        sample = windows.at([height])
        groups = [order[n : n + height] for n in range(0, len(order), height)]
        real = sample.nonzeros > 0
        assert sample.nonzeros[real].tolist() == [sum(len(rows[i]) for i in group) for group in groups]
        assert sample.columns[real].tolist() == [len(set().union(*(rows[i] for i in group))) for group in groups]
        assert set(sample.weight[real].tolist()) == {1.0}


def test_columns_of_windows_beyond_64_bits() -> None:
    """Of three modes that have more coordinates than an integer, as a sample and by counting all."""
    g = torch.Generator().manual_seed(0)
    few = torch.randint(40, (3, 3000), generator=g)
    coords = torch.unique(torch.stack([few[0] * 7, few[1] << 33, few[2] << 24]), dim=1)
    shape = (300, 1 << 40, 1 << 30)
    rows = sorted(set(coords[0].tolist()))
    storage = Storage(item=(0,), lane=(1, 2), params=(("height", 16), ("width", 8)))
    met: list[set[tuple[int, ...]]] = [set() for _ in range(-(-len(rows) // 16))]
    for i, *column in coords.T.tolist():
        met[rows.index(i) // 16].add(tuple(column))
    assert tiles.populations(coords, shape, storage, None)[2].tolist() == [*map(len, met)]
    sample = windows_of(Counts(coords, shape), (0,), (1, 2), False).at([16])
    assert sample.columns[sample.nonzeros > 0].tolist() == [*map(len, met)]


def test_weights_of_a_sample_stand_for_all_nonzeros() -> None:
    x = graph(20_000, 300_000, 3)
    counts = Counts(x.coords, x.shape)
    for modes in ((0,), (1,)):
        windows = windows_of(counts, modes, (1 - modes[0],), False)
        for height in HEIGHTS:
            sample = windows.at([height])
            assert sample.nonzeros.sum() < x.nnz
            assert (sample.nonzeros * sample.weight).sum() == pytest.approx(x.nnz, rel=0.1), height
    assert float(tiles_of(counts).sum()) == pytest.approx(x.nnz, rel=0.1)


def test_rows_are_counted_once() -> None:
    x = graph(1000, 20_000, 4)
    for modes in ((0,), (1,)):
        held = torch.bincount(x.coords[modes[0]])
        counts = Counts(x.coords, x.shape)
        assert counts.lengths(modes).tolist() == held[held > 0].tolist()
        assert (counts.longest(modes), counts.distinct(modes)) == (int(held.max()), int((held > 0).sum()))
        short = held[(held > 0) & (held < 64)]
        assert counts.short_share(modes, 64) == (int(short.sum()), len(short))


@pytest.mark.parametrize("plan", ["auto", "window", "hls", "rows"])
def test_graphs_of_other_sizes_share_a_source(plan: str) -> None:
    g, sources = torch.Generator().manual_seed(0), set()
    for seed in range(20):
        nodes = int(torch.randint(1000, 6000, (), generator=g))
        x = graph(nodes, 8 * nodes, seed)
        kernel = stc.compile("ij,jr->ir", x, torch.empty(nodes, 64), plan=plan, backend="triton")
        sources.add(kernel.source)
    assert len(sources) <= 3
