"""Einsums of patterns that come and go, on a GPU: by torch's operations, without a kernel."""

from __future__ import annotations

import warnings

import pytest
import torch

import sparsetc as stc
from sparsetc import api
from sparsetc.contraction import passing

SIZES = {"i": 300, "j": 200, "k": 100, "r": 32, "s": 3}
EQUATIONS = ["ij,jr->ir", "ij,ir->rj", "ij,j->i", "ij,jr->r", "ijk,jr,kr->ir", "ijk,jr,ks->isr", "ijk,kjr->ir"]


@pytest.mark.parametrize("learned", [False, True], ids=["values", "values that learn"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_results_and_gradients(
    equation: str, dtype: torch.dtype, error: float, learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing, "IN_A_ROW", 2)
    terms = equation.split("->")[0].split(",")
    shape = [SIZES[c] for c in terms[0]]
    g = torch.Generator("cuda").manual_seed(0)
    for turn in range(5):
        if turn == 3:
            monkeypatch.setattr(api, "compiled", None)
        coords = torch.stack([torch.randint(n, (5000,), generator=g, device="cuda") for n in shape])
        if turn == 4:
            coords = torch.unique(coords, dim=1)
        values = torch.rand(coords.shape[1], 1 + turn % 2, generator=g, device="cuda").to(dtype)[:, 0]
        dense = [torch.rand([SIZES[c] for c in t], generator=g, device="cuda").to(dtype) for t in terms[1:]]
        leaves = [*([values.requires_grad_()] if learned else []), *(d.requires_grad_() for d in dense)]
        found = stc.einsum(equation, stc.SparseTensor(coords, values, shape), *dense, output="dense")
        exact = {id(leaf): leaf.detach().double().requires_grad_() for leaf in (values, *dense)}
        full = torch.zeros(shape, dtype=torch.float64, device="cuda")
        full = full.index_put(tuple(coords), exact[id(values)], accumulate=True)
        expected = torch.einsum(equation, full, *(exact[id(d)] for d in dense))
        assert (found.double() - expected).abs().max() <= error * expected.abs().max()
        ours = torch.autograd.grad(found, leaves, torch.ones_like(found))
        theirs = torch.autograd.grad(expected, [exact[id(leaf)] for leaf in leaves], torch.ones_like(expected))
        for one, other in zip(ours, theirs, strict=True):
            assert (one.double() - other).abs().max() <= error * other.abs().max()


def test_values_changed_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of coordinates in order they are the caller's own; of others a copy."""
    monkeypatch.setattr(passing, "IN_A_ROW", 2)
    b = torch.rand(200, 8, device="cuda")
    for turn in range(8):
        coords = torch.stack([torch.randint(n, (500,), device="cuda") for n in (300, 200)])
        if turn % 2:
            coords = torch.unique(coords, dim=1)
        values = torch.rand(coords.shape[1], device="cuda")
        x = stc.SparseTensor(coords, values, (300, 200))
        before = values.clone()
        values.mul_(2)
        in_force = values if turn % 2 else before
        expected = torch.zeros(300, 200, device="cuda").index_put(tuple(coords), in_force, accumulate=True)
        torch.testing.assert_close(x @ b, expected @ b)
        torch.testing.assert_close(x.to_dense(), expected)


@pytest.mark.parametrize("order", [1, 2, 4, 5])
def test_coordinates_out_of_range(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are an error of the constructor also where patterns come and go, and the next tensor is read."""
    monkeypatch.setattr(passing, "IN_A_ROW", 2)
    letters, shape = "ijklm"[:order], (30, 20, 10, 9, 8)[:order]
    b = torch.rand(30, 4, device="cuda")
    for turn in range(9):
        coords = torch.stack([torch.randint(n, (500,), device="cuda") for n in shape])
        values = torch.rand(500, device="cuda")
        if turn in (4, 5):
            coords[-1, 77] = shape[-1] if turn == 4 else -1
            with pytest.raises(stc.CoordinateError, match=f"mode {order - 1}: nonzero 77 has {coords[-1, 77]}"):
                stc.SparseTensor(coords, values, shape)
            continue
        x = stc.SparseTensor(coords, values, shape)
        found = stc.einsum(f"{letters},ir->r", x, b, output="dense")
        torch.testing.assert_close(found, (values[:, None] * b[coords[0]]).sum(0), rtol=1e-4, atol=1e-4)
        coords.zero_()  # the tensor has a copy
        torch.testing.assert_close(stc.einsum(f"{letters},ir->r", x, b, output="dense"), found)


def test_products_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """New patterns are multiplied without a plan; one that stays gets a kernel, with the same numbers."""
    monkeypatch.setattr(passing, "IN_A_ROW", 2)
    compiled, texts = api.compiled, list[str]()
    monkeypatch.setattr(
        api, "compiled", lambda text, *others, **once: texts.append(text) or compiled(text, *others, **once)
    )
    g = torch.Generator("cuda").manual_seed(0)
    for turn in range(8):
        if turn < 6:
            coords = torch.randint(400, (2, 3000), generator=g, device="cuda")
            x = stc.SparseTensor(coords, torch.rand(3000, generator=g, device="cuda"), (400, 400))
        for _ in range(1 if turn < 6 else passing.FEW):
            found = x @ x.T
            expected = x.to_dense().double() @ x.to_dense().double().T
            assert (found.to_dense().double() - expected).abs().max() <= 1e-5 * expected.abs().max()
            assert found.is_coalesced
    assert 0 < len(texts) < 6


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_products_by_groups(dtype: torch.dtype, error: float) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    for turn in range(5):
        coords = torch.stack([torch.randint(n, (500,), generator=g, device="cuda") for n in (300, 4)])
        values, rows, matrices = (
            torch.randn(shape, generator=g, device="cuda").to(dtype).requires_grad_()
            for shape in ((500,), (300, 32), (4, 32, 40 + turn % 2))
        )
        exact = [t.detach().double().requires_grad_() for t in (values, rows, matrices)]
        found = stc.einsum("te,ti,eio->to", stc.SparseTensor(coords, values, (300, 4)), rows, matrices)
        full = torch.zeros(300, 4, dtype=torch.float64, device="cuda").index_put((*coords,), exact[0], accumulate=True)
        expected = torch.einsum("te,ti,eio->to", full, *exact[1:])
        ours = found, *torch.autograd.grad(found.square().sum(), [values, rows, matrices])
        theirs = expected, *torch.autograd.grad(expected.square().sum(), exact)
        for one, other in zip(ours, theirs, strict=True):
            assert (one.double() - other).norm() <= error * other.norm()


@pytest.mark.parametrize("dense_sizes", [(), (3,)])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.complex128], ids=str
)
def test_rows_by_an_index(dtype: torch.dtype, dense_sizes: tuple[int, ...]) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    coords = torch.unique(torch.randint(90, (2, 3000), generator=g, device="cuda"), dim=1)
    values = torch.randn(coords.shape[1], *dense_sizes, dtype=torch.complex128, device="cuda")
    values = (values if dtype.is_complex else values.real).to(dtype)
    x = stc.SparseTensor(coords, values, (90, 90, *dense_sizes))
    index = torch.randint(-90, 90, (200,), generator=g, device="cuda")
    assert torch.equal(x[index].to_dense(), x.to_dense()[index])
    assert torch.equal(x[index[::2]].to_dense(), x.to_dense()[index[::2]])
    assert torch.equal(x[:, index].to_dense(), x.to_dense()[:, index])
    assert x[index[:0]].nnz == 0
    if dtype.is_floating_point:
        learned = x.with_values(values.clone().requires_grad_())
        (found,) = torch.autograd.grad(learned[index].values.sum(), learned.values)
        times = torch.bincount(index % 90, minlength=90)[coords[0]]
        assert torch.equal(found, times.view(-1, *[1] * len(dense_sizes)).expand_as(values).to(dtype))


def test_rows_by_an_index_wait_for_the_device_once() -> None:
    g = torch.Generator("cuda").manual_seed(0)
    x = stc.SparseTensor(torch.randint(90, (2, 3000), generator=g, device="cuda"), torch.rand(3000).cuda(), (90, 90))
    index = torch.randint(-90, 90, (20,), generator=g, device="cuda")
    x[index]  # where rows begin is kept from now on
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            x[index]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1
