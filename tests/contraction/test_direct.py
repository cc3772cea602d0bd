"""Calls like one before, which run programs alone: they look again at whatever may have changed since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import sparsetc as stc
from sparsetc.contraction import guard

PLANS = ["coo", "rows", "dense"]
EQUATIONS = {"ij,jr->ir": (7, 3), "ij,rj->ri": (3, 7), "ij,j->i": (7,), "ij,jr->ri": (7, 3)}


def matrix(dtype: torch.dtype = torch.float64) -> stc.SparseTensor:
    torch.manual_seed(0)
    return stc.SparseTensor.from_dense((torch.randn(5, 7) * (torch.rand(5, 7) < 0.5)).to(dtype))


@pytest.fixture(params=[(e, p) for e in EQUATIONS for p in PLANS], ids="-".join)
def held(request: pytest.FixtureRequest) -> tuple[stc.Kernel, stc.SparseTensor, torch.Tensor, Callable[..., Any]]:
    """A kernel that was called twice, its operands, and what it computes of others."""
    equation, plan = request.param
    x, b = matrix(), torch.randn(EQUATIONS[equation], dtype=torch.float64)
    kernel = stc.compile(equation, x, b, plan=plan, output="dense")

    def expected(b: torch.Tensor, x: stc.SparseTensor = x) -> torch.Tensor:
        return torch.einsum(equation, x.to_dense(), b)

    for _ in range(2):
        torch.testing.assert_close(kernel(b), expected(b))
    return kernel, x, b, expected


def test_other_operands_of_the_kind_are_read(held: Any) -> None:
    kernel, x, b, expected = held
    for other in (torch.randn_like(b), torch.zeros_like(b), b):
        torch.testing.assert_close(kernel(other), expected(other))
    assert kernel(b).data_ptr() != kernel(b.clone()).data_ptr()
    x._values.mul_(3)
    torch.testing.assert_close(kernel(b), expected(b))
    values = torch.randn_like(x.values)
    torch.testing.assert_close(kernel(b, values=values), expected(b, x.with_values(values)))
    torch.testing.assert_close(kernel(b), expected(b))


def test_operands_of_another_kind_are_looked_at(held: Any) -> None:
    kernel, _, b, expected = held
    wide = torch.randn((*b.shape[:-1], 2 * b.shape[-1]), dtype=b.dtype)
    turned = torch.randn(b.shape[::-1], dtype=b.dtype)
    one = torch.randn((1,) * b.ndim, dtype=b.dtype)
    for _ in range(3):
        for other in (wide[..., ::2], turned.permute(*range(b.ndim)[::-1]), one.expand(b.shape), torch._neg_view(b)):
            torch.testing.assert_close(kernel(other), expected(other))
        torch.testing.assert_close(kernel(one), expected(one.expand(b.shape)))
        torch.testing.assert_close(kernel(b.numpy()), expected(b))
        for bad, error in ((b[:2], stc.ShapeError), (b.float(), stc.DtypeError), (b.to_sparse(), stc.DtypeError)):
            with pytest.raises(error):
                kernel(bad)
        with pytest.raises(stc.ShapeError):
            kernel(b, b)
        with pytest.raises(stc.DeviceError):
            kernel(b.to("meta"))


def test_torch_is_asked_how_it_runs(held: Any) -> None:
    kernel, x, b, expected = held
    for _ in range(2):
        learns = b.clone().requires_grad_()
        (found,) = torch.autograd.grad(kernel(learns).sum(), learns)
        torch.testing.assert_close(found, torch.autograd.grad(expected(learns).sum(), learns)[0])
        with torch.no_grad():
            assert not kernel(learns).requires_grad
        assert kernel(learns).requires_grad
        x._values.requires_grad_()
        assert kernel(b).requires_grad
        x._values.requires_grad_(False)
        batch = torch.stack([b, 2 * b])
        torch.testing.assert_close(torch.func.vmap(kernel)(batch), torch.stack([expected(b), 2 * expected(b)]))
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(kernel(forward_ad.make_dual(b, b))).tangent
            torch.testing.assert_close(tangent, expected(b))
        with torch.inference_mode():
            assert kernel(b).is_inference()
        assert not kernel(b).is_inference()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(kernel(b), expected(b))
        with torch.profiler.profile() as profile:
            kernel(b)
        assert any("sparsetc" in event.name for event in profile.events())


def test_an_infinity_is_seen_by_a_dense_plan() -> None:
    x, b = matrix(), torch.randn(7, 3, dtype=torch.float64)
    kernel = stc.compile("ij,jr->ir", x, b, plan="dense")
    for _ in range(2):
        kernel(b)
    b[2] = torch.inf
    torch.testing.assert_close(kernel(b), stc.einsum("ij,jr->ir", x, b, plan="coo"))


@pytest.mark.parametrize("plan", PLANS)
def test_a_call_is_found_again(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call looks at nothing but the guard, and no more kinds are looked for than are kept."""
    x, b = matrix(), torch.randn(7, 3, dtype=torch.float64)
    kernel = stc.compile("ij,jr->ir", x, b, plan=plan, backend="numba" if plan != "dense" else "torch")
    first = kernel(b)
    monkeypatch.setattr(type(kernel.contraction.innermost), "result", None)
    assert torch.equal(kernel(b), first)
    monkeypatch.undo()
    for _ in range(2 * guard.KINDS):
        kernel(torch.randn(7, 6, dtype=torch.float64)[:, ::2])
    assert len(kernel.contraction._ways) <= guard.KINDS


