"""Means, extrema and products over entries, against torch's scatter_reduce on what each entry gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsetc as stc
from sparsetc.tensor import groups

SIZES = {"i": 6, "j": 5, "k": 4, "r": 3, "s": 2}
EQUATIONS = [
    "ij,jr->ir",
    "ij,jr->ri",
    "ij,ir->jr",
    "ij->i",
    "ij->j",
    "ij->",
    "ij,jr,rs->is",
    "ijk,jr,kr->ir",
    "ijk,kr->ijr",
]
REDUCTIONS = ["sum", "mean", "amax", "amin", "prod"]


def drawn(equation: str, dtype: torch.dtype = torch.float64) -> list[Any]:
    g = torch.Generator().manual_seed(3)
    first, *others = equation.split("->")[0].split(",")
    shape = [SIZES[c] for c in first]
    stored = torch.rand(shape, generator=g) < 0.4
    stored[0] = False  # a row without entries
    x = stc.SparseTensor(stored.nonzero().T, torch.randn(int(stored.sum()), generator=g).to(dtype), tuple(shape))
    return [x, *(torch.randn([SIZES[c] for c in term], generator=g).to(dtype) for term in others)]


def expected(equation: str, reduce: str, x: stc.SparseTensor, *dense: torch.Tensor) -> torch.Tensor:
    """Entry by entry."""
    (first, *others), output = equation.split("->")[0].split(","), equation.split("->")[1]
    kept, free = [c for c in output if c in first], [c for c in output if c not in first]
    rows: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for n, at in enumerate(x.coords.T.tolist()):
        place = dict(zip(first, at, strict=True))
        taken = [d[tuple(place.get(c, slice(None)) for c in term)] for d, term in zip(dense, others, strict=True)]
        left = ["".join(c for c in term if c not in place) for term in others]
        row = torch.einsum(f"{','.join(['', *left])}->{''.join(free)}", x.values[n], *taken)
        rows.setdefault(tuple(place[c] for c in kept), []).append(row)
    out = torch.full([SIZES[c] for c in (*kept, *free)], 1.0 if reduce == "prod" else 0.0, dtype=x.dtype)
    for place, each in rows.items():
        out[place] = getattr(torch.stack(each), reduce)(0)
    return out.permute([(*kept, *free).index(c) for c in output])


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_every_reduction(equation: str, reduce: str) -> None:
    x, *dense = drawn(equation)
    found = stc.einsum(equation, x, *dense, reduce=reduce, output="dense")
    torch.testing.assert_close(found, expected(equation, reduce, x, *dense))
    if equation == "ijk,kr->ijr":
        sparse = stc.einsum(equation, x, *dense, reduce=reduce, output="sparse")
        torch.testing.assert_close(sparse.values, found[tuple(sparse.coords)])


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradients(reduce: str) -> None:
    x, b = drawn("ij,jr->ir")
    given = x.values.clone().requires_grad_(), b.clone().requires_grad_()

    def call(values: torch.Tensor, dense: torch.Tensor) -> Any:
        return stc.einsum("ij,jr->ir", x.with_values(values), dense, reduce=reduce)

    assert torch.autograd.gradcheck(call, given)


def test_types_duplicates_and_nothing() -> None:
    x = stc.SparseTensor([[0, 0, 1], [0, 2, 1]], torch.tensor([3, -4, 5]), (3, 3))
    assert stc.einsum("ij->i", x, reduce="amax").tolist() == [3, 5, 0]
    assert stc.einsum("ij->i", x, reduce="prod").tolist() == [-12, 5, 1]
    twice = stc.SparseTensor([[0, 0], [1, 1]], torch.tensor([2.0, 3.0]), (1, 2), coalesce=False)
    assert stc.einsum("ij->i", twice, reduce="amax").tolist() == [5.0]
    empty = stc.SparseTensor(torch.zeros((2, 0), dtype=torch.long), torch.zeros(0), (2, 0))
    for reduce in REDUCTIONS:
        assert stc.einsum("ij->i", empty, reduce=reduce).tolist() == [int(reduce == "prod")] * 2
    heads = stc.SparseTensor([[0, 0], [0, 1]], torch.tensor([[1.0, 5.0], [3.0, 2.0]]), (1, 2, 2))
    assert stc.einsum("ijh->ih", heads, reduce="amax", output="dense").tolist() == [[3.0, 5.0]]


def test_what_is_refused() -> None:
    x, b = drawn("ij,jr->ir")
    with pytest.raises(stc.EquationError, match="reduce must be one of"):
        stc.einsum("ij,jr->ir", x, b, reduce="max")
    with pytest.raises(stc.EquationError, match="one sparse operand"):
        stc.einsum("ij,jk->ik", x, drawn("jk->j")[0], reduce="amax")
    with pytest.raises(stc.DtypeError, match="mean"):
        stc.einsum("ij->i", x.to(torch.int32), reduce="mean")
    with pytest.raises(stc.DtypeError, match="order"):
        stc.einsum("ij->i", x.to(torch.complex64), reduce="amax")


@pytest.mark.parametrize("reduce", ["amax", "amin", "prod"])
@pytest.mark.parametrize("equation", ["ij->i", "ij->j", "ij->", "ij,jr->ir"])
def test_groups_of_many_segments(equation: str, reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "SEGMENT", 2)
    x, *dense = drawn(equation)
    found, gradients = [], []
    for recorded in (False, True):  # with gradients by segments, without them by a scatter
        values = x.values.clone().requires_grad_(recorded)
        found.append(stc.einsum(equation, x.with_values(values), *dense, reduce=reduce))
        if recorded:
            gradients += torch.autograd.grad(found[-1].sum(), values)
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[1], expected(equation, reduce, x, *dense))
    values = x.values.clone().requires_grad_()
    slow = expected(equation, reduce, x.with_values(values), *dense)
    torch.testing.assert_close(gradients[0], torch.autograd.grad(slow.sum(), values)[0])


@pytest.mark.parametrize("reduce", ["amax", "amin", "prod"])
@pytest.mark.parametrize("equation", ["ij,jr->rij", "ij,jr->irj", "ij,jr->jri"])
def test_modes_of_a_result_stand_where_the_equation_has_them(equation: str, reduce: str) -> None:
    x, b = torch.arange(1.0, 7).reshape(2, 3), torch.arange(1.0, 10).reshape(3, 3)
    found = stc.einsum(equation, stc.SparseTensor.from_dense(x), b, reduce=reduce, output="sparse")
    torch.testing.assert_close(found.to_dense(), torch.einsum(equation, x, b))


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("equation", ["ijk->ij", "ijk->ji", "ijk->i", "ijk->", "ijk,kr->ijr", "ijk,kr->ir", "ijk->kij"])
def test_the_form_of_a_result_is_that_of_a_sum(equation: str, reduce: str) -> None:
    x, *dense = drawn(equation)
    in_dense_modes = stc.SparseTensor(torch.tensor([[1, 4]]), torch.rand(2, 5, 4).double(), (6, 5, 4))
    for operand in (x, in_dense_modes):
        of_sum = stc.einsum(equation, operand, *dense)
        assert type(stc.einsum(equation, operand, *dense, reduce=reduce)) is type(of_sum)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_limits_and_zeros_are_those_of_a_sum(reduce: str) -> None:
    x = stc.SparseTensor([[0, 5], [1, 7], [2, 3]], [1.0, 0.0], (10**6, 10**6, 10))
    found = stc.einsum("ijk->ij", x, reduce=reduce)
    assert (found.nnz, found.shape) == (2, (10**6, 10**6))
    assert stc.einsum("ijk->ij", x, reduce=reduce, drop_zeros=True).nnz == 1
    for output, error in (("dense", stc.OutOfMemoryError), ("csr", stc.PlanError)):
        with pytest.raises(error):
            stc.einsum("ijk->ij", x, reduce=reduce, output=output)
    with pytest.raises(stc.PlanError, match="no mode"):
        stc.einsum("ijk->", x, reduce=reduce, output="sparse")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_means_of_16_bits_are_counted_summed_and_divided_in_float32(dtype: torch.dtype) -> None:
    n = 65_520
    long = stc.SparseTensor(torch.stack([torch.zeros(n).long(), torch.arange(n)]), torch.ones(n, dtype=dtype), (1, n))
    assert stc.einsum("ij,jr->ir", long, torch.ones(n, 1, dtype=dtype), reduce="mean").tolist() == [[1.0]]
    assert stc.einsum("ij->i", long, reduce="mean", output="sparse").values.tolist() == [1.0]
    small = torch.tensor(1e-4, dtype=dtype)
    assert stc.einsum("ij->i", stc.full((1, 3000), 1e-4, dtype=dtype), reduce="mean") == small


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("equation", ["ij->i", "ij->", "ij,jr->ri"])
def test_results_of_no_entries_have_a_graph(equation: str, reduce: str) -> None:
    values = torch.zeros(0, requires_grad=True)
    x = stc.SparseTensor(torch.zeros(2, 0, dtype=torch.long), values, (6, 5))
    dense = [torch.ones(5, 3)] if "," in equation else []
    found = stc.einsum(equation, x, *dense, reduce=reduce, output="dense")
    assert torch.autograd.grad(found.sum(), values)[0].shape == (0,)
    assert found.unique().tolist() == [float(reduce == "prod")]


def test_products_that_are_not_the_least_may_pass_the_dtype() -> None:
    x = stc.SparseTensor([[0, 0], [0, 1]], torch.tensor([100, 1], dtype=torch.int8), (1, 2))
    b = torch.tensor([2, 1], dtype=torch.int8)
    assert stc.einsum("ij,j->i", x, b, reduce="amin").tolist() == [1]
    with pytest.raises(stc.DtypeError, match="holds 200, which"):
        stc.einsum("ij,j->i", x, b, reduce="amax")
