"""What is registered from outside: names that may be names, rules that divide nonzeros, nothing shadowed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import SIZES, Problem, assert_matches, explicit_plan
from extensions import as_before

import sparsetc as stc
from sparsetc.formats.coo import Coo, coo
from sparsetc.formats.fiber import rows
from sparsetc.ir.nest.coordinates import Computed, Field
from sparsetc.ir.nest.nest import runs
from sparsetc.ir.program.text import docstring
from sparsetc.packing.base import FORMATS, Packed
from sparsetc.planner.problem import Counts
from sparsetc.planner.registry import PLANS, plan_preferring


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with as_before():
        yield


def matrix() -> stc.SparseTensor:
    return stc.SparseTensor([[0, 0, 1, 2], [0, 2, 1, 2]], torch.tensor([1.0, 2.0, 3.0, 4.0]), (3, 3))


# --- partitions -------------------------------------------------------------------------------------------------------

Rule = Callable[[int], "list[torch.Tensor | None]"]


def split_by(rule: Rule, whole_rows: bool = False) -> torch.Tensor:
    """Row sums of `matrix`, its nonzeros divided among two parts."""
    stc.plans.register_partition("of a test", whole_rows=whole_rows)(lambda coords, shape, *kept: rule(coords.shape[1]))
    (part,) = explicit_plan("coo", "0||1", {}, lanes=1).parts
    return stc.einsum(
        "ij->i", matrix(), plan=stc.plans.Plan("two", (part, part), partition="of a test"), backend="torch"
    )


def numbers(*found: int) -> torch.Tensor:
    return torch.tensor(found, dtype=torch.long)


def test_each_nonzero_is_in_one_part() -> None:
    assert split_by(lambda n: [numbers(3, 0), numbers(1, 2)]).tolist() == [3.0, 3.0, 4.0]
    assert split_by(lambda n: [None, numbers()]).tolist() == [3.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([numbers(0, 0), numbers(2, 3)], "each of the 4 nonzeros to one part; nonzero 0 is in 2 parts"),
        ([numbers(0, 1), numbers(3)], "nonzero 2 is in 0 parts"),
        ([numbers(0, 1), numbers(1, 2, 3)], "nonzero 1 is in 2 parts"),
        ([None, numbers(3)], "nonzero 3 is in 2 parts"),
        ([numbers(0, 1), numbers(2, 4)], "gave nonzero 4, which does not exist"),
        ([numbers(0, 1), numbers(2, -1)], "gave nonzero -1, which does not exist"),
        ([torch.ones(4, dtype=torch.bool), numbers()], r"by their numbers.*found torch\.bool, shape \(4,\)"),
        ([numbers(0, 1, 2, 3).float(), numbers()], r"found torch\.float32"),
        ([[0, 1], [2, 3]], "found list"),
    ],
)
def test_a_rule_that_divides_otherwise_is_refused(parts: Any, message: str) -> None:
    with pytest.raises(stc.PlanError, match=f"partition 'of a test' .*{message}"):
        split_by(lambda n: parts)


def test_a_row_that_was_promised_to_be_whole_is_not_cut() -> None:
    assert split_by(lambda n: [numbers(0, 1), numbers(2, 3)], whole_rows=True).tolist() == [3.0, 3.0, 4.0]
    with pytest.raises(stc.PlanError, match=r"whole_rows=True, and cut an output row, that of nonzero [01];"):
        split_by(lambda n: [numbers(0, 2), numbers(1, 3)], whole_rows=True)


def test_an_output_that_keeps_no_mode_has_one_row() -> None:
    stc.plans.register_partition("of a test", whole_rows=True)(
        lambda coords, shape, kept: [numbers(0, 2), numbers(1, 3)]
    )
    (part,) = explicit_plan("coo", "||01", {}, lanes=1).parts
    with pytest.raises(stc.PlanError, match=r"whole_rows=True, and cut an output row, that of nonzero [01];"):
        stc.einsum("ij->", matrix(), plan=stc.plans.Plan("two", (part, part), partition="of a test"), backend="torch")


# --- names ------------------------------------------------------------------------------------------------------------

BREAKING_OUT = 'a"""\nimport os\n"""'


@pytest.mark.parametrize("name", [BREAKING_OUT, "two words", "class", "", "1st", "naïve", "a" * 99, None, 3, "a-b"])
def test_formats_are_called_by_identifiers(name: Any) -> None:
    with pytest.raises(stc.FormatError, match=r"name of a format \(Named\) is printed into generated programs"):
        stc.plans.register_format(type("Named", (Coo,), {"name": name}))
    assert name not in FORMATS


@pytest.mark.parametrize("name", [BREAKING_OUT, 'say "x"', "a\\b", "", " padded ", "a\nb", "bell\a", None, 3])
def test_plans_and_partitions_are_called_by_a_line_of_text(name: Any) -> None:
    for register in (stc.plans.register_plan, stc.plans.register_partition):
        with pytest.raises(stc.PlanError, match="must be one line of 1 to 80 printable characters"):
            register(name)


def test_plans_may_be_called_by_several_words() -> None:
    stc.plans.register_plan("long fibers")(counted(coo))
    assert stc.einsum("ij->i", matrix(), plan="long fibers").tolist() == [3.0, 3.0, 4.0]


def test_operations_are_called_by_identifiers() -> None:
    with pytest.raises(stc.PlanError, match=r"name of an operation .* found '<lambda>'"):
        stc.register_op(lambda x: x)


@pytest.mark.parametrize("array", ["x", "tl", "item", "lambda", "len", "two words", "a.b", "é"])
def test_arrays_of_a_view_hide_nothing(array: str) -> None:
    with pytest.raises(stc.FormatError, match="array"):
        runs((), (Field(0, array, 0, 4, True),)).verify()
    runs((), (Field(0, "item_place", 0, 4, True),)).verify()


@pytest.mark.parametrize("formula", ["__import__('os')", "{m0}; x", "{p}\n", "{m0}.x", "{m0} / 2", ""])
def test_formulas_of_coordinates_are_arithmetic(formula: str) -> None:
    with pytest.raises(stc.FormatError, match="formula of a coordinate"):
        runs((), (Computed(0, formula),)).verify()
    runs((), (Computed(0, "({p} * 2 + 0x3f) % 5 >> 1"),)).verify()


@pytest.mark.parametrize("text", [BREAKING_OUT, "ends in \\", 'quotes """', "nul \0 bell \a\r", 'plain "text"\n', '"'])
def test_a_docstring_holds_any_text(text: str) -> None:
    tree = ast.parse(f'"""{docstring(text)}\n"""')
    assert len(tree.body) == 1
    (said,) = [ast.get_docstring(tree, clean=False)]
    assert said is not None
    printed = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    assert said.rstrip("\n") in (text.rstrip("\n"), printed.rstrip("\n"))


