"""SparseTensor: what it accepts, what it refuses, coalescing, gradients, conversions."""

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import processes
import pytest
import torch
from cases import LIMITS, ends, every_wide_shape, fits
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsetc as stc
from sparsetc.errors import CoordinateError, DeviceError, DtypeError, FormatError, OutOfMemoryError, ShapeError
from sparsetc.options import options
from sparsetc.tensor import coords as crd
from sparsetc.tensor.dtypes import DTYPES
from sparsetc.tensor.sparse_tensor import SparseTensor

LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse.*beta state:UserWarning")


def small() -> SparseTensor:
    return SparseTensor([[1, 0, 1], [2, 1, 2]], [1.0, 2.0, 3.0], (2, 4))


def random_tensor(shape: tuple[int, ...], nnz: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> SparseTensor:
    rng = torch.Generator().manual_seed(seed)
    coords = torch.stack([torch.randint(0, s, (nnz,), generator=rng) for s in shape])
    return SparseTensor(coords, torch.randn(nnz, generator=rng, dtype=dtype), shape)


@st.composite
def triples(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Coordinates with duplicates, whole values (so that sums are exact), a shape, perhaps a dense mode."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    nnz = draw(st.integers(0, 20))
    dense = draw(st.sampled_from([(), (3,), (2, 2)]))
    coords = np.array([[draw(st.integers(0, s - 1)) for _ in range(nnz)] for s in shape], dtype=np.int64)
    seed = draw(st.integers(0, 99))
    values = np.random.default_rng(seed).integers(-9, 9, (nnz, *dense)).astype(np.float64)
    return coords.reshape(len(shape), nnz), values, (*shape, *dense)


def dense_by_numpy(coords: np.ndarray, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(shape)
    np.add.at(out, tuple(coords), values)
    return out


# ---- coalescing -------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(triples())
def test_coalesce_means_the_same_tensor(case: tuple[np.ndarray, np.ndarray, tuple[int, ...]]) -> None:
    coords, values, shape = case
    expected = dense_by_numpy(coords, values, shape)
    x = SparseTensor(coords, values, shape)
    assert crd.is_coalesced(x.coords, x.shape[: x.sparse_order])
    np.testing.assert_array_equal(x.to_dense().numpy(), expected)
    raw = SparseTensor(coords, values, shape, coalesce=False)
    assert raw.nnz == coords.shape[1]
    assert not raw.is_coalesced
    np.testing.assert_array_equal(raw.to_dense().numpy(), expected)
    assert torch.equal(raw.coalesce().coords, x.coords)


@settings(max_examples=60, deadline=None)
@given(triples(), st.randoms(use_true_random=False))
def test_conversions_keep_the_tensor(case: tuple[np.ndarray, np.ndarray, tuple[int, ...]], random: object) -> None:
    coords, values, shape = case
    x = SparseTensor(coords, values, shape)
    dense = x.to_dense()
    assert torch.equal(SparseTensor.from_torch(x.to_torch()).to_dense(), dense)
    assert torch.equal(SparseTensor.from_dense(dense).to_dense(), dense)
    assert torch.equal(SparseTensor.from_numpy(*x.to_numpy()).to_dense(), dense)
    flat = x.expand_dense()
    assert flat.dense_order == 0
    assert torch.equal(flat.to_dense(), dense)
    modes = list(range(flat.order))
    random.shuffle(modes)  # type: ignore[attr-defined]
    turned = flat.permute(*modes)
    assert torch.equal(turned.to_dense(), dense.permute(modes))
    assert crd.is_coalesced(turned.coords, turned.shape)


def test_duplicates_are_summed() -> None:
    x = small()
    assert x.coords.tolist() == [[0, 1], [1, 2]]
    assert x.values.tolist() == [2.0, 4.0]
    assert x.is_coalesced
    assert x.coalesce() is x


def test_values_of_sorted_input_are_kept_and_coordinates_copied() -> None:
    coords, values = torch.tensor([[0, 0, 2], [1, 3, 0]]), torch.ones(3)
    x = SparseTensor(coords, values, (3, 4))
    assert x.values is values
    assert x.coords.data_ptr() != coords.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_floats_are_summed_in_float32(dtype: torch.dtype) -> None:
    # one by one, 1 is lost beside 4096 in float16 and bfloat16; 512 ones together are not
    values = torch.ones(513, dtype=dtype)
    values[0] = 4096
    for coalesce in (True, False):
        x = SparseTensor(torch.zeros(1, 513, dtype=torch.int64), values, (1,), coalesce=coalesce)
        assert x.dtype == dtype
        assert x.to_dense().item() == 4608


def test_integer_duplicates_never_wrap() -> None:
    ok = SparseTensor([[0, 0]], torch.tensor([100, 27], dtype=torch.int8), (1,))
    assert ok.values.tolist() == [127]
    with pytest.raises(DtypeError, match="300"):
        SparseTensor([[0, 0, 0]], torch.tensor([100, 100, 100], dtype=torch.int8), (1,))


def test_product_of_sizes_beyond_int64() -> None:
    shape = (2**63 - 1, 2**62, 3, 2**61)
    coords = [[2**62, 5, 2**62, 5], [7, 2**62 - 1, 7, 2**62 - 1], [0, 2, 0, 1], [9, 2**61 - 1, 9, 0]]
    x = SparseTensor(coords, [1.0, 2.0, 3.0, 4.0], shape)
    assert x.coords.T.tolist() == [[5, 2**62 - 1, 1, 0], [5, 2**62 - 1, 2, 2**61 - 1], [2**62, 7, 0, 9]]
    assert x.values.tolist() == [4.0, 2.0, 4.0]
    assert len(crd.sort_keys(x.coords, shape)) > 1
    assert x.permute(3, 0, 2, 1).permute(1, 3, 2, 0).coords.tolist() == x.coords.tolist()
    for limit in (None, 2**300):
        with pytest.raises(OutOfMemoryError, match="bytes"):
            x.to_dense(memory_limit=limit)
    with pytest.raises(ShapeError, match="2\\*\\*63"):
        x.to_torch()


@every_wide_shape
def test_wide_shapes_are_sorted_and_summed(shape: tuple[int, ...]) -> None:
    at = ends(shape)
    x = SparseTensor(torch.tensor([*at, *at]).T, torch.arange(2.0 * len(at)), shape)
    wanted = {p: 2.0 * n + len(at) for n, p in enumerate(at)}
    assert [*map(tuple, x.coords.T.tolist())] == sorted(at)
    assert x.values.tolist() == [wanted[p] for p in sorted(at)]
    for modes in itertools.permutations(range(len(shape))) if len(shape) < 5 else [(5, 4, 3, 2, 1, 0)]:
        turned = x.permute(*modes)
        assert [*map(tuple, turned.coords.T.tolist())] == sorted(tuple(p[m] for m in modes) for p in at)
        assert torch.equal(turned.permute(*map(modes.index, range(len(shape)))).values, x.values)


def test_linear_key_up_to_the_last_value() -> None:
    shape = (2**31, 2**32)
    key, spread = crd.linear_key(torch.tensor([[2**31 - 1], [2**32 - 1]]), shape)
    assert key.tolist() == [2**63 - 1]
    assert spread == 2**63
    assert crd.linear_key(torch.zeros(2, 0, dtype=torch.int64), (0, 2**63 - 1))[0].numel() == 0


@pytest.mark.parametrize("number", LIMITS)
def test_integers_around_the_limits_of_int64(number: int) -> None:
    below = number - 1 if number > 0 else number + 1  # by one nearer to 0
    if fits(number):
        assert SparseTensor([[0, 1]], [number, 1], (2,)).values.tolist() == [number, 1]
        assert SparseTensor([[0, 0]], torch.tensor([below, number - below]), (2,)).values.tolist() == [number]
    else:
        with pytest.raises(DtypeError):
            SparseTensor([[0, 1]], [number, 1], (2,))
        with pytest.raises(DtypeError, match=f"a sum of duplicates holds {number}, which"):
            SparseTensor([[0, 0]], torch.tensor([below, number - below]), (2,))
    for coords in ([[0, number]], [[number, number]]):
        with pytest.raises((CoordinateError, FormatError), match=str(number)):
            SparseTensor(coords, [1.0, 2.0], (2**63 - 1,))
    if number == 2**63 - 1:
        assert SparseTensor([[number - 1]], [1.0], (number,)).shape == (number,)
    else:
        with pytest.raises(ShapeError, match=str(number)):
            SparseTensor([[0]], [1.0], (number,))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=30))
def test_lexsort_is_python_sort(rows: list[tuple[int, int, int]]) -> None:
    coords = torch.tensor(rows).T.contiguous()
    wanted = sorted(range(len(rows)), key=rows.__getitem__)
    assert crd.sorted_runs(list(coords))[0].tolist() == wanted
    assert crd.lexsort(coords, (4, 3, 5)).tolist() == wanted
    assert crd.is_sorted_unique(list(coords)) == (rows == sorted(set(rows)))


# ---- what it is -------------------------------------------------------------------------------------------------


def test_properties_and_repr() -> None:
    x = SparseTensor([[0, 1]], torch.ones(2, 3), (4, 3))
    assert (x.order, x.sparse_order, x.dense_order, x.nnz, x.density) == (2, 1, 1, 2, 0.5)
    text = repr(x)
    assert "\n" not in text
    assert str(x).startswith(text)
    for part in ("(4, 3)", "nnz=2", "dense_order=1", "0.5", "float32", "cpu"):
        assert part in text
    with pytest.raises(AttributeError):
        x.shape = (1, 2)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        x.other = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_kept(dtype: torch.dtype) -> None:
    x = SparseTensor([[2, 0]], torch.tensor([1, 2], dtype=dtype), (3,))
    assert x.dtype == dtype
    assert x.to_dense().dtype == dtype
    assert x.to_dense().tolist() == torch.tensor([2, 0, 1], dtype=dtype).tolist()
    assert SparseTensor.from_torch(x.to_torch()).dtype == dtype


def test_nan_inf_and_explicit_zeros_are_values() -> None:
    x = SparseTensor([[0, 1, 2]], [float("nan"), float("inf"), 0.0], (4,))
    assert x.nnz == 3
    assert x.to_dense()[0].isnan()
    assert SparseTensor.from_dense(x.to_dense()).nnz == 2


def test_empty_tensors() -> None:
    x = SparseTensor([[], []], [], (0, 3))
    assert (x.nnz, x.density) == (0, 0.0)
    assert x.to_dense().shape == (0, 3)
    assert x.to_scipy().shape == (0, 3)
    assert x.to_torch(torch.sparse_csr).shape == (0, 3)
    assert SparseTensor(np.zeros((2, 0), int), np.zeros(0), (4, 5)).to_dense().sum() == 0
    assert SparseTensor(np.zeros((1, 0), int), np.zeros((0, 2)), (4, 2)).expand_dense().shape == (4, 2)
    assert SparseTensor([[0, 1]], torch.ones(2, 0), (2, 0)).expand_dense().nnz == 0


def test_shape_is_inferred() -> None:
    assert SparseTensor([[3, 1], [0, 7]], [1, 2]).shape == (4, 8)
    assert SparseTensor([[3]], torch.ones(1, 5)).shape == (4, 5)


# ---- what it refuses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coords", "values", "shape", "error", "words"),
    [
        ([[0, 4]], [1.0, 2.0], (4,), CoordinateError, "mode 0.*nonzero 1 has 4.*size of mode 0 is 4"),
        ([[0, 1], [0, -2]], [1.0, 2.0], (4, 4), CoordinateError, "mode 1.*nonzero 1 has -2"),
        ([[0, -1]], [1.0, 2.0], None, CoordinateError, "nonzero 1 has -1"),
        ([[-1]], [1.0], None, CoordinateError, "nonzero 0 has -1"),
        ([[0]], [1.0], (0,), CoordinateError, "size of mode 0 is 0"),
        ([[0.5]], [1.0], (2,), FormatError, "integers.*float"),
        ([[True]], [1.0], (2,), FormatError, "integers.*bool"),
        ([0, 1], [1.0, 2.0], (2,), FormatError, "2-D"),
        ([[0, 1], [1]], [1.0, 2.0], (2, 2), FormatError, "rectangle"),
        ([["a"]], [1.0], (2,), FormatError, "coords"),
        (np.array([[2**63]], dtype=np.uint64), [1.0], (2,), FormatError, "2\\*\\*63"),
        (np.zeros((0, 1), int), [1.0], (), FormatError, "order 0"),
        ([[0, 1, 2]], [1.0], (3,), FormatError, "3 columns.*1 values"),
        ([[0, 1], [0, 1], [1, 1]], [1.0, 2.0, 3.0], (2, 2), FormatError, "transpose"),
        ([[0]], 1.0, (1,), FormatError, "single number"),
        ([[0]], np.array([2**63], np.uint64), (1,), DtypeError, "2\\*\\*63 or more"),
        ([[0]], np.array(["a"]), (1,), DtypeError, "values"),
        ([[0]], [1.0], (2, 2), ShapeError, "2 modes.*1 rows"),
        ([[0]], [[1.0, 2.0]], (2, 3), ShapeError, "dense"),
        ([[0]], [1.0], (2.5,), ShapeError, "2.5"),
        ([[0]], [1.0], (-1,), ShapeError, "-1"),
        ([[0]], [1.0], (True,), ShapeError, "True"),
        ([[0]], [1.0], (2**63,), ShapeError, "2\\*\\*63"),
        ([[0]], [1.0], 3, ShapeError, "sequence"),
        ([[]], [], None, ShapeError, "inferred"),
    ],
)
def test_refused(coords: object, values: object, shape: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SparseTensor(coords, values, shape)


def test_devices_must_agree() -> None:
    with pytest.raises(DeviceError, match="meta"):
        SparseTensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, device="meta"), (1,))
    with pytest.raises(DeviceError, match="meta"):
        small().with_values(torch.ones(2, device="meta"))


