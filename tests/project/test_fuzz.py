"""A short run of what finds faults, and that it finds them: its reference, comparison, strategies and script."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from fuzz import check as checking
from fuzz.calls import Built, operand_lines, program, tensors
from fuzz.case import CIRCUMSTANCES, MEMORY, SPARSE, Case, Operand
from fuzz.check import (
    Expected,
    Wrong,
    check,
    check_result,
    check_values,
    expectations,
    terms_of,
    tolerance,
    wide_leaves,
)
from fuzz.run import KINDS, ROUND, sweep
from fuzz.strategies import cases
from hypothesis import Phase, given, seed, settings
from reference import Term, evaluate

import sparsetc as stc
import sparsetc.io as sio
from sparsetc.io import foreign, lines
from sparsetc.planner.registry import PLANS

F64 = torch.float64
RUN = Path(__file__).parents[1] / "fuzz" / "run.py"

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.mark.parametrize(
    ("kind", "number", "examples"),
    [("einsums", 0, 80), ("einsums", 1, 80), ("gradients", 0, 40), ("contractions", 0, 60), ("files", 0, 60)],
)
def test_any_case_agrees_with_its_reference(kind: str, number: int, examples: int) -> None:
    tally = sweep(kind, number, examples)
    assert sum(tally.values()) >= examples
    assert tally["checked"] > examples // (4 if kind == "files" else 2)


# --- the strategies ---------------------------------------------------------------------------------------------------


def drawn(kind: str, examples: int) -> list[Case]:
    """Cases that are not run."""
    found = []

    @settings(max_examples=ROUND, database=None, phases=[Phase.generate])
    @given(cases(kind))
    def draw(case: Case) -> None:
        found.append(case)

    for n in range(examples // ROUND):
        seed(n)(draw)()
    return found


def test_everything_is_drawn() -> None:
    found = [case for kind in KINDS[:3] for case in drawn(kind, 300)]
    operands = [o for c in found for o in c.operands]
    assert {c for case in found for c in case.letters} == set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert {len(o.letters) for o in operands if o.sparse} == set(range(1, 9))
    assert {o.memory for o in operands} == set(MEMORY)
    assert {o.form for o in operands if o.sparse} == set(SPARSE)
    assert {c.circumstance for c in found} == set(CIRCUMSTANCES)
    assert {c.notation for c in found} == {"plain", "implicit", "spaced", "list", "sublists"}
    plans = {c.plan.split("(")[0] for c in found}
    assert plans >= {
        "auto",
        *PLANS,
        "stc.plans.Plan",
        "stc.plans.plan_hls",
        "stc.plans.plan_window",
        "stc.plans.plan_1sa",
    }
    assert plans >= {"scalar", "dense", "bcb", "bcb+scalar", "stc.plans.plan_bcb"}
    assert {c.form for c in found} == {"auto", "sparse", "dense"}
    assert {c.precision for c in found} == {"", "highest", "high", "medium"}
    for some in (
        *(any(c.ellipsis for c in found), any(c.second for c in found), any(c.memory_limit for c in found)),
        *(any(c.deterministic for c in found), any(o.dtype for o in operands), any(o.duplicates for o in operands)),
        *(
            any(o.values[2] for o in operands),
            any(0 in o.shape for o in operands),
            any(o.dense_modes for o in operands),
        ),
        *(any(o.same_as is not None for o in operands), any(max(o.shape, default=0) >= 2**40 for o in operands)),
    ):
        assert some


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_program_makes_the_same_operands(kind: str) -> None:
    for case in drawn(kind, 40):
        text = program(case)
        compile(text, "program", "exec")
        built, space = Built(case), dict[str, Any]()
        operands = "\n".join(operand_lines(case))
        exec(text[: text.index(operands)] + operands, space)
        for name in (*tensors(case), *case.names):
            a, b = (s[name] for s in (built.space, space))
            if isinstance(a, stc.SparseTensor):
                assert torch.equal(a.coords, b.coords)
                a, b = a.values, b.values
            if isinstance(a, torch.Tensor) and a.layout == torch.strided:
                torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=0, equal_nan=True)
                assert (a.is_contiguous(), a.is_conj(), a.is_neg()) == (b.is_contiguous(), b.is_conj(), b.is_neg())


# --- the reference ----------------------------------------------------------------------------------------------------


def densified(term: Term, sizes: dict[str, int]) -> torch.Tensor:
    """An operand as a dense tensor of full sizes, by torch alone."""
    shape = [sizes[c] for c in term.letters]
    if term.coords is None:
        return term.values.expand(shape)
    return torch.zeros(shape, dtype=term.values.dtype).index_put(tuple(term.coords), term.values, accumulate=True)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_reference_is_the_einsum_of_dense_tensors(kind: str) -> None:
    for case in drawn(kind, 100):
        case = replace(case, operands=tuple(replace(o, values=(*o.values[:2], 0)) for o in case.operands))
        sizes = case.sizes
        if prod(sizes.values()) > 10**7 or len(case.letters) > 26:
            continue
        built = Built(case)
        terms = terms_of(built, [leaf.detach() for leaf in wide_leaves(built)])
        equation = ",".join(o.letters for o in case.operands) + "->" + case.output
        expected = torch.einsum(equation, [densified(t, sizes) for t in terms])
        torch.testing.assert_close(evaluate(terms, case.output, sizes), expected, rtol=1e-9, atol=1e-9)


def test_only_touched_elements_are_read() -> None:
    coords = torch.tensor([[0, 2], [1, 1]])
    x = Term("ij", torch.tensor([1.0, 2.0], dtype=F64), coords)
    b = torch.full((3,), torch.nan, dtype=F64)
    b[1] = torch.inf
    found = evaluate([x, Term("j", b)], "i", {"i": 3, "j": 3})
    assert found.tolist() == [torch.inf, 0.0, torch.inf]


# --- the comparison ---------------------------------------------------------------------------------------------------


def a_case(**changes: Any) -> Case:
    x = Operand("ij", (3, 4), ("uniform", 1, 0), ((0, 1), (2, 3), (1, 1)))
    return replace(Case("einsums", (x, Operand("jr", (4, 2), ("uniform", 2, 0))), "ir", "float64", "coo"), **changes)


def test_what_is_wrong_is_said() -> None:
    (expected,) = expectations(Built(a_case()))
    check_result(expected.values.clone(), expected, "auto", True)
    for spoiled, what in (
        (expected.values + 1e-9, "values"),
        (expected.values.float(), "the result has dtype"),
        (expected.values.T.contiguous(), "the result has dtype and shape"),
        (expected.values * torch.nan, "values"),
    ):
        with pytest.raises(Wrong, match=f"^{what}"):
            check_result(spoiled, expected, "auto", True)
    with pytest.raises(Wrong, match="form"):
        check_result(expected.values, expected, "sparse", True)
    with pytest.raises(Wrong, match="cannot hold"):
        check_result(expected.values, expected._replace(fits=False), "auto", True)


def test_patterns_are_compared() -> None:
    eye = torch.eye(2, dtype=F64)
    expected = Expected(eye, 1e-13 * eye, F64, pattern=eye > 0)
    check_result(stc.SparseTensor([[0, 1], [0, 1]], torch.ones(2, dtype=F64), (2, 2)), expected, "auto", True)
    for coords, values in (
        ([[0, 1, 1], [0, 0, 1]], [1.0, 0.0, 1.0]),
        ([[1, 0], [1, 0]], [1.0, 1.0]),
        ([[0, 1, 1], [0, 1, 1]], [1.0, 1.0, 0.0]),
    ):
        found = stc.SparseTensor(coords, torch.tensor(values, dtype=F64), (2, 2), coalesce=False)
        with pytest.raises(Wrong, match="pattern"):
            check_result(found, expected, "auto", True)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"])
def test_tolerances_are_of_the_dtypes_rounding(dtype: str) -> None:
    """Two roundings of the terms are no fault; a thousand are, and of 16 bits, which are rounded once, eight."""
    kind, ones = getattr(torch, dtype), torch.ones(3, dtype=F64)
    eps = torch.finfo(kind).eps
    expected = Expected(ones, tolerance(kind, "highest") * ones, kind)
    check_values(ones + 2 * eps, expected)
    with pytest.raises(Wrong, match="3 of 3 elements are wrong"):
        check_values(ones + (8 if "16" in dtype else 1000) * eps, expected)
    kept = dtype not in ("float32", "complex64")
    assert (tolerance(kind, "high") == tolerance(kind, "highest")) == kept
    for precision, bits in (("high", 10), ("medium", 7)):  # of tf32 and bfloat16
        assert 2 < tolerance(torch.float32, precision) * 2**bits < 5


def test_values_that_are_not_finite_must_be_where_they_are_expected() -> None:
    wanted = torch.tensor([1.0, torch.inf, torch.nan], dtype=F64)
    expected = Expected(wanted, torch.full((3,), 1e-13, dtype=F64), F64, nan=torch.tensor([False, False, True]))
    check_values(wanted, expected)
    for wrong in ([1.0, -torch.inf, torch.nan], [1.0, torch.inf, torch.inf], [torch.nan, torch.inf, torch.nan]):
        with pytest.raises(Wrong):
            check_values(torch.tensor(wrong, dtype=F64), expected)


def test_operands_and_settings_that_are_changed_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(built: Built, space: dict[str, Any]) -> Any:
        space["a"].add_(1)
        return torch.zeros(3, 2, dtype=F64)

    def careless_too(built: Built, space: dict[str, Any]) -> Any:
        torch.set_float32_matmul_precision("medium")
        return torch.zeros(3, 2, dtype=F64)

    for call, what in ((careless, "changed by the call"), (careless_too, "settings")):
        monkeypatch.setattr(checking.Built, "call", call)
        with pytest.raises(Wrong, match=what):
            check(a_case())


# --- faults are found -------------------------------------------------------------------------------------------------


def test_a_fault_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: Case) -> str:
        if any(o.sparse and len(o.shape) > 1 and len(o.nonzeros or ()) > 3 for o in case.operands):
            raise Wrong("values")
        return "checked"

    monkeypatch.setattr(checking, "check", wrong)
    with pytest.raises(Wrong) as found:
        sweep("einsums", 0, 100)
    said = "\n".join(found.value.__notes__)
    assert "reproduce_failure" in said
    assert "plan='auto'" in said
    assert "circumstance='plain'" in said
    assert re.search(r"x_values = torch.tensor\(\[(1\.0, ){3,5}1\.0\], dtype=torch.float32\)", said)
    assert re.search(r"x = stc.SparseTensor\(x_coords, x_values, \(\d, \d\)\)\n", said)


def test_a_fault_of_values_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = stc.einsum
    monkeypatch.setattr(stc, "einsum", lambda *args, **options: right(*args, **options) * (1 + ("plan" in options)))
    with pytest.raises((Wrong, Exception), match=r"values|failures"):
        sweep("einsums", 0, 100, phases=[Phase.generate])


def test_a_reader_that_breaks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setitem(foreign.WHOLE, ".npz", broken)
    with pytest.raises(IndexError) as found:
        sweep("files", 0, 100)
    said = next(note for note in found.value.__notes__ if note.startswith("import pathlib"))
    with pytest.raises(IndexError):
        exec(said, {})


@pytest.mark.parametrize("when", ["never", "always", "in small blocks"])
def test_wrong_values_and_blocks_that_matter_are_found(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sio.read

    def wrong(path: Path, **options: Any) -> object:
        x = right(path, **options)
        fails = when == "always" or (when == "in small blocks" and lines.BLOCK < 1000)
        return x.with_values(x.values + 1) if fails and x.dtype.is_floating_point else x

    monkeypatch.setattr(stc, "read", wrong)
    if when == "never":
        sweep("files", 0, 50)
        return
    with pytest.raises((Wrong, Exception)) as found:
        sweep("files", 0, 200)
    errors = "\n".join(map(str, getattr(found.value, "exceptions", [found.value])))
    assert "is other than what was written" in errors or "blocks of" in errors


# --- the script -------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, str]:
    done = processes.run([RUN, *arguments])
    return done.returncode, done.stdout + done.stderr


def test_the_script_counts_cases(tmp_path: Path) -> None:
    status, said = run("einsums", "--examples", 10, "--seed", 3, "--database", tmp_path)
    assert (status, said.strip()) == (0, "einsums: 10 cases")


def test_a_case_that_takes_too_long_ends_its_process_and_is_shown(tmp_path: Path) -> None:
    status, said = run("contractions", "--limit", 0.001, "--database", tmp_path)
    assert status == 1
    assert "Timeout (0:00:00.001000)!" in said
    assert "or no end, in this case:\nimport copy, io, pickle" in said


def test_no_time_for_a_case_is_no_success(tmp_path: Path) -> None:
    status, said = run("einsums", "--minutes", 0, "--database", tmp_path)
    assert status == 1
    assert "no time for any case of einsums" in said


def test_the_script_refuses_kinds_that_it_does_not_know() -> None:
    status, said = run("tensors")
    assert status == 2
    assert "kinds are einsums, gradients, contractions, files; found tensors" in said
