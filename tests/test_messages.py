"""What a stranger tries first and gets wrong: each is told which argument it was, and what to write instead."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import random_sparse, random_values

import sparsetc as stc
from sparsetc.support.checks import as_bytes

F32 = torch.float32


def x() -> stc.SparseTensor:
    return random_sparse((4, 5, 6), "random", F32)


def dense(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return random_values(shape, dtype, 1)


def factors() -> list[torch.Tensor]:
    return [dense(n, 2) for n in (4, 5, 6)]


Call = Callable[[], object]

# --- a backend, a device, a plan that does not fit ------------------------------------------------------------------


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter needs no GPU")
def test_triton_without_a_gpu_is_told_before_a_launch() -> None:
    pytest.importorskip("triton")
    y = random_sparse((6, 5), "random", F32)
    for call in (
        lambda: stc.einsum("ijk,jr->ir", x(), dense(5, 2), backend="triton"),
        lambda: stc.einsum("ijk,kl->ijl", x(), y, backend="triton", plan="bcb"),
        lambda: stc.einsum("ijk,kl->ijl", x(), y, backend="triton", plan="scalar"),
    ):
        with pytest.raises(stc.DeviceError, match=r'backend="triton" launches kernels on a GPU.*TRITON_INTERPRET=1'):
            call()
    kernel = stc.compile("ijk,jr->ir", x(), dense(5, 2), backend="triton")
    assert "tl.load" in kernel.source
    assert ".visible .entry" in kernel.ptx("sm_90")


def test_what_needs_triton_says_so_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    y = random_sparse((6, 5), "random", F32)
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels = [stc.compile("ijk,jr->ir", x(), dense(5, 2)), stc.compile("ijk,kl->ijl", x(), y, plan="bcb")]
    calls: list[Call] = [lambda k=k: k.ptx("sm_90") for k in kernels]  # type: ignore[misc]
    calls += [
        lambda: stc.einsum("ijk,jr->ir", x(), dense(5, 2), backend="triton"),
        lambda: stc.einsum("ijk,kl->ijl", x(), y, backend="triton", plan="scalar"),
        lambda: stc.einsum("ijk,kl->ijl", x(), y, backend="triton", plan="bcb"),
    ]
    for call in calls:
        with pytest.raises(stc.PlanError, match=r"Triton, which is not installed: pip install"):
            call()


@pytest.mark.parametrize("call", [stc.einsum, stc.compile, stc.explain])
def test_a_call_has_no_device_to_choose(call: Callable[..., object]) -> None:
    with pytest.raises(stc.DeviceError, match=r"an einsum runs where its operands are: move them with \.to\('cuda'\)"):
        call("ijk,jr->ir", x(), dense(5, 2), device="cuda")
    with stc.options(device="cpu"):
        call("ijk,jr->ir", x(), dense(5, 2))


@pytest.mark.parametrize("plan", ["bcb", "scalar", "bcb+scalar", stc.plans.plan_bcb(i=4)])
def test_a_plan_of_pairs_for_one_operand(plan: Any) -> None:
    with pytest.raises(
        stc.PlanError, match=r'is for two or more sparse operands, and "ijk,jr->ir" has one; known.*coo'
    ):
        stc.einsum("ijk,jr->ir", x(), dense(5, 2), plan=plan)


# --- sizes of memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, 0),
        (10**9, 10**9),
        (1e9, 10**9),
        (np.int64(7), 7),
        ("1GB", 10**9),
        ("1.5 GB", 1_500_000_000),
        ("512MiB", 512 * 2**20),
        ("4096", 4096),
        ("64 kb", 64_000),
        ("2T", 2 * 10**12),
        ("1_000", 1000),
        ("18446744073709551616B", 2**64),
    ],
)
def test_sizes_are_numbers_or_text(given: Any, expected: int) -> None:
    assert as_bytes(given) == expected
    with stc.options(memory_limit=given) as chosen:
        assert chosen.memory_limit == expected


@pytest.mark.parametrize("given", [-1, "-1GB", "many", "", "1 XB", "1iB", 1.5, float("inf"), float("nan"), True, [1]])
def test_other_sizes_are_refused(given: Any) -> None:
    with contextlib.suppress(stc.OutOfMemoryError):
        stc.einsum("ijk->i", x(), memory_limit=1)  # which True equals
    said = r'memory_limit must be a number of bytes, 0 or more, or text like "512MiB" or "8GB"; found'
    for call in (
        lambda: stc.einsum("ijk->i", x(), memory_limit=given),
        lambda: x().to_dense(memory_limit=given),
        lambda: stc.options(memory_limit=given).__enter__(),
    ):
        with pytest.raises(stc.PlanError, match=said):
            call()


def test_a_limit_as_text_limits() -> None:
    assert x().to_dense(memory_limit="1kB").shape == (4, 5, 6)
    with pytest.raises(stc.OutOfMemoryError, match="the limit on cpu is 100; raise it with"):
        x().to_dense(memory_limit="100B")
    with pytest.raises(stc.OutOfMemoryError, match="the limit on cpu is 16"):
        stc.einsum("ijk,jr->ir", x(), dense(5, 2), memory_limit="16")


# --- settings that one call takes, the other takes too ----------------------------------------------------------------


def test_zeros_are_dropped_by_a_kernel_too() -> None:
    a = stc.SparseTensor([[0, 1, 2], [0, 1, 2]], [1.0, 0.0, 2.0], (3, 3))
    b = stc.SparseTensor([[0, 1, 2], [1, 1, 0]], [1.0, 2.0, 0.0], (3, 3))
    for text, given, values in (("ij,j->ij", (a, torch.ones(3)), [1.0, 2.0]), ("ij,jk->ik", (a, b), [1.0])):
        others = [o for o in given if isinstance(o, torch.Tensor)]
        kernel = stc.compile(text, *given, drop_zeros=True)
        for found in (kernel(*others), stc.einsum(text, *given, drop_zeros=True)):
            assert isinstance(found, stc.SparseTensor)
            assert found.values.tolist() == values
        kept = stc.compile(text, *given)(*others)
        assert isinstance(kept, stc.SparseTensor)
        assert kept.nnz == 3
        assert stc.explain(text, *given, drop_zeros=True).equation == text


# --- named operations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: stc.mttkrp(x(), 0, factors()), stc.ShapeError, r"mttkrp: a mode must be an integer, found list; call mttkrp\(x, factors, mode\)"),  # noqa: E501
        (lambda: stc.ttmc(x(), 0, factors()), stc.ShapeError, r"ttmc: a mode must be an integer.*ttmc\(x, matrices, mode\)"),
        (lambda: stc.ttm(x(), 1, dense(5, 2)), stc.ShapeError, r"found Tensor; call ttm\(x, matrix, mode\)"),
        (lambda: stc.ttv(x(), 1, [1.0]), stc.ShapeError, r"found list; call ttv\(x, vector, mode\)"),
        (lambda: stc.mttkrp(x(), 3, 0), stc.EquationError, "factors must be a list of 3.*found int"),
        (lambda: stc.mttkrp("ijk", factors(), 0), stc.EquationError, r"writes the equation itself: mttkrp\(x, factors"),
        (lambda: stc.contract("ij,jk->ik", x(), x()), stc.EquationError, r"contract\(x, y, modes.*sparsetc\.einsum"),
        (lambda: stc.contract(x(), x(), None), stc.EquationError, "modes must be a number, or as many modes of x"),
        (lambda: stc.contract(x(), x(), (0.5, 1)), stc.ShapeError, r"contract: x: .* has no mode 0\.5"),
    ],
)  # fmt: skip
def test_arguments_in_another_order(call: Call, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def replaced(place: int, by: Any) -> list[Any]:
    found: list[Any] = factors()
    found[place] = by
    return found


double, meta = dense(6, 2, dtype=torch.float64), dense(6, 2).to("meta")


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: stc.mttkrp(x(), replaced(2, double), 0), stc.DtypeError, r"mttkrp: factors\[2\] has dtype .*float64"),
        (lambda: stc.mttkrp(x(), replaced(2, meta), 0), stc.DeviceError, r"mttkrp: factors\[2\] is on meta"),
        (lambda: stc.ttmc(x(), replaced(2, double), 0), stc.DtypeError, r"ttmc: matrices\[2\] has dtype"),
        (lambda: stc.ttm(x(), double.T, 2), stc.DtypeError, "ttm: the matrix of mode 2 has dtype"),
        (lambda: stc.ttv(x(), double[:, 0], 2), stc.DtypeError, "ttv: the vector of mode 2 has dtype"),
        (lambda: stc.spmm(random_sparse((4, 6), "random", F32), double), stc.DtypeError, "spmm: b has dtype"),
        (lambda: stc.contract(x(), double, 1), stc.DtypeError, "contract: y has dtype"),
        (lambda: stc.contract(x(), x().to(torch.float64), ([0], [0])), stc.DtypeError, "contract: y has dtype"),
        (
            lambda: stc.sddmm(random_sparse((4, 6), "random", F32), dense(4, 2), double),
            stc.DtypeError,
            "sddmm: right has dtype",
        ),
    ],
)
def test_named_operations_name_the_argument(call: Call, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_factors_may_be_parameters() -> None:
    parameters = torch.nn.ParameterList(factors())
    found = stc.mttkrp(x(), parameters, 0)
    assert isinstance(found, torch.Tensor)
    assert found.requires_grad


# --- operands of other kinds ------------------------------------------------------------------------------------------


def odd() -> dict[str, Any]:
    return {
        "nested": torch.nested.nested_tensor([dense(2), dense(3)]),
        "jagged": torch.nested.nested_tensor([dense(2), dense(3)], layout=torch.jagged),
        "masked": torch.masked.masked_tensor(dense(5, 2), torch.ones(5, 2, dtype=torch.bool)),
        "uninitialised": torch.nn.UninitializedParameter(),
        "masked array": np.ma.masked_array(np.ones((5, 2), np.float32)),
    }


@pytest.mark.parametrize("kind", list(odd()))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_plain_numbers(kind: str) -> None:
    operand = odd()[kind]
    kernel = stc.compile("ijk,jr->ir", x(), dense(5, 2))
    y = random_sparse((5, 6), "random", F32)
    pair = stc.compile("ij,kj,jr->ikr", y, y, dense(6, 2))
    what = kind.split()[0].replace("jagged", "nested")
    for call in (
        lambda: stc.einsum("ijk,jr->ir", x(), operand),
        lambda: stc.einsum("ijk,jr->ir", operand, dense(5, 2)),
        lambda: kernel(operand),
        lambda: pair(operand),
        lambda: stc.mttkrp(x(), replaced(1, operand), 0),
        lambda: stc.mttkrp(operand, factors(), 0),
        lambda: stc.contract(x(), operand, 1),
        lambda: stc.SparseTensor([[0], [0]], operand, (1, 1)),
        lambda: stc.SparseTensor.from_dense(operand),
    ):
        with pytest.raises(stc.DtypeError, match=rf"is an? {what}.*which sparsetc cannot compute with; \w+"):
            call()


def test_a_tensor_on_the_meta_device_has_no_pattern() -> None:
    with pytest.raises(stc.DeviceError, match="operand 1 is on the meta device"):
        stc.einsum("ijk,jr->ir", x().to("meta"), dense(5, 2).to("meta"))
    with pytest.raises(stc.DeviceError, match="coords and values are on the meta device"):
        stc.SparseTensor(torch.zeros(2, 3, dtype=torch.long, device="meta"), torch.zeros(3, device="meta"), (4, 4))


def test_ndarrays_are_dense_operands() -> None:
    b, c = dense(5, 2), dense(6, 2)
    expected = stc.einsum("ijk,jr,kr->ir", x(), b, c)
    assert isinstance(expected, torch.Tensor)
    kernel = stc.compile("ijk,jr,kr->ir", x(), b.numpy(), c)
    y = random_sparse((5, 6), "random", F32)
    pair = stc.compile("ij,kj,jr->ikr", y, y, c.numpy())
    fixed = b.numpy().copy()
    fixed.setflags(write=False)
    for found in (
        stc.einsum("ijk,jr,kr->ir", x(), b.numpy(), c.numpy()),
        stc.einsum("ijk,jr,kr->ir", x(), fixed, c.numpy()[::-1][::-1]),
        kernel(b.numpy(), c.numpy()),
        stc.mttkrp(x(), [None, b.numpy(), c], 0),
    ):
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(pair(c.numpy()).to_dense(), pair(c).to_dense())
    with pytest.raises(stc.DtypeError, match=r"operand 2 has dtype torch\.float64"):
        stc.einsum("ijk,jr,kr->ir", x(), np.ones((5, 2)), c)
    with pytest.raises(stc.DtypeError, match="operand 2 cannot be read as a tensor"):
        stc.einsum("ijk,jr,kr->ir", x(), np.array([["a"] * 2] * 5), c)


class Wrapper(torch.Tensor):
    """A tensor around another, with no memory of its own, as torch_geometric's EdgeIndex."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*[one.inner if isinstance(one, cls) else one for one in args], **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass whose operators give the subclass."""


