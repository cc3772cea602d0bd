"""What a call costs beside its kernels: CPU time of a kernel, also in a graph of torch's, of `einsum` and `mttkrp`,
forward and backward, a CUDA graph.

    SPARSETC_DATA=<folder of .npz> python benchmarks/calls.py [label]

MTTKRP of mode 0, R = 32, and SpMM of a matrix. CPU times are medians, and first deciles, of calls with the GPU left
behind; a step is forward and backward for the values and all factors, timed on the host over 100 steps. A step's
gradients are compared with those that are asked for one by one, those of a graph with the step's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import DEVICE, factors, mttkrp_equation, record, tensor

import sparsetc as stc

TENSORS = ("guanine_TEvv_3d", "uber_amj_4d", "c2000_5_mat")


def cpu_microseconds(call: Callable[[], Any], calls: int = 400) -> tuple[float, float]:
    """Median and first decile of a call's time on the host."""
    for _ in range(20):
        call()
    times = []
    for n in range(calls):
        if n % 25 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return round(statistics.median(times), 1), round(statistics.quantiles(times, n=10)[0], 1)


def wall_microseconds(call: Callable[[], Any], calls: int = 100) -> float:
    """Mean time of a call, the GPU's included."""
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return round(1e6 * (time.perf_counter() - start) / calls, 1)


def worst(found: Any, expected: Any) -> float:
    """The largest relative difference of any of some tensors."""
    return max(float((f - e).abs().max() / e.abs().max()) for f, e in zip(found, expected, strict=True))


def row(name: str, x: stc.SparseTensor) -> dict[str, Any]:
    """One tensor's times."""
    equation, dense = mttkrp_equation(x.order, 0), factors(x, 32)[1:]
    kernel = stc.compile(equation, x, *dense)
    values = x.values.clone().requires_grad_()
    learned = [d.clone().requires_grad_() for d in dense]
    upstream, trained = torch.randn(x.shape[0], 32, device=DEVICE), kernel.with_values(values)
    wanted = [values, *learned]

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(trained(*learned), wanted, upstream)

    alone = [torch.autograd.grad(trained(*learned), w, upstream)[0] for w in wanted]
    error = worst(step(), alone)
    assert error < 1e-5, (name, error)
    found: dict[str, Any] = {"tensor": name, "plan": kernel.plan.name}
    found["kernel_us"] = cpu_microseconds(lambda: kernel(*dense))
    found["einsum_us"] = cpu_microseconds(lambda: stc.einsum(equation, x, *dense))
    found["mttkrp_us"] = cpu_microseconds(lambda: stc.mttkrp(x, [None, *dense], 0))
    graph_of_one = torch.compile(lambda *given: kernel(*given), fullgraph=True)
    error = worst([graph_of_one(*dense)], [kernel(*dense)])
    assert error < 1e-5, (name, error)
    found["compiled_us"] = cpu_microseconds(lambda: graph_of_one(*dense))
    found["step_us"] = wall_microseconds(step)
    with torch.autograd.set_multithreading_enabled(False):
        found["step_one_thread_us"] = wall_microseconds(step)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    error = worst(captured, step())
    assert error < 1e-5, (name, error)
    return {**found, "step_graph_us": wall_microseconds(graph.replay)}


def main(label: str) -> None:
    """Every tensor whose file is there."""
    assert DEVICE == "cuda", "this benchmark needs a GPU"
    rows = [row(name, x) for name in TENSORS if (x := tensor(name)) is not None]
    matrix = tensor("c2000_5_mat")
    if matrix is not None:
        b, csr = torch.randn(matrix.shape[1], 32, device=DEVICE), matrix.to_torch(torch.sparse_csr)
        rows.append({"tensor": "c2000_5_mat", "as": "torch.sparse_csr"})
        rows[-1]["einsum_us"] = cpu_microseconds(lambda: stc.einsum("ij,jr->ir", csr, b))
    for found in rows:
        print(found, flush=True)
    record("calls" + (f"_{label}" if label else ""), rows)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
