"""Tensors in blocks: BSR by dense matrices against torch's BSR product and a dense one, and products of two of them
against a loop of batched products (torch.bmm).

python benchmarks/blocks.py [--small]

``--small`` takes sizes for a CPU and writes a record of its own. ``us`` is a call of the kernel, which allocates its
result, ``device_us`` the same from a CUDA graph, ``first_s`` compiling and the first call. A torch call that this torch
has no kernel for is null. No time is reported for a result that is wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from common import DEVICE, device_microseconds, microseconds, record, relative_error

import sparsetc as stc

SIDES = (16, 32, 64)
COLUMNS = 256
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}
PAIRS: list[tuple[str, tuple[int, ...], int, int]] = [  # equation, grid of an operand, side of a block, blocks of each
    ("ijk,kab->ijab", (8, 8, 8), 8, 296),
    ("ijk,kab->ijab", (16, 16, 16), 8, 1500),
    ("ijk,ljk->il", (32, 16, 16), 8, 2000),
    ("ij,jk->ik", (256, 256), 64, 3277),
    ("ij,jk->ik", (512, 512), 32, 5243),
    ("ij,jk->ik", (1024, 1024), 16, 10486),
]
SMALL_PAIRS = [PAIRS[0], ("ij,jk->ik", (32, 32), 32, 100), ("ij,jk->ik", (64, 64), 16, 400)]
CHUNK = 1 << 24
"""Elements of products that the loop of batched products makes at a time."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_blocks(grid: tuple[int, ...], side: int, count: int, dtype: torch.dtype, seed: int) -> stc.SparseTensor:
    """Blocks at random places of a grid."""
    g = generator(seed)
    place, rows = torch.randperm(prod(grid), generator=g)[:count].sort().values, []
    for size in reversed(grid):
        rows.append(place % size)
        place = place // size
    values = torch.randn(count, *[side] * len(grid), generator=g).to(dtype)
    shape = tuple(n * side for n in grid)
    return stc.SparseTensor.from_blocks(torch.stack(rows[::-1]), values, shape).to(DEVICE)


def timed(call: Callable[[], Any]) -> dict[str, float] | None:
    """Times of a call; None where torch has no kernel for it."""
    try:
        call()
        found = {"us": round(microseconds(call), 1)}
    except (RuntimeError, NotImplementedError):
        return None
    if DEVICE == "cuda":
        try:
            found["device_us"] = round(device_microseconds(call), 1)
        except RuntimeError:  # of a call that no graph captures
            torch.cuda.synchronize()
    return found


def compiled(equation: str, *operands: Any) -> tuple[stc.Kernel, Any, float]:
    """A kernel, its first result, and the seconds that these took."""
    start = time.perf_counter()
    kernel = stc.compile(equation, *operands)
    found = kernel(*(o for o in operands if isinstance(o, torch.Tensor) and o.layout == torch.strided))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return kernel, found, round(time.perf_counter() - start, 3)


def matrix_row(n: int, side: int, share: float, dtype: torch.dtype) -> dict[str, Any]:
    """A BSR matrix by a dense one."""
    grid = n // side
    count = max(1, round(share * grid * grid))
    bsr = random_blocks((grid, grid), side, count, dtype, 0).to_torch()
    b = torch.randn(n, COLUMNS, generator=generator(1)).to(dtype).to(DEVICE)
    kernel, found, first_s = compiled("ij,jr->ir", bsr, b)
    whole = bsr.to_dense()
    error = relative_error(found, whole.double() @ b.double())
    assert error < TOLERANCE[dtype], (n, side, share, dtype, error)
    row: dict[str, Any] = {"equation": "ij,jr->ir", "n": n, "columns": COLUMNS, "side": side, "share": share}
    row |= {"blocks": count, "dtype": str(dtype).removeprefix("torch."), "plan": kernel.plan.name, "error": error}
    row |= {"first_s": first_s, "sparsetc": timed(lambda: kernel(b)), "torch_bsr": timed(lambda: bsr @ b)}
    return row | {"torch_dense": timed(lambda: whole @ b)}


