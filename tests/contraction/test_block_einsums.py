"""Einsums of tensors in blocks, which expand nothing: results, gradients, transforms, graphs, messages."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_cases import CASES, check, dense, in_blocks, numbers, operands_of

import sparsetc as stc

# -- einsums ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("blocks_kept")
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


@pytest.mark.usefixtures("blocks_kept")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.int64]
)
@pytest.mark.parametrize(
    "name", ["one ij,jr->ir", "one ij->i", "one ij->ji", "two ij,jk->ik", "mixed ij,jk->ik", "many ij,jk,kl->il"]
)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    equation, specs = CASES[name]
    operands = operands_of(equation, specs, dtype=dtype, coalesce=False)
    found = stc.einsum(equation, *operands)
    summed = not (dtype.is_floating_point or dtype.is_complex) and name == "one ij->i"
    assert found.dtype == (torch.int64 if summed else dtype)
    check(found, equation, operands, {torch.float16: 1e-2, torch.bfloat16: 6e-2}.get(dtype, 1e-5))


@pytest.mark.usefixtures("blocks_kept")
def test_dense_operands_of_any_layout() -> None:
    equation = "ij,jr->ir"
    x, b = operands_of(equation, ((2, 4), "dense"))
    k = stc.compile(equation, x, b)
    for other in (b.T.contiguous().T, b[:, :1].expand(6, 4), b[:1].expand(6, 4), b[:1], b[0, 0].expand(6, 4)):
        check(stc.einsum(equation, x, other), equation, [x, other.expand(6, 4)])
        check(k(other), equation, [x, other.expand(6, 4)])
        check(stc.compile(equation, x, other.expand(6, 4))(b), equation, [x, b])
        with torch.no_grad():
            upstream = numbers((5, 4), torch.float64, 3)
            found = torch.ops.sparsetc.contract(k.contraction.key, [x.values, other, upstream], 1)
            each = x.to_dense().T @ upstream
            torch.testing.assert_close(found, each.sum_to_size(other.shape))


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
    again = stc.contract(a, y, 1, input=z, alpha=2, beta=1)
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


@pytest.mark.parametrize(
    "name", ["one ij,jr->ir", "one ij->ij", "two ij,jk->ik", "mixed ij,kaj,ar->rik", "many ij,jk,kl,lr->ir"]
)
@pytest.mark.usefixtures("blocks_kept")
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
    assert re.search(r"\.[fb]64\b", kernel.ptx("sm_90"))  # of entries that are copied, bits


def leaves_of(operands: list[Any]) -> list[torch.Tensor]:
    values = [o.values if isinstance(o, stc.SparseTensor) else o for o in operands]
    return [v.clone().requires_grad_() for v in values]


def with_leaves(operands: list[Any], leaves: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> list[Any]:
    pairs = zip(operands, leaves, strict=True)
    return [o.with_values(v) if isinstance(o, stc.SparseTensor) else v for o, v in pairs]


@pytest.mark.usefixtures("blocks_kept")
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


@pytest.mark.usefixtures("blocks_kept")
@pytest.mark.parametrize("name", CASES)
def test_gradients_as_graphs_have_them(name: str) -> None:
    equation, specs = CASES[name]
    operands = operands_of(equation, specs, coalesce=False)
    made = stc.compile(equation, *operands).contraction
    patterns = [o.pattern for o in operands if isinstance(o, stc.SparseTensor)]
    values = [o.values.clone().requires_grad_() for o in operands if isinstance(o, stc.SparseTensor)]
    tables = [o.requires_grad_() for o in operands if isinstance(o, torch.Tensor)]
    found = made.result(patterns, values, tables)
    upstream = numbers(tuple(found.shape), torch.float64, 9)
    wanted = torch.autograd.grad(found, [*values, *tables], upstream)
    with torch.no_grad():
        for n, own in enumerate(wanted):
            gradient = torch.ops.sparsetc.contract(made.key, [*values, *tables, upstream], n)
            torch.testing.assert_close(gradient, own)


@pytest.mark.usefixtures("blocks_kept")
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


@pytest.mark.usefixtures("blocks_kept")
@pytest.mark.parametrize("transform", functions())
def test_transforms(transform: str) -> None:
    x, b = operands_of("ij,jr->ir", ((2, 4), "dense"))

    def own(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return dense(stc.einsum("ij,jr->ir", x.with_values(values), b))

    def reference(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x.with_values(values).to_dense() @ b

    made = functions()[transform]
    torch.testing.assert_close(made(own)(x.values, b), made(reference)(x.values, b))


@pytest.mark.usefixtures("blocks_kept")
@pytest.mark.parametrize(
    "name", ["one ij,jr->ir", "one ij,jr->irj", "one ij->ij", "two ij,jk->ik", "mixed ij,jk->ik", "many ij,jk,kl->il"]
)
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


@pytest.mark.parametrize("name", ["one ij->ij", "two ij,jk->ki", "mixed ij,jk->ik", "many ij,jk,kl->il"])
def test_what_is_kept_goes_with_the_last_tensor(name: str) -> None:
    equation, specs = CASES[name]
    operands = operands_of(equation, specs)
    leaves = leaves_of(operands)
    dense(stc.einsum(equation, *with_leaves(operands, leaves))).square().sum().backward()
    kept = [weakref.ref(o.pattern) for o in operands if isinstance(o, stc.SparseTensor)]
    gc.disable()
    try:
        del operands
        assert not any(ref() for ref in kept)
    finally:
        gc.enable()


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


def test_blocks_of_one_element() -> None:
    for equation, specs in (
        ("ij,jk,kr->ir", ((1, 1), "sparse", "dense")),
        ("ij,jr->rij", ((1, 1), "dense")),
        ("ij,jr->ijr", ((1, 1), "dense")),
    ):
        operands = operands_of(equation, specs)
        check(stc.einsum(equation, *operands), equation, operands)


def test_a_plan_of_two_operands_has_all_blocks_expanded() -> None:
    equation, specs = CASES["many ij,jk,kl,lr->ir"]
    operands = operands_of(equation, specs)
    check(stc.einsum(equation, *operands, plan="scalar"), equation, operands)


# -- as the dense tensor ----------------------------------------------------------------------------------------------
def most_blocks(ragged: bool = False) -> stc.SparseTensor:
    """A matrix of which most blocks are stored, in float64."""
    weight = torch.randn(70 - 6 * ragged, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight[:10, :32] = 0
    return stc.SparseTensor.from_dense(weight, blocksize=(10, 16))


@pytest.mark.parametrize("ragged", [False, True])
def test_most_blocks_are_a_dense_matrix(ragged: bool) -> None:
    x = most_blocks(ragged)
    values = x.values.clone().requires_grad_()
    b = torch.randn(64, 50, dtype=torch.float64, requires_grad=True)
    kernel = stc.compile("ij,jr->ir", x, b, plan="auto")
    assert kernel.plan.name == "dense"
    assert "of its entries" in kernel.plan.reason
    assert "positions in blocks as coordinates" in str(kernel.explain())
    found = stc.einsum("ij,jr->ir", x.with_values(values), b)
    expected = x.to_dense() @ b
    torch.testing.assert_close(found, expected)
    g = torch.randn_like(expected)
    of_values, of_b = torch.autograd.grad(found, (values, b), g)
    torch.testing.assert_close(of_b, x.to_dense().T @ g)
    inside = x.with_values(torch.ones_like(values)).to_dense()
    torch.testing.assert_close(x.with_values(of_values).to_dense(), (g @ b.T) * inside)


SEMI_SPARSE = stc.SparseTensor(torch.tensor([[0, 1, 3], [1, 2, 0]]), torch.rand(3, 5).double(), (4, 4, 5))


@pytest.mark.parametrize(("x", "equation"), [(most_blocks(), "ij,jr->ir"), (SEMI_SPARSE, "ijh,jhr->ir")])
def test_the_plan_dense_is_the_whole_tensor(x: stc.SparseTensor, equation: str) -> None:
    b = torch.rand(*x.shape[1:], 3, dtype=torch.float64)
    kernel = stc.compile(equation, x, b, plan="dense")
    assert [part.format for part in kernel.plan.parts] == ["dense"]
    torch.testing.assert_close(kernel(b), torch.einsum(equation, x.to_dense(), b))


def test_infinities_meet_no_zeros_of_a_dense_matrix() -> None:
    x = most_blocks()
    b = torch.randn(64, 50, dtype=torch.float64)
    b[0] = torch.inf
    found = stc.einsum("ij,jr->ir", x, b)
    assert found[:10].isfinite().all()
    assert not found[10:].isfinite().any()


def test_few_blocks_stay_blocks() -> None:
    weight = torch.zeros(640, 640)
    weight[:10, :16] = 1
    kernel = stc.compile("ij,jr->ir", stc.SparseTensor.from_dense(weight, blocksize=(10, 16)), torch.zeros(640, 50))
    assert kernel.plan.name != "dense"
