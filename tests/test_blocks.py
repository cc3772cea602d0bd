"""Tensors in blocks: what they are made of and turned into, and einsums of them, which expand nothing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from block_cases import (
    MIXED,
    ONE,
    SIZES,
    TWO,
    Spec,
    blocks_of,
    check,
    dense,
    expected,
    filled,
    in_blocks,
    numbers,
    operands_of,
)

import sparsetc as stc
from sparsetc.pattern import Pattern

ORDERS = {
    "vector": ((7,), (3,)),
    "matrix": ((5, 6), (2, 3)),
    "matrix of whole blocks": ((6, 8), (2, 4)),
    "order 3": ((5, 4, 7), (2, 1, 3)),
    "order 4": ((3, 4, 5, 2), (2, 3, 2, 1)),
    "with a dense mode": ((5, 6, 3), (2, 3)),
    "one block": ((3, 3), (5, 4)),
    "of ones": ((5, 6), (1, 1)),
    "an empty mode": ((0, 6), (2, 3)),
}
LAYOUTS = (torch.sparse_bsr, torch.sparse_bsc)


@pytest.fixture
def unexpanded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where blocks or dense modes are expanded."""
    cut = Pattern.cut

    def own(self: Pattern, sides: tuple[int, ...]) -> Any:
        assert self.blocks is None or max(sides) > 1 or max(self.blocks.sides) == 1, "blocks were expanded"
        return cut(self, sides)

    def expanded(self: Pattern, sizes: tuple[int, ...]) -> Pattern:
        assert not sizes, "dense modes were expanded"
        return self

    with monkeypatch.context() as patch:
        patch.setattr(Pattern, "cut", own)
        patch.setattr(Pattern, "expanded", expanded)
        yield


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize("n", [9, 1, 0])
@pytest.mark.parametrize("name", ORDERS)
def test_what_blocks_are(name: str, n: int, coalesce: bool) -> None:
    shape, sides = ORDERS[name]
    n = 0 if 0 in shape else n
    coords, blocks = blocks_of(shape, sides, n)
    x = stc.SparseTensor.from_blocks(coords, blocks, shape, coalesce=coalesce)
    whole = filled(blocks, coords, shape)
    assert (x.shape, x.blocksize, x.order) == (shape, sides, len(shape))
    assert (x.sparse_order, x.dense_order) == (len(sides), len(shape) - len(sides))
    assert x.values.shape == (x.nnz, *sides, *shape[len(sides) :])
    assert x.is_coalesced == coalesce
    assert x.nnz == (torch.unique(coords, dim=1).shape[1] if coalesce else n)
    assert f"blocksize={sides}" in repr(x)
    assert f"blocksize={sides}" in repr(x.pattern)
    torch.testing.assert_close(x.to_dense(), whole)
    expanded = x.expand_dense()
    assert (expanded.blocksize, expanded.dense_order, expanded.shape) == ((), 0, shape)
    torch.testing.assert_close(expanded.to_dense(), whole)
    assert expanded.is_coalesced == coalesce
    if coalesce:
        assert torch.equal(expanded.coords, expanded.coalesce().coords)
    torch.testing.assert_close(x.coalesce().to_dense(), whole)
    assert x.coalesce().blocksize == sides
    modes = (*reversed(range(len(sides))), *range(len(sides), len(shape)))
    turned = x.permute(modes)
    assert turned.blocksize == sides[::-1]
    torch.testing.assert_close(turned.to_dense(), whole.permute(modes))
    assert x.permute(modes).pattern is turned.pattern
    torch.testing.assert_close(x.to_torch(torch.sparse_coo).to_dense(), whole)
    torch.testing.assert_close(stc.SparseTensor(*x.to_numpy()).to_dense(), whole)


def test_copies_of_all_kinds() -> None:
    x = in_blocks((5, 6, 3), (2, 3), 9)
    whole = x.to_dense()
    buffer = io.BytesIO()
    torch.save([x, x.with_values(2 * x.values)], buffer)
    buffer.seek(0)
    loaded, double = torch.load(buffer)
    assert loaded.pattern is double.pattern
    torch.testing.assert_close(double.to_dense(), 2 * whole)
    for made in (pickle.loads(pickle.dumps(x)), copy.copy(x), copy.deepcopy(x), loaded):
        assert made.blocksize == x.blocksize
        assert torch.equal(made.to_dense(), whole)
    assert copy.copy(x).pattern is x.pattern
    narrow = x.to(torch.float32)
    assert narrow.pattern is x.pattern
    assert narrow.blocksize == x.blocksize
    assert x.to("meta").blocksize == x.blocksize
    assert x.to("meta").shape == x.shape


