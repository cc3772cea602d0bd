"""Einsums of given blocks on a GPU, beside a plain Triton loop over blocks (`block_loop.py`): no arguments.

A case is SpMM of a square matrix, or MTTKRP of a cube, of random blocks of one side. Times are of a CUDA graph of the
call, and of the call itself. Results are compared with float64 before any time is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from block_loop import candidates
from common import device_microseconds, microseconds, record
from triton.runtime.errors import OutOfResources

import sparsetc as stc

MATRICES = ((4096, 32, 0.1), (8192, 64, 0.05), (8192, 16, 0.05), (4096, 128, 0.2))
"""(rows, side, share of the blocks)"""
KINDS = {
    "fp16": (torch.float16, "highest", 2e-3),
    "bf16": (torch.bfloat16, "highest", 1.5e-2),
    "high": (torch.float32, "high", 2e-3),
    "highest": (torch.float32, "highest", 1e-5),
}
"""Dtype, precision, and the error allowed, of the largest element."""


def cases() -> Iterator[tuple[int, int, int, float, int, str]]:
    """(order, size, side, share, columns, kind)"""
    yield from ((2, *matrix, 4096, kind) for kind in KINDS for matrix in MATRICES)
    yield from ((2, 16384, 64, 0.01, 256, kind) for kind in KINDS)
    yield from ((2, *matrix, columns, "fp16") for matrix in MATRICES for columns in (1, 4, 16, 32, 64, 128, 256))
    yield from ((2, *matrix, 16, "high") for matrix in MATRICES)
    yield from ((2, 16384, side, 0.12, columns, "fp16") for side in (16, 32, 64, 128) for columns in (1, 16, 32))
    yield from ((3, 512, 16, 0.0322, rank, kind) for rank in (32, 128) for kind in ("fp16", "high", "highest"))


def main() -> None:
    """Check, time, print and record every case."""
    rows = []
    for order, size, side, share, columns, kind in cases():
        dtype, precision, allowed = KINDS[kind]
        torch.manual_seed(0)
        places = (torch.rand((size // side,) * order, device="cuda") < share).nonzero().T
        blocks = torch.randn(places.shape[1], *(side,) * order, device="cuda").to(dtype)
        x = stc.SparseTensor.from_blocks(places, blocks, (size,) * order)
        dense = [torch.randn(size, columns, device="cuda").to(dtype) for _ in range(order - 1)]
        equation = "ij,jr->ir" if order == 2 else "ijk,jr,kr->ir"
        kernel = stc.compile(equation, x, *dense, precision=precision)
        found = kernel(*dense)
        exact = torch.einsum(equation, x.to_dense().double(), *(b.double() for b in dense))
        error = float((found - exact).abs().max() / exact.abs().max())
        assert error < allowed, (equation, size, side, kind, error)
        row: dict[str, Any] = {"einsum": equation, "size": size, "side": side, "share": share, "columns": columns}
        row |= {"precision": kind, "blocks": places.shape[1], "plan": str(kernel.plan), "error": error}
        row |= {"us": device_microseconds(lambda k=kernel, d=dense: k(*d))}
        row |= {"call_us": microseconds(lambda k=kernel, d=dense: k(*d))}
        if columns <= 32:  # to read the blocks takes longest: torch's sum of them does no more
            row["read_us"] = device_microseconds(blocks.sum)
        if order == 2 and kind != "highest":
            lines = torch.bincount(places[0], minlength=size // side).cumsum(0)
            loops = candidates(torch.cat([lines.new_zeros(1), lines]), places[1], blocks, *dense)
            row["loop_us"] = min(map(_time, loops), default=None)
        rows.append(row)
        print(row)
    record("given_blocks", rows)


def _time(call: Any) -> float:
    try:
        return device_microseconds(call)
    except OutOfResources:  # a setting that needs more shared memory than there is
        return float("inf")


if __name__ == "__main__":
    main()