class Loop:
    """A product of two tensors in blocks by torch.bmm, a chunk of pairs at a time: blocks in, blocks of the result out.

    Which pairs meet, and where they add to, is found before.
    """

    def __init__(self, equation: str, x: stc.SparseTensor, y: stc.SparseTensor, z: stc.SparseTensor) -> None:
        left, right, output = equation.replace("->", ",").split(",")
        shared = [c for c in left if c in right]
        self.x_order = [left.index(c) for c in (*(c for c in left if c not in shared), *shared)]
        self.y_order = [right.index(c) for c in (*shared, *(c for c in right if c not in shared))]
        side = x.blocksize[0]
        self.rows, self.columns = side ** (len(left) - len(shared)), side ** (len(right) - len(shared))
        self.inner, self.z = side ** len(shared), z
        meets = torch.ones(x.nnz, y.nnz, dtype=torch.bool, device=DEVICE)
        for c in shared:
            meets &= x.coords[left.index(c)].unsqueeze(1) == y.coords[right.index(c)]
        self.p, self.q = meets.nonzero().unbind(1)
        key = torch.zeros(self.p.numel(), dtype=torch.long, device=DEVICE)
        own = torch.zeros(z.nnz, dtype=torch.long, device=DEVICE)
        for n, c in enumerate(output):
            at = x.coords[left.index(c)][self.p] if c in left else y.coords[right.index(c)][self.q]
            key, own = key * z.pattern.shape[n] + at, own * z.pattern.shape[n] + z.coords[n]
        self.slot = torch.searchsorted(own, key)

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Blocks of the result, as (blocks, rows, columns)."""
        left = x.permute(0, *(m + 1 for m in self.x_order)).reshape(x.shape[0], self.rows, self.inner)
        right = y.permute(0, *(m + 1 for m in self.y_order)).reshape(y.shape[0], self.inner, self.columns)
        out = torch.zeros(self.z.nnz, self.rows, self.columns, dtype=x.dtype, device=x.device)
        step = max(1, CHUNK // (self.rows * self.columns))
        for first in range(0, self.p.numel(), step):
            own = slice(first, first + step)
            out.index_add_(0, self.slot[own], torch.bmm(left[self.p[own]], right[self.q[own]]))
        return out


def pair_row(equation: str, grid: tuple[int, ...], side: int, count: int) -> dict[str, Any]:
    """A product of two tensors in blocks."""
    x, y = (random_blocks(grid, side, count, torch.float32, seed) for seed in (0, 1))
    kernel, z, first_s = compiled(equation, x, y)
    loop = Loop(equation, x, y, z)
    expected = loop(x.values.double(), y.values.double())
    error = relative_error(z.values.reshape(expected.shape), expected)
    assert error < TOLERANCE[torch.float32], (equation, grid, side, error)
    row: dict[str, Any] = {"equation": equation, "grid": grid, "side": side, "blocks": count}
    row |= {"pairs": loop.p.numel(), "result_blocks": z.nnz, "plan": kernel.plan.name, "error": error}
    row |= {"first_s": first_s, "sparsetc": timed(kernel)}
    return row | {"torch_bmm_loop": timed(lambda: loop(x.values, y.values))}


def main() -> None:
    """Every case, at full size or small."""
    small = "--small" in sys.argv[1:]
    rows: list[dict[str, Any]] = []
    for n in (2048,) if small else (16384,):
        for dtype in (torch.float32,) if small else (torch.float32, torch.float16):
            for share in (0.01, 0.1):
                for side in SIDES:
                    rows.append(matrix_row(n, side, share, dtype))
                    print(rows[-1], flush=True)
    for case in SMALL_PAIRS if small else PAIRS:
        rows.append(pair_row(*case))
        print(rows[-1], flush=True)
    record("blocks_small" if small else "blocks", rows)


if __name__ == "__main__":
    main()
