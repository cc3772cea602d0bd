"""What users of torch, scipy, pydata/sparse, numpy and PyG write, of a SparseTensor: its value, and gradients.

Each spelling is a function of two matrices, a dense matrix of their shape and a vector of their columns. It is called
with sparse matrices (of nonzeros, and in blocks) and, as the reference, with dense ones; where torch has no such
spelling for dense ones, a second function says what is meant.
"""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_arithmetic import KINDS, dense, sparse
from torch.nn import functional
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

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
LEARNED = (
    *("A.var(1)", "torch.std(A, 0, keepdim=True)", "torch.var(A)", "torch.trace(A)", "A.diag(1)", "A.diag()"),
    *(
        "torch.flip(A, (0, 1))",
        "torch.flip(A, (1,))",
        "torch.roll(A, (1, -2), (0, 1))",
        "A.roll(3)",
        "A[:1].expand(3, 4, 6)",
        "A.select(1, 2)",
    ),
    *(
        "torch.split(A, 4, 1)[1]",
        "A.split([1, 3])[1]",
        "A.chunk(4, 1)[2]",
        "torch.unbind(A)[2]",
        "A[None].movedim(0, 2)",
    ),
    *("F.leaky_relu(A, 0.1)", "F.gelu(A)", "F.silu(A)", "F.elu(A)", "F.dropout(A, 0.5, False)", "torch.linalg.norm(A)"),
    *(
        "torch.linalg.norm(A, 1, 1)",
        "torch.linalg.norm(A, 'fro')",
        "torch.block_diag(A, B)",
        "A[:1] + B",
        "A[:, :1] * B",
    ),
    *(
        "A[:1] * D",
        "torch.maximum(A, B)",
        "A.minimum(B * 2)",
        "A.sin()",
        "A.add(B)",
        "A.mul(2)",
        "A.mm(B.T)",
        "A.neg()",
    ),
    *("A.where(B > 1, B)", "A.div(4)", "A.tanh()", "A.sum(0, dtype=torch.float32)", "(A * 1j).conj().imag", "A.mv(v)"),
)
"""Methods and functions of torch, with gradients."""
PLAIN = (
    *(
        "A.max()",
        "A.max(1).values",
        "A.min(0).indices",
        "torch.max(A, B)",
        "A.argmax(1)",
        "torch.argmin(A, 0, keepdim=True)",
    ),
    *("A.argmax()", "torch.var(A, 1, correction=0)", "A.std(1, False)", "A.any(1)", "torch.all(A, 0)", "torch.any(A)"),
    *(
        "torch.topk(A, 3, 0, largest=False).values",
        "torch.isnan(A)",
        "(A * (1 + 2j)).real",
        "A.gt(1)",
        "A != B",
        "A < B",
    ),
    *(
        "torch.logical_or(A, B)",
        "A.logical_and(B)",
        "A.logical_xor(B)",
        "(A > 1) | (B > 1)",
        "torch.sum(A.long(), 1, dtype=torch.int32)",
    ),
    *(
        "torch.equal(A, A * 1)",
        "torch.equal(A, B)",
        "torch.equal(A, A[:1])",
        "torch.allclose(A, A * (1 + 1e-7))",
        "A.equal(A)",
    ),
    *("torch.allclose(A, B)", "A[:1] > B", "A.topk(2, 1).values", "A.long().topk(2).values", "F.dropout(A, 1.0, True)"),
)
"""Those that give bools, integers or positions."""
TORCH |= {text: eval(f"lambda A, B, D, v: {text}", {"torch": torch, "F": functional}) for text in LEARNED + PLAIN}
NUMPY = (
    *(
        "np.sum(A, 0)",
        "np.mean(A, axis=1, keepdims=True)",
        "np.max(A)",
        "np.max(A, axis=0)",
        "np.min(A, 1, keepdims=True)",
    ),
    *(
        "np.var(A, 1)",
        "np.std(A, axis=0, ddof=1)",
        "np.any(A, axis=1)",
        "np.all(A)",
        "np.argmax(A, axis=1)",
        "np.argmin(A)",
    ),
    *(
        "np.size(A)",
        "np.size(A, 1)",
        "np.shape(A)",
        "np.ndim(A)",
        "np.count_nonzero(A, axis=0)",
        "np.trace(A)",
        "np.diag(A, 1)",
    ),
    *(
        "np.array_equal(A, A * 1)",
        "np.array_equal(A, B)",
        "np.array_equal(A, D)",
        "np.allclose(A, A)",
        "np.round(A / 3, 1)",
    ),
    *(
        "np.transpose(A)",
        "np.transpose(A, (0, 1))",
        "np.swapaxes(A, 0, 1)",
        "np.moveaxis(A[None], 0, 2)",
        "np.ravel(A)",
    ),
    *(
        "np.concatenate([A, B], axis=1)",
        "np.stack([A, B])",
        "np.kron(A, B)",
        "np.einsum('ij,kj->ik', A, D)",
        "np.dot(A, D.T)",
    ),
    *("np.tensordot(A, D.T, axes=1)", "np.where(A > 1, A, B)", "np.clip(A, -1, 1)", "np.clip(A, a_min=-1, a_max=2)"),
    *("np.linalg.norm(A)", "np.linalg.norm(A, axis=1)", "np.flip(A, 1)", "np.roll(A, 1, axis=0)", "np.nonzero(A)[1]"),
    *(
        "np.expand_dims(A, 1)",
        "np.broadcast_to(A[:1], (4, 6))",
        "np.real(A)",
        "np.isnan(A)",
        "np.maximum(A, B)",
        "np.copy(A)",
    ),
    *("np.triu(A, k=1)", "np.diagonal(A, axis1=1, axis2=0)", "np.logical_or(A, B)", "np.sum(A, dtype=np.float32)"),
    *(
        "np.conj(A)",
        "np.add(A, B)",
        "np.squeeze(A[None], axis=0)",
        "np.reshape(A, (6, 4))",
        "np.abs(A)",
        "np.bitwise_or(A > 1, B > 1)",
    ),
)
"""Functions of numpy, to be compared with what it makes of ndarrays."""
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
    if isinstance(expected, bool):
        assert found is expected
        return
    torch.testing.assert_close(found, expected, check_dtype=True)
    if expected.requires_grad and name not in PLAIN:
        weights = torch.rand_like(expected)
        (grad,) = torch.autograd.grad((expected * weights).sum(), a)
        (at_entries,) = torch.autograd.grad((found * weights).sum(), values)
        entries = x.with_values(torch.ones_like(values)).to_dense()
        torch.testing.assert_close(x.with_values(at_entries).to_dense(), grad * entries)


