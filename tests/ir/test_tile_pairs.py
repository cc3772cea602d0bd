"""Tile programs over a task list: what they print, what is refused, their runner, their torch source, their counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import random_sparse
from hypothesis import given, settings
from interpret import run_program
from program_checks import verify
from tile_pairs import FOLDS, NOTHING_FREE, ONE_MODE, RAGGED, DrawnTiles, drawn_tiles, error, spread_tiles

import sparsetc as stc
from sparsetc.backends import TORCH
from sparsetc.codegen import programs as launches
from sparsetc.codegen.programs import Programs
from sparsetc.device.profile import default_gpu
from sparsetc.errors import FormatError, PlanError
from sparsetc.ir.lower import Fold, Target, lower_pairs
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF, TileLoop
from sparsetc.ir.nest.nest import Nest, pairs
from sparsetc.ir.nest.values import EXACT, Bitmap, Halves, Values, Whole
from sparsetc.ir.plan import F16X3, Schedule
from sparsetc.ir.program.cost import cost_of
from sparsetc.ir.program.operands import Stored
from sparsetc.ir.program.resources import FIBERS, ITEMS, STORED, ZERO, Statistics
from sparsetc.ir.program.text import header
from sparsetc.ir.program.tile import Add, Key, Loop, Product, Scale, Statement, Tile, TileProgram, Value, walk
from sparsetc.products.blocks import WHOLE, block_program


def run(case: DrawnTiles) -> torch.Tensor:
    """What the runner makes of a case, on poisoned memory."""
    program, arrays = case.program, dict(zip(case.program.arrays, case.arrays(), strict=True))
    if case.halves:
        values = tuple(torch.stack([arrays.pop(f"{n}_{half}_values") for half in ("high", "low")]) for n in ("x", "y"))
    else:
        values = tuple(arrays.pop(f"{name}_values").flatten() for name in ("x", "y"))
    out = torch.full((len(case.pairs), program.width), float("nan"), dtype=torch.float64)
    run_program(program, arrays, values, [], out, len(case.pairs), 0)
    return out.view_as(case.expected())


# -- text --------------------------------------------------------------------------------------------------------------


def test_a_program_over_pairs_prints_as_its_grammar_says() -> None:
    assert str(DrawnTiles(ONE_MODE, bitmap=True).program).splitlines() == [
        'tile program  "x,y->z"  part 0: bcb x bcb, pairs of bitmap tiles of 32x16 and bitmap tiles of 16x16',
        "  item over pair_ptr",
        "  axes ij = 32 (i:8 j:4), l = 16, k = 16",
        "  total[ij,l] = 0",
        "  loop pairs of the item",
        "    x[ij,k] = expand X.tile[pair_x]",
        "    y[l,k] = expand Y.tile[pair_y]",
        '    total[ij,l] += einsum "ijk,lk->ijl" x, y  # dot over k, ieee',
        "  store Z[item, ij, l] total[ij,l]",
    ]


def test_tiles_in_halves_are_scaled_once_a_block() -> None:
    assert str(DrawnTiles(ONE_MODE, halves=True).program).splitlines() == [
        'tile program  "x,y->z"  part 0: bcb x bcb, pairs of dense tiles of 32x16 in split float16 and dense tiles of '
        "16x16 in split float16",
        "  item over pair_ptr",
        "  axes ij = 32 (i:8 j:4), l = 16, k = 16",
        "  total[ij,l] = 0",
        "  loop pairs of the item",
        "    x[ij,k] = load X.tile[pair_x]  # high and low parts",
        "    y[l,k] = load Y.tile[pair_y]  # high and low parts",
        '    total[ij,l] += einsum "ijk,lk->ijl" x, y  # dot over k, f16x3',
        "  x_scale[ij] = 2 ** (exponent of X.most[item_x] - 14)",
        "  y_scale[l] = 2 ** (exponent of Y.most[item_y] - 14)",
        '  total[ij,l] = einsum "ijl,ij->ijl" total, x_scale  # multiply',
        '  total[ij,l] = einsum "ijl,l->ijl" total, y_scale  # multiply',
        "  store Z[item, ij, l] total[ij,l]",
    ]


def test_without_a_dot_inner_positions_are_looped() -> None:
    assert str(DrawnTiles(NOTHING_FREE, dot=False).program).splitlines()[2:] == [
        "  axes one_row = 1, one_column = 1, i = 32",
        "  total[one_row,one_column] = 0",
        "  loop pairs of the item",
        "    loop i in the tile",
        "      x[one_row] = load X.tile[pair_x]",
        "      y[one_column] = load Y.tile[pair_y]",
        '      total[one_row,one_column] += einsum ",->" x, y  # multiply',
        "  store Z[item, one_row, one_column] total[one_row,one_column]",
    ]


def test_axes_too_short_for_a_dot_are_padded_but_not_stored() -> None:
    program = DrawnTiles(RAGGED).program
    assert [(a.letter, a.size, a.block) for a in program.axes] == [("i", 4, 16), ("lm", 32, 32), ("jk", 4, 16)]
    assert program.view.pairs == tuple(Whole(s, (0, 1), word=w) for s, w in (((4, 4), 16), ((32, 4), 32)))
    assert program.width == 128
    assert [a.block for a in DrawnTiles(RAGGED, whole=True).program.axes] == [4, 32, 4]


def test_a_view_of_pairs_names_the_arrays_of_both_operands() -> None:
    whole = ("pair_ptr", "pair_x", "pair_y", "x_values", "y_values")
    assert DrawnTiles(ONE_MODE).program.arrays == whole
    bitmap = DrawnTiles(ONE_MODE, bitmap=True).program.arrays
    assert bitmap == (*whole[:3], "x_value_ptr", "x_bits", "x_values", "y_value_ptr", "y_bits", "y_values")
    own = [f"{name}_{array}" for name in ("x", "y") for array in ("high_values", "low_values", "most")]
    assert DrawnTiles(ONE_MODE, halves=True).program.arrays == (*whole[:3], "item_x", "item_y", *own)


# -- what is refused ---------------------------------------------------------------------------------------------------


def changed(program: TileProgram, change: Callable[[Statement], list[Statement]]) -> TileProgram:
    """Every statement replaced by those that `change` makes of it, in loops too."""

    def inside(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        found: list[Statement] = []
        for s in body:
            found += change(replace(s, body=inside(s.body)) if isinstance(s, Loop) else s)
        return tuple(found)

    return replace(program, body=inside(program.body))


def value_of(name: str, **new: Any) -> Callable[[Statement], list[Statement]]:
    return lambda s: [replace(s, **new) if isinstance(s, Value) and s.operand == name else s]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (value_of("y", operand="z"), "a task list has operands x, y, not 'z'"),
        (
            value_of("y", operand="x"),
            r"y\[l,k\]: in the loop over pairs, a tile of x is read along ij, k, .* found l, k",
        ),
        (value_of("x", out=Tile("x", ("ij",), LEAF)), "a tile of x is read along ij, k, .* found ij"),
        (lambda s: list(s.body) if isinstance(s, Loop) else [s], "in the loop over pairs"),
        (lambda s: [Loop(TileLoop("l", 16, 1), s.body)] if isinstance(s, Loop) else [s], "in the loop over pairs"),
        (lambda s: [] if isinstance(s, Value) else [s], "x, y .*: x, y is not made before it"),
        (lambda s: [replace(s, owned=False) if isinstance(s, Add) else s], "stored at its item's number"),
        (lambda s: [replace(s, key=Key("row", ITEM)) if isinstance(s, Add) else s], "stored at its item's number"),
        (lambda s: [replace(s, key=Key("position", LEAF)) if isinstance(s, Add) else s], "stored at its item's number"),
        (lambda s: [replace(s, axes=("ij", "m")) if isinstance(s, Add) else s], "it has no axis m"),
        (lambda s: [] if isinstance(s, Add) else [s], "adds to its output once, found 0"),
        (
            lambda s: [replace(s, left=(*s.left, *s.right), right=()) if isinstance(s, Product) else s],
            r"total\[ij,l\]: a product sums no axis",
        ),
    ],
)
def test_a_faulty_program_is_refused(change: Callable[[Statement], list[Statement]], message: str) -> None:
    program = DrawnTiles(ONE_MODE).program
    verify(program)
    with pytest.raises(PlanError, match=message):
        verify(changed(program, change))


def test_terms_that_do_not_fit_the_tiles_are_refused() -> None:
    program = DrawnTiles(ONE_MODE).program
    with pytest.raises(PlanError, match="do not have the modes of pairs of dense tiles"):
        verify(replace(program, sparse=program.sparse[:1]))
    with pytest.raises(PlanError, match=r"x: a tile has \(32, 16\) positions, its axes have \(16, 16\)"):
        verify(replace(program, sparse=tuple([replace(o, letters=("l", "k")) for o in program.sparse])))


NONZEROS = Stored("", (), Values())
X_SCALE = Scale(Tile("x_scale", ("ij",), ITEM), "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: [replace(s, out=replace(s.out, axes=("k",)))] if isinstance(s, Scale) else [s], "of the rows of"),
        (lambda s: [replace(s, body=(X_SCALE, *s.body))] if isinstance(s, Loop) else [s], "the same for all pairs"),
        (lambda s: [] if isinstance(s, Scale) else [s], "x_scale is not made before it"),
    ],
)
def test_faulty_scales_are_refused(change: Callable[[Statement], list[Statement]], message: str) -> None:
    program = DrawnTiles(ONE_MODE, halves=True).program
    verify(program)
    with pytest.raises(PlanError, match=message):
        verify(changed(program, change))


def test_only_dots_in_f16x3_multiply_halves() -> None:
    whole, halves = DrawnTiles(ONE_MODE).program, DrawnTiles(ONE_MODE, halves=True).program
    for made, precision in ((whole, F16X3), (halves, "tf32x3")):
        program = replace(made, schedule=replace(made.schedule, precision=precision))
        with pytest.raises(PlanError, match="x: tiles in halves are multiplied by dots in f16x3, and only they"):
            verify(program)
    with pytest.raises(PlanError, match="tiles in halves"):
        lower_pairs("x,y->z", ONE_MODE, Schedule(dot=False, precision=F16X3), Target())
    with pytest.raises(FormatError, match="stored whole"):
        lower_pairs("x,y->z", ONE_MODE, Schedule(precision=F16X3), Target(), bitmaps=(True, False))
    one = replace(whole, view=replace(whole.view, pairs=()), sparse=(NONZEROS,), schedule=Schedule(precision=F16X3))
    with pytest.raises(PlanError, match="X: tiles in halves are multiplied by dots in f16x3, and only they"):
        verify(replace(one, body=(one.body[0], one.body[-1])))


TILES = Whole((4, 8), (0, 1))


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (pairs(TILES, replace(TILES, sides=(4, 3))), r"powers of two, found \(4, 3\)"),
        (pairs(TILES, replace(TILES, sides=(4, 0))), r"1 or more, found \(4, 0\)"),
        (pairs(TILES, replace(TILES, sequence=(0, 0))), "by every mode once"),
        (pairs(TILES, Bitmap((4, 8), (0, 1), word=64)), "8, 16 or 32 bits"),
        (pairs(TILES, Halves((4, 8), (0, 1))), "tiles in halves are those of both"),
    ],
)
def test_a_faulty_view_is_refused(view: Nest, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        view.verify()


@pytest.mark.parametrize(
    ("folds", "error", "message"),
    [
        (((("i", 3),), (), (("k", 8),)), FormatError, "powers of two"),
        (((("i", 4),), (("i", 4),), (("k", 8),)), PlanError, "share no letter, found 'iik'"),
    ],
)
def test_what_cannot_be_lowered(folds: tuple[Fold, Fold, Fold], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lower_pairs("x,y->z", folds, Schedule(), Target())


# -- runners -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bitmap", [False, True], ids=["whole", "bitmap"])
@pytest.mark.parametrize("dot", [True, False], ids=["dot", "multiply"])
@pytest.mark.parametrize("name", FOLDS)
def test_the_runner_agrees_with_einsum(name: str, dot: bool, bitmap: bool) -> None:
    for mixed in (False, True):
        case = DrawnTiles(FOLDS[name], dot, bitmap, mixed)
        assert torch.equal(run(case), case.expected())


@settings(max_examples=60)
@given(drawn_tiles((torch.float64, torch.int64)))
def test_any_tiles_agree_with_einsum(case: DrawnTiles) -> None:
    assert torch.equal(run(case), case.expected())
    whole = replace(case, whole=True).program
    found = Programs([whole], case.dtype, TORCH, torch.device("cpu"), None).blocks(case.arrays())
    assert torch.equal(found.view_as(case.expected()).double(), case.expected())


@pytest.mark.parametrize("name", FOLDS)
def test_the_runner_multiplies_parts(name: str) -> None:
    case = DrawnTiles(FOLDS[name], halves=True, dtype=torch.float32)
    assert torch.equal(run(case), case.expected())


@settings(max_examples=60, deadline=None)
@given(spread_tiles())
def test_parts_are_as_exact_as_float32(case: DrawnTiles) -> None:
    assert int(case.split().verdict) == EXACT
    assert error(run(case), case) < 1e-6


def test_the_runner_wants_its_arrays() -> None:
    case = DrawnTiles(ONE_MODE)
    with pytest.raises(FormatError, match="reads array pair_ptr, pair_x, pair_y, which is not given"):
        run_program(case.program, {}, case.operands(), [], torch.zeros(3, case.program.width), 3, 0)


def test_the_torch_program_takes_pairs_of_a_part_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items 1 and 2 alone, one at a time, their pairs counted from the list's beginning."""
    case = DrawnTiles(ONE_MODE, pairs=(2, 0, 3), whole=True)
    launch, (ptr, *rest) = Programs([case.program], case.dtype, TORCH, torch.device("cpu"), None), case.arrays()
    monkeypatch.setattr(launches, "chunks", partial(launches.chunks, most=1))
    assert torch.equal(launch.blocks([ptr[1:], *rest]).view(2, 32, 16), case.expected()[1:])