def test_operands_that_are_one_tensor_or_overlap() -> None:
    torch.manual_seed(0)
    x = stc.SparseTensor.from_dense(torch.randn(4, 5, 5) * (torch.rand(4, 5, 5) < 0.5))
    b, whole = torch.randn(5, 3), torch.randn(2, 5, 3)
    kernel = stc.compile("ijk,jr,kr->ir", x, b, b)
    for pair in ((whole[0], whole[1]), (whole[1], whole[0]), (b, b), (whole[0], b), (b, b.clone()), (b[:], b[:])):
        torch.testing.assert_close(kernel(*pair), torch.einsum("ijk,jr,kr->ir", x.to_dense(), *pair))


def test_a_layer_multiplies_what_it_did_before() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 4) * (torch.rand(6, 4) < 0.7)
    layer, x = stc.nn.SparseLinear.from_dense(weight, torch.randn(6), plan="dense"), torch.randn(3, 4)

    def check() -> None:
        with torch.no_grad():
            for _ in range(3):
                wanted = torch.nn.functional.linear(x, layer.weight.to_dense(), layer.bias)
                torch.testing.assert_close(layer(x), wanted)

    check()
    assert layer._products
    with torch.no_grad():
        layer.values += 1
    check()
    layer.values.data = torch.randn_like(layer.values)
    check()
    layer.values = torch.nn.Parameter(torch.randn_like(layer.values))
    check()
    layer.bias = None
    check()
    places = torch.ones_like(weight)
    layer.load_state_dict(stc.nn.SparseLinear.from_dense(places).state_dict())
    check()
    assert layer(x).requires_grad
    layer.double()
    with pytest.raises(stc.DtypeError), torch.no_grad():
        layer(x)
    x = x.double()
    check()


@pytest.mark.parametrize("blocksize", [None, (2, 2), (1, 1)])
def test_a_contraction_of_one_step_is_one_node_of_the_graph(blocksize: tuple[int, int] | None) -> None:
    """Nothing is converted or put back between the operands and its node, and its gradients are of the operands."""
    torch.manual_seed(0)
    x = stc.SparseTensor.from_dense(torch.randn(4, 6, dtype=torch.float64), blocksize=blocksize)
    values = x.values.clone().requires_grad_()
    b = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    kernel = stc.compile("ij,jr->ri", x.with_values(values), b, output="dense")
    for _ in range(3):
        result = kernel(b)
        assert [id(function.variable) for function, _ in result.grad_fn.next_functions] == [id(values), id(b)]
        upstream = torch.randn_like(result)
        found = torch.autograd.grad(result, (values, b), upstream)
        whole = x.with_values(values).to_dense()
        expected = torch.autograd.grad((whole @ b).T, (values, b), upstream)
        torch.testing.assert_close(found, expected)


def test_an_operand_that_is_broadcast_and_nonzeros_out_of_order_have_gradients() -> None:
    torch.manual_seed(0)
    coords = torch.tensor([[2, 0, 1, 0], [1, 1, 0, 1]])
    values = torch.randn(4, dtype=torch.float64, requires_grad=True)
    x = stc.SparseTensor(coords, values, (3, 2))
    b = torch.randn(2, 1, dtype=torch.float64, requires_grad=True)
    whole = torch.zeros(3, 2, dtype=torch.float64).index_put(tuple(coords), values, accumulate=True)
    result = stc.compile("ij,jr->ir", x, b.expand(2, 3), output="dense")(b)
    upstream = torch.randn_like(result)
    found = torch.autograd.grad(result, (values, b), upstream)
    torch.testing.assert_close(found, torch.autograd.grad(whole @ b.expand(2, 3), (values, b), upstream))