def test_check_false_skips_the_range_only() -> None:
    assert SparseTensor([[5]], [1.0], (2,), check=False).nnz == 1
    with pytest.raises(FormatError):
        SparseTensor([[5, 1]], [1.0], (2,), check=False)


def test_numpy_views_are_accepted() -> None:
    coords = np.array([[2, 1, 0]], dtype=np.int16)[:, ::-1]
    values = np.arange(3.0)[::-1]
    coords.flags.writeable = False
    values = values.astype(">f8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = SparseTensor(coords, values, (3,))
    assert x.to_dense().tolist() == [2.0, 1.0, 0.0]


def test_the_memory_limit() -> None:
    x = SparseTensor([[0], [0]], [1.0], (100, 100))
    assert x.to_dense(memory_limit=40_008).shape == (100, 100)  # and a key of 8 bytes
    for limited in (options(memory_limit=40_007), nullcontext()):
        with limited as limit, pytest.raises(OutOfMemoryError, match=r"would take 40,008 .* is 40,007"):
            x.to_dense(memory_limit=None if limit else 40_007)
    with pytest.raises(MemoryError):
        SparseTensor([[0], [0]], [1.0], (2**40, 2**40)).to_dense()


# ---- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["dense", "permute", "expand", "coo", "half"])
def test_gradients_reach_the_values(through: str) -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64, requires_grad=True)

    def function(v: torch.Tensor) -> torch.Tensor:
        x = SparseTensor([[1, 0, 1], [2, 1, 2]], v, (2, 4, 2))  # unsorted, with a duplicate
        if through == "permute":
            x = x.permute(1, 0, 2)
        if through == "expand":
            x = x.expand_dense().permute(2, 1, 0)
        if through == "coo":
            x = SparseTensor.from_torch(x.to_torch())
        if through == "half":
            x = x.to(torch.float32).to(torch.float64)
        return x.to_dense() ** 2

    x = SparseTensor([[1, 0, 1], [2, 1, 2]], values, (2, 4, 2))
    assert x.requires_grad
    if through == "half":
        function(values).sum().backward()
        expected = torch.tensor([[12.0, 16.0], [6.0, 8.0], [12.0, 16.0]], dtype=torch.float64)
        assert torch.allclose(values.grad, expected)
    else:
        assert torch.autograd.gradcheck(function, values)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_through_torch_layouts(layout: torch.layout) -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    blocksize = (2, 2) if layout in LAYOUTS[3:] else None
    t = SparseTensor([[1, 0, 1], [2, 1, 2]], values, (2, 4)).to_torch(layout, blocksize)
    (SparseTensor.from_torch(t).to_dense() ** 2).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [8.0, 4.0, 8.0]


