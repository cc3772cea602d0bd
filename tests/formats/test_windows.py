"""Windows: right in every einsum, by every request, on every pattern; what cannot be is one error before any kernel."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import golden_windows
import pytest
import torch
from cases import PATTERNS, TOLERANCE, Problem, assert_matches, check, densified, random_values
from golden_checks import check_as_kept, check_readable
from halves_cases import PRODUCTS, problem
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dense_plan import half_full
from test_modes import check_elsewhere
from test_modes import elsewhere as elsewhere
from test_place import check_placed
from window_cases import MODES, OTHERS, REQUESTS, WHOLE, checked, scrambled, stored, uneven, whole

import sparsetc as stc
from sparsetc.formats import tiles, window
from sparsetc.ir.plan import F16X3
from sparsetc.packing.partition import divide
from sparsetc.planner.candidate import Best
from sparsetc.testing import check_format
from sparsetc.testing import pattern as conformance_pattern
from sparsetc.testing.patterns import PATTERNS as CONFORMANCE

SPMM = PRODUCTS["spmm"]
F64 = torch.float64
SHAPES = [(30, 40), (1, 9), (9, 1), (1, 1), (0, 5), (5, 0), (7, 100), (9, 10, 11), (5, 3, 4, 6)]


# --- the formats ------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.data())
def test_conformance(data: st.DataObject) -> None:
    draw = data.draw
    shape, name = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(sorted(CONFORMANCE)))
    height, width = draw(st.sampled_from([1, 2, 5, 16, 64])), draw(st.sampled_from([1, 3, 8, 16, 128]))
    tau, strip = draw(st.sampled_from([0, 0, 1, 40, 100])), draw(st.sampled_from([1, 3, 64]))
    cut = draw(st.sampled_from([0, 1, height * width, 3 * height * width]))
    modes = draw(st.permutations(range(len(shape))))
    rows = tuple(modes[: draw(st.integers(1, len(shape) - 1))])
    storage = stored(len(shape), height, width, rows, tau, strip, cut)
    packed = check_format("window", conformance_pattern(name, shape), shape, storage)
    assert packed.stored % (height * width) == 0


@pytest.mark.parametrize("tau", [0, 50])
def test_a_ragged_matrix(tau: int) -> None:
    """Empty rows and columns, a full row, a full column, and a last row and column of one nonzero."""
    dense = torch.zeros(40, 50, dtype=torch.int64)
    dense[7], dense[:, 11], dense[39, 49], dense[20:24, 20:30] = 1, 1, 1, 1
    dense[30:36], dense[:, 40:49] = 0, 0
    coords = dense.nonzero().T.contiguous()
    packed = check_format("window", coords, (40, 50), stored(2, 8, 16, tau=tau, strip=4))
    rows = packed.arrays["rows"].long()
    assert sorted(rows[rows < 40].unique().tolist()) == coords[0].unique().tolist(), "rows of nonzeros and no others"


def test_columns_that_lie_apart_are_packed_side_by_side() -> None:
    coords = torch.stack([torch.arange(16).repeat_interleave(4), (torch.arange(64) % 4) * 100])
    assert check_format("window", coords, (16, 400), stored(2, 16, 4)).stored == 64, "one tile"


@pytest.mark.parametrize("seed", [0, 1])
def test_similar_rows_share_tiles_wherever_they_lie(seed: int) -> None:
    x = scrambled(12, 8, seed)
    neighbours, similar = (check_format("window", x.coords, x.shape, stored(2, 8, 8, tau=tau)) for tau in (0, 50))
    assert similar.stored == x.nnz, "every tile is full"
    assert neighbours.stored > 4 * x.nnz


@pytest.mark.parametrize(
    ("storage", "says"),
    [
        (stc.plans.Storage((0,), leaf=(1,)), "windows have item modes, and all others at the lane"),
        (stc.plans.Storage((0, 1), params=(("height", 4), ("width", 4))), "windows have item modes"),
        (stc.plans.Storage((0,), (1,)), "windows need a height and a width of 1 or more"),
        (stc.plans.Storage((0,), (1,), params=(("height", 4), ("width", 0))), "a height and a width of 1 or more"),
        (stc.plans.Storage((0,), (1,), params=(("height", 4), ("tau", 101), ("width", 4))), "tau is in percent"),
        (
            stc.plans.Storage((0,), (1,), params=(("height", 4), ("strip", 0), ("width", 4))),
            "a strip has 1 column or more",
        ),
    ],
)
def test_storages_that_windows_cannot_have(storage: stc.plans.Storage, says: str) -> None:
    x, b = problem(SPMM).operands()
    plan = stc.plans.Plan("p", (stc.plans.Part("window", storage, stc.plans.Schedule(1, (("r", 8),))),))
    with pytest.raises(stc.FormatError, match=says):
        stc.compile(SPMM, x, b, plan=plan)


def test_a_parameter_that_they_do_not_have() -> None:
    storage = stc.plans.Storage((0,), (1, 2), params=(("height", 4), ("widht", 4)))
    plan = stc.plans.Plan("p", (stc.plans.Part("window", storage, stc.plans.Schedule(blocks=(("r", 2),), dot=False)),))
    with pytest.raises(stc.PlanError, match="format 'window' has no parameter 'widht'; known: height, width, tau, str"):
        stc.compile("ijk,jr->ir", *problem("ijk,jr->ir").operands(), plan=plan)


@pytest.mark.parametrize("name", golden_windows.CASES)
def test_generated_source_is_as_kept(name: str) -> None:
    assert {file.stem for file in golden_windows.FOLDER.glob("*.py")} == set(golden_windows.CASES)
    kernel = golden_windows.kernel(name)
    check_as_kept(golden_windows.path(name), kernel.source)
    check_readable(kernel.source)
    check_placed(kernel.programs[0])


# --- einsums ----------------------------------------------------------------------------------------------------------


ALL = [(name, request) for name in ("spmm", "batch", "mttkrp", "ttm, permuted") for request in REQUESTS]
SOME = [(name, request) for name in (*PRODUCTS, *OTHERS) for request in ("window", "some of 1-sa", "odd window")]


@pytest.mark.parametrize(("name", "request_name"), dict.fromkeys(ALL + SOME))
def test_every_einsum(name: str, request_name: str) -> None:
    plan = REQUESTS[request_name]
    kernel = checked((PRODUCTS | OTHERS)[name], plan, "torch")
    assert kernel.plan.name == (plan if isinstance(plan, str) else plan.name)
    assert request_name == "none of window" or request_name.startswith("some") or _stored(kernel)
    assert request_name != "none of window" or not _stored(kernel)


def _stored(kernel: stc.Kernel) -> int:
    """Nonzeros in windows."""
    return sum(part.nnz for part in kernel.plan.parts if part.format == "window")


@pytest.mark.parametrize("tau", [0, 50])
@pytest.mark.parametrize("name", MODES)
def test_plans_in_full(name: str, tau: int) -> None:
    equation = MODES[name]
    order = len(equation.split(",")[0])
    for rows, cut in (((0,), 0), ((1,), 0), ((0,), 60), (tuple(range(1, order)), 0)):
        checked(equation, whole("window", order, 5, 12, rows, tau, cut, r=8), "torch", F64)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("request_name", ["all of window", "some of 1-sa"])
def test_every_type(request_name: str, dtype: torch.dtype) -> None:
    for equation in (SPMM, OTHERS["batch"], OTHERS["spmv"]):
        checked(equation, REQUESTS[request_name], "torch", dtype)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 30), (30, 1), (33, 65), (0, 4), (4, 0)], ids=str)
def test_every_pattern(sizes: tuple[int, int], name: str) -> None:
    for request_name in ("window", "some of window", "1-sa", "all of 1-sa"):
        check(problem(SPMM, F64, name, i=sizes[0], j=sizes[1]), plan=REQUESTS[request_name], backend="torch")


@pytest.mark.parametrize("request_name", ["all of window", "some of 1-sa"])
def test_dense_operands_however_they_lie(request_name: str) -> None:
    x, b = problem(SPMM, F64).operands()
    n, r = b.shape
    wide = random_values((n + 1, 2 * r), F64, 3)
    layouts = [b.T.contiguous().T, wide[:n, ::2], wide[1:, :r], b[:1].expand(n, r), b[:, :1].expand(n, r), b[:, :1]]
    for table in layouts:
        assert_matches(stc.einsum(SPMM, x, table, plan=REQUESTS[request_name]), SPMM, [x, table.expand(n, -1)])
    turned = b.T.contiguous()
    assert_matches(stc.einsum("ij,rj->ri", x, turned, plan=REQUESTS[request_name]), "ij,rj->ri", [x, turned])


@pytest.mark.parametrize("request_name", ["all of window", "some of window", "all of 1-sa"])
@pytest.mark.parametrize("equation", ["ij,jr->ir", "ijk,k->ij", "ijk,kr->ijr", "ijk->ik"])
def test_a_sparse_result(equation: str, request_name: str) -> None:
    kernel = checked(equation, REQUESTS[request_name], "torch", F64, output="sparse")
    dense = problem(equation, F64).operands()[1:]
    assert isinstance(kernel(*dense), stc.SparseTensor)


@pytest.mark.parametrize("request_name", ["window", "some of window", "all of 1-sa", "some of 1-sa"])
@pytest.mark.parametrize("equation", ["ij,jr->ir", "ijk,jr,kr->ir", "bij,bjk->bik"])
def test_gradients(equation: str, request_name: str) -> None:
    x, *dense = Problem(equation, {"i": 6, "j": 5, "k": 4, "r": 2, "b": 2}, "random", F64).operands()
    leaves = [x.values.clone().requires_grad_(), *(d.clone().requires_grad_() for d in dense)]

    def call(values: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        found = stc.einsum(equation, x.with_values(values), *factors, plan=REQUESTS[request_name], output="dense")
        assert isinstance(found, torch.Tensor)
        return found

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("request_name", ["all of window", "some of window", "all of 1-sa", "some of 1-sa"])
def test_permuted_rows_permute_the_result(request_name: str) -> None:
    x, b = problem(SPMM, F64).operands()
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1))
    moved = stc.SparseTensor(torch.stack([torch.argsort(order)[x.coords[0]], x.coords[1]]), x.values, x.shape)
    found, permuted = (densified(stc.einsum(SPMM, o, b, plan=REQUESTS[request_name])) for o in (x, moved))
    torch.testing.assert_close(permuted, found[order], rtol=1e-12, atol=1e-12)


def test_zeros_of_a_tile_do_not_meet_infinities() -> None:
    x, b = problem(SPMM, F64).operands()
    b[3, 2], b[4, 5] = torch.inf, torch.nan
    expected = stc.einsum(SPMM, x, b, plan="coo")
    for request_name in ("all of window", "all of 1-sa"):
        torch.testing.assert_close(stc.einsum(SPMM, x, b, plan=REQUESTS[request_name]), expected, equal_nan=True)


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("plan", [stc.plans.plan_window(8, 16, 100), stc.plans.plan_1sa(50, 4, 8, 16, 100)], ids=str)
def test_a_threshold_between_leaves_some_rows_to_runs(plan: stc.plans.Plan, backend: str) -> None:
    x, b = uneven()
    kernel = stc.compile(SPMM, x, b, plan=plan, backend=backend)
    windows, rest = kernel.plan.parts
    assert (windows.format, windows.nnz, rest.nnz) == ("window", 256, 24)
    assert kernel.plan.partition == "row_similarity"
    assert "the other rows" in str(kernel.plan)
    assert "window(height=8," in str(kernel.explain())
    assert kernel.explain().tiles == ((128, 2, 256),), "tiles that are stored, each full"
    if backend == "torch":
        assert_matches(kernel(b), SPMM, [x, b])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("request_name", REQUESTS)
def test_the_plan_of_a_kernel_makes_it_again(request_name: str, backend: str) -> None:
    x, b = problem(SPMM).operands()
    kernel = stc.compile(SPMM, x, b, plan=REQUESTS[request_name], backend=backend)
    fresh = stc.SparseTensor(x.coords, x.values, x.shape)
    for operand in (x, fresh):
        again = stc.compile(SPMM, operand, b, plan=kernel.plan, backend=backend)
        assert (again.source, again.plan.parts) == (kernel.source, kernel.plan.parts)


@pytest.mark.parametrize("request_name", ["all of window", "some of 1-sa"])
def test_a_kernel_is_pickled(request_name: str) -> None:
    kernel = checked(SPMM, REQUESTS[request_name], "torch")
    _, b = problem(SPMM).operands()
    copy = pickle.loads(pickle.dumps(kernel))
    torch.testing.assert_close(copy(b), kernel(b), rtol=0, atol=0)
    assert pickle.loads(pickle.dumps(REQUESTS[request_name])) == REQUESTS[request_name]


def test_rows_and_columns_are_fibers_of_several_modes() -> None:
    for equation, levels in (("ijk,jr,kr->ir", ((0,), (1, 2))), ("ijk,ir->jkr", ((1, 2), (0,)))):
        x, *dense = problem(equation).operands()
        (part,) = stc.compile(equation, x, *dense, plan=stc.plans.plan_window(16, 16, 0), backend="triton").plan.parts
        assert (part.storage.item, part.storage.lane) == levels


def test_a_tensor_of_no_nonzeros() -> None:
    x = stc.SparseTensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (5, 6))
    for plan in REQUESTS.values():
        for backend in ("torch", "triton"):
            kernel = stc.compile(SPMM, x, torch.ones(6, 4), plan=plan, backend=backend)
            if backend == "torch":
                torch.testing.assert_close(kernel(torch.ones(6, 4)), torch.zeros(5, 4))


def test_deterministic_sums_have_one_owner() -> None:
    x, b = problem(SPMM).operands()
    for plan in (
        stc.plans.plan_window(16, 16, 0),
        stc.plans.plan_1sa(40, height=16, width=16),
        REQUESTS["some of window"],
    ):
        kernel = stc.compile(SPMM, x, b, plan=plan, backend="triton", deterministic=True)
        assert "atomic_add" not in kernel.source


def test_windows_beyond_the_memory_limit_are_not_considered() -> None:
    x, b = scrambled(40, 16), torch.ones(640, 4, dtype=F64)
    for limit, beyond in ((1_000_000, True), (60_000, False)):
        given = stc.compile(SPMM, x, b, backend="triton", memory_limit=limit).step.problem
        found = window.considered("1-sa", given, Best())
        assert any(8 * candidate.expected[0].stored > 60_000 for candidate in found) == beyond


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("plan", [stc.plans.plan_window(8, 16, 0), stc.plans.plan_1sa(40, 2, 8, 16, 0)], ids=str)
def test_named_windows_keep_to_the_memory_limit(plan: stc.plans.Plan, backend: str) -> None:
    """By tiles of the fullest groups alone, or not at all."""
    x, b = uneven()

    def limited(plan: stc.plans.Plan, limit: int) -> tuple[stc.Kernel, int]:
        kernel = stc.compile(SPMM, x, b, plan=plan, memory_limit=limit, backend=backend)
        return kernel, 8 * sum(part.packed.stored for part in kernel.step.parts if part.packed.format == "window")

    everything = limited(plan, 10**9)[1]
    kernel, stored = limited(plan, everything)
    assert (stored, _stored(kernel)) == (everything, x.nnz)
    with pytest.raises(stc.OutOfMemoryError, match=f'tiles of plan "{plan.name}" would take {everything:,} bytes, the'):
        limited(plan, everything - 1)
    kernel, stored = limited(replace(plan, options=plan.options[:-1]), everything - 1)
    assert 0 < stored < everything
    if backend == "torch":
        assert_matches(kernel(b), SPMM, [x, b])


def test_rows_are_grouped_once_for_all_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tiles of each height that the planner looks at, to deal, and to pack all nonzeros; a share has groups of its
    own.
    """
    grouped, calls = tiles.group_rows, list[int]()

    def counting(rows: torch.Tensor, *given: Any, **options: Any) -> Any:
        calls.append(rows.numel())
        return grouped(rows, *given, **options)

    monkeypatch.setattr(tiles, "group_rows", counting)
    x, b = uneven()
    for plan, shared in ((stc.plans.plan_1sa(40, 2, 8, 16, 60), True), (stc.plans.plan_1sa(40, 2, threshold=0), False)):
        x.pattern.clear()
        calls.clear()
        share = stc.compile(SPMM, x, b, plan=plan, backend="triton").plan.parts[0].nnz
        assert (share < x.nnz) == shared
        assert calls == ([x.nnz, share] if shared else [x.nnz])
    stc.compile(SPMM, x, b, plan=stc.plans.plan_1sa(40, 2, 8, 16, 0), backend="triton")
    assert calls == [x.nnz], "other tiles take the same groups"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("equation", ["ijk,jr,kr->ir", "ijk,jr,ks->irs"])
