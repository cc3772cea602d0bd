"""Attention as a body, for tests of its kernels: tasks, patterns, and the same over all pairs in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import sparsetc as stc
from sparsetc import masks
from sparsetc.maps import kernel, pairs, task
from sparsetc.maps.body import Body
from sparsetc.maps.kernel import WalkKernel
from sparsetc.maps.pairs import Pairs, pairs_of
from sparsetc.maps.task import Task
from sparsetc.options import of_call
from sparsetc.pairwise import entries_of
from sparsetc.sparse_attention import _body

SMALL = masks.causal() & masks.sliding_window(40) | masks.global_tokens(3)
CPU = torch.device("cpu")


def scattered(rows: int, columns: int, share: float, seed: int = 0) -> torch.Tensor:
    """Which pairs meet: drawn one by one, but for row 3, which meets nothing."""
    meets = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < share
    meets[3] = False
    return meets


def in_blocks(rows: int, columns: int, side: int, places: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Which pairs meet: those of the blocks at these places."""
    meets = torch.zeros(rows, columns, dtype=torch.bool)
    for i, j in places:
        meets[i * side : (i + 1) * side, j * side : (j + 1) * side] = True
    return meets


PLACES = (0, 0), (1, 2), (0, 1), (2, 1)
PATTERNS: dict[str, Callable[[], tuple[Any, torch.Tensor]]] = {
    "mask": lambda: (SMALL, SMALL.dense(150)),
    "entries": lambda: _of_entries(SMALL.dense(100)),
    "scattered": lambda: _of_entries(scattered(60, 70, 0.02)),
    "by-row": lambda: _of_entries(scattered(15, 40, 0.1, seed=1)),
    "scattered-one-row": lambda: _of_entries(torch.arange(200)[None, :] % 3 == 0),
    "blocks-of-32": lambda: _of_blocks(in_blocks(90, 110, 32, PLACES), 32),
    "blocks-of-128": lambda: _of_blocks(in_blocks(300, 330, 128, PLACES), 128),
    "blocks-of-24": lambda: _of_blocks(in_blocks(60, 70, 24, ((0, 0), (1, 2))), 24),
    "one-entry": lambda: _of_entries(torch.arange(35)[:, None] * torch.arange(4) == 3 * 2),
}
"""What `attention` is given, and which pairs meet."""


def as_if_large(name: str, patch: pytest.MonkeyPatch) -> None:
    """Gather the columns of patterns whose name says so, which are too small for it, and maybe row by row."""
    if "scattered" in name or "by-row" in name:
        patch.setitem(pairs.PRICES, pairs.APART, 0.0)
        patch.setattr(task, "SMALL_ROW", 0)
    if "by-row" in name:
        patch.setattr(kernel, "GATHERED", {key: {} for key in kernel.GATHERED})


def _of_entries(meets: torch.Tensor) -> tuple[Any, torch.Tensor]:
    return stc.SparseTensor.from_dense(meets.float()), meets


def _of_blocks(meets: torch.Tensor, side: int) -> tuple[Any, torch.Tensor]:
    return stc.SparseTensor.from_dense(meets.float(), blocksize=(side, side)), meets


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meets: torch.Tensor, scale: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """Attention over all pairs; zeros for a query that meets nothing. A bias is one of all pairs."""
    some = meets.any(-1)[:, None]
    scores = q @ k.mT * scale if bias is None else q @ k.mT * scale + bias
    weights = torch.softmax(scores.masked_fill(~meets, -torch.inf).masked_fill(~some, 0.0), -1)
    return weights * some @ v


def kernels(
    given: Any, shape: tuple[int, int], dtype: torch.dtype, depth: int, width: int, bias: bool = False, heads: int = 2
) -> list[WalkKernel]:
    """Return the kernels of attention over a pattern: of the result, and of gradients by rows and by columns."""
    pairs = pairs_of(given, (heads,), shape, CPU, causal=False)
    if bias:
        pairs = pairs._replace(given=entries_of(pairs))
    rows, columns = shape
    sizes: dict[str, tuple[int, ...]] = {"q": (rows, depth), "k": (columns, depth), "v": (columns, width)}
    if bias:
        assert isinstance(pairs.given, stc.Pattern)
        sizes["bias"] = (pairs.given.nnz,)
    return kernels_of(_body(0.3, bias), pairs, [torch.empty(heads, *size, dtype=dtype) for size in sizes.values()])


