"""Kernels of maps between products, run by Triton's interpreter: attention and its gradients against float64."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from map_cases import (
    CPU,
    FORMS,
    MAPPED,
    PATTERNS,
    READS,
    SMALL,
    as_if_large,
    dense_attention,
    form_of_attention,
    mapped_cases,
    reading,
    scattered,
)

import sparsetc as stc
from sparsetc.maps import kernel, task
from sparsetc.maps.trace import Untraced

TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def _scattered_entries_go_row_by_row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns here are too small for it."""
    as_if_large(request.node.name, monkeypatch)


def operands(shape: tuple[int, ...], rows: int, columns: int, depth: int, width: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, *size, generator=g) for size in ((rows, depth), (columns, depth), (columns, width))]


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.isfinite().all()
    assert float((found.detach().double() - expected).norm()) <= tolerance * (1 + float(expected.norm()))


def check(
    name: str,
    dtype: torch.dtype,
    heads: tuple[int, ...],
    depth: int,
    width: int,
    bias: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given, meets = PATTERNS[name]()
    own = [t.to(dtype).requires_grad_() for t in operands(heads, *meets.shape, depth, width)]
    exact = [t.detach().double().requires_grad_() for t in own]
    inputs, exact_inputs, added, added_exact = [*own], [*exact], None, None
    if bias:
        shape = (*(heads if bias == "a head" else ()), int(meets.sum()))
        added = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
        whole = torch.zeros(*shape[:-1], *meets.shape, dtype=torch.float64)
        whole[..., meets] = added.detach().double()
        added_exact = whole.requires_grad_()
        inputs.append(added)
        exact_inputs.append(added_exact)
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = stc.attention(*own, given, scale=0.3, bias=added)
    assert "attention runs in one kernel" in caplog.text
    assert found.dtype == dtype
    expected = dense_attention(*exact, meets, 0.3, added_exact)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    gradients = torch.autograd.grad(found, inputs, upstream.to(dtype))
    exact_gradients = [*torch.autograd.grad(expected, exact_inputs, upstream.to(dtype).double())]
    if bias:
        exact_gradients[3] = exact_gradients[3][..., meets]
    for one, other in zip((found, *gradients), (expected, *exact_gradients), strict=True):
        close(one, other.detach(), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_attention(name: str, dtype: torch.dtype, poisoned: None, caplog: pytest.LogCaptureFixture) -> None:
    check(name, dtype, (2,), 16, 16, "", caplog)


@pytest.mark.parametrize(("depth", "width"), [(20, 5), (1, 130), (64, 64), (128, 32)])
@pytest.mark.parametrize("name", ["mask", "scattered", "by-row"])
def test_row_sizes(name: str, depth: int, width: int, poisoned: None, caplog: pytest.LogCaptureFixture) -> None:
    check(name, torch.float16 if width > 128 else torch.float32, (), depth, width, "", caplog)


@pytest.mark.parametrize("bias", ["one", "a head"])
@pytest.mark.parametrize("name", ["mask", "entries", "scattered", "by-row", "blocks-of-32"])
def test_a_bias(name: str, bias: str, poisoned: None, caplog: pytest.LogCaptureFixture) -> None:
    check(name, torch.float32, (2, 2), 16, 20, bias, caplog)


@pytest.mark.parametrize("bias", ["", "one"])
@pytest.mark.parametrize("name", ["mask", "entries", "scattered-one-row"])
def test_long_windows_are_cut(
    name: str, bias: str, poisoned: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel, "most_tiles", lambda tiles, heads: 1)
    check(name, torch.float32, (2,), 16, 16, bias, caplog)


def test_gradients_of_some_operands_and_of_views() -> None:
    q, k, v = (t.mT.contiguous().mT for t in operands((2, 3), 100, 100, 16, 16))
    k.requires_grad_()
    meets = SMALL.dense(100)
    exact = k.detach().double().requires_grad_()
    found = stc.attention(q, k, v, SMALL)
    expected = dense_attention(q.double(), exact, v.double(), meets, 0.25, None)
    close(found.detach(), expected.detach(), 5e-6)
    (gradient,) = torch.autograd.grad(found.sum(), k)  # of a gradient that is expanded
    close(gradient, torch.autograd.grad(expected.sum(), exact)[0], 5e-6)


def test_gradients_in_a_graph_after_those_of_a_result_in_another_order_of_modes() -> None:
    operands_of = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in operands((2,), 100, 100, 16, 16)]
    q, k, v = (t.requires_grad_() for t in operands_of)
    upstream = torch.randn(q.shape)
    expected = torch.autograd.grad(stc.attention(q, k, v, SMALL), (q, k, v), upstream)
    whole = torch.compile(lambda *given: stc.attention(*given, SMALL), backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(whole(q, k, v), (q, k, v), upstream)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_one_tensor_as_all_operands_and_gradients_of_gradients() -> None:
    x = operands((2,), 30, 30, 16, 16)[0].requires_grad_()
    exact, meets = x.detach().double().requires_grad_(), scattered(30, 30, 0.3)
    pattern = stc.SparseTensor.from_dense(meets.float())
    found, expected = stc.attention(x, x, x, pattern), dense_attention(exact, exact, exact, meets, 0.25, None)
    (first,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    (exact_first,) = torch.autograd.grad(expected.square().sum(), exact, create_graph=True)
    close(first.detach(), exact_first.detach(), 5e-6)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    close(second, torch.autograd.grad(exact_first.square().sum(), exact)[0], 5e-5)


def test_gradients_in_batches() -> None:
    q, k, v = (t.requires_grad_() for t in operands((), 30, 30, 16, 16))
    found = stc.attention(q, k, v, SMALL)
    upstream = torch.randn(3, *found.shape)
    (batch,) = torch.autograd.grad(found, q, upstream, is_grads_batched=True, retain_graph=True)
    for one, own in zip(batch, upstream, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(found, q, own, retain_graph=True)[0])


def test_a_bias_of_minus_infinity() -> None:
    q, k, v = (t.requires_grad_() for t in operands((), 40, 40, 16, 16))
    meets = scattered(40, 40, 0.4)
    whole = stc.SparseTensor.from_dense(torch.ones(40, 40))
    bias = torch.where(meets, 0.0, -torch.inf).flatten()  # row 3 is minus infinity alone
    found, expected = stc.attention(q, k, v, whole, bias=bias), dense_attention(q, k, v, meets, 0.25, None)
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (found, expected))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def test_what_a_row_of_scattered_entries_does_not_meet_has_no_part() -> None:
    q, k, v = operands((), 60, 70, 16, 16)
    meets = scattered(60, 70, 0.02)
    meets[:, 0] = False
    pattern, bad = stc.SparseTensor.from_dense(meets.float()), torch.arange(70)[:, None] == 0
    found = stc.attention(q, k.masked_fill(bad, torch.nan), v.masked_fill(bad, torch.inf), pattern)
    torch.testing.assert_close(found, stc.attention(q, k, v, pattern))


def test_a_full_graph_has_the_kernel(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = (t.requires_grad_() for t in operands((), 30, 30, 16, 16))

    def function(q: torch.Tensor) -> torch.Tensor:
        found, lse = stc.attention(2 * q, k, v, SMALL, return_lse=True)
        return found.sin() + lse[:, None]

    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(q)
        assert "attention runs in one kernel" in caplog.text
        both = [torch.autograd.grad(found.sum(), (q, k, v))]
        assert "in steps" not in caplog.text
    expected = function(q)
    both.append(torch.autograd.grad(expected.sum(), (q, k, v)))
    torch.testing.assert_close(found, expected)
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def test_transforms_and_bfloat16_go_in_three_steps(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = operands((), 30, 30, 16, 16)
    expected = dense_attention(q, k, v, SMALL.dense(30), 0.25, None)
    with caplog.at_level(logging.DEBUG, "sparsetc"), stc.options(backend="auto"):
        found = torch.func.vmap(lambda one: stc.attention(one, k, v, SMALL))(q[None])[0]
        torch.testing.assert_close(found, expected)
        stc.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), SMALL)
    assert "steps: forward mode, or a transform of torch.func" in caplog.text


@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv"])
@pytest.mark.parametrize("scattered_entries", ["scattered", "near", "near with edges", "of the same nodes"])
def test_graph_attention(scattered_entries: str, kind: str, poisoned: None, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    dropout = 0.3 if scattered_entries == "near" else 0.0
    edge_dim = 1 if "edges" in scattered_entries else None
    layer = getattr(stc.nn, kind)(6, 5, heads=3, dropout=dropout, edge_dim=edge_dim)
    x: Any = torch.randn(40, 6), torch.randn(30, 6)
    if same := "same" in scattered_entries:
        x = x[0].requires_grad_()
    graph = stc.SparseTensor.from_dense(scattered(40 if same else 30, 40, 0.1).float())
    with stc.options(backend="torch"), torch.random.fork_rng():
        expected = layer(graph, x)
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = layer(graph, x)  # drops the same
    assert f"{kind} runs in one kernel" in caplog.text
    torch.testing.assert_close(found, expected)
    inputs, upstream = [*layer.parameters(), *([x] if same else [])], torch.randn(len(found), 15)
    both = [torch.autograd.grad(y, inputs, upstream, retain_graph=True) for y in (found, expected)]
    if same:  # and second gradients, which are those of steps
        first = [torch.autograd.grad(y, x, upstream, create_graph=True)[0] for y in (found, expected)]
        second = [torch.autograd.grad(one.square().sum(), inputs[:3], materialize_grads=True) for one in first]
        both = [one + other for one, other in zip(both, second, strict=True)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# -- forms of attention: beside its own steps, which tests/test_attention.py compares with all pairs -----------------

CUT = ("dropout-grouped-scattered", "by-head")


@pytest.mark.parametrize(
    ("name", "cut"), [*((name, False) for name in FORMS if "by-row" not in name), *((name, True) for name in CUT)]
)
def test_forms(
    name: str, cut: bool, poisoned: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if cut:
        monkeypatch.setattr(kernel, "most_tiles", lambda tiles, heads: 1)
    both = form_of_attention(name, CPU)
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = both()
    assert "attention runs in one kernel" in caplog.text
    with stc.options(backend="torch"):
        expected = both()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", READS)
def test_functions_of_scores_that_read_a_tensor(name: str, poisoned: None, caplog: pytest.LogCaptureFixture) -> None:
    inputs, function, dense = reading(name, (2, 2))
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = stc.attention(*inputs[:3], SMALL, bias=function)
    assert "attention runs in one kernel" in caplog.text
    expected = dense(SMALL)
    close(found, expected.detach(), 5e-6)
    both = (torch.autograd.grad(y.square().sum(), inputs) for y in (found, expected))
    for one, other in zip(*both, strict=True):
        close(one, other, 2e-5)


# -- functions of one's own -------------------------------------------------------------------------------------------


WAYS = [
    *((name, "near", torch.float16) for name in MAPPED),
    *((name, "scattered", torch.float32) for name in MAPPED),
    *((name, "scattered-cut", torch.float32) for name in ("poisson", "edge-network", "stored")),
    ("edge-network", "by-row", torch.float32),
]


@pytest.mark.parametrize(("name", "way", "dtype"), WAYS)
def test_map_entries(
    name: str,
    way: str,
    dtype: torch.dtype,
    poisoned: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if "cut" in way:
        monkeypatch.setattr(kernel, "most_tiles", lambda tiles, heads: 1)
    function, form = mapped_cases(name, dtype)[:2]
    inputs = [t for t in form.tensors if t.requires_grad]
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = stc.map_entries(function, form.pattern, **form.named)
    assert "map_entries runs in one kernel" in caplog.text
    found = found.values if isinstance(found, stc.SparseTensor) else found
    with stc.options(backend="torch"):
        expected = stc.map_entries(function, form.pattern, **form.named)
    expected = expected.values if isinstance(expected, stc.SparseTensor) else expected
    both = [(y, *torch.autograd.grad(y.square().sum(), inputs, retain_graph=True)) for y in (found, expected)]
    for one, other in zip(*both, strict=True):
        close(one.detach(), other.detach().double(), TOLERANCE[dtype] * 3)


def test_a_function_that_kernels_do_not_have_runs_in_steps(caplog: pytest.LogCaptureFixture) -> None:
    a = torch.rand(3, 2)
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = stc.map_entries(torch.lgamma, stc.eye(3), rows={"input": a[:, 0]})
    assert "map_entries runs in steps: kernels have no lgamma" in caplog.text
    torch.testing.assert_close(found, torch.lgamma(a[:, 0]))


def test_what_a_function_reads_from_outside_has_gradients(caplog: pytest.LogCaptureFixture) -> None:
    a, factor = torch.rand(3, 2), torch.tensor(2.0, requires_grad=True)
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = stc.map_entries(lambda s: s * factor, stc.eye(3), products={"s": (a, a)})
    assert "map_entries runs in steps: it reads a tensor that is not among its arguments" in caplog.text
    torch.testing.assert_close(torch.autograd.grad(found.sum(), factor)[0], (a * a).sum())


def test_a_derivative_that_kernels_do_not_have(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*arguments: Any) -> Any:
        raise Untraced("kernels have no such derivative")

    monkeypatch.setattr(task, "backward", refused)
    a = torch.rand(3, 2, requires_grad=True)
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = stc.map_entries(lambda s: s * 1.5 + 0.5, stc.eye(3), products={"s": (a, a)})
        (gradient,) = torch.autograd.grad(found.sum(), a)
    assert "map_entries runs in one kernel" in caplog.text
    assert "gradients run in steps: kernels have no such derivative" in caplog.text
    torch.testing.assert_close(gradient, 3 * a.detach())