def test_the_program_of_a_kernel_is_the_one_that_runs() -> None:
    """Level 3's runner, on the task list and blocks of a compiled contraction, against the generated source."""
    sizes = {"i": 9, "j": 5, "k": 11, "l": 6}
    x, y = (random_sparse(tuple(sizes[c] for c in t), "random", torch.float64, n) for n, t in enumerate(("ijk", "kl")))
    (step,) = stc.compile("ijk,kl->ijl", x, y, plan=stc.plans.plan_bcb(i=2, j=4, k=4, l=2)).contraction.steps
    path, (b,) = step.numeric, step.numeric._buffers
    assert path.program == block_program(path.problem, WHOLE, TORCH, False, path.program.rows)
    operands = ((path.blocking.x, x), (path.blocking.y, y))
    whole = [blocks.whole(o.values[: blocks.nnz]) for blocks, o in operands]
    lists = [b.ptr, path.tasks.x, path.tasks.y]
    out = torch.full((b.ptr.numel() - 1, path.program.width), float("nan"), dtype=torch.float64)
    arrays = dict(zip(("pair_ptr", "pair_x", "pair_y"), lists, strict=True))
    run_program(path.program, arrays, tuple(v.flatten() for v in whole), [], out, b.ptr.numel() - 1, 0)
    torch.testing.assert_close(out, path.launch.blocks([*lists, *whole]))