def test_a_damaged_pickle_is_refused() -> None:
    x = in_blocks((5, 6), (2, 3), 4)
    make, (coords, sides, shape, coalesced) = x.pattern.__reduce__()
    for bad in (
        (coords, (2,), shape, coalesced),
        (coords, (2, 0), shape, coalesced),
        (coords + 5, sides, shape, coalesced),
        (coords.flip(1), sides, shape, coalesced),
        (coords, "ab", shape, coalesced),
    ):
        with pytest.raises(stc.SparsetcError):
            make(*bad)
    tensor, (pattern, values) = x.__reduce__()
    with pytest.raises(stc.FormatError, match="blocks of"):
        tensor(pattern, values.mT)


def test_values_that_are_the_callers_and_that_are_not() -> None:
    coords, blocks = blocks_of((6, 6), (2, 3), 1)
    x = stc.SparseTensor.from_blocks(coords, blocks, (6, 6))
    coords += 1
    blocks *= 2
    torch.testing.assert_close(x.to_dense(), filled(blocks, coords - 1, (6, 6)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"blocks": torch.ones(2, 2, 3)},
            stc.FormatError,
            r"block 1 has a nonzero at coordinate 5 of mode 0, whose size",
        ),
        ({"blocks": torch.full((2, 2, 3), torch.nan)}, stc.FormatError, "past the end of the shape must be zero"),
        (
            {"coords": [[0, 3], [1, 0]]},
            stc.CoordinateError,
            "mode 0: block 1 has 3, but the size of mode 0 is 3 blocks",
        ),
        ({"coords": [[0, -1], [1, 0]]}, stc.CoordinateError, "block 1 has -1"),
        ({"coords": [[0, 2]]}, stc.ShapeError, "shape .5, 6. has 2 modes|dense modes of blocks"),
        ({"coords": [[0, 1, 2], [0, 0, 0]]}, stc.FormatError, "3 columns but there are 2 values"),
        ({"coords": [[0.5, 1], [0, 0]]}, stc.FormatError, "coords must be integers"),
        ({"blocks": torch.zeros(2, 2)}, stc.FormatError, "a side of 1 or more for each of 2 modes"),
        ({"blocks": torch.zeros(2, 0, 3)}, stc.FormatError, "a side of 1 or more for each of 2 modes"),
        ({"blocks": torch.zeros(2, 2, 3, dtype=torch.bool)}, stc.DtypeError, "values must be one of"),
        ({"shape": (5, 6, 2)}, stc.ShapeError, "has 3 modes, but a block has 2"),
        ({"shape": (5, -6)}, stc.ShapeError, "from 0 to"),
        ({"shape": None}, stc.ShapeError, "shape must be a sequence"),
        ({"blocks": torch.zeros(2, 2, 3, 4), "shape": (5, 6, 3)}, stc.ShapeError, "dense modes of blocks"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"coords": [[0, 2], [1, 0]], "blocks": torch.zeros(2, 2, 3), "shape": (5, 6)} | change
    with pytest.raises(error, match=message):
        stc.SparseTensor.from_blocks(**given)


def test_zeros_past_the_end_and_values_put_there_later() -> None:
    coords, blocks = blocks_of((5, 7), (2, 3), 20)
    x = stc.SparseTensor.from_blocks(coords, blocks, (5, 7))
    b = numbers((7, 4), torch.float64, 1)
    wild = x.with_values(torch.where(x.values == 0, torch.full_like(x.values, torch.nan), x.values))
    whole = x.to_dense()
    for found, wanted in (
        (wild.to_dense(), whole),
        (wild.expand_dense().to_dense(), whole),
        (stc.einsum("ij->i", wild), whole.sum(1)),
        (stc.einsum("ij,jr->ir", wild, b), whole @ b),
        (stc.einsum("ij,jr->ir", wild, b, plan="coo"), whole @ b),
        (stc.einsum("ij->ji", wild).to_dense(), whole.T),
    ):
        torch.testing.assert_close(found, wanted)


