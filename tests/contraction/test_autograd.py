"""Gradients of the values and of every dense operand, by finite differences; of gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Problem, random_sparse, random_values
from torch.autograd import gradcheck, gradgradcheck

import sparsetc as stc

SIZES = {"i": 3, "j": 4, "k": 3, "l": 2, "r": 2, "s": 3}
EINSUMS = {
    "mttkrp": "ijk,jr,kr->ir",
    "mttkrp-middle": "ijk,ir,kr->jr",
    "mttkrp-4": "ijkl,jr,kr,lr->ir",
    "ttmc": "ijk,jr,ks->irs",
    "ttmc-permuted": "ijk,jr,ks->sri",
    "spmm": "ij,jr->ir",
    "spmv": "ij,j->i",
    "spmm-transposed": "ij,ir->rj",
    "reduction": "ijk->",
    "weighted": "ij,ir,jr->",
    "row-sum": "ijk->j",
    "sddmm": "ij,ir,jr->ij",
    "sampled": "ijk,ir,jr,kr->ijk",
    "sampled-permuted": "ijk,ir,jr->kij",
    "identity": "ij->ij",
    "projected": "ijk,i->jk",
    "projected-sum": "ijk->ik",
    "semi-sparse": "ijk,kr->ijr",
    "semi-sparse-permuted": "ijk,ir->rkj",
    "scalar": "ij,->ij",
    "scalar-dense": "ij,,jr->ir",
    "diagonal": "iij,jr->ir",
    "diagonal-sampled": "iij,jr->ij",
    "whole-diagonal": "ii->",
    "dense-diagonal": "ij,jj->i",
    "outer": "ij,r->ir",
    "summed-in-the-operand": "ij,jr->i",
    "dense-first": "jr,rs,ijk->iks",
    "vector": "i,ir->r",
}


def function(equation: str, sparse: int = 0, **settings: Any) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """The einsum as a function of the sparse operand's values, then the dense operands; and arguments for it."""
    dtype, pattern = settings.pop("dtype", torch.float64), settings.pop("pattern", "random")
    problem = Problem(equation, SIZES, pattern, dtype, seed=3, coalesce=settings.pop("coalesce", True), sparse=sparse)
    operands = problem.operands()
    x = operands[sparse]

    def run(values: torch.Tensor, *dense: torch.Tensor) -> torch.Tensor:
        given = iter(dense)
        own = [x.with_values(values) if n == sparse else next(given) for n in range(len(operands))]
        result = stc.einsum(equation, *own, **settings)
        return result.values if isinstance(result, stc.SparseTensor) else result

    values = random_values((x.nnz,), dtype, 7)
    arguments = [values, *(o for n, o in enumerate(operands) if n != sparse)]
    return run, [a.requires_grad_() for a in arguments]


def sparse_position(equation: str) -> int:
    return 2 if equation.startswith("jr,rs,") else 0


@pytest.mark.parametrize("name", EINSUMS)
def test_gradients(name: str) -> None:
    run, arguments = function(EINSUMS[name], sparse_position(EINSUMS[name]))
    assert gradcheck(run, arguments, check_undefined_grad=False)


@pytest.mark.parametrize("plan", ["coo", "fiber", "rows"])
@pytest.mark.parametrize("name", ["mttkrp", "ttmc", "projected"])
def test_gradients_do_not_depend_on_the_plan(name: str, plan: str) -> None:
    run, arguments = function(EINSUMS[name], plan=plan)
    assert gradcheck(run, arguments, check_undefined_grad=False)


@pytest.mark.parametrize("output", ["dense", "sparse"])
@pytest.mark.parametrize("equation", ["ij,ir,jr->ij", "ijk,kr->ijr", "ijk,jr,kr->ir", "ijk,i->jk"])
def test_gradients_of_either_form_of_output(equation: str, output: str) -> None:
    run, arguments = function(equation, output=output)
    assert gradcheck(run, arguments, check_undefined_grad=False)


@pytest.mark.parametrize("name", ["mttkrp", "ttmc", "sampled", "projected", "semi-sparse", "diagonal", "weighted"])
def test_gradients_of_complex_numbers(name: str) -> None:
    run, arguments = function(EINSUMS[name], dtype=torch.complex128)
    assert gradcheck(run, arguments, check_undefined_grad=False)