def kernels_of(body: Body, pairs: Pairs, tensors: list[torch.Tensor], of_lse: bool = False) -> list[WalkKernel]:
    """Return the kernels of a body: of the result, and of gradients by rows and by columns."""
    found = Task(body, pairs, of_call({"backend": "triton"}), "attention").kernels(tensors)
    assert not found.refusal
    made = found.results(tensors)
    sums = torch.empty(found.heads.count, pairs.shape[0])
    saved = {"o": made["o"], "g_o": made["o"], "seed": torch.empty(1, dtype=torch.int64)}
    saved |= {"lse": sums, "delta": sums} if body.softmax else {}
    saved |= {"g_lse": sums} if of_lse else {}
    named = dict(zip(body.inputs, tensors, strict=True))
    kernels = [found.result, *found.of_gradients({**named, **saved}, [t.is_floating_point() for t in tensors])[0]]
    assert all(isinstance(kernel, WalkKernel) for kernel in kernels)
    return kernels  # type: ignore[return-value]


# -- forms of attention -----------------------------------------------------------------------------------------------


def mask_of(*sizes: int, share: float = 0.4) -> torch.Tensor:
    """Which pairs meet, drawn one by one."""
    return torch.rand(*sizes, generator=torch.Generator().manual_seed(5)) < share


def sparse_of(*sizes: int, share: float = 0.4) -> stc.SparseTensor:
    """The same as a sparse tensor."""
    return stc.SparseTensor.from_dense(mask_of(*sizes, share=share).float())


FORMS: dict[str, dict[str, Any]] = {
    "grouped": {"pattern": SMALL, "enable_gqa": True, "fewer": 2},
    "grouped-by-row": {"pattern": sparse_of(40, 90, share=0.02), "enable_gqa": True, "fewer": 1},
    "log-sums": {"pattern": sparse_of(40, 90, share=0.1), "return_lse": True},
    "dropout": {"pattern": SMALL, "dropout_p": 0.3},
    "dropout-grouped-scattered": {"pattern": sparse_of(40, 90, share=0.1), "dropout_p": 0.6, "fewer": 2},
    "by-head": {"pattern": mask_of(4, 40, 90), "return_lse": True},
    "by-batch-dropout": {"pattern": mask_of(2, 1, 40, 90), "dropout_p": 0.2},
    "padding": {"pattern": mask_of(2, 1, 1, 90), "is_causal": True},
    "entries-by-head": {"pattern": sparse_of(4, 40, 90), "biased": (2,), "return_lse": True},
    "entries-by-batch-scattered": {"pattern": sparse_of(2, 1, 40, 90, share=0.1), "biased": (), "fewer": 2},
    "entries-by-both": {"pattern": sparse_of(2, 4, 40, 90), "dropout_p": 0.1, "is_causal": True},
    "everything": {"pattern": None},
    "heads-behind-rows": {"pattern": SMALL, "behind": True},
    "scores": {"pattern": SMALL, "bias": lambda s, b, h, i, j: torch.tanh(s) * 3 + (j - i) * 0.1 + h - b, "fewer": 2},
}
"""Arguments of attention of 40 queries and 90 keys, 2 batches and 4 heads."""


def form_of_attention(name: str, device: torch.device) -> Callable[[], list[torch.Tensor]]:
    """Return a function that gives the results and all gradients of a form, of the same random numbers at each call."""
    form = {"enable_gqa": True} | FORMS[name]
    given, fewer, biased = form.pop("pattern"), form.pop("fewer", 4), form.pop("biased", None)
    behind = form.pop("behind", False)
    g = torch.Generator().manual_seed(1)
    sizes = [(2, 4, 40, 16), (2, fewer, 90, 16), (2, fewer, 90, 12)]
    sizes += [] if biased is None else [(*biased, given.nnz)]
    inputs = [torch.randn(size, generator=g).to(device).requires_grad_() for size in sizes]
    given = given.to(device) if isinstance(given, torch.Tensor | stc.SparseTensor) else given

    def both() -> list[torch.Tensor]:
        torch.manual_seed(0)
        of_heads = inputs[:3]
        if behind:  # as layers give them
            of_heads = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in of_heads]
        found = stc.attention(*of_heads, given, **form | ({"bias": inputs[3]} if len(inputs) > 3 else {}))
        results = [*found] if isinstance(found, tuple) else [found]
        if behind:
            results = [one.transpose(1, 2).flatten(2) for one in results]
        total = torch.zeros((), device=device)
        for result in results:
            weights = torch.linspace(-1, 1, result.numel(), device=device).view_as(result)
            total = total + (result.where(result.isfinite(), 0.0) * weights).sum()
        return [*results, *torch.autograd.grad(total, inputs)]

    return both


