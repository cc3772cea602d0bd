"""Attention over masks and graphs, and a sampled loss, beside FlexAttention, torch's attention, gather and scatter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import common
import synthetic
import torch
from torch.nn.functional import scaled_dot_product_attention

import sparsetc as stc
from instead_rows.calls import later, plain_and_compiled, quiet, step
from instead_rows.operands import generator, normal, positive, with_loops
from instead_rows.row import GPU, LIMIT, Call, Row, Task

HEADS, WIDTH = 8, 64
HALF = torch.float16
MASKS = ("causal", "window 256 and 64 global", *(f"blocks of {side}, 10 %" for side in (128, 64, 32)))
MaskMod = Callable[[Any, Any, Any, Any], torch.Tensor]
"""Which positions meet, as FlexAttention asks: of batch, head, query and key."""


def mask_of(kind: str, n: int) -> MaskMod:
    """A mask by its name."""
    if kind == "causal":
        return lambda b, h, q, k: q >= k
    if kind.startswith("window"):
        return lambda b, h, q, k: ((q - k).abs() <= 128) | (k < 64) | (q < 64)
    side = int(kind.split()[2].strip(","))
    table = torch.rand(n // side, n // side, generator=generator(), device=common.DEVICE) < 0.1
    table |= torch.eye(n // side, dtype=torch.bool, device=common.DEVICE)
    return lambda b, h, q, k: table[q // side, k // side]


def mask_rows(mask: MaskMod, n: int, rows: int = 1024) -> Iterator[tuple[slice, torch.Tensor]]:
    """The dense mask, some rows at a time."""
    i = torch.arange(n, device=common.DEVICE)
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        yield part, mask(None, None, i[part, None], i[None])


def pattern_of(mask: MaskMod, n: int) -> stc.SparseTensor:
    """The mask's positions as a sparse tensor."""
    parts = []
    for part, dense in mask_rows(mask, n):
        row, column = dense.nonzero().T
        parts.append(torch.stack((row + part.start, column)))
    coords = torch.cat(parts, 1)
    return stc.SparseTensor(coords, torch.ones(coords.shape[1], dtype=HALF, device=coords.device), (n, n))


