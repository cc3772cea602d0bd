"""A compiled einsum: what it keeps, when it compiles again, what it allocates, and what it tells."""

from __future__ import annotations

import json
import math
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from cases import OPERATIONS, Problem, assert_matches, check, explicit_plan, random_sparse, random_values, two_parts

import sparsetc as stc
from sparsetc.codegen import cache, parts
from sparsetc.contraction import contraction
from sparsetc.options import current
from sparsetc.support import entry

MTTKRP = "ijk,jr,kr->ir"


@pytest.fixture
def operands() -> list[Any]:
    return Problem(MTTKRP, dtype=torch.float64).operands()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The equation of every kernel that is made."""
    made: list[str] = []
    original = contraction.parsed

    def build(text: str, *args: Any, **settings: Any) -> Any:
        made.append(text)
        return original(text, *args, **settings)

    monkeypatch.setattr(contraction, "parsed", build)
    return made


@pytest.mark.parametrize("small", [True, False])
def test_a_small_program_runs_on_one_thread(operands: list[Any], small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Threads(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "index_select" in str(function):
                seen.add(torch.get_num_threads())
            return function(*args, **(kwargs or {}))

    seen: set[int] = set()
    if not small:
        monkeypatch.setattr(parts, "FEW", 0)
    torch.set_num_threads(2)
    kernel = stc.compile(MTTKRP, *operands, backend="torch")
    with Threads():
        kernel(*operands[1:])
    assert seen == {1 if small else 2}
    assert torch.get_num_threads() == 2


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["coo", "fiber", "rows"])
def test_with_values(operands: list[Any], plan: str) -> None:
    x, b, c = operands
    kernel = stc.compile(MTTKRP, *operands, plan=plan)
    values = random_values((x.nnz,), torch.float64, 8)
    other = kernel.with_values(values)
    assert other.path == kernel.path
    assert other.operand.values is values
    assert kernel.operand is x
    assert_matches(other(b, c), MTTKRP, [x.with_values(values), b, c])
    assert_matches(kernel(b, c), MTTKRP, operands)


@pytest.mark.parametrize("plan", ["coo", "fiber", "rows"])
def test_values_changed_in_place_are_noticed(operands: list[Any], plan: str) -> None:
    x, b, c = operands
    kernel = stc.compile(MTTKRP, *operands, plan=plan)
    kernel(b, c)
    x.values.mul_(-2)
    assert_matches(kernel(b, c), MTTKRP, operands)
    assert_matches(stc.einsum(MTTKRP, *operands, plan=plan), MTTKRP, operands)
    other = kernel.with_values(x.values.clone())
    other.operand.values.add_(1)
    assert_matches(other(b, c), MTTKRP, [x.with_values(x.values + 1), b, c])


# --- when it compiles -------------------------------------------------------------------------------------------------


def test_einsum_compiles_an_equation_once(operands: list[Any], built: list[str]) -> None:
    x, b, c = operands
    for _ in range(3):
        assert_matches(stc.einsum(MTTKRP, *operands), MTTKRP, operands)
    assert built == [MTTKRP]
    again = [x.with_values(x.values + 1), b + 1, c - 1]
    assert_matches(stc.einsum(MTTKRP, *again), MTTKRP, again)
    assert len(built) == 1, "new values and new factors need no new kernel"


@pytest.mark.parametrize("change", ["rank", "plan", "precision", "output", "deterministic"])
def test_einsum_compiles_again_for_what_matters(operands: list[Any], built: list[str], change: str) -> None:
    x, b, c = operands
    stc.einsum(MTTKRP, x, b, c)
    if change == "rank":
        stc.einsum(MTTKRP, x, b[:, :2], c[:, :2])
    else:
        value = {"plan": "coo", "precision": "high", "output": "sparse", "deterministic": True}[change]
        stc.einsum(MTTKRP, x, b, c, **{change: value})
    assert len(built) == 2


def test_kernels_kept_with_a_tensor_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsetc.tensor.pattern.KEPT", 3)
    x = random_sparse((4, 5), "random", torch.float64)
    for rank in range(1, 7):
        stc.einsum("ij,jr->ir", x, torch.ones(5, rank, dtype=torch.float64))
    assert len(x.pattern.cache) == 3


def test_tensors_of_one_pattern_share_what_is_packed(operands: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x, b, c = operands
    stc.compile(MTTKRP, x, b, c, plan="fiber")
    monkeypatch.setattr("sparsetc.packing.partition.pack", lambda *a: pytest.fail("it was packed again"))
    stc.compile(MTTKRP, x.with_values(x.values * 2), b, c, plan="fiber")
    stc.compile(MTTKRP, x.to(torch.float32), b.float(), c.float(), plan="fiber")


def test_equal_einsums_of_two_tensors_share_one_file(operands: list[Any]) -> None:
    first = stc.compile(MTTKRP, *operands, plan="coo")
    other = Problem(MTTKRP, dtype=torch.float64, seed=5).operands()
    second = stc.compile(MTTKRP, *other, plan="coo")
    assert first.path == second.path
    assert_matches(second(*other[1:]), MTTKRP, other)
    assert_matches(first(*operands[1:]), MTTKRP, operands)


def test_a_plan_that_cannot_be_hashed_is_compiled_each_time(operands: list[Any], built: list[str]) -> None:
    plan = explicit_plan("coo", "0||12", {"r": 8}, lanes=1)
    listed = stc.plans.Plan(plan.name, list(plan.parts))  # type: ignore[arg-type]
    for _ in range(2):
        assert_matches(stc.einsum(MTTKRP, *operands, plan=listed), MTTKRP, operands)
    assert len(built) == 2


# --- what a call takes and allocates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mttkrp-3-0", "ttmc-3-1", "spmm", "sampled", "semi-sparse", "shared-table"])
def test_operands_of_any_memory_order(name: str) -> None:
    problem = Problem(OPERATIONS[name], dtype=torch.float64)
    operands = problem.operands()
    kernel = stc.compile(problem.equation, *operands)
    for other in (lambda d: d.mT.contiguous().mT, lambda d: d.repeat_interleave(2, -1)[..., ::2], lambda d: d.flip(0)):
        dense = [other(d) for d in operands[1:]]
        assert_matches(kernel(*dense), problem.equation, [operands[0], *dense])


def test_operands_in_channels_last() -> None:
    x = random_sparse((3, 4), "random", torch.float64)
    t = random_values((4, 2, 3, 2), torch.float64, 1).contiguous(memory_format=torch.channels_last)
    assert_matches(stc.einsum("ij,jrst->irst", x, t), "ij,jrst->irst", [x, t])


def test_a_kernel_takes_operands_that_broadcast(operands: list[Any]) -> None:
    x, b, c = operands
    kernel = stc.compile(MTTKRP, *operands)
    for dense in ((b[:1], c), (b, c[:, :1]), (b[:1, :1], c), (b[:1].expand_as(b), c)):
        assert_matches(kernel(*dense), MTTKRP, [x, *dense])


def test_operands_are_left_as_they_were(operands: list[Any]) -> None:
    before = [operands[0].values.clone(), *(d.clone() for d in operands[1:])]
    stc.einsum(MTTKRP, *operands)
    after = [operands[0].values, *operands[1:]]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("name", ["mttkrp-3-0", "ttmc-3-0", "sampled", "ttv-0", "semi-sparse", "reduction"])
def test_a_call_allocates_its_result_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernel itself: the launch, which on a GPU allocates nothing, is left out."""
    problem = Problem(OPERATIONS[name], dtype=torch.float64)
    operands = problem.operands()
    kernel = stc.compile(problem.equation, *operands)
    run, arrays = kernel.step.executable, kernel.step.arrays
    *_, device = run.bind(arrays, (), operands[1:])
    monkeypatch.setattr(run, "_bound", (arrays, lambda values, tables, out: None, device))
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        made: list[int] = []  # noqa: RUF012

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            own = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in own:
                self.made.append(result.numel())
            return result

    with Watch() as watch:
        result = kernel(*operands[1:])
    count = result.values.numel() if isinstance(result, stc.SparseTensor) else result.numel()
    assert watch.made == [count]


