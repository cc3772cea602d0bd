"""Contractions of two or more sparse operands: values and patterns, by every path, against the float64 reference."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import PATTERNS, assert_matches, bound_of, ends, every_wide_shape, poisoned, random_sparse, random_values
from hypothesis import given, settings
from pair_cases import (
    CHAINS,
    EQUATIONS,
    MIXED,
    PLANS,
    SIZES,
    chains,
    check_pair,
    operands,
    pairs,
    small_chunks,
    structural,
)
from torch.utils._python_dispatch import TorchDispatchMode

import sparsetc as stc
from sparsetc.device.profile import default_gpu
from sparsetc.join import join, order
from sparsetc.join.blocking import FEWEST_PAIRS, Blocking, BlockWork, sides_for
from sparsetc.join.join import Join
from sparsetc.products import tasks as task_lists
from sparsetc.products.blocks import block_terms
from sparsetc.products.scalar import FEW, MANY, TaskSums, waits

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.complex64, torch.complex128),
)


# --- every equation, path, pattern, type ------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", EQUATIONS)
def test_equation_by_plan(name: str, plan: str) -> None:
    equation = EQUATIONS[name]
    for pattern in PATTERNS:
        for coalesce in (True, False):
            given = operands(equation, pattern, coalesce=coalesce)
            check_pair(equation, given, plan=plan)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_dtype(plan: str, dtype: torch.dtype) -> None:
    for name in ("one-mode", "two-modes", "batch", "elementwise", "inner", "own-letters"):
        check_pair(EQUATIONS[name], operands(EQUATIONS[name], "skewed", dtype, coalesce=False), plan=plan)


@settings(max_examples=1000)
@given(pairs(DTYPES))
def test_any_pair_agrees_with_the_reference(drawn: Any) -> None:
    given = drawn.operands()
    with drawn.in_pieces(given), poisoned():
        kernel = stc.compile(drawn.equation, *given, plan=drawn.plan)
        for _ in range(2):
            found = kernel()
            assert_matches(found, drawn.equation, given)
        if not drawn.equation.endswith(">"):
            assert isinstance(found, stc.SparseTensor)
            assert found.is_coalesced
            assert torch.equal(found.coords, structural(drawn.equation, given))
        else:
            assert isinstance(found, torch.Tensor)
            assert found.ndim == 0


@settings(max_examples=150)
@given(pairs((torch.float64, torch.int64)))
def test_new_values_of_the_same_patterns(drawn: Any) -> None:
    given = drawn.operands()
    kernel = stc.compile(drawn.equation, *given, plan=drawn.plan)
    other = [o.with_values(random_values((o.nnz,), drawn.dtype, drawn.seed + 9 + n)) for n, o in enumerate(given)]
    with poisoned():
        assert_matches(kernel.with_values(*(o.values for o in other))(), drawn.equation, other)
        assert_matches(kernel(values=[None, other[1].values]), drawn.equation, [given[0], other[1]])
        assert_matches(kernel(), drawn.equation, given)


@pytest.mark.parametrize("plan", PLANS)
def test_the_two_empty_operands(plan: str) -> None:
    for first, second in (("empty", "dense"), ("dense", "empty"), ("empty", "empty")):
        x, y = random_sparse((4, 5), first, torch.float64), random_sparse((5, 6), second, torch.float64)
        found = check_pair("ij,jk->ik", [x, y], plan=plan)()
        assert found.nnz == 0
        assert check_pair("ij,jk->", [x, y], plan=plan)().item() == 0.0


@pytest.mark.parametrize("plan", PLANS)
def test_an_empty_intersection(plan: str) -> None:
    x = stc.SparseTensor([[0, 1], [0, 2]], [1.0, 2.0], (3, 4))
    y = stc.SparseTensor([[1, 3], [0, 0]], [1.0, 2.0], (4, 2))
    assert check_pair("ij,jk->ik", [x, y], plan=plan)().nnz == 0


def test_the_same_object_twice() -> None:
    x = random_sparse((6, 7, 8), "skewed", torch.float64)
    check_pair("ijk,ljk->il", [x, x])
    check_pair("ijk,ijk->k", [x, x])
    assert_matches(stc.einsum("ijk,abk->ijab", x, x), "ijk,abk->ijab", [x, x])


def test_other_sparse_tensors_and_forms_of_call() -> None:
    from scipy import sparse

    left = sparse.random_array((6, 7), density=0.3, rng=0).tocsr()
    right = torch.rand(7, 5).double().to_sparse_csr()
    found = stc.einsum("ij,jk", left, right)
    torch.testing.assert_close(found.to_dense(), torch.as_tensor(left.toarray()) @ right.to_dense())
    x = stc.SparseTensor.from_scipy(left)
    torch.testing.assert_close(stc.einsum(x, [0, 1], right, [1, 2], [0, 2]).to_dense(), found.to_dense())
    y = stc.SparseTensor.from_torch(torch.rand(3, 4, 5, dtype=torch.float64).to_sparse(2))  # a dense mode
    check_pair("ijk,ljk->il", [y.expand_dense(), y.expand_dense()])
    torch.testing.assert_close(
        stc.einsum("...k,k...->...", y.expand_dense(), random_sparse((5, 3, 4), "dense", torch.float64)).shape, (3, 4)
    )


def test_against_scipy_on_large_matrices() -> None:
    from scipy import sparse

    left = sparse.random_array((900, 1500), density=0.006, rng=1)
    right = sparse.random_array((1500, 800), density=0.007, rng=2)
    expected = (left.tocsr() @ right.tocsr()).tocoo()
    for plan in ("scalar", "dense", "bcb"):
        found = stc.einsum("ij,jk->ik", left, right, plan=plan)
        assert found.nnz == expected.nnz
        got = found.to_scipy().tocsr()
        assert abs(got - expected.tocsr()).max() < 1e-12


# --- results ----------------------------------------------------------------------------------------------------------


def test_output_forms() -> None:
    x, y = operands("ij,jk->ik")
    dense = stc.einsum("ij,jk->ik", x, y, output="dense")
    assert isinstance(dense, torch.Tensor)
    torch.testing.assert_close(dense, x.to_dense() @ y.to_dense())
    assert isinstance(stc.einsum("ij,jk->i", x, y), stc.SparseTensor)
    assert stc.einsum("ij,jk->", x, y).ndim == 0
    with pytest.raises(stc.PlanError, match="keeps no mode of a sparse operand"):
        stc.einsum("ij,jk->", x, y, output="sparse")
    with pytest.raises(stc.PlanError, match="output must be"):
        stc.einsum("ij,jk->", x, y, output="coo")


def test_zeros_are_kept_unless_dropped() -> None:
    x = stc.SparseTensor([[0, 0], [0, 1]], [1.0, 1.0], (1, 2))
    y = stc.SparseTensor([[0, 1, 1], [0, 0, 1]], [1.0, -1.0, 2.0], (2, 2))
    for plan in PLANS:
        kept = stc.einsum("ij,jk->ik", x, y, plan=plan)
        assert kept.values.tolist() == [0.0, 2.0]
        dropped = stc.einsum("ij,jk->ik", x, y, plan=plan, drop_zeros=True)
        assert dropped.values.tolist() == [2.0]
        assert dropped.is_coalesced
    explicit = x.with_values(torch.tensor([0.0, 0.0]))
    assert stc.einsum("ij,jk->ik", explicit, y).nnz == 2  # the pattern does not depend on values


@pytest.mark.parametrize("plan", PLANS)
def test_infinities_and_nan_reach_only_what_they_meet(plan: str) -> None:
    x = stc.SparseTensor([[0, 0, 1], [0, 1, 1]], [float("inf"), 1.0, 1.0], (2, 3))
    y = stc.SparseTensor([[0, 1, 1], [0, 0, 1]], [1.0, float("nan"), 2.0], (3, 2))
    found = stc.einsum("ij,jk->ik", x, y, plan=plan)
    assert found.coords.tolist() == [[0, 0, 1, 1], [0, 1, 0, 1]]
    assert found.values.isnan().tolist() == [True, False, True, False]
    assert found.values[[1, 3]].tolist() == [2.0, 2.0]


# --- contract: alpha and beta -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("modes", [1, 2, ((0, 2), (1, 0)), ((), ())], ids=str)
def test_contract_accumulates(modes: Any, dtype: torch.dtype) -> None:
    shapes = {1: ((4, 5, 6), (6, 7)), 2: ((4, 5, 6), (5, 6, 3))}.get(str(modes) and modes if modes in (1, 2) else 0)
    first, second = shapes or ((4, 5, 6), (6, 4, 2))
    x, y = random_sparse(first, "random", dtype, 1), random_sparse(second, "skewed", dtype, 2)
    expected = torch.tensordot(x.to_dense(), y.to_dense(), dims=modes)
    plain = stc.contract(x, y, modes)
    torch.testing.assert_close(plain.to_dense(), expected)
    out = random_sparse(tuple(expected.shape), "random", dtype, 3)
    found = stc.contract(x, y, modes, input=out, alpha=2.0, beta=-0.5)
    assert isinstance(found, stc.SparseTensor)
    assert found.is_coalesced
    torch.testing.assert_close(found.to_dense(), 2 * expected - 0.5 * out.to_dense())
    again = stc.contract(x, y, modes, input=found, alpha=1.0, beta=1.0, drop_zeros=True)
    torch.testing.assert_close(again.to_dense(), 3 * expected - 0.5 * out.to_dense())
    torch.testing.assert_close(
        stc.contract(x, y.to_dense(), modes, input=out.to_dense(), beta=1, output="dense"), expected + out.to_dense()
    )


def test_contract_refuses_what_does_not_fit() -> None:
    x, y = random_sparse((4, 5), "random", torch.float64), random_sparse((5, 6), "random", torch.float64)
    with pytest.raises(stc.ShapeError, match=r"input must have the result's shape \(4, 6\), found \(6, 4\)"):
        stc.contract(x, y, 1, input=random_sparse((6, 4), "random", torch.float64), beta=1)
    with pytest.raises(stc.DtypeError, match="input has dtype"):
        stc.contract(x, y, 1, input=random_sparse((4, 6), "random", torch.float32), beta=1)
    with pytest.raises(stc.EquationError, match="there is no input"):
        stc.contract(x, y, 1, beta=1)
    whole = [random_sparse(shape, "random", torch.int64) for shape in ((4, 5), (5, 6))]
    assert_matches(stc.contract(*whole, 1, alpha=3), "ij,jk->ik", [whole[0].with_values(3 * whole[0].values), whole[1]])
    for bad in (0.5, 1j, "2"):
        with pytest.raises(stc.DtypeError, match=r"alpha must be a number that torch\.int64 can be multiplied by"):
            stc.contract(*whole, 1, alpha=bad)
    nan = random_sparse((4, 6), "random", torch.float64)
    nan = nan.with_values(torch.full_like(nan.values, torch.nan))
    assert not stc.contract(x, y, 1, input=nan, beta=0).values.isnan().any()  # as in BLAS, it is not read


# --- memory, skew, sizes past 64 bits ---------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest tensor that anything returned, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for t in found if isinstance(found, tuple | list) else (found,):
            if isinstance(t, torch.Tensor):
                self.nbytes = max(self.nbytes, t.numel() * t.element_size())
        return found


def test_memory_stays_below_the_limit_however_many_tasks() -> None:
    """1,500 x 1,500 tasks for each of 4 contracted indices; as a list they would take 72 MB and more."""
    n, width = 1500, 4
    i, j = torch.arange(n).repeat(width), torch.arange(width).repeat_interleave(n)
    x = stc.SparseTensor(torch.stack([i % 40, i // 40, j]), torch.rand(n * width, dtype=torch.float64), (40, 38, width))
    y = stc.SparseTensor(torch.stack([j, i % 40, i // 40]), torch.rand(n * width, dtype=torch.float64), (width, 40, 38))
    limit = 2_000_000
    for equation in ("iaj,jkb->ik", "iaj,jkb->"):
        with stc.options(memory_limit=limit), Largest() as largest:
            found = stc.einsum(equation, x, y, plan="scalar")
        assert largest.nbytes <= limit
        assert_matches(found, equation, [x, y])
    small = stc.SparseTensor(torch.stack([i, j]), torch.rand(n * width, dtype=torch.float64), (n, width))
    with stc.options(memory_limit=n * n * 24), Largest() as largest:
        kernel = stc.compile("ij,kj->ik", small, small, plan="scalar")
        assert kernel.contraction.steps[0].task_sums.tasks.join_order.tasks == width * n * n
        found = kernel()
    assert largest.nbytes <= n * n * 24
    torch.testing.assert_close(found.values.view(n, n), small.to_dense() @ small.to_dense().T)


@pytest.mark.parametrize("plan", PLANS)
def test_a_result_that_would_not_fit_is_refused_with_its_size(plan: str) -> None:
    n = 100_000
    x = stc.SparseTensor(torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.long)]), torch.ones(n), (n, 3))
    message = r"the result of ij,kj->ik, at least 10,000,000,000 nonzeros, would take 200,000,000,000 bytes"
    with pytest.raises(stc.OutOfMemoryError, match=message):
        stc.compile("ij,kj->ik", x, x, plan=plan, memory_limit=10**9)


@pytest.mark.parametrize("plan", ["scalar", "bcb", "dense"])
def test_the_exact_size_is_refused_too(plan: str) -> None:
    x, y = random_sparse((40, 30), "random", torch.float64, 1), random_sparse((30, 40), "random", torch.float64, 2)
    entries = stc.compile("ij,jk->ik", x, y).nnz
    if plan == "scalar":
        stc.compile("ij,jk->ik", x, y, plan=plan, memory_limit=entries * 24)
        with pytest.raises(stc.OutOfMemoryError, match=f"{entries:,} nonzeros"):
            stc.compile("ij,jk->ik", x, y, plan=plan, memory_limit=entries * 24 - 1)
    else:
        with pytest.raises(stc.OutOfMemoryError, match="would take"):
            stc.compile("ij,jk->ik", x, y, plan=plan, memory_limit=entries * 24 - 1)


def test_one_index_shared_by_everything_takes_no_time_where_the_result_is_small() -> None:
    n = 100_000
    ones = torch.zeros(n, dtype=torch.long)
    x = stc.SparseTensor(torch.stack([torch.arange(n), ones]), torch.ones(n, dtype=torch.float64), (n, 2))
    assert stc.einsum("ij,kj->", x, x).item() == float(n) ** 2  # rows are summed before they are joined
    found = stc.einsum("ij,kj->i", x, x)
    assert found.nnz == n
    assert found.values[0].item() == n


@pytest.mark.parametrize("plan", ["scalar", "dense"])
@pytest.mark.parametrize("equation", ["ij,kl->ijkl", "ij,kl->ikjl"])
def test_long_results_show_progress_and_can_be_interrupted(
    equation: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coordinates are written, and results put in order, a piece at a time; the next call is as any other."""
    given, shown = operands(equation, "dense"), []

    @contextmanager
    def watched(total: int, title: str, **_: Any) -> Iterator[Any]:
        def at(position: int) -> None:
            if 0 < position < total:
                raise KeyboardInterrupt

        shown.append(total)
        yield at

    with small_chunks(16, True):
        for module in (join, order, task_lists):
            monkeypatch.setattr(module, "bar", watched)
        with pytest.raises(KeyboardInterrupt):
            assert stc.einsum(equation, *given, plan=plan).coords is None
        monkeypatch.undo()
        kernel = check_pair(equation, given, plan=plan)
    assert kernel().nnz in shown


