"""Arithmetic, reductions and new patterns on the CPU, against scipy, pydata/sparse and torch.sparse in the same run.

    python benchmarks/arithmetic.py

Two random matrices of 400,000 entries each. Sums of patterns that meet for the first time ("new") and again are timed
apart, since where entries meet is kept. "ratio" is their time over ours. Results are compared first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
import sparse as pydata
import torch
from common import record
from graph import median_ms

import sparsetc as stc

Call = Callable[[], Any]
N, NNZ = 20_000, 400_000
AXES = {"all": None, "0": 0, "1": 1}


def main() -> None:
    """Time each, and record the table."""
    torch.manual_seed(0)
    rows = []
    for name, (ours, theirs) in {**arithmetic(), **reductions(), **products()}.items():
        np.testing.assert_allclose(numbers(ours()), numbers(theirs()), rtol=1e-4, atol=1e-4)
        times = {"ours_ms": median_ms(ours), "theirs_ms": median_ms(theirs)}
        rows.append({"what": name, **times, "ratio": round(times["theirs_ms"] / times["ours_ms"], 2)})
        print(rows[-1], flush=True)
    for name, call in new_patterns().items():
        rows.append({"what": name, "ours_ms": median_ms(call)})
        print(rows[-1], flush=True)
    record("arithmetic", rows, scipy=scipy.__version__, pydata=pydata.__version__)


def matrix(seed: int, n: int = N, nnz: int = NNZ) -> stc.SparseTensor:
    """A random matrix."""
    return stc.rand((n, n), nnz=nnz, generator=torch.Generator().manual_seed(seed))


def as_new(x: stc.SparseTensor) -> stc.SparseTensor:
    """The tensor, with a pattern that nothing is known of."""
    return stc.SparseTensor._make(x.pattern.bare(), x.values)


def arithmetic() -> dict[str, tuple[Call, Call]]:
    """Sums and products of two, against scipy's."""
    x, y = matrix(0), matrix(1)
    a, b = x.to_scipy().tocsr(), y.to_scipy().tocsr()
    return {
        "A + B": (lambda: x + y, lambda: a + b),
        "A * B": (lambda: x * y, lambda: a.multiply(b)),
        "A + B, new": (lambda: as_new(x) + y, lambda: a + b),
        "A * B, new": (lambda: as_new(x) * y, lambda: a.multiply(b)),
        "A * 2": (lambda: x * 2, lambda: a * 2),
    }


def reductions() -> dict[str, tuple[Call, Call]]:
    """Reductions over both modes and either, against pydata's."""
    x = matrix(0)
    a = pydata.COO(x.coords.numpy(), x.values.numpy(), x.shape)
    names = {"sum": "sum", "mean": "mean", "amax": "max", "prod": "prod"}
    return {
        f"{ours}, {which}": (
            lambda ours=ours, dim=dim: getattr(x, ours)(dim),
            lambda theirs=theirs, dim=dim: getattr(a, theirs)(axis=dim),
        )
        for ours, theirs in names.items()
        for which, dim in AXES.items()
    }


def products() -> dict[str, tuple[Call, Call]]:
    """A sampled product against torch's, and relations' features against the products by hand."""
    x, b, c = matrix(0), torch.rand(N, 64), torch.rand(N, 64)
    ones = x.with_values(torch.zeros(NNZ)).to_torch().coalesce().to_sparse_csr()
    relations, n, width = 20, 5000, 32
    coords = torch.stack([torch.randint(0, size, (200_000,)) for size in (relations, n, n)])
    edges = stc.SparseTensor(coords, torch.rand(200_000), (relations, n, n))
    h, w = torch.rand(n, width), torch.rand(relations, width, width)
    r, i, j = edges.coords

    def by_relation() -> torch.Tensor:
        out = torch.zeros(n, width)
        for one, part in enumerate(torch.tensor_split(torch.arange(edges.nnz), ends)):
            messages = h[j[part]] @ w[one] * edges.values[part, None]
            out.index_add_(0, i[part], messages)
        return out

    ends = torch.searchsorted(r, torch.arange(1, relations))
    return {
        "ij,ir,jr->ij": (
            lambda: stc.sddmm(x, b, c),
            lambda: torch.sparse.sampled_addmm(ones, b, c.T, beta=0).values() * x.values,
        ),
        "rij,jd,rdo->io": (lambda: stc.einsum("rij,jd,rdo->io", edges, h, w), by_relation),
    }


def new_patterns() -> dict[str, Call]:
    """The first call of a known equation for a graph that nothing is known of, with gradients and without."""
    graph, weights = matrix(0, 2000, 10_000), torch.rand(2000, 32)
    cube = stc.rand((500, 500, 500), nnz=10_000)
    b, c = torch.rand(500, 16), torch.rand(500, 16)

    def trained() -> torch.Tensor:
        x = as_new(graph)
        x = x.with_values(x.values.clone().requires_grad_())
        stc.einsum("ij,jr->ir", x, weights).sum().backward()
        return x.values.grad

    return {
        "new graph, ij,jr->ir": lambda: stc.einsum("ij,jr->ir", as_new(graph), weights),
        "new graph, ij,jr->ir and a gradient": trained,
        "new graph, softmax": lambda: stc.softmax(as_new(graph), 1),
        "new tensor, ijk,jr,kr->ir": lambda: stc.einsum("ijk,jr,kr->ir", as_new(cube), b, c),
    }


def numbers(result: Any) -> Any:
    """A result as an ndarray: of something sparse, what a dense vector is multiplied to."""
    if isinstance(result, stc.SparseTensor):
        result = result.values if result.nnz == NNZ else (result @ torch.ones(result.shape[1])).detach()
    elif scipy.sparse.issparse(result):
        result = result.data if result.nnz == NNZ else result @ np.ones(result.shape[1], np.float32)
    return np.asarray(result.todense() if hasattr(result, "todense") else result)


if __name__ == "__main__":
    main()