@pytest.mark.parametrize("text", NUMPY)
def test_a_function_of_numpy(text: str) -> None:
    arrays = {"A": dense(0, (4, 6)), "B": dense(1, (4, 6)), "D": dense(2, (4, 6), 1.0)}
    expected = eval(text, {"np": np, **{name: array.numpy() for name, array in arrays.items()}})
    arrays["D"] = arrays["D"].numpy()
    found = eval(text, {"np": np, **arrays, "A": sparse(arrays["A"]), "B": sparse(arrays["B"])})
    found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
    if isinstance(expected, bool | int | tuple):
        assert found == expected
    else:
        np.testing.assert_allclose(found.numpy(), expected)
        assert found.numpy().dtype == expected.dtype


@pytest.mark.parametrize("seed", range(40))
def test_the_first_of_equal_elements(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    share = torch.rand((), generator=g)
    given = torch.randint(-2, 3, (3, 6), generator=g) * (torch.rand(3, 6, generator=g) < share)
    given = given.to((torch.float32, torch.int64, torch.int8)[seed % 3]) if seed % 4 else -given.abs()
    x = stc.SparseTensor.from_dense(given, mask=(given != 0) | (torch.eye(3, 6) != 0))  # with zeros that are stored
    for mode, size in enumerate(given.shape):
        for largest in (True, False):
            expected = given.sort(dim=mode, descending=largest, stable=True)
            k = seed % size + 1
            found = x.topk(k, mode, largest)
            assert torch.equal(found.values, expected.values.narrow(mode, 0, k))
            assert torch.equal(found.indices, expected.indices.narrow(mode, 0, k))


def test_nan_is_an_extremum_of_either_kind_and_the_last_of_the_least() -> None:
    given = torch.tensor([[torch.nan, 0, 2], [1, torch.nan, torch.nan], [torch.inf, -torch.inf, 3]])
    x = stc.SparseTensor.from_dense(given)
    assert x.argmin().item() == given.argmin().item() == 0
    for largest in (True, False):
        for found, expected in (
            (x.topk(3, 1, largest), given.topk(3, 1, largest)),
            (x.max(1), given.max(1)) if largest else (x.min(1), given.min(1)),
        ):
            torch.testing.assert_close(found.values, expected.values, equal_nan=True)
            gathered = given.gather(1, found.indices.reshape(3, -1)).view_as(expected.values)
            torch.testing.assert_close(gathered, expected.values, equal_nan=True)


def test_the_largest_of_a_batch() -> None:
    x = stc.SparseTensor.from_dense(torch.tensor([[1.0, 0, 2], [0, -1, 0]]))
    batch = torch.stack((x.values, -x.values))
    for call in (lambda t: t.amax(1), lambda t: t.max(1).values, lambda t: t.topk(2, 1).values[:, 0]):
        found = torch.func.vmap(lambda values, call=call: call(x.with_values(values)))(batch)
        assert found.tolist() == [[2.0, 0.0], [0.0, 1.0]]


def test_what_torch_does_in_place_is_refused() -> None:
    x = sparse(dense(0))
    for call in (lambda: torch.relu_(x), lambda: x.__setitem__(0, 1.0)):
        with pytest.raises(stc.DtypeError, match="not changed in place"):
            call()
    with pytest.raises(AttributeError, match="not changed in place, as add_ would"):
        x.add_(1)
    assert not hasattr(x, "nothing_")


def test_least_sums() -> None:
    given, far = dense(0), dense(1)[:, :5].T.contiguous()
    far = torch.cat((far, far[:1]))
    expected = torch.where(given == 0, torch.inf, given)[:, :, None] + far
    torch.testing.assert_close(stc.min_plus(sparse(given), far), expected.amin(1))
    torch.testing.assert_close(stc.min_plus(sparse(given), far[:, 0]), expected.amin(1)[:, 0])
    with pytest.raises(stc.DtypeError, match="min_plus takes floating point"):
        stc.min_plus(sparse(given.long()), far.long())


def test_tensors_are_compared_as_torchs() -> None:
    x, y = sparse(dense(0)), sparse(dense(1))
    stc.testing.assert_close(x, x + y * 1e-9)
    for other in (y, x.float(), x[:4]):
        with pytest.raises(AssertionError):
            stc.testing.assert_close(x, other)
    stc.testing.assert_close(x * torch.nan, x * torch.nan, equal_nan=True)


def _whole() -> stc.SparseTensor:
    return stc.SparseTensor([[0, 1, 1], [2, 0, 1]], [1.0, 2.0, 3.0], (2, 3))


def _module(x: stc.SparseTensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("x", x)  # type: ignore[arg-type]
    return module


def _loaded(x: stc.SparseTensor) -> Any:
    module = _module(0 * x)
    module.load_state_dict(_module(x).state_dict())
    return module.x


def _unpickled(x: stc.SparseTensor) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def _trained(x: stc.SparseTensor) -> Any:
    x = x.clone().requires_grad_()
    optimizer = torch.optim.SGD([x.values], 1.0)
    (x * x).sum().backward()
    optimizer.step()
    return x.detach()


def _checkpointed(x: stc.SparseTensor) -> Any:
    values = x.values.clone().requires_grad_()
    checkpoint(lambda v: (x.with_values(v) ** 2).sum(), values, use_reentrant=False).backward()
    return x.with_values(values.grad)


def _hooked(x: stc.SparseTensor) -> Any:
    x = x.clone().requires_grad_()
    x.register_hook(lambda gradient: 3 * gradient)
    x.sum().backward()
    return x.grad


THINGS: dict[str, tuple[Spelling, Spelling]] = {
    "deepcopy": (copy.deepcopy, lambda d: d),
    "copy": (copy.copy, lambda d: d),
    "pickle": (lambda x: pickle.loads(pickle.dumps(x)), lambda d: d),
    "torch.save and load": (_unpickled, lambda d: d),
    "share_memory_": (lambda x: x.share_memory_(), lambda d: d),
    "buffer": (lambda x: _module(x).x, lambda d: d),
    "buffer, double": (lambda x: _module(x).double().x, lambda d: d.double()),
    "buffer, half": (lambda x: _module(x).half().x, lambda d: d.half()),
    "buffer, loaded": (_loaded, lambda d: d),
    "buffer, copied": (lambda x: copy.deepcopy(_module(x)).x, lambda d: d),
    "buffers": (lambda x: next(_module(x).buffers()), lambda d: d),
    "named_buffers": (lambda x: dict(_module(x).named_buffers())["x"], lambda d: d),
    "state_dict": (lambda x: _module(x).state_dict()["x"], lambda d: d),
    "optimizer": (_trained, lambda d: -d),
    "checkpoint": (_checkpointed, lambda d: 2 * d),
    "hook": (_hooked, lambda d: torch.where(d != 0, 3.0, 0.0)),
    "grad": (lambda x: torch.autograd.grad((x.requires_grad_() * x).sum(), x.values)[0], lambda d: 2 * d[d != 0]),
    "no_grad": (lambda x: torch.no_grad()(lambda: 2 * x.requires_grad_())().detach(), lambda d: 2 * d),
    "inference_mode": (lambda x: torch.inference_mode()(lambda: x + x)(), lambda d: d + d),
    "func.grad": (
        lambda x: torch.func.grad(lambda v: (x.with_values(v) ** 2).sum())(x.values),
        lambda d: 2 * d[d != 0],
    ),
    "vmap": (lambda x: torch.vmap(lambda v: x @ v)(torch.eye(3)), lambda d: d.T),
    "jacrev": (lambda x: torch.func.jacrev(lambda v: x @ v)(torch.ones(3)), lambda d: d),
    "tree_map": (lambda x: tree_map(lambda t: 2 * t, {"a": x})["a"], lambda d: 2 * d),
    "Linear": (lambda x: _linear(x), lambda d: d.sum(1)[:, None].expand(2, 2)),
    "Sequential": (lambda x: torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())(x), lambda d: d.relu().tanh()),
    "Dropout": (lambda x: torch.nn.Dropout(0.5).eval()(x), lambda d: d),
    "collate": (lambda x: stc.nn.collate([x, x]), lambda d: torch.block_diag(d, d)),
    "dictionary": (lambda x: {x: x}[x], lambda d: d),
    "in": (lambda x: torch.tensor(x in [x, 0 * x]), lambda d: torch.tensor(True)),
    "weak reference": (lambda x: weakref.ref(x)(), lambda d: d),
    "iteration": (lambda x: torch.stack([row.to_dense() for row in x]), lambda d: d),
    "reversed": (lambda x: torch.stack([row.to_dense() for row in reversed(x)]), lambda d: d.flip(0)),
    "len": (lambda x: torch.tensor(len(x)), lambda d: torch.tensor(2)),
    "float": (lambda x: torch.tensor(float(x[1, 1])), lambda d: d[1, 1]),
    "f-string": (lambda x: torch.tensor(float(f"{x.sum():.2f}")), lambda d: d.sum()),
    "numel": (lambda x: torch.tensor(torch.numel(x)), lambda d: torch.tensor(6)),
    "equal": (lambda x: torch.tensor(torch.equal(x, x.clone())), lambda d: torch.tensor(True)),
    "allclose": (lambda x: torch.tensor(torch.allclose(x, x + 0.0)), lambda d: torch.tensor(True)),
    "DLPack of parts": (lambda x: torch.from_dlpack(x.values), lambda d: d[d != 0]),
    "vstack": (lambda x: torch.vstack([x, x]), lambda d: torch.vstack([d, d])),
    "vstack of vectors": (lambda x: torch.vstack([x[0], x[1]]), lambda d: torch.vstack([d[0], d[1]])),
    "block_diag of vectors": (lambda x: torch.block_diag(x[0], x), lambda d: torch.block_diag(d[0], d)),
    "hstack": (lambda x: torch.hstack([x, x]), lambda d: torch.hstack([d, d])),
    "swapaxes": (lambda x: x.swapaxes(0, 1), lambda d: d.T),
    "moveaxis": (lambda x: torch.moveaxis(x[None], 0, 2), lambda d: d[..., None]),
}
"""What torch does to tensors."""


def _linear(x: stc.SparseTensor) -> Any:
    layer = torch.nn.Linear(3, 2, bias=False).requires_grad_(False)
    layer.weight.fill_(1.0)
    return layer(x)


@pytest.mark.parametrize("name", THINGS)
def test_what_torch_does_to_tensors(name: str) -> None:
    does, means = THINGS[name]
    found, expected = does(_whole()), means(_whole().to_dense())
    torch.testing.assert_close(found.to_dense() if isinstance(found, stc.SparseTensor) else found, expected)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x.cumsum(0), r"no cumsum: call .to_dense\(\), or compute with .values"),
        (lambda x: x.numpy(), r"no numpy: .to_dense\(\).numpy\(\)"),
        (lambda x: x.backward(), r"as .sum\(\).backward\(\)"),
        (lambda x: x._nnz(), "take .nnz"),
        (lambda x: x.to_sparse_csr(), r"to_torch\(layout\)"),
        (lambda x: x.fill_(0), "not changed in place, as fill_ would"),
        (lambda x: x.no_such_thing, "object has no attribute 'no_such_thing'"),
    ],
)
def test_what_a_sparse_tensor_has_not(call: Spelling, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        call(_whole())
