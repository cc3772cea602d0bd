"""Plans that users write by hand and get wrong: one error of the package, before any kernel runs, that says where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import explicit_plan, random_sparse, random_values
from extensions import as_before

import sparsetc as stc
from sparsetc.formats.coo import coo
from sparsetc.planner.candidate import Candidate
from sparsetc.planner.problem import Counts, Problem
from sparsetc.plans import Part, Plan, Schedule, Storage

F32 = torch.float32
EQUATION = "ijk,jr->ir"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with as_before():
        yield


def x() -> stc.SparseTensor:
    return random_sparse((4, 5, 6), "random", F32)


def matrices() -> tuple[stc.SparseTensor, stc.SparseTensor]:
    return random_sparse((4, 5), "random", F32), random_sparse((5, 6), "random", F32)


def planned(plan: Any, **settings: Any) -> stc.Kernel:
    return stc.compile(EQUATION, x(), random_values((5, 2), F32, 1), plan=plan, **settings)


def of(storage: Any = None, schedule: Any = None, **others: Any) -> Plan:
    """A plan of one part that is right, but for what is given."""
    given = Storage((0,), leaf=(1, 2)) if storage is None else storage
    own = Schedule(blocks=(("r", 2),), dot=False) if schedule is None else schedule
    return Plan("p", **{"parts": (Part("coo", given, own),), **others})


# --- fields -----------------------------------------------------------------------------------------------------------

a: Any = "what is no field of its type"
INTS, PAIRS = r"must be tuple\[int, \.\.\.\], found", r"must be tuple\[tuple\[str, int\], \.\.\.\], found"


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (of(Storage([0], leaf=(1, 2))), rf"part 0: Storage\.item {INTS} \[0\]"),  # type: ignore[arg-type]
        (of(Storage(("i",), leaf=(1, 2))), rf"part 0: Storage\.item {INTS} \('i',\)"),  # type: ignore[arg-type]
        (of(Storage((0,), leaf=a)), rf"Storage\.leaf {INTS} 'what"),
        (of(Storage((0,), leaf=(1, 2), lanes=a)), r"Storage\.lanes must be int, found 'what"),
        (of(Storage((0,), leaf=(1, 2), params=a)), rf"Storage\.params {PAIRS} 'what"),
        (of(schedule=Schedule(blocks=(("r", "2"),))), rf"part 0: Schedule\.blocks {PAIRS} \(\('r', '2'\),\)"),  # type: ignore[arg-type]
        (of(schedule=Schedule(blocks=("r", 2))), rf"Schedule\.blocks {PAIRS} \('r', 2\)"),  # type: ignore[arg-type]
        (of(schedule=Schedule(warps=a)), r"Schedule\.warps must be int, found 'what"),
        (
            of(Storage((0,), leaf=(1, 2), params=(("side_0", 4),))),
            r"plan 'p', part 0: format 'coo' has no parameter 'side_0'; known: panel_0, panel_1, panel_2",
        ),
        (
            of(parts=(Part("dense_tile", Storage((0,), (1, 2), params=(("side_2", 4), ("side_3", 4)))),)),
            "format 'dense_tile' has no parameter 'side_3'; known: side_0, side_1, side_2$",
        ),
        (of(parts=(None,)), r"plan 'p': Plan\.parts must be tuple\[Part, \.\.\.\], found \(None,\)"),
        (of(parts=(Part("coo", a),)), r"part 0: Part\.storage must be Storage, found 'what"),
        (of(parts=(Part(3),)), r"part 0: Part\.format must be str, found 3"),  # type: ignore[arg-type]
        (of(options=5), r"Plan\.options must be tuple\[tuple\[str, Any\], \.\.\.\], found 5"),
        (of(shares=("0",)), rf"Plan\.shares {INTS} \('0',\)"),
        (of(partition=5), r"Plan\.partition must be str, found 5"),
        (of(steps=(3,)), r"Plan\.steps must be tuple\[Plan \| None, \.\.\.\], found \(3,\)"),
        (of(options=(("a", 1),)), r"partition 'all' does not take the options \{'a': 1\}: got an unexpected keyword"),
        (Plan("hls", options=(("threshold", "8"),)), "threshold must be a number of nonzeros, 0 or more.*found '8'"),
        (Plan("hls", options=(("a", 1),)), "plan 'hls' has no option 'a'"),
        (Plan("coo", options=(("threshold", 1),)), "plan 'coo' has no option 'threshold'"),
    ],
)
def test_a_field_that_is_not_of_its_type(plan: Plan, says: str) -> None:
    with pytest.raises(stc.PlanError, match=says):
        planned(plan)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"does not take the options \{\}: missing a required argument: 'threshold'"),
        ({"threshold": "8"}, "partition 'threshold' takes numbers of 64 bits, found threshold='8'"),
        ({"threshold": 10**30}, "takes numbers of 64 bits, found threshold=1000"),
        ({"threshold": 8, "side_3": 2}, "takes threshold=, whole= and a side_m= for each mode m, found 'side_3'"),
        ({"threshold": 8, "side_0": 0}, r"sides of tiles must be 1 or more, found \(0, "),
    ],
)
def test_options_of_a_partition(options: dict[str, Any], says: str) -> None:
    (part,) = of().parts
    plan = Plan("p", (part, part), partition="threshold", options=tuple(options.items()))
    with pytest.raises((stc.PlanError, stc.FormatError), match=says):
        planned(plan)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((("threshold", "8"),), "threshold must be a number of nonzeros, 1 or more"),
        ((("side_i", "8"),), "the side of 'i' must be a power of two"),
        ((("storage", 3),), "storage must be one of"),
        ((("formats", 3),), "formats must be"),
        (3, r"Plan\.options must be"),
    ],
)
def test_options_of_a_plan_of_pairs(options: Any, says: str) -> None:
    with pytest.raises(stc.PlanError, match=says):
        stc.compile("ij,jk->ik", *matrices(), plan=Plan("bcb", options=options))


def test_numbers_that_no_tensor_reaches() -> None:
    said = r"and below 2\*\*63, found 1000"
    with pytest.raises(stc.PlanError, match=said):
        stc.plans.plan_hls(10**30)
    with pytest.raises(stc.PlanError, match=said):
        stc.plans.plan_bcb(threshold=10**30)
    with pytest.raises(stc.PlanError, match=r"the side of 'i' must be a power of two, below 2\*\*63"):
        stc.plans.plan_bcb(i=2**80)
    planned(stc.plans.plan_hls(2**62))
    for most in (2**32, 2**70):  # a zero in 32 bits, and more than 64 hold
        planned(of(parts=(Part("fiber", Storage((0,), (1,), (2,), max_item_nnz=most), of().parts[0].schedule),)))


# --- modes and letters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "says"),
    [
        (Storage((0,), leaf=(1,)), r"has 2 modes, the tensor 3: mode 2 \('k'\) is at no level"),
        (Storage((0,), leaf=(2,)), r"at one level, found \[0, 2\]; mode 1 is at none"),
        (Storage((0,), leaf=(1, 2, 3)), "has 4 modes, the tensor 3: there is no mode 3"),
    ],
)
def test_the_mode_that_was_forgotten_is_named(storage: Storage, says: str) -> None:
    with pytest.raises(stc.PlanError, match=says):
        planned(of(storage))


@pytest.mark.parametrize(
    ("schedule", "letter"),
    [
        (Schedule(blocks=(("r", 2), ("q", 4)), dot=False), "q"),
        (Schedule(blocks=(("r", 2), ("j", 4)), dot=False), "j"),
        (Schedule(blocks=(("r", 2),), vectors=(("s", (2, 1)),), dot=False), "s"),
    ],
)
def test_blocks_of_what_is_no_dense_axis(schedule: Schedule, letter: str) -> None:
    said = rf"part 0 \(coo\): the schedule has a block of axis '{letter}'; \"{EQUATION}\" has these dense axes: r"
    with pytest.raises(stc.PlanError, match=said):
        planned(of(schedule=schedule))


def test_blocks_of_a_letter_that_is_summed_before_kernels_run() -> None:
    dense = random_values((5, 2), F32, 1), random_values((2, 3), F32, 2)
    plan = explicit_plan("coo", "0||12", {"r": 2, "s": 4}, lanes=1)
    found = stc.einsum("ijk,jr,rs->is", x(), *dense, plan=plan, backend="torch")
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, torch.einsum("ijk,jr,rs->is", x().to_dense(), *dense))


# --- plans that do not apply ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("never", "plan 'never' does not apply to .* on this tensor: the function that makes it gave None"),
        ("rows", 'plan "rows" needs an output with some.*keeps none of them'),
        ("coo+rows", "plan 'coo\\+rows' needs output rows both .* are all of one kind"),
        ("bcb", "plan 'bcb' is for two or more sparse operands, and .* has one"),
    ],
)
def test_a_refused_plan_quotes_the_equation_as_written(plan: str, says: str) -> None:
    stc.plans.register_plan("never")(lambda problem, counts: None)
    written = "iij, jr, rs -> s"
    with pytest.raises(stc.PlanError, match=says) as caught:
        stc.compile(written, random_sparse((4, 4, 5), "random", F32), *(torch.ones(5, 2), torch.ones(2, 3)), plan=plan)
    assert f'"{written}"' in str(caught.value)


def test_long_rows_by_fibers_need_two_summed_modes() -> None:
    rows = torch.zeros(20, 200)
    rows[0], rows[1:, :3] = 1, 1
    with pytest.raises(stc.PlanError, match=r'two modes of the sparse operand or more to be summed; "ij,jr->ir" sums'):
        stc.compile("ij,jr->ir", stc.SparseTensor.from_dense(rows), torch.ones(200, 8), plan="fiber+rows")


# --- the same bits at every run ---------------------------------------------------------------------------------------


def halves(coords: torch.Tensor, shape: tuple[int, ...]) -> list[torch.Tensor]:
    n = coords.shape[1]
    return [torch.arange(n // 2), torch.arange(n // 2, n)]


def in_two(problem: Problem, counts: Counts) -> Candidate:
    """Runs, in two parts."""
    own = coo(problem)
    (part,), (expected,) = own.plan.parts, own.expected
    return Candidate(Plan("halves", (part, part), True, "halves"), (expected.scaled(0.5), expected.scaled(0.5)))


def test_a_plan_of_several_parts_where_sums_are_in_order() -> None:
    stc.plans.register_partition("halves")(halves)
    stc.plans.register_plan("halves", shared=True)(in_two)
    operands = random_sparse((60, 50), "skewed", F32), torch.ones(50, 8)
    preferred = Plan("auto", options=(("preferred", "halves"),))  # what gradients of a shared plan are asked for by
    for wanted in (preferred, "halves"):
        assert stc.compile("ij,jr->ir", *operands, plan=wanted, backend="triton").plan.name == "halves"
    for wanted in (preferred, "halves"):
        made = stc.compile("ij,jr->ir", *operands, plan=wanted, backend="triton", deterministic=True)
        assert made.plan.name == "halves"
        assert made.step.arrays.second is not None, "rows that both parts add to"
        assert "atomic" not in made.source
    in_order = stc.compile("ij,jr->ir", *operands, plan="halves", backend="torch", deterministic=True)
    assert in_order.plan.name == "halves", "torch programs add in one order"
