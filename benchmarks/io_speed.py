"""How fast .tns and .parquet files are read and written, on one core: ``python benchmarks/io_speed.py [nonzeros]``.

In: nothing but the number of nonzeros (2 million by default). Out: a line a case, in million nonzeros per second; what
was read is compared with what was written before any time is reported.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

import sparsetc.io as sio
from sparsetc.tensor.sparse_tensor import SparseTensor

CASES = (
    ("order 3, whole numbers", (2_000, 3_000, 100_000), False),
    ("order 3, decimals", (2_000, 3_000, 100_000), True),
    ("order 4, whole numbers", (91, 24, 887, 1_410), False),
    ("order 4, decimals", (6_000, 5_700, 244_000, 1_200), True),
)


def generated(nnz: int, shape: tuple[int, ...], decimals: bool) -> SparseTensor:
    """Uniform coordinates, duplicates summed; values normal (up to 9 digits, a sign, some exponents) or 1..99."""
    rng = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, size, (nnz,), generator=rng) for size in shape])
    values = torch.randn(nnz, generator=rng) if decimals else torch.randint(1, 100, (nnz,), generator=rng).float()
    return SparseTensor(coords, values, shape)


def fastest(run: Callable[[], Any], times: int = 5) -> tuple[float, Any]:
    """Seconds of the fastest run, and its result."""
    best, result = float("inf"), None
    for _ in range(times):
        start = time.perf_counter()
        result = run()
        best = min(best, time.perf_counter() - start)
    return best, result


def main(nnz: int = 2_000_000) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for (title, shape, decimals), suffix in product(CASES, (".tns", ".parquet")):
            path, x = os.path.join(folder, f"x{suffix}"), generated(nnz, shape, decimals)
            write, _ = fastest(lambda path=path, x=x: sio.write(path, x), 1)  # type: ignore[misc]
            read, y = fastest(lambda path=path: sio.read(path, progress=False))  # type: ignore[misc]
            if not (torch.equal(x.coords, y.coords) and torch.equal(x.values, y.values)):
                raise SystemExit(f"{title}: what was read is not what was written")
            size = os.path.getsize(path)
            print(
                f"{title:24s} {suffix:8s} read {x.nnz / read / 1e6:5.1f} M nonzeros/s ({size / read / 1e6:4.0f} MB/s), "
                f"write {x.nnz / write / 1e6:5.1f} M nonzeros/s"
            )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:2]))
