"""Measure the device at hand for the planner: a GPU by probes, or how fast a CPU runs loops.

In: nothing. Out: a `DeviceProfile`, kept in the cache directory. The price of a loop on a CPU is linear in what
`Cost.loops` counts; its seconds a nonzero, a fiber, a vector and so on are fitted to kernels of some einsums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from sparsetc.api import compile
from sparsetc.contraction.step import Step
from sparsetc.device import calibrate as gpu
from sparsetc.device import profile
from sparsetc.device.profile import DeviceProfile
from sparsetc.errors import PlanError
from sparsetc.ir.program.cost import cost_of
from sparsetc.planner.report import statistics_of
from sparsetc.support import installed
from sparsetc.tensor.sparse_tensor import SparseTensor

TENSORS = ((2000, 3000, 4000), (20_000, 30_000, 40_000), (10_000, 10_000), (200_000, 200_000))
"""Shapes of the tensors to time kernels on: with few rows and with many, whose tables do not fit in caches."""
NONZEROS = 100_000
EINSUMS = {
    3: (("ijk,jr,kr->ir", 16), ("ijk,jr,kr->ir", 32), ("ijk,jr,ks->irs", 24), ("ijk,kr->ijr", 16), ("ijk,k->ij", 1)),
    2: (("ij,jr->ir", 8), ("ij,jr->ir", 64), ("ij,ir,jr->ij", 32), ("ij,j->i", 1)),
}
"""The einsums of tensors of an order, and their ranks."""
PLANS = ("coo", "fiber", "rows")
RUNS = 5
"""Runs of a kernel; the median counts."""
STEPS = 20_000
"""Steps in which rates are fitted; each takes microseconds."""


def calibrate() -> DeviceProfile:
    """Measure the current GPU (without one, the CPU) and use the rates for planning, now and in later processes.

    On a GPU it measures the bandwidth of device memory, of the L2 and the L1 cache and of atomic additions, operations
    a second outside and inside dots at each precision, and the time to launch a kernel and to start a program; for two
    sparse operands also torch's dense products, zeros, gathers and calls, sums over pairs of nonzeros, and products of
    pairs of blocks. This takes less than a minute and 1.4 GB of device memory. On a CPU with numba installed it
    measures native loops and torch programs on one thread, in a minute or two. Run nothing else meanwhile.

    The record, one for each kind of device, is written to ``profiles`` in the cache folder (``$SPARSETC_CACHE_DIR``,
    ``options(cache_dir=)``). Kernels compiled before keep their plans.

    Returns:
        The profile. Its ``measured`` names the fields measured here, and ``sources`` says where each number is from.

    Raises:
        DeviceError: there is no GPU and no numba, the GPU is too busy to be measured, or Triton interprets
            (``TRITON_INTERPRET``).
        OutOfMemoryError: the device has too little memory free.
        OSError: the record cannot be written.

    Examples:
        >>> stc.calibrate().measured[:2]  # doctest: +SKIP
    """
    measured = measure()
    gpu.keep(measured)
    return measured


def measure() -> DeviceProfile:
    """Return the profile of the current GPU, or the CPU; nothing is kept. Errors: as of `calibrate`, but of files."""
    if torch.cuda.is_available() or not installed("numba"):
        return gpu.measure()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = {
            runner: fitted(list(timed(backend))) for runner, backend in (("native", "numba"), ("torch", "torch"))
        }
        return profile.calibrated(profile.cpu_name(), profile.today(), seconds)
    finally:
        torch.set_num_threads(threads)


def timed(backend: str) -> Iterator[tuple[dict[str, float], float]]:
    """Yield (counts, seconds) of each kernel of the calibration set."""
    generator = np.random.default_rng(0)
    for shape in TENSORS:
        coords = np.unique(np.stack([generator.integers(0, n, NONZEROS) for n in shape]), axis=1)
        x = SparseTensor(torch.from_numpy(coords), torch.rand(coords.shape[1]), shape)
        for equation, rank in EINSUMS[len(shape)]:
            sizes = {**dict(zip("ijk", shape, strict=False)), "r": rank, "s": rank}
            dense = [torch.rand([sizes[c] for c in term]) for term in equation.split("->")[0].split(",")[1:]]
            for plan in PLANS:
                try:
                    kernel = compile(equation, x, *dense, plan=plan, backend=backend)  # type: ignore[arg-type]
                except PlanError:
                    continue
                yield counted(kernel), seconds(lambda kernel=kernel, dense=dense: kernel(*dense))  # type: ignore[misc]


def counted(kernel: Any) -> dict[str, float]:
    """Return what the one part of a kernel does, by the names of `Cost.loops`."""
    step = kernel.step
    assert isinstance(step, Step)
    statistics = statistics_of(step.choice, [p.packed for p in step.parts], step.filled, step.problem)
    return cost_of(step.programs[0]).loops(statistics[0], step.problem.profile)


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of the processor that a call takes."""
    call()
    taken = []
    for _ in range(RUNS):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return median(taken)


def fitted(kernels: Sequence[tuple[dict[str, float], float]]) -> dict[str, float]:
    """Fit non-negative seconds a count to the kernels' times by least relative error.

    Of a call itself it is what it takes beyond a launch. Steps are those by which Lee and Seung factor matrices.
    """
    names = list(kernels[0][0])
    taken = np.array([took for _, took in kernels])
    counts = np.array([[*each.values()] for each, _ in kernels]) / taken[:, None]
    rates = 1 / np.maximum(counts.sum(0), 1e-30)
    square, wanted = counts.T @ counts, counts.sum(0)
    for _ in range(STEPS):
        rates *= wanted / np.maximum(square @ rates, 1e-300)
    rates[names.index("call")] -= profile.cpu().launch
    return {name: float(f"{rate:.3g}") if rate > 1e-13 else 0.0 for name, rate in zip(names, rates, strict=True)}