def test_their_explanation_beside_another_default_device(equation: str) -> None:
    check_elsewhere(equation, stc.plans.plan_1sa(30, 4))


def test_what_half_filled_matrices_take() -> None:
    """On an H200, at 512 columns: 50, 38 and 31 us by windows; by other plans more, at the highest precision."""
    x, b = half_full(2048, 2048), torch.zeros(()).expand(2048, 512)
    for precision, measured in (("highest", 50e-6), ("high", 38e-6), ("medium", 31e-6)):
        choice = stc.compile(SPMM, x, b, plan="window", precision=precision, backend="triton").step.choice
        assert 0.7 * measured < sum(choice.seconds) < 1.4 * measured
    for own, columns in ((x, 512), (half_full(2000, 2000), 4096)):
        b = torch.zeros(()).expand(own.shape[1], columns)
        assert stc.compile(SPMM, own, b, precision="highest", backend="triton").plan.name == "window"


# --- the partition ----------------------------------------------------------------------------------------------------


def dealt(coords: torch.Tensor, shape: tuple[int, ...], *kept: int, **options: int) -> list[list[int]]:
    """The nonzeros of each share."""
    own = {"height": 2, "width": 4, "tau": 50, "strip": 2, "threshold": 5, **options}
    nnz = coords.shape[1]
    parts = divide("row_similarity", coords, shape, kept, own)
    return [list(range(nnz)) if part is None else part.tolist() for part in parts]