# --- what comes with the package ------------------------------------------------------------------------------------


def otherwise(*_: Any, **__: Any) -> None:
    """Stands for anything."""


def mttkrp(*_: Any) -> str:
    """An operation by the name of another."""
    return "another"


@pytest.mark.parametrize("name", ["auto", "coo", "hls", "rows", "fiber+rows", "bcb", "dense", "dense_tile"])
def test_plans_of_the_package_are_not_shadowed(name: str) -> None:
    with pytest.raises(stc.PlanError, match=f"plan '{re.escape(name)}' comes with sparsetc, .* replace=True"):
        stc.plans.register_plan(name)(otherwise)
    assert name not in PLANS or not PLANS[name].make
    stc.plans.register_plan(name, replace=True)(otherwise)
    assert PLANS[name].make is otherwise


def test_nor_partitions_formats_and_operations() -> None:
    with pytest.raises(stc.PlanError, match="partition 'threshold' comes with sparsetc"):
        stc.plans.register_partition("threshold")(otherwise)
    with pytest.raises(stc.PlanError, match="operation 'mttkrp' comes with sparsetc"):
        stc.register_op(mttkrp)
    for name in ("coo", "rows"):
        named = type("Named", (Coo,), {"name": name, "__module__": __name__})
        with pytest.raises(stc.FormatError, match=f"the name '{name}' comes with sparsetc"):
            stc.plans.register_format(named)
        assert stc.plans.register_format(replace=True)(named) is named
        assert type(FORMATS[name]) is named
    assert stc.register_op(replace=True)(mttkrp) is mttkrp
    assert stc.OPERATIONS["mttkrp"] is mttkrp


