"""Memory that runs out: one error of ours, wherever the allocation failed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from cases import random_sparse

import sparsetc as stc
from sparsetc.support.entry import entry_point

TORCH = "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(TORCH),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
        MemoryError("Unable to allocate 8.00 EiB for an array"),
    ],
)
def test_errors_of_allocations_are_ours(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise error

    x, b = random_sparse((4, 5), "random", torch.float64), torch.ones(5, 2, dtype=torch.float64)
    kernel = stc.compile("ij,jr->ir", x, b)
    monkeypatch.setattr("sparsetc.contraction.step.Step.rows", fail)
    for call in (lambda: kernel(b), lambda: stc.einsum("ij,jr->ir", x, b)):
        with pytest.raises(stc.OutOfMemoryError, match=r"memory ran out.*fewer columns") as caught:
            call()
        assert caught.value.__cause__ is error
    monkeypatch.setattr("sparsetc.packing.deal.pack", fail)
    with pytest.raises(stc.OutOfMemoryError):
        stc.compile("ij,ir->jr", x, torch.ones(4, 2, dtype=torch.float64))


def test_a_plan_that_takes_more_than_a_gpu_has_is_the_plans_error() -> None:
    errors = pytest.importorskip("triton.runtime.errors")

    @entry_point
    def fail() -> None:
        raise errors.OutOfResources(262144, 232448, "shared memory")

    with pytest.raises(stc.PlanError, match=r"262144.*smaller blocks"):
        fail()


def test_other_errors_are_left_alone() -> None:
    @entry_point
    def fail(error: Exception) -> None:
        raise error

    for error in (RuntimeError("shapes differ"), stc.OutOfMemoryError("the result"), stc.DeviceError("on two devices")):
        with pytest.raises(type(error)) as caught:
            fail(error)
        assert caught.value is error


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is Linux's")
@pytest.mark.parametrize("call", ['stc.compile("ijk,jr,kr->ir", x, b, b)', 'stc.einsum("ij,jk->ik", y, y)'])
def test_a_limit_of_the_process(call: str) -> None:
    code = f"""
        import resource, torch, sparsetc as stc
        torch.set_num_threads(1)
        n, nnz = 4000, 1_000_000
        g = torch.Generator().manual_seed(0)
        x = stc.SparseTensor(torch.randint(0, n, (3, nnz), generator=g), torch.ones(nnz), (n, n, n))
        y = stc.SparseTensor(torch.randint(0, n, (2, nnz), generator=g), torch.ones(nnz), (n, n))
        small = stc.SparseTensor([[0], [0], [0]], [1.0], (n, n, n))
        b = torch.ones(n, 4)
        stc.einsum("ijk,jr,kr->ir", small, b, b)  # whatever is imported on the way
        stc.einsum("ij,jk->ik", y.with_values(y.values * 0), stc.SparseTensor([[0], [0]], [1.0], (n, n)))
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), -1))
        try:
            {call}
        except stc.OutOfMemoryError as error:
            assert isinstance(error, MemoryError) and "memory ran out" in str(error), error
            print("refused")
    """
    # Without it, glibc keeps what the lines above freed, and that is enough.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment)
    assert found.stdout.strip() == "refused", found.stderr