def test_groups_that_fill_their_tiles_are_dealt_apart() -> None:
    """Rows 0 and 2 make a window of a tile with 7 nonzeros; row 1 one with a nonzero."""
    pattern = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0], [1, 1, 0, 1, 0, 0]])
    coords = torch.nonzero(pattern).T.contiguous()
    everything = list(range(coords.shape[1]))
    filled = [n for n in everything if n != 4]
    assert dealt(coords, (3, 6), 0, threshold=1) == [everything, []]
    assert dealt(coords, (3, 6), 0, threshold=2) == [filled, [4]]
    assert dealt(coords, (3, 6), 0, threshold=7) == [filled, [4]]
    assert dealt(coords, (3, 6), 0, threshold=8) == [[], everything]
    assert dealt(coords, (3, 6), 0, width=2, threshold=3) == [filled, [4]]  # two tiles of 7 nonzeros
    assert dealt(coords, (3, 6), 0, width=2, threshold=4) == [[], everything]
    neighbours = [n for n in everything if n > 4]  # rows 0 and 1, then row 2
    assert dealt(coords, (3, 6), 0, tau=0, threshold=3) == [neighbours, everything[:5]]
    flipped = coords.flip(0)
    order = torch.argsort(flipped[0] * 3 + flipped[1])
    back = [sorted(order[part].tolist()) for part in dealt(flipped[:, order], (6, 3), 1, threshold=7)]
    assert back == [filled, [4]]


