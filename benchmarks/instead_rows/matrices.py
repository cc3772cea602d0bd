"""Matrices: sparse times dense, sampled products, sparse times sparse, beside cuSPARSE or MKL by torch, and scipy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import common
import torch

import sparsetc as stc
from instead_rows.calls import each_once, plain_and_compiled, versioned, with_tf32
from instead_rows.operands import normal, of_data, places, positive, scattered
from instead_rows.row import CPU, FRESH, GPU, LIMIT, TF32, Call, Row, Task

Matrix = Callable[[], stc.SparseTensor]
KINDS = {
    "float32": (torch.float32, "highest", LIMIT[torch.float32]),
    "tf32": (torch.float32, "high", TF32),
    "fp16": (torch.float16, "highest", LIMIT[torch.float16]),
}
"""Operands, precision, largest error."""


def in_double(x: stc.SparseTensor) -> torch.Tensor:
    """The matrix in float64, CSR."""
    return x.with_values(x.values.double()).to_torch(torch.sparse_csr)


def spmm(matrix: Matrix, columns: int, kind: str) -> Task:
    """A kernel that is held, times a dense matrix."""
    dtype, precision, tolerance = KINDS[kind]
    x = matrix()
    x = x.with_values(x.values.to(dtype))
    b = normal(x.shape[1], columns, dtype=dtype)
    kernel = stc.compile("ij,jr->ir", x, b, output="dense", precision=precision)
    csr = x.to_torch(torch.sparse_csr)
    instead: dict[str, Call] = {"torch CSR": lambda: csr @ b}
    if x.shape[0] * x.shape[1] <= 1 << 28:
        dense = x.to_dense()
        call: Call = lambda: dense @ b  # noqa: E731
        instead["dense product"] = with_tf32(call) if kind == "tf32" else call
    if common.DEVICE == "cpu":
        of_scipy, columns_of_scipy = x.to_scipy().tocsr(), b.numpy()
        instead[versioned("scipy")] = lambda: of_scipy @ columns_of_scipy
    return Task(lambda: kernel(b), instead, lambda: in_double(x) @ b.double(), tolerance)


def small(call: str) -> Task:
    """A matrix of 100², 500 nonzeros, times 16 columns: what a call costs."""
    x, b = scattered((100, 100), 500), normal(100, 16)
    kernel = stc.compile("ij,jr->ir", x, b, output="dense")
    csr, dense = x.to_torch(torch.sparse_csr), x.to_dense()
    ours: dict[str, Call] = {"x @ b": lambda: x @ b, "a kernel that is held": lambda: kernel(b)}
    return Task(
        ours[call],
        {"torch CSR": lambda: csr @ b, "dense product": lambda: dense @ b},
        lambda: in_double(x) @ b.double(),
    )


def sampled(matrix: Matrix, width: int) -> Task:
    """The values of ``x * (b @ c.T)`` at the places of x."""
    x = matrix()
    b, c = normal(x.shape[0], width), normal(x.shape[1], width, seed=1)
    kernel = stc.compile("ij,ir,jr->ij", x, b, c, output="sparse", precision="highest")
    zeros = x.with_values(torch.zeros_like(x.values)).to_torch(torch.sparse_csr)
    (i, j), values = x.coords, x.values

    def by_gather(b: torch.Tensor, c: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (b[i] * c[j]).sum(-1) * values

    instead = plain_and_compiled("gather, multiply, sum", by_gather, b, c, values)
    instead["torch sampled_addmm"] = lambda: torch.sparse.sampled_addmm(zeros, b, c.T, beta=0.0).values() * values
    if x.shape[0] * x.shape[1] <= 1 << 28:
        instead["dense product"] = lambda: (b @ c.T)[i, j] * values
    return Task(
        lambda: kernel(b, c).values, instead, lambda: by_gather(b.double(), c.double(), values.double()), LIMIT[b.dtype]
    )


def squared(matrix: Matrix) -> Task:
    """A sparse matrix times itself, the result's places known to a kernel that is held."""
    x = matrix()
    kernel = stc.compile("ij,jk->ik", x, x, output="sparse", precision="highest")
    csr = x.to_torch(torch.sparse_csr)
    instead: dict[str, Call] = {"torch CSR @ CSR": lambda: csr @ csr}
    if common.DEVICE == "cpu":
        of_scipy = x.to_scipy().tocsr()
        instead[versioned("scipy")] = lambda: of_scipy @ of_scipy
    return Task(kernel, instead, lambda: in_double(x) @ in_double(x))