# -- torch, scipy, files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("sides", [(2, 3), (1, 4), (3, 1), (6, 12)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("unexpanded")
def test_torch_blocks_are_taken_as_they_are(
    layout: torch.layout, sides: tuple[int, int], batch: tuple[int, ...]
) -> None:
    whole = in_blocks((6, 12), sides, 5).to_dense().expand(*batch, 6, 12).contiguous()
    given = whole.to_sparse_bsr(sides) if layout == torch.sparse_bsr else whole.to_sparse_bsc(sides)
    x = stc.SparseTensor.from_torch(given)
    assert x.blocksize == (*[1] * len(batch), *sides)
    torch.testing.assert_close(x.to_dense(), whole)
    assert stc.SparseTensor.from_torch(given).pattern is x.pattern
    b = numbers((12, 4), torch.float64, 1)
    torch.testing.assert_close(stc.einsum("...ij,jr->...ir", given, b, output="dense"), whole @ b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("unexpanded")
def test_torch_blocks_with_dense_modes(layout: torch.layout) -> None:
    values = numbers((3, 2, 3, 5), torch.float64, 0)
    index = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])
    given = torch.sparse_compressed_tensor(*index, values, (4, 6, 5), layout=layout)  # type: ignore[call-overload]
    x = stc.SparseTensor.from_torch(given)
    assert (x.blocksize, x.dense_order, x.shape) == ((2, 3), 1, (4, 6, 5))
    at = torch.tensor([[0, 0, 1], [0, 1, 1]])
    torch.testing.assert_close(
        x.to_dense(), filled(values, at if layout == torch.sparse_bsr else at.flip(0), (4, 6, 5))
    )


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.usefixtures("unexpanded")
def test_torch_blocks_come_back(layout: torch.layout | None, coalesce: bool) -> None:
    x = in_blocks((6, 12), (2, 6), 7, coalesce=coalesce)
    for sides in (None, (2, 6), (2, 3), (1, 2)):
        if layout is None and sides is not None:
            continue
        found = x.to_torch(layout, sides)
        assert found.layout == (layout or torch.sparse_bsr)
        assert found.values().shape[1:] == (sides or (2, 6))
        torch.testing.assert_close(found.to_dense(), x.to_dense())
        torch.testing.assert_close(stc.SparseTensor.from_torch(found).to_dense(), x.to_dense())


def test_other_layouts_of_torch_have_blocks_expanded() -> None:
    x = in_blocks((6, 12), (2, 6), 7)
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        torch.testing.assert_close(x.to_torch(layout).to_dense(), x.to_dense())
    torch.testing.assert_close(x.to_torch(torch.sparse_bsr, (3, 4)).to_dense(), x.to_dense())
    ragged = in_blocks((5, 7), (2, 3), 7)
    assert ragged.to_torch().layout == torch.sparse_coo
    torch.testing.assert_close(ragged.to_torch().to_dense(), ragged.to_dense())
    assert in_blocks((4, 4, 4), (2, 2, 2), 5).to_torch().layout == torch.sparse_coo
    with pytest.raises(stc.ShapeError, match="must divide the shape"):
        ragged.to_torch(torch.sparse_bsr)


@pytest.mark.usefixtures("unexpanded")
def test_scipy_blocks() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    x = in_blocks((6, 12), (2, 3), 7)
    given = x.to_scipy()
    assert given.format == "bsr"
    assert given.blocksize == (2, 3)
    again = stc.SparseTensor.from_scipy(given)
    assert again.blocksize == (2, 3)
    torch.testing.assert_close(again.to_dense(), x.to_dense())
    assert stc.SparseTensor.from_scipy(given).pattern is again.pattern
    b = numbers((12, 4), torch.float64, 1)
    torch.testing.assert_close(stc.einsum("ij,jr->ir", given, b), x.to_dense() @ b)
    unsorted = sparse.bsr_array((given.data[1::-1].copy(), [1, 0], [0, 0, 2, 2]), shape=(6, 12), blocksize=(2, 3))
    torch.testing.assert_close(stc.SparseTensor.from_scipy(unsorted).to_dense(), torch.from_numpy(unsorted.toarray()))