def test_columns_of_a_tensor_are_those_of_its_unfolding() -> None:
    g = torch.Generator().manual_seed(0)
    filled = torch.rand(40, 5, 1, 12, generator=g).lt(0.6)
    filled[::2, :2] = False
    filled[1::2, 2:] = False
    coords = torch.nonzero(filled[torch.randperm(40, generator=g)]).T.contiguous()
    options = {"tau": 40, "strip": 12, "height": 20, "width": 12, "threshold": 100}
    full, others = dealt(coords, (40, 5, 1, 12), 0, **options)
    assert (len(full), others) == (coords.shape[1], [])
    unfolded = torch.stack([coords[0], coords[1] * 12 + coords[3]])
    assert dealt(unfolded, (40, 60), 0, **options) == [full, []]
    large = (2**40, 2**40, 2**20, 2**40)  # whose linear index passes 2**63: columns are ranks
    assert dealt(coords, large, 0, **options) == [full, []]
    assert dealt(coords, (40, 5, 1, 12), 0, **options | {"tau": 0})[0] == []  # neighbours have other columns


def test_rows_are_fibers_of_all_that_is_kept() -> None:
    g = torch.Generator().manual_seed(0)
    filled = torch.rand(6, 7, 30, generator=g).lt(0.1)
    filled[1:5, 2:6] = torch.rand(4, 4, 30, generator=g).lt(0.8)
    coords = torch.nonzero(filled).T.contiguous()
    options = {"tau": 40, "strip": 1, "height": 8, "width": 8, "threshold": 32}
    unfolded = torch.stack([coords[0] * 7 + coords[1], coords[2]])
    own = dealt(coords, (6, 7, 30), 0, 1, **options)
    assert own == dealt(unfolded, (42, 30), 0, **options)
    assert all(own)


