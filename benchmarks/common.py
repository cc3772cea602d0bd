"""What every benchmark shares: tensors, timing, the correctness gate, and the record.

Real tensors are looked for in ``$SPARSETC_DATA`` (folders of ``.npz``: coords, values, shape); those that are absent
are left out. Times are medians of CUDA events around single calls, with the L2 cache cleared in between
(`triton.testing.do_bench`). No time is reported for a result that is wrong.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import synthetic
import torch

import sparsetc as stc

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = Path(__file__).parent / "results"

SYNTHETIC: dict[str, Callable[[], Any]] = {
    "clustered": lambda: synthetic.clustered(device=DEVICE),
    "clustered 600": lambda: synthetic.clustered(per_tile=600, device=DEVICE),
    "clustered 2000": lambda: synthetic.clustered(per_tile=2000, device=DEVICE),
    "small clustered": lambda: synthetic.clustered((96, 112, 80), 40_000, device=DEVICE),
    "tiny graph": lambda: synthetic.rmat(8, 4, device=DEVICE),
    "R-MAT 14 x8": lambda: synthetic.rmat(14, 8, device=DEVICE),
    "R-MAT 14 x32": lambda: synthetic.rmat(14, 32, device=DEVICE),
    "R-MAT 14 x128": lambda: synthetic.rmat(14, 128, device=DEVICE),
    "R-MAT 16 x16": lambda: synthetic.rmat(16, 16, device=DEVICE),
    "block .1 .1": lambda: synthetic.block_matrix(8192, 64, 0.1, 0.1, device=DEVICE),
    "half full": lambda: synthetic.block_matrix(2048, 64, 1.0, 0.5, device=DEVICE),
    "block .01 .1": lambda: synthetic.block_matrix(8192, 64, 0.01, 0.1, device=DEVICE),
    "pruned 2048x2048": lambda: synthetic.pruned_weights(2048, 2048, 0.7, device=DEVICE),
    "pruned 2048x512": lambda: synthetic.pruned_weights(2048, 512, 0.9, device=DEVICE),
    "pruned 512x2048": lambda: synthetic.pruned_weights(512, 2048, 0.98, device=DEVICE),
    "hexahedral": lambda: synthetic.hexahedral(device=DEVICE),
    "bands 430x57": lambda: synthetic.matrix_stack(430, 57, 1544, band=8, device=DEVICE),
    "blocks 1220x51": lambda: synthetic.matrix_stack(1220, 51, 5889, block=10, device=DEVICE),
}


def data_file(name: str) -> Path:
    """Where a real tensor is looked for."""
    return Path(os.environ.get("SPARSETC_DATA", "data")) / f"{name}.npz"


def tensor(name: str, seed: int = 0) -> stc.SparseTensor | None:
    """A tensor by name, with random values in [0.1, 1.1); None where its file is absent.

    A published tensor's name is that of one like it, and may have a scale: ``"nell-2"``, ``"nell-2 x0.25"``.
    """
    kind, _, scale = name.partition(" x")
    if name in SYNTHETIC:
        coords, shape = SYNTHETIC[name]()
    elif kind in synthetic.PUBLISHED:
        coords, shape = synthetic.like(kind, float(scale or 1), device=DEVICE)
    else:
        path = data_file(name)
        if not path.exists():
            return None
        with np.load(path) as file:
            coords = torch.as_tensor(file["coords"]).long().to(DEVICE)
            shape = tuple(int(n) for n in file["shape"])
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    values = torch.rand(coords.shape[1], generator=g, device=DEVICE) + 0.1
    return stc.SparseTensor(coords, values, shape)


def factors(x: stc.SparseTensor, rank: int, seed: int = 1) -> list[torch.Tensor]:
    """A random factor matrix a mode."""
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    return [torch.randn(n, rank, generator=g, device=DEVICE) for n in x.shape]


def letters(order: int) -> str:
    """Index letters of a tensor."""
    return "ijklmn"[:order]


def mttkrp_equation(order: int, mode: int) -> str:
    """E.g. ``ijk,jr,kr->ir``."""
    own = letters(order)
    return ",".join([own, *(f"{c}r" for m, c in enumerate(own) if m != mode)]) + f"->{own[mode]}r"


def mttkrp_reference(x: stc.SparseTensor, f: list[torch.Tensor], mode: int, chunk: int = 1 << 21) -> torch.Tensor:
    """float64, nonzero by nonzero."""
    out = torch.zeros(x.shape[mode], f[0].shape[1], dtype=torch.float64, device=x.device)
    for start in range(0, x.nnz, chunk):
        part = slice(start, start + chunk)
        product = x.values[part, None].double()
        for m in range(x.order):
            if m != mode:
                product = product * f[m][x.coords[m, part]].double()
        out.index_add_(0, x.coords[mode, part], product)
    return out


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found.double() - expected).norm() / expected.norm())


@cache
def warmed(seconds: float = 0.5) -> None:
    """Bring the GPU to its clock, once a process: what was timed first took 15 to 20 % longer than later."""
    a = torch.ones(4096, 4096, device=DEVICE)
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        a @ a
        torch.cuda.synchronize()


def microseconds(call: Callable[[], Any], repeat_ms: int = 40) -> float:
    """Median time of a call."""
    if DEVICE == "cuda":
        from triton.testing import do_bench

        warmed()
        return float(do_bench(call, warmup=10, rep=repeat_ms, return_mode="median")) * 1e3
    for _ in range(3):
        call()
    times = []
    for _ in range(15):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def device_microseconds(call: Callable[[], Any]) -> float:
    """Median time of a call's launches without what the CPU takes for them: of a CUDA graph of the call."""
    if DEVICE != "cuda":
        return microseconds(call)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a first call does is not captured
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        call()
    return microseconds(graph.replay)


def kernel_microseconds(kernel: stc.Kernel, dense: list[torch.Tensor]) -> float:
    """Time of the launches alone, into an output that exists: without allocating, zeroing or summing copies of it."""
    step = kernel.step
    tables, run = step.tables(dense), step.executable
    out = torch.zeros((run.copies, *run.shape), dtype=run.dtype, device=kernel.operand.device)
    packed, call = kernel.contraction.packed([x.values for x in kernel.operands]), run.programs.bind(step.arrays.parts)
    assert packed is not None
    return microseconds(lambda: call(packed, tables, out))


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """The device and the versions that times depend on."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else processor(),
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": version,
        "sparsetc": stc.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def results_file(name: str) -> Path:
    """``<name>.json`` in `RESULTS`, or in the folder that ``$SPARSETC_RESULTS`` names."""
    return Path(os.environ.get("SPARSETC_RESULTS", RESULTS)) / f"{name}.json"


def record(name: str, rows: list[dict[str, Any]], **extra: Any) -> Path:
    """Write the rows, with versions and the device's name, to ``results/<name>.json``."""
    document = {"benchmark": name, **environment(), **extra, "rows": rows}
    path = results_file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(temporary, path)
    return path
