"""Operators on sparse tensors against the same on dense ones; their patterns, gradients and refusals."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import opt_einsum
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import sparsetc as stc
from sparsetc.tensor import functions

F64 = torch.float64
A, B, C = "nonzeros", "others", "the same pattern"


def dense(seed: int, shape: tuple[int, ...] = (5, 6), share: float = 0.4, dtype: torch.dtype = F64) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    values = torch.randint(1, 9, shape, generator=g) * (1 - 2 * torch.randint(0, 2, shape, generator=g))
    return (values * (torch.rand(shape, generator=g) < share)).to(dtype)


def sparse(x: torch.Tensor, kind: str = A) -> stc.SparseTensor:
    if kind == "dense modes":
        stored = (x != 0).any(-1)
        return stc.SparseTensor(stored.nonzero().T, x[stored], tuple(x.shape))
    if kind == "blocks":
        return stc.SparseTensor.from_torch(x.to_sparse_bsr((2, 2)))
    return stc.SparseTensor.from_dense(x)


KINDS = {A: (5, 6), "dense modes": (4, 5, 3), "blocks": (4, 6)}
PAIRS: dict[str, Callable[[Any, Any], Any]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("kinds", [(k, k) for k in KINDS] + [(A, "blocks"), ("blocks", A)])
def test_two_sparse_tensors(kinds: tuple[str, str], name: str) -> None:
    shape, call = KINDS["blocks" if "blocks" in kinds else kinds[0]], PAIRS[name]
    given = [dense(seed, shape) for seed in (0, 1)]
    x, y = (sparse(d, k) for d, k in zip(given, kinds, strict=True))
    found = call(x, y)
    torch.testing.assert_close(found.to_dense(), call(*given))
    assert found.is_coalesced
    if name == "*":
        assert found.nnz <= min(x.expand_dense().nnz, y.expand_dense().nnz)
    again = call(x, y)
    assert call(x, y).pattern is again.pattern or "blocks" in kinds  # kept from the second time on
    values = [t.values.clone().requires_grad_() for t in (x, y)]
    assert torch.autograd.gradcheck(lambda a, b: call(x.with_values(a), y.with_values(b)).values, values)


@pytest.mark.parametrize("shape", [(60, 90), (7, 1, 5, 40), (1 << 40, 3, 1 << 40)])
def test_native_merges_are_torchs(shape: tuple[int, ...], natively: Callable[[bool], None]) -> None:
    generator = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(size, (400,), generator=generator) for size in shape])
    every = stc.SparseTensor(coords, torch.rand(400, generator=generator, dtype=F64), shape)
    x, y, none = every.drop(0.4), every.with_values(1 - every.values).drop(0.4), every.drop(2.0)
    for first, second in ((x, y), (y, x), (x, none), (none, x), (none, none), (x, x.clone())):
        for call in PAIRS.values():
            results = []
            for native in (True, False):
                natively(native)
                results.append(call(stc.SparseTensor(first.coords, first.values, shape), second))
            found, expected = results
            assert found.is_coalesced
            assert torch.equal(found.coords, expected.coords)
            assert torch.equal(found.values, expected.values)


def test_native_sums_are_traced_by_torchs_operations(natively: Callable[[bool], None]) -> None:
    natively(True)
    x, y = sparse(dense(0)), sparse(dense(1))
    traced = make_fx(lambda values: (x.with_values(values) + y).values)(x.values)
    torch.testing.assert_close(traced(2 * x.values), (x * 2 + y).values)
    rows = torch.func.vmap(lambda values: (x.with_values(values) + y).values)(torch.stack([x.values, 2 * x.values]))
    torch.testing.assert_close(rows[1], (x * 2 + y).values)


def test_one_pattern_and_other_libraries() -> None:
    x = sparse(dense(0))
    assert (x + x * 2).pattern is x.pattern
    for other in (dense(1).to_sparse(), dense(1).to_sparse_csr(), sparse(dense(1)).to_scipy()):
        torch.testing.assert_close((x + other).to_dense(), dense(0) + dense(1))
    twice = stc.SparseTensor([[0, 0, 1], [1, 1, 2]], torch.tensor([1.0, 2.0, 3.0]), (2, 3), coalesce=False)
    torch.testing.assert_close((twice * twice).to_dense(), torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0]]))
    torch.testing.assert_close(abs(-twice).to_dense(), twice.to_dense())


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 1), (3, 1 << 40, 1 << 40)])
def test_nothing_one_and_huge_shapes(shape: tuple[int, ...]) -> None:
    none = stc.SparseTensor(torch.zeros((len(shape), 0), dtype=torch.long), torch.zeros(0), shape)
    assert (none + none).nnz == (none * none).nnz == (none - none * 2).nnz == 0
    if 0 not in shape:
        one = stc.SparseTensor([[n - 1] for n in shape], torch.ones(1), shape)
        first = stc.SparseTensor([[0]] * len(shape), torch.ones(1), shape)
        assert (one + none).nnz == 1
        assert (one * first).nnz == int(shape == (1, 1))
        assert (one + first).coords[:, -1].tolist() == [n - 1 for n in shape]


def test_types_follow_torch() -> None:
    kinds = [torch.float16, torch.float32, torch.int32, torch.int64, torch.complex64]
    for first in kinds:
        for second in kinds:
            x, y = sparse(dense(0, dtype=first)), sparse(dense(1, dtype=second))
            for call in PAIRS.values():
                expected = call(dense(0, dtype=first), dense(1, dtype=second))
                torch.testing.assert_close(call(x, y).to_dense(), expected)
        torch.testing.assert_close((x * 1.5).to_dense(), dense(0, dtype=first) * 1.5)


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "x * 3": lambda x: x * 3,
    "2.5 * x": lambda x: 2.5 * x,
    "np.float64 * x": lambda x: np.float64(2.5) * x,
    "x / 4": lambda x: x / 4,
    "x // 3": lambda x: x // 3,
    "x % 3": lambda x: x % 3,
    "x ** 2": lambda x: x**2,
    "-x": lambda x: -x,
    "+x": lambda x: +x,
    "abs(x)": abs,
    "torch.abs(x)": torch.abs,
    "torch.mul(x, 3)": lambda x: torch.mul(x, 3),
    "torch.neg(x)": torch.neg,
    "x.sign()": lambda x: x.sign(),
    "x.clip(-2, 3)": lambda x: x.clip(-2, 3),
    "x.clamp(max=3)": lambda x: x.clip(None, 3) if isinstance(x, torch.Tensor) else x.clamp(max=3),
    "x + 0": lambda x: x + 0,
    "0 + x": lambda x: 0 + x,
    "0 - x": lambda x: 0 - x,
    "sum([x, x])": lambda x: sum([x, x]),
    "x * tensor(2.)": lambda x: x * torch.tensor(2.0),
    "tensor(2.) * x": lambda x: torch.tensor(2.0) * x,
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers(kind: str, name: str) -> None:
    given = dense(0, KINDS[kind])
    x = sparse(given, kind)
    found = NUMBERS[name](x)
    torch.testing.assert_close(found.to_dense(), NUMBERS[name](given))
    assert found.pattern is x.pattern


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [lambda x, d: x * d, lambda x, d: d * x, lambda x, d: x / d, torch.mul, torch.div])
def test_dense_tensors_are_broadcast(kind: str, call: Callable[[Any, Any], Any]) -> None:
    given, full = dense(0, KINDS[kind]), dense(1, KINDS[kind], share=1.0)
    x = sparse(given, kind)
    for other in (full, full[:1], full[..., :1], full[0]):
        found = call(x, other)
        assert isinstance(found, stc.SparseTensor)
        torch.testing.assert_close(found.to_dense(), call(given, other) if call(0.0, 1.0) == 0 else other * given)
    values, other = x.values.clone().requires_grad_(), full[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v, d: call(x.with_values(v), d).values, (values, other))


def test_maps_and_drops() -> None:
    given = dense(0)
    x = sparse(given)
    torch.testing.assert_close(x.map(torch.exp).values, given[given != 0].exp())
    torch.testing.assert_close(abs(x).sqrt().to_dense(), given.abs().sqrt())
    torch.testing.assert_close(x.drop(3).to_dense(), torch.where(given.abs() > 3, given, 0))
    assert (x - x).drop().nnz == 0
    blocks = sparse(dense(0, (4, 6)), "blocks")
    torch.testing.assert_close(blocks.drop(8).to_dense(), torch.zeros(4, 6, dtype=F64))


@pytest.mark.parametrize("compare", [operator.gt, operator.ge, operator.lt, operator.le, operator.ne])
def test_comparisons_are_masks(compare: Callable[[Any, Any], Any]) -> None:
    given, x = dense(0), sparse(dense(0))
    number = 2 if compare in (operator.gt, operator.ge) else -2 if compare is not operator.ne else 0
    found = compare(x, number)
    assert torch.equal(found.to_dense(), compare(given, number))
    with pytest.raises(stc.DtypeError, match="absent entries"):
        compare(x, -number or 1)
    if compare in (operator.gt, operator.lt, operator.ne):
        for other in (given * 2, dense(1)):  # on the pattern of x, and on another
            assert torch.equal(compare(x, sparse(other)).to_dense(), compare(given, other))


@pytest.mark.parametrize("apply", [operator.and_, operator.or_, operator.xor])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
def test_masks_are_combined(apply: Callable[[Any, Any], Any], dtype: torch.dtype) -> None:
    a, b = ((dense(n).abs() * 10).to(dtype) for n in (0, 1))
    assert torch.equal(apply(sparse(a), sparse(b)).to_dense(), apply(a, b))
    assert torch.equal(apply(sparse(a), 0).to_dense(), apply(a, 0))
    if apply is operator.and_:
        assert torch.equal((b & sparse(a)).to_dense(), a & b)
    else:
        with pytest.raises(stc.DtypeError, match="absent entries"):
            apply(sparse(a), 1)
        with pytest.raises(stc.DtypeError, match="dense tensor would change absent entries"):
            apply(sparse(a), b)
    with pytest.raises(stc.DtypeError, match=r"takes no torch\.float64"):
        apply(sparse(dense(0)), sparse(dense(1)))


def test_tensors_of_bools() -> None:
    given = dense(0)
    holds, x, mask = given > 0, sparse(given), sparse(given) > 0
    results = [
        (mask + sparse(given != 0), holds + (given != 0)),
        (mask * mask, holds * holds),
        (mask * 2, holds * 2),
        (mask * x, holds * given),
        (abs(mask), holds),
        (mask != sparse(dense(1) > 0), holds != (dense(1) > 0)),
        (mask.sum(0), holds.sum(0)),
        (mask.amax(1), holds.amax(1)),
        (mask.mT.T, holds),
        (mask.to(torch.float32), holds.float()),
    ]
    for found, expected in results:
        found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
        assert torch.equal(found, expected)
    twice = stc.SparseTensor([[1, 1, 0]], [True, True, False], (3,))
    assert twice.to_dense().tolist() == [False, True, False]
    for call in (
        lambda: -mask,
        lambda: mask - mask,
        lambda: mask - x,
        lambda: x - mask,
        lambda: mask @ torch.ones(6),
        lambda: ~mask,
    ):
        with pytest.raises(stc.DtypeError, match=r"bool|~ would hold"):
            call()


PRODUCTS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((5, 6), (6, 3)), ((5, 6), (6,)), ((2, 5, 6), (2, 6, 3))]


@pytest.mark.parametrize(("first", "second"), PRODUCTS)
def test_products_of_matrices(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    given, other = dense(0, first), dense(1, second, share=1.0)
    x = sparse(given)
    products = [(x @ other, given @ other), (torch.matmul(x, other), given @ other)]
    if len(second) > 1:
        products.append((other.mT @ x.permute(*range(len(first) - 2), -1, -2), (given @ other).mT))
    for found, expected in products:
        assert isinstance(found, stc.SparseTensor) == (len(first) > 2)  # by einsum's rule
        torch.testing.assert_close(found.to_dense() if len(first) > 2 else found, expected)
    if len(second) > 1:
        torch.testing.assert_close((x @ sparse(other)).to_dense(), given @ other)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: torch.sum(x, 0),
    "sum of all": lambda x: torch.sum(x),
    "mean": lambda x: torch.mean(x, dim=1, keepdim=True),
    "amax": lambda x: torch.amax(x, 1),
    "permute": lambda x: torch.permute(x, (1, 0)),
    "transpose": lambda x: torch.transpose(x, 0, 1),
    "reshape": lambda x: torch.reshape(x, (3, 10)),
    "flatten": lambda x: torch.flatten(x),
    "tril": lambda x: torch.tril(x, 1),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "tensordot": lambda x: torch.tensordot(x, torch.ones(6, 2, dtype=F64), 1),
    "tensordot of modes": lambda x: torch.tensordot(torch.ones(2, 5, dtype=F64), x, ([1], [0])),
    "einsum": lambda x: torch.einsum("ij,jr->ir", x, torch.ones(6, 2, dtype=F64)),
    "mm": lambda x: torch.mm(x, torch.ones(6, 2, dtype=F64)),
    "mv": lambda x: torch.mv(x, torch.ones(6, dtype=F64)),
    "addmm": lambda x: torch.addmm(torch.ones(2, dtype=F64), x, torch.ones(6, 2, dtype=F64), beta=2, alpha=3),
    "linear": lambda x: functional.linear(torch.ones(3, 6, dtype=F64), x, torch.ones(5, dtype=F64)),
    "add with alpha": lambda x: torch.add(x, x, alpha=3),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 2, 1),
    "norm": lambda x: torch.norm(x),
    "pow": lambda x: torch.pow(x, 2),
    "relu": lambda x: functional.relu(x),
    "concat": lambda x: torch.concat([x, x]),
    "kron": lambda x: torch.kron(x, x),
    "where": lambda x: torch.where(torch.arange(6) < 3, x, x * 2),
    "tensor < x": lambda x: (torch.tensor(2.0) < x) * 1,
    "clamp": lambda x: torch.clamp(x, min=-2),
    **{
        name: lambda x, name=name: (getattr(torch, name, None) or getattr(functional, name))(x * 0.1)
        for name in functions.MAPS
        if name != "imag"  # of real numbers there is none
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_torch(name: str) -> None:
    given = dense(0)
    found = FUNCTIONS[name](sparse(given))
    torch.testing.assert_close(found.to_dense(), FUNCTIONS[name](given), check_dtype=name != "tensor < x")


def test_functions_of_torch_sparse() -> None:
    x, b, c = dense(0), torch.rand(5, 3, dtype=F64), torch.rand(3, 6, dtype=F64)
    s, t = sparse(x), x.to_sparse()
    for name in ("softmax", "log_softmax", "sum"):
        call = getattr(torch.sparse, name)
        torch.testing.assert_close(call(s, 1).to_dense(), call(t, 1).to_dense())
    torch.testing.assert_close(torch.sparse.mm(s, c.T), x @ c.T)
    torch.testing.assert_close(torch.sparse.addmm(b, s, c.T), b + x @ c.T)
    found = torch.sparse.sampled_addmm(s, b, c, beta=2.0, alpha=0.5)
    expected = torch.sparse.sampled_addmm(x.to_sparse_csr(), b, c, beta=2.0, alpha=0.5)
    torch.testing.assert_close(found.to_dense(), expected.to_dense())


def test_numpys_functions() -> None:
    x = dense(0)
    for name in ("sin", "arcsin", "trunc", "expm1", "square"):
        call = getattr(np, name)
        torch.testing.assert_close(call(sparse(x * 0.1)).to_dense(), torch.from_numpy(call((x * 0.1).numpy())))
    assert torch.equal((np.float32(1) < sparse(x)).to_dense(), x > 1)
    torch.testing.assert_close((sparse(x) / np.full(6, 2.0)).to_dense(), x / 2)


def test_gradients_past_the_end_of_blocks_are_zero() -> None:
    v = torch.tensor([[4.0, 0.0]], dtype=F64, requires_grad=True)
    x = stc.SparseTensor.from_blocks([[1]], v, (3,))
    assert torch.autograd.grad(x.sqrt().sum(), v)[0].tolist() == [[0.25, 0.0]]
    assert x.map(torch.cos).values[0, 1] == 0


TRACED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "x * 2": lambda x, d: (x * 2).values,
    "x * d": lambda x, d: (x * d).values,
    "d * x": lambda x, d: (d * x).values,
    "x / d": lambda x, d: (x / d).values,
    "x + x": lambda x, d: (x + x).values,
    "x @ d": lambda x, d: x @ d,
    "d @ x.T": lambda x, d: d @ x.T,
    "x.sum(0)": lambda x, d: x.sum(0),
    "softmax": lambda x, d: stc.softmax(x, 1).values,
    "x.T": lambda x, d: x.T.values,
    "x[1:4]": lambda x, d: x[1:4].values,
}


@pytest.mark.parametrize("name", TRACED)
def test_graphs(name: str) -> None:
    x, d = sparse(dense(0)), torch.rand(6, dtype=F64) + 1
    call = TRACED[name]
    traced = torch.compile(
        lambda v: call(x.with_values(v), d), backend="eager", fullgraph="d" in name and "@" not in name
    )
    torch.testing.assert_close(traced(x.values), call(x, d))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "jr,ijk,kr->ir", "ijk,jr,ks->irs", "ijk->kji", "ijk,ijk->"])
def test_opt_einsum(equation: str, backend: str) -> None:
    sizes, terms = {"i": 5, "j": 6, "k": 4, "r": 3, "s": 2}, equation.split("->")[0].split(",")
    given = [dense(n, tuple(sizes[c] for c in term)) for n, term in enumerate(terms)]
    operands = [sparse(d) if term == "ijk" else d for d, term in zip(given, terms, strict=True)]
    found = opt_einsum.contract(equation, *operands, backend=backend)
    found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
    torch.testing.assert_close(found, torch.einsum(equation, *given))


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "x + 1": (lambda x: x + 1, stc.DtypeError, "is dense"),
    "1 - x": (lambda x: 1 - x, stc.DtypeError, "is dense"),
    "x + dense": (lambda x: x + x.to_dense(), stc.DtypeError, "is dense"),
    "dense + x": (lambda x: x.to_dense() + x, stc.DtypeError, "is dense"),
    "dense - x": (lambda x: x.to_dense() - x, stc.DtypeError, "is dense"),
    "dense / x": (lambda x: x.to_dense() / x, stc.DtypeError, "absent entries"),
    "x / x": (lambda x: x / x, stc.DtypeError, "0 by 0"),
    "x ** 0": (lambda x: x**0, stc.DtypeError, "above 0"),
    "x ** x": (lambda x: x**x, stc.DtypeError, "above 0"),
    "x + shape": (lambda x: x + sparse(dense(0, (5, 7))), stc.ShapeError, r"\(5, 6\) and \(5, 7\)"),
    "x * shape": (lambda x: x * torch.ones(7), stc.ShapeError, "broadcast"),
    "x + text": (lambda x: x + "a", stc.DtypeError, "found str"),
    "x * None": (lambda x: x * None, stc.DtypeError, "found NoneType"),
    "x == x.T": (lambda x: x == sparse(dense(1)), stc.DtypeError, "=="),
    "x != dense": (lambda x: x != dense(1), stc.DtypeError, "=="),
    "x > dense": (lambda x: x > dense(1), stc.DtypeError, "gt of a dense tensor would change absent entries"),
    "x | number": (lambda x: x | 2.0, stc.DtypeError, r"or_ takes no torch\.float64"),
    "x >= x": (lambda x: x >= x * 1, stc.DtypeError, "holds wherever neither has an entry"),
    "clip(1)": (lambda x: x.clip(1), stc.DtypeError, "absent entries"),
    "map": (lambda x: x.map(lambda v: v[:2]), stc.ShapeError, "gave"),
    "torch.exp": (torch.exp, stc.DtypeError, "exp takes no SparseTensor"),
    "x @ 3": (lambda x: x @ torch.tensor(3.0), stc.ShapeError, "@ takes"),
    "x @ text": (lambda x: x @ "a", stc.ShapeError, "found .* and str"),
    "x @ row": (lambda x: x @ torch.ones(1, 3, dtype=F64), stc.ShapeError, "columns of the first"),
    "mm of a vector": (lambda x: torch.mm(x, torch.ones(6, dtype=F64)), stc.ShapeError, "orders"),
    "tensordot": (lambda x: torch.tensordot(x, torch.ones(1, 3), 1), stc.ShapeError, "have one size"),
    "tensordot, other modes": (lambda x: torch.tensordot(x, x, ([0], [0, 1])), stc.EquationError, "as many modes of x"),
    "clip(nan)": (lambda x: x.clip(float("nan")), stc.DtypeError, "absent entries"),
    "out=": (lambda x: torch.abs(x, out=torch.empty(0)), stc.DtypeError, "takes no out="),
    "softmax": (lambda x: stc.softmax(x.to_dense()), stc.DtypeError, "takes a SparseTensor"),
    "x / torch.sparse": (lambda x: x / x.to_torch(), stc.DtypeError, "0 by 0"),
    "3 % x": (lambda x: 3 % x, stc.DtypeError, "int / sparse, // or %"),
    "clip()": (lambda x: x.clip(), stc.DtypeError, "min=, max= or both"),
    "x < 1j": (lambda x: x < 1j, stc.DtypeError, "no order"),
    "x[::0]": (lambda x: x[::0], stc.ShapeError, "a step that is not 0"),
    "x['a':]": (lambda x: x["a":], stc.ShapeError, "a slice is of integers"),  # type: ignore[misc]
    "cat(None)": (lambda x: stc.cat(None), stc.ShapeError, "takes a list"),  # type: ignore[arg-type]
    "relu of complex": (lambda x: torch.relu(x * 1j), stc.DtypeError, "relu takes no torch.complex128"),
    "ragged": (
        lambda x: stc.SparseTensor((torch.tensor([0, 1]), torch.tensor([5])), torch.ones(2)),
        stc.FormatError,
        "rectangle",
    ),
    "softmax of a mode": (lambda x: stc.softmax(x, "a"), stc.ShapeError, "no mode 'a'"),  # type: ignore[arg-type]
    "cat of a mode": (lambda x: stc.cat([x], 2), stc.ShapeError, "cat: a tensor of 2 modes"),
    "a mask": (lambda x: x[torch.tensor([True, False])], stc.ShapeError, "2 elements is not one of mode 0, of size 5"),
    "an index": (lambda x: x[:, torch.tensor([6])], stc.CoordinateError, "mode 1 of size 6"),
    "rand": (lambda x: stc.rand((3,), 0.5, nnz=1), stc.ShapeError, "not both"),
    "map to a number": (lambda x: x.map(lambda v: 3), stc.ShapeError, "gave int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, said = REFUSED[name]
    with pytest.raises(kind, match=said):
        call(sparse(dense(0)))


def test_tensors_without_modes_are_numbers_and_complex_ones_have_no_order() -> None:
    x = dense(0)
    assert torch.equal((sparse(x) > torch.tensor(2.0)).to_dense(), x > 2)
    torch.testing.assert_close((sparse(x) ** torch.tensor(2.0)).to_dense(), x**2)
    z = sparse(x.to(torch.complex128))
    for refused in (lambda: z > 1, lambda: z.clip(-1, 1)):
        with pytest.raises(stc.DtypeError, match="no order"):
            refused()


@pytest.mark.parametrize(("function", "other"), [(torch.minimum, 0.5), (torch.fmax, -0.5), (torch.atan2, 0.5)])
def test_tensors_without_modes_keep_their_dtype_and_gradient(function: Callable[[Any, Any], Any], other: float) -> None:
    one = torch.tensor(other, dtype=F64, requires_grad=True)
    for x in (dense(0), dense(0).round().long()):
        found, expected = function(sparse(x), one).to_dense(), function(x, one)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(y.sum(), one)[0] for y in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_zero_is_added_in_the_common_dtype() -> None:
    mask = dense(0) > 0
    for call in (lambda t: t + 0, lambda t: 0 + t, lambda t: t + 0.0, lambda t: sum([t, t])):
        torch.testing.assert_close(call(sparse(mask)).to_dense(), call(mask))
    x = sparse(dense(0))
    assert x + 0 is x


def test_arguments_by_torchs_names() -> None:
    x, y = dense(0), dense(1)
    found = {
        "add": (torch.add(sparse(x), other=sparse(y), alpha=2), x + 2 * y),
        "mul": (torch.mul(input=sparse(x), other=y), x * y),
        "pow": (torch.pow(sparse(x), exponent=2), x**2),
        "mm": (torch.mm(sparse(x), mat2=y.T), x @ y.T),
        "lt": (torch.gt(sparse(x), other=2), x > 2),
        "where": (torch.where(condition=sparse(x) > 2, input=sparse(x), other=sparse(y)), torch.where(x > 2, x, y)),
        "reshape": (torch.reshape(sparse(x), shape=(-1,)), x.reshape(-1)),
        "permute": (torch.permute(sparse(x), dims=(1, 0)), x.T),
        "mv": (torch.mv(sparse(x), vec=y[0]), x @ y[0]),
        "axis": (torch.cat([sparse(x), sparse(y)], axis=1), torch.cat([x, y], 1)),  # type: ignore[call-overload]
        "rint": (np.rint(sparse(x)), x),
        "np.remainder": (np.remainder(sparse(x), 2), x % 2),
        "cat": (torch.cat(tensors=[sparse(x), sparse(y)], dim=1), torch.cat([x, y], 1)),
        "floor_divide": (torch.floor_divide(sparse(x), 2), x // 2),
        "remainder": (torch.remainder(sparse(x), other=2), x % 2),
        "addmm": (torch.addmm(torch.full((5, 5), torch.nan, dtype=F64), sparse(x), y.T, beta=0), x @ y.T),
    }
    for name, (ours, expected) in found.items():
        ours = ours.to_dense() if isinstance(ours, stc.SparseTensor) else ours
        torch.testing.assert_close(ours, expected, msg=name)


@pytest.mark.parametrize("alpha", [2, 0, True, 2.0, 0.5, 1j], ids=str)
@pytest.mark.parametrize("function", [torch.add, torch.sub])
def test_alpha_as_torch_has_it(function: Callable[..., Any], alpha: Any) -> None:
    values = [
        dense(2).to(dtype) for dtype in (torch.bool, torch.int8, torch.int64, torch.float16, F64, torch.complex64)
    ]
    for x, y in itertools.product(values, values):
        try:
            expected = function(x, y, alpha=alpha)
        except RuntimeError:
            with pytest.raises(stc.DtypeError):
                function(sparse(x), sparse(y), alpha=alpha)
        else:
            torch.testing.assert_close(function(sparse(x), sparse(y), alpha=alpha).to_dense(), expected)


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1.5), (0, 2.7), (0.5, 2), (1.5, True), (1, 1j)], ids=str)
def test_factors_of_integers_as_torch_has_them(beta: Any, alpha: Any) -> None:
    x = dense(2).to(torch.int64)
    y = x.T.contiguous()
    start = torch.arange(len(x) ** 2).view(len(x), -1)
    try:
        expected = torch.addmm(start, x, y, beta=beta, alpha=alpha)
    except RuntimeError:
        with pytest.raises(stc.DtypeError, match="complex"):
            torch.addmm(start, sparse(x), y, beta=beta, alpha=alpha)
        return
    found = torch.addmm(start, sparse(x), y, beta=beta, alpha=alpha)
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype
    sampled = torch.sparse.sampled_addmm(stc.full(start.shape, 3), x, y, beta=beta, alpha=alpha)
    assert torch.equal(sampled.to_dense(), torch.addmm(torch.full_like(start, 3), x, y, beta=beta, alpha=alpha))


@pytest.mark.parametrize("alpha", [None, "2", 10**20, torch.ones(2)], ids=str)
def test_what_is_no_alpha_is_refused(alpha: Any) -> None:
    for dtype in (torch.int8, torch.float32):
        x = sparse(dense(2).to(dtype))
        for function in (x.add, x.sub):
            with pytest.raises(stc.DtypeError, match=r"alpha|too big"):
                function(x, alpha=alpha)


def test_alpha_multiplies_whatever_a_sum_takes() -> None:
    x, y = dense(2), dense(3)
    for other in (sparse(y).to_scipy(), y.to_sparse(), sparse(y)):
        torch.testing.assert_close(sparse(x).sub(other, alpha=2).to_dense(), x - 2 * y)
    for other, message in ((y.numpy(), "is dense"), (np.float32(2), "is dense"), (None, "NoneType"), ([1], "list")):
        with pytest.raises(stc.DtypeError, match=message):
            sparse(x).add(other, alpha=2)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_no_operator_makes_a_dtype_that_no_constructor_takes() -> None:
    half = sparse(dense(2).half())
    for made in (lambda: half * 1j, lambda: half.map(lambda values: values.to(torch.float8_e4m3fn))):
        with pytest.raises(stc.DtypeError, match="values must be one of"):
            made()


def test_comparisons_sum_duplicates_first() -> None:
    x = stc.SparseTensor(torch.tensor([[1, 0, 1]]), torch.tensor([2.0, 1.0, 3.0]), (3,), coalesce=False)
    assert (x < x * 2).to_dense().tolist() == [1, 1, 0]


def test_numbers_that_the_dtype_cannot_hold_are_not_wrapped_around() -> None:
    """In torch, -1 is compared with uint8 as 255."""
    u, x = (
        stc.SparseTensor([[0, 2]], torch.tensor([200, 3], dtype=torch.uint8)),
        stc.SparseTensor([[0, 1]], [100, -100]),
    )
    x = x.to(torch.int8)
    for found, expected in (
        (u < -1, [False, False, False]),
        (u.clip(-1, 300), [200, 0, 3]),
        (u.clip(min=-1), [200, 0, 3]),
        (x > 300, [False, False]),
        (x.clip(-300, 50), [50, -100]),
        (x // 300, [0, -1]),
        (x % 300, [100, 200]),
        (torch.maximum(u, torch.tensor(-1)), [200, 0, 3]),
        (stc.where(u > 5, 300, u), [300, 0, 3]),
        (x * np.bool_(True), [100, -100]),
    ):
        assert found.to_dense().tolist() == expected
    for refused in (lambda: x > 2**70, lambda: x * 2**70, lambda: x**2**70):
        with pytest.raises(stc.DtypeError, match="too big"):
            refused()


def test_one_number_is_broadcast_to_more_positions_than_torch_has() -> None:
    x = stc.SparseTensor([[5], [7]], [2.0], (2**40, 2**40))
    assert (x * torch.full((1, 1), 3.0)).values.tolist() == [6.0]
    assert (x / torch.full((1,), 4.0)).values.tolist() == [0.5]
    assert stc.where(torch.ones(1, 1, dtype=torch.bool), x).values.tolist() == [2.0]
    assert stc.where(x > 1, 9.0, x).values.tolist() == [9.0]


def test_coordinates_of_sums_and_products_are_made_when_they_are_read(natively: Callable[[bool], None]) -> None:
    natively(True)
    a, b = (torch.rand(30, 40) * (torch.rand(30, 40) < 0.3) for _ in "ab")
    x, y = stc.SparseTensor.from_dense(a), stc.SparseTensor.from_dense(b)
    for result, expected in ((x + y, a + b), (x * y, a * b)):
        assert not isinstance(result.pattern._coords, torch.Tensor)
        assert result.nnz == int((expected != 0).sum())
        assert torch.equal(result.coords, expected.nonzero().T)
        assert torch.equal(result.to_dense(), expected)
