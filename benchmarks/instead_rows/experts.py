"""Mixtures of experts: tokens in blocks, or sent by a sparse matrix, beside torch's grouped product and a loop."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch

import sparsetc as stc
from instead_rows.calls import each_once, step
from instead_rows.operands import generator, normal
from instead_rows.row import CPU, FRESH, GPU, LIMIT, Call, Row, Task

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from mixture_of_experts import Product, by_grouped_mm, by_loop, by_routing

SIDE = 64
"""Tokens and inputs of a block."""
Sizes = tuple[int, int, int, int]
"""Tokens, experts, inputs and outputs."""


def operands(sizes: Sizes, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the weights of all experts."""
    tokens, experts, inputs, outputs = sizes
    weights = normal(experts, inputs, outputs, seed=1) * inputs**-0.5
    return normal(tokens, inputs, dtype=dtype), weights.to(dtype)


def new_routing(sizes: Sizes, dtype: torch.dtype, backward: bool) -> Task:
    """Tokens go to other experts at each call: the sparse tensor of where they go is part of it."""
    tokens, experts, _, outputs = sizes
    given, above = operands(sizes, dtype), normal(tokens, outputs, seed=2)
    device = common.DEVICE
    routings = [torch.randint(experts, (tokens,), generator=generator(n), device=device) for n in range(FRESH)]

    def each(product: Product, dtype: torch.dtype = dtype) -> Call:
        x, weights = (operand.to(dtype).requires_grad_(backward) for operand in given)
        following = each_once(routings)

        def call() -> Any:
            expert = following()
            if not backward:
                return product(x, expert, weights)
            return step(lambda: product(x, expert, weights), [x, weights], above)()

        return call

    instead = {"loop over experts": each(by_loop), "torch._grouped_mm": each(by_grouped_mm)}
    return Task(each(by_routing), instead, each(by_loop, torch.float64), LIMIT[dtype], fresh=True)


def one_routing(sizes: Sizes, dtype: torch.dtype) -> Task:
    """The product alone: tokens are sorted and packed before, and fill whole blocks."""
    tokens, experts, *_ = sizes
    x, weights = operands(sizes, dtype)
    of_block = torch.randint(experts, (tokens // SIDE,), generator=generator(), device=common.DEVICE).sort().values
    expert = of_block.repeat_interleave(SIDE)
    ends = torch.bincount(expert, minlength=experts).cumsum(0, dtype=torch.int32)
    sparse, stacked = in_blocks(x, of_block, experts), weights.flatten(0, 1)
    kernel = stc.compile("tj,jo->to", sparse, stacked, output="dense")
    parts = torch.bincount(expert, minlength=experts).tolist()

    def by_slices(x: torch.Tensor = x, weights: torch.Tensor = weights) -> torch.Tensor:
        return torch.cat([part @ weight for part, weight in zip(x.split(parts), weights, strict=True)])

    return Task(
        lambda: kernel(stacked),
        {"loop over experts": by_slices, "torch._grouped_mm": lambda: torch._grouped_mm(x, weights, offs=ends)},
        lambda: by_slices(x.double(), weights.double()),
        LIMIT[dtype],
    )


def in_blocks(tokens: torch.Tensor, of_block: torch.Tensor, experts: int) -> stc.SparseTensor:
    """Make the sparse matrix (tokens, experts * inputs) of tokens that fill blocks, each of one expert."""
    inputs, device = tokens.shape[1], tokens.device
    across = torch.arange(inputs // SIDE, device=device)  # blocks side by side, which are of one expert
    values = tokens.view(-1, SIDE, across.numel(), SIDE).transpose(1, 2).flatten(0, 1)
    row = torch.arange(of_block.numel(), device=device).repeat_interleave(across.numel())
    column = (of_block[:, None] * across.numel() + across).flatten()
    return stc.SparseTensor.from_blocks(torch.stack((row, column)), values, (len(tokens), experts * inputs))


def _rows(sizes: Sizes, name: str, dtype: torch.dtype, on: tuple[str, ...]) -> list[Row]:
    tokens, experts, inputs, outputs = sizes
    what = f"{tokens} tokens, {experts} experts of {inputs} to {outputs}, {name}"
    return [
        Row(f"product, {what}", "experts", partial(one_routing, sizes, dtype), on),
        Row(f"new routing, {what}", "experts", partial(new_routing, sizes, dtype, False), on),
        Row(f"new routing and gradients, {what}", "experts", partial(new_routing, sizes, dtype, True), on),
    ]


ROWS = [
    *_rows((8192, 8, 4096, 4096), "bf16", torch.bfloat16, GPU),
    *_rows((8192, 64, 2048, 1408), "bf16", torch.bfloat16, GPU),
    *_rows((1024, 8, 256, 512), "float32", torch.float32, CPU),
]