def test_gradients_from_dense() -> None:
    a = torch.tensor([[0.0, 2.0], [3.0, 0.0]], requires_grad=True)
    (SparseTensor.from_dense(a).values ** 2).sum().backward()
    assert a.grad is not None
    assert a.grad.tolist() == [[0.0, 4.0], [6.0, 0.0]]


# ---- the same pattern -------------------------------------------------------------------------------------------


def test_with_values_shares_pattern_and_cache() -> None:
    x = small()
    y = x.with_values([7.0, 8.0])
    assert y.coords is x.coords
    assert y.pattern is x.pattern
    assert small().pattern is not x.pattern
    assert x.permute(1, 0).pattern is not x.pattern
    assert y.to_dense()[1, 2] == 8
    with pytest.raises(ShapeError, match="\\(2,\\)"):
        x.with_values([1.0])


def test_to_as_torch_does() -> None:
    x = small()
    assert x.to("cpu") is x
    assert x.cpu() is x
    assert x.to(torch.float32) is x
    y = x.to(torch.float16)
    assert y.dtype == torch.float16
    assert y.pattern is x.pattern
    assert x.to(y).dtype == torch.float16
    assert x.to("cpu", torch.float64).dtype == torch.float64
    assert x.to(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
    assert x.to("meta").coords.device.type == "meta"
    with pytest.raises(DtypeError):
        x.to(torch.uint16)


def test_permute_refusals() -> None:
    x = SparseTensor([[0, 1], [1, 0]], torch.ones(2, 3, 4), (2, 2, 3, 4))
    assert x.permute(0, 1, 2, 3) is x
    assert x.permute((1, 0, -1, -2)).shape == (2, 2, 4, 3)
    moved = x.permute(2, 0, 1, 3)  # a dense mode before sparse ones: those become sparse
    assert (moved.dense_order, moved.shape) == (0, (3, 2, 2, 4))
    torch.testing.assert_close(moved.to_dense(), x.to_dense().permute(2, 0, 1, 3))
    for wrong in ((0, 1), (0, 0, 1, 2), (0, 1, 2, 9), ("a",), ("abcd",), (0, 1, 2, None), (0.0, 1, 2, 3), ((0, 1), 2)):
        with pytest.raises(ShapeError, match=r"once|permute: a tensor of 4 modes has no mode"):
            x.permute(*wrong)  # type: ignore[arg-type]


def test_a_matrix_with_a_dense_mode_is_to_be_expanded_first() -> None:
    x = SparseTensor([[0, 2]], torch.ones(2, 3), (4, 3))
    for call in (x.to_scipy, lambda: x.to_torch(torch.sparse_csr)):
        with pytest.raises(
            ShapeError, match=r"matrices; .* shape \(4, 3\), 1 modes dense; call expand_dense\(\) first"
        ):
            call()
    assert x.expand_dense().to_torch(torch.sparse_csr).shape == (4, 3)
    with pytest.raises(ShapeError, match=r"0 modes dense$"):
        SparseTensor([[0], [0], [0]], torch.ones(1), (1, 1, 1)).to_scipy()


# ---- to and from others -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_layouts(layout: torch.layout) -> None:
    x = random_tensor((6, 8), 15)
    blocksize = (3, 2) if layout in LAYOUTS[3:] else None
    t = x.to_torch(layout, blocksize)
    assert t.layout == layout
    torch.testing.assert_close(t.to_dense(), x.to_dense())
    back = SparseTensor.coerce(t)
    assert back is not None
    torch.testing.assert_close(back.to_dense(), x.to_dense())


def test_torch_layout_refusals() -> None:
    x = random_tensor((6, 8), 15)
    with pytest.raises(FormatError, match="blocksize"):
        x.to_torch(torch.sparse_bsr)
    with pytest.raises(FormatError, match="blocksize"):
        x.to_torch(torch.sparse_csr, (2, 2))
    with pytest.raises(ShapeError, match="divide"):
        x.to_torch(torch.sparse_bsr, (4, 2))
    with pytest.raises(FormatError, match="strided"):
        x.to_torch(torch.strided)
    with pytest.raises(ShapeError, match="matrices"):
        random_tensor((2, 3, 4), 5).to_torch(torch.sparse_csr)


def test_from_torch_kinds() -> None:
    a = torch.arange(1.0, 25.0).reshape(2, 3, 4)
    for t in (a.to_sparse(), a.to_sparse(2), a.to_sparse_csr(), a.to_sparse_csr(dense_dim=1), a):
        assert torch.equal(SparseTensor.from_torch(t).to_dense(), a)
    uncoalesced = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,), check_invariants=True)
    assert SparseTensor.from_torch(uncoalesced).values.tolist() == [3.0]
    lying = torch.sparse_coo_tensor([[2, 0]], [1.0, 2.0], (3,), is_coalesced=True, check_invariants=False)
    assert SparseTensor.from_torch(lying).coords.tolist() == [[0, 2]]
    with pytest.raises(DtypeError):
        SparseTensor.from_torch(
            torch.sparse_coo_tensor([[0]], torch.ones(1, dtype=torch.complex32), (1,), check_invariants=True)
        )
    with pytest.raises(FormatError):
        SparseTensor.from_dense(torch.tensor(1.0))


