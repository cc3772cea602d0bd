"""Reductions of sparse tensors over any modes, against those of dense ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_arithmetic import KINDS, dense, sparse

import sparsetc as stc

REDUCTIONS = ["sum", "mean", "amax", "amin", "prod", "count_nonzero"]
DIMS: list[Any] = [None, 0, -1, (0, 1), ()]


def of_dense(x: torch.Tensor, name: str, dim: Any, keepdim: bool = False) -> torch.Tensor:
    modes = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else dim
    for mode in sorted((m % x.ndim for m in modes), reverse=True):
        if name == "count_nonzero":
            x = (x != 0).long() if x.dtype != torch.int64 else x
        x = x.sum(mode, keepdim) if name == "count_nonzero" else getattr(x, name)(mode, keepdim)
    return (x != 0).long() if name == "count_nonzero" and not modes else x


@pytest.mark.parametrize(
    "names", [{"dim": 0, "axis": 1}, {"keepdim": True, "keepdims": True}, {"keepdim": True, "keepdims": False}]
)
def test_one_argument_by_two_names(names: dict[str, Any]) -> None:
    with pytest.raises(stc.KeywordError, match="a reduction takes one of them"):
        stc.eye(3).sum(**names)
    numpys, other = [*names.items()][1]
    assert stc.eye(3).sum(**{numpys: other}).shape == ((3,) if numpys == "axis" else (1, 1) if other else ())


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", DIMS, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_reduction(kind: str, name: str, dim: Any, keepdim: bool) -> None:
    given = dense(0, KINDS[kind], share=0.6)
    given[0] = 0.0
    expected = of_dense(given, name, dim, keepdim)
    for output in ("auto", "dense", "sparse"):
        found = getattr(sparse(given, kind), name)(dim, keepdim, output=output)
        found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["mean", "amax", "amin", "prod"])
def test_entries_alone(name: str) -> None:
    given = dense(0, (6, 7), share=0.5).abs() + 0
    x = sparse(given)
    found = getattr(x, name)(1, entries=True)
    for row, value in zip(given, found, strict=True):
        expected = getattr(row[row != 0], name)() if bool(row.any()) else torch.zeros_like(value)
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("p", [1, 2, 3.0, float("inf")])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_norms(p: float, dim: int | None) -> None:
    given = dense(0)
    torch.testing.assert_close(sparse(given).norm(p, dim), torch.linalg.vector_norm(given, p, dim))


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "prod"])
@pytest.mark.parametrize("dim", [None, 0, 1], ids=str)
def test_gradients(name: str, dim: int | None) -> None:
    x = stc.SparseTensor([[0, 0, 1, 2, 2], [0, 2, 1, 0, 1]], torch.tensor([1.5, -2.0, 3.0, 4.0, -5.0]).double(), (3, 3))
    for entries in ({}, {"entries": True}) if name != "sum" else ({},):
        assert torch.autograd.gradcheck(
            lambda v, k=entries: getattr(x.with_values(v), name)(dim, **k), x.values.clone().requires_grad_()
        )


def test_types_and_what_is_stored() -> None:
    small = sparse(dense(0, dtype=torch.int8))
    assert small.sum().dtype == torch.int64
    half = stc.SparseTensor([[0] * 4096, list(range(4096))], torch.ones(4096, dtype=torch.float16), (1, 4096))
    assert half.sum().item() == 4096
    assert half.sum().dtype == torch.float16
    cube = sparse(dense(0, (3, 4, 5)))
    assert isinstance(cube.sum(0), stc.SparseTensor)
    assert isinstance(cube.sum((0, 1)), torch.Tensor)
    assert cube.sum(0).pattern is cube.sum(0).pattern
    none = stc.SparseTensor(torch.zeros((2, 0), dtype=torch.long), torch.zeros(0), (3, 0))
    assert none.sum().item() == 0
    assert none.sum(1).tolist() == [0, 0, 0]
    assert torch.linalg.vector_norm(cube.values) == cube.norm()


@pytest.mark.parametrize("dim", [2, -3, (0, 0), (0, -2)])
def test_modes_that_there_are_not(dim: Any) -> None:
    with pytest.raises(stc.ShapeError, match=r"has no mode|a mode twice"):
        sparse(dense(0)).sum(dim)


def test_numpys_names() -> None:
    given, x = dense(0), sparse(dense(0))
    for found in (x.sum(axis=0), np.sum(x, axis=0), x.sum(axis=-2)):
        torch.testing.assert_close(found, given.sum(0))
    torch.testing.assert_close(x.mean(axis=1, keepdims=True), given.mean(1, True))
    torch.testing.assert_close(np.mean(x), given.mean())
    torch.testing.assert_close(x.norm(axis=1), given.norm(dim=1))
    torch.testing.assert_close(np.prod(x, axis=1), given.prod(1))
    torch.testing.assert_close(x.count_nonzero(axis=0), given.count_nonzero(0))


def test_what_is_refused() -> None:
    x = sparse(dense(0))
    with pytest.raises(stc.KeywordError, match="not where="):
        x.sum(where=3)
    with pytest.raises(stc.DtypeError, match="mean"):
        x.to(torch.int32).mean()
    with pytest.raises(stc.DtypeError, match="order"):
        x.to(torch.complex64).amax()
    with pytest.raises(stc.DtypeError, match="p above 0"):
        x.norm(0)
    with pytest.raises(stc.ShapeError, match="output"):
        x.sum(0, output="csr")


def test_edges_of_types() -> None:
    x = sparse(torch.tensor([[-128, 0], [1, 0]], dtype=torch.int8))
    assert x.drop().nnz == 2
    assert x.prod(0).dtype == torch.int64
    half = sparse(torch.full((3, 3), 300.0, dtype=torch.float16))
    assert half.norm().item() == 900
    assert half.norm().dtype == torch.float16
    assert sparse(torch.tensor([[float("nan"), 0.0]])).drop().nnz == 1
    huge = stc.SparseTensor(torch.tensor([[1], [2], [0]]), torch.ones(1), (2**40, 2**40, 2))
    assert huge.mean((0, 1)).tolist() == [2.0**-80, 0.0]
    assert x.sum(np.int64(1)).tolist() == [-128, 1]


def test_a_norm_of_zeros_has_a_gradient() -> None:
    x = sparse(torch.tensor([[0.0, 3.0], [4.0, 0.0]])).requires_grad_()
    x.norm(2, 0).sum().backward()
    y = stc.SparseTensor(torch.tensor([[0], [0]]), torch.zeros(1), (2, 2)).requires_grad_()
    y.norm().backward()
    found: Any = [x.values.grad, y.values.grad]
    assert [grad.tolist() for grad in found] == [[1.0, 1.0], [0.0]]


def test_a_standard_deviation_of_zero_has_a_gradient() -> None:
    values = torch.tensor([2.0, 2.0, 3.0], requires_grad=True)
    x = stc.SparseTensor([[0, 0, 1], [0, 1, 0]], values, (3, 2))
    x.std(1).sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0, 0, 0.5**0.5]))


def test_a_sparse_result_of_modes_of_size_0() -> None:
    x = stc.SparseTensor(torch.zeros((3, 0), dtype=torch.long), torch.zeros(0), (0, 2, 3))
    found = x.mean(0, output="sparse")
    assert isinstance(found, stc.SparseTensor)
    assert bool(found.to_dense().isnan().all())


def test_modes_of_size_0() -> None:
    x = sparse(torch.zeros(0, 3))
    assert (x.sum(0).tolist(), x.prod(0).tolist()) == ([0.0] * 3, [1.0] * 3)
    assert x.mean(0, keepdim=True).isnan().tolist() == [[True] * 3]
    with pytest.raises(stc.ShapeError, match="no position"):
        x.amax(0)


def test_infinite_products_norms_of_integers_and_names_of_both() -> None:
    x = stc.SparseTensor([[0, 0], [0, 1]], [float("inf"), 1.0], (2, 3))
    torch.testing.assert_close(x.prod(1), x.to_dense().prod(1), equal_nan=True)
    with pytest.raises(stc.DtypeError, match=r"norm of torch\.int64"):
        x.sign().long().norm()
    with pytest.raises(stc.KeywordError, match="other names"):
        x.sum(axis=0, dim=1)


def test_products_of_integers_that_do_not_fit_are_refused() -> None:
    x = stc.SparseTensor([[0] * 21, [*range(21)]], torch.full((21,), 3, dtype=torch.int32), (1, 21))
    assert x.prod(1).tolist() == [3**21]
    with pytest.raises(stc.DtypeError, match=str(3**21)):
        stc.einsum("ij->i", x, reduce="prod")
    assert stc.einsum("ij->i", x.long(), reduce="prod").tolist() == [3**21]
    many = stc.SparseTensor([[0] * 50, [*range(50)]], torch.full((50,), 3), (1, 50))
    of_dense_modes = stc.SparseTensor([[0]], torch.full((1, 50), 3), (1, 50))
    for call in (
        lambda: many.prod(1),
        lambda: stc.einsum("ij->i", many, reduce="prod"),
        lambda: of_dense_modes.prod(1),
    ):
        with pytest.raises(stc.DtypeError, match="past 64 bits"):
            call()


def of_many(sums: int = 2, terms: int = 1_000_000) -> stc.SparseTensor:
    """A matrix of long rows, with entries anywhere between 0 and 1."""
    values = torch.rand(sums * terms, generator=torch.Generator().manual_seed(0))
    number = torch.arange(sums * terms)
    return stc.SparseTensor(torch.stack([number // terms, number % terms]), values, (sums, terms))


def test_long_sums_of_float32_are_exact_to_a_millionth() -> None:
    x = of_many()
    exact = x.values.double().view(2, -1)
    dense = torch.rand(exact.shape[1], 3, generator=torch.Generator().manual_seed(1))
    same = stc.SparseTensor(torch.zeros(1, x.nnz, dtype=torch.long), x.values, (1,))
    for found, expected in (
        (x.sum(), exact.sum()),
        (x.sum(1), exact.sum(1)),
        (x.permute(1, 0).sum(0), exact.sum(1)),
        (x.mean(), exact.mean()),
        (x.norm(), exact.norm()),
        (same.values, exact.sum().view(1)),
        (same.to(torch.complex64).values.real, exact.sum().view(1)),
        (stc.einsum("ij->i", x), exact.sum(1)),
        (stc.einsum("ij,ij->", x, x), exact.square().sum()),
        (stc.einsum("ij,jr->ir", x, dense), exact @ dense.double()),
        (stc.einsum("ij,jr->ir", x, dense, plan="coo"), exact @ dense.double()),
        (stc.einsum("ij,jr->ir", x.to(torch.complex64), dense.to(torch.complex64)).real, exact @ dense.double()),
        (stc.einsum("ij->i", x, reduce="mean"), exact.mean(1)),
    ):
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert x.with_values(torch.ones(x.nnz)).half().mean().item() == 1


@pytest.mark.parametrize("name", ["amax", "amin"])
@pytest.mark.parametrize("dim", [None, 0, 1, (0, 2), 2], ids=str)
def test_ties_share_gradients_as_those_of_a_dense_tensor(name: str, dim: Any) -> None:
    for high in (1, 3):  # most values are equal, and absent zeros are among the largest
        given = torch.randint(-1, high, (4, 700, 2), generator=torch.Generator().manual_seed(high)).double()
        given[0, :, :] = -float("inf") if name == "amin" else 0.0
        leaf = given.clone().requires_grad_()
        dims = (0, 1, 2) if dim is None else dim
        expected = torch.autograd.grad(getattr(leaf, name)(dims).nan_to_num(neginf=0).sum(), leaf)[0]
        whole = stc.SparseTensor.from_dense(given)
        stored = (given != 0).any(2).nonzero().T
        for x, at in (
            (whole, tuple(whole.coords)),
            (stc.SparseTensor(stored, given[tuple(stored)], (4, 700, 2)), None),
        ):
            values = x.values.clone().requires_grad_()
            found = getattr(x.with_values(values), name)(dim, output="dense").nan_to_num(neginf=0)
            (gradient,) = torch.autograd.grad(found.sum(), values)
            torch.testing.assert_close(gradient, expected[at or tuple(stored)])


def test_extrema_where_sizes_pass_64_bits() -> None:
    x = stc.SparseTensor([[1], [2]], [3.0], (2**40, 2**40))
    assert (x.amax().item(), x.amin().item(), x.prod().item()) == (3.0, 0.0, 0.0)


def test_products_of_complex_numbers_have_gradients() -> None:
    values = torch.tensor([1 + 1j, 2, 3j, 0, 2 - 1j, 4], dtype=torch.complex128, requires_grad=True)
    x = stc.SparseTensor([[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]], values, (2, 3))
    torch.testing.assert_close(x.prod(1), values.view(2, 3).prod(1))
    assert torch.autograd.gradcheck(lambda v: x.with_values(v).prod(1), values)
    assert torch.autograd.gradgradcheck(lambda v: x.with_values(v).prod(1), values)


def test_sums_of_no_entries_have_a_graph() -> None:
    values = torch.zeros(0, requires_grad=True)
    x = stc.SparseTensor(torch.zeros(2, 0, dtype=torch.long), values, (3, 4))
    for name in ("sum", "mean", "amax", "amin", "prod", "norm"):
        assert getattr(x, name)().requires_grad


def test_a_result_of_one_mode_is_dense_and_counts_so_against_the_limit() -> None:
    one = torch.ones(1)
    with stc.options(memory_limit=10**7):
        with pytest.raises(stc.OutOfMemoryError, match="40,000,112 bytes"):
            stc.SparseTensor(torch.tensor([[5], [1]]), one, (10**7, 3)).amax(1)
        rows = stc.SparseTensor(torch.tensor([[5], [1], [2]]), one, (10**4, 10**4, 3)).amax(2)
    assert isinstance(rows, stc.SparseTensor)
    assert rows.nnz == 1


def test_a_sparse_result_of_one_long_mode_is_not_counted_as_dense() -> None:
    x = stc.SparseTensor([[5, 7], [1, 1]], [2.0, 3.0], (2**40, 2**40))
    assert x.sum(0, output="sparse").values.tolist() == [5.0]
    assert x.amax(1, output="sparse").coords.tolist() == [[5, 7]]
    semi = stc.SparseTensor([[5, 7], [1, 1]], torch.ones(2, 3), (2**40, 2**40, 3))
    for call in (lambda: x.sum(0), lambda: semi.sum(0), lambda: semi.amax(1)):
        with pytest.raises(stc.OutOfMemoryError, match="would take"):
            call()


def test_more_positions_than_64_bits_count() -> None:
    x = stc.SparseTensor([[5], [7]], torch.tensor([2.0**40], dtype=torch.float64), (2**40, 2**40))
    assert not x.all()
    torch.testing.assert_close(x.var(), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(x.std(), torch.tensor(1.0, dtype=torch.float64))
    with pytest.raises(stc.OutOfMemoryError):
        x.topk(0, 0)
    for call in (lambda: x.equal(3), lambda: x.allclose("x"), lambda: x.mm(None)):
        with pytest.raises(stc.DtypeError, match="takes tensors"):
            call()
    with pytest.raises(stc.ShapeError, match="a shift for each mode"):
        x.roll((1, 2), 0)
