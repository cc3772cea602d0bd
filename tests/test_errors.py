"""What is refused, by which class, in which words; and what is not refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Problem, assert_matches, explicit_plan, random_sparse, random_values

import sparsetc as stc
from sparsetc.support import entry

F64 = torch.float64


def x(dtype: torch.dtype = F64) -> stc.SparseTensor:
    return random_sparse((4, 5, 6), "random", dtype)


def dense(*shape: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return random_values(shape, dtype, 1)


@pytest.mark.parametrize(
    ("builtin", "kind"),
    [
        (ValueError, stc.EquationError),
        (ValueError, stc.ShapeError),
        (TypeError, stc.DtypeError),
        (TypeError, stc.KeywordError),
        (RuntimeError, stc.DeviceError),
        (ValueError, stc.FormatError),
        (IndexError, stc.CoordinateError),
        (ValueError, stc.PlanError),
        (ValueError, stc.DecompositionError),
        (MemoryError, stc.OutOfMemoryError),
        (ValueError, stc.IOFormatError),
    ],
)
def test_every_error_is_the_builtin_a_caller_would_expect(builtin: type[Exception], kind: type[Exception]) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, stc.SparsetcError)


# --- the equation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("equation", "operands", "kind", "message"),
    [
        ("ijk,jr->iz", [dense(5, 2)], stc.EquationError, "'z'"),
        ("ijk,jr->irr", [dense(5, 2)], stc.EquationError, "'r'"),
        ("ijk,jr,kr->ir", [dense(5, 2)], stc.EquationError, "2 operands|3 terms"),
        ("ijk->i", [dense(5, 2)], stc.EquationError, "operand"),
        ("ij,jr->ir", [dense(5, 2)], stc.EquationError, "dimension"),
        ("ijk,jr->ir", [dense(5)], stc.EquationError, "dimension"),
        ("ijk,j1->i", [dense(5, 2)], stc.EquationError, "1"),
        ("ijk,jr=>ir", [dense(5, 2)], stc.EquationError, "="),
        ("ijk,jr->ir->i", [dense(5, 2)], stc.EquationError, "->"),
        ("ijk,jr->ir", [dense(7, 2)], stc.ShapeError, "size 7 at index 'j'; expected 5"),
        ("ijk,jr,kr->ir", [dense(5, 2), dense(6, 3)], stc.ShapeError, "size 3 at index 'r'; expected 2"),
        ("iik->k", [], stc.ShapeError, "size 5 at index 'i'; expected 4"),
    ],
)
def test_equations_that_do_not_fit(
    equation: str, operands: list[torch.Tensor], kind: type[stc.SparsetcError], message: str
) -> None:
    for call in (stc.einsum, stc.compile, stc.explain):
        with pytest.raises(kind, match=f"(?s){message}") as caught:
            call(equation, x(), *operands)
        assert equation in str(caught.value)
        assert "^" in str(caught.value)


def test_no_sparse_operand() -> None:
    with pytest.raises(stc.EquationError, match=r'"ij,jr->ir" has no sparse operand: use torch\.einsum'):
        stc.einsum("ij,jr->ir", dense(4, 5), dense(5, 2))


def test_an_operand_that_is_no_tensor() -> None:
    with pytest.raises(stc.DtypeError, match=r"operand 2 must be a torch tensor or sparse, found list"):
        stc.einsum("ijk,j->i", x(), [1.0] * 5)


def test_nothing_at_all() -> None:
    with pytest.raises(stc.EquationError, match="given nothing"):
        stc.einsum()


# --- types, devices, coordinates --------------------------------------------------------------------------------------


def test_dtypes_are_not_mixed() -> None:
    message = r"operand 2 has dtype torch\.float32, the sparse operand has torch\.float64; convert one of them: \.to"
    with pytest.raises(stc.DtypeError, match=message):
        stc.einsum("ijk,jr->ir", x(), dense(5, 2, dtype=torch.float32))


def test_operands_on_another_device() -> None:
    with pytest.raises(stc.DeviceError, match=r"operand 2 is on meta, the sparse operand is on cpu; move one"):
        stc.einsum("ijk,jr->ir", x(), dense(5, 2).to("meta"))


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_a_coordinate_out_of_range(bad: int) -> None:
    with pytest.raises(stc.CoordinateError, match=rf"mode 0: nonzero 1 has {bad}, but the size of mode 0 is 4"):
        stc.SparseTensor([[0, bad], [1, 2]], [1.0, 2.0], (4, 5))


@pytest.mark.parametrize("plan", ["coo", "fiber", "rows"])
def test_nan_and_infinity_are_values(plan: str) -> None:
    y = stc.SparseTensor([[0, 1, 2], [1, 1, 2]], [float("nan"), float("inf"), 1.0], (4, 5))
    b = torch.ones(5, 2)
    result = stc.einsum("ij,jr->ir", y, b, plan=plan)
    assert bool(result[0].isnan().all())
    assert bool(result[1].isinf().all())
    assert result[2].tolist() == [1.0, 1.0]
    assert result[3].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("output", ["dense", "sparse"])
def test_positions_of_tiles_without_a_nonzero_read_nothing(bad: float, output: str) -> None:
    coords = [[0, 0, 1, 17], [1, 2, 1, 30], [0, 5, 5, 9]]
    x = stc.SparseTensor(coords, [1.0, 2.0, 3.0, 4.0], (20, 33, 12))
    b, c = torch.rand(33, 3) + 1, torch.rand(12, 3) + 1
    kernel = stc.compile("ijk,jr,kr->ir", x, b, c, plan=stc.plans.plan_hls(1), output=output)
    # what holds the odd element, its row there, and the rows of the result that have a nonzero at it
    for operand, row, reached in (("b", 3, []), ("b", 30, [17]), ("b", 2, [0]), ("c", 5, [0, 1]), ("c", 3, [])):
        dense = {"b": b.clone(), "c": c.clone()}
        dense[operand][row] = bad
        found = kernel(*dense.values())
        expected = stc.einsum("ijk,jr,kr->ir", x, *dense.values(), plan="coo", output=output)
        rows = [t.to_dense() if isinstance(t, stc.SparseTensor) else t for t in (found, expected)]
        torch.testing.assert_close(*rows, equal_nan=True)
        assert torch.nonzero(~rows[0].isfinite().all(1)).flatten().tolist() == reached


def test_nan_in_a_dense_operand_reaches_only_what_reads_it() -> None:
    y = stc.SparseTensor([[0, 1], [1, 2]], [1.0, 1.0], (3, 4))
    b = torch.ones(4, 2)
    b[2] = float("nan")
    result = stc.einsum("ij,jr->ir", y, b)
    assert result.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk->", "ijk,ir->jkr", "ijk,ir,jr,kr->ijk", "ijk,i->jk"])
def test_an_empty_tensor_gives_zeros(equation: str, poisoned: None) -> None:
    sizes = {"i": 4, "j": 5, "k": 6, "r": 2}
    operands = Problem(equation, sizes, "empty", F64).operands()
    for plan in ("auto", "coo", "fiber"):
        assert_matches(stc.einsum(equation, *operands, plan=plan), equation, operands)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_an_unknown_plan_lists_the_known_ones() -> None:
    with pytest.raises(stc.PlanError, match=r"no plan is called 'csf5'; known: auto, .*coo.*fiber.*rows"):
        stc.einsum("ijk->i", x(), plan="csf5")


def test_a_plan_of_the_wrong_type() -> None:
    with pytest.raises(stc.PlanError, match="plan must be a name or a Plan, found int"):
        stc.einsum("ijk->i", x(), plan=3)


@pytest.mark.parametrize("equation", ["ijk->", "ijk->kij"])
def test_a_plan_that_does_not_apply(equation: str) -> None:
    with pytest.raises(stc.PlanError, match='plan "rows" needs an output with some, not all'):
        stc.einsum(equation, x(), plan="rows")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (stc.plans.Plan("none", ()), "'none' has no parts"),
        (explicit_plan("coo", "0||1", {}), "has 2 modes, the tensor 3"),
        (explicit_plan("coo", "0||11", {}), "each mode must be at one level"),
        (explicit_plan("csr5", "0||12", {}), "plan 'explicit', part 0: no format is called 'csr5'"),
        (explicit_plan("coo", "0|1|2", {}), "no lanes that share modes"),
        (explicit_plan("coo", "0||12", {}, lanes=3), "power of two"),
        (explicit_plan("coo", "0||12", {"r": 3}), "power of two"),
        (explicit_plan("coo", "0||12", {"r": 4}, precision="fp8"), "'fp8' is not one of"),
        (explicit_plan("coo", "0||12", {}), r"'explicit', part 0 \(coo\), of \"ijk,jr->ir\": .* no block for axis 'r'"),
    ],
)
def test_a_plan_that_makes_no_sense(plan: stc.plans.Plan, message: str) -> None:
    with pytest.raises((stc.PlanError, stc.FormatError), match=message):
        stc.einsum("ijk,jr->ir", x(), dense(5, 2), plan=plan, backend="torch")


def test_parts_that_the_partition_does_not_deal() -> None:
    one = explicit_plan("coo", "0||12", {"r": 2}, lanes=1)
    with pytest.raises(stc.PlanError, match=r"no partition is called 'halves'; known: .*run_length"):
        stc.einsum("ijk,jr->ir", x(), dense(5, 2), plan=stc.plans.Plan("two", one.parts * 2, True, "halves"))
    with pytest.raises(stc.PlanError, match="plan 'two' has 2 parts, its partition makes 1"):
        stc.einsum("ijk,jr->ir", x(), dense(5, 2), plan=stc.plans.Plan("two", one.parts * 2))


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"output": "csr"}, stc.PlanError, 'output must be "auto", "dense" or "sparse", found \'csr\''),
        ({"precision": "best"}, stc.DtypeError, "precision must be one of highest, high, medium, found 'best'"),
        ({"backend": "cuda"}, stc.PlanError, "backend must be one of"),
        ({"deterministic": "no"}, stc.PlanError, "deterministic must be True or False, found .no."),
        (
            {"plans": "coo"},
            stc.KeywordError,
            r"einsum takes no plans \(did you mean plan\?\); arguments are output, drop_ze",
        ),
        ({"max_n": 1, "plans": 2}, TypeError, "einsum takes no max_n, plans"),
    ],
)
def test_unknown_settings(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        stc.einsum("ijk->i", x(), **settings)


@pytest.mark.parametrize("device", ["", "bad", (0, 0), 1.5])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(stc.DeviceError, match="device must be one of torch's, found"), stc.options(device=device):
        pass


MATRIX, WIDE = stc.SparseTensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2)), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stc.decomposition.cp_als(MATRIX, 1, maxiters=9), "cp_als has no maxiters=; here it is n_iter_max"),
        (lambda: stc.decomposition.tucker(MATRIX, 1, iters=9), "tucker takes no iters (did you mean n_iter_max?); "),
        (
            lambda: stc.spmm(MATRIX, WIDE, dropzeros=True),
            "arguments are a, b, output, drop_zeros, reduce; options are precision",
        ),
        (lambda: stc.stream("ij,jr->ir", MATRIX, WIDE, chunk=9), "stream takes no chunk (did you mean chunk_bytes?); "),
        (
            lambda: stc.explain("ij,jr->ir", MATRIX, WIDE, foo=9),
            "explain takes no foo; arguments are symbolic, output, drop_zeros",
        ),
        (
            lambda: stc.explain("ij,jr->ir", MATRIX, WIDE, reduce="mean"),
            "explain takes no reduce; einsum and spmm take reduce=, which has no plan; arguments",
        ),
        (lambda: stc.options(memory=9).__enter__(), "there is no option memory (did you mean memory_limit?); options"),
    ],
)
def test_an_unknown_keyword_hears_of_the_nearest(call: Callable[[], object], message: str) -> None:
    with pytest.raises(stc.KeywordError, match=re.escape(message)):
        call()


def test_a_sparse_output_needs_a_mode_of_the_sparse_operand() -> None:
    with pytest.raises(stc.PlanError, match=r'keeps no mode of the sparse operand.*output="dense"'):
        stc.einsum("ijk,jr->r", x(), dense(5, 2), output="sparse")


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_result_above_the_limit_is_refused_with_its_size() -> None:
    with pytest.raises(stc.OutOfMemoryError, match=r"would take 64 bytes, the limit on cpu is 63; raise it with"):
        stc.einsum("ijk,jr->ir", x(), dense(5, 2), memory_limit=63)
    assert stc.einsum("ijk,jr->ir", x(), dense(5, 2), memory_limit=64).shape == (4, 2)


def test_a_result_that_no_machine_holds_is_refused_before_it_is_allocated() -> None:
    y = stc.SparseTensor([[5], [7]], [1.0], (2**40, 2**40))
    with pytest.raises(stc.OutOfMemoryError, match=f"{4 * 2**80:,} bytes"):
        stc.einsum("ij->ij", y, output="dense")
    assert stc.einsum("ij->ij", y).nnz == 1, "sparse, it is small"
    with pytest.raises(stc.OutOfMemoryError), stc.options(memory_limit=1000):
        stc.compile("ij->i", y)


def test_to_dense_refuses_too() -> None:
    y = stc.SparseTensor([[5], [7]], [1.0], (2**40, 2**40))
    with pytest.raises(stc.OutOfMemoryError, match=r"a dense tensor of shape .* would take .* the limit on cpu is"):
        y.to_dense()


# --- calls of a kernel ------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel() -> stc.Kernel:
    return stc.compile("ijk,jr,kr->ir", x(), dense(5, 2), dense(6, 2))


def test_the_wrong_number_of_operands(kernel: stc.Kernel) -> None:
    with pytest.raises(stc.ShapeError, match='"ijk,jr,kr->ir" takes 2 dense operands, found 1'):
        kernel(dense(5, 2))


@pytest.mark.parametrize("shape", [(5, 3), (4, 2), (2, 5), (5,), (5, 2, 1)])
def test_the_wrong_shape(kernel: stc.Kernel, shape: tuple[int, ...]) -> None:
    with pytest.raises(stc.ShapeError, match=r"operand 2 .*compiled for shape \(5, 2\), found .*compile again"):
        kernel(dense(*shape), dense(6, 2))


def test_the_wrong_dtype_device_and_type(kernel: stc.Kernel) -> None:
    with pytest.raises(stc.DtypeError, match=r"operand 3 has dtype torch\.float16"):
        kernel(dense(5, 2), dense(6, 2).half())
    with pytest.raises(stc.DeviceError, match="operand 3 is on meta"):
        kernel(dense(5, 2), dense(6, 2).to("meta"))
    with pytest.raises(stc.DtypeError, match="operand 2 must be a torch tensor, found list"):
        kernel([1.0], dense(6, 2))


def test_other_values_must_fit(kernel: stc.Kernel) -> None:
    nnz = kernel.nnz
    with pytest.raises(stc.ShapeError, match=rf"values must have shape \({nnz},\), found \({nnz + 1},\)"):
        kernel.with_values(dense(nnz + 1))
    with pytest.raises(stc.ShapeError, match="found list"):
        kernel.with_values([1.0] * nnz)  # type: ignore[arg-type]
    with pytest.raises(stc.DtypeError, match=r"values must be torch\.float64 on cpu, found torch\.float32 on cpu"):
        kernel.with_values(dense(nnz, dtype=torch.float32))
    with pytest.raises(stc.DtypeError, match=r"found torch\.float64 on meta"):
        kernel.with_values(dense(nnz).to("meta"))


def test_what_a_message_quotes_is_no_command_of_a_terminal() -> None:
    for kind in (stc.SparsetcError, stc.IOFormatError, stc.CoordinateError, stc.OutOfMemoryError):
        assert str(kind("a\x1b]0;b\x07 \u202ec\r\n  ^ é")) == "a\\x1b]0;b\\x07 \\u202ec\\r\n  ^ é"
    with pytest.raises(stc.EquationError) as refused:
        stc.einsum("ij,j->\x1b[2J", stc.eye(3), torch.ones(3))
    assert str(refused.value).replace("\n", "").isprintable()
    with pytest.warns(UserWarning, match=r"sparsetc: a\\x1b"):
        entry.warn("a\x1b")