# -- counts ------------------------------------------------------------------------------------------------------------


def test_the_counts_of_pairs() -> None:
    found = cost_of(DrawnTiles(RAGGED).program)
    assert found.dot == 2 * 16 * 32 * 16 * FIBERS  # as executed, padding included
    assert found.multiply == ZERO
    assert found.output == 4 * 32 * ITEMS.bytes
    assert found.registers == (4 + 32) * 4 * FIBERS.bytes
    assert found.stream == STORED.bytes + 8 * FIBERS + 8 * ITEMS
    assert found.owned
    assert found.expanded == ZERO
    moved, read, flops = found.work(Statistics(items=3, fibers=10, stored=100, nnz=50, itemsize=4), default_gpu())
    assert (moved, flops) == (100 * 4 + 8 * 10 + 8 * 3 + 3 * 128 * 4, 10 * 2 * 16 * 32 * 16)
    assert read == 10 * (4 + 32) * 4 * 4


def test_the_counts_of_multiplied_pairs_and_of_bitmaps() -> None:
    found = cost_of(DrawnTiles(RAGGED, dot=False).program)
    assert found.multiply == 2 * 4 * 32 * 4 * FIBERS
    assert found.dot == ZERO
    assert found.registers == (4 + 32) * 4 * FIBERS.bytes
    assert cost_of(DrawnTiles(RAGGED, bitmap=True).program).expanded == (4 + 32) * 4 * FIBERS