def test_scipy() -> None:
    sp = pytest.importorskip("scipy.sparse")
    x = random_tensor((6, 8), 15)
    a = x.to_scipy()
    np.testing.assert_array_equal(a.toarray(), x.to_dense().numpy())
    for m in (a, a.tocsr(), a.tocsc(), a.todok(), a.tolil(), a.tobsr(), sp.csr_matrix(a), sp.dia_array(a)):
        back = SparseTensor.coerce(m)
        assert back is not None
        np.testing.assert_array_equal(back.to_dense().numpy(), m.toarray())
    one = sp.coo_array((np.ones(2), (np.array([3, 1]),)), shape=(5,))
    assert SparseTensor.from_scipy(one).to_dense().tolist() == [0, 1, 0, 1, 0]
    for wrong in (random_tensor((2, 2, 2), 3), SparseTensor([[0]], torch.ones(1, 2), (1, 2))):
        with pytest.raises(ShapeError):
            wrong.to_scipy()
    with pytest.raises(DtypeError, match="bfloat16"):
        x.to(torch.bfloat16).to_scipy()
    with pytest.raises(FormatError):
        SparseTensor.from_scipy(np.eye(2))


def test_pydata() -> None:
    sparse = pytest.importorskip("sparse")
    x = random_tensor((3, 4, 5), 12)
    p = x.to_pydata()
    np.testing.assert_array_equal(p.todense(), x.to_dense().numpy())
    for a in (p, sparse.GCXS(p), sparse.DOK.from_coo(p)):
        back = SparseTensor.coerce(a)
        assert back is not None
        np.testing.assert_array_equal(back.to_dense().numpy(), x.to_dense().numpy())
    with pytest.raises(FormatError, match="fill value"):
        SparseTensor.from_pydata(p + 1)


