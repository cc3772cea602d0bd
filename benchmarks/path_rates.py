"""Rates that contraction in steps is priced by: seconds of the calls that its steps are made of.

    python benchmarks/path_rates.py [--device cuda] [--backend triton]

Prints a JSON of the numbers that `profiles/` has under the names ``path_...``; nothing is fitted. On a CPU one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

import sparsetc as stc

WIDE, NARROW = 64, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_device(options.device)
    with stc.options(backend=options.backend, plan="one-pass"):
        print(json.dumps(rates(options.device != "cpu"), indent=1))


def least(call: Callable[[], object], on_gpu: bool, seconds: float = 0.2) -> float:
    """Seconds of a call: the least of those timed; of one after another on a GPU."""
    call()
    times: list[float] = []
    began = time.process_time()
    repeats = 20 if on_gpu else 1
    while len(times) < 5 or time.process_time() - began < seconds:
        start = now(on_gpu)
        for _ in range(repeats):
            call()
        times.append((now(on_gpu) - start) / repeats)
    return min(times)


def now(on_gpu: bool) -> float:
    """The time: of this process on a CPU, of the wall once the GPU is done."""
    if not on_gpu:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def scattered(nnz: int, size: int, order: int) -> stc.SparseTensor:
    """A tensor of nonzeros anywhere."""
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(0)
    coords = torch.stack([torch.randint(size, (nnz,), generator=generator) for _ in range(order)])
    return stc.SparseTensor(coords, torch.randn(nnz, generator=generator), (size,) * order)


def rates(on_gpu: bool) -> dict[str, float]:
    """The numbers, by name."""

    def timed(call: Callable[[], object]) -> float:
        return least(call, on_gpu)

    found = {}
    tiny, small = stc.eye(4), torch.randn(4, 4)
    kernel = stc.compile("ij,jr->ir", tiny, small)
    found["path_sparse_call"] = timed(lambda: kernel(small))
    found["path_call"] = timed(lambda: torch.einsum("abc,cd->abd", small[None], small))
    x = scattered(200_000 if not on_gpu else 4_000_000, 100 if not on_gpu else 400, 3)

    def gathered(width: int) -> float:
        table = torch.randn(x.shape[2], width)
        kernel = stc.compile("ijk,kr->ijr", x, table, output="sparse")
        return timed(lambda: kernel(table)) - found["path_sparse_call"]

    narrow, wide = gathered(NARROW), gathered(WIDE)
    found["path_bag"] = (wide - narrow) / (x.nnz * (WIDE - NARROW))
    found["path_row"] = max(0.0, narrow / x.nnz - NARROW * found["path_bag"])
    rows = 20_000 if not on_gpu else 2_000_000
    left, right = torch.randn(rows, 16), torch.randn(rows, 16)
    piece, step = torch.arange(4000), 10
    ends = torch.arange(0, len(piece) + 1, step)

    def made_and_summed() -> None:  # in chunks that stay in the cache, as the generated torch programs do
        for begin in range(0, rows, len(piece)):
            chunk = slice(begin, begin + len(piece))
            outer = (left[chunk, :, None] * right[chunk, None, :]).view(-1, 256)
            torch.nn.functional.embedding_bag(piece, outer, ends, mode="sum", include_last_offset=True)

    if on_gpu:
        blocks = torch.randn(rows, 16)
        found["path_outer_product"] = timed(lambda: blocks[:, :, None] * right[:, None, :]) / (rows * 256)
    else:
        found["path_outer_product"] = timed(made_and_summed) / (rows * 256)
    out = torch.empty(8, 8)
    found["path_run"] = 0.0 if on_gpu else timed(lambda: torch.mm(left[:8, :8].t(), right[:8, :8], out=out))
    found["path_thin_multiply"] = timed(lambda: left.t() @ right) / (rows * 256)
    side = 768 if not on_gpu else 8192
    square = torch.randn(side, side)
    found["path_multiply"] = timed(lambda: square @ square) / side**3
    long = torch.randn(16_000_000 if not on_gpu else 256_000_000)
    other = torch.empty_like(long)
    found["path_byte"] = timed(lambda: other.copy_(long)) / (2 * long.nbytes)
    found["path_fresh"] = 0.0 if on_gpu else timed(long.clone) / long.nbytes - 2 * found["path_byte"]
    return found


if __name__ == "__main__":
    main()