def first_squared(shape: tuple[int, int], nnz: int) -> Task:
    """A sparse matrix times itself, every matrix new: its result's places are found too."""
    coords = [places(shape, nnz, seed) for seed in range(FRESH)]
    tensors = [stc.SparseTensor(c, positive(c.shape[1]), shape) for c in coords]
    following, following_csr = each_once(tensors), each_once([x.to_torch(torch.sparse_csr) for x in tensors])

    def ours() -> stc.SparseTensor:
        x = following()
        return x @ x

    def by_torch() -> torch.Tensor:
        x = following_csr()
        return x @ x

    instead: dict[str, Call] = {"torch CSR @ CSR": by_torch}
    if common.DEVICE == "cpu":
        following_scipy = each_once([x.to_scipy().tocsr() for x in tensors])

        def by_scipy() -> object:
            x = following_scipy()
            return x @ x

        instead[versioned("scipy")] = by_scipy
    return Task(ours, instead, lambda: in_double(tensors[0]) @ in_double(tensors[0]), fresh=True)


C2000, RMAT, PRUNED = "c2000_5_mat", "R-MAT 14 x32", "pruned 2048x2048"


def _spmm(name: str, columns: int, kind: str, on: tuple[str, ...], full: bool = False) -> Row:
    needs = (name,) if name.endswith("_mat") else ()
    make = partial(spmm, partial(of_data, name), columns, kind)
    return Row(f"{name}, N {columns}, {kind}", "sparse times dense", make, on, needs, full)


ROWS = [
    *(_spmm(name, n, "float32", GPU) for name, n in product((C2000, RMAT, PRUNED), (32, 128, 1024, 4096))),
    *(_spmm(name, n, "tf32", GPU) for name, n in product((C2000, PRUNED), (128, 4096))),
    *(_spmm(name, n, "fp16", GPU) for name, n in product((RMAT, PRUNED), (128, 4096))),
    *(_spmm(name, n, "float32", CPU) for name, n in product(("R-MAT 14 x8", "pruned 2048x512"), (8, 32, 128))),
    *(
        Row(f"100 x 100, 500 nonzeros, 16 columns, {call}", "sparse times dense", partial(small, call))
        for call in ("x @ b", "a kernel that is held")
    ),
    Row("R-MAT 14 x32, width 64", "sampled product", partial(sampled, partial(of_data, RMAT), 64), GPU),
    Row("R-MAT 16 x16, width 128", "sampled product", partial(sampled, partial(of_data, "R-MAT 16 x16"), 128), GPU),
    *(
        Row(
            f"{n}², {nnz // 1000} K nonzeros, width {width}",
            "sampled product",
            partial(sampled, partial(scattered, (n, n), nnz), width),
            CPU,
        )
        for n, nnz, width in ((20_000, 400_000, 64), (20_000, 400_000, 8), (10_000, 100_000, 32))
    ),
    Row(
        "R-MAT 14 x8 squared, places known",
        "sparse times sparse",
        partial(squared, partial(of_data, "R-MAT 14 x8")),
        GPU,
    ),
    Row(
        "20,000², 200 K nonzeros, squared, places known",
        "sparse times sparse",
        partial(squared, partial(scattered, (20_000, 20_000), 200_000)),
    ),
    Row(
        "20,000², 200 K nonzeros, squared, a new matrix",
        "sparse times sparse",
        partial(first_squared, (20_000, 20_000), 200_000),
    ),
]