@pytest.mark.parametrize("kind", [Wrapper, lambda t: t.as_subclass(Named)])
def test_coordinates_of_a_subclass_are_plain(kind: Callable[[torch.Tensor], torch.Tensor]) -> None:
    edges = torch.tensor([[0, 1, 1], [2, 0, 2]])
    graph = stc.SparseTensor(kind(edges), torch.tensor([1.0, 2.0, 3.0]), (2, 3))
    assert type(graph.coords) is torch.Tensor
    assert graph.coords.data_ptr() != edges.data_ptr()
    assert graph.to_dense().tolist() == [[0, 0, 1], [2, 0, 3]]
    assert stc.einsum("ij->i", graph).tolist() == [1, 5]


# --- the way on that a refusal names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda e: stc.spmm(e, e), "b must be a dense tensor, found SparseTensor; a @ b takes a sparse one too"),
        (lambda e: stc.spmm(e.to_dense(), e), "where only the second is, call torch.tensordot, torch.matmul"),
        (lambda e: stc.contract(e.to_dense(), e, 1), "found Tensor; where only the second is, call torch.tensordot"),
        (lambda e: stc.contract(e.to_dense(), e.to_dense(), 1), "found Tensor; see SparseTensor.from_dense"),
        (lambda e: torch.addmm(e, e.to_dense(), e.to_dense()), r"call \.to_dense\(\) of the input, or torch.sparse"),
        (lambda e: torch.sparse.sampled_addmm(e, torch.ones(2, 3, 4), torch.ones(2, 4, 3)), "three batches of them"),
        (
            lambda e: stc.attention(*[torch.ones(3, 2)] * 3, torch.ones(3, 3)),
            "as mask != 0, and numbers that are added",
        ),
        (lambda e: stc.attention(*[torch.ones(3, 2)] * 3, attn_mask=e), r"no attn_mask \(did you mean pattern\?\)"),
        (lambda e: stc.masks.sliding_window(1.5), "distance of a sliding window must be an integer, found 1.5"),  # type: ignore[arg-type]
        (lambda e: torch.deg2rad(e.to(torch.complex64)), "deg2rad takes no torch.complex64"),
        (lambda e: stc.einsum("ij,j->i", e.to_scipy(), torch.ones(3).double()), r"\.astype\(dtype\) of numpy, scipy"),
    ],
)
def test_a_refusal_names_what_can_be_called(call: Callable[[stc.SparseTensor], object], said: str) -> None:
    with pytest.raises(stc.SparsetcError, match=said):
        call(stc.eye(3))


