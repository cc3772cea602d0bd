"""Windows of fibers, a format outside the package: several modes are listed along one side of a tile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fiber_window_cases import EQUATIONS, LAYOUTS, FiberWindows, check, operands, plan
from test_ir_runners import interpreted

import sparsetc as stc
from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.nest.coordinates import Along, Computed, Constant, Field, Formula, Listed, Lookup, Position
from sparsetc.ir.nest.nest import Nest, runs
from sparsetc.ir.program.cost import cost_of
from sparsetc.ir.program.resources import FIBERS
from sparsetc.packing.base import FORMATS, Packed
from sparsetc.testing import check_format, pattern
from sparsetc.testing.patterns import PATTERNS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_every_einsum(equation: str, layout: str) -> None:
    check(equation, layout, torch.float32, "torch")
    check(equation, layout, torch.int64, "torch")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("equation", ["ijk,ir,jr,kr->kij", "ijk,kr->jir", "ijkl,jr,ks->ilrs"])
def test_dense_results(equation: str, layout: str) -> None:
    """Rows are known by coordinates: those of places that stand for no fiber are not written."""
    x, *dense = operands(equation, torch.float64)
    found = stc.einsum(equation, x, *dense, plan=plan(layout, equation), output="dense")
    torch.testing.assert_close(found, torch.einsum(equation, x.to_dense(), *dense))


@pytest.mark.parametrize("shape", [(9, 10, 11), (5, 3, 4, 6)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_conformance(name: str, layout: str, shape: tuple[int, ...]) -> None:
    check_format("fiber_windows", pattern(name, shape), shape, plan(layout, "ijkl"[: len(shape)]).parts[0].storage)


@pytest.mark.parametrize("dot", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,kr->ijr", "ijk,ir,jr,kr->ijk", "ijkl,jr,lr->ikr"])
def test_what_a_program_means(equation: str, layout: str, dot: bool) -> None:
    x, *dense = operands(equation, torch.float64)
    (part,) = plan(layout, equation).parts
    own = stc.plans.Plan("windows", (replace(part, schedule=replace(part.schedule, dot=dot)),))
    kernel = stc.compile(equation, x, *dense, plan=own, backend="triton")
    found = interpreted(kernel, [d.double() for d in dense])
    torch.testing.assert_close(found, torch.einsum(equation, x.to_dense(), *dense))


@pytest.mark.parametrize("layout", ["columns", "rows"])
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,ir,jr,kr->ijk", "ijk,jr,ks->isr"])
def test_gradients(equation: str, layout: str) -> None:
    x, *dense = operands(equation, torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x.values, *dense)]
    found = stc.einsum(equation, x.with_values(leaves[0]), *leaves[1:], plan=plan(layout, equation))
    found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
    whole = x.with_values(leaves[0]).to_dense()
    weight = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((torch.einsum(equation, whole, *leaves[1:]) * weight).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad((found * weight).sum(), leaves), expected)


@pytest.mark.parametrize("array", ["columns_1", "rows_0"])
def test_a_fiber_that_is_listed_twice_is_found(array: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that keeps all modes is stored: at a place that has the fiber again, as 0."""

    class Twice(FiberWindows):
        def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: stc.plans.Storage) -> Packed:
            packed = super().pack(coords, shape, storage)
            for name, own in packed.arrays.items():
                if name.startswith(array.rstrip("0123456789")):
                    own[-1] = own[-16]
            return packed

    monkeypatch.setitem(FORMATS, "fiber_windows", Twice())
    with pytest.raises(FormatError, match="positions share their coordinates, and split_fibers is not set"):
        check_format(
            "fiber_windows", pattern("corners", (9, 10, 11)), (9, 10, 11), plan("columns", "ijk").parts[0].storage
        )


# -- what is generated -------------------------------------------------------------------------------------------------


def compiled(equation: str, layout: str) -> stc.Kernel:
    x, *dense = operands(equation, torch.float32)
    return stc.compile(equation, x, *dense, plan=plan(layout, equation), backend="triton")


def test_a_khatri_rao_row_is_formed_once_a_window() -> None:
    """One gather of each operand a tile, their product, one dot."""
    k = compiled("ijk,jr,kr->ir", "columns")
    loop = k.source.split("for tile in range(start, stop):")[1].split("tl.store")[0]
    assert (loop.count("tl.load(B"), loop.count("tl.load(C"), loop.count("tl.dot("), loop.count("for ")) == (1, 1, 1, 0)
    assert "w = b_rj * c_rk" in loop
    assert "tl.dot(w, tl.trans(x), total" in loop
    assert "j = columns_1[position * 16 + place], along k" in k.source
    assert str(k.step.programs[0]).count("at_j[k] = columns_1[") == 1
    assert [(g.operand, g.rows) for g in cost_of(k.step.programs[0]).gathers] == [
        ("B", FIBERS * 32),
        ("C", FIBERS * 32),
    ]
    assert "fiber_windows" in str(k.explain())


