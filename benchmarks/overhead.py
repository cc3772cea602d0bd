"""What is not the kernel: CPU time of a call, packing on the GPU, compiling from a warm disk cache.

A call must not synchronise: it runs under torch's own check, and is captured in a CUDA graph.
"""

from __future__ import annotations

import statistics
import time

import torch
from common import DEVICE, factors, microseconds, mttkrp_equation, record, tensor

import sparsetc as stc


def cpu_microseconds(k: stc.Kernel, dense: list[torch.Tensor], calls: int = 500) -> float:
    """Median CPU time of one call, the GPU left behind."""
    times = []
    for n in range(calls):
        if n % 50 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        k(*dense)
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def seconds_to_compile(x: stc.SparseTensor, equation: str, dense: list[torch.Tensor]) -> float:
    """Wall time of compile, packing included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    k = stc.compile(equation, x, *dense)
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    k(*dense)
    return elapsed


def main() -> None:
    assert DEVICE == "cuda", "this benchmark needs a GPU"
    rows = []
    for name in ("nell-2 x0.25", "nell-2"):
        x = tensor(name)
        assert x is not None
        f = factors(x, 32)
        for mode in range(x.order):
            dense = [m for n, m in enumerate(f) if n != mode]
            equation = mttkrp_equation(x.order, mode)
            first = seconds_to_compile(x, equation, dense)
            again = seconds_to_compile(x, equation, dense)  # packed already; the source lies in the cache
            x.pattern.clear()
            k = stc.compile(equation, x, *dense)
            k(*dense)
            torch.cuda.set_sync_debug_mode("error")
            k(*dense)
            torch.cuda.set_sync_debug_mode("default")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                k(*dense)
            row = {
                "tensor": name,
                "mode": mode,
                "plan": k.plan.name,
                "plan_pack_compile_s": round(first, 3),
                "compile_packed_s": round(again, 4),
                "cpu_us_per_call": round(cpu_microseconds(k, dense), 1),
                "graph_us": round(microseconds(graph.replay), 1),
            }
            rows.append(row)
            print(row, flush=True)
            del k, graph
            x.pattern.clear()
        del x
    record("overhead", rows)


if __name__ == "__main__":
    main()
