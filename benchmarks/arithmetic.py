"""Arithmetic, reductions and new patterns on the CPU, against scipy, pydata/sparse and torch.sparse in the same run.

    python benchmarks/arithmetic.py

Two random matrices of 400,000 entries each. Sums of patterns that meet for the first time ("new") and again are timed
apart, since where entries meet is kept. "ratio" is their time over ours. Results are compared first. On a GPU only the
products of relations are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import scipy.sparse
import torch
from common import DEVICE, record
from graph import median_ms

import sparsetc as stc

Call = Callable[[], Any]
N, NNZ = 20_000, 400_000
AXES = {"all": None, "0": 0, "1": 1}


def main() -> None:
    """Time each, and record the table."""
    torch.manual_seed(0)
    rows = []
    pairs = relations() if DEVICE == "cuda" else {**arithmetic(), **reductions(), **sampled(), **relations()}
    for name, (ours, theirs) in pairs.items():
        np.testing.assert_allclose(numbers(ours()), numbers(theirs()), rtol=1e-3, atol=1e-3)
        times = {"ours_ms": median_ms(ours), "theirs_ms": median_ms(theirs)}
        rows.append({"what": name, **times, "ratio": round(times["theirs_ms"] / times["ours_ms"], 2)})
        print(rows[-1], flush=True)
    for name, call in ({} if DEVICE == "cuda" else new_patterns()).items():
        rows.append({"what": name, "ours_ms": median_ms(call)})
        print(rows[-1], flush=True)
    versions = {name: version(name) for name in ("scipy", "sparse") if DEVICE == "cpu"}
    record("relations" if DEVICE == "cuda" else "arithmetic", rows, **versions)


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
    import sparse as pydata

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


def sampled() -> dict[str, tuple[Call, Call]]:
    """A sampled product against torch's."""
    x, b, c = matrix(0), torch.rand(N, 64), torch.rand(N, 64)
    zeros = x.with_values(torch.zeros(NNZ)).to_torch().coalesce().to_sparse_csr()
    return {
        "ij,ir,jr->ij": (
            lambda: stc.sddmm(x, b, c),
            lambda: torch.sparse.sampled_addmm(zeros, b, c.T, beta=0).values() * x.values,
        )
    }


def relations() -> dict[str, tuple[Call, Call]]:
    """Features of neighbours by several relations, each with a matrix, against a loop over relations."""
    sizes = [(20, 5000, 200_000, 32), (90, 8000, 800_000, 16), (8, 100_000, 1_500_000, 64)]
    return {f"rij,jd,rdo->io of {size}": of_relations(*size) for size in sizes}


def of_relations(relations: int, n: int, edges: int, width: int) -> tuple[Call, Call]:
    """Ours and theirs for so many relations, nodes, edges and features."""
    coords = torch.stack([torch.randint(0, size, (edges,), device=DEVICE) for size in (relations, n, n)])
    x = stc.SparseTensor(coords, torch.rand(edges, device=DEVICE), (relations, n, n))
    h, w = torch.rand(n, width, device=DEVICE), torch.rand(relations, width, width, device=DEVICE)
    r, i, j = x.coords
    ends = torch.searchsorted(r, torch.arange(1, relations, device=DEVICE)).cpu()
    parts = torch.tensor_split(torch.arange(x.nnz, device=DEVICE), ends)

    def by_relation() -> torch.Tensor:
        out = torch.zeros(n, width, device=DEVICE)
        for one, part in enumerate(parts):
            out.index_add_(0, i[part], (h[j[part]] @ w[one]) * x.values[part, None])
        return out

    return lambda: stc.einsum("rij,jd,rdo->io", x, h, w), by_relation


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
    result = result.cpu() if isinstance(result, torch.Tensor) else result
    return np.asarray(result.todense() if hasattr(result, "todense") else result)


if __name__ == "__main__":
    main()