def test_the_partition_of_nothing_and_of_what_it_does_not_take() -> None:
    assert dealt(torch.zeros(2, 0, dtype=torch.int64), (3, 4), 0) == [[], []]
    for kept in ([], [0, 1]):
        with pytest.raises(stc.PlanError, match="found none"):
            dealt(torch.tensor([[0], [1]]), (3, 4), *kept)
    for option in ({"tau": 101}, {"strip": 0}, {"width": 0}, {"height": 0}, {"mode": 0}):
        with pytest.raises((stc.PlanError, stc.FormatError)):
            dealt(torch.tensor([[0], [1]]), (3, 4), 0, **option)


def test_a_plan_deals_by_similarity() -> None:
    g = torch.Generator().manual_seed(0)
    x = stc.SparseTensor.from_dense(torch.rand(30, 20, generator=g) * torch.rand(30, 20, generator=g).lt(0.3))
    b = torch.rand(20, 8, generator=g)
    part = stc.plans.Part("coo", stc.plans.Storage(item=(0,), leaf=(1,)), stc.plans.Schedule(blocks=(("r", 8),)))
    options = (("height", 4), ("strip", 4), ("tau", 80), ("threshold", 12), ("width", 8))
    assert all(dealt(x.coords, x.shape, 0, **dict(options)))
    plan = stc.plans.Plan("two", (part, part), partition="row_similarity", options=options)
    torch.testing.assert_close(stc.einsum("ij,jr->ir", x, b, plan=plan), x.to_dense() @ b)