# -- functions of one's own -------------------------------------------------------------------------------------------


@dataclass
class Form:
    """What `map_entries` is given beside the function, and all tensors in it."""

    pattern: Any
    named: dict[str, Any]
    tensors: list[torch.Tensor]


MAPPED = ("poisson", "kernel-density", "edge-network", "stored", "vectors-only", "graph-attention-heads")


def mapped_cases(
    name: str, dtype: torch.dtype, device: torch.device = CPU
) -> tuple[Callable[..., Any], Form, Callable[[], torch.Tensor]]:
    """Return a function, what else `map_entries` takes, and the same over all pairs."""
    g = torch.Generator().manual_seed(7)
    meets = scattered(40, 50, 0.2, seed=1).to(device)
    pattern = stc.SparseTensor.from_dense(meets.to(dtype))

    def drawn(*sizes: int) -> torch.Tensor:
        return (torch.rand(sizes, generator=g, dtype=dtype) + 0.1).to(device).requires_grad_()

    def spread(entries: torch.Tensor) -> torch.Tensor:
        """Numbers by entry at their places among all pairs, and 1 elsewhere."""
        return torch.ones(40, 50, dtype=dtype, device=device).index_put(tuple(meets.nonzero().T), entries)

    def sums(z: torch.Tensor) -> torch.Tensor:
        return torch.where(meets, z, 0.0).sum(-1)

    if name == "poisson":
        a, b, x = drawn(40, 6), drawn(50, 6), drawn(pattern.nnz)
        form = {"products": {"m": (a, b)}, "entries": {"x": x}}
        loss = lambda m, x: m - x * torch.log(m)  # noqa: E731
        return loss, Form(pattern, form, [a, b, x]), lambda: sums(loss(a @ b.T, spread(x)))
    if name == "kernel-density":
        p, q = drawn(40, 3), drawn(50, 3)

        def near(s: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return torch.exp(s - (i + j) / 2)

        norms = {"rows": {"i": p.square().sum(-1)}, "columns": {"j": q.square().sum(-1)}}
        dense = lambda: sums(torch.exp(-(p[:, None] - q[None]).square().sum(-1) / 2))  # noqa: E731
        return near, Form(pattern, {"products": {"s": (p, q)}, **norms}, [p, q]), dense
    if name == "edge-network":
        a, b, v, w, x = drawn(40, 5), drawn(50, 5), drawn(50, 4), drawn(50), drawn(pattern.nnz)
        gate = lambda s, w, x: torch.nn.functional.silu(s * x - w)  # noqa: E731
        form = {"products": {"s": (a, b)}, "columns": {"w": w}, "entries": {"x": x}, "values": v}
        return (
            gate,
            Form(pattern, form, [a, b, v, w, x]),
            lambda: torch.where(meets, gate(a @ b.T, w, spread(x)), 0.0) @ v,
        )
    if name == "stored":
        a, b, r = drawn(2, 40, 5), drawn(2, 50, 5), drawn(40)
        form = {"products": {"s": (a, b)}, "rows": {"r": r}, "output": "sparse"}
        product = lambda s, r: torch.tanh(s) * r  # noqa: E731
        whole = lambda: torch.where(meets, product(a @ b.mT, r[:, None]), 0.0).permute(1, 2, 0)  # noqa: E731
        return product, Form(pattern, form, [a, b, r]), whole
    if name == "vectors-only":
        i, j = drawn(40), drawn(50)
        apart = lambda i, j: (i - j) ** 2  # noqa: E731
        return (
            apart,
            Form(pattern, {"rows": {"i": i}, "columns": {"j": j}}, [i, j]),
            lambda: sums(apart(i[:, None], j[None])),
        )
    i, j, v = drawn(2, 3, 40), drawn(3, 50), drawn(2, 1, 50, 4)
    score = lambda i, j: torch.nn.functional.leaky_relu(i - j, 0.2)  # noqa: E731
    form = {"rows": {"i": i}, "columns": {"j": j}, "softmax": True, "values": v}
    return (
        score,
        Form(pattern, form, [i, j, v]),
        lambda: (
            torch.where(meets, score(i[..., None], j[:, None]), -torch.inf)
            .where(meets.any(-1, keepdim=True), 0.0)
            .softmax(-1)
            .where(meets, 0.0)
            @ v
        ),
    )


READS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "slopes": (lambda: torch.tensor([0.5, 0.25]), lambda t: lambda s, b, h, i, j: s + t[h] * (j - i)),
    "distances": (
        lambda: torch.randn(2, 199, generator=torch.Generator().manual_seed(5)),
        lambda t: lambda s, b, h, i, j: s + t[h, (i - j).clamp(-99, 99) + 99],
    ),
    "buckets": (
        lambda: torch.randn(9, generator=torch.Generator().manual_seed(6)),
        lambda t: lambda s, b, h, i, j: s + t[torch.log2((i - j).abs().float() + 1).to(torch.int64)] * t.exp()[0],
    ),
    "relative": (
        lambda: torch.randn(2, 199, generator=torch.Generator().manual_seed(7)),
        lambda t: lambda s, b, h, i, j: s * t[h, i - j].sigmoid(),
    ),
    "of both": (
        lambda: torch.randn(7, 100, 2, generator=torch.Generator().manual_seed(8)),
        lambda t: (
            lambda s, b, h, i, j: s + t[(j - 2 * i) % 7, 3, h] + t[2, j, h] * t[(i - j).clamp(-9, 3) // 2, i % 9, b]
        ),
    ),
    "temperature": (lambda: torch.tensor(0.7), lambda t: lambda s, b, h, i, j: torch.tanh(s / t) * t),
    "documents": (
        lambda: (torch.arange(100) // 40 + (1 << 40)).expand(2, -1),  # equal in float32
        lambda t: lambda s, b, h, i, j: torch.where((t[b, i] == t[b, j]) | (j < 2), s, -torch.inf),
    ),
    "times": (
        lambda: torch.arange(100) * 3 + (1 << 40),
        lambda t: lambda s, b, h, i, j: s - 0.1 * (t[i] - t[j]) + (t[i] % 5),
    ),
    "flags": (lambda: torch.arange(100) % 3 > 0, lambda t: lambda s, b, h, i, j: torch.where(t[j] & (i > 4), s, s * 2)),
    "large": (
        lambda: torch.tensor([0.1, 0.2]),
        lambda t: lambda s, b, h, i, j: s + t[h] * ((i * 1000003 + j * 7919) % 9973 // 997),
    ),
    "whole": (lambda: torch.tensor([1, 3]), lambda t: lambda s, b, h, i, j: s + 0.1 * (i // (t[0] + 2) - (j & 1)) % 47),
}
"""Functions of scores that read a tensor: the tensor, and the function of it."""


def reading(
    name: str, lead: tuple[int, ...], device: torch.device = CPU
) -> tuple[list[torch.Tensor], Any, Callable[[Any], torch.Tensor]]:
    """Return operands and what the function reads, the function, and attention over all pairs in float64."""
    table, made = READS[name]
    g = torch.Generator().manual_seed(1)
    inputs = [torch.randn(*lead, 100, 16, generator=g).to(device).requires_grad_() for _ in range(3)]
    read = table().to(device)
    if read.is_floating_point():
        inputs.append(read.requires_grad_())

    def dense(given: Any) -> torch.Tensor:
        exact = [t.double() for t in inputs]
        b, h, i, j = (torch.arange(n, device=device).view(-1, *[1] * (3 - k)) for k, n in enumerate((*lead, 100, 100)))
        scores = made(exact[3] if len(inputs) > 3 else read)(exact[0] @ exact[1].mT / 4, b, h, i, j)
        return scores.masked_fill(~given.dense(100).to(device), -torch.inf).softmax(-1) @ exact[2]

    return inputs, made(read), dense