def test_what_these_name_is_right() -> None:
    e, d = stc.SparseTensor([[0, 1], [2, 0]], [2.0, 3.0], (3, 3)), dense(3, 3)
    torch.testing.assert_close(torch.tensordot(d, e, 1), d @ e.to_dense())
    torch.testing.assert_close(torch.matmul(d, e), d @ e.to_dense())
    torch.testing.assert_close((e @ e).to_dense(), e.to_dense() @ e.to_dense())
    batch, left, right = stc.stack([e, e.T]), dense(2, 3, 4), dense(2, 4, 3)
    found = torch.sparse.sampled_addmm(batch, left, right, beta=2, alpha=3)
    expected = torch.where(batch.to_dense() == 0, 0, 2 * batch.to_dense() + 3 * left @ right)
    torch.testing.assert_close(found.to_dense(), expected)


# --- files and tables in the place of tensors -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: stc.einsum("ijk,jr,kr->ir", "x.parquet", *factors()[1:]), "stc.read reads a file"),
        (lambda: stc.stream("ijk,jr,kr->ir", "x.tns", *factors()[1:]), r"stc.pack\('x.tns', 'x.parquet'\)"),
        (lambda: stc.decomposition.cp_als(packed(), 1), "found PackedFile; stc.read reads a file"),
        (lambda: stc.decomposition.tucker("x.tns", 1), "found str; stc.read reads a file"),
        (lambda: stc.mttkrp(packed(), factors(), 0), "found PackedFile; stc.read reads a file"),
        (lambda: stc.read("ratings.xlsx"), "known are .*csv"),
        (lambda: table(np.array([0, -1])), "missing label"),
        (lambda: torch.as_tensor(x()), "to_dense"),
        (lambda: torch.from_dlpack(x()), "to_dense"),
    ],
)
def test_files_tables_and_tensors_of_another_kind(call: Call, said: str) -> None:
    with pytest.raises(stc.SparsetcError, match=said):
        call()


def packed() -> stc.PackedFile:
    return stc.PackedFile.__new__(stc.PackedFile)


def table(users: np.ndarray) -> stc.SparseTensor:
    return stc.SparseTensor.from_table({"user": users, "rating": np.ones(2)}, ["user"], "rating")