# --- when they are in halves ------------------------------------------------------------------------------------------


HALVES = stc.plans.plan_window(halves=True)


def in_halves(columns: int, equation: str = SPMM, dtype: torch.dtype = torch.float32, **how: Any) -> stc.Kernel:
    g = torch.Generator().manual_seed(0)
    x = stc.SparseTensor.from_dense((torch.rand(512, 512, generator=g) < 0.3).to(dtype))
    b = torch.zeros((), dtype=dtype).expand(512, columns)
    return stc.compile(equation, x, b, **{"plan": HALVES, "backend": "triton", "precision": "highest"} | how)


def test_many_columns_are_multiplied_in_halves_at_highest() -> None:
    found = in_halves(4096)
    assert found.plan.parts[0].schedule.precision == F16X3
    assert stc.compile(SPMM, *_like(found), plan=found.plan, backend="triton").source == found.source
    assert in_halves(16).plan.parts[0].schedule.precision == "tf32x3", "where it costs more to look for the largest"


def _like(kernel: stc.Kernel) -> tuple[stc.SparseTensor, torch.Tensor]:
    return kernel.operand, torch.zeros(()).expand(512, 4096)


@pytest.mark.parametrize(
    "plan", [stc.plans.plan_window(halves=False), stc.plans.plan_1sa(height=64, halves=False)], ids=str
)
def test_who_forbids_them_gets_none(plan: stc.plans.Plan) -> None:
    found = in_halves(4096, plan=plan)
    assert F16X3 not in " ".join(name for name, _ in found.step.choice.considered)
    assert found.plan.parts[0].schedule.precision == "tf32x3"


@pytest.mark.parametrize("plan", ["auto", "window", "1-sa", stc.plans.plan_window(height=64)], ids=str)
def test_they_are_considered_like_any_other(plan: str | stc.plans.Plan) -> None:
    assert in_halves(4096, plan=plan).plan.parts[0].schedule.precision == F16X3


def test_similar_rows_in_halves() -> None:
    assert in_halves(4096, plan=stc.plans.plan_1sa(tau=20, halves=True)).plan.parts[0].schedule.precision == F16X3


