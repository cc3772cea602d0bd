"""How long things live: tensors, kernels and packed parts go with their last reference, no collector needed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import OPERATIONS, Problem, assert_matches, random_sparse, random_values

import sparsetc as stc
from sparsetc.packing.base import Packed
from sparsetc.packing.partition import divide


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Memory returns by reference counts alone."""
    gc.collect()
    gc.freeze()  # what is there already need not be looked at again
    gc.disable()
    yield
    gc.enable()


def matrix(rows: int = 6, columns: int = 6, seed: int = 0) -> stc.SparseTensor:
    return random_sparse((rows, columns), "random", torch.float64, seed)


def watched(x: stc.SparseTensor) -> list[weakref.ref[Any]]:
    """References to a tensor, to its coordinates and to what is kept for it."""
    return [weakref.ref(x), weakref.ref(x.coords.untyped_storage()), weakref.ref(x.pattern)]


def gone(references: list[weakref.ref[Any]]) -> bool:
    return all(r() is None for r in references)


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mttkrp-3-0", "ttmc-3-1", "spmm", "sampled", "ttv-0", "semi-sparse", "reduction"])
def test_a_tensor_goes_with_its_last_reference(name: str) -> None:
    problem = Problem(OPERATIONS[name], dtype=torch.float64)
    x, *dense = problem.operands()
    for _ in range(2):
        stc.einsum(problem.equation, x, *dense)
    references = watched(x)
    del x
    assert gone(references)


@pytest.mark.parametrize("equation", ["ij,jr->ir", "ij,jr->ijr", "ij,jr->jir", "ii,ir->ir"])
def test_a_learned_tensor_goes_too(equation: str) -> None:
    x, b = matrix(), random_values((6, 3), torch.float64, 1).requires_grad_()
    x = x.with_values(x.values.clone().requires_grad_())
    for _ in range(2):
        result = stc.einsum(equation, x, b)
        (result.values if isinstance(result, stc.SparseTensor) else result).sum().backward()
    references = watched(x)
    del x, result
    assert gone(references)


@pytest.mark.parametrize("equation", ["ij,jk->ik", "ij,jk->", "ij,jk,kl->il", "ij,jk,kr->ir", "ij,jk->ki"])
@pytest.mark.parametrize("kept", [0, 1])
def test_neither_of_two_operands_keeps_the_other(equation: str, kept: int) -> None:
    sparse = [matrix(seed=n) for n in range(2)]
    dense = [random_values((6, 6), torch.float64, 2)] if equation.count(",") == 2 else []
    for _ in range(2):
        stc.einsum(equation, *sparse, *dense)
    references = watched(sparse[1 - kept])
    del sparse[1 - kept]
    assert gone(references)
    own = sparse.pop()
    references = watched(own)
    del own
    assert gone(references)


def test_an_operand_that_meets_itself_goes() -> None:
    x = matrix()
    for _ in range(2):
        assert_matches(stc.einsum("ij,jk->ik", x, x), "ij,jk->ik", [x, x])
    references = watched(x)
    del x
    assert gone(references)


def test_a_kernel_keeps_its_operand_until_it_goes() -> None:
    x, b = matrix(), random_values((6, 3), torch.float64, 1)
    kernel = stc.compile("ij,jr->ir", x, b)
    references = watched(x)
    del x
    kernel(b)
    assert not gone(references)
    del kernel
    assert gone(references)


def test_values_are_not_kept_for_the_pattern() -> None:
    x, b = matrix(), random_values((6, 3), torch.float64, 1)
    values = random_values((x.nnz,), torch.float64, 2)
    stc.einsum("ij,jr->ir", x.with_values(values), b)
    stc.einsum("ij,jk->ik", x.with_values(values), x)
    reference = weakref.ref(values.untyped_storage())
    del values
    assert reference() is None


# --- what is packed ---------------------------------------------------------------------------------------------------


def arrays_of(x: stc.SparseTensor) -> int:
    """Packed parts of a tensor with arrays of their own."""
    return len({next(iter(p.arrays.values())).data_ptr() for p in storages(x)})