def test_coerce_leaves_the_rest_alone() -> None:
    x = small()
    assert SparseTensor.coerce(x) is x
    for other in (torch.ones(3), np.ones(3), 3, None, "text", [1]):
        assert SparseTensor.coerce(other) is None


def test_scipy_and_pydata_are_not_imported() -> None:
    code = (
        "import sys, torch, sparsetc.tensor.sparse_tensor as t; x = t.SparseTensor([[0]], [1.0], (2,)); x.to_dense();"
        "t.SparseTensor.coerce(3); assert not {'scipy', 'sparse'} & set(sys.modules)"
    )
    # torch itself may import scipy; then there is nothing to be seen
    bare = processes.run(["-c", "import sys, torch; sys.exit('scipy' in sys.modules)"])
    if bare.returncode == 0:
        done = processes.run(["-c", code])
        assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda() -> None:
    rng = torch.Generator().manual_seed(1)
    coords = torch.randint(0, 5, (3, 200), generator=rng)
    values = torch.randn(200, generator=rng, dtype=torch.float64)
    host = SparseTensor(coords, values, (5, 5, 5))
    x = SparseTensor(coords.cuda(), values.cuda(), (5, 5, 5))
    assert torch.equal(x.coords.cpu(), host.coords)
    torch.testing.assert_close(x.to_dense().cpu(), host.to_dense())
    torch.testing.assert_close(host.cuda().cpu().to_dense(), host.to_dense())
    with pytest.raises(CoordinateError):
        SparseTensor(coords.cuda(), values.cuda(), (5, 4, 5))
    with pytest.raises(DeviceError):
        SparseTensor(coords, values.cuda(), (5, 5, 5))