def test_what_came_from_outside_may_be_registered_again() -> None:
    for _ in range(2):  # as a cell of a notebook is run again
        stc.plans.register_plan("mine")(counted(coo))
        stc.plans.register_format(type("Mine", (Coo,), {"name": "mine"}))


def test_a_format_registered_again_without_offer_is_no_plan() -> None:
    class Offering(Coo):
        name = "mine"

        def offer(self, problem: Problem, counts: Counts) -> None:
            return None

    class Plain(Coo):
        name = "mine"

    stc.plans.register_format(Offering)
    assert "mine" in PLANS
    stc.plans.register_format(Plain)
    assert "mine" not in PLANS
    with pytest.raises(stc.PlanError, match=r"no plan is called 'mine'; it is a format without offer, .* by hand"):
        stc.einsum("ij->i", matrix(), plan="mine")


def test_a_format_that_lacks_its_view_is_told_so() -> None:
    class Half:
        """Packs, and cannot be read."""

        name = "half"

        def pack(self) -> None:
            """Nothing."""

    with pytest.raises(stc.FormatError, match=r"Half is not a format: it has no view\(shape, storage\)$"):
        stc.plans.register_format(Half)  # type: ignore[call-overload]


# --- what is registered is what is run --------------------------------------------------------------------------------


def halves(mode: int) -> Callable[..., list[torch.Tensor | None]]:
    """A rule: even coordinates of a mode, and odd ones."""

    def rule(coords: torch.Tensor, shape: tuple[int, ...]) -> list[torch.Tensor | None]:
        return [torch.nonzero(coords[mode] % 2 == n).flatten() for n in range(2)]

    return rule


def counted(plan: Callable[..., Any]) -> Callable[..., Any]:
    """A plan of the package's as users' are called."""
    return lambda problem, counts: plan(problem)


def test_what_is_registered_anew_is_run_from_then_on() -> None:
    x, (part,) = matrix(), explicit_plan("coo", "0||1", {}, lanes=1).parts
    for mode in (0, 1, 0):
        stc.plans.register_partition("of a test")(halves(mode))
        stc.einsum("ij->i", x, plan=stc.plans.Plan("two", (part, part), partition="of a test"))
        packed = [kept for kept in x.pattern.cache.values() if isinstance(kept, Packed)]
        assert [x.coords[mode, p.source].remainder(2).unique().tolist() for p in packed] == [[0], [1]]
    for make, format in ((coo, "coo"), (rows, "fiber"), (coo, "coo")):
        stc.plans.register_plan("mine")(counted(make))
        stc.einsum("ij->i", x, plan="mine")
        assert [kept.format for kept in x.pattern.cache.values() if isinstance(kept, Packed)] == [format]


def test_a_plan_is_called_what_it_is_registered_as() -> None:
    stc.plans.register_plan("mine")(counted(coo))
    explanation = stc.explain("ij->i", matrix())
    assert sum(name.startswith("mine: coo[") for name, _ in explanation.considered) == 1
    assert stc.compile("ij->i", matrix(), plan="mine").plan.name == "mine"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda problem, counts: coo(problem).plan, "must give a Candidate or None, found Plan"),
        (lambda problem, counts: replace(coo(problem), expected=()), "has 1 parts, and the expected sizes of 0"),
        (lambda problem, counts: replace(coo(problem), plan=stc.plans.Plan("bare")), "plan 'mine' has no parts"),
    ],
)
def test_a_malformed_plan_is_refused(make: Any, message: str) -> None:
    stc.plans.register_plan("mine")(make)
    for wanted in ("mine", "auto"):
        with pytest.raises(stc.PlanError, match=message):
            stc.einsum("ij->i", matrix(), plan=wanted)


