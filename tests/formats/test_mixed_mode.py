"""Mixed-mode fibers: one copy of the nonzeros serves the einsums of every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import (
    MODES,
    OPERATIONS,
    PATTERNS,
    TOLERANCE,
    Problem,
    assert_matches,
    check,
    mttkrp,
    random_sparse,
    random_values,
)
from mixed_mode_cases import crossed
from paper_algorithms import one_by_one
from torch.autograd import gradcheck, gradgradcheck

import sparsetc as stc
from sparsetc.formats.mixed_mode import by_mixed_mode
from sparsetc.packing.base import Packed
from sparsetc.packing.partition import divide
from sparsetc.planner.problem import Counts

PLAN = "mm-csf"
SMALL = {"i": 3, "j": 4, "k": 3, "r": 2, "s": 3}
ORDERS = {2: (9, 7), 3: (7, 9, 5), 4: (5, 6, 4, 7), 5: (4, 3, 5, 3, 4), 6: (3, 2, 4, 3, 2, 3)}


def operands_of(x: stc.SparseTensor, mode: int, rank: int = 4) -> list[Any]:
    return [x, *(random_values((n, rank), x.dtype, m) for m, n in enumerate(x.shape) if m != mode)]


def storages(x: stc.SparseTensor) -> list[Packed]:
    return [kept for kept in x.pattern.cache.values() if isinstance(kept, Packed)]


# --- the partition ----------------------------------------------------------------------------------------------------


def by_sets(coords: torch.Tensor, order: int) -> list[list[int]]:
    """The numbers of each share's nonzeros, by what the partition promises: whole fibers, by classes of lengths."""
    left = {tuple(c): n for n, c in enumerate(coords.T.tolist())}
    along: list[dict[tuple[int, ...], list[tuple[int, ...]]]] = [{} for _ in range(order)]
    for c in left:
        for m in range(order):
            along[m].setdefault(c[:m] + c[m + 1 :], []).append(c)
    modes = sorted(range(order), key=lambda m: (len(along[m]), m))
    found: list[list[int]] = [[] for _ in range(order)]
    taken = 0
    for least in (2**n for n in reversed(range(12))):
        for m in modes:
            lengths = {f: [c for c in own if c in left] for f, own in along[m].items()}
            for own in lengths.values():
                if len(own) >= least:
                    found[m] += [left.pop(c) for c in own]
                    taken += 1
    if taken >= len(along[modes[0]]):
        return [list(range(coords.shape[1])) if m == modes[0] else [] for m in range(order)]
    return [sorted(own) for own in found]


def fibers_of(coords: torch.Tensor, share: list[int]) -> int:
    """How many fibers a partition makes, given the mode of each nonzero."""
    nonzeros = [tuple(c) for c in coords.T.tolist()]
    return len({(m, c[:m] + c[m + 1 :]) for m, c in zip(share, nonzeros, strict=True)})


def shares_of(coords: torch.Tensor, shape: tuple[int, ...]) -> list[int]:
    """The mode that the partition deals each nonzero to."""
    found = torch.full((coords.shape[1],), -1)
    for mode, part in enumerate(by_mixed_mode(coords, shape)):
        found[slice(None) if part is None else part] = mode
    return found.tolist()


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("order", ORDERS)
def test_the_longest_fibers_take_what_is_left_of_them(order: int, name: str) -> None:
    x = random_sparse(ORDERS[order], name, torch.float64)
    shares = by_mixed_mode(x.coords, x.shape)
    every = list(range(x.nnz))
    assert [every if part is None else part.tolist() for part in shares] == by_sets(x.coords, order)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("order", ORDERS)
def test_there_are_no_more_fibers_than_along_one_mode_and_about_as_many_as_one_by_one(order: int, name: str) -> None:
    x = random_sparse(ORDERS[order], name, torch.float64)
    own = fibers_of(x.coords, shares_of(x.coords, x.shape))
    assert own <= min(fibers_of(x.coords, [mode] * x.nnz) for mode in range(order))
    assert own <= 1.1 * fibers_of(x.coords, one_by_one(x.coords, x.shape))


def test_the_example_of_the_paper() -> None:
    """Figure 4: of nonzeros (i, j, k), lengths that are counted anew leave one fiber less than lengths that are not."""
    rows = [(5, 1, 1), (5, 1, 2), (5, 1, 3), (4, 1, 1), (4, 1, 2), (4, 1, 5), (0, 1, 2), (0, 1, 4)]
    coords = torch.tensor(rows).T.contiguous()
    assert one_by_one(coords, (6, 2, 6)) == [2, 2, 2, 2, 2, 2, 2, 2] == shares_of(coords, (6, 2, 6))


