"""Memory that runs out, and the limit of memory: one error of ours, before or wherever an allocation failed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from threading import Thread

import processes
import pytest
import torch
from cases import random_sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peak_memory import SLACK, Case, measure

import sparsetc as stc
from sparsetc.options import Options
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
    monkeypatch.setattr("sparsetc.packing.partition.pack", fail)
    y = random_sparse((4, 6), "random", torch.float64)  # of which nothing is packed
    with pytest.raises(stc.OutOfMemoryError):
        stc.compile("ij,ir->jr", y, torch.ones(4, 2, dtype=torch.float64))


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


# -- the limit of memory --------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[], object]] = {
    "to_dense": lambda: stc.eye(100).to_dense(),
    "sum": lambda: stc.eye(100).sum((), output="dense"),
    "full": lambda: stc.full((100, 100), 1.0),
    "kron": lambda: stc.kron(stc.eye(100), stc.eye(100)),
    "expand_dense": lambda: stc.eye(100).with_values(torch.ones(100, 100)).expand_dense(),
    "einsum": lambda: stc.einsum("ij->ji", stc.eye(100), output="dense"),
    "einsum of two": lambda: stc.einsum("ij,kl->ik", stc.eye(100), stc.eye(100), output="dense"),
    "amax of an einsum": lambda: stc.einsum("ij->ij", stc.eye(100), reduce="amax", output="dense"),
    "CP": lambda: stc.decomposition.CP(torch.ones(1), [torch.ones(100, 1)] * 2).to_dense(),
    "cp_als": lambda: stc.decomposition.cp_als(stc.eye(100), 60, n_iter_max=1),
    "tucker": lambda: stc.decomposition.tucker(stc.eye(100), (60, 60), n_iter_max=1),
    "Tucker": lambda: stc.decomposition.Tucker(torch.ones(1, 1), [torch.ones(100, 1)] * 2).to_dense(),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_whatever_makes_a_dense_result_heeds_the_limit_in_one_text(make: Callable[[], object]) -> None:
    said = r" would take [\d,]+ bytes, the limit on cpu is 20,000; raise it with sparsetc\.options\(memory_limit="
    with stc.options(memory_limit=20_000), pytest.raises(stc.OutOfMemoryError, match=said):
        make()
    with stc.options(memory_limit="10MB"):
        make()


KINDS = ("dense", "full", "kron", "expand", "blocks", "sum", "einsum", "model", "core")
FILES = (".npz", "csc.npz", ".parquet", ".tns", ".mtx")
SHAPES = {1: (12_000_000,), 2: (4000, 3500), 3: (300, 250, 200)}


@pytest.fixture(scope="module")
def measured() -> Iterator[Callable[[Case], list[tuple[int, int]]]]:
    """What a process of its own answers, which imports the libraries once."""
    here, there = multiprocessing.Pipe()
    child = processes._context().Process(target=measure, args=(there,), daemon=True)
    child.start()

    def answer(case: Case) -> list[tuple[int, int]]:
        here.send(case)
        while not here.poll(0.05):
            assert child.is_alive(), case
        return here.recv()  # type: ignore[no-any-return]

    yield answer
    here.send(None)
    child.join()


cases = st.builds(
    lambda kind, order, dtype, in_order: Case(
        kind,
        SHAPES[2 if kind in ("model", "core", ".mtx", "csc.npz") else 3 if kind == "sum" else order],
        1 if kind in ("full", "model", "core") else 100_000 if kind in ("kron", "blocks", "einsum") else 300_000,
        dtype,
        in_order,
    ),
    st.sampled_from((*KINDS, *FILES)),
    st.integers(1, 3),
    st.sampled_from(("float32", "float64", "int32")),
    st.booleans(),
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@settings(max_examples=16, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases)
def test_the_limit_bounds_the_peak(measured: Callable[[Case], list[tuple[int, int]]], case: Case) -> None:
    """The least limit that lets a call run, and each that does not, is not passed by more than what does not grow."""
    for limit, peak in measured(case):
        assert peak <= limit + SLACK, f"{case}: {peak:,} bytes at a limit of {limit:,}"


def test_options_of_the_process_hold_in_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["sparsetc.options"], "_DEFAULT", Options())
    x, said = stc.eye(1000), []

    def refused(limit: str | None = None) -> None:
        try:
            with stc.options(memory_limit=limit):
                x.to_dense()
        except stc.OutOfMemoryError as error:
            said.append(str(error))

    stc.set_options(memory_limit="1MB", plan="coo")
    for limit in (None, "1GB"):
        thread = Thread(target=refused, args=(limit,))
        thread.start()
        thread.join()
    assert len(said) == 1
    assert "the limit on cpu is 1,000,000" in said[0]
    assert stc.compile("ij,j->i", x, torch.ones(1000)).plan.name == "coo"
    with pytest.raises(stc.KeywordError, match="memory_limit"):
        stc.set_options(memori_limit=1)  # type: ignore[call-arg]