# --- plans of several parts -------------------------------------------------------------------------------------------


def test_shares_are_counted_as_they_are_packed() -> None:
    x = stc.SparseTensor([[0, 0, 1, 2, 2, 2], [0, 2, 1, 0, 1, 2]], [1.0] * 6, (3, 3))
    stc.plans.register_partition("of a test")(halves(0))
    counts = Counts(x.coords, x.shape)
    whole, even, odd = counts, *counts.shares("of a test")
    assert (whole.nnz, even.nnz, odd.nnz) == (6, 5, 1)
    assert (whole.distinct((0,)), even.distinct((0,)), odd.distinct((0,))) == (3, 2, 1)
    assert (whole.longest((1,)), even.longest((1,)), odd.longest((1,))) == (2, 2, 1)
    assert [counts.short_share((0,), most) for most in (2, 3)] == [(1, 1), (3, 2)]
    assert counts.short_share((), 9) == (0, 0)
    assert [share.nnz for share in counts.shares("run_length", (0,), threshold=2)] == [5, 1]
    assert [share.nnz for share in counts.shares("run_length", (1,), threshold=2)] == [6, 0]
    assert [share.nnz for share in even.shares("of a test")] == [5, 0]
    assert [share.coords.tolist() for share in counts.shares("all")] == [x.coords.tolist()]
    with pytest.raises(stc.PlanError, match="no partition is called 'none'"):
        counts.shares("none")


def gradient_plans(x: stc.SparseTensor, plan: str) -> list[str]:
    """Names of the plans that the gradients of a product, and of a batch of it, take."""
    x.pattern.clear()
    b = torch.ones(3, 2, requires_grad=True)
    stc.einsum("ij,jr->ir", x, b, plan=plan).sum().backward()
    torch.func.vmap(lambda b: stc.einsum("ij,jr->ir", x, b, plan=plan))(torch.ones(5, 3, 2))
    kernels = {k for k in x.pattern.cache.values() if hasattr(k, "steps")}
    kernel, batched = sorted(
        [k for k in kernels if k.bound.einsum.text == "ij,jr->ir"], key=lambda k: len(k.bound.einsum.output)
    )
    (gradient,) = kernels - {kernel, batched}
    return [gradient.innermost.plan.name, batched.innermost.plan.name]


def test_gradients_take_a_shared_plan_where_it_applies() -> None:
    stc.plans.register_plan("mine")(counted(coo))
    assert "mine" not in gradient_plans(matrix(), "mine")
    stc.plans.register_plan("mine", shared=True)(counted(coo))
    assert gradient_plans(matrix(), "mine") == ["mine", "mine"]
    stc.plans.register_plan("mine", shared=True)(lambda problem, counts: coo(problem) if problem.kept == (0,) else None)
    gradient, batched = gradient_plans(matrix(), "mine")
    assert (gradient == "mine", batched) == (False, "mine")
    assert stc.compile("ij->i", matrix(), plan=plan_preferring("mine")).plan.name == "mine"
    assert stc.compile("ij->j", matrix(), plan=plan_preferring("mine")).plan.name != "mine"


# --- the documentation ------------------------------------------------------------------------------------------------


def test_the_programs_of_the_documentation_run() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "extending.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(programs) == 4
    problem = Problem("ijk,jr,kr->ir", {**SIZES, "r": 32, "j": 40}, "dense")
    x, b, c = problem.operands()
    for program in programs:
        names = {"stc": stc, "x": x, "b": b, "c": c}
        exec(program, names)
        if "a" in names:
            assert_matches(names["a"], problem.equation, [names["x"], names["b"], names["c"]])
    a = torch.rand(x.shape[0], 2, dtype=x.dtype)
    core = stc.OPERATIONS["tucker_core"](x, [a, b, c])
    assert_matches(core, "ijk,ir,js,kt->rst", [x, a, b, c])
    assert stc.compile(problem.equation, x, b, c, plan="long fibers").plan.parts[0].storage.leaf == (1,)
    with pytest.raises(stc.PlanError, match="does not apply"):
        stc.compile("ij->i", matrix(), plan="long fibers")
