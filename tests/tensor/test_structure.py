"""Indices, shapes and parts of sparse tensors, against the same of dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_arithmetic import dense, sparse

import sparsetc as stc
from sparsetc.tensor.coords import is_sorted_unique

SHAPES = {"nonzeros": (4, 6, 5), "dense modes": (4, 6, 5), "blocks": (4, 6)}


def whole(x: Any) -> torch.Tensor:
    return x.to_dense() if isinstance(x, stc.SparseTensor) else x


SPELLINGS: dict[str, Callable[[Any], Any]] = {
    "x[2]": lambda x: x[2],
    "x[-1]": lambda x: x[-1],
    "x[1:3]": lambda x: x[1:3],
    "x[::2]": lambda x: x[::2],
    "x[5:]": lambda x: x[5:],
    "x[-3:-1]": lambda x: x[-3:-1],
    "x[:, 3]": lambda x: x[:, 3],
    "x[2, 3]": lambda x: x[2, 3],
    "x[..., 1]": lambda x: x[..., 1],
    "x[..., 1:4]": lambda x: x[..., 1:4],
    "x[...]": lambda x: x[...],
    "x[None]": lambda x: x[None],
    "x[None, 3]": lambda x: x[None, 3],
    "x[None, 1:3, 2]": lambda x: x[None, 1:3, 2],
    "x[None, tensor]": lambda x: x[None, torch.tensor([3, 0])],
    "x[:, None, 2:]": lambda x: x[:, None, 2:],
    "x[..., None]": lambda x: x[..., None],
    "x[tensor]": lambda x: x[torch.tensor([3, 0, 0, -1])],
    "x[:, list]": lambda x: x[:, [5, 1, 1]],
    "x[ndarray]": lambda x: x[np.array([1, 2])],
    "x[mask]": lambda x: x[torch.tensor([True, False, True, True])],
    "x[empty]": lambda x: x[torch.zeros(0, dtype=torch.long)],
    "x[1:3, tensor]": lambda x: x[1:3, torch.tensor([2, 0])],
    "x[i, j]": lambda x: x[torch.tensor([0, 3, 3]), torch.tensor([1, 5, 1])],
    "x.index_select": lambda x: x.index_select(1, torch.tensor([4, 4, 0])),
    "x.narrow": lambda x: x.narrow(1, 2, 3),
    "x.mT": lambda x: x.mT,
    "x.transpose(0, 1)": lambda x: x.transpose(0, 1),
    "x.flatten()": lambda x: x.flatten(),
    "x.flatten(0, 1)": lambda x: x.flatten(0, 1),
    "x.reshape(-1)": lambda x: x.reshape(-1),
    "x.reshape(6, -1)": lambda x: x.reshape(6, -1),
    "x.reshape(2, 2, ...)": lambda x: x.reshape(2, 2, *x.shape[1:]),
    "x.view(3, 8, -1)": lambda x: x.reshape(3, 8, -1),
    "x.reshape((1, ..., 1))": lambda x: x.reshape((1, *x.shape, 1)),
    "x.unsqueeze(1)": lambda x: x.unsqueeze(1),
    "x.unsqueeze(-1)": lambda x: x.unsqueeze(-1),
    "x[:1].squeeze(0)": lambda x: x[:1].squeeze(0),
    "x[None].squeeze()": lambda x: x[None].squeeze(),
    "x.diagonal()": lambda x: x.diagonal(),
    "x.diagonal(1)": lambda x: x.diagonal(1),
    "x.diagonal(-2, 1, 0)": lambda x: x.diagonal(-2, 1, 0),
    "x.tril(1)": lambda x: x.tril(1),
    "x.triu(-1)": lambda x: x.triu(-1),
    "list(x)[1]": lambda x: list(x)[1],
    "x.double()": lambda x: x.double(),
    "x.clone()": lambda x: x.clone(),
    "x.detach()": lambda x: x.detach(),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("kind", SHAPES)
def test_spellings(kind: str, name: str) -> None:
    given = dense(0, SHAPES[kind])
    x = sparse(given, kind)
    expected, found = SPELLINGS[name](given), SPELLINGS[name](x)
    torch.testing.assert_close(whole(found), expected)
    if isinstance(found, stc.SparseTensor):
        assert found.is_coalesced
        assert found.shape == tuple(expected.shape)
        assert found.blocksize or stc.SparseTensor(found.coords, found.values, found.shape, check=True).nnz == found.nnz
    values = x.values.clone().requires_grad_()

    def call(v: torch.Tensor) -> torch.Tensor:
        made = SPELLINGS[name](x.with_values(v))
        return made.values if isinstance(made, stc.SparseTensor) else made

    if name != "x.detach()" and call(values).numel():
        assert torch.autograd.gradcheck(call, values)


def test_view_is_reshape() -> None:
    x = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0]])
    assert torch.equal(stc.SparseTensor.from_dense(x).view(3, 2).to_dense(), x.view(3, 2))
    assert torch.equal(stc.SparseTensor.from_dense(x).view(-1).to_dense(), x.view(-1))


def test_patterns_are_found_once() -> None:
    x = sparse(dense(0, (4, 6)))
    for call in (lambda y: y.T, lambda y: y.reshape(3, 8), lambda y: y.tril(), lambda y: y.diagonal()):
        assert call(x).pattern is call(x * 2).pattern


def test_elements_masks_and_matrices() -> None:
    given = dense(0, (4, 6, 5))
    x = sparse(given)
    assert all(float(x[i, j, k]) == float(given[i, j, k]) for i in range(4) for j in range(6) for k in range(5))
    assert x[1:2, 1:2, 1:2].item() == given[1, 1, 1].item()
    torch.testing.assert_close(x[x > 2].to_dense(), torch.where(given > 2, given, 0))
    torch.testing.assert_close(x.matricize(1).to_dense(), given.permute(1, 0, 2).reshape(6, 20))
    matrix = sparse(given[0])
    torch.testing.assert_close(matrix.T.to_dense(), given[0].T)
    torch.testing.assert_close(matrix.t().to_dense(), given[0].T)


def test_a_mask_in_uint8_as_torch_has_it() -> None:
    x = dense(0, (3, 6))
    torch.testing.assert_close(sparse(x)[torch.tensor([1, 0, 1], dtype=torch.uint8)].to_dense(), x[[0, 2]])


def test_ndarrays_are_indices_as_numpy_has_them() -> None:
    """Where uint8 is no mask, and strides may be negative."""
    x = dense(0, (3, 6))
    for index in (np.array([0, 2, 1], np.uint8), np.arange(3)[::-1], np.array([True, False, True])[::-1], np.array([])):
        expected = x.numpy()[index.astype(int) if not index.size else index]
        np.testing.assert_array_equal(sparse(x)[index].to_dense().numpy(), expected)


def test_copies_of_the_same_coordinates_are_written_in_place() -> None:
    x, semi = stc.SparseTensor([[0, 2]], [1.0, 2.0], (3,)), stc.SparseTensor([[0, 2]], torch.ones(2, 2), (3, 2))
    values = x.values
    x.copy_(stc.SparseTensor([[0, 2]], [3.0, 4.0], (3,)))
    assert x.values is values
    assert values.tolist() == [3.0, 4.0]
    x.copy_(stc.SparseTensor([[1, 2]], [5.0, 6.0], (3,)))
    assert x.to_dense().tolist() == [0.0, 5.0, 6.0]
    labelled = stc.SparseTensor([[1, 2]], [5.0, 6.0], (3,)).with_labels({"item": ["a", "b", "c"]})
    assert x.copy_(labelled).labels["item"].tolist() == ["a", "b", "c"]
    for other in (semi, stc.SparseTensor([[0, 2]], [1.0, 2.0], (4,))):
        with pytest.raises(stc.ShapeError, match="of shape"):
            x.copy_(other)


@pytest.mark.parametrize("offset", [-2, 0, 1])
def test_a_vector_on_a_diagonal(offset: int) -> None:
    x = torch.tensor([1.0, 0, 2])
    assert torch.equal(sparse(x).diag(offset).to_dense(), x.diag(offset))


def test_long_modes_are_rolled() -> None:
    """No index of each position is made."""
    x = stc.SparseTensor([[0, 2**62 - 1], [1, 0]], [1.0, 2.0], (2**62, 2**40))
    assert x.roll(-1, 0).coords.tolist() == [[2**62 - 2, 2**62 - 1], [0, 1]]
    assert x.roll((1, 2**40 - 1), (0, 1)).coords.tolist() == [[0, 1], [2**40 - 1, 0]]
    labelled = stc.eye(3).with_labels({"user": ["a", "b", "c"], "item": None})
    assert labelled.roll(1, 0).labels["user"].tolist() == ["c", "a", "b"]


def test_torchs_names() -> None:
    x = sparse(dense(0, (4, 6)))
    assert (x.size(), x.size(-1), x.ndim, x.dim(), x.numel(), len(x)) == (torch.Size([4, 6]), 6, 2, 2, 24, 4)
    assert x.indices() is x.coords
    assert x.is_sparse
    assert not x.is_cuda
    kinds = [x.float(), x.double(), x.half(), x.bfloat16(), x.int(), x.long()]
    assert [k.dtype for k in kinds] == [
        getattr(torch, n) for n in ("float32", "float64", "float16", "bfloat16", "int32", "int64")
    ]
    y = x.clone().requires_grad_()
    assert y.requires_grad
    assert not y.detach().requires_grad
    assert y.contiguous() is y


def test_shapes_past_what_a_number_holds() -> None:
    big = 1 << 40
    x = stc.SparseTensor([[3, 5], [7, big - 1], [1, 2]], torch.ones(2), (big, big, 4))
    y = x.reshape(big, big * 2, 2)
    assert y.coords.tolist() == [[3, 5], [14, 2 * big - 1], [1, 0]]
    assert y.reshape(x.shape).coords.equal(x.coords)
    with pytest.raises(stc.ShapeError, match=r"2\*\*63"):
        x.flatten()
    none = stc.zeros(3, 0, 4)
    assert none.reshape(0, 7).shape == (0, 7)
    assert none[1].shape == (0, 4)


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "x[9]": (lambda x: x[9], stc.CoordinateError, "out of range"),
    "x[:, -7]": (lambda x: x[:, -7], stc.CoordinateError, "out of range"),
    "x[[9]]": (lambda x: x[[9]], stc.CoordinateError, "out of range"),
    "x[:, [0, 6]]": (lambda x: x[:, [0, 6]], stc.CoordinateError, "index 6 is out of range for mode 1 of size 6"),
    "x[1:, [-7, 0]]": (lambda x: x[1:, [-7, 0]], stc.CoordinateError, "index -7 is out of range for mode 1"),
    "x[[0, 4], [0, 0]]": (lambda x: x[[0, 4], [0, 0]], stc.CoordinateError, "index 4 is out of range for mode 0"),
    "x[:, :, [2]] of a dense mode": (
        lambda x: x.with_values(torch.ones(x.nnz, 2))[:, :, [2]],
        stc.CoordinateError,
        "index 2 is out of range for mode 2 of size 2",
    ),
    "x[[0]] of no rows": (lambda x: x[:0][[0]], stc.CoordinateError, "index 0 is out of range for mode 0 of size 0"),
    "x[1, 1, 1]": (lambda x: x[1, 1, 1], stc.ShapeError, "3 indices"),
    "x[..., ...]": (lambda x: x[..., ...], stc.ShapeError, "of …"),
    "x['a']": (lambda x: x["a"], stc.ShapeError, "mode 0 has no labels of text"),
    "x[1.5]": (lambda x: x[1.5], stc.ShapeError, r"found 1\.5 \(float\)"),
    "x[matrix]": (lambda x: x[torch.ones(2, 2, dtype=torch.long)], stc.ShapeError, "one mode"),
    "x[[1, 2], [0]]": (lambda x: x[[1, 2], [0]], stc.ShapeError, "one length"),
    "x.reshape(5, -1)": (lambda x: x.reshape(5, -1), stc.ShapeError, "cannot take the shape"),
    "x.reshape(-1, -1)": (lambda x: x.reshape(-1, -1), stc.ShapeError, "cannot take the shape"),
    "x.reshape(())": (lambda x: x.reshape(()), stc.ShapeError, "cannot take the shape"),
    "x[None].T": (lambda x: x[None].T, stc.ShapeError, "of a matrix"),
    "x.transpose(0, 5)": (lambda x: x.transpose(0, 5), stc.ShapeError, "no mode 5"),
    "x.item()": (lambda x: x.item(), stc.ShapeError, "one position"),
    "x.diagonal(0, 1, 1)": (lambda x: x.diagonal(0, 1, 1), stc.ShapeError, "two modes"),
    "x.narrow(0, 'a', 1)": (lambda x: x.narrow(0, "a", 1), stc.ShapeError, "the start must be an integer, found 'a'"),
    "x.narrow(0, 0, 1.5)": (lambda x: x.narrow(0, 0, 1.5), stc.ShapeError, "the length must be an integer, found 1.5"),
    "x.topk(True)": (
        lambda x: x.topk(True),
        stc.ShapeError,
        "topk: the number of elements must be an integer, found True",
    ),
    "x.topk('a')": (lambda x: x.topk("a"), stc.ShapeError, "the number of elements must be an integer"),
    "x.max('a')": (lambda x: x.max("a"), stc.ShapeError, "topk: a tensor of 2 modes has no mode 'a'"),
    "x.split('a')": (lambda x: x.split("a"), stc.ShapeError, "the length of a part must be an integer, found 'a'"),
    "x.split([1, 1.5])": (
        lambda x: x.split([1, 1.5]),
        stc.ShapeError,
        "the length of a part must be an integer, found 1.5",
    ),
    "x.chunk(True)": (lambda x: x.chunk(True), stc.ShapeError, "a number of parts must be an integer, found True"),
    "x.roll(1.5, 0)": (lambda x: x.roll(1.5, 0), stc.ShapeError, "a shift must be an integer, found 1.5"),
    "x.flip(1.5)": (lambda x: x.flip(1.5), stc.ShapeError, "no mode 1.5"),
    "x.reshape(None)": (lambda x: x.reshape(None), stc.ShapeError, "a size must be an integer, found None"),
    "x.movedim((0, 1), 0)": (lambda x: x.movedim((0, 1), 0), stc.ShapeError, "a place for each mode"),
    "x.tril(True)": (lambda x: x.tril(True), stc.ShapeError, "the offset of a diagonal must be an integer"),
    "x.flatten(1, 0)": (lambda x: x.flatten(1, 0), stc.ShapeError, "flatten joins"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, said = REFUSED[name]
    with pytest.raises(kind, match=said):
        call(sparse(dense(0, (4, 6))))


def test_a_part_of_dense_modes_has_the_same_pattern() -> None:
    x = stc.SparseTensor([[0, 2], [1, 0]], torch.arange(12.0).view(2, 2, 3), (3, 2, 2, 3))
    for key in ((..., 1), (..., 0, slice(None, None, -1)), (..., [2, 0]), (..., None), (..., slice(1, 3)), ...):
        part = x[key]
        assert part.pattern is x.pattern
        assert part.values.data_ptr() != x.values.data_ptr()
    assert x[..., 1:].values.is_contiguous()
    assert torch.equal(x[..., 0, ::-1].to_dense(), x.to_dense()[..., 0, :].flip(-1))


def test_indices_within_compiled_functions() -> None:
    x, index = stc.rand((30, 40), nnz=200), torch.tensor([3, 1, -1, 7])
    for key in (index, (slice(None), index), (slice(2, 9), index), slice(None, None, -1), (None, slice(None), 3)):

        def of_values(values: torch.Tensor, key: Any = key) -> torch.Tensor:
            return x.with_values(values)[key].values.sum()

        compiled = torch.compile(of_values, backend="eager", dynamic=True)
        torch.testing.assert_close(compiled(x.values), of_values(x.values))


def test_a_slice_costs_what_its_entries_do() -> None:
    n = 1 << 60
    x = stc.SparseTensor(torch.tensor([[1, n // 2, n - 1]]), torch.tensor([1.0, 2.0, 3.0]), (n,))
    assert x[5:].coords.tolist() == [[n // 2 - 5, n - 6]]
    assert x[::2].nnz == 1


def test_index_tensors_that_are_neighbours_stay_in_their_place() -> None:
    x, a, b = dense(2, (3, 4, 5, 6)), torch.tensor([0, 2, 1]), torch.tensor([3, 1, 1])
    every = slice(None)
    for key in [(a, b), (every, a, b), (a, every, b), (every, every, a, b), (every, a, every, b), (slice(1, 3), a, b)]:
        torch.testing.assert_close(whole(sparse(x)[key]), x[key])


def test_edges_of_indices_and_conversions() -> None:
    x = sparse(dense(0, (4, 5)))
    assert torch.equal(x.narrow(0, -1, 1).to_dense(), x.to_dense().narrow(0, -1, 1))
    for start, length in ((0, 5), (0, -1), (-5, 1)):
        with pytest.raises(stc.CoordinateError, match="narrow"):
            x.narrow(0, start, length)
    assert x[[]].shape == (0, 5)
    for key in (True, torch.tensor(False), np.bool_(True)):
        with pytest.raises(stc.ShapeError, match="tensor, mask or label must be an integer"):
            x[key]
    twice = stc.SparseTensor([[0, 0]], torch.tensor([0.6, 0.6]), (1,), coalesce=False)
    assert twice.int().to_dense().tolist() == [1]
    empty = stc.SparseTensor([[1]], torch.zeros(1, 0, 4), (2, 0, 4))
    assert empty.reshape(2, -1).shape == (2, 0)


def test_parts_of_a_mode_of_size_0() -> None:
    x, dense = stc.zeros((0, 3)), torch.zeros(0, 3)
    assert [part.shape for part in x.split(2)] == [tuple(part.shape) for part in dense.split(2)]
    assert [part.shape for part in x.chunk(3)] == [tuple(part.shape) for part in dense.chunk(3)]
    for call in (lambda: x.split(0, 1), lambda: x.split(-1), lambda: x.chunk(0)):
        with pytest.raises(stc.ShapeError, match="found"):
            call()


def test_diagonals_beyond_int64_have_no_entries() -> None:
    x = stc.eye(3)
    for offset in (2**62, 2**63 - 1, 2**63, 2**70):
        for sign in (1, -1):
            assert (x.diagonal(sign * offset).shape, x.diagonal(sign * offset).nnz) == ((0,), 0)
        assert (x.tril(offset).nnz, x.triu(offset).nnz, x.tril(-offset).nnz, x.triu(-offset).nnz) == (3, 0, 0, 3)
    with pytest.raises(stc.ShapeError, match=r"offset of a diagonal must be an integer, found 0\.5"):
        x.diagonal(0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", ["x > 2", "explicit zeros", "NaN", "duplicates"])
def test_what_is_not_in_a_mask_is_not_in_the_result(mask: str) -> None:
    nan = float("nan")
    x = stc.SparseTensor([[0, 0, 0, 0], [0, 1, 2, 3]], [1.0, 5.0, nan, 7.0], (1, 5))
    held = {
        "x > 2": x > 2,
        "explicit zeros": x.with_values([0.0, 2.0, 0.0, -1.0]),
        "NaN": stc.SparseTensor([[0, 0, 0], [1, 3, 4]], [nan, 1.0, 1.0], (1, 5)),  # true, as bool(nan) is
        "duplicates": stc.SparseTensor([[0] * 4, [1, 3, 0, 0]], [1.0, 1.0, 2.0, -2.0], (1, 5), coalesce=False),
    }[mask]
    assert x[held].coords.tolist() == [[0, 0], [1, 3]]
    assert x[held].values.tolist() == [5.0, 7.0]
    assert x[held].mean(entries=True).item() == 6.0
    with pytest.raises(stc.ShapeError):
        x[held.T]


@pytest.mark.parametrize("size", [7, 500])
def test_rows_and_columns_of_long_and_short_modes(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    coords = torch.unique(torch.randint(0, size, (2, 60), generator=generator), dim=1)
    x = stc.SparseTensor(coords, torch.rand(coords.shape[1], generator=generator), (size, size))
    index = torch.randint(0, size, (90,), generator=generator)
    expected = x.to_dense()
    mixed = torch.randperm(size, generator=generator)
    y = stc.SparseTensor(torch.randint(0, 5, (3, 40), generator=generator), torch.rand(40), (5, 5, 5))
    one_each, dense_y = torch.tensor([3, 0, 4]), y.to_dense()
    for found, wanted in (
        (x[index], expected[index]),
        (x[mixed], expected[mixed]),
        (x[index, 1 : size - 1], expected[index, 1 : size - 1]),
        (x[:, index], expected[:, index]),
        (x[:, mixed], expected[:, mixed]),
        (x[::3, index], expected[::3, index]),
        (x[index, ::2], expected[index, ::2]),
        (y[:, one_each], dense_y[:, one_each]),
        (y[:, one_each, None, :2], dense_y[:, one_each, None, :2]),
        (y[:, :, one_each.repeat(2)], dense_y[:, :, one_each.repeat(2)]),
        (y[1, one_each], dense_y[1, one_each]),
        (y[:, 2, one_each], dense_y[:, 2, one_each]),
        (y[:, one_each.repeat(2)], dense_y[:, one_each.repeat(2)]),
        (y[::2][:, one_each], dense_y[::2][:, one_each]),
        (y[::-1, one_each], dense_y.flip(0)[:, one_each]),
    ):
        assert found.is_coalesced
        assert is_sorted_unique([*found.coords])
        assert torch.equal(found.to_dense(), wanted)


@pytest.mark.parametrize("size", [7, 500])
def test_native_rows(size: int, natively: Callable[[bool], None]) -> None:
    natively(True)
    test_rows_and_columns_of_long_and_short_modes(size)
    assert sparse(dense(0))[torch.zeros(0, dtype=torch.long)].nnz == 0


@pytest.mark.parametrize("dense_sizes", [(), (3,)])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.complex128], ids=str
)
def test_native_rows_of_any_type(
    dtype: torch.dtype, dense_sizes: tuple[int, ...], natively: Callable[[bool], None]
) -> None:
    natively(True)
    coords = torch.randint(0, 9, (2, 40), generator=torch.Generator().manual_seed(0)).unique(dim=1)
    values = torch.randn(coords.shape[1], *dense_sizes, dtype=torch.complex128)
    x = stc.SparseTensor(coords, (values if dtype.is_complex else values.real).to(dtype), (9, 9, *dense_sizes))
    index = torch.tensor([4, 0, 4, 8])
    assert torch.equal(x[index].to_dense(), x.to_dense()[index])
    assert torch.equal(x[:, index].to_dense(), x.to_dense()[:, index])
    if dtype.is_complex:
        conjugate = x.with_values(x.values.conj())
        assert torch.equal(conjugate[index].to_dense(), conjugate.to_dense()[index])
        learned = x.with_values(x.values.clone().requires_grad_())
        (found,) = torch.autograd.grad(learned[index].values.abs().square().sum(), learned.values)
        row = x.coords[0]
        times = (row == 0).double() + 2 * (row == 4) + (row == 8)
        torch.testing.assert_close(
            found, 2 * learned.values.detach() * times.view(-1, *[1] * len(dense_sizes)).to(dtype)
        )


def test_what_expand_would_take_is_asked_for() -> None:
    x = stc.full((1, 2), 1.0)
    with stc.options(memory_limit=10_000), pytest.raises(stc.OutOfMemoryError, match="10,400 bytes"):
        x.expand(100, 2)
