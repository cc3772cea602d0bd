"""Einsums of integers where torch has no matrix product of them, as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import random_sparse
from torch.utils._python_dispatch import TorchDispatchMode

import sparsetc as stc
from sparsetc.runtime import calls
from sparsetc.runtime.calls import LONG_RUN, integer_einsum, run_products

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addbmm, aten.mv, aten.addmv, aten.dot, aten.vdot}

HLS = stc.plans.plan_hls(threshold=0)  # all nonzeros in tiles

Operands = list[torch.Tensor | stc.SparseTensor]


class NoIntegerProducts(TorchDispatchMode):
    """Refuses what torch on CUDA has not, and remembers the most elements that an operation on integers gave."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS and any(_is_integer(a) for a in args):
            raise NotImplementedError(f'"{func.overloadpacket}" not implemented for integers')
        found = func(*args, **(kwargs or {}))
        if _is_integer(found):
            self.largest = max(self.largest, found.untyped_storage().nbytes() // found.element_size())
        return found


def _is_integer(a: Any) -> bool:
    return isinstance(a, torch.Tensor) and not a.is_floating_point() and not a.is_complex()


@pytest.fixture
def no_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[NoIntegerProducts]:
    monkeypatch.setattr(calls, "has_matrix_product", lambda dtype, device: dtype.is_floating_point)
    with NoIntegerProducts() as mode:
        yield mode


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape)))


def checked(equation: str, operands: Operands, **settings: Any) -> None:
    """The result is that of the dense operands in float64, which holds sums as small as these exactly."""
    dense = [(o.to_dense() if isinstance(o, stc.SparseTensor) else o).double() for o in operands]
    found = stc.einsum(equation, *operands, backend="torch", **settings)
    found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
    assert torch.equal(found.double(), torch.einsum(equation, *dense))


ONE_SPARSE: list[tuple[str, int, list[tuple[int, ...]], Any]] = [
    ("iju,u->", 0, [(3, 2, 5), (5,)], stc.plans.plan_hls(threshold=9)),
    ("i,i->", 0, [(13,), (13,)], HLS),
    ("ij,j->i", 0, [(40, 33), (33,)], HLS),
    ("ij,jr->ir", 0, [(40, 33), (33, 6)], HLS),
    ("i,ij->j", 1, [(40,), (40, 33)], HLS),
    ("ij,iwvj,rv->wr", 0, [(3, 4), (3, 2, 5, 4), (6, 5)], "auto"),
    ("in,rj,kij->nr", 2, [(3, 2), (4, 6), (3, 3, 6)], "auto"),
    ("DU,SD,Uv->Sv", 0, [(40, 33), (2, 40), (33, 3)], "auto"),
    ("ij,ia,jb->ab", 0, [(2, 400), (2, 5), (400, 4)], "auto"),
    ("qcj,gq,Aj->gA", 0, [(7, 7, 5), (3, 7), (2, 5)], "fiber"),
]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64], ids=str)
@pytest.mark.parametrize(("equation", "position", "shapes", "plan"), ONE_SPARSE, ids=[c[0] for c in ONE_SPARSE])
def test_one_sparse_operand(
    equation: str,
    position: int,
    shapes: list[tuple[int, ...]],
    plan: Any,
    dtype: torch.dtype,
    no_products: NoIntegerProducts,
) -> None:
    sparse = random_sparse(shapes[position], "random", dtype)
    operands: Operands = [sparse if n == position else drawn(*shape).to(dtype) for n, shape in enumerate(shapes)]
    checked(equation, operands, plan=plan)


@pytest.mark.parametrize("equation", ["tij->t", "tij->ti", "rirr->", "tij,ja->ia"])
@pytest.mark.parametrize("plan", ["auto", HLS], ids=["auto", "hls"])
def test_dense_modes(equation: str, plan: Any, no_products: NoIntegerProducts) -> None:
    order = len(equation.split("->")[0].split(",")[0])
    coords, shape = torch.tensor([[0, 1, 3]]).expand(order - 2, -1).contiguous(), (4,) * order
    operands: Operands = [stc.SparseTensor(coords, drawn(3, 4, 4), shape)]
    checked(equation, [*operands, drawn(4, 5)] if "," in equation else operands, plan=plan)