@pytest.mark.usefixtures("unexpanded")
def test_files(tmp_path: Path) -> None:
    x = in_blocks((5, 7, 3), (2, 3), 7)
    wild = x.with_values(torch.where(x.values == 0, torch.full_like(x.values, torch.inf), x.values))
    stc.write(tmp_path / "x.npz", wild)
    again = stc.read(tmp_path / "x.npz")
    assert (again.blocksize, again.shape) == (x.blocksize, x.shape)
    assert torch.equal(again.to_dense(), x.to_dense())


def test_files_of_text_have_nonzeros(tmp_path: Path) -> None:
    x = in_blocks((5, 7), (2, 3), 7)
    for name in ("x.tns", "x.mtx"):
        stc.write(tmp_path / name, x)
        torch.testing.assert_close(stc.read(tmp_path / name).to_dense().double(), x.to_dense(), rtol=1e-6, atol=1e-6)


def test_gradients_to_the_values_of_a_torch_tensor() -> None:
    given = in_blocks((6, 12), (2, 6), 7).to_torch().requires_grad_()
    b = numbers((12, 4), torch.float64, 1)
    (found,) = torch.autograd.grad(stc.einsum("ij,jr->ir", given, b).square().sum(), given)
    whole = given.to_dense().detach().requires_grad_()
    (wanted,) = torch.autograd.grad((whole @ b).square().sum(), whole)
    mask = given.detach().to_dense() != 0
    torch.testing.assert_close(found.to_dense(), wanted * mask)


# -- einsums ----------------------------------------------------------------------------------------------------------

CASES = {
    f"{kind} {equation}": (equation, specs)
    for kind, cases in (("one", ONE), ("two", TWO), ("mixed", MIXED))
    for equation, specs in cases.items()
}


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize("n", [9, 1, 0])
@pytest.mark.parametrize("name", CASES)
def test_results(name: str, n: int, coalesce: bool) -> None:
    equation, specs = CASES[name]
    operands = operands_of(equation, specs, n, coalesce=coalesce)
    for form in ("auto", "dense"):
        check(stc.einsum(equation, *operands, output=form), equation, operands)
    if any(
        c in equation.split("->")[1]
        for o, t in zip(specs, equation.split(","), strict=False)
        if o != "dense"
        for c in t
    ):
        found = stc.einsum(equation, *operands, output="sparse")
        assert isinstance(found, stc.SparseTensor)
        check(found, equation, operands)
        assert found.is_coalesced or not coalesce


FORMS = {  # blocksize and dense_order of the results
    "one ij->ij": ((2, 3), 0),
    "one ij->ji": ((3, 2), 0),
    "one ij,rj->ijr": ((2, 3), 1),
    "one ij,jr->irj": ((2, 4, 3), 0),
    "one ij,jr->rij": ((4, 2, 3), 0),
    "one ijk,k->ji": ((3, 2), 0),
    "one ijh->ijh": ((2, 3), 1),
    "two ij,jk->ik": ((2, 2), 0),
    "two ij,jk->ki": ((3, 2), 0),
    "two ij,ji->ij": ((2, 1), 0),
    "two ijk,kab->ijab": ((2, 3, 3, 2), 0),
    "mixed ij,jk->ik": ((2, 1), 0),
    "mixed ij,ij->ij": ((), 0),
    "mixed ij,kja->aik": ((3, 2, 1), 0),
}


@pytest.mark.parametrize("name", FORMS)
def test_results_keep_blocks(name: str) -> None:
    equation, specs = CASES[name]
    found = stc.einsum(equation, *operands_of(equation, specs))
    assert isinstance(found, stc.SparseTensor)
    assert (found.blocksize, found.dense_order) == FORMS[name]


