"""Contractions of two sparse operands by blocks and by nonzeros at once, at any threshold, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import PATTERNS, assert_matches, poisoned, random_sparse, random_values
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_cases import EQUATIONS, SIZES, check_pair, marking, operands, pairs, small_blocks, structural

import sparsetc as stc
from sparsetc.join.join import Join
from sparsetc.join.order import JoinOrder, composed
from sparsetc.products import WAYS
from sparsetc.products.hybrid import splits

HUGE = 10**6
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.complex64, torch.complex128),
)


def clustered(shape: tuple[int, int], seed: int = 0) -> stc.SparseTensor:
    """A dense block of 8 x 8 in the corner, and a nonzero in every fifth row and column."""
    corner = torch.cartesian_prod(torch.arange(8), torch.arange(8)).T
    far = torch.stack([torch.arange(0, n, 5)[: min(shape) // 5] for n in shape])
    coords = torch.unique(torch.cat([corner, far], dim=1), dim=1)
    return stc.SparseTensor(coords, random_values((coords.shape[1],), torch.float64, seed), shape)


def step_of(kernel: stc.Kernel) -> Any:
    (step,) = kernel.contraction.steps
    return step


# --- subsets of a join ------------------------------------------------------------------------------------------------


def tasks_of(m: Join) -> list[tuple[int, int, int]]:
    """(entry of x, entry of y, place) of every task."""
    found = JoinOrder.of(m)
    if not m.tasks:
        return []
    at_x, at_y = found.expand(0, m.tasks)
    p, q = composed(found.x_entry, at_x), composed(found.y_entry, at_y)
    place = found.row[at_x] * m.columns + found.column[at_y]
    return list(zip(p.tolist(), q.tolist(), place.tolist(), strict=True))


def check_subset(whole: Join, m: Join, entries: torch.Tensor) -> None:
    own, numbers = tasks_of(m), entries.tolist()
    expected = [t for t in tasks_of(whole) if t[0] in set(numbers)]
    assert [(numbers[t[0]], t[1]) for t in own] == [t[:2] for t in expected]
    places = torch.tensor([t[2] for t in own], dtype=torch.long)
    assert m.places_in(whole, entries, places).tolist() == [t[2] for t in expected]
    assert m.tasks == len(expected)
    assert m.x_matched is None
    matched = range(m.y.n) if m.y_matched is None else m.y_matched.tolist()
    assert set(matched) == {t[1] for t in expected}  # what matches nothing is left out, as in any join
    assert sorted(set(m.row.rank.tolist())) == list(range(m.rows))
    assert sorted(set(m.column.rank.tolist())) == list(range(m.columns))


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", EQUATIONS)
def test_a_subset_of_a_join_is_a_join(name: str, marked: bool) -> None:
    with marking(marked):
        for pattern in ("skewed", "random", "empty"):
            m = step_of(stc.compile(EQUATIONS[name], *operands(EQUATIONS[name], pattern), plan="scalar")).join
            g = torch.Generator().manual_seed(0)
            for fraction in (0.0, 0.1, 0.5, 1.0):
                kept = torch.rand(m.counts.numel(), generator=g) < fraction
                check_subset(m, *m.only(kept))


def test_populations_by_hand() -> None:
    """Blocks of 2 x 2 of x: one of four nonzeros, one of one; each column of x meets two nonzeros of y."""
    x = stc.SparseTensor([[0, 0, 1, 1, 3], [0, 1, 0, 1, 3]], torch.ones(5), (4, 4))
    y = stc.SparseTensor([[0, 0, 1, 1, 3, 3], [0, 1, 0, 1, 0, 1]], torch.ones(6), (4, 2))
    step = step_of(stc.compile("ij,jk->ik", x, y, plan=stc.plans.plan_bcb(i=2, j=2, k=2, threshold=2)))
    blocking = step.problem.blocking
    assert blocking.x.counts.tolist() == [4, 1]
    split, four = splits(blocking, [2, 4])
    assert (split.threshold, four.threshold) == (2, 4)
    assert replace(four, threshold=2) == split
    assert (split.pairs, sum(split.elements), split.nnz, split.tasks) == (1, 8, 8, 2)
    assert split.pure is None
    assert [s.tasks for s in splits(blocking, [1, 2, 5])] == [0, 2, 10]
    assert [s.pure for s in splits(blocking, [1, 2, 3, 5])] == ["bcb", None, None, "scalar"]


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [1, 2, 3, HUGE])
@pytest.mark.parametrize("name", EQUATIONS)
def test_equation_by_threshold(name: str, threshold: int) -> None:
    equation = EQUATIONS[name]
    for pattern in PATTERNS:
        for coalesce in (True, False):
            given = operands(equation, pattern, coalesce=coalesce)
            kernel = check_pair(equation, given, plan=small_blocks(equation, threshold))
            expected = {1: {"bcb", "scalar"}, HUGE: {"scalar"}}.get(threshold, {"bcb", "scalar", "bcb+scalar"})
            assert kernel.plan.name in expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype(dtype: torch.dtype) -> None:
    for name in ("one-mode", "two-modes", "batch", "batch-last", "own-letters"):
        given = operands(EQUATIONS[name], "skewed", dtype, coalesce=False)
        kernel = check_pair(EQUATIONS[name], given, plan=small_blocks(EQUATIONS[name], 2))
        assert kernel.plan.name == "bcb+scalar"


@settings(max_examples=400)
@given(pairs(DTYPES), st.sampled_from([1, 2, 3, 5, HUGE]), st.sampled_from([1, 2, 4]), st.booleans())
def test_any_pair_agrees_with_the_reference(drawn: Any, threshold: int, side: int, deterministic: bool) -> None:
    drawn = replace(drawn, plan=small_blocks(drawn.equation, threshold, side))
    given = drawn.operands()
    with drawn.in_pieces(given), poisoned():
        kernel = stc.compile(drawn.equation, *given, plan=drawn.plan, deterministic=deterministic)
        for _ in range(2):
            found = kernel()
            assert_matches(found, drawn.equation, given)
        if isinstance(found, stc.SparseTensor):
            assert torch.equal(found.coords, structural(drawn.equation, given))
        other = [o.with_values(random_values((o.nnz,), drawn.dtype, drawn.seed + 9 + n)) for n, o in enumerate(given)]
        assert_matches(kernel.with_values(*(o.values for o in other))(), drawn.equation, other)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_dense_block_among_scattered_nonzeros(swapped: bool) -> None:
    x, y = clustered((60, 50)), clustered((50, 70), 1)
    equation = "ij,jk->ki" if swapped else "ij,jk->ik"
    found = {}
    for threshold in (1, 4, 16, 64, HUGE):
        kernel = check_pair(equation, [x, y], plan=stc.plans.plan_bcb(threshold=threshold, i=8, j=8, k=8))
        found[threshold] = kernel.plan.name
    assert found == {1: "bcb", 4: "bcb+scalar", 16: "bcb+scalar", 64: "bcb+scalar", HUGE: "scalar"}
    kernel = stc.compile(equation, x, y, plan=stc.plans.plan_bcb(threshold=16, i=8, j=8, k=8))
    blocks, rest = step_of(kernel).numeric.entries
    assert blocks.numel() == 64
    assert rest.numel() == (y if swapped else x).nnz - 64
    assert [p.format for p in kernel.plan.parts] == ["bcb", "bcb", "coo", "coo"]
    assert kernel.plan.parts[0].nnz == 64


def test_infinities_and_nan_reach_only_what_they_meet() -> None:
    x, y = clustered((60, 50)), clustered((50, 70), 1)
    kernel = stc.compile("ij,jk->ik", x, y, plan=stc.plans.plan_bcb(threshold=16, i=8, j=8, k=8))
    plain = stc.compile("ij,jk->ik", x, y, plan="scalar")
    values = x.values.clone()
    values[0], values[-1] = float("inf"), float("nan")
    found, expected = (k(values=[values, None]).values for k in (kernel, plain))
    assert not expected.isfinite().all()
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("equation", ["ijk,klm->ijlm", "ijk,ljk->li", "bij,bjk->ikb", "ij,jk->"])
def test_gradients(equation: str) -> None:
    x, y = operands(equation, "skewed", coalesce=False, sizes={**SIZES, "i": 3, "j": 4})
    kernel = stc.compile(equation, x, y, plan=small_blocks(equation, 2))

    def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found = kernel(values=[left, right])
        return found.values if isinstance(found, stc.SparseTensor) else found

    given = (x.values.clone().requires_grad_(), y.values.clone().requires_grad_())
    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


def test_chains_and_dense_operands() -> None:
    given = [random_sparse((9, 9), "skewed", torch.float64, n) for n in range(3)]
    plan = stc.plans.plan_bcb(threshold=2, i=2, j=2, k=2, l=2)
    check_pair("ij,jk,kl->il", given, plan=plan)
    table = random_values((9, 3), torch.float64, 5)
    check_pair("ij,jk,kr->ir", [*given[:2], table], plan=stc.plans.plan_bcb(threshold=2, i=2, j=2))


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_model_finds_a_threshold() -> None:
    x, y = clustered((60, 50)), clustered((50, 70), 1)
    kernel = check_pair("ij,jk->ik", [x, y], plan="bcb+scalar")
    threshold = step_of(kernel).choice.plan.option("threshold", 0)
    assert kernel.plan.name == "bcb+scalar"
    (split,) = splits(step_of(kernel).problem.blocking, [threshold])
    assert threshold.bit_count() == 1
    assert split.pure is None
    considered = dict(kernel.explain().to_dict()["steps"][0]["considered"])
    assert set(considered) == {"scalar", "dense", "bcb", "bcb+scalar"}
    assert "nonzeros of x in blocks of" in str(kernel.explain())
    assert kernel.source.count("generated by sparsetc") == 2


def test_blocks_alike_leave_nothing_to_part() -> None:
    x, y = (random_sparse((8, 8), "dense", torch.float64, n) for n in range(2))
    kernel = check_pair("ij,jk->ik", [x, y], plan="bcb+scalar")
    assert kernel.plan.name in ("bcb", "scalar")
    assert "nonzeros or more" in kernel.plan.reason
    assert "bcb+scalar" not in dict(kernel.explain().to_dict()["steps"][0]["considered"])


def test_auto_takes_the_hybrid_where_it_is_expected_to_be_fastest() -> None:
    """Dense blocks in the corner, whose tasks are most; and nonzeros far apart, each a block with few tasks."""
    corner = torch.cartesian_prod(torch.arange(512), torch.arange(512)).T
    g = torch.Generator().manual_seed(0)
    size = 10**6
    far = torch.randint(600, size, (2, 20_000), generator=g)
    coords = torch.unique(torch.cat([corner, far], dim=1), dim=1)
    x = stc.SparseTensor(coords, torch.rand(coords.shape[1], generator=g), (size, size))
    y = stc.SparseTensor(coords.flip(0), torch.rand(coords.shape[1], generator=g), (size, size))
    step = step_of(stc.compile("ij,jk->ik", x, y))
    expected = {c.name: c.total for method in WAYS.values() for c in method.estimates(step.problem)}
    assert step.choice.plan.name == "bcb+scalar", expected
    assert expected["bcb+scalar"] < min(expected["bcb"], expected["scalar"])
    plain = stc.compile("ij,jk->ik", x, y, plan="bcb")
    torch.testing.assert_close(stc.einsum("ij,jk->ik", x, y).values, plain().values)


def test_thresholds_that_are_none() -> None:
    for bad in (0, -1, 2.5, "2"):
        with pytest.raises(stc.PlanError, match="threshold must be a number of nonzeros, 1 or more"):
            stc.plans.plan_bcb(threshold=bad)


@pytest.mark.parametrize("threshold", ["x", 0, -1, 2.5, 2**63])
def test_a_threshold_given_back_is_checked(threshold: object) -> None:
    x = random_sparse((20, 20), "skewed", torch.float32)
    plan = stc.compile("ij,jk->ik", x, x, plan="bcb").plan
    with pytest.raises(stc.PlanError, match="threshold must be a number of nonzeros"):
        stc.compile("ij,jk->ik", x, x, plan=replace(plan, options=(("threshold", threshold),)))


def test_a_plan_that_cannot_be_made_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x = clustered((40, 40))
    step, other = (step_of(stc.compile("ij,jk->ik", x, x, plan=plan)) for plan in ("scalar", "bcb"))
    monkeypatch.setattr("sparsetc.products.blocks.MOST_POSITIONS", 0)
    with pytest.raises(stc.PlanError, match="too large for one program"):
        step.take(other.choice)
    assert step.plan.name == "scalar"