def test_coordinates_that_no_word_holds() -> None:
    coords = torch.tensor([[0, 0, 0, 5], [1, 2, 3, 5], [4, 4, 4, 5], [7, 7, 8, 5]])
    far = coords * (2**61 // 10)
    assert shares_of(coords, (10,) * 4) == shares_of(far, (2**61,) * 4)


def test_duplicates_lie_on_one_fiber() -> None:
    x = random_sparse((7, 9, 5), "random", torch.float64, coalesce=False)
    coords = torch.stack(sorted(x.coords.T, key=lambda c: c.tolist()), 1)
    share = shares_of(coords, x.shape)
    assert all(share[n] == share[n + 1] for n in range(0, x.nnz, 2))


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "vector"])
@pytest.mark.parametrize("pattern", ["skewed", "slice"])
def test_operation(name: str, pattern: str) -> None:
    kernel = check(Problem(OPERATIONS[name], pattern=pattern), plan=PLAN)
    assert kernel.plan.name == PLAN


@pytest.mark.parametrize("mode", range(6))
@pytest.mark.parametrize("pattern", ["random", "one", "dense"])
def test_six_modes_in_all_roles(mode: int, pattern: str) -> None:
    operands = operands_of(random_sparse(ORDERS[6], pattern, torch.float64), mode)
    assert_matches(stc.einsum(mttkrp(6, mode), *operands, plan=PLAN), mttkrp(6, mode), operands)


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
    kernel = stc.compile("ijk,ir,kr->jr", *operands, plan=PLAN, deterministic=True, backend="triton")
    assert kernel.plan.name == PLAN
    assert "atomic" not in kernel.source


def test_a_vector_has_no_fibers_to_choose_from() -> None:
    with pytest.raises(stc.PlanError, match="plan 'mm-csf' does not apply to \"i,ir->r\": a vector has no fibers"):
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
    letters, settings = MODES[: x.order], {"plan": PLAN, "backend": backend}
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
    x = crossed(order, torch.float32)
    kernels, packed = all_kernels(x, backend), storages(x)
    shares = [share for share in Counts(x.coords, x.shape).shares("mixed_mode") if share.nnz]
    assert len(packed) == len(shares) == order
    assert sorted(p.nnz for p in packed) == sorted(share.nnz for share in shares)
    for kernel in kernels:
        assert {part.packed.token for part in kernel.step.parts} == {p.token for p in packed}
    # Values too are packed once, not once a kernel.
    assert len({values.data_ptr() for kernel in kernels for values in kernel._packed}) == len(packed)


def test_gradients_and_their_gradients_read_the_same_parts() -> None:
    x = crossed(3, torch.float64)
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
    x = crossed(3, torch.float64)
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
    divided: list[str] = []
    monkeypatch.setattr("sparsetc.packing.partition.divide", lambda name, *a: divided.append(name) or divide(name, *a))
    x = random_sparse((7, 9, 5), "random", torch.float64)
    for mode in range(3):
        stc.einsum(mttkrp(3, mode), *operands_of(x, mode), plan=PLAN)
    assert divided == ["mixed_mode"]


def test_one_copy_takes_less_memory_than_one_a_mode() -> None:
    x = stc.datasets.uber()
    factors = [torch.rand(n, 4) for n in x.shape]
    sizes = []
    for plan in (PLAN, "fiber"):
        x.pattern.clear()
        for mode in range(4):
            stc.mttkrp(x, factors, mode, plan=plan)
        sizes.append([p.nbytes for p in storages(x)])
    assert list(map(len, sizes)) == [4, 4]
    assert 3 * sum(sizes[0]) < sum(sizes[1])


def test_a_single_einsum_takes_the_plan_only_where_it_is_asked_for() -> None:
    x = random_sparse((7, 9, 5), "random", torch.float32)
    kernel = stc.compile(mttkrp(3, 1), *operands_of(x, 1))
    assert not any(PLAN in name for name, _ in kernel.explain().considered)


def forests(x: stc.SparseTensor, backend: str) -> list[str]:
    """The levels of the parts that are run, by mode."""
    kernel = stc.compile(mttkrp(x.order, 0), *operands_of(x, 0), plan=PLAN, backend=backend)
    return [" | ".join("".join(map(str, level)) or "-" for level in p.storage.levels) for p in kernel.plan.parts]


def test_slices_are_apart_where_they_are_long_or_cost_nothing() -> None:
    pytest.importorskip("triton")
    for shape, on_gpu in (((2, 20, 30), "- | 01 | 2"), ((2, 64, 70), "0 | 1 | 2")):  # 64 pieces of fibers fill blocks
        x = random_sparse(shape, "dense", torch.float32)
        assert forests(x, "triton") == [on_gpu]
        assert forests(x, "torch") == ["0 | 1 | 2"]


@pytest.mark.parametrize("rank", [4, 32, 128])
def test_tiles_of_a_gpu_have_a_warp_for_each_of_their_usual_ones(rank: int) -> None:
    pytest.importorskip("triton")
    x = random_sparse((7, 9, 5), "random", torch.float32)
    kernel = stc.compile(mttkrp(3, 0), *operands_of(x, 0, rank), plan=PLAN, backend="triton")
    assert {part.schedule.warps * part.schedule.lanes for part in kernel.plan.parts} == {16}