def test_a_result_s_row_is_known_by_all_that_rides() -> None:
    text = compiled("ijk,kr->rij", "rows").source
    assert "at_i" not in text
    assert "slot = tl.load(item_slot + item.to(tl.int64) * 16 + side_i)" in text
    x, *dense = operands("ijk,kr->ijr", torch.float32)
    text = stc.compile(
        "ijk,kr->ijr", x, *dense, plan=plan("rows", "ijk,kr->ijr"), output="dense", backend="triton"
    ).source
    assert "tl.store(A + (at_i * 30 + at_j)[None, :] * 20 + at_r[:, None], total" in text


def test_letters_that_part_are_added_up() -> None:
    """Of fibers along one side the result keeps one mode: each place adds to its own row, and none stores."""
    for equation, layout in (("ijk,jr,kr->ir", "rows"), ("ijk,ir,jr->kr", "columns"), ("ijk->j", "columns")):
        text = compiled(equation, layout).source
        assert "tl.atomic_add(" in text
        assert "tl.store(" not in text


def test_a_tree_sums_over_sides() -> None:
    x, *dense = operands("ijk,jr,kr->ir", torch.float32)
    (part,) = plan("columns", "ijk,jr,kr->ir").parts

    def by(tree: str, tile_sizes: tuple[tuple[str, int], ...]) -> stc.Kernel:
        schedule = replace(part.schedule, tree=stc.plans.parse_tree(tree), tile_sizes=tile_sizes)
        own = stc.plans.Plan("windows", (replace(part, schedule=schedule),))
        return stc.compile("ijk,jr,kr->ir", x, *dense, plan=own, backend="torch")

    expected = torch.einsum("ijk,jr,kr->ir", x.to_dense(), *dense)
    torch.testing.assert_close(by("sum[k tile](X * B * C)", (("i", 16), ("k", 16)))(*dense), expected)
    with pytest.raises(PlanError, match="cannot sum over j: it does not depend on it"):
        by("sum[j tile](X * B * C)", (("i", 16), ("k", 16)))
    with pytest.raises(PlanError, match="on which C depends, a factor outside of it"):
        by("sum[tile](dot[k](B, X) * C)", (("i", 16), ("k", 16)))
    with pytest.raises(PlanError, match="takes positions of j, along which nothing stored has a side"):
        by("sum[k tile](X * B * C)", (("i", 16), ("j", 16), ("k", 16)))


# -- what is refused ---------------------------------------------------------------------------------------------------

PAIRS = FiberWindows().view((9, 10, 11), plan("columns", "ijk").parts[0].storage)
ITEM, TILE, _ = PAIRS.levels


def _with(item: Any = ITEM, tile: Any = TILE, sides: tuple[int, ...] = PAIRS.values.sides) -> Nest:
    return replace(PAIRS, levels=(item, tile, ()), values=replace(PAIRS.values, sides=sides))


def _twice(first: int, second: int) -> Computed:
    at = Formula("*", Position("tile"), Constant(16))
    return Computed(1, Lookup("columns_1", Formula("+", Formula("+", at, Along(first)), Along(second))))


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (
            replace(PAIRS, values=replace(PAIRS.values, sides=(16, 2, 16))),
            "along the side of mode 2, so its own has 1 position, found 2",
        ),
        (
            _with(tile=(Listed(1, "columns_1", 8, along=2), TILE[1])),
            "mode 1 is listed by 8 places, and rides along a side of 16 positions",
        ),
        (
            _with((*ITEM, Listed(1, "columns_1", 16, along=2)), TILE[1:]),
            "along the side of mode 2, which is not itself read along it at that level",
        ),
        (
            _with(tile=(TILE[0], Listed(2, "columns_2", 1, along=1)), sides=(16, 1, 1)),
            "along the side of mode 2, which is not itself read along it at that level",
        ),
        (_with(tile=(_twice(0, 2), TILE[1])), "a coordinate of tiles is read along one side"),
        (_with(tile=(Listed(1, "columns_1", 16, along=3), TILE[1])), "along one side of theirs"),
        (
            runs((), (Field(0, "word", 0, 4, True), Listed(1, "lists", 4))),
            "a coordinate of tiles is read along one side",
        ),
    ],
)
def test_riders_are_checked(view: Nest, message: str) -> None:
    PAIRS.verify()
    with pytest.raises(FormatError, match=message):
        view.verify()