@pytest.mark.parametrize("plan", ["auto", "bcb", "bcb+scalar", "scalar", stc.plans.plan_bcb()], ids=str)
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("i,i->", [(35,), (35,)]),
        ("ni,in->", [(5, 7), (7, 5)]),
        ("ij,jk->ik", [(40, 33), (33, 37)]),
        ("irk,k,r->ir", [(3, 2, 2), (2,), (2,)]),
        ("miu,u->im", [(8, 10, 2), (2,)]),
    ],
)
def test_two_sparse_operands(
    equation: str, shapes: list[tuple[int, ...]], plan: Any, no_products: NoIntegerProducts
) -> None:
    sparse: Operands = [random_sparse(shape, "random", torch.int32, n) for n, shape in enumerate(shapes[:2])]
    checked(equation, [*sparse, *(drawn(*shape).int() for shape in shapes[2:])], plan=plan)


def test_there_is_no_dense_product(no_products: NoIntegerProducts) -> None:
    x = random_sparse((4, 5), "dense", torch.int64)
    with pytest.raises(stc.PlanError, match="needs a matrix product"):
        stc.einsum("ij,kj->ik", x, x, plan="dense")


def test_products_of_dense_operands(no_products: NoIntegerProducts) -> None:
    x = random_sparse((4, 5), "random", torch.int64)
    checked("ij,jr,rs->is", [x, drawn(5, 3), drawn(3, 6)])
    checked("ij,jr,rs,st->it", [x, drawn(5, 3), drawn(3, 6), drawn(6, 2)])


# -- the einsum --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("r,r->", [(3,), (3,)]),
        ("ij,jk->ik", [(2, 3), (3, 4)]),
        ("ii,i->i", [(3, 3), (3,)]),
        (",r->r", [(), (3,)]),
        ("ab,cd->dbca", [(2, 3), (4, 5)]),
        ("ij->j", [(2, 3)]),
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
        ("ij,ij->", [(0, 3), (0, 3)]),
        ("ba->ab", [(2, 3)]),
        ("aij,bjk->ak", [(2, 3, 4), (5, 4, 6)]),
        ("ij,jk->ik", [(2, 1), (3, 4)]),
        ("i,j,ij->", [(70,), (50,), (70, 50)]),
        ("zij,zjk,zk->zi", [(9, 3, 4), (9, 4, 5), (9, 5)]),
    ],
)
@pytest.mark.parametrize("most", [1, 10, 1 << 20])
def test_einsums_without_a_product(
    equation: str, shapes: list[tuple[int, ...]], most: int, monkeypatch: pytest.MonkeyPatch, no_products: Any
) -> None:
    monkeypatch.setattr(calls, "ELEMENTS", most)
    given = [drawn(*shape) for shape in shapes]
    assert torch.equal(integer_einsum(equation, *given).double(), torch.einsum(equation, *(t.double() for t in given)))


def test_sums_wrap(no_products: NoIntegerProducts) -> None:
    most = torch.iinfo(torch.int64).max
    found = integer_einsum("ij,j->i", torch.tensor([[most, 2], [2**62, 2**53 + 1]]), torch.tensor([2, 1]))
    assert found.tolist() == [0, -(2**63) + 2**53 + 1]


def test_what_is_made_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch, no_products: NoIntegerProducts) -> None:
    monkeypatch.setattr(calls, "ELEMENTS", 1000)
    a, b = drawn(40, 50), drawn(50, 60)
    no_products.largest = 0
    found = integer_einsum("ij,jk->ik", a, b)
    assert torch.equal(found.double(), a.double() @ b.double())
    assert no_products.largest <= max(a.numel(), b.numel(), found.numel())


def test_long_runs_of_rows_are_not_multiplied_out(
    monkeypatch: pytest.MonkeyPatch, no_products: NoIntegerProducts
) -> None:
    monkeypatch.setattr(calls, "ELEMENTS", 1000)
    rows = 4 * LONG_RUN
    left, right, offsets = drawn(rows, 30), drawn(rows, 20), torch.tensor([0, 5, 5, rows])
    no_products.largest = 0
    found = run_products(left, right, offsets)
    assert no_products.largest <= rows * 30
    for run, (begin, end) in enumerate(((0, 5), (5, 5), (5, rows))):
        assert torch.equal(found[run].double(), left[begin:end].double().T @ right[begin:end].double())


def test_text_of_floats_calls_torch() -> None:
    for dtype, called in ((torch.float32, "torch.einsum("), (torch.int64, "integer_einsum(")):
        x = random_sparse((40, 33), "dense", dtype)
        assert called in stc.compile("ij,jr->ir", x, drawn(33, 6).to(dtype), plan=HLS, backend="torch").source
