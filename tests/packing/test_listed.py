"""Tiles of odd sides whose rows or columns are lists: the conformance suite reads them back, the runner runs them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference
import torch
from interpret import run_program
from listed_cases import FORMATS_OF_LISTS, SIDES, Grouped

from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.lower import Target, lower
from sparsetc.ir.nest.axes import LANE
from sparsetc.ir.plan import Schedule, Storage
from sparsetc.ir.program.cost import cost_of
from sparsetc.ir.program.resources import FIBERS, ITEMS
from sparsetc.packing.base import FORMATS, Packed, slots_along
from sparsetc.tensor.sparse_tensor import SparseTensor
from sparsetc.testing import PATTERNS, check_format, pattern

SHAPES = {2: (10, 13), 3: (7, 11, 9), 4: (7, 6, 5, 9)}
RANKS = {"r": 5, "s": 3}
EQUATIONS = ("ij,jr->ir", "ij,ir->jr", "ijk,jr,kr->ir", "ijk,jr,ks->irs", "ijk,ir,jr->kr", "ijkl,jr,kr,lr->ir", "ij->")


@pytest.fixture(autouse=True, params=FORMATS_OF_LISTS, ids=lambda f: f.name)
def format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Grouped:
    monkeypatch.setitem(FORMATS, request.param.name, request.param)
    return request.param


def storage(order: int, row: int = 0) -> Storage:
    return Storage((row,), tuple(m for m in range(order) if m != row), ())


@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("order", SHAPES)
def test_lists_are_read_back(format: Grouped, order: int, kind: str) -> None:
    for row in range(order):
        check_format(format.name, pattern(kind, SHAPES[order]), SHAPES[order], storage(order, row))


@pytest.mark.parametrize(
    ("array", "message"),
    [("rows", "coordinates differ|outside the shape"), ("item_ptr", "item_ptr"), ("tile_word", "tile_word")],
)
def test_a_list_that_is_wrong_is_found(
    format: Grouped, array: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Grouped):
        def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: Storage) -> Packed:
            packed = super().pack(coords, shape, storage)
            spoiled = packed.arrays[array].roll(1) if array == "rows" else packed.arrays[array][:-1]
            return replace(packed, arrays=packed.arrays | {array: spoiled})

    monkeypatch.setitem(FORMATS, format.name, Broken(format.name, format.columns, format.bitmap))
    with pytest.raises(FormatError, match=message):
        check_format(format.name, pattern("random", SHAPES[3]), SHAPES[3], storage(3))


def test_a_list_of_another_length_is_refused(format: Grouped, monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(Grouped):
        def view(self, shape: tuple[int, ...], storage: Storage):  # type: ignore[no-untyped-def]
            view = super().view(shape, storage)
            return replace(view, levels=((replace(view.levels[0][0], side=SIDES[0] + 1),), *view.levels[1:]))

    monkeypatch.setitem(FORMATS, format.name, Longer(format.name, format.columns, format.bitmap))
    with pytest.raises(FormatError, match="mode 0 is listed by 4 places, and has a side of 3 positions"):
        check_format(format.name, pattern("random", SHAPES[2]), SHAPES[2], storage(2))


def problem(equation: str) -> tuple[Bound, SparseTensor, list[torch.Tensor]]:
    terms = equation.split("->")[0].split(",")
    sizes = dict(zip(terms[0], SHAPES[len(terms[0])], strict=True)) | RANKS
    shapes = [tuple(sizes[c] for c in t) for t in terms]
    coords, g = pattern("skewed", shapes[0]), torch.Generator().manual_seed(0)
    values = torch.randn(coords.shape[1], dtype=torch.float64, generator=g)
    dense = [torch.randn(s, dtype=torch.float64, generator=g) for s in shapes[1:]]
    bound = parse(equation, shapes, [True, *(False for _ in dense)])
    return bound, SparseTensor(coords, values, shapes[0]), dense


@pytest.mark.parametrize("dot", [True, False])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_the_runner_adds_to_listed_rows(format: Grouped, equation: str, dot: bool) -> None:
    bound, x, dense = problem(equation)
    packed = check_format(format.name, x.coords, x.shape, storage(len(x.shape)))
    rows = reference.run(bound.einsum, x, *dense)
    kept = max(1, sum(c in bound.einsum.output for c in bound.einsum.inputs[0]))
    flat = rows.shape[0] if kept == 1 and rows.dim() else 1
    schedule = Schedule(blocks=(("r", 4), ("s", 4)), dot=dot, columns=4)
    program = lower(bound, packed.view, schedule, Target(rows=flat), format=format.name)
    out = torch.zeros(flat, *rows.shape[1:], dtype=torch.float64)
    run_program(program, packed.arrays, packed.pack_values(x.values), dense, out, packed.items, packed.stored)
    torch.testing.assert_close(out.view(rows.shape), rows)


def test_the_runner_adds_to_slots_of_listed_positions(format: Grouped) -> None:
    """A sparse result that keeps both modes: a tile has a table of slots, -1 where it has no nonzero."""
    bound, x, dense = problem("ij,jr->ijr")
    packed = check_format(format.name, x.coords, x.shape, storage(2))
    slots = slots_along(packed, (0, 1), LANE, torch.arange(x.nnz))
    target = Target(sparse=True, rows=x.nnz, owned=True)
    program = lower(bound, packed.view, Schedule(blocks=(("r", 8),)), target, format=format.name)
    out = torch.full((x.nnz, RANKS["r"]), float("nan"), dtype=torch.float64)
    arrays = packed.arrays | {program.slot: slots}
    run_program(program, arrays, packed.pack_values(x.values), dense, out, packed.items, packed.stored)
    torch.testing.assert_close(out, x.values[:, None] * dense[0][x.coords[1]])


def test_lists_are_streamed_by_what_has_them(format: Grouped) -> None:
    bound, x, _ = problem("ij,jr->ir")
    program = lower(bound, format.view(x.shape, storage(2)), Schedule(blocks=(("r", 8),)), Target(rows=10))
    found = cost_of(program).stream
    assert found @ ITEMS == 4 * SIDES[0]
    columns = 4 * SIDES[1] if format.columns else 0
    assert found @ FIBERS == 4 + columns + (4 + 15 // 8 if format.bitmap else 0)


def test_a_coordinate_is_not_read_where_its_loop_has_ended(format: Grouped) -> None:
    bound, x, dense = problem("ij,jr->ir")
    packed = format.pack(x.coords, x.shape, storage(2))
    program = lower(bound, packed.view, Schedule(blocks=(("r", 8),)), Target(rows=10))
    *before, add = program.body
    moved = replace(program, body=(*before[:1], *(s for s in before[-1].body), *before[1:-1], add))  # type: ignore[union-attr]
    with pytest.raises(PlanError):
        run_program(moved, packed.arrays, packed.pack_values(x.values), dense, torch.zeros(10, 5), 1, packed.stored)
