"""Native loops over entries on a CPU, against float64 over all pairs, and against steps for forms that these check."""

from __future__ import annotations

import logging
from typing import Any

import map_cases
import numpy as np
import pytest
import torch
from map_cases import CPU, dense_attention, form_of_attention, mapped_cases

import sparsetc as stc
from sparsetc import pairwise
from sparsetc.maps import pairs, task

pytest.importorskip("numba")

F64 = torch.float64


@pytest.fixture(autouse=True)
def _every_call_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "ENOUGH", 0)
    monkeypatch.setattr(pairs, "LOOPED", 0.0)


@pytest.mark.parametrize("name", ["entries", "scattered"])
def test_attention(name: str, poisoned: None, caplog: pytest.LogCaptureFixture) -> None:
    given, meets = map_cases.PATTERNS[name]()
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, n, 21, dtype=F64, generator=g).requires_grad_() for n in meets.shape)
    v = torch.randn(2, meets.shape[1], 5, dtype=F64, generator=g).requires_grad_()
    bias = torch.randn(int(meets.sum()), dtype=F64, generator=g)
    bias[7] = -torch.inf
    bias.requires_grad_()
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = stc.attention(q, k, v, given, scale=0.3, bias=bias)
    assert "attention runs in one kernel" in caplog.text
    whole = torch.zeros(meets.shape, dtype=F64).index_put(tuple(meets.nonzero().T), bias)
    expected = dense_attention(q, k, v, meets, 0.3, whole)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, dtype=F64, generator=g)
    both = [torch.autograd.grad(y, [q, k, v, bias], weights) for y in (found, expected)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def test_a_loss_and_its_gradients() -> None:
    function, form, dense = mapped_cases("poisson", F64)
    found, expected = stc.map_entries(function, form.pattern, **form.named), dense()
    assert "numba on" in str(stc.explain(stc.map_entries, function, form.pattern, **form.named))
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad(y.square().sum(), form.tensors) for y in (found, expected))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_columns_where_those_of_rows_are_zero(poisoned: None) -> None:
    """The rows' walk gives the columns' one its sums, whatever it computes itself."""
    given, meets = map_cases.PATTERNS["scattered"]()
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 4, dtype=F64, generator=g) for n in (*meets.shape, meets.shape[1]))
    numbers = torch.randn(meets.shape[0], dtype=F64, generator=g)
    named: dict[str, Any] = {"products": {"s": (q, k)}, "rows": {"r": numbers}, "softmax": True, "values": v}
    inputs = [k.requires_grad_(), numbers.requires_grad_()]
    found = stc.map_entries(lambda s, r: s + torch.floor(r), given, **named)
    expected = dense_attention(q, k, v, meets, 1.0, None)
    both = [torch.autograd.grad(y.square().sum(), inputs, materialize_grads=True) for y in (found, expected)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def like_steps(both: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "sparsetc"):
        found = both()
    assert "runs in one kernel" in caplog.text
    monkeypatch.setattr(pairwise, "_unfit", lambda options: "asked for")
    for one, other in zip(found, both(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["dropout-grouped-scattered", "entries-by-head"])
def test_forms(name: str, poisoned: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    like_steps(form_of_attention(name, CPU), monkeypatch, caplog)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["relative", "of both"])
def test_numbers_by_place(name: str, threads: int, poisoned: None, caplog: pytest.LogCaptureFixture) -> None:
    inputs, function, dense = map_cases.reading(name, (2, 2))
    pattern = stc.SparseTensor.from_dense(map_cases.SMALL.dense(100).float())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert "numba on" in str(stc.explain(stc.attention, *inputs[:3], pattern, bias=function))
        found = stc.attention(*inputs[:3], pattern, bias=function)
        gradients = torch.autograd.grad(found.square().sum(), inputs)
    finally:
        torch.set_num_threads(before)
    expected = dense(map_cases.SMALL)
    exact = torch.autograd.grad(expected.square().sum(), inputs)
    for one, other in zip((found, *gradients), (expected, *exact), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 3])
def test_functions_of_rows_and_dropout(
    threads: int, poisoned: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    layer = stc.nn.GATv2Conv(6, 5, heads=3, dropout=0.3)
    x = torch.randn(40, 6), torch.randn(30, 6)
    graph = stc.SparseTensor.from_dense(map_cases.scattered(30, 40, 0.1).float())

    def both() -> list[torch.Tensor]:
        torch.manual_seed(1)
        y = layer(graph, x)
        return [y, *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), [*layer.parameters()])]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        like_steps(both, monkeypatch, caplog)
    finally:
        torch.set_num_threads(before)


def test_long_rows_are_summed_in_pieces() -> None:
    graph = stc.SparseTensor([np.zeros(1 << 18, int), np.arange(1 << 18)], torch.ones(1 << 18), (1, 1 << 18))
    found = stc.map_entries(
        lambda c: c, graph, columns={"c": torch.full((1 << 18,), 0.1)}, values=torch.ones(1 << 18, 8)
    )
    torch.testing.assert_close(found, torch.full((1, 8), 0.1 * (1 << 18)), rtol=2e-5, atol=0.0)


def test_powers_of_two() -> None:
    from sparsetc.runtime.vectors import exp2, native

    @native  # type: ignore[untyped-decorator]
    def powers(x: Any, out: Any) -> None:
        for n in range(x.size):
            out[n] = exp2(x[n])

    x = np.concatenate([np.linspace(-125, 127.9, 5001), [0, 1, -np.inf, -1e30, np.inf, np.nan, 200]]).astype("f4")
    out = np.empty_like(x)
    powers(x, out)
    np.testing.assert_allclose(out, np.exp2(x.astype("f8")).astype("f4"), rtol=2e-7)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_logarithms() -> None:
    from sparsetc.runtime.vectors import log, native

    @native  # type: ignore[untyped-decorator]
    def logarithms(x: Any, out: Any) -> None:
        for n in range(x.size):
            out[n] = log(x[n])

    ends = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45]
    x = np.concatenate([np.linspace(0.5, 2, 5001), np.logspace(-44, 38, 5001), ends]).astype("f4")
    out = np.empty_like(x)
    logarithms(x, out)
    np.testing.assert_allclose(out, np.log(x.astype("f8")).astype("f4"), rtol=2e-7)


def test_blocks_go_entry_by_entry() -> None:
    blocks = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    meets = blocks.repeat_interleave(32, 0).repeat_interleave(32, 1)
    given = stc.SparseTensor.from_blocks(blocks.nonzero().T, torch.ones(int(blocks.sum()), 32, 32), (128, 128))
    q, k, v = (torch.randn(2, 128, 16, dtype=F64, generator=torch.Generator().manual_seed(n)) for n in range(3))
    assert "numba on" in str(stc.explain(stc.attention, q, k, v, given))
    torch.testing.assert_close(stc.attention(q, k, v, given), dense_attention(q, k, v, meets, 0.25, None))