def test_a_result_on_the_operands_own_blocks_has_its_pattern() -> None:
    x, left, right = operands_of("ij,ir,jr->ij", ((2, 3), "dense", "dense"))
    first, second = (stc.einsum("ij,ir,jr->ij", x, left, right) for _ in range(2))
    assert first.pattern is x.pattern  # type: ignore[union-attr]
    assert second.pattern is x.pattern  # type: ignore[union-attr]
    turned, again = stc.einsum("ij->ji", x), stc.einsum("ij,ir,jr->ji", x, left, right)
    assert turned.pattern is stc.einsum("ij->ji", x).pattern  # type: ignore[union-attr]
    assert torch.equal(turned.coords, again.coords)  # type: ignore[union-attr]


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.int64]
)
@pytest.mark.parametrize("name", ["one ij,jr->ir", "one ij->i", "one ij->ji", "two ij,jk->ik", "mixed ij,jk->ik"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    equation, specs = CASES[name]
    operands = operands_of(equation, specs, dtype=dtype, coalesce=False)
    found = stc.einsum(equation, *operands)
    summed = not (dtype.is_floating_point or dtype.is_complex) and name == "one ij->i"
    assert found.dtype == (torch.int64 if summed else dtype)
    check(found, equation, operands, {torch.float16: 1e-2, torch.bfloat16: 6e-2}.get(dtype, 1e-5))


@pytest.mark.usefixtures("unexpanded")
def test_dense_operands_of_any_layout() -> None:
    equation = "ij,jr->ir"
    x, b = operands_of(equation, ((2, 4), "dense"))
    k = stc.compile(equation, x, b)
    for other in (b.T.contiguous().T, b[:, :1].expand(6, 4), b[:1].expand(6, 4), b[:1], b[0, 0].expand(6, 4)):
        check(stc.einsum(equation, x, other), equation, [x, other.expand(6, 4)])
        check(k(other), equation, [x, other.expand(6, 4)])
        check(stc.compile(equation, x, other.expand(6, 4))(b), equation, [x, b])


@pytest.mark.parametrize("plan", ["coo", "fiber", "rows", "hls"])
def test_named_plans(plan: str) -> None:
    equation = "ij,jr->ir"
    operands = operands_of(equation, ((2, 3), "dense"))
    check(stc.einsum(equation, *operands, plan=plan), equation, operands)


@pytest.mark.parametrize("plan", ["scalar", "dense", "bcb"])
def test_plans_of_two_operands_take_nonzeros(plan: str) -> None:
    equation, specs = CASES["two ij,jk->ki"]
    operands = operands_of(equation, specs)
    found = stc.einsum(equation, *operands, plan=plan)
    check(found, equation, operands)
    assert found.blocksize == ()  # type: ignore[union-attr]


def test_operations_by_name() -> None:
    x = in_blocks((5, 6, 7), (2, 3, 2), 9)
    whole, factors = x.to_dense(), [numbers((n, 4), torch.float64, n) for n in x.shape]
    torch.testing.assert_close(stc.mttkrp(x, factors, 1), torch.einsum("ijk,ir,kr->jr", whole, factors[0], factors[2]))
    torch.testing.assert_close(dense(stc.ttv(x, factors[2][:, 0], 2)), whole @ factors[2][:, 0])
    a = in_blocks((5, 7), (2, 2), 9)
    torch.testing.assert_close(stc.spmm(a, factors[2]), a.to_dense() @ factors[2])
    y = in_blocks((7, 4), (2, 2), 9)
    z = stc.contract(a, y, 1)
    assert z.blocksize == (2, 2)  # type: ignore[union-attr]
    again = stc.contract(a, y, 1, out=z, alpha=2, beta=1)
    assert again.blocksize == (2, 2)  # type: ignore[union-attr]
    torch.testing.assert_close(dense(again), 3 * dense(z))


def test_blocks_of_zeros_are_dropped() -> None:
    x = in_blocks((6, 6), (2, 3), 9)
    values = x.values.clone()
    values[1] = 0
    found = stc.einsum("ij->ji", x.with_values(values), drop_zeros=True)
    assert isinstance(found, stc.SparseTensor)
    assert (found.nnz, found.blocksize) == (x.nnz - 1, (3, 2))
    torch.testing.assert_close(found.to_dense(), x.with_values(values).to_dense().T)


# -- kernels, gradients, transforms, graphs ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one ij,jr->ir", "one ij->ij", "two ij,jk->ik", "mixed ij,kaj,ar->rik"])
@pytest.mark.usefixtures("unexpanded")
def test_kernels(name: str) -> None:
    equation, specs = CASES[name]
    operands = operands_of(equation, specs)
    tables = [o for o in operands if isinstance(o, torch.Tensor)]
    kernel = stc.compile(equation, *operands)
    assert f'"{equation}"' in str(kernel.explain())
    assert equation in repr(kernel)
    assert "def part_0" in kernel.source
    again = stc.compile(equation, *operands, plan=kernel.plan)
    assert again.source == kernel.source
    for made in (kernel, again, copy.copy(kernel), copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        check(made(*tables), equation, operands)
    others = [2 * o.values for o in kernel.operands]
    changed = [o.with_values(2 * o.values) if isinstance(o, stc.SparseTensor) else o for o in operands]
    check(kernel.with_values(*others)(*tables), equation, changed)
    check(kernel(*tables, values=others), equation, changed)
    with pytest.raises(stc.ShapeError, match="must have shape"):
        kernel(*tables, values=[torch.zeros(3, dtype=torch.float64)] * len(others))
    assert "f64" in kernel.ptx("sm_90")


def leaves_of(operands: list[Any]) -> list[torch.Tensor]:
    values = [o.values if isinstance(o, stc.SparseTensor) else o for o in operands]
    return [v.clone().requires_grad_() for v in values]


def with_leaves(operands: list[Any], leaves: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> list[Any]:
    pairs = zip(operands, leaves, strict=True)
    return [o.with_values(v) if isinstance(o, stc.SparseTensor) else v for o, v in pairs]


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, coalesce: bool) -> None:
    equation, specs = CASES[name]
    operands = operands_of(equation, specs, coalesce=coalesce)
    leaves = leaves_of(operands)
    own = with_leaves(operands, leaves)
    result = torch.einsum(equation, *map(dense, own))
    weights = numbers(tuple(result.shape), torch.float64, 9)
    wanted = torch.autograd.grad((result * weights).sum(), leaves)
    found = dense(stc.einsum(equation, *own))
    torch.testing.assert_close(found, result)
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), leaves), wanted)


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize("name", ["one ij,jr->ir", "one ij->ji", "two ij,jk->ki"])
def test_gradients_of_gradients(name: str) -> None:
    equation, specs = CASES[name]
    operands = operands_of(equation, specs, 3)

    def run(*leaves: torch.Tensor) -> torch.Tensor:
        return dense(stc.einsum(equation, *with_leaves(operands, leaves))).square()

    assert torch.autograd.gradgradcheck(run, tuple(leaves_of(operands)), check_fwd_over_rev=False)