def test_what_a_sparse_tensor_is_not_is_refused() -> None:
    x = SparseTensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2))
    y = x.with_values([3.0, 4.0])
    for call in (np.asarray, np.array):
        with pytest.raises(stc.DtypeError, match=r"no ndarray: call \.to_dense\(\)\.numpy\(\)"):
            call(x)
    functions = (np.sort, np.median, np.result_type, np.fft.fft, np.linalg.diagonal)
    of_two = (np.array_equiv, np.cross, np.isclose, np.append)
    for call in (*functions, *(lambda a, f=f: f(a, a) for f in of_two), np.exp, np.cosh):
        with pytest.raises(stc.DtypeError, match=r"takes no SparseTensor: call \.to_dense\(\)"):
            call(x)
    with pytest.raises(stc.DtypeError, match="is dense"):
        np.add(1, x)
    assert np.sum(x) == 3
    assert (np.size(x), np.size(x, 1), np.ndim(x), np.shape(x)) == (4, 2, 2, (2, 2))
    assert np.flip(x).to_dense().tolist() == [[0, 2], [1, 0]]
    assert (np.ones((2, 2)) * x).to_dense().tolist() == x.to_dense().tolist()
    for other in (y, x.to_dense(), np.ones((2, 2)), 0, 1.0, x.to_scipy()):
        for compare in (operator.eq, operator.ne):
            if compare is operator.eq or not isinstance(other, int | float | SparseTensor):
                with pytest.raises(stc.DtypeError, match="== does not compare"):
                    compare(x, other)
    with pytest.raises(stc.DtypeError, match="absent entries"):
        operator.ne(x, 1.0)
    with pytest.raises(stc.DtypeError, match="neither true nor false"):
        bool(x)