def test_the_counts_of_pairs_in_halves() -> None:
    """Those of whole tiles, and scales: read, and multiplied in twice, once a block of the result."""
    whole, halves = (cost_of(DrawnTiles(RAGGED, halves=p).program) for p in (False, True))
    assert halves.dot == whole.dot
    assert halves.multiply == 2 * 2 * 16 * 32 * ITEMS
    assert halves.registers == whole.registers + 4 * (4 + 32) * ITEMS
    assert halves.stream == whole.stream + 2 * 4 * ITEMS
    assert default_gpu().matrix("f16x3") == default_gpu().dot["bf16"] / 3


def test_the_header_says_how_tiles_are_stored() -> None:
    text = header((DrawnTiles(ONE_MODE, bitmap=True).program,), "triton")
    assert "Z[item, ij, l] = the sum, over the item's pairs of tiles, of the product of X[ij, k] and Y[l, k]" in text
    assert re.search(r"x_values\[x_value_ptr\[tile\] \+ n\], at the n-th bit set in x_bits\[tile \* 16\]", text)
    assert "16384*L inside" in text
    text = header((DrawnTiles(ONE_MODE, halves=True).program,), "triton")
    assert "X = (x_high_values + x_low_values / 2048) * 2 ** (exponent of x_most[item_x[item] * 32 + ij] - 14)" in text


def test_what_a_program_says_of_itself() -> None:
    program = DrawnTiles(ONE_MODE, dot=False).program
    assert program.looped == {"k"}
    assert program.split == ()
    assert not program.half
    assert [s.axis.level for s, _ in walk(program.body) if isinstance(s, Loop)] == [LANE, LEAF]
    assert program.stored("y").letters == ("l", "k")
    assert program.stored("y").stride("l") == 16
    assert program.stored("y").array("bits") == "y_bits"
    with pytest.raises(PlanError, match="a task list has operands x, y, not 'z'"):
        program.stored("z")
