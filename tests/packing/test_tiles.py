"""Dense tiles and the hybrid plan: every schedule of a tile einsum, ragged edges, the threshold, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import tile_plan, wrapped
from interpret import run_program

import sparsetc as stc
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.program.tile import Loop, walk
from sparsetc.packing.base import VOLUME, pack, sides_of, tile_populations
from sparsetc.packing.words import bits_of

CASES: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "mttkrp-0": ("ijk,jr,kr->ir", (40, 33, 50), {"r": 20}),
    "mttkrp-1": ("ijk,ir,kr->jr", (40, 33, 50), {"r": 20}),
    "mttkrp-2": ("ijk,ir,jr->kr", (40, 33, 50), {"r": 5}),
    "mttkrp-order-4": ("ijkl,jr,kr,lr->ir", (20, 12, 30, 17), {"r": 9}),
    "mttkrp-order-5": ("ijklm,ir,jr,kr,lr->mr", (6, 7, 5, 9, 10), {"r": 4}),
    "ttmc-0": ("ijk,jr,ks->irs", (20, 33, 50), {"r": 20, "s": 18}),
    "ttmc-2": ("ijk,ir,js->krs", (20, 33, 50), {"r": 16, "s": 5}),
    "spmm": ("ij,jr->ir", (40, 50), {"r": 20}),
    "spmm-transposed": ("ij,ir->jr", (40, 50), {"r": 20}),
    "spmm-short-mode": ("ij,jr->ir", (5, 50), {"r": 20}),
    "all-summed": ("ijk,jr,kr->r", (40, 33, 50), {"r": 20}),
    "rank-summed": ("ijk,jr,kr->i", (40, 33, 50), {"r": 20}),
    "vectors": ("ijk,j,k->i", (40, 33, 50), {}),
    "total": ("ijk->", (40, 33, 50), {}),
    "ttm-dense": ("ijk,kr->ijr", (20, 33, 50), {"r": 20}),
    "hadamard": ("ijk,jr,kr,ir->ir", (40, 33, 50), {"r": 20}),
    "two-letters": ("ijk,jkr->ir", (40, 33, 50), {"r": 20}),
    "scalar": ("ijk,,kr->r", (40, 33, 50), {"r": 20}),
    "order-1": ("i,ir->r", (400,), {"r": 20}),
}


SPARSE_CASES: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "ttm": ("ijk,kr->ijr", (20, 33, 50), {"r": 20}),
    "ttm-first": ("ijk,ir->jkr", (20, 33, 50), {"r": 5}),
    "ttv": ("ijk,k->ij", (20, 33, 50), {}),
    "ttv-order-4": ("ijkl,j->ikl", (20, 12, 9, 17), {}),
    "sampled": ("ijk,ir,jr,kr->ijk", (20, 33, 50), {"r": 20}),
    "sddmm": ("ij,ir,jr->ij", (40, 50), {"r": 20}),
    "scaled-rows": ("ij,i->ij", (40, 50), {}),
    "ttmc-semi-sparse": ("ijkl,kr,ls->ijrs", (20, 12, 30, 17), {"r": 4, "s": 6}),
}
CHAIN_CASES: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "ttmc-order-4": ("ijkl,jr,ks,lt->irst", (10, 12, 9, 17), {"r": 4, "s": 6, "t": 5}),
    "ttmc-scaled": ("ijkl,jr,ks,l->irs", (10, 12, 9, 17), {"r": 4, "s": 6}),
    "ttmc-hadamard": ("ijk,jr,ks,is->irs", (20, 33, 50), {"r": 20, "s": 18}),
    "tied-rows": ("ijk,ikr->ir", (10, 33, 50), {"r": 20}),
    "outer": ("ijk,jr,kr,s->irs", (10, 33, 50), {"r": 20, "s": 3}),
    "khatri-rao": ("ijkl,jkr,lr->ir", (20, 12, 30, 17), {"r": 9}),
}
CASES |= CHAIN_CASES


TILE_FORMATS = ("dense_tile", "bitmap_tile", "bitmap_tile planned")


def large_turns(device: str) -> tuple[str, tuple[torch.Tensor, stc.SparseTensor]]:
    """An einsum of float64 whose tiles of 16 x 8 x 1 x 16 are multiplied in 16 turns, of 16 KiB each."""
    coords = torch.tensor([[0, 0, 0, 0], [5, 0, 0, 3], [0, 0, 0, 0], [1, 0, 3, 4]], device=device)
    values = torch.arange(1.0, 5.0, dtype=torch.float64, device=device)
    return "xl,mylk->ykx", (
        torch.full((1, 1), 2.0, dtype=torch.float64, device=device),
        stc.SparseTensor(coords, values, (10, 8, 1, 17)),
    )


def operands(name: str, nnz: int = 400, seed: int = 0) -> tuple[str, list[stc.SparseTensor | torch.Tensor]]:
    equation, shape, ranks = (CASES | SPARSE_CASES)[name]
    g = torch.Generator().manual_seed(seed)
    coords = torch.stack([torch.randint(0, n, (nnz,), generator=g) for n in shape])
    # Half of them in one tile, so that tiles of both kinds exist.
    coords[:, : nnz // 2] %= torch.tensor([min(n, s) for n, s in zip(shape, sides_of(shape), strict=True)]).unsqueeze(1)
    x = stc.SparseTensor(coords, torch.randn(nnz, generator=g, dtype=torch.float64), shape)
    terms = equation.split("->")[0].split(",")
    sizes = dict(zip(terms[0], shape, strict=True)) | ranks
    return equation, [x, *(torch.randn([sizes[c] for c in t], generator=g, dtype=torch.float64) for t in terms[1:])]


def expected(equation: str, given: list[stc.SparseTensor | torch.Tensor]) -> torch.Tensor:
    return torch.einsum(equation, *(o.to_dense() if isinstance(o, stc.SparseTensor) else o for o in given))


@pytest.mark.parametrize("format", TILE_FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_tiles_agree_with_the_dense_einsum(name: str, format: str) -> None:
    equation, given = operands(name)
    k = stc.compile(equation, *given, plan=tile_plan(equation, given, "torch", format), output="dense")
    assert [p.format for p in k.plan.parts] == [format.split()[0]]
    torch.testing.assert_close(k(*given[1:]), expected(equation, given))


@pytest.mark.parametrize("format", TILE_FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_the_tile_program_means_the_einsum(name: str, format: str) -> None:
    """Level 3 alone: the schedule (loops, dots, chains of dots) is walked statement by statement."""
    equation, given = operands(name, nnz=60)
    plan = tile_plan(equation, given, "triton", format)
    k = stc.compile(equation, *given, plan=plan, output="dense", backend="triton")
    (part,) = k.step.parts
    out = torch.zeros(k.step.output.rows, *k.step.output.width_shape, dtype=torch.float64)
    tables = k.step.tables(given[1:])
    run_program(part.program, part.packed.arrays, k._packed[0], tables, out, part.packed.items, part.packed.stored)
    torch.testing.assert_close(wrapped(k, out), expected(equation, given))


@pytest.mark.parametrize("format", TILE_FORMATS)
@pytest.mark.parametrize("name", SPARSE_CASES)
def test_sparse_outputs(name: str, format: str) -> None:
    """Both by the torch program and by the tile program itself; the pattern is that of every other plan."""
    equation, given = operands(name, nnz=60)
    other = stc.einsum(equation, *given, plan="coo", output="sparse")
    k = stc.compile(equation, *given, plan=tile_plan(equation, given, "torch", format), output="sparse")
    found = k(*given[1:])
    assert torch.equal(found.coords, other.coords)
    torch.testing.assert_close(found.values, other.values)
    plan = tile_plan(equation, given, "triton", format)
    k = stc.compile(equation, *given, plan=plan, output="sparse", backend="triton")
    (part,) = k.step.parts
    out = torch.zeros(k.step.output.rows, *k.step.output.width_shape, dtype=torch.float64)
    arrays = part.packed.arrays | part.arrays.named(part.program)
    tables = k.step.tables(given[1:])
    run_program(part.program, arrays, k._packed[0], tables, out, part.packed.items, part.packed.stored)
    torch.testing.assert_close(wrapped(k, out).values, other.values)


@pytest.mark.parametrize("name", SPARSE_CASES)
def test_hybrid_plans_have_sparse_outputs(name: str) -> None:
    equation, given = operands(name)
    other = stc.einsum(equation, *given, plan="coo", output="sparse")
    for threshold in (1, 40):
        found = stc.einsum(equation, *given, plan=stc.plans.plan_hls(threshold), output="sparse")
        assert torch.equal(found.coords, other.coords)
        torch.testing.assert_close(found.values, other.values)


@pytest.mark.parametrize("threshold", [None, 0, 1, 3, 40, 5000])
@pytest.mark.parametrize("name", ["mttkrp-0", "mttkrp-order-4", "ttmc-0", "spmm", "all-summed"])
def test_any_threshold_gives_the_same_result(name: str, threshold: int | None) -> None:
    equation, given = operands(name)
    k = stc.compile(equation, *given, plan="hls" if threshold is None else stc.plans.plan_hls(threshold))
    assert sum(p.nnz for p in k.plan.parts) == given[0].nnz
    torch.testing.assert_close(k(*given[1:]), expected(equation, given))


def test_a_threshold_deals_by_population() -> None:
    equation, given = operands("mttkrp-0")
    everything = stc.compile(equation, *given, plan=stc.plans.plan_hls(1)).plan
    nothing = stc.compile(equation, *given, plan=stc.plans.plan_hls(VOLUME + 1)).plan
    both = stc.compile(equation, *given, plan=stc.plans.plan_hls(40)).plan
    assert [[p.format for p in plan.parts] for plan in (everything, nothing, both)] == [
        ["dense_tile"],
        ["coo"],
        ["dense_tile", "coo"],
    ]


def test_schedules_follow_from_the_letters() -> None:
    """MTTKRP: dots over k, a few j at a time, of order 4 over k and l; TTM chains: two dots and no loop."""
    for name, loops, dots in (
        ("mttkrp-0", ["j"], 1),
        ("mttkrp-2", ["i"], 1),
        ("mttkrp-order-4", [], 1),
        ("ttmc-0", [], 2),
        ("ttmc-order-4", [], 2),
        ("spmm", [], 1),
    ):
        equation, given = operands(name)
        k = stc.compile(equation, *given, plan=tile_plan(equation, given, "triton"), backend="triton")
        (program,) = k.step.programs
        assert [s.axis.letter for s, _ in walk(program.body) if isinstance(s, Loop) and s.axis.letter] == loops
        assert len(program.dots) == dots


@pytest.mark.parametrize("shape", [(40, 33, 50), (20, 12, 30, 17), (5, 50), (3, 2), (400,)])
def test_bitmaps_take_the_bits_of_the_paper(shape: tuple[int, ...]) -> None:
    """HLSTO, (13) and (14), up to the padding of words; a pointer a tile is beside them."""
    x = stc.SparseTensor(torch.stack([torch.randint(0, n, (200,)) for n in shape]), torch.ones(200), shape)
    packed = pack(x.coords, shape, "bitmap_tile", stc.plans.Storage((0,), tuple(range(1, len(shape))), ()))
    tiles = packed.arrays["value_ptr"].numel() - 1
    index = sum(bits_of(-(-n // side)) for n, side in zip(shape, packed.view.values.sides, strict=True))
    paper = tiles * (index + max(8, packed.view.values.volume)) / 8
    padding = 4 * tiles + 4 * packed.items  # a word of 32 bits for the index of a tile, and of an item
    pointers = 4 * (tiles + 1) + 4 * (packed.items + 1)
    assert packed.nbytes <= paper + padding + pointers
    assert packed.stored == x.nnz


def test_bitmaps_stored_for_other_dots_are_refused() -> None:
    """Each value would be searched for among the bits of its tile."""
    equation, given = operands("mttkrp-0")
    plan = tile_plan(equation, given, "triton", "bitmap_tile planned")
    assert plan.parts[0].storage.sequence == (1, 0, 2)
    stc.compile(equation, *given, plan=plan, backend="triton")
    sides = (("side_0", 8), ("side_1", 2), ("side_2", 2))
    shorter = replace(plan.parts[0], storage=replace(plan.parts[0].storage, params=sides))
    for faulty in (plan, replace(plan, parts=(shorter,))):
        with pytest.raises(stc.PlanError, match=r"order jik for dots over k; .* in the order kij, with dots over j"):
            stc.compile("ijk,jr->ir", *given[:2], plan=faulty, backend="triton")
    whole = replace(plan, parts=(replace(plan.parts[0], format="dense_tile"),))
    searched = replace(plan.parts[0], storage=replace(plan.parts[0].storage, sequence=(), contracted=0))
    for sound in (whole, replace(plan, parts=(searched,))):
        stc.compile("ijk,jr->ir", *given[:2], plan=sound, backend="triton")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_memory_decides_which_tiles_are_bitmaps(backend: str) -> None:
    """The fullest tiles are stored whole as long as they fit."""
    equation, given = operands("mttkrp-0")
    largest = int(tile_populations(given[0].coords, given[0].shape, sides_of(given[0].shape)).max())
    for limit, formats in ((10**9, ["dense_tile"]), (70_000, ["dense_tile", "bitmap_tile"]), (30_000, ["bitmap_tile"])):
        k = stc.compile(equation, *given, plan=stc.plans.plan_hls(1), memory_limit=limit, backend=backend)
        assert [p.format for p in k.plan.parts] == formats
        if len(formats) == 2:
            assert k.plan.parts[0].nnz == largest
        if backend == "torch":
            torch.testing.assert_close(k(*given[1:]), expected(equation, given))


def test_the_explanation_counts_tiles_by_population() -> None:
    equation, given = operands("mttkrp-0")
    explained = stc.explain(equation, *given, plan=stc.plans.plan_hls(40))
    assert sum(nnz for _, _, nnz in explained.tiles) == given[0].nnz
    assert "tiles by nonzeros" in str(explained)
    assert explained.to_dict()["tiles"] == explained.tiles
    assert not stc.explain(equation, *given, plan="coo").tiles


@pytest.mark.parametrize(
    ("plan", "of_all"), [(stc.plans.plan_hls(40), True), (stc.plans.plan_window(16, 16, 17), False)]
)
def test_tiles_are_explained_of_all_nonzeros_where_the_tensor_is_cut_evenly(plan: stc.plans.Plan, of_all: bool) -> None:
    """Else those that are stored."""
    equation, given = operands("mttkrp-0")
    taken = stc.compile(equation, *given, plan=plan).plan
    explained = stc.explain(equation, *given, plan=plan)
    assert 0 < taken.parts[0].nnz < given[0].nnz
    assert sum(nnz for _, _, nnz in explained.tiles) == (given[0].nnz if of_all else taken.parts[0].nnz)


def test_auto_takes_tiles_where_they_are_well_filled() -> None:
    full = stc.SparseTensor.from_dense(torch.rand(160, 160, 160))
    factors = [torch.rand(160, 32) for _ in range(2)]
    for precision in ("highest", "medium"):
        k = stc.compile("ijk,jr,kr->ir", full, *factors, backend="triton", precision=precision)
        assert [p.format for p in k.plan.parts] == ["dense_tile"]
    generator = torch.Generator().manual_seed(0)
    coords = torch.randint(0, 4000, (3, 20000), generator=generator)
    thin = stc.SparseTensor(coords, torch.ones(20000), (4000, 4000, 4000))
    factors = [torch.rand(4000, 32) for _ in range(2)]
    k = stc.compile("ijk,jr,kr->ir", thin, *factors, backend="triton", precision="medium")
    assert all(p.format != "dense_tile" for p in k.plan.parts)


def test_sides_fit_the_modes_and_the_volume() -> None:
    assert sides_of((480, 875, 749)) == (16, 16, 16)
    assert sides_of((6040, 3952, 5)) == (16, 16, 8)
    assert sides_of((91, 24, 887, 1410)) == (8, 8, 8, 8)
    for order in range(1, 9):
        assert torch.tensor(sides_of((1000,) * order)).prod() <= VOLUME


def test_what_tiles_cannot_serve_is_refused() -> None:
    equation, given = operands("mttkrp-0")
    with pytest.raises(stc.PlanError, match="not deterministic"):
        stc.compile(equation, *given, plan=stc.plans.plan_hls(40), deterministic=True, backend="triton")
    with pytest.raises(stc.PlanError, match="threshold"):
        stc.plans.plan_hls(-1)
    twice = stc.SparseTensor(torch.zeros(2, 2, dtype=torch.long), torch.ones(2), (4, 4), coalesce=False)
    with pytest.raises(stc.FormatError, match="coalesce"):
        stc.compile("ij,jr->ir", twice, torch.ones(4, 3), plan=stc.plans.plan_hls(1))


def test_an_empty_tensor_and_gradients() -> None:
    empty = stc.SparseTensor(torch.zeros(2, 0, dtype=torch.long), torch.zeros(0), (40, 50))
    assert not stc.einsum("ij,jr->ir", empty, torch.ones(50, 3), plan="hls").any()
    equation, (x, *dense) = operands("mttkrp-0", nnz=30)
    dense = [d[:, :2].clone().requires_grad_() for d in dense]
    values = x.values.clone().requires_grad_()

    def call(values: torch.Tensor, *dense: torch.Tensor) -> torch.Tensor:
        return stc.einsum(equation, x.with_values(values), *dense, plan=stc.plans.plan_hls(5))

    assert torch.autograd.gradcheck(call, (values, *dense))


def test_the_parsed_equations_are_what_the_names_say() -> None:
    for equation, shape, ranks in CASES.values():
        terms = equation.split("->")[0].split(",")
        sizes = dict(zip(terms[0], shape, strict=True)) | ranks
        parse(equation, [tuple(sizes[c] for c in t) for t in terms], [True, *(False for _ in terms[1:])])


def test_auto_leaves_tiles_out_where_coordinates_may_repeat() -> None:
    full = torch.cartesian_prod(*(torch.arange(48),) * 3).T
    x = stc.SparseTensor(torch.cat([full, full[:, :5]], 1), torch.ones(48**3 + 5), (48, 48, 48), coalesce=False)
    factors = [torch.rand(48, 128) for _ in range(2)]
    k = stc.compile("ijk,jr,kr->ir", x, *factors, backend="triton", precision="medium")
    assert all(not p.format.endswith("tile") for p in k.plan.parts)
