"""What finds faults is itself without: its reference, the drawing, the shrinking, the reproducers, the command line."""

from __future__ import annotations

import time
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

import sparsetc as stc
from sparsetc.planner.registry import PLANS
from sparsetc.testing import check as checking
from sparsetc.testing.__main__ import main
from sparsetc.testing.around import Hang, time_limit
from sparsetc.testing.build import build
from sparsetc.testing.case import Case, DrawnOperand, DrawnValues, PlanCall
from sparsetc.testing.check import check
from sparsetc.testing.compare import Expected, Wrong, check_result, check_values, tolerance
from sparsetc.testing.draw import KINDS, draw
from sparsetc.testing.expected import result_expected, terms_of, wide_leaves
from sparsetc.testing.findings import failure, found
from sparsetc.testing.forms import CIRCUMSTANCES, MEMORY, SPARSE
from sparsetc.testing.reference import Term, evaluate
from sparsetc.testing.reproduce import operand_lines, reproducer

F64 = torch.float64

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def densified(term: Term, sizes: dict[str, int]) -> torch.Tensor:
    """An operand as a dense tensor of full sizes, by torch alone."""
    shape = [sizes[c] for c in term.letters]
    if term.coords is None:
        return term.values.expand(shape)
    return torch.zeros(shape, dtype=term.values.dtype).index_put(tuple(term.coords), term.values, accumulate=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_einsum_of_dense_tensors(kind: str) -> None:
    for seed in range(120):
        case = draw(kind, seed)
        case = replace(case, operands=tuple(replace(o, values=replace(o.values, specials=0)) for o in case.operands))
        sizes = case.sizes
        if prod(sizes.values()) > 10**7 or len(case.letters) > 26:
            continue
        built = build(case)
        terms = terms_of(built, [leaf.detach() for leaf in wide_leaves(built)])
        names = dict(zip(case.letters, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ", strict=False))
        equation = "".join(names.get(c, c) for c in case.equation)
        expected = torch.einsum(equation, [densified(t, sizes) for t in terms])
        torch.testing.assert_close(evaluate(terms, case.output, sizes), expected, rtol=1e-9, atol=1e-9)


def test_only_touched_elements_are_read() -> None:
    coords = torch.tensor([[0, 2], [1, 1]])
    x = Term("ij", torch.tensor([1.0, 2.0], dtype=F64), coords)
    b = torch.full((3,), torch.nan, dtype=F64)
    b[1] = torch.inf
    found = evaluate([x, Term("j", b)], "i", {"i": 3, "j": 3})
    assert found.tolist() == [torch.inf, 0.0, torch.inf]


def test_a_case_is_the_same_every_time_and_seeds_differ() -> None:
    for kind in KINDS:
        assert draw(kind, 5) == draw(kind, 5)
        assert len({str(draw(kind, seed)) for seed in range(50)}) == 50


def test_everything_is_drawn() -> None:
    cases = [draw(kind, seed) for kind in KINDS for seed in range(700)]
    operands = [o for c in cases for o in c.operands]
    assert {c for case in cases for c in case.letters} == set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert {len(o.letters) for o in operands if o.sparse} == set(range(1, 9))
    assert {o.memory for o in operands} >= set(MEMORY)
    assert {o.form for o in operands if o.sparse} == set(SPARSE)
    assert {c.circumstance for c in cases} == set(CIRCUMSTANCES)
    assert {c.notation for c in cases} == {"plain", "implicit", "spaced", "list", "sublists"}
    assert any(c.ellipsis for c in cases)
    assert {c.plan.name for c in cases} >= {"auto", *PLANS, "split", "plan_hls"}
    assert {c.plan.name for c in cases} >= {"scalar", "dense", "bcb", "bcb+scalar", "plan_bcb"}
    assert {c.form for c in cases} == {"auto", "sparse", "dense"}
    assert any(o.values.specials for o in operands)
    assert any(0 in o.shape for o in operands)
    assert any(o.dense_modes for o in operands)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reproducer_is_short_and_makes_the_same_operands(kind: str) -> None:
    for seed in range(60):
        case = draw(kind, seed)
        text = reproducer(case)
        compile(text, "reproducer", "exec")
        assert len(text.split("\n")) <= 3 + len(case.operands) + 9
        built = build(case)
        space: dict[str, Any] = {**built.space, "inf": torch.inf, "nan": torch.nan}
        for name in case.names:
            del space[name]
        exec("\n".join(operand_lines(case)), space)
        for name in case.names:
            a, b = (s[name] for s in (built.space, space))
            if isinstance(a, stc.SparseTensor):
                assert torch.equal(a.coords, b.coords)
                a, b = a.values, b.values
            if isinstance(a, torch.Tensor) and a.layout == torch.strided:
                torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=0, equal_nan=True)
                assert (a.stride(), a.is_conj(), a.is_neg()) == (b.stride(), b.is_conj(), b.is_neg())


def a_case(**changes: Any) -> Case:
    x = DrawnOperand("ij", (3, 4), DrawnValues("uniform", 1), nonzeros=((0, 1), (2, 3), (1, 1)))
    b = DrawnOperand("jr", (4, 2), DrawnValues("uniform", 2))
    return replace(Case("einsums", (x, b), "ir", "float64", PlanCall("coo")), **changes)


def test_a_fault_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    right = stc.einsum

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        sparse = next((a for a in args if isinstance(a, stc.SparseTensor)), None)
        return -result if sparse is not None and 4 in sparse.coords[-1] and isinstance(result, torch.Tensor) else result

    monkeypatch.setattr(stc, "einsum", wrong)
    x = DrawnOperand(
        "ijk", (3, 4, 6), DrawnValues("uniform", 1), nonzeros=tuple((n % 3, n % 4, n % 6) for n in range(20))
    )
    b = DrawnOperand("kr", (6, 5), DrawnValues("uniform", 2), "transposed")
    case = Case("einsums", (x, b), "ir", "float64", PlanCall("coo"), deterministic=True, notation="spaced")
    failed = failure(case)
    assert failed is not None
    assert failed[0] == "wrong values"
    finding = found(case, *failed)
    assert finding.smallest.equation in ("i->", "k->", "j->")
    assert finding.smallest.operands[0].nonzeros == ((4,),)
    assert finding.smallest.operands[0].shape == (5,)
    assert 'stc.einsum("' in str(finding)


def test_what_is_wrong_is_said() -> None:
    expected = result_expected(build(a_case()))
    check_result(expected.values.clone(), expected, "auto", True)
    for spoiled, what in (
        (expected.values + 1e-9, "values"),
        (expected.values.float(), "dtype"),
        (expected.values.T.contiguous(), "shape"),
        (expected.values * torch.nan, "values"),
    ):
        with pytest.raises(Wrong, match=f"^{what}"):
            check_result(spoiled, expected, "auto", True)
    with pytest.raises(Wrong, match="form"):
        check_result(expected.values, expected, "sparse", True)


def test_patterns_are_compared() -> None:
    pattern = torch.tensor([[True, False], [False, True]])
    eye = torch.eye(2, dtype=F64)
    expected = Expected(eye, eye, F64, 1e-13, pattern=pattern)
    check_result(stc.SparseTensor([[0, 1], [0, 1]], torch.ones(2, dtype=F64), (2, 2)), expected, "auto", True)
    for coords in ([[0, 1, 1], [0, 0, 1]], [[1, 0], [1, 0]], [[0, 1, 1], [0, 1, 1]]):
        values = torch.tensor([1.0, 1.0, 0.0] if len(coords[0]) == 3 else [1.0, 1.0], dtype=F64)
        if coords == [[0, 1, 1], [0, 0, 1]]:
            values = torch.tensor([1.0, 0.0, 1.0], dtype=F64)
        with pytest.raises(Wrong, match="pattern"):
            check_result(stc.SparseTensor(coords, values, (2, 2), coalesce=False), expected, "auto", True)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"])
def test_tolerances_are_of_the_dtypes_rounding(dtype: str) -> None:
    """Two roundings of the terms are no fault; a thousand are, and of 16 bits, which are rounded once, eight."""
    eps = torch.finfo(getattr(torch, dtype)).eps
    ones = torch.ones(3, dtype=F64)
    expected = Expected(ones, ones, getattr(torch, dtype), tolerance(dtype, "highest"))
    check_values(ones + 2 * eps, expected)
    with pytest.raises(Wrong, match="3 of 3 elements are wrong"):
        check_values(ones + (8 if "16" in dtype else 1000) * eps, expected)
    kept = dtype not in ("float32", "complex64")
    assert (tolerance(dtype, "high") == tolerance(dtype, "highest")) == kept
    for precision, bits in (("high", 10), ("medium", 7)):  # of tf32 and bfloat16
        assert 2 < tolerance("float32", precision) * 2**bits < 5


def test_values_that_are_not_finite_must_be_where_they_are_expected() -> None:
    wanted = torch.tensor([1.0, torch.inf, torch.nan], dtype=F64)
    magnitude = torch.ones(3, dtype=F64)
    expected = Expected(wanted, magnitude, F64, 1e-13, nan=torch.tensor([False, False, True]))
    check_values(wanted, expected)
    for wrong in ([1.0, -torch.inf, torch.nan], [1.0, torch.inf, torch.inf], [torch.nan, torch.inf, torch.nan]):
        with pytest.raises(Wrong):
            check_values(torch.tensor(wrong, dtype=F64), expected)


@pytest.mark.parametrize(
    ("dtype", "precision", "right", "wrong"),
    [
        *(("float64", "highest", 1e-15, 1e-12), ("complex128", "highest", 1e-15, 1e-12)),
        *(("float32", "highest", 1e-6, 1e-4), ("complex64", "highest", 1e-6, 1e-4)),
        *(("float32", "high", 1e-3, 1e-2), ("complex64", "medium", 1e-2, 1e-1), ("float64", "medium", 1e-15, 1e-12)),
        *(("float16", "highest", 1e-3, 1e-2), ("bfloat16", "highest", 1e-2, 1e-1), ("int64", "highest", 0.0, 1e-12)),
    ],
)
def test_errors_far_above_rounding_are_wrong(dtype: str, precision: str, right: float, wrong: float) -> None:
    wanted = torch.tensor([3.0, -0.5], dtype=F64)
    magnitude = torch.tensor([3.0, 8.0], dtype=F64)
    expected = Expected(wanted, magnitude, F64, tolerance(dtype, precision))
    check_values(wanted + right * magnitude, expected)
    for element in torch.eye(2, dtype=F64):
        with pytest.raises(Wrong, match="1 of 2 elements are wrong"):
            check_values(wanted + wrong * magnitude * element, expected)


def test_a_case_that_hangs_is_ended() -> None:
    with pytest.raises(Hang), time_limit(0.05):
        time.sleep(10)


def test_an_operand_that_is_changed_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(case: Case, space: dict[str, Any]) -> Any:
        space["a"].add_(1)
        return torch.zeros(3, 2, dtype=F64)

    monkeypatch.setattr(checking, "run_call", careless)
    with pytest.raises(Wrong, match="changed by the call"):
        check(a_case())


def test_the_command_line_counts_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "einsums", "--cases", "2", "--minutes", "1", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert "einsums: 2 cases, 0 findings" in said


def test_the_command_line_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fuzz", "tensors"])
    assert "kinds are einsums, gradients, contractions, readers; found tensors" in capsys.readouterr().err
