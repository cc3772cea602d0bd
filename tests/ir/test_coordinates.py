"""Coordinates as expressions: what they read, what they give, how they are written, and what a format makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from coordinate_cases import Diagonals, check_einsums
from interpret import run_program

from sparsetc.codegen.torch import module_source
from sparsetc.errors import FormatError
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.lower import Target, lower
from sparsetc.ir.nest.coordinates import (
    Bits,
    Computed,
    Constant,
    Coordinate,
    Expression,
    Field,
    Formula,
    Lookup,
    Position,
    Reader,
    Writer,
    consecutive,
    parsed,
)
from sparsetc.ir.nest.nest import runs, tiles
from sparsetc.ir.nest.values import Whole
from sparsetc.ir.plan import Schedule, Storage
from sparsetc.packing.base import FORMATS
from sparsetc.testing import check_format, pattern

HERE = Position("nonzero")
NAMES = Writer(["i", "j", "k"], "nonzero", "decode {array}")


def numbers(at: int = 13, arrays: dict[str, list[int]] | None = None) -> Reader:
    """A position, three coordinates, and arrays as plain numbers."""
    return Reader(
        lambda axis: at,
        (5, 7, 11).__getitem__,
        (0, 1, 2).__getitem__,
        lambda array, where: (arrays or {})[array][where],
    )


FORMULAS = {
    "{m0} + {p} % 3": "i + position % 3",
    "({p} - {m0} * 4 + 3) % 90": "(position - i * 4 + 3) % 90",
    "{m0} - ({m1} - {p})": "i - (j - position)",
    "({m0} - {m1}) - {p}": "i - j - position",
    "{p}//5+{m2}": "position // 5 + k",
    "{p} >> 1 & 0x3 | {m1} << 2": "position >> 1 & 3 | j << 2",
    "({p} + 1) * (2 + {m0})": "(position + 1) * (2 + i)",
    "-{m0} + +{m1}": "0 - i + j",
    "{p} * 2 // 3 * 4": "position * 2 // 3 * 4",
    " {p} ": "position",
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_formula_is_parsed_as_python_reads_it(formula: str) -> None:
    expression = parsed(formula, HERE)
    assert expression.text(NAMES) == FORMULAS[formula]
    means = eval(formula.format(m0=5, m1=7, m2=11, p=13).strip())
    assert expression.evaluate(numbers()) == means
    assert eval(FORMULAS[formula], {"i": 5, "j": 7, "k": 11, "position": 13}) == means


@pytest.mark.parametrize(
    "formula",
    [
        *("{m0}{p}", "{m0}5", "5{p}", "{m0}({p})", "{m0} ** 2", "{m0} +", "(", "()", "07", "{q}", "{m}", "m0", "p"),
        *("({m0}, {p})", "{p} if {p} else {p}", "~{p}", "{p} / 2", "{p}[0]", "{p} < 3"),
        *("1" * 9999, "(" * 9999 + "1" + ")" * 9999),
    ],
)
def test_what_is_no_arithmetic_is_refused(formula: str) -> None:
    with pytest.raises(FormatError, match="formula of a coordinate"):
        parsed(formula, HERE)


@pytest.mark.parametrize("formula", [None, 3, b"{p}"])
def test_a_formula_is_text(formula: object) -> None:
    with pytest.raises(FormatError, match="formula of a coordinate"):
        Computed(0, formula).expression(HERE)  # type: ignore[arg-type]


def test_a_coordinate_says_what_it_reads() -> None:
    framed = Field(0, "word", 2, 8, True, frame=256).expression(HERE)
    assert [(lookup.array, lookup.every) for lookup in framed.lookups] == [("word", 1), ("word_base", 256)]
    assert framed.fields == (Bits(Lookup("word", HERE), 2, 8, True),)
    follows = consecutive(1, "shift", 0).expression(HERE)
    assert (follows.modes, follows.axes, follows.lookups[0].every) == ({0}, {"nonzero"}, 0)
    word = Field(0, "word", 2, 8, True).expression(HERE)
    assert (word.axes, word.modes) == ({"nonzero"}, set())
    formula = Computed(1, "{m0} * 2 + {p} % 3").expression(Position("item"))
    assert (formula.modes, formula.axes, formula.lookups) == ({0}, {"item"}, ())


def test_a_coordinate_is_evaluated_on_arrays() -> None:
    arrays = {"word": [0b110101 << 2] * 300, "word_base": [100, 200], "shift": [0, 0, 0, 0, 0, -4]}
    framed = Field(0, "word", 2, 8, True, frame=256).expression(HERE)
    assert framed.evaluate(numbers(13, arrays)) == 0b110101 + 100
    assert framed.evaluate(numbers(256, arrays)) == 0b110101 + 200
    assert consecutive(1, "shift", 0).expression(HERE).evaluate(numbers(13, arrays)) == 9


def test_bits_below_others_bind_less_than_a_base() -> None:
    framed = Formula("+", Bits(Lookup("word", HERE), 0, 4, False), Lookup("base", Formula(">>", HERE, Constant(8))))

    class Plain(Writer):
        def bits(self, bits: Bits) -> tuple[str, str]:
            return bits.operations("w")

    assert framed.text(Plain([], "nonzero")) == "(w & 0xf) + base"


def test_an_element_that_two_positions_share_is_named_alone() -> None:
    assert Lookup("base", Formula(">>", HERE, Constant(1))).text(NAMES) == "base"
    assert Lookup("word", HERE).text(NAMES) == "word[position]"


@pytest.mark.parametrize(
    ("item", "leaf", "message"),
    [
        (Constant(0), Coordinate(2), "mode 1 follows from mode 2, which must be read before it"),
        (Position("nonzero"), Constant(0), "read at the level of item, which has no nonzero"),
        (Constant(0), Lookup("tl", HERE), "means something else in generated programs"),
        (Constant(0), Position("fibre"), "read at the level of nonzero, which has no fibre"),
    ],
)
def test_a_coordinate_reads_what_its_level_knows(item: Expression, leaf: Expression, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        runs((Computed(0, item),), (Computed(1, leaf), Computed(2, "{p}"))).verify()


@pytest.fixture
def diagonals() -> Iterator[None]:
    FORMATS["diagonals"] = Diagonals()
    yield
    del FORMATS["diagonals"]


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("kind", ["one", "random", "skewed", "dense"])
def test_a_format_reads_tables_at_its_words(diagonals: None, kind: str, row: int) -> None:
    check_format("diagonals", pattern(kind, (30, 40)), (30, 40), Storage(item=(row,), leaf=(1 - row,)))


def test_lookups_of_words_run_on_torch(diagonals: None) -> None:
    check_einsums("torch")


def test_a_tile_s_coordinate_may_follow_from_another() -> None:
    """Tiles on a diagonal: their columns are their rows, read before."""
    view = tiles((Field(0, "item_word", 0, 2, True),), (Computed(1, "{m0}"),), Whole((4, 4), (0, 1)))
    view.verify()
    bound = parse("ij,jr->ir", [(12, 12), (12, 5)], [True, False])
    program = lower(bound, view, Schedule(blocks=(("r", 8),)), Target(rows=12))
    assert "tile_j = tile_i" in str(program)
    values, b = torch.randn(48, dtype=torch.float64), torch.randn(12, 5, dtype=torch.float64)
    arrays = {"item_ptr": torch.arange(4), "item_word": torch.arange(3)}
    expected = torch.block_diag(*values.view(3, 4, 4)) @ b
    found = torch.zeros(12, 5, dtype=torch.float64)
    run_program(program, arrays, values, [b], found, 3, 48)
    torch.testing.assert_close(found, expected)
    made: dict[str, object] = {}
    whole = lower(bound, view, Schedule(blocks=(("r", 8),)), Target(rows=12, at_once=True))
    exec(module_source((whole,), "tiles on a diagonal"), made)
    found.zero_()
    made["part_0"]([(0, 3, 0, 3, 0, 48)], arrays["item_ptr"], arrays["item_word"], values, b, found)  # type: ignore[operator]
    torch.testing.assert_close(found, expected)
