"""The interpreter's matrix, natively on a GPU; and what only a GPU can show: no waiting, capture in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import OPERATIONS, PATTERNS, SIZES, Problem, assert_matches, check, plan_names, replayed, two_parts
from rounded_cases import DOTS, MIXED, SCALAR

import sparsetc as stc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LARGE = {"i": 60, "j": 50, "k": 40, "l": 9, "m": 7, "r": 32, "s": 16, "t": 16, "u": 2}
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.complex64]
TYPED = ["mttkrp-3-0", "mttkrp-4-3", "ttmc-3-1", "spmm", "sampled", "ttv-0", "reduction", "semi-sparse", "scalar"]
PRECISION = {"highest": 1e-5, "high": 4e-3, "medium": 3e-2}


def run(problem: Problem, tolerance: float | None = None, **settings: Any) -> stc.Kernel:
    try:
        return check(problem, "cuda", tolerance, **settings)
    except stc.PlanError as error:
        if settings.get("plan", "auto") == "auto":
            raise
        pytest.skip(f"the plan does not apply: {error}")


@pytest.mark.parametrize("plan", ["auto", *plan_names()])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_by_plan(name: str, plan: str) -> None:
    kernel = run(Problem(OPERATIONS[name], LARGE, "random"), plan=plan)
    assert kernel.backend == "triton"


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("long", ["coo", "fiber"])
@pytest.mark.parametrize("name", ["mttkrp-3-0", "mttkrp-4-2", "ttmc-3-0", "spmm", "ttv-0", "semi-sparse"])
def test_two_parts(name: str, long: str, fused: bool) -> None:
    problem = Problem(OPERATIONS[name], LARGE)
    run(problem, plan=two_parts(problem.equation, problem.operands("cuda"), long, fused))


@pytest.mark.parametrize("rank", [1, 5, 33, 200, 600])
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ij,ir,jr->ij", "ijk,kr->ijr"])
@pytest.mark.parametrize("plan", ["coo", "fiber", "rows"])
def test_ragged_rank(equation: str, rank: int, plan: str) -> None:
    run(Problem(equation, {**LARGE, "r": rank}, "random"), plan=plan)


@pytest.mark.parametrize("ranks", [(1, 5), (16, 16), (33, 5), (70, 20), (17, 100)], ids=str)
@pytest.mark.parametrize("plan", ["coo", "fiber", "rows"])
def test_ragged_ranks_of_a_ttm_chain(ranks: tuple[int, int], plan: str) -> None:
    run(Problem("ijk,jr,ks->irs", {**LARGE, "r": ranks[0], "s": ranks[1]}), plan=plan)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TYPED)
def test_dtype(name: str, dtype: torch.dtype) -> None:
    for plan in ("coo", "fiber"):
        run(Problem(OPERATIONS[name], {**SIZES, "r": 16, "s": 16}, dtype=dtype), plan=plan)


@pytest.mark.parametrize("precision", PRECISION)
@pytest.mark.parametrize("name", ["ttmc-3-0", "ttmc-4-0", "mttkrp-3-0"])
def test_precision(name: str, precision: str) -> None:
    problem = Problem(OPERATIONS[name], LARGE, "dense" if name != "ttmc-4-0" else "random")
    run(problem, PRECISION[precision], plan="coo", precision=precision)


@pytest.mark.parametrize("name", ["mttkrp-3-0", "ttmc-3-0", "sampled", "ttv-0", "reduction", "semi-sparse"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern(name: str, pattern: str) -> None:
    run(Problem(OPERATIONS[name], pattern=pattern))


@pytest.mark.parametrize("name", ["mttkrp-3-1", "ttmc-3-0", "reduction", "ttv-0"])
def test_deterministic_results_have_the_same_bits(name: str) -> None:
    problem = Problem(OPERATIONS[name], {**LARGE, "i": 200, "j": 100}, "dense")
    operands = problem.operands("cuda")
    kernel = stc.compile(problem.equation, *operands, deterministic=True)
    first, *others = (kernel(*operands[1:]) for _ in range(10))
    for other in others:
        pair = [r.values if isinstance(r, stc.SparseTensor) else r for r in (first, other)]
        assert torch.equal(*pair)


@pytest.mark.parametrize("name", ["mttkrp-3-0", "ttmc-3-0", "sampled", "semi-sparse", "ttv-0"])
def test_a_call_never_waits_for_the_gpu(name: str) -> None:
    problem = Problem(OPERATIONS[name], LARGE)
    operands = problem.operands("cuda")
    kernel = stc.compile(problem.equation, *operands)
    kernel(*operands[1:])
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = kernel(*operands[1:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_matches(result, problem.equation, operands)


@pytest.mark.parametrize("name", ["mttkrp-3-0", "ttmc-3-0", "spmm", "sampled"])
def test_a_call_can_be_captured_in_a_graph(name: str) -> None:
    problem = Problem(OPERATIONS[name], LARGE)
    operands = problem.operands("cuda")
    kernel = stc.compile(problem.equation, *operands)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kernel(*operands[1:])
    torch.cuda.current_stream().wait_stream(stream)
    result = replayed(kernel, operands[1:])
    assert_matches(result, problem.equation, operands)


@pytest.mark.parametrize("name", SCALAR | MIXED | DOTS)
def test_operands_rounded_at_each_call(name: str) -> None:
    """The result is that of rounded operands, in a CUDA graph too; dots round what they multiply by as well."""
    case = (SCALAR | MIXED | DOTS)[name]
    tolerance = 1e-5 if name in SCALAR else 3e-2
    operands = case.problem.operands("cuda")
    kernel = stc.compile(case.equation, *operands, **case.settings)
    assert_matches(kernel(*operands[1:]), case.equation, case.as_read(operands), tolerance)
    result = replayed(kernel, operands[1:])
    assert_matches(result, case.equation, case.as_read(operands), tolerance)


@pytest.mark.parametrize("name", ["mttkrp-3-0", "sampled", "ttmc-3-0"])
def test_gradients(name: str) -> None:
    problem = Problem(OPERATIONS[name], SIZES, "random", torch.float64)
    x, *dense = problem.operands("cuda")
    values = x.values.clone().requires_grad_()
    dense = [d.requires_grad_() for d in dense]

    def function(values: torch.Tensor, *dense: torch.Tensor) -> torch.Tensor:
        result = stc.einsum(problem.equation, x.with_values(values), *dense)
        return result.values if isinstance(result, stc.SparseTensor) else result

    assert torch.autograd.gradcheck(function, (values, *dense), nondet_tol=1e-10, fast_mode=True)


def test_operands_on_two_devices_are_refused() -> None:
    x, b = Problem("ij,jr->ir").operands("cuda")
    with pytest.raises(stc.DeviceError, match=r"operand 2 is on cpu, the sparse operand is on cuda"):
        stc.einsum("ij,jr->ir", x, b.cpu())


# --- SparseTensor -----------------------------------------------------------------------------------------------------


def test_a_sparse_tensor_moves_there_and_back() -> None:
    (x,) = Problem("ijk->").operands()
    y = x.cuda()
    assert (x.device.type, y.device.type) == ("cpu", "cuda")
    assert y.to("cuda") is y
    assert torch.equal(y.cpu().values, x.values)
    assert torch.equal(y.cpu().coords, x.coords)
    torch.testing.assert_close(y.to_dense().cpu(), x.to_dense())


def test_a_sparse_tensor_is_made_sorted_and_summed_on_the_gpu() -> None:
    coords = torch.tensor([[1, 0, 1], [2, 1, 2]], device="cuda")
    x = stc.SparseTensor(coords, torch.tensor([1.0, 2.0, 3.0], device="cuda"), (2, 4))
    assert x.coords.tolist() == [[0, 1], [1, 2]]
    assert x.values.tolist() == [2.0, 4.0]
    with pytest.raises(stc.CoordinateError):
        stc.SparseTensor(coords, torch.ones(3, device="cuda"), (1, 4))


def test_torch_tensors_on_the_gpu_are_taken_as_they_are() -> None:
    x, b = Problem("ij,jr->ir", dtype=torch.float64).operands("cuda")
    expected = x.to_dense() @ b
    for form in (x.to_torch(), x.to_torch(torch.sparse_csr)):
        torch.testing.assert_close(stc.einsum("ij,jr->ir", form, b), expected)
