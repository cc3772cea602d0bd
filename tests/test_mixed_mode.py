"""Mixed-mode fibers, written outside of the package: one copy of the nonzeros serves the einsums of every mode."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import OPERATIONS, PATTERNS, TOLERANCE, Problem, assert_matches, check, mttkrp, random_sparse, random_values
from extensions import example
from torch.autograd import gradcheck, gradgradcheck

import sparsetc as stc
from sparsetc import partition
from sparsetc.formats import Packed
from sparsetc.planner.statistics import Counts

PLAN = "mixed-mode"
SMALL = {"i": 3, "j": 4, "k": 3, "r": 2, "s": 3}
ORDERS = {2: (9, 7), 3: (7, 9, 5), 4: (5, 6, 4, 7), 5: (4, 3, 5, 3, 4)}


@pytest.fixture(scope="module", autouse=True)
def module() -> Iterator[ModuleType]:
    with example("mixed_mode") as found:
        yield found


def operands_of(x: stc.SparseTensor, mode: int, rank: int = 4) -> list[Any]:
    return [x, *(random_values((n, rank), x.dtype, m) for m, n in enumerate(x.shape) if m != mode)]


def storages(x: stc.SparseTensor) -> list[Packed]:
    return [kept for kept in x.pattern.cache.values() if isinstance(kept, Packed)]


# --- the partition ----------------------------------------------------------------------------------------------------


def one_by_one(coords: list[tuple[int, ...]], order: int) -> list[list[int]]:
    """The numbers of each share's nonzeros, by the definition."""
    fibers: list[dict[tuple[int, ...], int]] = [{} for _ in range(order)]
    for c in coords:
        for m in range(order):
            fibers[m][c[:m] + c[m + 1 :]] = fibers[m].get(c[:m] + c[m + 1 :], 0) + 1
    found: list[list[int]] = [[] for _ in range(order)]
    for number, c in enumerate(coords):
        lengths = [fibers[m][c[:m] + c[m + 1 :]] for m in range(order)]
        # The longest; then the longest on average, which are the fewest; then the lowest.
        found[min(range(order), key=lambda m: (-lengths[m], len(fibers[m]), m))].append(number)
    return found


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("order", ORDERS)
def test_each_nonzero_goes_with_its_longest_fiber(module: ModuleType, order: int, name: str) -> None:
    x = random_sparse(ORDERS[order], name, torch.float64)
    dealt = module.longest_fiber(x.coords, x.shape)
    assert [part.tolist() for part in dealt] == one_by_one([tuple(c) for c in x.coords.T.tolist()], order)


def test_coordinates_that_no_word_holds(module: ModuleType) -> None:
    coords = torch.tensor([[0, 0, 0, 5], [1, 2, 3, 5], [4, 4, 4, 5], [7, 7, 8, 5]])
    far = coords * (2**61 // 10)
    for part, other in zip(
        module.longest_fiber(coords, (10,) * 4), module.longest_fiber(far, (2**61,) * 4), strict=True
    ):
        assert torch.equal(part, other)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "vector"])
@pytest.mark.parametrize("pattern", ["skewed", "slice"])
def test_operation(name: str, pattern: str) -> None:
    kernel = check(Problem(OPERATIONS[name], pattern=pattern), plan=PLAN)
    assert kernel.plan.name == PLAN


@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("equation", ["ijk,ir,kr->jr", "ijk,jr,ks->irs", "ijk,i->jk", "ijk,ir,jr,kr->ijk", "ij,ir->jr"])
def test_pattern(equation: str, pattern: str, coalesce: bool) -> None:
    check(Problem(equation, pattern=pattern, coalesce=coalesce), plan=PLAN)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("equation", ["ijk,ir,kr->jr", "ijk,jr,ks->irs", "ijk,i->jk", "ijk,ir,jr,kr->ijk", "ijk->"])
def test_dtype(equation: str, dtype: torch.dtype) -> None:
    check(Problem(equation, SMALL, "random", dtype), plan=PLAN)


@pytest.mark.parametrize("equation", ["ijkr,jr->ir", "ijkr,kr->ijr", "ijkr,jr,ks->irs"])
def test_dense_modes_of_the_sparse_operand(equation: str) -> None:
    x = random_sparse((7, 9, 5), "skewed", torch.float64)
    x = stc.SparseTensor(x.coords, random_values((x.nnz, 4), torch.float64, 1), (*x.shape, 4))
    sizes = dict(zip("ijkrs", (7, 9, 5, 4, 3), strict=True))
    terms = equation.split("->")[0].split(",")[1:]
    operands = [x, *(random_values(tuple(sizes[c] for c in term), torch.float64, n) for n, term in enumerate(terms))]
    assert_matches(stc.einsum(equation, *operands, plan=PLAN), equation, operands)


def test_sums_in_one_order_where_that_is_asked_for() -> None:
    operands = Problem("ijk,ir,kr->jr", dtype=torch.float64).operands()
    assert_matches(stc.einsum("ijk,ir,kr->jr", *operands, plan=PLAN, deterministic=True), "ijk,ir,kr->jr", operands)
    with pytest.raises(stc.PlanError, match="plan 'mixed-mode' does not apply"):
        stc.compile("ijk,ir,kr->jr", *operands, plan=PLAN, deterministic=True, backend="triton")


