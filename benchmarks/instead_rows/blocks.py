"""Given blocks (BSR) times a dense matrix, beside torch's BSR, the dense product, and a loop of dots in Triton."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import common
import torch

import sparsetc as stc
from instead_rows.calls import fastest, later, with_tf32
from instead_rows.operands import generator, normal
from instead_rows.row import GPU, LIMIT, TF32, Call, Row, Task


def product_of(rows: int, side: int, share: float, columns: int, dtype: torch.dtype) -> Task:
    """Random blocks, every block as likely."""
    lines = rows // side
    there = torch.rand(lines, lines, generator=generator(), device=common.DEVICE) < share
    coords = there.nonzero().T.contiguous()
    values, b = normal(coords.shape[1], side, side, dtype=dtype), normal(rows, columns, dtype=dtype, seed=1)
    x = stc.SparseTensor.from_blocks(coords, values, (rows, rows))
    high = dtype == torch.float32
    kernel = stc.compile("ij,jn->in", x, b, output="dense", precision="high" if high else "highest")
    row_ptr = torch.cat((there.new_zeros(1, dtype=torch.int64), there.sum(1).cumsum(0)))
    bsr = torch.sparse_bsr_tensor(row_ptr, coords[1], values, (rows, rows))
    dense = values.new_zeros(lines, lines, side, side)
    dense[there] = values
    dense = dense.transpose(1, 2).reshape(rows, rows)

    def by_loop() -> Call:
        from block_loop import candidates

        return fastest(candidates(row_ptr, coords[1], values, b))

    instead: dict[str, Call] = {
        "dense product": lambda: dense @ b,
        "Triton loop of dots, tuned": later(by_loop),
        "torch BSR": lambda: bsr @ b,
        "torch BSR, tuned": later(lambda: fastest(tuned(bsr, b))),
    }
    if high:
        instead = {name: with_tf32(call) for name, call in instead.items()}
    return Task(lambda: kernel(b), instead, lambda: dense.double() @ b.double(), TF32 if high else LIMIT[dtype])


def tuned(bsr: torch.Tensor, b: torch.Tensor) -> Iterator[Call]:
    """Call torch's kernel for BSR with a few settings; torch's own tuner tries hundreds, for minutes."""
    from torch.sparse._triton_ops import bsr_dense_addmm

    out = b.new_zeros(bsr.shape[0], b.shape[1])
    for width, group, stages, warps in itertools.product((64, 128, 256), (1, 4), (2, 4), (4,)):
        if b.shape[1] % width == 0:
            settings = {"SPLIT_N": b.shape[1] // width, "GROUP_SIZE_ROW": group}
            settings |= {"num_stages": stages, "num_warps": warps}
            yield partial(bsr_dense_addmm, out, bsr, b, beta=0, meta=settings)


CASES = ((4096, 32, 0.10), (8192, 64, 0.05), (8192, 16, 0.05), (4096, 128, 0.20))
ROWS = [
    Row(
        f"{side}², {share:.0%} of {rows}², N 4096, {name}",
        "given blocks",
        partial(product_of, rows, side, share, 4096, dtype),
        GPU,
        full=full,
    )
    for name, dtype, full in (("fp16", torch.float16, False), ("tf32", torch.float32, True))
    for rows, side, share in CASES
]
