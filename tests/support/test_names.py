"""Generated names: no letter of an equation, of all 52, meets one; nor does an array of a format."""

from __future__ import annotations

from string import ascii_letters

import pytest
import torch
from cases import assert_matches, random_sparse, random_values

import sparsetc as stc
from sparsetc.errors import FormatError
from sparsetc.ir.nest.coordinates import Field
from sparsetc.ir.nest.nest import runs
from sparsetc.support import checks

PLANS = {"auto": "auto", "coo": "coo", "fiber": "fiber", "rows": "rows", "hls": stc.plans.plan_hls(1)}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("first", range(0, 52, 4))
def test_no_letter_meets_a_generated_name(first: int, plan: str) -> None:
    a, b, c, r = (ascii_letters[(first + n * 13) % 52] for n in range(4))
    x = random_sparse((5, 6, 7), "random", torch.float32)
    equation = f"{a}{b}{c},{b}{r},{c}{r}->{a}{r}"
    operands = [x, random_values((6, 3), torch.float32, 1), random_values((7, 3), torch.float32, 2)]
    assert_matches(stc.einsum(equation, *operands, plan=PLANS[plan]), equation, operands)


@pytest.mark.parametrize("plan", ["auto", "coo", "fiber", "rows"])
@pytest.mark.parametrize("letter", ascii_letters)
def test_any_letter_is_a_mode_or_a_rank(letter: str, plan: str) -> None:
    other, third = [c for c in "abc" if c != letter][:2]
    x = random_sparse((4, 5), "random", torch.float64)
    vector, matrix = random_values((4,), torch.float64, 1), random_values((5, 2), torch.float64, 1)
    cases: dict[str, list[torch.Tensor]] = {
        f"{letter}{other}->{letter}": [],
        f"{letter}{other},{letter}->{other}": [vector],
        f"{other}{third},{third}{letter}->{other}{letter}": [matrix],
    }
    for equation, dense in cases.items():
        assert_matches(stc.einsum(equation, x, *dense, plan=plan), equation, [x, *dense])


@pytest.mark.parametrize("letters", ["xwv", "tlp", "int", "ifa", "ATU"])
def test_kernels_of_any_letters_compile(letters: str) -> None:
    a, b, c = letters
    x = random_sparse((40, 30, 20), "dense", torch.float32)
    dense = [random_values((30, 16), torch.float32, 1), random_values((20, 16), torch.float32, 2)]
    for plan in ("coo", "fiber", stc.plans.plan_hls(1)):
        kernel = stc.compile(f"{a}{b}{c},{b}r,{c}r->{a}r", x, *dense, plan=plan, backend="triton")
        assert ".visible .entry" in kernel.ptx("sm_90")


def test_folds_of_letters_that_spell_a_python_word_compile() -> None:
    x, y = (random_sparse((8, 8, 8, 8), "random", torch.float32, seed) for seed in (0, 1))
    kernel = stc.compile("isxf,xfdo->isdo", x, y, plan="bcb", backend="triton")
    assert ".visible .entry" in kernel.ptx("sm_90")


@pytest.mark.parametrize("word", ["lane", "pair"])
@pytest.mark.parametrize("axis", ["rows", "columns", "inner"])
def test_folds_of_letters_that_spell_an_axis_of_pairs(word: str, axis: str) -> None:
    equations = {"rows": f"{word}J,JK->{word}K", "columns": f"KJ,{word}J->K{word}", "inner": f"K{word},J{word}->KJ"}
    equation = equations[axis]
    terms = equation.split("->")[0].split(",")
    given = [random_sparse((3,) * len(t), "random", torch.float64) for t in terms]
    assert_matches(stc.einsum(equation, *given, plan="bcb"), equation, given)
    assert ".visible .entry" in stc.compile(equation, *given, plan="bcb", backend="triton").ptx("sm_90")


@pytest.mark.parametrize("name", ["word", "word_1", "item_word", "x_word", "shift", "offsets", "Words"])
def test_names_that_formats_take_are_free(name: str) -> None:
    assert checks.is_free(name)


ARGUMENTS = ["x", "n_iter_max", "tol", "init", "reduce", "random_state", "precision", "memory_limit", "device", "tune"]


@pytest.mark.parametrize(
    ("unknown", "near"),
    [
        *(("precison", "precision"), ("maxiters", "n_iter_max"), ("iters", "n_iter_max"), ("memory", "memory_limit")),
        *(("memorylimit", "memory_limit"), ("random", "random_state"), ("max_iter", "n_iter_max")),
        *((word, None) for word in ("optimize", "semiring", "seed", "keepdims", "dtype", "threads", "path", "verbose")),
    ],
)
def test_only_a_name_that_is_near_is_proposed(unknown: str, near: str | None) -> None:
    said = checks.refused([unknown], ARGUMENTS)
    assert (f"{unknown} (did you mean {near}?);" in said) if near else ("did you mean" not in said), said


TAKEN = ["for", "range", "pos", "pos_0", "tl", "torch", "at_i", "in_r", "b_jr", "operand_3_jr", "i", "A", "word_bits"]
TAKEN += ["values", "item_ptr", "high_values", "low_values", "most", "most_B", "scaled_C", "unscale_X", "x_high"]


@pytest.mark.parametrize("name", [*TAKEN, "two words", 'a"""', "naïve", ""])
def test_names_that_generated_programs_take_are_not(name: str) -> None:
    assert not checks.is_free(name)
    if name:
        view = runs((), (Field(0, name, 0, 4, True),), chunk=8)
        with pytest.raises(FormatError, match="generated programs"):
            view.verify()


@pytest.mark.parametrize("equation", ["ij->ji", "ijk,ir->kjr", "ijk->kji", "ijk,ir,kr->jri"])
def test_rows_of_tiles_are_in_the_output_s_order(equation: str) -> None:
    term = equation.split("->")[0].split(",")
    x = random_sparse((20, 30, 25)[: len(term[0])], "skewed", torch.float32)
    sizes = dict(zip("ijk", x.shape, strict=False)) | {"r": 4}
    dense = [random_values(tuple(sizes[c] for c in t), torch.float32, n) for n, t in enumerate(term[1:])]
    for output in ("dense", "sparse"):
        found = stc.einsum(equation, x, *dense, plan=stc.plans.plan_hls(1), output=output)
        assert_matches(found, equation, [x, *dense])