@pytest.mark.parametrize("plan", ["auto", "scalar", "dense", "bcb"])
def test_sizes_whose_product_passes_64_bits(plan: str) -> None:
    big = 2**40
    g = torch.Generator().manual_seed(0)
    small = torch.randint(0, 4, (4, 60), generator=g)
    x = stc.SparseTensor(small * (big // 4), torch.rand(60, generator=g, dtype=torch.float64), (big,) * 4)
    y = stc.SparseTensor(small.flip(1) * (big // 4), torch.rand(60, generator=g, dtype=torch.float64), (big,) * 4)
    tiny = [stc.SparseTensor(o.coords // (big // 4), o.values, (4,) * 4) for o in (x, y)]
    for equation in ("ijkl,klmn->ijmn", "ijkl,ijkl->ijkl", "ijkl,mjkl->mi", "ijkl,ijkl->"):
        found = stc.einsum(equation, x, y, plan=plan)
        expected = stc.einsum(equation, *tiny, plan=plan)
        if isinstance(found, torch.Tensor):
            torch.testing.assert_close(found, expected)
        else:
            assert found.shape == (big,) * len(equation.split("->")[1])
            assert torch.equal(found.coords, expected.coords * (big // 4))
            torch.testing.assert_close(found.values, expected.values)


@every_wide_shape
@pytest.mark.parametrize("plan", ["auto", "scalar", "dense", "bcb"])
def test_wide_shapes(plan: str, shape: tuple[int, ...]) -> None:
    """Elementwise, one mode left of each, and an outer product in another order, against dictionaries."""
    wanted = {p: n + 1.0 for n, p in enumerate(ends(shape))}
    x = stc.SparseTensor(torch.tensor([*wanted]).T, torch.tensor([*wanted.values()]), shape)
    own = "ijklmn"[: len(shape)]
    other = own.upper()
    equations: dict[str, dict[tuple[int, ...], float]] = {f"{own},{own}->{own}": {p: v * v for p, v in wanted.items()}}
    gram = equations[f"{own},{other[0]}{own[1:]}->{own[0]}{other[0]}"] = {}
    outer = equations[f"{own},{other}->{other[0]}{own}{other[1:]}"] = {}
    for (p, a), (q, b) in product(wanted.items(), repeat=2):
        outer[(q[0], *p, *q[1:])] = a * b
        if p[1:] == q[1:]:
            gram[p[0], q[0]] = gram.get((p[0], q[0]), 0.0) + a * b
    for equation, expected in equations.items():
        found = stc.einsum(equation, x, x, plan=plan)
        assert isinstance(found, stc.SparseTensor)
        assert [*map(tuple, found.coords.T.tolist())] == sorted(expected)
        assert found.values.tolist() == [expected[p] for p in sorted(expected)]


# --- several operands, dense operands ---------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CHAINS)
def test_chain(name: str, plan: str) -> None:
    for pattern in ("random", "empty", "dense"):
        for coalesce in (True, False):
            check_pair(CHAINS[name], operands(CHAINS[name], pattern, coalesce=coalesce), plan=plan)


@settings(max_examples=500)
@given(chains((torch.float64, torch.int64, torch.complex128)))
def test_any_chain_agrees_with_the_reference(drawn: Any) -> None:
    given = drawn.operands()
    with poisoned():
        found = stc.einsum(drawn.equation, *given, plan=drawn.plan)
    assert_matches(found, drawn.equation, given, None if drawn.dtype == torch.int64 else 1e-12)
    e = bound_of(drawn.equation, given).einsum
    assert isinstance(found, stc.SparseTensor) == bool(e.kept)
    if isinstance(found, stc.SparseTensor):
        assert found.is_coalesced
        keys = torch.unique(found.coords, dim=1)
        assert torch.equal(found.coords, keys)


@pytest.mark.parametrize("name", MIXED)
def test_with_dense_operands(name: str) -> None:
    equation, dense = MIXED[name]
    for pattern in ("random", "skewed", "dense"):
        for dtype in (torch.float64, torch.float32, torch.int64, torch.complex64):
            given = operands(equation, pattern, dtype, coalesce=pattern == "random", dense=dense)
            found = stc.einsum(equation, *given)
            assert_matches(found, equation, given)
            assert_matches(stc.einsum(equation, *given, output="dense"), equation, given)
            if isinstance(found, stc.SparseTensor):
                assert torch.equal(found.coords, structural(equation, given))


def test_dense_operands_broadcast_and_change() -> None:
    x, y = operands("ij,jk->ik")
    wide = torch.rand(1, SIZES["k"], dtype=torch.float64)
    kernel = stc.compile("ij,jk,ik->ik", x, y, wide)
    assert_matches(kernel(wide), "ij,jk,ik->ik", [x, y, wide.expand(SIZES["i"], -1).contiguous()])
    other = torch.rand(SIZES["i"], SIZES["k"], dtype=torch.float64)
    assert_matches(kernel(other), "ij,jk,ik->ik", [x, y, other])


def test_a_path_takes_the_sparser_side_first() -> None:
    """A, B and C of a chain: B has few nonzeros, so whatever it meets first is small."""
    g = torch.Generator().manual_seed(0)

    def sparse(rows: int, columns: int, nnz: int) -> stc.SparseTensor:
        coords = torch.stack([torch.randint(0, n, (nnz,), generator=g) for n in (rows, columns)])
        return stc.SparseTensor(coords, torch.rand(nnz, generator=g), (rows, columns))

    a, b, c = sparse(200, 200, 5000), sparse(200, 200, 5000), sparse(200, 200, 10)
    assert stc.compile("ij,jk,kl->il", a, b, c).contraction.innermost.order[0] == (1, 2)
    assert stc.compile("ij,jk,kl->il", c, a, b).contraction.innermost.order[0] == (0, 1)


def test_ten_operands_by_the_greedy_path() -> None:
    letters = "abcdefghijk"
    equation = ",".join(letters[n : n + 2] for n in range(10)) + "->ak"
    given = [random_sparse((3, 3), "random", torch.float64, n) for n in range(10)]
    check_pair(equation, given)


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["scalar", "dense", "bcb"])
@pytest.mark.parametrize(
    "equation", ["ijk,klm->ijlm", "ijk,ljk->li", "bij,bjk->ikb", "iij,jk->k", "ij,jk->", "ij,ij->ij"]
)
def test_gradients(equation: str, plan: str) -> None:
    for dtype in (torch.float64, torch.complex128):
        x, y = operands(equation, dtype=dtype, coalesce=False, sizes={**SIZES, "i": 3, "j": 4})
        kernel = stc.compile(equation, x, y, plan=plan)

        def run(left: torch.Tensor, right: torch.Tensor, kernel: stc.Kernel = kernel) -> torch.Tensor:
            found = kernel(values=[left, right])
            return found.values if isinstance(found, stc.SparseTensor) else found

        given = (x.values.clone().requires_grad_(), y.values.clone().requires_grad_())
        assert torch.autograd.gradcheck(run, given)
        if plan == "scalar":
            assert torch.autograd.gradgradcheck(run, given)


def test_gradients_flow_through_a_chain_with_a_dense_operand() -> None:
    equation, dense = MIXED["applied-to-the-result"]
    x, y, table = operands(equation, dense=dense, sizes={**SIZES, "i": 3, "j": 3})
    kernel = stc.compile(equation, x, y, table)

    def run(left: torch.Tensor, right: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return kernel(factor, values=[left, right]).values

    given = tuple(t.clone().requires_grad_() for t in (x.values, y.values, table))
    assert torch.autograd.gradcheck(run, given)


def test_values_that_require_gradients_are_followed_by_einsum() -> None:
    x, y = operands("ij,jk->ik")
    values = x.values.clone().requires_grad_()
    stc.einsum("ij,jk->ik", x.with_values(values), y).values.sum().backward()
    expected = y.to_dense().sum(1)[x.coords[1]]
    torch.testing.assert_close(values.grad, expected)


# --- what a user may look at ------------------------------------------------------------------------------------------


def test_explain_shows_the_paths() -> None:
    kernel = stc.compile("ijk,klm->ijlm", *operands("ijk,klm->ijlm"))
    explained = kernel.explain()
    (step,) = explained.to_dict()["steps"]
    assert {name for name, _ in step["considered"]} - {"bcb+scalar"} == {"scalar", "dense", "bcb"}
    assert all(seconds > 0 for _, seconds in step["considered"])
    assert step["nnz"] == kernel.nnz
    text = str(explained)
    assert "free of x ij, free of y lm, contracted k" in text
    assert "considered, expected us" in text
    assert stc.explain("ijk,klm->ijlm", *operands("ijk,klm->ijlm")).nnz == kernel.nnz


@pytest.mark.parametrize("plan", ["scalar", "dense", "bcb"])
def test_a_kernel_shows_its_plan_and_its_source(plan: str) -> None:
    kernel = stc.compile("ijk,klm->ijlm", *operands("ijk,klm->ijlm"), plan=plan)
    assert kernel.plan.name == plan
    assert kernel.plan.reason == "asked for by name"
    assert [p.label for p in kernel.plan.parts] == ["ijk", "klm"]
    assert {p.format for p in kernel.plan.parts} == {{"scalar": "coo", "dense": "strided", "bcb": "bcb"}[plan]}
    assert kernel.path.read_text() == kernel.source
    assert "ijk,klm->ijlm, generated by sparsetc" in kernel.source
    assert "Kernel(" in repr(kernel)


@pytest.mark.parametrize("equation", ["ijk,klm->ijlm", "ijk,klm->lmij"])
def test_a_plan_with_its_parts_stores_blocks_as_they_say(equation: str) -> None:
    given = operands(equation)
    for storage in (("bitmap", "whole"), ("whole", "bitmap")):
        kernel = stc.compile(equation, *given, plan=stc.plans.plan_bcb(i=8, j=8, k=8, l=8, m=8, storage=storage))
        assert [part.bitmap for part in kernel.plan.parts] == [name == "bitmap" for name in storage]
        again = stc.compile(equation, *given, plan=kernel.plan)
        assert [part.bitmap for part in again.plan.parts] == [name == "bitmap" for name in storage]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_chain_without_pairs_says_what_it_runs_on(backend: str) -> None:
    x, y = random_sparse((3, 4), "random", torch.float32), random_sparse((5, 6), "random", torch.float32, 1)
    kernel = stc.compile("ij,ij,kl,kl->", x, torch.ones(3, 4), y, torch.ones(5, 6), backend=backend)
    assert kernel.plan.name == "chain"
    assert [step.backend for step in kernel.contraction.steps] == [backend] * 2
    assert kernel.backend == kernel.explain().backend == backend


def test_a_plan_by_nonzeros_without_pairs_is_taken_back() -> None:
    """Of an operand whose dense modes were expanded for it: the plan says so, where no step is of two operands."""
    values = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    x = stc.SparseTensor(torch.tensor([[1], [0]]), values, (2, 2, 2))
    y = stc.SparseTensor(torch.tensor([[0, 1]]), torch.ones(2, dtype=torch.float64), (2,))
    dense = torch.tensor([0.5, 3.0], dtype=torch.float64), torch.tensor([2.0, 7.0], dtype=torch.float64)
    plan = stc.compile("abc,i,a,a->", x, y, *dense, plan="scalar").plan
    result = stc.einsum("abc,i,a,a->", x, y, *dense, plan=plan)
    assert result == 2 * 2 * 3.0 * 7.0
    assert torch.equal(torch.autograd.grad(result, [values])[0], torch.full((1, 2), 2 * 3.0 * 7.0, dtype=torch.float64))


def test_the_cheapest_path_is_taken() -> None:
    dense = stc.compile("ij,jk->ik", *(random_sparse((60, 60), "dense", torch.float32, n) for n in range(2)))
    assert dense.plan.name == "dense"
    g = torch.Generator().manual_seed(0)
    far = [
        stc.SparseTensor(torch.randint(0, 10**6, (2, 2000), generator=g), torch.ones(2000), (10**6, 10**6))
        for _ in range(2)
    ]
    assert stc.compile("ij,jk->ik", *far).plan.name == "scalar"


def test_ways_that_cannot_win_are_not_counted() -> None:
    """Of few tasks none but the tasks; of few milliseconds no blocks, whose launches alone take longer."""
    g = torch.Generator().manual_seed(0)
    for nnz, size, priced in [(300, 300, {"scalar"}), (900, 60, {"scalar", "dense"}), (4000, 200, {*PLANS[1:]})]:
        x = stc.SparseTensor(torch.randint(0, size, (2, nnz), generator=g), torch.rand(nnz, generator=g), (size, size))
        (step,) = stc.compile("ij,jk->ik", x, x, backend="torch").contraction.steps
        assert dict(step.choice.considered).keys() == priced
        assert dict(step.choice.dismissed).keys() == {*PLANS[1:]} - priced
        assert ("blocking" in vars(step.problem)) == ("bcb" in priced)


@pytest.mark.parametrize("plan", PLANS[1:])
def test_the_price_of_a_plan_is_the_sum_of_its_terms(plan: str) -> None:
    report = stc.compile("ij,jk->ik", *operands("ij,jk->ik"), plan=plan).explain()
    step = report.to_dict()["steps"][0]
    if step["plan"] == plan:  # no threshold may part the blocks
        assert sum(us for _, us in step["expected"]) == pytest.approx(dict(step["considered"])[plan])
        assert f"expected {step['expected'][0][0]} " in str(report)


def test_few_sums_cost_as_much_as_ordered_ones() -> None:
    """Additions by atomics wait for one another, or are ordered; those to many addresses do not."""
    (step,) = stc.compile("ij,jk->ik", *operands("ij,jk->ik")).contraction.steps
    exact = replace(step.settings, deterministic=True)
    tasks, gpu, few = 10**8, default_gpu(), default_gpu().crowded_below
    for places, crowded in [(8281, True), (few - 1, True), (few, False), (tasks, False)]:
        join = SimpleNamespace(tasks=tasks, rows=places, columns=1)
        about = {"join": join, "width": 4, "limit": 10**12, "profile": gpu}
        problems = [SimpleNamespace(settings=settings, **about) for settings in (step.settings, exact)]
        seconds, always = (sum(TaskSums.terms(p).values()) for p in problems)
        assert (seconds == always) == crowded
    assert waits(8281, MANY * 8281 + 1)
    assert not waits(8281, MANY * 8281)
    assert not waits(FEW, tasks)


def test_pairs_of_one_block_of_the_result_wait_for_one_another() -> None:
    kernel = stc.compile("ij,jk->ik", *operands("ij,jk->ik"), plan="bcb")
    ((program,), gpu) = kernel.programs, replace(default_gpu(), pair_turn=1.0)
    work = BlockWork(FEWEST_PAIRS, 1, (64, 64), 64)
    one, two = (sum(block_terms(replace(work, made=n), program, 8, "float64", gpu).values()) for n in (1, 2))
    assert one == pytest.approx(FEWEST_PAIRS, rel=0.01)
    assert two == pytest.approx(FEWEST_PAIRS / 2, rel=0.01)


def test_einsum_keeps_kernels_by_both_patterns() -> None:
    x, y = operands("ij,jk->ik")
    z = random_sparse((SIZES["j"], SIZES["k"]), "skewed", torch.float64, 5)
    for second in (y, z, y.with_values(2 * y.values), y):
        assert_matches(stc.einsum("ij,jk->ik", x, second), "ij,jk->ik", [x, second])
    assert len(x.pattern.cache) == 3  # both met, and the kernel of those that met again: places take much memory


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_sides_are_powers_of_two_that_fill_a_product() -> None:
    assert sides_for((100, 100), 64) == (8, 8)
    assert sides_for((100,), 64) == (64,)
    assert sides_for((100, 100, 100), 32) == (2, 4, 4)
    assert sides_for((5, 1000), 64) == (8, 8)
    assert sides_for((3, 1000), 64) == (4, 16)
    assert sides_for((), 64) == ()
    assert sides_for((1, 2), 64) == (1, 2)


def test_third_order_contracted_over_one_mode_has_blocks_of_64_by_32() -> None:
    g = torch.Generator().manual_seed(0)
    coords = torch.randint(0, 40, (3, 150), generator=g)
    x = stc.SparseTensor(coords, torch.rand(150, generator=g), (40, 40, 40))
    (step,) = stc.compile("ijk,klm->ijlm", x, x, plan="bcb").contraction.steps
    assert step.problem.blocking.extents == (64, 64, 32)
    assert isinstance(step.problem.blocking, Blocking)
    assert isinstance(step.problem.blocking.pairs, Join)
    named = stc.compile("ijk,klm->ijlm", x, x, plan=stc.plans.plan_bcb(i=4, j=4, k=16)).contraction.steps[0]
    assert named.problem.blocking.extents == (16, 64, 16)
    values = named.result([], [x.values, x.values], [])
    made = stc.SparseTensor._of(named._pattern.coords, values, named.bound.output_shape, True)
    assert_matches(made, "ijk,klm->ijlm", [x, x])


def test_sides_of_letters_that_a_contraction_of_two_does_not_have() -> None:
    for equation in ("ii,jj->", "ij,jk,kl->il"):
        check_pair(equation, operands(equation), plan=stc.plans.plan_bcb(i=2, j=2))


@pytest.mark.parametrize("formats", [("bcb", "coo"), ("coo", "bcb"), ("coo", "coo")], ids=str)
@pytest.mark.parametrize("name", EQUATIONS)
def test_operands_differ_in_format(name: str, formats: tuple[str, str]) -> None:
    """One operand's nonzeros, each with its coordinates, meet the other's blocks, or nonzeros."""
    for pattern in ("skewed", "dense"):
        check_pair(EQUATIONS[name], operands(EQUATIONS[name], pattern), plan=stc.plans.plan_bcb(formats=formats))


def test_blocks_of_two_positions_are_blocks() -> None:
    kernel = stc.compile("ij,jk->ik", *operands("ij,jk->ik"), plan=stc.plans.plan_bcb(i=2, j=1, k=1))
    assert [part.format for part in kernel.plan.parts] == ["bcb", "coo"]


def test_formats_follow_the_operands_of_the_equation() -> None:
    for equation, swapped in (("ijk,kl->ijl", False), ("ijk,kl->lij", True)):
        x, y = operands(equation, sizes={**SIZES, "i": 20, "j": 20, "k": 30, "l": 40})
        kernel = stc.compile(equation, x, y, plan=stc.plans.plan_bcb(formats=("bcb", "coo")))
        (step,) = kernel.contraction.steps
        assert step.problem.swapped == swapped
        blocks, single = (
            (step.problem.blocking.y, step.problem.blocking.x)
            if swapped
            else (step.problem.blocking.x, step.problem.blocking.y)
        )
        assert blocks.sides in ((8, 8, 1), (1, 8, 8))
        assert single.sides == (1, 1)
        assert single.blocks == single.nnz  # of matched entries
        assert single.nbytes == 4 * single.nnz  # its coordinates, and no bitmap
        assert sorted(
            p.format for p in stc.compile(equation, x, y, plan=stc.plans.plan_bcb(formats=("bcb", "coo"))).plan.parts
        ) == ["bcb", "coo"]


def test_paths_of_torch_have_no_ptx() -> None:
    kernel = stc.compile("ij,jk->ik", *operands("ij,jk->ik"), plan="dense")
    with pytest.raises(stc.PlanError, match="no PTX"):
        kernel.ptx()


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_before_anything_runs() -> None:
    x, y = operands("ij,jk->ik")
    with pytest.raises(
        stc.PlanError, match=r"plan must be auto, scalar, dense, bcb, bcb\+scalar or plan_bcb\(\.\.\.\)"
    ):
        stc.einsum("ij,jk->ik", x, y, plan="coo")
    with pytest.raises(stc.PlanError, match="power of two"):
        stc.plans.plan_bcb(i=3)
    with pytest.raises(stc.PlanError, match="gives sides to q, z, which"):
        stc.einsum("ij,jk->ik", x, y, plan=stc.plans.plan_bcb(z=8, q=4, i=4))
    with pytest.raises(stc.PlanError, match="blocks of 512 x 16 and 16 x 512 positions are too large"):
        stc.einsum("ij,jk->ik", x, y, plan=stc.plans.plan_bcb(i=512, j=16, k=512))
    for storage in ("dense", ("whole",), ("whole", "dense")):
        with pytest.raises(stc.PlanError, match="storage must be one of"):
            stc.plans.plan_bcb(storage=storage)
    for formats in (("bcb",), ("csr", "bcb"), ("bcb", "bcb", "coo")):
        with pytest.raises(stc.PlanError, match='formats must be "bcb" or "coo"'):
            stc.plans.plan_bcb(formats=formats)
    with pytest.raises(stc.DtypeError, match="operand 2 has dtype"):
        stc.einsum("ij,jk->ik", x, y.to(torch.float32))
    with pytest.raises(stc.ShapeError, match="index 'j'"):
        stc.einsum("ij,jk->ik", x, random_sparse((SIZES["j"] + 1, 4), "random", torch.float64))
    with pytest.raises(stc.ShapeError, match="only dense operands broadcast"):
        stc.einsum("ij,jk->ik", x, random_sparse((1, 4), "random", torch.float64))
    kernel = stc.compile("ij,jk->ik", x, y)
    with pytest.raises(stc.ShapeError, match="takes 0 dense operands, found 1"):
        kernel(torch.rand(3))
    with pytest.raises(stc.ShapeError, match="has 2 sparse operands, found 1 values"):
        kernel.with_values(x.values)
    with pytest.raises(stc.ShapeError, match="values of operand 2 must have shape"):
        kernel.with_values(x.values, y.values[1:])
    with pytest.raises(stc.DtypeError, match="values of operand 1 must be"):
        kernel.with_values(x.values.float(), None)
    with pytest.raises(stc.PlanError, match="plan must be auto"):  # whatever the steps will be
        stc.compile("ij,jk,j->ik", x, y, torch.ones(SIZES["j"], dtype=torch.float64), plan="coo")
    long = random_sparse((2, 500), "dense", torch.float64), random_sparse((500, 2), "dense", torch.float64)
    with pytest.raises(stc.OutOfMemoryError, match="unfolded to 1 x 2 x 500 x 2"):
        stc.compile("ij,jk->ik", *long, plan="dense", memory_limit=5000)


@pytest.mark.parametrize("plan", ["scalar", "dense", "bcb"])
def test_a_dropped_kernel_gives_its_memory_back(plan: str) -> None:
    """At once: task lists take gigabytes of a GPU, which the garbage collector does not see."""
    x = random_sparse((6, 5, 7), "random", torch.float32)
    gc.disable()
    try:
        kernel = stc.compile("ijk,abk->ijab", x, x, plan=plan)
        kernel()
        kept = weakref.ref(kernel.contraction.steps[0].join)
        del kernel
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("equation", ["dw,G,tj->G", "G,dw,tj->G", "dw,wr,G->Gr", "dw,G,tj->Gt", "tj,dw,G,H->GH"])
def test_the_pattern_of_a_chain_is_structural(equation: str) -> None:
    terms = equation.split("->")[0].split(",")
    made: list[Any] = []
    for n, term in enumerate(terms):
        if term == "wr":
            made.append(torch.ones(3, 3))
        else:
            name = "empty" if term == "dw" else "dense"
            made.append(random_sparse((3,) * len(term), name, torch.float32, n))
    found = stc.einsum(equation, *made)
    assert found.nnz == 0
    assert_matches(found, equation, made)
    d = terms.index("dw")
    made[d] = random_sparse((3, 3), "one", torch.float32)
    assert stc.einsum(equation, *made).nnz > 0


def test_patterns_that_meet_for_the_first_time_are_not_cut_to_be_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[Join] = []
    cut = Blocking.of
    monkeypatch.setattr(Blocking, "of", lambda join, *sides: (cuts.append(join), cut(join, *sides))[1])
    x, y = (stc.rand((300, 300), density=0.1) for _ in range(2))
    first = stc.einsum("ij,jk->ik", x, y)
    assert not cuts
    second = stc.einsum("ij,jk->ik", x, y)
    assert cuts
    torch.testing.assert_close(first.to_dense(), second.to_dense())
