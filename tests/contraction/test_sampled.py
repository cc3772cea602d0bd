"""Products of rows of two operands at nonzeros (SDDMM and its like) on the CPU, by torch's sampled product or not."""

from __future__ import annotations

import pytest
import torch

import sparsetc as stc
from sparsetc.runtime import calls

CASES = (
    "ij,ir,jr->ij",
    "ij,jr,ir->ji",
    "ij,hir,hjr->ijh",
    "ij,irs,jrs->ijr",
    "ijk,ir,jkr->ijk",
    "ijk,kr,jr->ijk",  # whose first rows come in no order
)
SIZES = {"i": 20, "j": 30, "k": 25, "r": 16, "s": 8, "h": 3}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.int64]


@pytest.mark.parametrize("least", [1, 1 << 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("equation", CASES)
def test_samples(equation: str, dtype: torch.dtype, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SAMPLED", least)
    monkeypatch.setattr(calls, "PIECE", 4096)  # several pieces of gathered rows
    first, *others = equation.split("->")[0].split(",")
    shape = [SIZES[c] for c in first]
    coords = torch.stack([torch.randint(0, size, (500,)) for size in shape])
    x = stc.SparseTensor(coords, torch.randint(1, 4, (500,)).to(dtype), shape)
    dense = [torch.randint(-3, 4, [SIZES[c] for c in other]).to(dtype) for other in others]
    kernel = stc.compile(equation, x, *dense, output="dense", backend="torch")
    assert "dots(" in kernel.source
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.einsum(equation, x.to_dense().to(wide), *[d.to(wide) for d in dense])
    torch.testing.assert_close(kernel(*dense).to(wide), expected, rtol=2e-2, atol=1.0 if dtype.itemsize == 2 else 1e-3)


def test_no_rows_are_made() -> None:
    """What is made takes memory of the nonzeros, not of a row for each of them."""
    n, rank = 200_000, 64
    x = stc.SparseTensor(torch.randint(0, 1000, (2, n)), torch.ones(n), (1000, 1000))
    b, c = torch.rand(1000, rank), torch.rand(1000, rank)
    kernel = stc.compile("ij,ir,jr->ij", x, b, c, backend="torch")
    kernel(b, c)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as made:
        kernel(b, c)
    largest = max(event.self_cpu_memory_usage for event in made.key_averages())
    assert largest < x.nnz * rank * 4 / 2


def test_as_many_runs_as_rows_in_another_order() -> None:
    first, second = torch.tensor([2, 2, 0, 1]), torch.tensor([0, 1, 1, 0])
    left, right, weights = torch.rand(3, 1, 1 << 14), torch.rand(2, 1, 1 << 14), torch.rand(4)
    expected = weights * (left[first, 0] * right[second, 0]).sum(1)
    torch.testing.assert_close(calls.dots(first, left, second, right, weights)[:, 0], expected)
