"""Graphs that torch traces follow what they are called with: patterns, values, options, dtypes, forms of operands."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from cases import random_sparse, random_values
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import sparsetc as stc
from sparsetc.contraction import library
from sparsetc.contraction.step import Step
from sparsetc.options import latest

MTTKRP = "ijk,jr,kr->ir"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(f: Callable[..., Any], backend: str = "eager", **settings: Any) -> Callable[..., Any]:
    """The function as one graph."""
    return torch.compile(f, fullgraph=True, backend=backend, **settings)


def operands(seed: int = 0) -> tuple[stc.SparseTensor, torch.Tensor, torch.Tensor]:
    x = random_sparse((6, 7, 5), "random", torch.float64, seed)
    return x, random_values((7, 4), torch.float64, 1), random_values((5, 4), torch.float64, 2)


@pytest.mark.parametrize("dynamic", [None, True])
def test_each_pattern_has_its_kernel(dynamic: bool | None) -> None:
    _, b, c = operands()
    f = whole(lambda x, b, c: stc.einsum(MTTKRP, x, b, c), dynamic=dynamic)
    tensors = [operands(seed)[0] for seed in range(3)]
    for x in (*tensors, *tensors):
        torch.testing.assert_close(f(x, b, c), torch.einsum(MTTKRP, x.to_dense(), b, c))


def test_values_are_read_at_each_call() -> None:
    x, b, c = operands()
    values = x.values.clone()
    learned = x.with_values(values)
    f = whole(lambda b, c: stc.einsum(MTTKRP, learned, b, c))
    for factor in (1, 3, -2):
        values.data.mul_(factor)
        torch.testing.assert_close(f(b, c), torch.einsum(MTTKRP, learned.to_dense(), b, c))


def test_options_are_followed() -> None:
    x, b, c = operands()
    f = whole(lambda b, c: stc.einsum(MTTKRP, x, b, c))
    expected = f(b, c)
    with stc.options(plan="rows"):
        torch.testing.assert_close(f(b, c), expected)
    with stc.options(memory_limit=10), pytest.raises(Exception, match="the limit on cpu is 10"):
        f(b, c)
    torch.testing.assert_close(f(b, c), expected)


def test_options_set_inside() -> None:
    x, b, c = operands()
    expected = torch.einsum(MTTKRP, x.to_dense(), b, c)

    def f(b: torch.Tensor, c: torch.Tensor) -> Any:
        with stc.options(plan="coo", device="meta"), stc.options(deterministic=True, plan=None):
            return stc.einsum(MTTKRP, x, b, c)

    torch.testing.assert_close(whole(f)(b, c), expected)
    assert latest.traced == ()

    def g(b: torch.Tensor, c: torch.Tensor) -> Any:
        with stc.options(memory_limit=10):
            stc.einsum(MTTKRP, x, b, c, memory_limit="1GB")
            return stc.einsum(MTTKRP, x, b, c)

    with pytest.raises(Exception, match="the limit on cpu is 10"):
        whole(g)(b, c)

    @stc.options(plan="coo")
    def decorated(b: torch.Tensor, c: torch.Tensor) -> Any:
        return stc.einsum(MTTKRP, x, b, c)

    torch.testing.assert_close(whole(decorated)(b, c), decorated(b, c))
    torch.testing.assert_close(whole(lambda b, c: stc.einsum(MTTKRP, x, b, c))(b, c), expected)


@pytest.mark.parametrize("wanted", ["hls", "coo", stc.plans.plan_hls(3)])
def test_a_plan_given_inside(wanted: Any) -> None:
    x, b, c = operands()
    plan = stc.compile(MTTKRP, x, b, c, plan=wanted).plan
    for given in (plan, stc.plans.Plan("rows"), stc.plans.plan_hls(3)):
        found = whole(lambda b, c, given=given: stc.einsum(MTTKRP, x, b, c, plan=given))(b, c)
        torch.testing.assert_close(found, torch.einsum(MTTKRP, x.to_dense(), b, c))
        assert library._setting(library._constant(given)) == given
    for threshold in (3, 5, 8):  # a number that changes is a symbol of the graph
        found = whole(lambda b, c, n=threshold: stc.einsum(MTTKRP, x, b, c, plan=stc.plans.plan_hls(n)))(b, c)
        torch.testing.assert_close(found, torch.einsum(MTTKRP, x.to_dense(), b, c))
    y = random_sparse((5, 4), "random", torch.float64)
    pair = stc.compile("ijk,kl->ijl", x, y)
    found = whole(lambda v: stc.einsum("ijk,kl->ijl", x.with_values(v), y, plan=pair.plan).values)(x.values)
    torch.testing.assert_close(found, pair().values)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_transforms_inside(transform: Any) -> None:
    x, b, c = operands()
    kernel = stc.compile(MTTKRP, x, b, c)
    for call in (lambda b: stc.einsum(MTTKRP, x, b, c), lambda b: kernel(b, c)):

        def f(b: torch.Tensor, call: Any = call) -> Any:
            return transform(lambda b: call(b.sin()).pow(2).sum())(b).cos()

        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            whole(f)(b)
        torch.testing.assert_close(torch.compile(f, backend="eager")(b), f(b))


def test_a_permuted_operand() -> None:
    x, b, c = operands()

    def f(values: torch.Tensor) -> Any:
        return stc.einsum("jik,jr,kr->ir", x.with_values(values).permute(1, 0, 2), b, c)

    expected = f(x.values)
    torch.testing.assert_close(whole(f)(x.values), expected)


def test_semi_sparse_operands() -> None:
    x = stc.SparseTensor(torch.tensor([[0, 3, 3], [1, 0, 4]]), random_values((3, 3), torch.float64, 1), (5, 5, 3))
    b = random_values((3, 2), torch.float64, 2)
    expected = stc.einsum("ijk,kr->ijr", x, b)
    found = whole(lambda b: stc.einsum("ijk,kr->ijr", x, b))(b)
    assert torch.equal(found.coords, expected.coords)
    torch.testing.assert_close(found.values, expected.values)


def test_results_in_dense_form_and_chains() -> None:
    x, b, c = operands()
    f = whole(lambda c: stc.einsum("ijk,kr->ijr", x, c).to_dense(), "aot_eager")
    torch.testing.assert_close(f(c), torch.einsum("ijk,kr->ijr", x.to_dense(), c))
    g = whole(lambda b, c: stc.einsum("ikr,kr->ir", stc.einsum("ijk,jr->ikr", x, b), c).to_dense())
    torch.testing.assert_close(g(b, c), torch.einsum(MTTKRP, x.to_dense(), b, c))


def test_floats_of_autocast() -> None:
    x, b, c = operands()
    single, given = x.to(torch.float32), (b.float(), c.bfloat16())
    kernel = stc.compile(MTTKRP, single, b.float(), c.float())
    for f in (lambda b, c: stc.einsum(MTTKRP, single, b, c), lambda b, c: kernel(b, c)):
        compiled = whole(f)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(compiled(*given), f(*given))


def test_parameters_and_new_values() -> None:
    x, b, c = operands()
    kernel = stc.compile(MTTKRP, x, b, c)

    class Learned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = torch.nn.Parameter(2 * x.values)

        def forward(self, b: torch.Tensor, c: torch.Tensor) -> Any:
            return stc.einsum(MTTKRP, x.with_values(self.values), b, c)

    expected = 2 * torch.einsum(MTTKRP, x.to_dense(), b, c)
    torch.testing.assert_close(whole(Learned())(b, c), expected)
    torch.testing.assert_close(whole(lambda v: kernel.with_values(v)(b, c))(2 * x.values), expected)
    torch.testing.assert_close(kernel(b, c, values=2 * x.values), expected)


def test_second_derivatives() -> None:
    x, b, c = operands()
    b.requires_grad_()

    def twice(f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        (first,) = torch.autograd.grad(f(b).pow(3).sum(), b, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), b)
        return second

    dense = x.to_dense()
    found = twice(whole(lambda b: stc.einsum(MTTKRP, x, b, c)))
    torch.testing.assert_close(found, twice(lambda b: torch.einsum(MTTKRP, dense, b, c)))


def test_a_tangent_is_never_lost() -> None:
    x, b, c = operands()
    expected = torch.einsum(MTTKRP, x.to_dense(), b, c)

    def f(b: torch.Tensor) -> Any:
        return stc.einsum(MTTKRP, x, b, c)

    found = torch.compile(lambda b: torch.func.jvp(f, (b,), (b,))[1], backend="eager")(b)
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()
    unsupported = torch._dynamo.exc.Unsupported  # torch 2.14 and newer refuse inputs that have tangents
    with forward_ad.dual_level():
        with contextlib.suppress(unsupported):
            tangent = forward_ad.unpack_dual(whole(f)(forward_ad.make_dual(b, b))).tangent
            torch.testing.assert_close(tangent, expected)
        torch._dynamo.reset()
        with pytest.raises((stc.TransformError, unsupported), match=r"forward.mode"):
            whole(f, "aot_eager")(forward_ad.make_dual(b, b))


# --- modes that trace -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["real", "symbolic", "fake"])
def test_graphs_of_make_fx(mode: str) -> None:
    x, b, c = operands()
    y = random_sparse((5, 4), "random", torch.float64)
    kernel, pair = stc.compile(MTTKRP, x, b, c), stc.compile("ijk,kl->ijl", x, y)
    calls: dict[str, Callable[..., Any]] = {
        "einsum": lambda v, b, c: stc.einsum(MTTKRP, x.with_values(v), b, c),
        "kernel": lambda v, b, c: kernel(b, c, values=v),
        "new kernel": lambda v, b, c: kernel.with_values(v)(b, c),
        "sparse": lambda v, b, c: stc.einsum("ijk,kr->ijr", x.with_values(v), c).to_dense(),
        "several": lambda v, b, c: pair(values=[v, v[: y.nnz]]).values,
        "gradient": lambda v, b, c: torch.autograd.grad(kernel(b.requires_grad_(), c, values=v).pow(2).sum(), b)[0],
        "batch": lambda v, b, c: torch.func.vmap(lambda r: kernel(b * r, c, values=v))(b[:, 0]),
    }
    for name, call in calls.items():
        graph = make_fx(call, tracing_mode=mode, _allow_non_fake_inputs=True)(x.values.clone(), b.clone(), c)
        assert "sparsetc" in graph.code, name
        given = 2 * x.values, b.cos(), c.sin()
        torch.testing.assert_close(graph(*given), call(*given))
    with pytest.raises(stc.TransformError, match="take torch"):
        make_fx(torch.func.grad(lambda b: kernel(b, c).sum()))(b)


def test_fake_tensors() -> None:
    x, b, c = operands()
    kernel = stc.compile(MTTKRP, x, b, c)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = [mode.from_tensor(t) for t in (b, c)]
        for found in (kernel(*given), stc.einsum(MTTKRP, x, *given)):
            assert isinstance(found, FakeTensor)
            assert found.shape == (6, 4)
        assert stc.einsum("ijk,kr->ijr", x, given[1]).shape == (6, 7, 4)
    torch.testing.assert_close(kernel(b, c), torch.einsum(MTTKRP, x.to_dense(), b, c))


# --- transforms within transforms, and of nothing ---------------------------------------------------------------------


def test_batches_of_values_within_batches_of_factors() -> None:
    x, b, c = operands()
    values, factors = random_values((3, x.nnz), torch.float64, 3), random_values((2, 7, 4), torch.float64, 4)

    def f(b: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda v: stc.einsum(MTTKRP, x.with_values(v), b, c))(values)

    expected = torch.stack([torch.stack([stc.einsum(MTTKRP, x.with_values(v), b, c) for v in values]) for b in factors])
    torch.testing.assert_close(torch.func.vmap(f)(factors), expected)
    none = torch.func.vmap(lambda v: stc.einsum(MTTKRP, x.with_values(v), b, c))(values[:0])
    assert none.shape == (0, 6, 4)


def test_products_of_dense_operands_alone_are_transformed_too() -> None:
    x, w = random_sparse((3, 2), "random", torch.float64), random_sparse((2,), "dense", torch.float64)
    d, s = random_values((2,), torch.float64, 1), torch.tensor(2.0, dtype=torch.float64)
    found = torch.func.jacrev(lambda s: stc.einsum("ij,r,j,->r", x, w, d, s, output="dense"))(s)
    torch.testing.assert_close(found, torch.einsum("ij,r,j->r", x.to_dense(), w.to_dense(), d))


def test_a_kernel_in_a_graph_packs_its_values_once() -> None:
    """As outside of a graph; again once torch counts a change of them."""
    x, b, c = operands()
    kernel = stc.compile(MTTKRP, x, b, c, plan="fiber")  # which stores values in another order
    other = kernel.with_values(torch.ones_like(x.values))
    with mock.patch.object(Step, "packed_values", autospec=True, side_effect=Step.packed_values) as packing:
        graph = whole(lambda *dense: kernel(*dense), "aot_eager")
        first = [graph(b, c) for _ in range(3)][-1]
        assert packing.call_count == 0
        x.values.mul_(2)
        torch.testing.assert_close(graph(b, c), 2 * first)
        assert packing.call_count == 1
    torch.testing.assert_close(whole(lambda *dense: other(*dense), "aot_eager")(b, c), other(b, c))


def test_a_graph_keeps_its_contraction_until_gradients_are_asked_for() -> None:
    coords, b = torch.arange(3).repeat(2, 1), torch.randn(3, 2)
    values = torch.ones(3, requires_grad=True)

    def made_inside(q: torch.Tensor) -> torch.Tensor:
        return stc.einsum("ij,jr->ir", stc.SparseTensor(coords, values, (3, 3)), q)

    result = torch.compile(made_inside, backend="eager")(b)
    gc.collect()
    (gradient,) = torch.autograd.grad(result.sum(), values)
    torch.testing.assert_close(gradient, b.sum(1))
