"""What users of torch, scipy, pydata/sparse, numpy and PyG write, of a SparseTensor: its value, and gradients.

Each spelling is a function of two matrices, a dense matrix of their shape and a vector of their columns. It is called
with sparse matrices (of nonzeros, and in blocks) and, as the reference, with dense ones; where torch has no such
spelling for dense ones, a second function says what is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_arithmetic import KINDS, dense, sparse

import sparsetc as stc

Spelling = Callable[..., Any]

TORCH: dict[str, Spelling] = {
    "A + B": lambda a, b, d, v: a + b,
    "A - B": lambda a, b, d, v: a - b,
    "A * B": lambda a, b, d, v: a * b,
    "A * 2": lambda a, b, d, v: a * 2,
    "2 * A": lambda a, b, d, v: 2 * a,
    "A / 4": lambda a, b, d, v: a / 4,
    "-A": lambda a, b, d, v: -a,
    "A ** 2": lambda a, b, d, v: a**2,
    "abs(A)": lambda a, b, d, v: abs(a),
    "A * D": lambda a, b, d, v: a * d,
    "D * A": lambda a, b, d, v: d * a,
    "A / D": lambda a, b, d, v: a / d,
    "A * v": lambda a, b, d, v: a * v,
    "A @ v": lambda a, b, d, v: a @ v,
    "A @ D.T": lambda a, b, d, v: a @ d.T,
    "D.T @ A": lambda a, b, d, v: d.T @ a,
    "A.T @ D": lambda a, b, d, v: a.T @ d,
    "A @ B.T": lambda a, b, d, v: a @ b.T,
    "v @ A.T": lambda a, b, d, v: v @ a.T,
    "A.mT": lambda a, b, d, v: a.mT,
    "A.t()": lambda a, b, d, v: a.t(),
    "A.sum()": lambda a, b, d, v: a.sum(),
    "A.sum(0)": lambda a, b, d, v: a.sum(0),
    "A.sum(1, keepdim=True)": lambda a, b, d, v: a.sum(1, keepdim=True),
    "A.mean(0)": lambda a, b, d, v: a.mean(0),
    "A.amax(1)": lambda a, b, d, v: a.amax(1),
    "A.amin(1)": lambda a, b, d, v: a.amin(1),
    "A.norm()": lambda a, b, d, v: a.norm(),
    "A[2]": lambda a, b, d, v: a[2],
    "A[1:3]": lambda a, b, d, v: a[1:3],
    "A[:, ::2]": lambda a, b, d, v: a[:, ::2],
    "A[..., None]": lambda a, b, d, v: a[..., None],
    "A[[2, 0, 2]]": lambda a, b, d, v: a[[2, 0, 2]],
    "A[1, 2]": lambda a, b, d, v: a[1, 2],
    "A[-1]": lambda a, b, d, v: a[-1],
    "A.float()": lambda a, b, d, v: a.float(),
    "A.to(float64)": lambda a, b, d, v: a.to(torch.float64),
    "A.cpu()": lambda a, b, d, v: a.cpu(),
    "A.clone()": lambda a, b, d, v: a.clone(),
    "A.permute(1, 0)": lambda a, b, d, v: a.permute(1, 0),
    "A.transpose(0, 1)": lambda a, b, d, v: a.transpose(0, 1),
    "A.reshape(-1)": lambda a, b, d, v: a.reshape(-1),
    "A.flatten()": lambda a, b, d, v: a.flatten(),
    "A.unsqueeze(0)": lambda a, b, d, v: a.unsqueeze(0),
    "A.unsqueeze(1).squeeze(1)": lambda a, b, d, v: a.unsqueeze(1).squeeze(1),
    "A.diagonal()": lambda a, b, d, v: a.diagonal(),
    "A.tril()": lambda a, b, d, v: a.tril(),
    "A.triu(1)": lambda a, b, d, v: a.triu(1),
    "torch.add(A, B)": lambda a, b, d, v: torch.add(a, b),
    "torch.mul(A, B)": lambda a, b, d, v: torch.mul(a, b),
    "torch.matmul(A, v)": lambda a, b, d, v: torch.matmul(a, v),
    "torch.mm(A, D.T)": lambda a, b, d, v: torch.mm(a, d.T),
    "torch.mv(A, v)": lambda a, b, d, v: torch.mv(a, v),
    "torch.sum(A, 0)": lambda a, b, d, v: torch.sum(a, 0),
    "torch.mean(A, 1)": lambda a, b, d, v: torch.mean(a, 1),
    "torch.cat([A, B])": lambda a, b, d, v: torch.cat([a, b]),
    "torch.stack([A, B])": lambda a, b, d, v: torch.stack([a, b]),
    "torch.permute(A, (1, 0))": lambda a, b, d, v: torch.permute(a, (1, 0)),
    "torch.einsum": lambda a, b, d, v: torch.einsum("ij,kj->ik", a, d),
    "torch.tensordot": lambda a, b, d, v: torch.tensordot(a, d.T, 1),
    "torch.relu(A)": lambda a, b, d, v: torch.relu(a),
    "torch.sin(A)": lambda a, b, d, v: torch.sin(a),
    "torch.kron(A, B)": lambda a, b, d, v: torch.kron(a, b),
    "torch.addmm": lambda a, b, d, v: torch.addmm(d[:, : d.shape[0]], a, d.T, beta=2, alpha=3),
    "torch.nn.functional.linear": lambda a, b, d, v: torch.nn.functional.linear(d, a),
    "torch.bmm": lambda a, b, d, v: torch.bmm(a.unsqueeze(0), d.T.unsqueeze(0)),
}
OTHERS: dict[str, tuple[Spelling, Spelling]] = {
    "np.sum(A, axis=0)": (lambda a, b, d, v: np.sum(a, axis=0), lambda a, b, d, v: a.sum(0)),
    "np.multiply(A, B)": (lambda a, b, d, v: np.multiply(a, b), lambda a, b, d, v: a * b),
    "np.sqrt(abs(A))": (
        lambda a, b, d, v: np.sqrt(abs(a) * 1),
        lambda a, b, d, v: torch.where(a == 0, 0, abs(a)).sqrt(),
    ),
    "A.dot of scipy, A @ B.T": (lambda a, b, d, v: a @ b.T.to_scipy(), lambda a, b, d, v: a @ b.T),
    "A.sum(axis=1)": (lambda a, b, d, v: a.sum(axis=1), lambda a, b, d, v: a.sum(1)),
    "A.sum(axis=1, keepdims=True)": (
        lambda a, b, d, v: a.sum(axis=1, keepdims=True),
        lambda a, b, d, v: a.sum(1, keepdim=True),
    ),
    "A.max of pydata, amax(axis)": (lambda a, b, d, v: a.amax(axis=0), lambda a, b, d, v: a.amax(0)),
    "A > 2": (lambda a, b, d, v: a * (a > 2), lambda a, b, d, v: a * (a > 2)),
    "A[A > 2]": (lambda a, b, d, v: a[a > 2], lambda a, b, d, v: torch.where(a > 2, a, 0)),
    "A.clip(-2, 3)": (lambda a, b, d, v: a.clip(-2, 3), lambda a, b, d, v: a.clamp(-2, 3)),
    "torch.sparse.mm": (lambda a, b, d, v: torch.sparse.mm(a, d.T), lambda a, b, d, v: a @ d.T),
    "torch.sparse.sum": (lambda a, b, d, v: torch.sparse.sum(a, 0), lambda a, b, d, v: a.sum(0)),
    "torch.sparse.softmax": (
        lambda a, b, d, v: torch.sparse.softmax(a, 1),
        lambda a, b, d, v: torch.nan_to_num(torch.where(a == 0, -torch.inf, a).softmax(1)),
    ),
    "torch.sparse.sampled_addmm": (
        lambda a, b, d, v: torch.sparse.sampled_addmm(a, d, d.T @ d, beta=2),
        lambda a, b, d, v: torch.where(a == 0, 0, 2 * a + d @ (d.T @ d)),
    ),
    "stc.where": (lambda a, b, d, v: stc.where(a > 2, a, 0), lambda a, b, d, v: torch.where(a > 2, a, 0)),
    "PyG: neighbours' sums": (
        lambda a, b, d, v: stc.einsum("ij,jr->ir", a, d.T, reduce="sum", output="dense"),
        lambda a, b, d, v: a @ d.T,
    ),
    "PyG: neighbours' means": (
        lambda a, b, d, v: stc.einsum("ij,jr->ir", a, d.T, reduce="mean", output="dense"),
        lambda a, b, d, v: (a @ d.T) / (a != 0).sum(1, keepdim=True).clamp(min=1),
    ),
    "DGL: edges' products": (lambda a, b, d, v: stc.sddmm(a, d, d.T @ d), lambda a, b, d, v: a * (d @ (d.T @ d).T)),
    "tensorly: mttkrp": (lambda a, b, d, v: stc.mttkrp(a, [None, d.T], 0), lambda a, b, d, v: a @ d.T),
}
OF_ENTRIES = (
    *("A.amax(1)", "np.sqrt(abs(A))", "torch.sparse.softmax", "torch.sparse.sampled_addmm", "PyG: neighbours' means"),
)
"""To which the zeros that blocks store are entries, or of which those have another gradient."""
ALL: dict[str, tuple[Spelling, Spelling]] = {**{name: (one, one) for name, one in TORCH.items()}, **OTHERS}


@pytest.mark.parametrize(
    ("kind", "name"), [*(("nonzeros", n) for n in ALL), *(("blocks", n) for n in ALL if n not in OF_ENTRIES)]
)
def test_a_spelling(kind: str, name: str) -> None:
    ours, reference = ALL[name]
    shape = KINDS["blocks"]
    a, b, d = (dense(seed, shape, share) for seed, share in ((0, 0.4), (1, 0.4), (2, 1.0)))
    x, y = sparse(a, kind), sparse(b, kind)
    values = x.values.clone().requires_grad_()
    found = ours(x.with_values(values), y, d, d[0])
    a.requires_grad_()
    expected = reference(a, b, d, d[0])
    found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
    torch.testing.assert_close(found, expected, check_dtype=True)
    if expected.requires_grad:
        weights = torch.rand_like(expected)
        (grad,) = torch.autograd.grad((expected * weights).sum(), a)
        (at_entries,) = torch.autograd.grad((found * weights).sum(), values)
        entries = x.with_values(torch.ones_like(values)).to_dense()
        torch.testing.assert_close(x.with_values(at_entries).to_dense(), grad * entries)