def test_collections_tell_tensors_apart_by_identity() -> None:
    x, y = (SparseTensor([[0]], [value], (1,)) for value in (1.0, 1.0))
    assert {x: 1, y: 2}[y] == 2
    assert len({x, y}) == 2
    assert [x, y].index(x) == 0
    assert x in [None, "x", x]
    assert (x, y) == (x, y)
    weak = weakref.WeakKeyDictionary({x: 1, y: 2})
    assert weak[x] == 1
    assert y in weakref.WeakSet([y])
    assert x != None  # noqa: E711


# --- sides of 0, of 1, and of more positions than 64 bits count -------------------------------------------------------

CALLS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "sum of a mode": lambda x: x.sum(0),
    "mean": lambda x: x.mean(),
    "mean of a mode": lambda x: x.mean(0),
    "prod": lambda x: x.prod(),
    "prod of a mode": lambda x: x.prod(0),
    "times one row": lambda x: x * torch.full((1, 1), 3.0, dtype=torch.float64),
    "times one number": lambda x: x * torch.full((1,), 2.0, dtype=torch.float64),
    "diagonal": lambda x: x.diagonal(1),
    "diagonal past the corner": lambda x: x.diagonal(-4),
    "tril": lambda x: x.tril(-5),
    "triu": lambda x: x.triu(-5),
    "slice": lambda x: x[:, :0],
    "transpose": lambda x: x.T,
    "product": lambda x: x @ x.T,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (1, 1), (1, 4), (3, 1), (3, 4)])
@pytest.mark.parametrize("nnz", [0, 1])
def test_small_sides_as_torch_has_them(nnz: int, shape: tuple[int, int], name: str) -> None:
    coords = torch.tensor([n - 1 for n in shape])[:, None].expand(2, nnz * (0 not in shape))
    values = torch.full((coords.shape[1],), 2.0, dtype=torch.float64, requires_grad=True)
    whole = torch.zeros(shape, dtype=torch.float64).index_put(tuple(coords), values)
    found, expected = CALLS[name](SparseTensor(coords, values, shape)), CALLS[name](whole)
    found = found.to_dense() if isinstance(found, SparseTensor) else found
    torch.testing.assert_close(found, expected, equal_nan=True)
    gradients = [torch.autograd.grad(result.sum(), values)[0] for result in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("nnz", [0, 1])
@pytest.mark.parametrize("reduce", ["mean", "amax", "amin", "prod"])
@pytest.mark.parametrize("equation", ["ij,jr->ir", "ij,jr->r", "ij,jr->j"])
def test_reductions_of_no_entries_have_gradients(equation: str, reduce: str, nnz: int) -> None:
    coords = torch.tensor([[0], [1]])[:, :nnz]
    values = torch.full((nnz,), 2.0, dtype=torch.float64, requires_grad=True)
    b = torch.ones(3, 1, dtype=torch.float64, requires_grad=True)
    found = stc.einsum(equation, SparseTensor(coords, values, (2, 3)), b, reduce=reduce)
    of_values, of_b = torch.autograd.grad(found.sum(), [values, b])
    assert of_values.tolist() == [1.0] * nnz
    assert of_b.flatten().tolist() == [0.0, 2.0 * nnz, 0.0]
    assert sorted(found.flatten().tolist())[-1] == (2.0 if nnz else float(reduce == "prod"))


def test_offsets_and_positions_past_64_bits() -> None:
    x = SparseTensor([[0, 2**62 - 1], [5, 2**62 - 1]], [1.0, 2.0], (2**62, 2**62))
    assert (x * torch.full((1, 1), 3.0)).values.tolist() == [3.0, 6.0]
    assert (x * torch.full((1,), 3.0)).values.tolist() == [3.0, 6.0]
    for far in (2**63, 2**70):
        assert x.diagonal(far).shape == x.diagonal(-far).shape == (0,)
        assert x.tril(far).nnz == x.triu(-far).nnz == 2
        assert x.triu(far).nnz == x.tril(-far).nnz == 0
    with pytest.raises(ShapeError, match="cannot be broadcast"):
        x * torch.ones(2, 1)
    with pytest.raises(OutOfMemoryError, match="pointers"):
        SparseTensor([[1], [0]], [1.0], (2**62, 1)).to_torch(torch.sparse_csr)
    narrow = SparseTensor([[0, 1]], torch.ones(2, 0), (3, 0))
    assert narrow.amax(1, entries=True, output="dense").tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr], ids=str)