@pytest.mark.parametrize("name", ["mttkrp-3-1", "ttmc-3-0", "reduction", "ttv-0", "sampled"])
def test_deterministic_results_have_the_same_bits(name: str) -> None:
    problem = Problem(OPERATIONS[name], {"i": 30, "j": 40, "k": 20, "r": 8, "s": 4})
    operands = problem.operands()
    kernel = stc.compile(problem.equation, *operands, deterministic=True)
    first = kernel(*operands[1:])
    for _ in range(3):
        again = stc.einsum(problem.equation, *operands, deterministic=True)
        pair = [r.values if isinstance(r, stc.SparseTensor) else r for r in (first, again)]
        assert torch.equal(*pair)


def test_kernels_may_be_called_from_threads(operands: list[Any]) -> None:
    kernel = stc.compile(MTTKRP, *operands)
    expected = kernel(*operands[1:])
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(kernel(*operands[1:]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(f, expected) for f in found)


# --- forms of operands and of results ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse.*beta state:UserWarning")
def test_sparse_operands_of_other_libraries() -> None:
    x = random_sparse((4, 6), "random", torch.float64)
    b = random_values((6, 3), torch.float64, 1)
    expected = x.to_dense() @ b
    forms: list[Any] = [x.to_torch(), *(x.to_torch(lay) for lay in (torch.sparse_csr, torch.sparse_csc))]
    forms += [x.to_torch(torch.sparse_bsr, (2, 2)), scipy.sparse.csr_matrix(x.to_scipy()), x.to_scipy(), x.to_pydata()]
    for form in forms:
        torch.testing.assert_close(stc.einsum("ij,jr->ir", form, b), expected)


def test_a_semi_sparse_operand_is_expanded() -> None:
    x = stc.SparseTensor([[0, 2], [1, 3]], random_values((2, 5), torch.float64, 1), (3, 4, 5))
    c = random_values((5, 2), torch.float64, 2)
    assert_matches(stc.einsum("ijk,kr->ijr", x, c), "ijk,kr->ijr", [x.expand_dense(), c])


def test_a_result_can_be_an_operand(operands: list[Any]) -> None:
    x, b, c = operands
    first = stc.einsum("ijk,jr,kr->ijr", x, b, c)
    assert isinstance(first, stc.SparseTensor)
    assert first.dense_order == 1
    second = stc.einsum("ijr,jr->ir", first, b)
    assert_matches(second, "ijk,jr,kr,jr->ir", [x, b, c, b])


@pytest.mark.parametrize(
    ("equation", "sparse"),
    [("ijk->", False), ("ijk->i", False), ("ijk->ij", True), ("ijk->kji", True), ("ijk,jr->jkr", True)],
)
def test_the_form_of_a_result(equation: str, sparse: bool) -> None:
    operands = Problem(equation, dtype=torch.float64).operands()
    assert isinstance(stc.einsum(equation, *operands), stc.SparseTensor) == sparse
    assert isinstance(stc.einsum(equation, *operands, output="dense"), torch.Tensor)


def test_a_sparse_result_lies_on_the_operand_s_pattern(operands: list[Any]) -> None:
    x, b, c = operands
    result = stc.einsum("ijk,jr,kr->ijk", x, b, c)
    assert isinstance(result, stc.SparseTensor)
    assert torch.equal(result.coords, x.coords)
    projected = stc.einsum("ijk->ik", x)
    assert isinstance(projected, stc.SparseTensor)
    assert projected.is_coalesced
    assert torch.equal(projected.coords, torch.unique(x.coords[[0, 2]], dim=1))


def test_the_three_ways_to_write_an_einsum(operands: list[Any]) -> None:
    x, b, c = operands
    expected = stc.einsum(MTTKRP, x, b, c)
    for args in ((MTTKRP, [x, b, c]), (" ijk , jr, kr -> ir ", x, b, c), (x, [0, 1, 2], b, [1, 3], c, [2, 3], [0, 3])):
        torch.testing.assert_close(stc.einsum(*args), expected)


# --- what it tells ----------------------------------------------------------------------------------------------------


def test_parts_tell_their_format_and_size(operands: list[Any]) -> None:
    kernel = stc.compile(MTTKRP, *operands, plan="fiber")
    (part,) = kernel.plan.parts
    assert part.format == "fiber"
    assert part.nnz == operands[0].nnz == kernel.nnz
    assert part.nbytes == kernel.step.parts[0].packed.nbytes + 8 * kernel.step.parts[0].packed.stored


def test_parts_add_up(operands: list[Any]) -> None:
    kernel = check(Problem(MTTKRP), plan=two_parts(MTTKRP, Problem(MTTKRP).operands(), "coo", True))
    assert len(kernel.plan.parts) == 2
    assert sum(p.nnz for p in kernel.plan.parts) == kernel.nnz
    assert kernel.plan.reason == "given by the caller"


def test_source_is_the_text_of_its_file(operands: list[Any], tmp_path: Path) -> None:
    kernel = stc.compile(MTTKRP, *operands, cache_dir=tmp_path)
    assert kernel.path.parent == tmp_path
    assert kernel.path.read_text(encoding="utf-8") == kernel.source
    assert MTTKRP in kernel.source
    assert kernel.equation == MTTKRP
    assert kernel.path.name in repr(kernel)


@pytest.mark.parametrize("name", ["mttkrp-3-0", "ttmc-3-0", "reduction", "ttv-0", "semi-sparse", "scalar", "sampled"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_explain(name: str, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    problem = Problem(OPERATIONS[name])
    explanation = stc.explain(problem.equation, *problem.operands(), backend=backend)
    data = json.loads(json.dumps(explanation.to_dict()))
    assert data["equation"] == problem.equation
    assert data["backend"] == backend
    assert sum(p["share"] for p in data["parts"]) == pytest.approx(1)
    assert all(p["predicted_us"] >= p["roofline_us"] > 0 for p in data["parts"])
    assert [s for _, s in data["considered"]] == sorted(s for _, s in data["considered"])
    text = str(explanation)
    for expected in (problem.equation, data["plan"], data["path"], "bound by", *(p["format"] for p in data["parts"])):
        assert expected in text


def test_explain_shows_the_innermost_einsum_of_a_tile() -> None:
    problem = Problem("ijk,jr,kr->ir")
    for plan, einsum in (("coo", "n,nr,nr->r"), ("fiber", "n,nr->nr")):
        (part,) = stc.explain(problem.equation, *problem.operands(), plan=plan, backend="torch").to_dict()["parts"]
        assert part["einsum"] == einsum


def test_explain_of_an_empty_tensor() -> None:
    operands = Problem(MTTKRP, pattern="empty").operands()
    assert json.dumps(stc.explain(MTTKRP, *operands).to_dict())
    assert "0 " in str(stc.explain(MTTKRP, *operands))


def test_tile_programs_print(operands: list[Any]) -> None:
    (program,) = stc.compile(MTTKRP, *operands, plan="coo").programs
    assert 'tile program  "ijk,jr,kr->ir"' in str(program)
    assert "gather" in str(program)


@pytest.mark.parametrize(("plan", "programs"), [("scalar", 1), ("bcb", 1), ("bcb+scalar", 2), ("dense", 0)], ids=str)
def test_programs_of_several_sparse_operands(plan: Any, programs: int) -> None:
    x, y = (random_sparse((20, 20), "random", torch.float32, seed) for seed in (1, 2))
    plan = stc.plans.plan_bcb(threshold=2, i=4, j=4, k=4) if plan == "bcb+scalar" else plan
    kernel = stc.compile("ij,jk->ik", x, y, plan=plan)
    assert len(kernel.programs) == programs
    assert kernel.step is kernel.steps[0]
    chain = stc.compile("ij,jk,kl->il", x, y, x)
    assert len(chain.programs) == sum(len(step.generated) for step in chain.steps) > 1
    with pytest.raises(stc.PlanError, match=r"takes 2 steps: see \.steps"):
        _ = chain.step


def test_the_lack_of_a_gpu_is_said_once(operands: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSETC_BACKEND", raising=False)  # native loops that were named are what runs on a CPU
    monkeypatch.setattr(entry, "_said", set())
    with pytest.warns(UserWarning, match="no GPU: running the generated torch programs"):
        stc.compile(MTTKRP, *operands)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stc.compile(MTTKRP, *operands)


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_hold_within_their_block(operands: list[Any], tmp_path: Path) -> None:
    before = current()
    with stc.options(plan="coo", cache_dir=tmp_path, deterministic=True) as outer:
        assert current() == outer
        kernel = stc.compile(MTTKRP, *operands)
        assert (kernel.plan.name, kernel.path.parent) == ("coo", tmp_path)
        with stc.options(plan="fiber"):
            assert stc.compile(MTTKRP, *operands).plan.name == "fiber"
            assert current().deterministic
        assert stc.compile(MTTKRP, *operands).plan.name == "coo"
        assert stc.compile(MTTKRP, *operands, plan="rows").plan.name == "rows", "an argument goes before an option"
    assert current() == before


def test_options_are_entered_again() -> None:
    before, chosen = current(), stc.options(plan="coo")
    with chosen, stc.options(plan="fiber"), chosen:
        assert current().plan == "coo"
    assert current() is before
    assert chosen(current)().plan == "coo"


def test_options_end_with_an_error() -> None:
    before = current()
    with pytest.raises(KeyError), stc.options(plan="coo"):
        raise KeyError
    assert current() == before


def test_options_of_one_thread_are_not_those_of_another() -> None:
    seen: list[Any] = []
    with stc.options(plan="coo"):
        thread = threading.Thread(target=lambda: seen.append(current().plan))
        thread.start()
        thread.join()
    assert seen == ["auto"]


def test_the_backend_may_come_from_the_environment(operands: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("SPARSETC_BACKEND", "triton")
    assert stc.compile(MTTKRP, *operands).backend == "triton"
    assert stc.compile(MTTKRP, *operands, backend="torch").backend == "torch"
    monkeypatch.setenv("SPARSETC_BACKEND", "cobol")
    with pytest.raises(stc.PlanError, match="backend must be one of auto, triton, torch, numba, found 'cobol'"):
        stc.compile(MTTKRP, *operands)


def test_precision_follows_torch(operands: list[Any]) -> None:
    pytest.importorskip("triton")
    chain = Problem("ijk,jr,ks->irs", {"i": 4, "j": 5, "k": 6, "r": 16, "s": 16}).operands()
    found = {}
    for precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        (program,) = stc.compile("ijk,jr,ks->irs", *chain, plan="coo", backend="triton").programs
        found[precision] = program.schedule.precision
    assert found == {"highest": "tf32x3", "high": "tf32", "medium": "bf16"}
    with stc.options(precision="highest"):
        (program,) = stc.compile("ijk,jr,ks->irs", *chain, plan="coo", backend="triton").programs
        assert program.schedule.precision == "tf32x3"


def test_complex_numbers_run_in_torch() -> None:
    problem = Problem(MTTKRP, dtype=torch.complex64)
    assert check(problem, backend="triton").backend == "torch"


def test_generated_modules_are_shared_by_kernels(operands: list[Any]) -> None:
    first, second = (stc.compile(MTTKRP, *operands, plan="coo") for _ in range(2))
    assert first.step.executable.programs.module is second.step.executable.programs.module
    assert first.path in cache._modules


def test_deterministic_sums_of_nothing_are_zero() -> None:
    """Of two nonzeros none is on the diagonal."""
    x = stc.SparseTensor(torch.tensor([[0, 1], [1, 0], [1, 1]]), torch.ones(2), (2, 2, 2))
    assert torch.equal(stc.einsum("iii->i", x, deterministic=True, output="dense"), torch.zeros(2))


# -- scipy's solvers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_linear_operator(dtype: torch.dtype) -> None:
    linalg = pytest.importorskip("scipy.sparse.linalg")
    dense = torch.randn(12, 9, dtype=dtype) * (torch.rand(12, 9) < 0.6)
    x = stc.SparseTensor.from_dense(dense)
    a = stc.compile("ij,j->i", x, torch.zeros(9, dtype=dtype)).as_linear_operator()
    assert a.shape == (12, 9)
    found = linalg.svds(a, 3, return_singular_vectors=False)
    torch.testing.assert_close(
        torch.as_tensor(found.copy()).sort().values, torch.linalg.svdvals(dense)[:3].sort().values
    )
    b = stc.compile("ij,jr->ir", x, torch.zeros(9, 2, dtype=dtype)).as_linear_operator()
    v = torch.randn(18, dtype=dtype)
    torch.testing.assert_close(torch.as_tensor(b @ v.numpy()), (dense @ v.view(9, 2)).flatten())
    both = torch.randn(18, 3, dtype=dtype)
    wanted = (dense @ both.view(9, 6)).view(24, 3)
    torch.testing.assert_close(torch.as_tensor(b @ both.numpy()), wanted)
    w = torch.randn(24, dtype=dtype)
    torch.testing.assert_close(torch.as_tensor(b.H @ w.numpy()), (dense.mH @ w.view(12, 2)).flatten())
    with pytest.raises(stc.EquationError, match="dense operands"):
        stc.compile("ij->i", x).as_linear_operator()
    with pytest.raises(stc.DtypeError, match="no bfloat16"):
        stc.eye(3, dtype=torch.bfloat16).as_linear_operator()


@pytest.mark.filterwarnings("ignore:sparsetc. no GPU")
@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("columns", [(), (3,)])
@pytest.mark.filterwarnings("error")
def test_an_operator_of_real_values_keeps_imaginary_parts(
    columns: tuple[int, ...], natively: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy")
    if not natively:
        monkeypatch.setenv("SPARSETC_BACKEND", "torch")
    dense = torch.randn(5, 4, dtype=torch.float64)
    operator = stc.SparseTensor.from_dense(dense).as_linear_operator()
    random = np.random.default_rng(0)
    for a, b in ((operator, dense.numpy()), (operator.H, dense.numpy().T)):
        vectors = random.standard_normal((b.shape[1], *columns)) + 1j * random.standard_normal((b.shape[1], *columns))
        np.testing.assert_allclose(a @ vectors, b @ vectors)


@pytest.mark.parametrize("equation", ["ij,jr->ir", "ij,j->ij", "ij,jj->i", "ij,rj->i", "i,ij,ij->j"])
def test_products_of_an_operator_need_no_autograd(equation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matrix is made by torch of unit vectors; an operand may repeat a letter, or alone have one."""
    pytest.importorskip("scipy")
    sizes = {"i": 4, "j": 3, "r": 2}
    *sparse, shape = [[sizes[c] for c in term] for term in equation.split("->")[0].split(",")]
    dense = [torch.randn(s, dtype=torch.complex128) * (torch.rand(s) < 0.7) for s in sparse]
    unit = torch.eye(math.prod(shape), dtype=torch.complex128).view(-1, *shape)
    matrix = torch.stack([torch.einsum(equation, *dense, u).reshape(-1) for u in unit], 1).numpy()
    operands = map(stc.SparseTensor.from_dense, dense)
    operator = stc.compile(equation, *operands, unit[0]).as_linear_operator()
    monkeypatch.setattr(torch.autograd, "grad", None)
    for a, b in ((operator, matrix), (operator.H, matrix.conj().T)):
        vectors = np.asfortranarray(np.random.default_rng(0).random((b.shape[1], 3)) + 1j)
        np.testing.assert_allclose(a @ vectors, b @ vectors)
        np.testing.assert_allclose(a.matvec(vectors[:, :1]), b @ vectors[:, :1])


def test_an_operator_follows_values_and_takes_any_array() -> None:
    """Rows 2 and 5 have no nonzeros; with numba the operator calls native loops on the arrays themselves."""
    pytest.importorskip("scipy")
    dense = torch.randn(6, 4, dtype=torch.float64)
    dense[[2, 5]] = 0
    x = stc.SparseTensor.from_dense(dense)
    operator, vector = x.as_linear_operator(), np.random.default_rng(0).random(8)
    frozen = vector[:4].copy()
    frozen.flags.writeable = False
    for array in (vector[:4], vector[::2], frozen, vector[:4].astype(np.float32), np.arange(4)):
        np.testing.assert_allclose(operator @ array, dense.numpy() @ array)
    np.testing.assert_allclose(operator @ vector.reshape(4, 2), dense.numpy() @ vector.reshape(4, 2))
    above = vector[:6].reshape(6, 1)
    np.testing.assert_allclose(operator.H @ above, dense.numpy().T @ above)
    first = operator @ frozen
    x.values.mul_(3)
    np.testing.assert_allclose(operator @ frozen, 3 * dense.numpy() @ frozen)
    np.testing.assert_allclose(first, dense.numpy() @ frozen)  # results are arrays of their own
    by_torch = stc.compile("ij,j->i", x, torch.zeros(4, dtype=torch.float64), backend="torch")
    np.testing.assert_allclose(by_torch.as_linear_operator() @ frozen, 3 * dense.numpy() @ frozen)


@pytest.mark.parametrize("rows", [300, 40_000])
def test_rows_without_nonzeros_are_items_of_nothing(rows: int) -> None:
    """A kernel that stores a row an item zeroes the others by itself, with numbers of 16 bits too."""
    g = torch.Generator().manual_seed(0)
    stored = torch.randperm(rows, generator=g)[: rows - rows // 4].sort().values
    coords = torch.stack([stored, torch.randint(0, 50, (len(stored),), generator=g)])
    x, b = stc.SparseTensor(coords, torch.rand(len(stored), generator=g), (rows, 50)), torch.rand(50, 16, generator=g)
    leaf = stc.compile("ij,jr->ir", x, b, plan="coo", backend="triton").contraction.innermost
    arrays = leaf.parts[0].packed.arrays
    assert leaf.arrays.zeroed.numel() == 0
    assert torch.equal((arrays["item_word"].long() & 0xFFFF).sort().values, torch.arange(rows))
    assert torch.equal(arrays["item_ptr"][len(stored) :], arrays["item_ptr"].new_full((rows // 4 + 1,), len(stored)))
    assert leaf.parts[0].arrays.items == rows