def storages(x: stc.SparseTensor) -> list[Packed]:
    """What is packed for a tensor's pattern."""
    return [kept for kept in x.pattern.cache.values() if isinstance(kept, Packed)]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_ranks_share_what_is_packed(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    x = matrix(40, 30)
    for rank in (1, 3, 8, 16, 17, 32, 64, 100, 128):
        stc.compile("ij,jr->ir", x, torch.ones(30, rank, dtype=torch.float64), plan="coo", backend=backend)
    assert arrays_of(x) == len(storages(x)) == 1


def test_outputs_share_a_partition_that_does_not_deal_by_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    divided: list[str] = []
    monkeypatch.setattr("sparsetc.packing.partition.divide", lambda name, *a: divided.append(name) or divide(name, *a))
    x = random_sparse((20, 20, 20), "dense", torch.float64)
    storages = stc.plans.Storage((0,), (), (1, 2)), stc.plans.Storage((), (0, 1), (2,))
    parts = tuple(
        stc.plans.Part(f, s, stc.plans.Schedule(blocks=(("r", 2),)))
        for f, s in zip(("coo", "fiber"), storages, strict=True)
    )
    plan = stc.plans.Plan("one copy", parts, False, "threshold", (("threshold", 2000),))
    for kept in "ijk":
        others = [c for c in "ijk" if c != kept]
        equation = f"ijk,{others[0]}r,{others[1]}r->{kept}r"
        operands = [x, *(random_values((20, 2), torch.float64, n) for n in range(2))]
        assert_matches(stc.einsum(equation, *operands, plan=plan), equation, operands)
    assert arrays_of(x) == 2
    stc.einsum("ijk,jr,kr->ir", *operands, plan=replace(plan, parts=(parts[1], parts[0])))
    assert arrays_of(x) == 4
    assert divided == ["threshold"]
    by_rows = replace(plan, partition="run_length", options=(("threshold", 300),))
    for equation in ("ijk,jr,kr->ir", "ijk,ir,kr->jr"):
        assert_matches(stc.einsum(equation, *operands, plan=by_rows), equation, operands)
    assert divided == ["threshold", "run_length", "run_length"]


@pytest.mark.parametrize("plan", ["coo", "fiber", "rows"])
def test_kernels_of_one_storage_share_the_packed_values(plan: str) -> None:
    x = stc.SparseTensor([[0, 1, 1, 3], [2, 0, 1, 1]], [1.0, 2.0, 3.0, 4.0], (4, 3))
    kernels = [
        stc.compile("ij,ir->jr", x, torch.ones(4, rank), plan=plan, backend="torch", precision=precision)
        for rank, precision in ((2, "highest"), (5, "highest"), (2, "medium"))
    ]
    assert len({part.storage for k in kernels for part in k.plan.parts}) == 1
    assert len({k._packed[0].data_ptr() for k in kernels}) == 1


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsetc.tensor.pattern.KEPT", 3)
    x = random_sparse((4, 5, 6), "random", torch.float64)
    factors = {c: random_values((n, 2), torch.float64, n) for c, n in zip("ijk", x.shape, strict=True)}
    for kept in "ijk":
        others = [c for c in "ijk" if c != kept]
        equation = f"ijk,{others[0]}r,{others[1]}r->{kept}r"
        operands = [x, *(factors[c] for c in others)]
        for plan in ("coo", "fiber", "rows"):
            assert_matches(stc.einsum(equation, *operands, plan=plan), equation, operands)
    assert len(x.pattern.cache) == 3


def test_clearing_forgets_and_nothing_else() -> None:
    x, b = matrix(), random_values((6, 3), torch.float64, 1)
    before = stc.einsum("ij,jr->ir", x, b)
    x.pattern.clear()
    assert not len(x.pattern.cache)
    assert torch.equal(stc.einsum("ij,jr->ir", x, b), before)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_may_compile_for_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsetc.tensor.pattern.KEPT", 4)
    x, y = matrix(), matrix(seed=1)
    dense = {rank: random_values((6, rank), torch.float64, rank) for rank in range(1, 9)}
    expected = {rank: x.to_dense() @ b for rank, b in dense.items()}
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    def work() -> None:
        for _ in range(4):
            for rank, b in dense.items():
                torch.testing.assert_close(stc.einsum("ij,jr->ir", x, b, plan="coo"), expected[rank])
                stc.einsum("ij,jk->ik", x, y.with_values(y.values * rank))

    threads = [threading.Thread(target=guarded, args=(work,)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert len(x.pattern.cache) <= 4
