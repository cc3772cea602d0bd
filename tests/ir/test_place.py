"""Where computations stand: placed by one rule, in the loops of every view; what cannot be placed is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import golden_cases
import pytest
from cases import Problem
from tile_pairs import FOLDS, DrawnTiles

import sparsetc as stc
from sparsetc.errors import PlanError
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF, TileLoop
from sparsetc.ir.nest.coordinates import Field
from sparsetc.ir.nest.nest import Nest, blocks, pairs, runs, tiles
from sparsetc.ir.nest.values import Whole
from sparsetc.ir.program.tile import (
    LANES,
    Add,
    Decode,
    Gather,
    Key,
    Loop,
    Operand,
    Product,
    Reduce,
    Statement,
    Tile,
    TileProgram,
    Value,
    Zero,
    flow,
    place,
)

RUNS = runs()
BLOCKS = blocks((), (), (), 1)
TILES = tiles((), (), Whole((4, 4), (0, 1)))
PAIRS = pairs(Whole(), Whole())


def value(name: str = "x") -> Value:
    return Value(Tile(name, (LANES,), LEAF))


def decode(letter: str, level: int, *along: str) -> Decode:
    return Decode(letter, Field(0, "word", 0, 4, True), level, along=along)


def gather(name: str, rows: str, level: int) -> Gather:
    return Gather(Tile(name, ("r",), level), Operand(name.upper(), tuple(rows), (4,) * len(rows), ("r",), 8))


def total(name: str, level: int, *factors: Tile) -> Product:
    return Product(Tile(name, ("r",), level), factors, accumulate=True)


def outline(body: Sequence[Statement]) -> str:
    """What stands where: a loop is braces behind its letter, a zero is the name of its accumulator and ``=0``."""
    words = [
        f"{s.axis.letter}{{{outline(s.body)}}}"
        if isinstance(s, Loop)
        else flow(s)[0] + "=0" * isinstance(s, Zero) or "add"
        for s in body
    ]
    return " ".join(words)


def loops(view: Nest, letters: str = "") -> list[Loop]:
    return [Loop(axis) for axis in (*view.loops, *(TileLoop(letter, size=4) for letter in letters))]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (RUNS, [(LEAF, "nonzero")]),
        (BLOCKS, [(LANE, "block"), (LEAF, "nonzero")]),
        (TILES, [(LANE, "tile")]),
        (PAIRS, [(LANE, "pair")]),
    ],
)
def test_loops_of_each_view(view: Nest, expected: list[tuple[int, str]]) -> None:
    assert [(axis.level, axis.name) for axis in view.loops] == expected


def test_a_run() -> None:
    b, x = gather("b", "j", LEAF), value()
    steps = [decode("i", ITEM), decode("j", LEAF), x, b, total("t", ITEM, x.out, b.out)]
    steps.append(Add(steps[-1].out, Key("row", ITEM, ("i",), (1,)), ("r",), True))
    assert outline(place(steps, loops(RUNS))) == "at_i t=0 {at_j x b t} add"


def test_what_is_known_outside_a_loop_stands_outside_wherever_it_is_listed() -> None:
    b, c, x = gather("b", "i", ITEM), gather("c", "j", LANE), value()
    steps = [x, decode("j", LANE), c, decode("i", ITEM), b, Product(Tile("p", ("r",), LEAF), (x.out, c.out, b.out))]
    assert outline(place(steps, loops(BLOCKS))) == "at_i b {at_j c {x p}}"


def test_sums_of_sums() -> None:
    x = value()
    inner = total("f", LANE, x.out)
    outer = total("t", ITEM, inner.out)
    add = Add(outer.out, Key("position", ITEM), ("r",), True)
    assert outline(place([x, inner, outer, add], loops(BLOCKS))) == "t=0 {f=0 {x f} t} add"


def test_positions_are_known_in_the_loop_that_takes_them() -> None:
    j, k = decode("j", LANE, "j"), decode("k", LANE, "k")
    b, c, x = gather("b", "j", LANE), gather("c", "k", LANE), value()
    steps = [j, k, c, b, x, total("t", ITEM, x.out, b.out, c.out)]
    assert outline(place(steps, loops(TILES, "jk"))) == "t=0 {j{at_j b k{at_k c x t}}}"


def test_a_coordinate_is_known_in_the_loop_over_the_side_that_it_rides_along() -> None:
    i, rider = decode("i", ITEM, "i"), decode("l", LANE, "j")
    b, c, x = gather("b", "i", ITEM), gather("c", "l", LANE), value()
    steps = [i, rider, c, b, x, total("t", ITEM, x.out, b.out, c.out)]
    assert outline(place(steps, loops(TILES, "jk"))) == "at_i b t=0 {j{at_l c k{x t}}}"


def test_what_is_listed_after_a_sum_stands_after_its_loop() -> None:
    x, late = value(), gather("b", "", ITEM)
    t = total("t", ITEM, x.out)
    summed = Reduce(Tile("s", ("r",), ITEM), Tile("t", (LANES, "r"), ITEM))
    scaled = Product(Tile("p", ("r",), ITEM), (summed.out, late.out))
    assert outline(place([x, t, late, summed, scaled], loops(RUNS))) == "t=0 {x t} b s p"


def test_two_sums_in_one_loop() -> None:
    x, y = value(), value("y")
    steps = [x, total("t", ITEM, x.out), y, total("u", ITEM, y.out), total("t", ITEM, y.out)]
    assert outline(place(steps, loops(RUNS))) == "t=0 u=0 {x t y u t}"


X, T = value(), total("t", ITEM, value().out)
S = Reduce(Tile("s", (), ITEM), T.out)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([total("t", ITEM, X.out)], "t: x is not made before it"),
        ([gather("b", "ij", LEAF)], "b: at_i, at_j is not made before it"),
        ([X, Add(T.out, Key("position", ITEM), (), True)], "add: t is not made before it"),
        ([X, T, total("u", ITEM, X.out, T.out)], "u stands in a loop after which t is complete"),
        ([X, T, S, Product(Tile("p", (), LEAF), (X.out, S.out))], "p stands in a loop after which s is complete"),
        ([X, T, Add(T.out, Key("position", LEAF), (), True)], "add stands in a loop after which t is complete"),
        ([gather("b", "", ITEM), total("t", ITEM, Tile("b", ("r",), ITEM))], "adds up over no loop"),
        ([X, total("t", LEAF, X.out)], "adds up over no loop"),
    ],
)
def test_what_cannot_be_placed(steps: list[Statement], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        place(steps, loops(RUNS))


# -- whole programs ----------------------------------------------------------------------------------------------------


def programs() -> Iterator[TileProgram]:
    """Those of the golden sources, of every kind of view, and of drawn tiles."""
    for equation, sizes, dtype, plan, backend in golden_cases.CASES.values():
        operands = Problem(equation, sizes, "skewed", dtype).operands()
        yield from stc.compile(equation, *operands, plan=plan, backend=backend).programs
    for folds in FOLDS.values():
        yield from (DrawnTiles(folds, dot=dot, halves=halves).program for dot, halves in ((0, 0), (1, 0), (1, 1)))


def check_placed(program: TileProgram) -> None:
    """Its statements are placed where they are."""
    statements = [s for s, _ in program.statements]
    steps = [s for s in statements if not isinstance(s, Loop | Zero)]
    around = [Loop(s.axis) for s in statements if isinstance(s, Loop)]
    assert place(steps, around) == program.body, program


def test_placed_programs_are_placed_alike_again() -> None:
    kinds = set()
    for program in programs():
        if program.covers:  # by products of whole tensors, which are in no loop
            continue
        check_placed(program)
        kinds.add(tuple(axis.name for axis in program.view.loops))
    assert len(kinds) == 4
