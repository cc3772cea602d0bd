"""Contraction trees: their text, what they are refused for, and that every one that is lowered means the einsum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_ir_runners import interpreted
from tree_cases import IN_TILE, KEYED, MTTKRP, TREES, TTMC, TreeCase

import sparsetc as stc
from sparsetc.ir.contraction_tree import dot, factors, product, total


def test_a_tree_is_printed_as_it_is_parsed() -> None:
    x, b, c, d = factors("XBCD")
    tree = product((total((dot(c, x, ("k",)), b), ("j", "tile")), d))
    assert str(tree) == "sum[j tile](dot[k](C, X) * B) * D"
    assert stc.plans.parse_tree(str(tree)) == tree
    assert eval(repr(tree), {"parse_tree": stc.plans.parse_tree}) == tree
    assert stc.plans.parse_tree("X * (B * C)") == product((x, product((b, c))))
    assert tree.factors == ("C", "X", "B", "D")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "expected a factor, found the end"),
        ("X *", "expected a factor, found the end"),
        ("X B", "expected the end, found 'B'"),
        ("sum[](X)", "'sum' and 'dot' have axes, one or more, found 'sum' with 0"),
        ("mean[i](X)", "found 'mean' with 1"),
        ("dot[k](X)", "expected ',', found ')'"),
        ("sum[i](X", "expected ')', found the end"),
        ("sum[i*](X)", "expected an axis or ']', found '*'"),
    ],
)
def test_a_text_that_is_no_tree(text: str, fault: str) -> None:
    with pytest.raises(stc.PlanError) as error:
        stc.plans.parse_tree(text)
    assert fault in str(error.value)


@pytest.mark.parametrize("case", [*TREES, *KEYED], ids=str)
def test_a_tree_means_its_einsum(case: TreeCase) -> None:
    kernel = case.kernel()
    if case.tree:
        assert str(kernel.plan.parts[0].schedule.tree) == case.tree
    torch.testing.assert_close(interpreted(kernel, case.operands()[1]), case.expected())


@pytest.mark.parametrize("case", [*TREES, *KEYED], ids=str)
def test_a_torch_program_of_a_tree(case: TreeCase) -> None:
    found = case.kernel("torch")(*case.operands()[1])
    found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
    torch.testing.assert_close(found, case.expected())


def test_a_sampled_product_over_tiles_is_a_dot() -> None:
    x = stc.SparseTensor(torch.randint(0, 32, (3, 300)), torch.randn(300), (32, 32, 32))
    factors = [torch.randn(32, 24) for _ in range(3)]
    kernel = stc.compile("ijk,ir,jr,kr->ijk", x, *factors, plan=stc.plans.plan_hls(1), backend="triton")
    assert str(kernel.plan.parts[0].schedule.tree) == "sum[tile](X * dot[r](B, C * D))"
    kernel = stc.compile("ijk,ir,jr,kr->ijk", x.with_values(x.values.long()), *(f.long() for f in factors), plan="hls")
    assert not kernel.plan.parts[0].schedule.tree.dots


@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_lanes_and_a_dense_axis_are_contracted_together(lanes: int) -> None:
    case = TreeCase("ijk,ijht,khs->its", "coo", "0||12", lanes=lanes)
    kernel = case.kernel()
    dot, multiply = "sum[nonzero](dot[lane h](X * C, B))", "sum[nonzero lane h](X * B * C)"
    assert str(kernel.plan.parts[0].schedule.tree) == (dot if lanes > 1 else multiply)
    torch.testing.assert_close(interpreted(kernel, case.operands()[1]), case.expected())


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_a_sampled_product_takes_the_matrix_unit(precision: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = stc.SparseTensor(torch.randint(0, 64, (2, 900), generator=g), torch.randn(900, generator=g), (64, 64))
    factors = [torch.randn(64, 32, generator=g) for _ in range(2)]
    plan = stc.plans.plan_hls(1)
    kernel = stc.compile("ij,ir,jr->ij", x, *factors, plan=plan, backend="triton", precision=precision)
    assert "mma.sync" in kernel.ptx(target="sm_90")


def test_the_tree_of_a_plan_is_shown_and_kept() -> None:
    case = TreeCase(MTTKRP, "coo", "0||12")
    x, dense = case.operands()
    kernel = case.kernel()
    assert "sum[nonzero lane](X * B * C)" in str(kernel.plan)
    assert stc.compile(MTTKRP, x, *dense, plan=kernel.plan, backend="triton").source == kernel.source


@pytest.mark.parametrize("case", [case for case in (*TREES, *KEYED) if not case.tree], ids=str)
def test_a_tree_of_the_default_rule_passes_as_a_given_one(case: TreeCase) -> None:
    kernel, (x, dense) = case.kernel(), case.operands()
    given = kernel.plan.scheduled(lambda own: replace(own, ruled=()))
    again = stc.compile(case.equation, x, *dense, plan=given, backend="triton", output=case.output)
    assert again.source == kernel.source


RUNS = TreeCase(MTTKRP, "coo", "0||12")
FIBERS = TreeCase(MTTKRP, "fiber", "0|1|2")
TILES = TreeCase(MTTKRP, "dense_tile", "0|12|", tile_sizes=IN_TILE, sides=(8, 16, 8))


@pytest.mark.parametrize(
    ("case", "tree", "fault"),
    [
        (RUNS, "sum[nonzero lane](X * B)", "factor C is missing"),
        (RUNS, "sum[nonzero lane](X * B * C * B)", "factor B occurs 2 times"),
        (RUNS, "sum[nonzero lane](X * B * E)", "there is no factor 'E'; the einsum has X, B, C"),
        (RUNS, "sum[nonzero](X * B * C)", "the result has no axis lane, which is never summed"),
        (RUNS, "sum[nonzero lane r](X * B * C)", "axis r is summed, which the result keeps"),
        (RUNS, "sum[nonzero lane lane](X * B * C)", "cannot sum over lane: it does not depend on it, or sums"),
        (RUNS, "sum[nonzero lane](X * B) * C", "sums over nonzero, on which C depends, a factor outside of it"),
        (RUNS, "sum[nonzero](dot[lane](X * B, C))", "has axis r on both sides, and does not contract it"),
        (RUNS, "sum[lane](dot[nonzero](X * B, C))", "contracts nonzero, whose positions are taken in turn"),
        (replace(RUNS, equation=TTMC), "sum[nonzero](dot[lane](X, B * C))", "has a side of no axis but lane"),
        (FIBERS, "sum[block lane nonzero](X * B * C)", "sums over block before nonzero, whose loop lies inside"),
        (FIBERS, "sum[tile lane nonzero](X * B * C)", "cannot sum over tile: it does not depend on it, or sums"),
        (TILES, "sum[tile](dot[k](C, X) * B)", "the result has no axis j, which is never summed"),
        (TILES, "sum[i j tile](dot[k](C, X) * B)", "axis i is summed, which the result keeps"),
        (replace(TILES, tile_sizes=IN_TILE[:2]), "sum[j tile](dot[k](C, X) * B)", "the 8 positions of k are summed"),
        (
            replace(TILES, tile_loops=("i",)),
            "sum[j tile](dot[k](C, X) * B)",
            "i cannot be taken in turn, since the result",
        ),
        (
            replace(TILES, tile_loops=("k",)),
            "sum[j tile](dot[k](C, X) * B)",
            "contracts k, whose positions are taken in",
        ),
        (replace(TILES, tile_sizes=(("i", 3),)), "sum[j tile](dot[k](C, X) * B)", "are a power of two, found 3 of i"),
        (
            replace(RUNS, tile_sizes=(("i", 4),)),
            "sum[nonzero lane](X * B * C)",
            "takes positions of i, along which nothing",
        ),
        (
            replace(TILES, tile_sizes=IN_TILE[:1], tile_loops=("j", "k")),
            "sum[j tile](sum[k](X * C) * B)",
            "sums over k apart from j: both are one sum",
        ),
        (
            replace(RUNS, equation="ijk,jr,kr,ir->i"),
            "sum[nonzero lane](sum[r](X * B * C * D))",
            "sums over r, which only the whole tree can, or a dot",
        ),
    ],
)
def test_a_tree_that_is_refused(case: TreeCase, tree: str, fault: str) -> None:
    with pytest.raises(stc.PlanError) as error:
        replace(case, tree=tree).kernel()
    assert fault in str(error.value)


def test_integers_have_no_dots() -> None:
    case = replace(RUNS, equation=TTMC, tree="sum[nonzero](dot[lane](X * B, C))")
    x, dense = case.operands()
    whole = x.with_values(x.values.long())
    with pytest.raises(stc.PlanError, match="integers have no matrix product"):
        stc.compile(TTMC, whole, *(d.long() for d in dense), plan=case.plan())


@pytest.mark.parametrize("side", [8, 16, 32])
def test_blocks_that_meet_are_multiplied_by_dots_over_what_they_share(side: int) -> None:
    coords = torch.tensor([[0, 0, 1], [0, 1, 1]])
    x = stc.SparseTensor.from_blocks(coords, torch.randn(3, side, side), (2 * side, 2 * side))
    kernel = stc.compile("ij,jr->ir", x, torch.randn(2 * side, 32), backend="triton")
    assert [str(p.schedule.tree) for p in kernel.plan.parts] == ["sum[nonzero](dot[j](C, B))"]


def with_tree(plan: stc.plans.Plan, tree: object) -> stc.plans.Plan:
    (part,) = plan.parts
    return replace(plan, parts=(replace(part, schedule=replace(part.schedule, tree=tree)),))


@pytest.mark.parametrize("equation", ["ij,jr,s->irs", "ij,s,jr->isr", "ij,r,js->irs", "ij,jr,s->rs"])
def test_a_factor_that_is_the_same_for_all_nonzeros_may_stand_inside_their_sum(equation: str) -> None:
    sizes = {"i": 3, "j": 6, "r": 4, "s": 5}
    terms = equation.split("->")[0].split(",")
    x = stc.SparseTensor.from_dense(torch.rand(3, 6) * (torch.rand(3, 6) < 0.5))
    dense = [torch.rand([sizes[c] for c in term]) for term in terms[1:]]
    plan = with_tree(
        stc.compile(equation, x, *dense, plan="coo").plan, stc.plans.parse_tree("sum[nonzero lane](X * B * C)")
    )
    expected = torch.einsum(equation, x.to_dense(), *dense)
    torch.testing.assert_close(stc.einsum(equation, x, *dense, plan=plan, output="dense"), expected)


def test_plans_of_other_orders_and_trees_that_are_none_are_refused() -> None:
    x, y, b = stc.SparseTensor.from_dense(torch.ones(4, 4)), torch.ones(4, 4, 4), torch.ones(4, 2)
    plan = stc.compile("ijk,jr,kr->ir", stc.SparseTensor.from_dense(y), b, b, plan="coo").plan
    with pytest.raises(stc.PlanError, match="the storage has 3 modes, the tensor 2"):
        stc.einsum("ij,jr->ir", x, b, plan=plan)
    plan = stc.compile("ij,jr->ir", x, b, plan="coo").plan
    with pytest.raises(stc.PlanError, match=r"tree is a Tree, as sparsetc\.plans\.parse_tree makes it, found str"):
        stc.einsum("ij,jr->ir", x, b, plan=with_tree(plan, "sum[nonzero](X * B)"))
    for text in ("(" * 5000, None):
        with pytest.raises(stc.PlanError):
            stc.plans.parse_tree(text)  # type: ignore[arg-type]