def functions() -> dict[str, Callable[..., Any]]:
    f = torch.func
    return {
        "grad": lambda g: f.grad(lambda *t: g(*t).square().sum(), argnums=(0, 1)),
        "jvp": lambda g: lambda v, b: f.jvp(g, (v, b), (v.cos(), b.sin())),
        "vmap of dense": lambda g: lambda v, b: f.vmap(g, (None, 0))(v, torch.stack([b, 2 * b])),
        "vmap of both": lambda g: lambda v, b: f.vmap(g, (0, 1))(torch.stack([v, 2 * v]), torch.stack([b, -b], 1)),
        "jacrev": lambda g: f.jacrev(g, (0, 1)),
    }


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize("transform", functions())
def test_transforms(transform: str) -> None:
    x, b = operands_of("ij,jr->ir", ((2, 4), "dense"))

    def own(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return dense(stc.einsum("ij,jr->ir", x.with_values(values), b))

    def reference(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x.with_values(values).to_dense() @ b

    made = functions()[transform]
    torch.testing.assert_close(made(own)(x.values, b), made(reference)(x.values, b))


@pytest.mark.usefixtures("unexpanded")
@pytest.mark.parametrize("name", ["one ij,jr->ir", "one ij,jr->irj", "one ij->ij", "two ij,jk->ik", "mixed ij,jk->ik"])
def test_graphs(name: str) -> None:
    equation, specs = CASES[name]
    operands = operands_of(equation, specs)
    kernel = stc.compile(equation, *operands)

    def called(*leaves: torch.Tensor) -> torch.Tensor:
        found = stc.einsum(equation, *with_leaves(operands, leaves))
        return (found.values if isinstance(found, stc.SparseTensor) else found).sin()

    def of_kernel(*leaves: torch.Tensor) -> torch.Tensor:
        values = [v for v, o in zip(leaves, operands, strict=True) if isinstance(o, stc.SparseTensor)]
        tables = [v for v, o in zip(leaves, operands, strict=True) if isinstance(o, torch.Tensor)]
        found = kernel(*tables, values=values)
        return (found.values if isinstance(found, stc.SparseTensor) else found).cos()

    for function in (called, of_kernel):
        leaves = leaves_of(operands)
        graph = torch.compile(function, backend="aot_eager", fullgraph=True)
        found, wanted = graph(*leaves), function(*leaves)
        torch.testing.assert_close(found, wanted)
        got = torch.autograd.grad(found.square().sum(), leaves)
        torch.testing.assert_close(got, torch.autograd.grad(wanted.square().sum(), leaves))


def test_values_changed_in_place_are_read_again() -> None:
    equation = "ij,jr->ir"
    x, b = operands_of(equation, ((2, 3), "dense"))
    kernel = stc.compile(equation, x, b)
    for _ in range(2):
        x.values.mul_(2)
        check(kernel(b), equation, [x, b])
        check(stc.einsum(equation, x, b), equation, [x, b])


# -- messages ---------------------------------------------------------------------------------------------------------


def test_messages_quote_the_equation_as_written() -> None:
    x, b = operands_of("ij,jr->ir", ((2, 3), "dense"))
    with pytest.raises(stc.ShapeError, match=r"operand 2 has size 7 at index 'j'; expected 6"):
        stc.einsum("ij,jr->ir", x, torch.zeros(7, 4, dtype=torch.float64))
    with pytest.raises(stc.ShapeError, match=r'operand 2 of "ij,jr->ir": the kernel was compiled for shape \(6, 4\)'):
        stc.compile("ij,jr->ir", x, b)(torch.zeros(7, 4, dtype=torch.float64))
    with pytest.raises(stc.DtypeError, match=r"operand 2 has dtype torch\.float32, the sparse operand has"):
        stc.einsum("ij,jr->ir", x, b.float())
    with pytest.raises(stc.OutOfMemoryError, match=r"the result of ij,jr->ir  i=5 j=6 r=4 would take"):
        stc.einsum("ij,jr->ir", x, b, memory_limit=10)
    with pytest.raises(stc.OutOfMemoryError, match=r"the result of ij->ji would take"):
        stc.einsum("ij->ji", x, memory_limit=10)
    y = in_blocks((6, 8), (3, 2), 9)
    with pytest.raises(stc.OutOfMemoryError, match=r'pairs of blocks that meet in "ij,jk->ik"'):
        stc.einsum("ij,jk->ik", x, y, memory_limit=10)
    with pytest.raises(stc.PlanError, match="keeps no mode of the sparse operand"):
        stc.einsum("ij->", x, output="sparse")


def test_sides_without_a_common_divisor() -> None:
    for equation, specs in (("ii->i", ((2, 3),)), ("ij,jk->ik", ((2, 3), (2, 3))), ("ij,ij->ij", ((2, 3), (3, 2)))):
        operands = operands_of(equation, specs)
        check(stc.einsum(equation, *operands), equation, operands)


def test_letters_run_out() -> None:
    sizes = dict.fromkeys("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX", 1) | {"a": 4, "b": 4}
    letters = "".join(sizes)
    x = in_blocks((4, 4), (2, 2), 3)
    other = torch.ones([sizes[c] for c in letters[1:]], dtype=torch.float64)
    with pytest.raises(stc.EquationError, match="52 letters there are; take expand_dense"):
        stc.einsum(f"ab,{letters[1:]}->a", x, other)
    found = stc.einsum(f"ab,{letters[1:]}->a", x.expand_dense(), other)
    torch.testing.assert_close(found, x.to_dense().sum(1))


def test_three_sparse_operands() -> None:
    specs: tuple[Spec, ...] = ((2, 3), (3, 2), "sparse")
    operands = operands_of("ij,jk,kl->il", specs)
    check(stc.einsum("ij,jk,kl->il", *operands), "ij,jk,kl->il", operands)
    assert expected("ij,jk,kl->il", operands).shape == (SIZES["i"], SIZES["l"])