def test_halves_are_asked_for_by_true() -> None:
    with pytest.raises(stc.PlanError, match="halves must be True or False, found 2"):
        stc.plans.plan_window(halves=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how", [{"dtype": torch.float64}, {"dtype": torch.float16}, {"backend": "torch"}, {"precision": "high"}], ids=str
)
def test_for_float32_on_a_gpu_at_highest_alone(how: dict[str, Any]) -> None:
    assert in_halves(4096, **how).plan.parts[0].schedule.precision != F16X3


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: size} for name in ("height", "width") for size in (0, -1, 1025, 2.0, "8", True)),
        *({"threshold": size} for size in (-1, 2.5, "1", 2**63)),
        *({"tau": size} for size in (0, 101, 0.4, "40")),
        *({"strip": size} for size in (0, 2**40)),
    ],
    ids=str,
)
def test_options_out_of_range(wrong: dict[str, Any]) -> None:
    (name, size) = next(iter(wrong.items()))
    with pytest.raises(stc.PlanError, match=rf"{name} must be .* found {size!r}"):
        stc.plans.plan_1sa(**wrong)
    with pytest.raises(stc.PlanError, match=rf"{name} must be .* found {size!r}"):
        stc.compile(SPMM, *problem(SPMM).operands(), plan=stc.plans.Plan("1-sa", options=tuple(wrong.items())))


def test_options_of_another_plan() -> None:
    operands = problem(SPMM).operands()
    with pytest.raises(stc.PlanError, match="plan 'window' has no option 'tau'"):
        stc.compile(SPMM, *operands, plan=stc.plans.Plan("window", options=(("tau", 40),)))
    with pytest.raises(stc.PlanError, match="plan '1-sa' has no option 'heights'"):
        stc.compile(SPMM, *operands, plan=stc.plans.Plan("1-sa", options=(("heights", 40),)))


@pytest.mark.parametrize("plan", ["window", "1-sa"])
def test_einsums_that_windows_do_not_apply_to(plan: str) -> None:
    for equation in WHOLE:
        with pytest.raises(stc.PlanError, match=f'plan "{plan}" needs an output with some, not all, of the sparse'):
            stc.compile(equation, *problem(equation).operands(), plan=plan)
    for equation in OTHERS.values():
        with pytest.raises(stc.PlanError, match=f'plan "{plan}" needs a matrix product, and finds none'):
            stc.compile(equation, *problem(equation).operands(), plan=plan, backend="triton")
    x, b = problem(SPMM).operands()
    with pytest.raises(stc.PlanError, match="for two sparse operands"):
        stc.compile(SPMM, x, stc.SparseTensor.from_dense(b), plan=plan)
    twice = stc.SparseTensor([[1, 1], [2, 2]], torch.ones(2), (3, 4), coalesce=False)
    with pytest.raises(stc.FormatError, match="the operand has duplicates: take its coalesce"):
        stc.compile(SPMM, twice, torch.ones(4, 3), plan=plan)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"height": 0}, "windows need a height and a width of 1 or more"),
        ({"tau": 101}, "tau is in percent"),
        ({"side": 2}, "windows have a height, a width, tau and a strip, found 'side'"),
    ],
)
def test_options_of_the_partition(changed: dict[str, int], says: str) -> None:
    x, b = uneven()
    plan = stc.compile(SPMM, x, b, plan=stc.plans.plan_window(8, 16, 100)).plan
    options = tuple((dict(plan.options) | changed).items())
    with pytest.raises((stc.PlanError, stc.FormatError), match=says):
        stc.compile(SPMM, x, b, plan=stc.plans.Plan("p", plan.parts, False, "row_similarity", options))


def test_a_threshold_that_no_tile_reaches_leaves_all_rows_to_runs() -> None:
    x, b = problem(SPMM, F64, i=200, j=300).operands()
    kernel = stc.compile(SPMM, x, b, plan=stc.plans.plan_window(16, 16, 2**63 - 1))
    assert not _stored(kernel)
    assert_matches(kernel(b), SPMM, [x, b])


@pytest.mark.parametrize(
    "plan", ["auto", "window", "1-sa", stc.plans.plan_window(16, 32, 60), stc.plans.plan_window(16, 32, 140)], ids=str
)
def test_no_plan_of_windows_adds_in_an_order_of_its_own_where_there_must_be_one(plan: str | stc.plans.Plan) -> None:
    """Among rows that windows leave is one that runs would cut."""
    g = torch.Generator().manual_seed(0)
    share = torch.full((300, 1), 0.004)
    share[:100], share[290] = 0.2, 1.0
    x = stc.SparseTensor.from_dense((torch.rand(300, 800, generator=g) < share).float())
    b = torch.zeros(()).expand(800, 512)
    kernel = stc.compile("ij,jk->ik", x, b, plan=plan, backend="triton", deterministic=True)
    second = kernel.step.arrays.second is not None
    assert second or "atomic" not in kernel.source