def test_complex_values_of_compressed_tensors_are_summed(layout: torch.layout, learned: bool) -> None:
    """Of a view of their values torch makes no view of real numbers."""
    dense = torch.randn(4, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    blocksize = (2, 3) if layout == torch.sparse_bsr else None
    x = dense.to_sparse(layout=layout, blocksize=blocksize)
    x.requires_grad_(learned)
    y = stc.SparseTensor(torch.tensor([[1], [0]]), torch.ones(1, dtype=torch.complex64), (2, 2))
    a = torch.ones(2, dtype=torch.complex64)
    assert torch.allclose(stc.einsum("ab->", x), dense.sum())
    assert torch.allclose(stc.einsum("ab,ij,i->", x, y, a), dense.sum())


def test_what_is_printed_has_the_first_entries() -> None:
    x = SparseTensor([[0, 1], [2, 0]], torch.tensor([1 / 3, 2e9]), (2, 3))
    assert str(x).split("\n")[1:] == ["  (0, 2)  0.333333", "  (1, 0)  2e+09"]
    rows = x.with_values(torch.arange(16.0).view(2, 8))
    assert str(rows).split("\n")[1] == "  (0, 2)  [0, 1, 2, 3, 4, 5, …]"
    assert str(x > 1).split("\n")[1:] == ["  (0, 2)  False", "  (1, 0)  True"]
    assert str(x * 1j).split("\n")[1] == "  (0, 2)  0+0.333333j"
    assert str(SparseTensor([[], []], [], (0, 3))) == repr(SparseTensor([[], []], [], (0, 3)))


@pytest.mark.parametrize("view", [lambda a: a[::-1], lambda a: a.astype(a.dtype.newbyteorder(">"))])
def test_ndarrays_that_torch_does_not_take(view: Any) -> None:
    """Those with negative strides, or of another byte order, wherever an array comes in."""
    dense, edges = np.diag([1.0, 2, 3]), np.array([[0, 1], [2, 0]])
    given, numbers = view(dense), np.array([1.0, 2, 3])
    np.testing.assert_array_equal(stc.SparseTensor.from_dense(given).to_dense().numpy(), given)
    masked = stc.SparseTensor.from_dense(torch.ones(3, 3), mask=view(dense > 1))
    np.testing.assert_array_equal(masked.to_dense().numpy(), view(dense > 1))
    graph = stc.SparseTensor.from_graph(view(edges), weight=view(numbers[:2]), nodes=3)
    assert graph.to_dense()[tuple(view(edges).astype(int)[::-1])].tolist() == view(numbers[:2]).tolist()
    assert stc.nn.collate([view(numbers), numbers]).tolist() == [*view(numbers), *numbers]
    assert stc.eye(3)[view(np.array([2, 0]))].to_dense().argmax(1).tolist() == view(np.array([2, 0])).tolist()


def test_views_in_a_matrix_of_scipy() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    numbers, places = np.array([1.0, 2, 3]), np.array([0, 1, 2])
    matrix = sparse.coo_array((numbers[::-1], (places[::-1], places)), (3, 3))
    np.testing.assert_array_equal(stc.SparseTensor.from_scipy(matrix).to_dense().numpy(), matrix.toarray())
