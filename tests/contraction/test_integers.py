"""Integers near their limits: sums as torch's, results that do not fit refused, duplicates added up exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from cases import assert_matches, random_sparse

import sparsetc as stc
from sparsetc.contraction.contraction import Contraction

SMALL = [torch.uint8, torch.int8, torch.int16, torch.int32]


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("output", ["dense", "sparse"])
def test_a_plain_sum_is_torch_s(dtype: torch.dtype, output: str) -> None:
    most = torch.iinfo(dtype).max
    x = stc.SparseTensor([[0, 0, 1], [0, 1, 1]], torch.tensor([most, most, -most], dtype=dtype), (2, 2))
    expected = torch.einsum("ij->i", x.to_dense())
    found = stc.einsum("ij->i", x, output=output)
    found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)
    assert stc.einsum("ij->ji", x).dtype == dtype  # nothing is summed


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("plan", ["auto", "coo", "fiber", "rows"])
def test_a_product_that_does_not_fit_is_refused(dtype: torch.dtype, plan: str) -> None:
    most = torch.iinfo(dtype).max
    x = stc.SparseTensor([[0, 1, 1], [0, 0, 1]], torch.tensor([1, 1, 1], dtype=dtype), (2, 2))
    b = torch.full((2, 3), most, dtype=dtype)
    with pytest.raises(stc.DtypeError, match=f"holds {2 * most}, which {dtype} cannot"):
        stc.einsum("ij,jr->ir", x, b, plan=plan)
    assert torch.equal(stc.einsum("ij,jr->ir", x, b // 2, plan=plan), x.to_dense() @ (b // 2))


@pytest.mark.parametrize("dtype", SMALL[1:], ids=str)
@pytest.mark.parametrize("plan", ["auto", "scalar", "dense", "bcb"])
def test_a_contraction_that_does_not_fit_is_refused(dtype: torch.dtype, plan: str) -> None:
    most = torch.iinfo(dtype).max
    x = stc.SparseTensor([[0, 0], [0, 1]], torch.tensor([most, most], dtype=dtype), (2, 2))
    y = stc.SparseTensor([[0, 1], [0, 0]], torch.tensor([1, 1], dtype=dtype), (2, 2))
    with pytest.raises(stc.DtypeError, match=f"holds {2 * most}, which {dtype} cannot"):
        stc.einsum("ij,jk->ik", x, y, plan=plan)
    less = stc.einsum("ij,jk->ik", x, y.with_values(torch.tensor([1, -1], dtype=dtype)), plan=plan)
    assert less.dtype == dtype
    assert less.values.tolist() == [0]


def test_what_is_made_on_the_way_has_64_bits() -> None:
    x = stc.SparseTensor([[0, 0], [0, 1]], torch.tensor([100, 100], dtype=torch.int8), (1, 2))
    y = stc.SparseTensor([[0, 1], [0, 0]], torch.tensor([1, 1], dtype=torch.int8), (2, 1))
    zero = stc.SparseTensor([[0], [0]], torch.tensor([0], dtype=torch.int8), (1, 1))
    assert stc.einsum("ij,jk,kl->il", x, y, zero).values.tolist() == [0]  # 200 times 0


def test_products_of_dense_operands_have_64_bits() -> None:
    x = stc.SparseTensor([[0], [1]], torch.tensor([0], dtype=torch.int8), (2, 2))
    b = torch.full((2, 2), 100, dtype=torch.int8)
    assert stc.einsum("ij,jr,rs->is", x, b, b).tolist() == [[0, 0], [0, 0]]
    with pytest.raises(stc.DtypeError, match="holds 20000, which"):
        stc.einsum("ij,jr,rs->is", x.with_values(torch.tensor([1], dtype=torch.int8)), b, b)


def test_unsigned_integers_do_not_wrap() -> None:
    x = stc.SparseTensor([[3, 3]], torch.tensor([200, 55], dtype=torch.uint8), (5,))
    assert x.values.tolist() == [255]
    calls = {
        256: lambda: stc.SparseTensor([[3, 3]], torch.tensor([200, 56], dtype=torch.uint8), (5,)),
        510: lambda: x + x,
        -255: lambda: -x,
        -100: lambda: x.with_values(torch.tensor([155], dtype=torch.uint8)) - x,
    }
    for found, call in calls.items():
        with pytest.raises(stc.DtypeError, match=f"holds {found}, which torch.uint8 cannot"):
            call()
    assert x.sum().item() == 255
    assert (x.to(torch.int16) * -2).values.tolist() == [-510]


@pytest.mark.parametrize("kind", ["uint16", "uint32", "uint64"])
def test_counts_in_dtypes_that_torch_only_stores(kind: str) -> None:
    """They are taken in a dtype that holds them, wherever they come from."""
    counts = np.array([[0, 60_000], [7, 0]], kind)
    wider = torch.int32 if kind == "uint16" else torch.int64
    x = stc.SparseTensor([[0, 1], [1, 0]], counts[counts > 0], (2, 2))
    table = {"i": np.array([0, 1]), "j": np.array([1, 0]), "count": counts[counts > 0]}
    others = {
        "torch": stc.SparseTensor([[0, 1], [1, 0]], torch.from_numpy(counts[counts > 0]), (2, 2)),
        "dense": stc.SparseTensor.from_dense(counts),
        "scipy": stc.SparseTensor.coerce(scipy.sparse.csc_array(counts)),
        "table": stc.SparseTensor.from_table(table, ["i", "j"], "count"),
        "values": stc.eye(2).with_values(counts[counts > 0]),
    }
    for y in (x, *others.values()):
        assert y.dtype == wider
        assert y.values.tolist() == [60_000, 7]
    assert (x + x).sum().item() == 120_014
    assert (x > 7).values.tolist() == [True, False]
    twice = stc.SparseTensor([[0, 0]], np.array([40_000, 40_000], kind), (1,))
    assert twice.values.tolist() == [80_000]


def test_counts_that_no_signed_dtype_holds() -> None:
    past = np.array([2**63], np.uint64)
    with pytest.raises(stc.DtypeError, match=r"being 2\*\*63 or more; convert values to float64"):
        stc.SparseTensor([[0]], past)
    with pytest.raises(stc.DtypeError, match=r"found torch\.uint16; convert them first: \.to\(torch\.int32\)"):
        stc.eye(2).to(torch.uint16)


@pytest.mark.parametrize("dtype", [*SMALL[1:], torch.int64], ids=str)
def test_duplicates_are_added_up_exactly(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    for values, fits in (
        ([limits.max, 0, 0], True),
        ([limits.max, 1, -1], True),
        ([limits.min, -1, 1], True),
        ([limits.min, limits.max, 1], True),
        ([limits.max, 1, 0], False),
        ([limits.min, -1, 0], False),
        ([limits.max, limits.max, limits.max], False),
        ([limits.min, limits.min, limits.min], False),
    ):
        given = torch.tensor(values, dtype=dtype)
        if fits:
            x = stc.SparseTensor([[3, 3, 3]], given, (5,))
            assert x.values.tolist() == [sum(values)]
        else:
            with pytest.raises(stc.DtypeError, match=f"duplicates sum to {sum(values)}|holds {sum(values)}"):
                stc.SparseTensor([[3, 3, 3]], given, (5,))


MAKE = {
    "dense": lambda row: row[0],
    "nonzeros": stc.SparseTensor.from_dense,
    "dense mode": lambda row: stc.SparseTensor([[0]], row, (1, 4)),
    "blocks": lambda row: stc.SparseTensor.from_blocks([[0], [0]], row[None], (1, 4)),
}
"""An operand of four elements: a row of a matrix, or a vector."""


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("equation", "kinds"),
    [
        ("ij,j->i", ["nonzeros", "dense"]),
        ("ij,j,j->i", ["nonzeros", "dense", "dense"]),
        ("ij,kj->ik", ["nonzeros"] * 2),
        ("ij,kj,lj->ikl", ["nonzeros"] * 3),
        ("ij,j->i", ["dense mode", "dense"]),
        ("ij,kj,lj->ikl", ["dense mode"] * 3),
        ("ij,kj->ik", ["blocks"] * 2),
    ],
)
def test_a_sum_that_passes_64_bits_is_refused(dtype: torch.dtype, equation: str, kinds: list[str]) -> None:
    low = torch.iinfo(dtype).min

    def called(*rows: list[int], **settings: Any) -> torch.Tensor:
        operands = [MAKE[k](torch.tensor([row], dtype=dtype)) for k, row in zip(kinds, rows, strict=False)]
        found = stc.einsum(equation, *operands, **settings)
        return found.values if isinstance(found, stc.SparseTensor) else found

    for settings in ({"deterministic": True}, {} if "dense" in kinds else {"plan": "dense"}):
        with pytest.raises(stc.DtypeError, match="past 64 bits"):  # modulo 2**64 it is 0
            called([low] * 4, [low] * 4, [low] * 4, **settings)
    assert called([low, 2, 3, 3], [1, 1, 0, 0], [1, 0, 1, 1]).sum() == low + (0 if len(kinds) == 3 else 2)


def test_sums_up_to_64_bits_are_exact() -> None:
    x = stc.SparseTensor([[0, 0, 0], [0, 1, 2]], torch.tensor([2**62, 2**62, 2**62]), (1, 3))
    for factors, fits in (([1, 1, -1], 2**62), ([1, 1, 0], None), ([-1, -1, 0], -(2**63)), ([2**40, 0, -(2**40)], 0)):
        b = torch.tensor(factors)
        if fits is None or max(factors) > 1:  # which float64 cannot tell from a sum that wrapped
            with pytest.raises(stc.DtypeError, match="past 64 bits"):
                stc.einsum("ij,j->i", x, b)
        else:
            assert stc.einsum("ij,j->i", x, b).tolist() == [fits]
    with pytest.raises(stc.DtypeError, match="past 64 bits"):
        stc.einsum("ij->i", x)


def test_a_kernel_looks_at_each_call() -> None:
    x = stc.SparseTensor([[0, 0], [0, 1]], torch.tensor([2**62, 1]), (1, 2))
    kernel, b = stc.compile("ij,j->i", x, torch.tensor([1, 1])), torch.tensor([1, 1])
    for _ in range(2):
        assert kernel(b).tolist() == [2**62 + 1]
    b[0] = 4
    with pytest.raises(stc.DtypeError, match="past 64 bits"):
        kernel(b)
    assert kernel(b, values=torch.tensor([3, 1])).tolist() == [13]


def test_sums_that_cannot_pass_64_bits_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[object] = []
    made = Contraction.by
    monkeypatch.setattr(Contraction, "by", lambda *a, **settings: again.append(a) or made(*a, **settings))
    x = random_sparse((6, 8), "random", torch.float64).to(torch.int64)
    for most, expected in ((1, 0), (2**62, 1)):
        b = torch.zeros(8, 2, dtype=torch.int64)
        b[0] = most
        stc.einsum("ij,jr->ir", x.with_values(torch.ones_like(x.values)), b)
        assert len(again) == expected


def test_results_are_scaled_and_added_to_within_their_type() -> None:
    x = random_sparse((4, 4), "dense", torch.int8)
    b = torch.ones(4, 3, dtype=torch.int8)
    assert_matches(stc.contract(x, b, 1), "ij,jr->ir", [x, b])
    with pytest.raises(stc.DtypeError, match="1000 times the result"):
        stc.contract(x, b, 1, alpha=1000)


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_what_is_scaled_need_not_fit_before(form: str) -> None:
    x = stc.SparseTensor([[0], [0]], torch.tensor([100], dtype=torch.int8), (1, 1))
    y = stc.SparseTensor([[0], [0]], torch.tensor([2], dtype=torch.int8), (1, 1))
    out = x if form == "sparse" else x.to_dense()

    def total(first: stc.SparseTensor, second: stc.SparseTensor, alpha: int, beta: int) -> int:
        found = stc.contract(first, second, 1, input=out, alpha=alpha, beta=beta)
        assert isinstance(found, stc.SparseTensor) == (form == "sparse")
        assert found.dtype == torch.int8
        return int(found.to_dense() if isinstance(found, stc.SparseTensor) else found)

    one = y.with_values(y.values // 2)
    assert total(x, one, 2, -1) == 100
    assert total(x, y, 1, -1) == 100
    assert total(x, y, -1, 3) == 100
    with pytest.raises(stc.DtypeError, match="holds 300, which"):
        total(x, y, 1, 1)
    for scalars in ((2**62, 1), (1, 2**62)):
        with pytest.raises(stc.DtypeError, match="past 64 bits"):
            total(x, y, *scalars)
    with pytest.raises(stc.DtypeError, match="alpha must be a number"):
        total(x, y, 2**63, 0)


def test_values_changed_as_an_array_are_looked_at_again() -> None:
    x, a = stc.SparseTensor([[0]], torch.tensor([-2]), (1,)), torch.tensor(-(2**61))
    assert stc.einsum("i,->", x, a) == 2**62
    x.values.numpy()[...] *= 2
    with pytest.raises(stc.DtypeError, match=r"64 bits|torch\.int64"):
        stc.einsum("i,->", x, a)


def test_sums_are_looked_at_by_a_plan_of_its_own() -> None:
    a, b = torch.tensor([[2**61, -(2**60), 0, 1]]), torch.ones(1, 5, dtype=torch.int64)
    x = stc.SparseTensor([[0]], torch.tensor([[[1, 1]]]), (1, 1, 2))
    plan = stc.compile("ir,js,kij->sr", a, b, x).plan
    assert stc.einsum("ir,js,kij->sr", a, b, x, plan=plan).tolist() == [[2**62, -(2**61), 0, 2]] * 5
    with pytest.raises(stc.DtypeError, match="past 64 bits"):
        stc.einsum("ir,js,kij->sr", a * 2, b, x, plan=plan)


@pytest.mark.parametrize("plan", ["auto", "scalar", "bcb"])
def test_sums_are_looked_at_where_values_lie_as_the_plan_says(plan: str) -> None:
    x = stc.SparseTensor(torch.tensor([[0]]), torch.tensor([[[2**62 - 1]]]), (1, 1, 1))
    y = stc.SparseTensor(torch.tensor([[0, 1]]), torch.tensor([1, 2]), (2,))
    found = stc.einsum("ijk,m->mj", x, y, plan=plan)
    assert found.to_dense().tolist() == [[2**62 - 1], [2**63 - 2]]
    own = stc.compile("ijk,m->mj", x, y, plan=plan).plan
    assert stc.einsum("ijk,m->mj", x, y, plan=own).to_dense().tolist() == found.to_dense().tolist()
    with pytest.raises(stc.DtypeError, match="past 64 bits"):
        stc.einsum("ijk,m->mj", x.with_values(2 * x.values), y, plan=plan)


def test_sums_and_products_of_tensors_are_refused_as_those_of_einsum() -> None:
    x = stc.SparseTensor([[0, 0], [0, 1]], torch.tensor([100, 1], dtype=torch.int8), (1, 2))
    other = stc.SparseTensor([[0], [0]], torch.tensor([100], dtype=torch.int8), (1, 2))
    least = stc.SparseTensor([[0], [1]], torch.tensor([-(2**63)]), (1, 2))
    for call, said in (
        (lambda: x + x, "holds 200, which"),
        (lambda: x + other, "holds 200, which"),
        (lambda: -x - other, "holds -200, which"),
        (lambda: x * other, "holds 10000, which"),
        (lambda: x * 2, "holds 200, which"),
        (lambda: x**2, "holds 10000, which"),
        (lambda: stc.kron(x, other), "holds 10000, which"),
        (lambda: least - x.long(), f"holds {-(2**63) - 1}, which"),
        (lambda: least * 2, "past 64 bits"),
        (lambda: stc.SparseTensor([[0, 1]], torch.tensor([2**62, 2**62])).sum(), f"holds {2**63}, which"),
        (lambda: stc.SparseTensor([[0]], torch.tensor([[2**62, 2**62]])).sum(1), f"holds {2**63}, which"),
    ):
        with pytest.raises(stc.DtypeError, match=said):
            call()
    assert (least + least.map(torch.bitwise_not)).values.tolist() == [-1]
    assert (x.long() * 2**40).values.tolist() == [100 * 2**40, 2**40]