def test_a_vector_has_no_fibers_to_choose_from() -> None:
    with pytest.raises(stc.PlanError, match="plan 'mixed-mode' does not apply to \"i,ir->r\""):
        stc.einsum("i,ir->r", *Problem("i,ir->r").operands(), plan=PLAN)


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("equation", ["ijk,ir,kr->jr", "ijk,jr,ks->irs", "ijk,i->jk", "ijk,ir,jr,kr->ijk", "ij,jr->ir"])
def test_gradients(equation: str) -> None:
    x, *dense = Problem(equation, SMALL, "random", torch.float64).operands()

    def run(values: torch.Tensor, *dense: torch.Tensor) -> torch.Tensor:
        result = stc.einsum(equation, x.with_values(values), *dense, plan=PLAN)
        return result.values if isinstance(result, stc.SparseTensor) else result

    arguments = [t.clone().requires_grad_() for t in (x.values, *dense)]
    assert gradcheck(run, arguments)
    assert gradgradcheck(run, arguments)


# --- what is packed ---------------------------------------------------------------------------------------------------


def all_kernels(x: stc.SparseTensor, backend: str) -> list[stc.Kernel]:
    """MTTKRP of each mode at two ranks, a TTM, a TTV and a sum, of one tensor."""
    letters, settings = "ijklm"[: x.order], {"plan": PLAN, "backend": backend}
    first, last = torch.ones(x.shape[0], 40, dtype=x.dtype), torch.ones(x.shape[-1], dtype=x.dtype)
    return [
        *(
            stc.compile(mttkrp(x.order, m), *operands_of(x, m, rank), **settings)
            for m in range(x.order)
            for rank in (4, 33)
        ),
        stc.compile(f"{letters},{letters[0]}r->{letters[1:]}r", x, first, **settings),
        stc.compile(f"{letters},{letters[-1]}->{letters[:-1]}", x, last, **settings),
        stc.compile(f"{letters}->", x, **settings),
    ]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("order", ORDERS)
def test_one_part_a_mode_serves_all_einsums(order: int, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    x = random_sparse(tuple(2 * n for n in ORDERS[order]), "random", torch.float32)
    x = stc.SparseTensor(x.coords, x.values.tolist(), x.shape)  # whose values nothing else can change
    kernels, packed = all_kernels(x, backend), storages(x)
    dealt = [share for share in Counts(x.coords, x.shape).shares("longest_fiber") if share.nnz]
    assert 1 < len(packed) == len(dealt) <= order
    assert sorted(p.nnz for p in packed) == sorted(share.nnz for share in dealt)
    for kernel in kernels:
        assert {part.packed.token for part in kernel.step.parts} == {p.token for p in packed}
    # Values too are packed once, not once a kernel.
    assert len({values.data_ptr() for kernel in kernels for values in kernel._packed}) == len(packed)


def test_gradients_and_their_gradients_read_the_same_parts() -> None:
    x = random_sparse((7, 9, 5), "random", torch.float64)
    leaves = [x.values.clone().requires_grad_(), *(t.requires_grad_() for t in operands_of(x, 1)[1:])]
    for mode in range(3):
        stc.einsum(mttkrp(3, mode), *operands_of(x, mode), plan=PLAN)
    packed = {p.token for p in storages(x)}
    assert len(packed) == 3
    result = stc.einsum(mttkrp(3, 1), x.with_values(leaves[0]), *leaves[1:], plan=PLAN)
    first = torch.autograd.grad(result.square().sum(), leaves, create_graph=True)
    torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    assert {p.token for p in storages(x)} == packed


def test_a_batch_reads_the_same_parts() -> None:
    x = random_sparse((7, 9, 5), "random", torch.float64)
    b, c = (random_values((6, n, 4), torch.float64, n) for n in x.shape[1:])
    expected = torch.stack([stc.einsum("ijk,jr,kr->ir", x, *own, plan=PLAN) for own in zip(b, c, strict=True)])
    before = len(storages(x))
    found = torch.func.vmap(lambda b, c: stc.einsum("ijk,jr,kr->ir", x, b, c, plan=PLAN))(b, c)
    torch.testing.assert_close(found, expected)
    assert len(storages(x)) == before


@pytest.mark.parametrize(("pattern", "parts"), [("fiber", 1), ("one", 1), ("empty", 0)])
def test_a_share_of_nothing_is_not_kept(pattern: str, parts: int) -> None:
    x = random_sparse((7, 9, 5), pattern, torch.float64)
    for mode in range(3):
        stc.einsum(mttkrp(3, mode), *operands_of(x, mode), plan=PLAN)
    assert len(storages(x)) == parts


def test_nonzeros_are_dealt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    deals: list[str] = []
    monkeypatch.setattr(
        "sparsetc.partition.stored.deal", lambda name, *a: deals.append(name) or partition.deal(name, *a)
    )
    x = random_sparse((7, 9, 5), "random", torch.float64)
    for mode in range(3):
        stc.einsum(mttkrp(3, mode), *operands_of(x, mode), plan=PLAN)
    assert deals == ["longest_fiber"]


def test_one_copy_takes_less_memory_than_one_a_mode(module: ModuleType) -> None:
    x = stc.datasets.uber()
    factors = [torch.rand(n, 4) for n in x.shape]
    sizes = []
    for plan in (PLAN, "fiber"):
        x.pattern.clear()
        module.all_modes(x, factors, plan)
        sizes.append([p.nbytes for p in storages(x)])
    assert list(map(len, sizes)) == [4, 4]
    assert 3 * sum(sizes[0]) < sum(sizes[1])