@pytest.mark.parametrize("name", ["mttkrp", "sampled", "projected", "diagonal", "semi-sparse", "sampled-permuted"])
def test_gradients_of_an_uncoalesced_operand(name: str) -> None:
    run, arguments = function(EINSUMS[name], coalesce=False)
    assert gradcheck(run, arguments, check_undefined_grad=False)


@pytest.mark.parametrize("pattern", ["empty", "one", "dense", "row"])
@pytest.mark.parametrize("name", ["mttkrp", "sampled", "projected", "diagonal"])
def test_gradients_by_pattern(name: str, pattern: str) -> None:
    run, arguments = function(EINSUMS[name], pattern=pattern)
    result = run(*arguments)
    if result.numel():
        assert gradcheck(run, arguments, check_undefined_grad=False)
    else:
        found = torch.autograd.grad(result.sum(), arguments, allow_unused=True)
        assert all(g is None or not g.any() for g in found)


@pytest.mark.parametrize("name", ["mttkrp", "spmm", "sampled", "projected", "semi-sparse", "diagonal", "weighted"])
def test_gradients_of_gradients(name: str) -> None:
    run, arguments = function(EINSUMS[name])
    assert gradgradcheck(run, arguments, check_undefined_grad=False)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ijk,jr,kr->ir", [(4, 1), (1, 2)]),
        ("ijk,jr,kr->ir", [(1, 2), (3, 1)]),
        ("ij,ir,jr->ij", [(1, 1), (4, 2)]),
        ("ijk,kr->ijr", [(1, 2)]),
        ("ij,...j->...i", [(2, 1, 4)]),
    ],
)
def test_gradients_of_operands_that_broadcast(equation: str, shapes: list[tuple[int, ...]]) -> None:
    term = equation.split(",")[0]
    x = random_sparse(tuple(SIZES[c] for c in term), "random", torch.float64)
    dense = [random_values(s, torch.float64, n + 1).requires_grad_() for n, s in enumerate(shapes)]

    def run(*given: torch.Tensor) -> torch.Tensor:
        result = stc.einsum(equation, x, *given)
        return result.values if isinstance(result, stc.SparseTensor) else result

    assert gradcheck(run, dense, check_undefined_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_have_the_dtype_of_their_operand(dtype: torch.dtype) -> None:
    operands = Problem("ijk,jr,kr->ir", SIZES, "random", dtype).operands()
    values = operands[0].values.requires_grad_()
    dense = [d.requires_grad_() for d in operands[1:]]
    stc.einsum("ijk,jr,kr->ir", operands[0], *dense).sum().backward()
    for tensor in (values, *dense):
        assert tensor.grad is not None
        assert tensor.grad.dtype == dtype
        assert tensor.grad.shape == tensor.shape
        assert bool(tensor.grad.isfinite().all())


def test_gradients_agree_with_dense_einsum() -> None:
    x, b, c = Problem("ijk,jr,kr->ir", SIZES, "random", torch.float64).operands()
    dense = x.to_dense().requires_grad_()
    others = [b.clone().requires_grad_(), c.clone().requires_grad_()]
    upstream = random_values((3, 2), torch.float64, 5)
    expected = torch.autograd.grad(torch.einsum("ijk,jr,kr->ir", dense, *others), [dense, *others], upstream)
    values = x.values.clone().requires_grad_()
    result = stc.einsum("ijk,jr,kr->ir", x.with_values(values), *others)
    found = torch.autograd.grad(result, [values, *others], upstream)
    torch.testing.assert_close(found[0], expected[0][tuple(x.coords)])
    for own, wanted in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(own, wanted)


# --- what carries a graph ---------------------------------------------------------------------------------------------


def small(requires_grad: bool = True) -> tuple[stc.SparseTensor, torch.Tensor]:
    x = random_sparse((3, 4), "random", torch.float64)
    values = x.values.clone().requires_grad_(requires_grad)
    return stc.SparseTensor(x.coords, values, x.shape), random_values((4, 2), torch.float64, 1)


def test_no_graph_where_nothing_requires_one() -> None:
    x, b = small(requires_grad=False)
    assert stc.einsum("ij,jr->ir", x, b).grad_fn is None
    assert not stc.einsum("ij,jr->ijr", x, b).values.requires_grad


def test_no_graph_under_no_grad() -> None:
    x, b = small()
    with torch.no_grad():
        assert stc.einsum("ij,jr->ir", x, b.requires_grad_()).grad_fn is None


def test_a_sparse_tensor_made_from_values_that_require_grad_carries_it() -> None:
    x, b = small()
    assert x.values.requires_grad
    stc.einsum("ij,jr->ir", x, b).sum().backward()
    assert x.values.grad is not None
    torch.testing.assert_close(x.values.grad, b.sum(1)[x.coords[1]])


def test_values_and_to_dense_of_a_sparse_result_are_differentiable() -> None:
    for reduce in (lambda y: y.values, lambda y: y.to_dense(), lambda y: y.to_torch().to_dense()):
        x, b = small()
        a = random_values((3, 2), torch.float64, 2).requires_grad_()
        y = stc.einsum("ij,ir,jr->ij", x, a, b)
        assert isinstance(y, stc.SparseTensor)
        (grad,) = torch.autograd.grad(reduce(y).sum(), a)
        expected = torch.zeros_like(a).index_add_(0, x.coords[0], (x.values.unsqueeze(1) * b[x.coords[1]]).detach())
        torch.testing.assert_close(grad, expected)


def test_a_chain_of_einsums_is_differentiable() -> None:
    x, b = small()
    first = stc.einsum("ij,ir,jr->ij", x, random_values((3, 2), torch.float64, 2), b)
    stc.einsum("ij,jr->ir", first, b).sum().backward()
    assert x.values.grad is not None
    assert bool(x.values.grad.abs().sum() > 0)


def test_only_what_requires_a_gradient_gets_one() -> None:
    x, b = small(requires_grad=False)
    stc.einsum("ij,jr->ir", x, b.requires_grad_()).sum().backward()
    assert b.grad is not None
    assert x.values.grad is None


def test_gradients_flow_through_a_kernel_with_other_values() -> None:
    x, b = small(requires_grad=False)
    kernel = stc.compile("ij,jr->ir", x, b)
    values = random_values((x.nnz,), torch.float64, 9).requires_grad_()
    kernel.with_values(values)(b).sum().backward()
    torch.testing.assert_close(values.grad, b.sum(1)[x.coords[1]])


def test_a_training_step_lowers_the_loss() -> None:
    x, b = small()
    target = random_values((3, 2), torch.float64, 4)
    values = x.values.detach().clone().requires_grad_()
    optimiser = torch.optim.SGD([values], lr=0.05)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = (stc.einsum("ij,jr->ir", x.with_values(values), b) - target).square().sum()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_training_step_through_one_kernel_sees_values_changed_in_place() -> None:
    x, b = small()
    kernel = stc.compile("ij,jr->ir", x, b)
    before = kernel(b).detach()
    with torch.no_grad():
        x.values.mul_(2)
    torch.testing.assert_close(kernel(b).detach(), 2 * before)


RAGGED = stc.SparseTensor.from_blocks([[0]], torch.tensor([[[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]]).double(), (2, 2))
VIEWS = {
    "rows in another order": ("ij,jr->ri", stc.SparseTensor([[0, 1, 1], [2, 0, 1]], torch.rand(3).double(), (2, 3))),
    "blocks past the end": ("ij,jr->ir", RAGGED),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_result_that_lies_otherwise_is_changed_in_place_and_has_a_tangent(name: str) -> None:
    equation, x = VIEWS[name]
    values, b = x.values.clone().requires_grad_(), torch.rand(x.shape[1], 2, dtype=torch.float64, requires_grad=True)
    found = stc.einsum(equation, x.with_values(values), b)
    found.mul_(2)
    expected = torch.einsum(equation, x.to_dense(), b) * 2
    torch.testing.assert_close(found, expected)
    upstream = torch.rand_like(found)
    gradients = (torch.autograd.grad(result, b, upstream)[0] for result in (found, expected))
    torch.testing.assert_close(*gradients)
    run = lambda v, d: stc.einsum(equation, x.with_values(v), d)  # noqa: E731
    assert gradcheck(run, (values, b), fast_mode=True, check_forward_ad=True)


def test_a_last_step_of_dense_operands_is_changed_in_place() -> None:
    x, b, c = stc.SparseTensor([[0, 2]], torch.rand(2).double(), (3,)), torch.rand(3).double(), torch.rand(4).double()
    operands = [t.requires_grad_() for t in (b, c)]
    found = stc.einsum("i,r,i->r", x, c, b, plan="steps")
    found.mul_(2)
    expected = torch.einsum("i,r,i->r", x.to_dense(), c, b) * 2
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(result.sum(), operands) for result in (found, expected))
    torch.testing.assert_close(*gradients)