def in_float64(
    operands: tuple[torch.Tensor, ...], masks: Iterator[tuple[slice, torch.Tensor]], g: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """The result, and where there is a gradient g of it those of q, k and v, some rows at a time."""
    q, k, v = (t.detach().double().requires_grad_(g is not None) for t in operands)
    outs, sums = [], [torch.zeros_like(t) for t in (q, k, v)]
    for part, mask in masks:
        scores = q[..., part, :] @ k.mT * q.shape[-1] ** -0.5
        out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        outs.append(out.detach())
        if g is not None:
            gradients = torch.autograd.grad(out, (q, k, v), g[..., part, :].double())
            sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
    return torch.cat(outs, -2), *(sums if g is not None else ())


def flex(mask: MaskMod, side: int, operands: tuple[torch.Tensor, ...]) -> Call:
    """FlexAttention with a mask of blocks of a side, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = operands[0].shape[-2]
    blocks = create_block_mask(mask, None, None, n, n, device=common.DEVICE, BLOCK_SIZE=side)
    options = {"BLOCK_M": 64, "BLOCK_N": 64} if side == 64 else None
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(*(t[None] for t in operands), block_mask=blocks, kernel_options=options)[0]


def dense(kind: str, mask: MaskMod, operands: tuple[torch.Tensor, ...]) -> Call:
    """Attention over all pairs, with a mask."""
    if kind == "causal":
        return lambda: scaled_dot_product_attention(*(t[None] for t in operands), is_causal=True)[0]
    whole = torch.cat([rows for _, rows in mask_rows(mask, operands[0].shape[-2])])
    return lambda: scaled_dot_product_attention(*(t[None] for t in operands), attn_mask=whole)[0]


def of_mask(kind: str, n: int, backward: bool, as_block_mask: bool = False) -> Task:
    """Attention over a mask, forward or forward and backward."""
    mask = mask_of(kind, n)
    q, k, v, g = (normal(HEADS, n, WIDTH, dtype=HALF, seed=seed) for seed in range(4))
    operands = tuple(t.requires_grad_(backward) for t in (q, k, v))
    if as_block_mask:
        from torch.nn.attention.flex_attention import create_block_mask

        pattern = create_block_mask(mask, None, None, n, n, device=common.DEVICE)
    else:
        pattern = pattern_of(mask, n)

    def ready(call: Call) -> Call:
        return step(call, operands, g) if backward else quiet(call)

    instead = {f"FlexAttention, blocks of {side}": partial(flex, mask, side, operands) for side in (128, 64)}
    instead["scaled_dot_product_attention"] = partial(dense, kind, mask, operands)
    return Task(
        ready(lambda: stc.attention(q, k, v, pattern)),
        {name: ready(later(build)) for name, build in instead.items()},
        lambda: in_float64(operands, mask_rows(mask, n), g if backward else None),
        LIMIT[HALF],
    )


def by_scatter(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """Gather an edge's rows, and scatter: sums in float32."""
    target, source = edges
    heads, n, width = q.shape
    scores = (q[:, target].float() * k[:, source]).sum(-1) * width**-0.5
    most = scores.new_full((heads, n), -torch.inf).scatter_reduce(1, target.expand_as(scores), scores, "amax")
    weights = (scores - most[:, target]).exp()
    total = weights.new_zeros(heads, n).index_add(1, target, weights)
    mixed = weights.new_zeros(q.shape).index_add(1, target, weights[:, :, None] * v[:, source])
    return (mixed / total[:, :, None]).to(q.dtype)


def of_graph(log2_nodes: int, degree: int, heads: int, width: int, backward: bool) -> Task:
    """Attention of nodes to their neighbours and themselves."""
    edges, (n, _) = synthetic.rmat(log2_nodes, degree, device=common.DEVICE)
    edges = with_loops(edges, n)
    q, k, v, g = (normal(heads, n, width, dtype=HALF, seed=seed) for seed in range(4))
    operands = tuple(t.requires_grad_(backward) for t in (q, k, v))
    pattern = stc.SparseTensor(edges, torch.ones(edges.shape[1], dtype=HALF, device=edges.device), (n, n))

    def ready(call: Call) -> Call:
        return step(call, operands, g) if backward else quiet(call)

    def whole() -> torch.Tensor:
        mask = torch.zeros(n, n, dtype=torch.bool, device=common.DEVICE)
        mask[edges[0], edges[1]] = True
        return mask

    def masked() -> Call:
        mask = whole()
        return lambda: scaled_dot_product_attention(*(t[None] for t in operands), attn_mask=mask)[0]

    def reference() -> tuple[torch.Tensor, ...]:
        mask = whole()
        rows = ((slice(a, a + 1024), mask[a : a + 1024]) for a in range(0, n, 1024))
        return in_float64(operands, rows, g if backward else None)

    instead = plain_and_compiled("gather and scatter", by_scatter, *operands, edges)
    instead["scaled_dot_product_attention with a mask"] = later(masked)
    calls = {name: ready(call) for name, call in instead.items()}
    return Task(ready(lambda: stc.attention(q, k, v, pattern)), calls, reference, LIMIT[HALF])


def poisson(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """The part of a Poisson loss that nonzeros have, by rows that are gathered for each."""
    row, column = entries
    m = (a[row] * b[column]).sum(-1)
    return (m - x.to(m.dtype) * torch.log(m)).sum()


def of_loss(log2_size: int, degree: int, rank: int) -> Task:
    """A Poisson loss over nonzeros, with gradients of both factors."""
    entries, shape = synthetic.rmat(log2_size, degree, device=common.DEVICE)
    pattern = stc.SparseTensor(entries, torch.ones(entries.shape[1], device=entries.device), shape)
    x = positive(entries.shape[1], 0)
    factors = [positive(n * rank, seed).view(n, rank).requires_grad_() for seed, n in enumerate(shape, 1)]
    one = torch.ones((), device=common.DEVICE)

    def ours() -> torch.Tensor:
        products, numbers = {"m": (factors[0], factors[1])}, {"x": x}
        return stc.map_entries(lambda m, x: m - x * torch.log(m), pattern, products=products, entries=numbers).sum()

    def reference() -> tuple[torch.Tensor, ...]:
        exact = [t.detach().double().requires_grad_() for t in factors]
        loss = poisson(*exact, x.double(), entries)
        return loss.detach(), *torch.autograd.grad(loss, exact)

    instead = plain_and_compiled("gather and multiply", poisson, *factors, x, entries)
    calls = {name: step(call, factors, one) for name, call in instead.items()}
    return Task(step(ours, factors, one), calls, reference, 1e-4)


def _masks(n: int, backward: bool, full: bool, kinds: tuple[str, ...] = MASKS) -> list[Row]:
    what = "forward and backward" if backward else "forward"
    return [
        Row(f"{kind}, n {n}, 8 x 64 fp16, {what}", "attention", partial(of_mask, kind, n, backward), GPU, full=full)
        for kind in kinds
    ]


ROWS = [
    *_masks(4096, False, False),
    *_masks(4096, True, False),
    *_masks(16384, False, False, MASKS[:2] + MASKS[3:]),
    *_masks(16384, False, True, MASKS[2:3]),
    *_masks(16384, True, False, MASKS[1:2] + MASKS[3:4]),
    *_masks(16384, True, True, MASKS[:1] + MASKS[2:3] + MASKS[4:]),
    Row("a BlockMask, causal, n 4096, forward", "attention", partial(of_mask, "causal", 4096, False, True), GPU),
    *(
        Row(
            f"R-MAT 14, {heads} x {width} fp16, {'forward and backward' if backward else 'forward'}",
            "graph attention",
            partial(of_graph, 14, 32, heads, width, backward),
            GPU,
        )
        for heads, width in ((1, 64), (4, 32))
        for backward in (False, True)
    ),
    Row("Poisson loss, R-MAT 14, R 32, forward and backward", "sampled loss", partial(of_loss, 14, 32, 32), GPU),
    Row("Poisson loss, R-MAT 10, R 16", "sampled loss", partial(of_loss, 10, 8, 16), ("cpu",), full=True),
    *(
        Row(
            f"R-MAT 10, 4 x 16 fp16, {'forward and backward' if backward else 'forward'}",
            "graph attention",
            partial(of_graph, 10, 8, 4, 16, backward),
            ("cpu",),
            full=True,
        )
        for backward in (False, True)
    ),
]
