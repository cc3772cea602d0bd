"""Plans of patterns that come and go: chosen in full a few times, then repeated for patterns of the same kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sparsetc as stc
from sparsetc.contraction.contraction import compiled
from sparsetc.options import of_call
from sparsetc.planner import registry
from sparsetc.planner.paths import Search
from sparsetc.planner.registry import AGAIN, AGREED, kinds


@pytest.fixture(autouse=True)
def _no_kinds() -> Iterator[None]:
    kinds.clear()
    yield
    kinds.clear()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The problems that are planned by all that can be counted."""
    problems: list[Any] = []
    in_full = registry._counted
    monkeypatch.setattr(
        registry, "_counted", lambda problem, *given: (problems.append(problem), in_full(problem, *given))[1]
    )
    return problems


def random(seed: int, nodes: int = 1000, edges: int = 6000) -> stc.SparseTensor:
    """As many edges of each node, so that the longest row tells no two apart."""
    each = edges // nodes
    columns = torch.rand(nodes, nodes, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :each]
    ends = torch.stack([torch.arange(nodes).repeat_interleave(each), columns.flatten()])
    return stc.SparseTensor(ends, torch.ones(nodes * each), (nodes, nodes))


def runs(seed: int, nodes: int = 1000, edges: int = 6000) -> stc.SparseTensor:
    """As many edges, in runs of eight columns."""
    rows = torch.randint(nodes, (edges // 8,), generator=torch.Generator().manual_seed(seed))
    columns = torch.randint(nodes // 8, (edges // 8,), generator=torch.Generator().manual_seed(seed + 1)) * 8
    ends = torch.stack([rows.repeat_interleave(8), (columns[:, None] + torch.arange(8)).flatten()])
    return stc.SparseTensor(ends, torch.ones(edges), (nodes, nodes))


def planned(x: stc.SparseTensor, **settings: Any) -> Any:
    """What runs of the contraction that `einsum` takes."""
    b = torch.empty(x.shape[1], 64)
    return compiled("ij,jr->ir", (x, b), of_call({"backend": "triton", **settings}), "auto").innermost


def test_a_choice_is_repeated_and_looked_at_again(counted: list[Any]) -> None:
    plans = [planned(random(seed)).plan for seed in range(AGREED + 3 * AGAIN)]
    assert len(counted) == AGREED + 2
    assert {plan.name for plan in plans} == {plans[0].name}
    repeated = [plan.reason.startswith("as for the last patterns of its kind, ") for plan in plans]
    assert repeated == [False] * AGREED + [True] * (AGAIN - 1) + [False] + [True] * (2 * AGAIN - 1) + [False]


def test_results_are_right_by_a_repeated_plan() -> None:
    for seed in range(AGREED + 3):
        x, b = random(seed, 300, 2000), torch.rand(300, 16)
        assert torch.allclose(stc.einsum("ij,jr->ir", x, b), x.to_dense() @ b, atol=1e-5)
        assert torch.allclose(stc.einsum("ij,ir->jr", x, b), x.to_dense().T @ b, atol=1e-5)


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"memory_limit": 10**9}, {"plan": "coo"}], ids=str)
def test_what_is_asked_for_is_planned_alone(settings: dict[str, Any]) -> None:
    reasons = {planned(random(seed), **settings).plan.reason for seed in range(AGREED + 2)}
    assert not any(reason.startswith("as for") for reason in reasons)


def test_kinds_differ_by_sizes_counts_and_neighbours(counted: list[Any]) -> None:
    for seed in range(AGREED):
        planned(random(seed))
    for other in (runs(0), random(9, edges=12_000), random(9, nodes=2000)):
        before = len(counted)
        planned(other)
        assert len(counted) == before + 1
    planned(random(AGREED))
    assert len(counted) == before + 1


def test_plans_that_differ_in_turn_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["coo", "rows"] * AGREED * 2)
    in_full = registry.choose
    monkeypatch.setattr(registry, "_counted", lambda problem, methods: in_full(next(names), problem))
    assert [planned(random(seed)).plan.name for seed in range(AGREED * 3)] == ["coo", "rows"] * 4 + ["coo"]


def test_kernels_are_planned_in_full(counted: list[Any]) -> None:
    for seed in range(AGREED + 2):
        stc.compile("ij,jr->ir", random(seed), torch.empty(1000, 64), backend="triton")
    assert len(counted) == AGREED + 2


def test_a_new_plan_is_considered_at_once(counted: list[Any]) -> None:
    for seed in range(AGREED + 1):
        planned(random(seed))
    try:
        stc.plans.register_plan("cheap by name")(lambda problem, counts: None)
        planned(random(AGREED + 1))
        assert len(counted) == AGREED + 1
    finally:
        del registry.PLANS["cheap by name"]


def test_whether_steps_are_faster_is_asked_once_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of three modes: whatever is found, one pass or an order of steps, is repeated with its results right."""
    searches, picked = list[Search](), Search.picked

    def counted_search(search: Search, *arguments: Any) -> Any:
        searches.append(search)
        return picked(search, *arguments)

    monkeypatch.setattr(Search, "picked", counted_search)
    asked = of_call({"backend": "triton"})
    leaves, ends = [], torch.arange(1600)
    for seed in range(AGREED + 3):
        last = torch.randint(0, 40, (1600,), generator=torch.Generator().manual_seed(seed))
        x = stc.SparseTensor(torch.stack([ends // 40, ends % 40, last]), torch.ones(1600), (40, 40, 40))
        operands = x, torch.empty(40, 8), torch.empty(40, 8), torch.empty(40, 8)
        leaves.append(compiled("ijk,ir,js,kt->rst", operands, asked, "auto").innermost)
    assert len(searches) == AGREED
    assert len({(type(leaf), leaf.plan.name, leaf.plan.path) for leaf in leaves}) == 1
