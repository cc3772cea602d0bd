"""Blocks (BSR) times a dense matrix in forty lines of Triton: what a user would write instead of a compiler.

A program computes one row of blocks and some columns: one block a step, its dot added up in float32, loads several
steps ahead. Programs of 16 rows of blocks share their columns, so that these stay in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl

SETTINGS = ((128, 5, 4), (256, 5, 4), (256, 5, 8), (128, 3, 4), (128, 3, 8), (256, 3, 8), (64, 3, 4), (64, 2, 4))
"""Columns, steps ahead and warps of a program; large blocks of float32 fit with the last ones only."""


@triton.jit
def block_rows(
    row_ptr, columns, values, b, out, lines, n, SIDE: tl.constexpr, WIDTH: tl.constexpr, SLAB: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``out[line of blocks, columns] = sum of values[block] @ b[rows of the block, columns]``."""
    program = tl.program_id(0)
    slab = program // (SLAB * (n // WIDTH))
    inside = program % (SLAB * (n // WIDTH))
    line = slab * SLAB + inside % SLAB
    if line < lines:
        i = tl.arange(0, SIDE)
        at = (inside // SLAB) * WIDTH + tl.arange(0, WIDTH)
        total = tl.zeros((SIDE, WIDTH), tl.float32)
        for block in tl.range(tl.load(row_ptr + line), tl.load(row_ptr + line + 1), num_stages=STAGES):
            row = tl.load(columns + block) * SIDE + i
            left = tl.load(values + (block * SIDE + i)[:, None] * SIDE + i[None, :])
            right = tl.load(b + row[:, None] * n + at[None, :])
            total = tl.dot(left, right, total)
        tl.store(out + (line * SIDE + i)[:, None] * n + at[None, :], total.to(out.dtype.element_ty))


def block_product(
    row_ptr: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, b: torch.Tensor,
    width: int, stages: int, warps: int, slab: int = 16,
) -> torch.Tensor:  # fmt: skip
    """Multiply; `row_ptr` and `columns` are int32, `width` divides the columns of b."""
    lines, side, n = len(row_ptr) - 1, values.shape[1], b.shape[1]
    out = b.new_empty(lines * side, n)
    grid = (triton.cdiv(lines, slab) * slab * (n // width),)
    block_rows[grid](row_ptr, columns, values, b, out, lines, n, side, width, slab, stages, num_warps=warps)
    return out


def candidates(
    row_ptr: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, b: torch.Tensor
) -> Iterator[partial[torch.Tensor]]:
    """Calls with a few settings, of which the clock is to choose."""
    row_ptr, columns = row_ptr.int(), columns.int()
    for width, stages, warps in SETTINGS:
        if b.shape[1] % width == 0:
            yield partial(block_product, row_ptr, columns, values, b, width, stages, warps)
