"""Levels 2 and 3 alone: what a plan stores, and what its tile programs do to it, against level 1's reference."""

from dataclasses import dataclass, replace

import pytest
import reference
import torch
from cases import wrapped
from hypothesis import given, settings
from hypothesis import strategies as st
from interpret import run_plan, run_program

import sparsetc as stc
from sparsetc.contraction.kernel import Kernel
from sparsetc.contraction.prepare import dense_tables
from sparsetc.errors import FormatError, PlanError, ShapeError
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.lower import Target, lower
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF
from sparsetc.ir.nest.coordinates import Computed, Field
from sparsetc.ir.nest.nest import runs
from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.ir.program.tile import Add, walk

SIZES = {"i": 7, "j": 9, "k": 6, "l": 4, "m": 3, "r": 5, "s": 20, "t": 3}


@dataclass(frozen=True)
class Case:
    """An equation whose first operand is sparse, how it is stored, and what the program must then look like."""

    name: str
    equation: str
    format: str
    levels: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """Item, lane and leaf modes."""
    lanes: int = 4
    longest: int = 0
    """Nonzeros of a fiber."""
    most: int = 0
    """Nonzeros of an item."""
    unroll: int = 1
    blocks: tuple[tuple[str, int], ...] = ()
    """Of the dense axes; by default the next power of two."""
    dot: bool = False
    output: str = "auto"
    dtype: torch.dtype = torch.float64
    density: float = 0.3
    key: tuple[str, int] | None = None
    owned: bool | None = None
    dots: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.equation}"

    @property
    def storage(self) -> Storage:
        return Storage(*self.levels, self.lanes, self.longest, self.most, narrow=self.lanes > 1)


COO = [
    Case("chunks", "i,i->", "coo", ((), (), (0,)), most=3, key=("row", ITEM), owned=False, density=1.0),
    Case("whole", "i,ir->r", "coo", ((), (), (0,)), lanes=16, key=("row", ITEM), owned=True, density=0.9),
    Case("position", "i,i->i", "coo", ((), (), (0,)), most=4, key=("position", LEAF), owned=True),
    Case("rows", "ij,jr->ir", "coo", ((0,), (), (1,)), lanes=1, key=("row", ITEM), owned=True),
    Case("cut rows", "ij,ir->jr", "coo", ((1,), (), (0,)), lanes=2, most=5, unroll=2, owned=False, density=0.9),
    Case("sampled", "ijk,ir,jr,kr->ijk", "coo", ((), (), (0, 1, 2)), 16, 0, 32, unroll=2, key=("position", LEAF)),
    Case("sum split", "ijk,is,js,ks->ijk", "coo", ((), (), (0, 1, 2)), blocks=(("s", 8),), owned=False),
    Case("MTTKRP", "ijk,jr,kr->ir", "coo", ((0,), (), (1, 2)), lanes=32, unroll=4, key=("row", ITEM), owned=True),
    Case("MTTKRP, ragged", "ijk,js,ks->is", "coo", ((0,), (), (1, 2)), blocks=(("s", 8),), owned=True),
    Case("MTTKRP, chunks", "ijk,jr,kr->ir", "coo", ((), (), (0, 1, 2)), most=16, key=("row", LEAF), owned=False),
    Case("row factor", "ijk,is,jr,kr->isr", "coo", ((0,), (), (1, 2)), lanes=8, most=16, key=("row", ITEM)),
    Case("two sparse letters", "ijk,kjr->ri", "coo", ((0,), (), (1, 2)), key=("row", ITEM)),
    Case("no sparse letter", "ijk,jr,kr,r->ir", "coo", ((0,), (), (1, 2))),
    Case("dot", "ijk,jr,ks->irs", "coo", ((0,), (), (1, 2)), lanes=16, blocks=(("r", 16),), dot=True, dots=1),
    Case(
        "dot, split", "ijk,js,kr->irs", "coo", ((0,), (), (1, 2)), 32, blocks=(("r", 16), ("s", 16)), dot=True, dots=1
    ),
    Case("multiply", "ijk,jr,ks->irs", "coo", ((0,), (), (1, 2)), lanes=4, dots=0),
    Case("dot of 3", "ijkl,jr,ks,lt->irst", "coo", ((0,), (), (1, 2, 3)), 16, blocks=(("t", 16),), dot=True, dots=1),
    Case("item slots", "ijk,k->ij", "coo", ((0, 1), (), (2,)), lanes=2, key=("slot", ITEM), owned=True),
    Case("cut slots", "ijk,kr->ijr", "coo", ((0, 1), (), (2,)), lanes=2, most=2, key=("slot", ITEM), owned=False),
    Case("leaf slots", "ijk,i->jk", "coo", ((), (), (0, 1, 2)), most=16, key=("slot", LEAF), owned=False),
    Case("order 4", "ijkl,ir,kr,lr->jr", "coo", ((1,), (), (3, 0, 2)), lanes=8, density=0.1),
    Case("order 5", "ijklm,jr,kr,lr,mr->ir", "coo", ((0,), (), (1, 2, 3, 4)), lanes=16, most=64, density=0.03),
    Case("repeated letter", "iij,jr->ir", "coo", ((0,), (), (1,)), density=0.8),
    Case("complex", "ijk,jr,kr->ir", "coo", ((0,), (), (1, 2)), dtype=torch.complex64),
]

FIBER = [
    Case("rows as lanes", "ij,jr->ir", "fiber", ((), (0,), (1,)), lanes=16, most=32, key=("row", LANE), owned=True),
    Case(
        "cut rows as lanes", "ij,jr->ir", "fiber", ((), (0,), (1,)), lanes=8, longest=3, key=("row", LANE), owned=False
    ),
    Case("sampled", "ijk,ir,jr,kr->ijk", "fiber", ((0,), (1,), (2,)), longest=2, key=("slot", LEAF), owned=True),
    Case("no lane modes", "ij,jr->ij", "fiber", ((0,), (), (1,)), longest=2, key=("slot", LEAF), owned=True),
    Case("leaf 2", "ijk,jr,kr->ir", "fiber", ((0,), (1,), (2,)), lanes=4, key=("row", ITEM), owned=True),
    Case("leaf 2, cut", "ijk,jr,kr->ir", "fiber", ((0,), (1,), (2,)), 4, 2, 8, key=("row", ITEM), owned=False),
    Case("leaf 1", "ijk,jr,kr->ir", "fiber", ((0,), (2,), (1,)), lanes=16, longest=4, unroll=2, owned=True),
    Case("leaf 0", "ijk,ir,kr->jr", "fiber", ((1,), (2,), (0,)), lanes=32, unroll=4, dtype=torch.float32),
    Case("one lane", "ijk,jr,kr->ir", "fiber", ((0,), (1,), (2,)), lanes=1, most=8),
    Case("64 lanes", "ijk,jr,kr->ir", "fiber", ((0,), (1,), (2,)), lanes=64, density=0.02),
    Case("rows as lanes", "ijk,jr,kr->ir", "fiber", ((), (0,), (1, 2)), lanes=4, most=16, unroll=2, owned=True),
    Case("output at the leaf", "ijk,jr,kr->ir", "fiber", ((), (1, 2), (0,)), lanes=16, key=("row", LEAF), owned=False),
    Case("output at the lane", "ijk,ir,kr->jr", "fiber", ((0,), (1,), (2,)), most=8, key=("row", LANE), owned=False),
    Case("row factor", "ijk,ir,jr,kr->ir", "fiber", ((0,), (1,), (2,)), lanes=4),
    Case("integers", "ijk,jr,kr->ir", "fiber", ((0,), (1,), (2,)), lanes=8, dtype=torch.int32),
    Case("dot", "ijk,jr,ks->irs", "fiber", ((0,), (1,), (2,)), 16, blocks=(("r", 16),), dot=True, dots=1),
    Case("multiply", "ijk,jr,ks->irs", "fiber", ((0,), (1,), (2,)), lanes=4, longest=2, blocks=(("r", 4), ("s", 8))),
    Case(
        "dot of 3", "ijkl,jr,ks,lt->irst", "fiber", ((0,), (1, 2), (3,)), 32, 3, blocks=(("t", 16),), dot=True, dots=1
    ),
    Case("lane slots", "ijk,k->ij", "fiber", ((), (0, 1), (2,)), lanes=16, key=("slot", LANE), owned=True),
    Case("cut lane slots", "ijk,kr->irj", "fiber", ((0,), (1,), (2,)), longest=2, key=("slot", LANE), owned=False),
    Case("two rows", "ijk,kr->jri", "fiber", ((1,), (0,), (2,)), key=("row", LANE), owned=True, output="dense"),
    Case("order 4", "ijkl,jr,kr,lr->ir", "fiber", ((0,), (1, 2), (3,)), lanes=8, longest=2, most=32, density=0.1),
    Case("order 5", "ijklm,ir,jr,kr,mr->lr", "fiber", ((3,), (0, 1, 2), (4,)), lanes=16, density=0.03),
    Case("order 5, sums", "ijklm->m", "fiber", ((4,), (0, 2), (1, 3)), lanes=4, density=0.03),
]

DENSE = [
    Case("MTTKRP", "ijk,jr,kr->ir", "dense", ((), (), (0, 1, 2))),
    Case("dot", "ijk,kr->jri", "dense", ((), (), (0, 1, 2)), dot=True, output="dense"),
    Case("chain", "ijk,jr,ks->irs", "dense", ((), (), (0, 1, 2)), dot=True),
    Case("sum", "ij,jr->r", "dense", ((), (), (0, 1))),
]


def pattern(shape: tuple[int, ...], density: float, seed: int = 0) -> torch.Tensor:
    """Coordinates with one full slice, one empty one, and the rest at random."""
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    chosen[-1] = True
    if shape[0] > 2:
        chosen[1] = False
    return chosen.nonzero().T


def operands(
    equation: str, dtype: torch.dtype, density: float = 0.3, seed: int = 0
) -> tuple[stc.SparseTensor, list[torch.Tensor]]:
    terms = equation.split("->")[0].split(",")
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, dtype=dtype, generator=generator)
        return torch.randint(-9, 10, shape, dtype=dtype, generator=generator)

    shape = tuple(SIZES[c] for c in terms[0])
    coords = pattern(shape, density, seed)
    x = stc.SparseTensor(coords, values(coords.shape[1]), shape)
    return x, [values(*(SIZES[c] for c in t)) for t in terms[1:]]


def plan_of(case: Case) -> Plan:
    terms = case.equation.split("->")[0].split(",")
    ranks = {c for t in terms[1:] for c in t if c not in terms[0]}
    blocks = {c: 1 << (SIZES[c] - 1).bit_length() for c in sorted(ranks)} | dict(case.blocks)
    schedule = Schedule(blocks=tuple(blocks.items()), dot=case.dot, lanes=case.lanes, unroll=case.unroll)
    return Plan("test", (Part(case.format, case.storage, schedule),))


def compiled(case: Case) -> tuple[Kernel, stc.SparseTensor, list[torch.Tensor]]:
    x, dense = operands(case.equation, case.dtype, case.density)
    return stc.compile(case.equation, x, *dense, backend="triton", plan=plan_of(case), output=case.output), x, dense


def interpreted(kernel: Kernel, dense: list[torch.Tensor]) -> torch.Tensor:
    """Every part through `run_program`; what no program may read, or leave as it was, is poisoned."""
    wide = torch.complex128 if kernel.operand.dtype.is_complex else torch.float64
    wide = wide if kernel.operand.dtype.is_floating_point or kernel.operand.dtype.is_complex else torch.int64
    out = torch.full((kernel.step.output.rows, *kernel.step.output.width_shape), 10**9, dtype=wide)
    if kernel.step.executable.zeroes:
        out.zero_()
    _, pulled = kernel.contraction.pull([x.values for x in kernel.operands], dense)
    tables = [t.contiguous() for t in dense_tables(pulled, kernel.step.problem, contiguous=False)]
    for part, values in zip(kernel.step.parts, kernel._packed or kernel.step._ones, strict=True):
        arrays = part.packed.arrays | part.arrays.named(part.program)
        if part.packed.padded and part.packed.view.blocks:  # runs have no mask: they add the zeros of padding
            places = part.packed.positions
            assert places is not None
            assert values[places < 0].eq(0).all()
            values = torch.where(places < 0, torch.full_like(values, 10**9), values)
        if part.program.view.values.halves:
            high, low, arrays["most"] = values
            values = (torch.stack([high, low]),)
        run_program(part.program, arrays, values, tables, out, part.packed.items, part.packed.stored)
    result = wrapped(kernel, out)
    return result.to_dense() if isinstance(result, stc.SparseTensor) else result


def expected(kernel: Kernel, x: stc.SparseTensor, dense: list[torch.Tensor]) -> torch.Tensor:
    return reference.run(kernel.contraction.bound.einsum, x, *dense)


def key_of(kernel: Kernel) -> Add:
    (add,) = (s for s, _ in walk(kernel.step.parts[0].program.body) if isinstance(s, Add))
    return add


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_a_dense_tensor_is_multiplied_in_place_of_a_tile_program(case: Case) -> None:
    kernel, x, dense = compiled(case)
    (part,) = kernel.step.parts
    assert part.program.covers
    assert part.program.at_once
    found, wanted = kernel(*dense), expected(kernel, x, dense)
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", [*COO, *FIBER], ids=lambda c: f"{c.format} {c}")
def test_a_tile_program_computes_its_einsum(case: Case) -> None:
    kernel, x, dense = compiled(case)
    (part,) = kernel.step.parts
    add = key_of(kernel)
    if case.key is not None:
        assert (add.key.kind, add.key.level) == case.key
    if case.owned is not None:
        assert add.owned == case.owned
    assert len(part.program.dots) == case.dots
    torch.testing.assert_close(interpreted(kernel, dense), expected(kernel, x, dense), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", [*COO, *FIBER, *DENSE], ids=lambda c: f"{c.format} {c}")
def test_a_plan_stores_what_the_einsum_needs(case: Case) -> None:
    kernel, x, dense = compiled(case)
    coords = kernel.step.operand.coords.flip(1)  # in any order
    (values,), pulled = kernel.contraction.pull([x.values], dense)
    found = run_plan(kernel.plan, kernel.step.bound, coords, values.flip(0), pulled)
    torch.testing.assert_close(found, expected(kernel, x, dense), rtol=1e-11, atol=1e-11)


# -- cuts, padding and parts -----------------------------------------------------------------------------------------


def case_named(name: str, cases: list[Case]) -> Case:
    return next(c for c in cases if c.name == name)


def test_the_cases_cut_rows_and_fibers_and_leave_lanes_empty() -> None:
    cut = {
        c.name: compiled(c)[0].step.parts[0].packed
        for c in [*FIBER, *COO]
        if c.most or c.longest or c.name == "64 lanes"
    }
    assert (cut["leaf 2, cut"].split_rows, cut["leaf 2, cut"].split_fibers) == (True, True)
    assert (cut["cut rows as lanes"].split_rows, cut["cut rows as lanes"].split_fibers) == (False, True)
    assert (cut["cut rows"].split_rows, cut["cut rows"].split_fibers) == (True, False)
    assert (cut["64 lanes"].arrays["lane_len"] == 0).any()
    assert (cut["leaf 2, cut"].arrays["lane_len"] == 0).any()
    assert cut["leaf 1"].padded


def two_parts(threshold: int, fused: bool = True) -> Plan:
    long = Part("coo", Storage((0,), (), (1, 2), max_item_nnz=16), Schedule(blocks=(("r", 8),), lanes=8))
    short = Part("fiber", Storage((), (0,), (1, 2), lanes=4), Schedule(blocks=(("r", 8),)))
    return Plan("two", (long, short), fused, "run_length", (("threshold", threshold),))


@pytest.mark.parametrize("threshold", [0, 17, 10**6])
def test_two_parts_add_into_one_output(threshold: int) -> None:
    equation = "ijk,jr,kr->ir"
    x, dense = operands(equation, torch.float64)
    kernel = stc.compile(equation, x, *dense, backend="triton", plan=two_parts(threshold))
    assert len(kernel.step.parts) == (2 if threshold == 17 else 1)
    torch.testing.assert_close(interpreted(kernel, dense), expected(kernel, x, dense))
    plan = two_parts(threshold)
    found = run_plan(plan, kernel.step.bound, x.coords, x.values, dense)
    torch.testing.assert_close(found, expected(kernel, x, dense))


@pytest.mark.parametrize("format", ["coo", "fiber"])
@pytest.mark.parametrize("nnz", [0, 1])
def test_next_to_nothing_is_stored(format: str, nnz: int) -> None:
    equation, shape = "ijk,jr,kr->ir", (7, 9, 6)
    dense = operands(equation, torch.float64)[1]
    x = stc.SparseTensor(torch.tensor([[6], [8], [5]])[:, :nnz], torch.ones(nnz, dtype=torch.float64), shape)
    storage = Storage((0,), (1,), (2,), 16) if format == "fiber" else Storage((0,), (), (1, 2))
    plan = Plan("test", (Part(format, storage, Schedule(blocks=(("r", 8),), lanes=16)),))
    kernel = stc.compile(equation, x, *dense, backend="triton", plan=plan)
    torch.testing.assert_close(interpreted(kernel, dense), expected(kernel, x, dense))
    torch.testing.assert_close(run_plan(plan, kernel.step.bound, x.coords, x.values, dense), expected(kernel, x, dense))


def test_modes_of_one_coordinate_take_no_bits() -> None:
    dense = torch.randn(1, 5, dtype=torch.float64)
    x = stc.SparseTensor(torch.tensor([[0, 2], [0, 0]]), torch.tensor([1.0, 2.0], dtype=torch.float64), (3, 1))
    plan = Plan("test", (Part("fiber", Storage((), (0,), (1,), 4), Schedule(blocks=(("r", 8),))),))
    kernel = stc.compile("ij,jr->ir", x, dense, backend="triton", plan=plan)
    torch.testing.assert_close(interpreted(kernel, [dense]), x.to_dense() @ dense)


@pytest.mark.parametrize(
    ("format", "storage"),
    [
        ("coo", Storage((0, 1), (), (2,))),
        ("fiber", Storage((), (0, 1), (2,), 4)),
        ("fiber", Storage((2,), (), (0, 1), 4)),
    ],
)
def test_coordinates_of_more_than_63_bits_take_two_words(format: str, storage: Storage) -> None:
    small, (c,) = operands("ijk,k->ij", torch.float64)
    stride = 2**38
    shape = (7 * stride, 9 * stride, 6)
    x = stc.SparseTensor(small.coords * torch.tensor([[stride], [stride], [1]]), small.values, shape)
    plan = Plan("test", (Part(format, storage, Schedule(lanes=4)),))
    kernel = stc.compile("ijk,k->ij", x, c, backend="triton", plan=plan)
    (part,) = kernel.step.parts
    assert any(name.endswith("word_1") for name in part.packed.arrays)
    out = torch.zeros(kernel.step.output.rows, dtype=torch.float64)
    run_program(
        part.program,
        part.packed.arrays | part.arrays.named(part.program),
        kernel._packed[0],
        [c],
        out,
        part.packed.items,
        part.packed.stored,
    )
    assert kernel.step.output.pattern is not None
    found = torch.zeros(7, 9, dtype=torch.float64)
    found[tuple(kernel.step.output.pattern.coords // stride)] = out
    torch.testing.assert_close(found, small.to_dense() @ c)


def test_a_coordinate_may_be_computed() -> None:
    """Three nonzeros a row, at the row's own column and the two after it; chunks of 8 cut through rows."""
    row = torch.arange(30) // 3
    view = runs((), (Field(0, "word", 0, 4, True), Computed(1, "{m0} + {p} % 3")), 4, chunk=8)
    bound = parse("ij,jr->ir", [(10, 12), (12, 5)], [True, False])
    program = lower(bound, view, Schedule(blocks=(("r", 8),)), Target(rows=10))
    values, b = torch.randn(30, dtype=torch.float64), torch.randn(12, 5, dtype=torch.float64)
    out = torch.zeros(10, 5, dtype=torch.float64)
    run_program(program, {"word": row}, values, [b], out, 4, 30)
    x = stc.SparseTensor(torch.stack([row, row + torch.arange(30) % 3]), values, (10, 12))
    torch.testing.assert_close(out, x.to_dense() @ b)


@pytest.mark.parametrize("name", ["leaf 2, cut", "rows as lanes", "dot", "lane slots"])
def test_the_torch_programs_take_a_plan_made_for_many_lanes(name: str) -> None:
    case = case_named(name, FIBER)
    x, dense = operands(case.equation, case.dtype, case.density)
    kernel = stc.compile(case.equation, x, *dense, backend="torch", plan=plan_of(case))
    assert {lanes for p in kernel.plan.parts for lanes in (p.storage.lanes, p.schedule.lanes)} == {1}
    result = kernel(*dense)
    result = result.to_dense() if isinstance(result, stc.SparseTensor) else result
    torch.testing.assert_close(result, expected(kernel, x, dense))


# -- any storage -------------------------------------------------------------------------------------------------------

EQUATIONS = [
    "ij,jr->ir",
    "ijk,ir,jr,kr->ijk",
    "ijk,jr,kr->ir",
    "ijk,ir,jr->kr",
    "ijk,kr->ijr",
    "ijk,js,kr->irs",
    "ijk,i,j,k->",
]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_storage_means_the_same(data: st.DataObject) -> None:
    equation = data.draw(st.sampled_from(EQUATIONS))
    order = equation.index(",")
    modes = data.draw(st.permutations(range(order)))
    format = data.draw(st.sampled_from(["coo", "fiber"]))
    first = data.draw(st.integers(0, order - 1))
    second = data.draw(st.integers(first, order - 1)) if format == "fiber" else first
    case = Case(
        "drawn",
        equation,
        format,
        (tuple(modes[:first]), tuple(modes[first:second]), tuple(modes[second:])),
        lanes=data.draw(st.sampled_from([1, 2, 4, 16, 64])),
        longest=data.draw(st.sampled_from([0, 1, 3])),
        most=data.draw(st.sampled_from([0, 4, 37])),
        unroll=data.draw(st.sampled_from([1, 2, 4])),
        blocks=data.draw(st.sampled_from([(), (("r", 2),), (("r", 16),)])) if "r" in equation else (),
        dot=data.draw(st.booleans()),
        output=data.draw(st.sampled_from(["auto", "dense"])),
        density=data.draw(st.sampled_from([0.02, 0.3, 1.0])),
    )
    kernel, x, dense = compiled(case)
    torch.testing.assert_close(interpreted(kernel, dense), expected(kernel, x, dense))
    found = run_plan(kernel.plan, kernel.step.bound, x.coords, x.values, dense)
    torch.testing.assert_close(found, expected(kernel, x, dense))


# -- the runners find faults -------------------------------------------------------------------------------------------


def run_part(kernel: Kernel, dense: list[torch.Tensor], out: torch.Tensor, **changed: torch.Tensor) -> None:
    (part,) = kernel.step.parts
    arrays = {**part.packed.arrays, **changed}
    run_program(part.program, arrays, kernel._packed[0], dense, out, part.packed.items, part.packed.stored)


def test_a_store_to_a_row_that_others_add_to_is_found() -> None:
    kernel, x, dense = compiled(case_named("cut rows", COO))
    (part,) = kernel.step.parts
    body = tuple(replace(s, owned=True) if isinstance(s, Add) else s for s in part.program.body)
    out = torch.zeros(9, 5, dtype=torch.float64)
    run_program(
        replace(part.program, body=body),
        part.packed.arrays,
        kernel._packed[0],
        dense,
        out,
        part.packed.items,
        part.packed.stored,
    )
    assert not torch.allclose(out, expected(kernel, x, dense))


def test_a_broken_promise_of_a_packed_part_is_found() -> None:
    kernel, _, dense = compiled(case_named("leaf 1", FIBER))
    arrays = kernel.step.parts[0].packed.arrays
    out = torch.zeros(7, 5, dtype=torch.float64)
    run_part(kernel, dense, out)
    with pytest.raises(FormatError, match=r"block 0 has fibers of \[.*\] nonzeros in .* steps, of which .* full"):
        run_part(kernel, dense, out, block_full=arrays["block_full"] + 1)
    with pytest.raises(FormatError, match="cannot be full"):
        run_part(kernel, dense, out, lane_len=arrays["lane_len"] + 100)


def test_what_a_program_is_not_given_is_named() -> None:
    kernel, _, dense = compiled(case_named("leaf 1", FIBER))
    (part,) = kernel.step.parts
    arrays = {name: a for name, a in part.packed.arrays.items() if name != "lane_word"}
    out = torch.zeros(7, 5, dtype=torch.float64)
    with pytest.raises(FormatError, match="part 0 reads array lane_word, which is not given"):
        run_program(part.program, arrays, kernel._packed[0], dense, out, part.packed.items, part.packed.stored)
    with pytest.raises(ShapeError, match=r"B has shape \(6, 5\); expected the elements of \(9, 5\)"):
        run_part(kernel, dense[::-1], out)
    with pytest.raises(ShapeError, match="the output has shape"):
        run_part(kernel, dense, out[:, :4])


def test_a_plan_is_checked_before_it_is_run() -> None:
    x, dense = operands("ijk,jr,kr->ir", torch.float64)
    bound = parse("ijk,jr,kr->ir", [x.shape, *(tuple(d.shape) for d in dense)], [True, False, False])
    plan = two_parts(5)
    with pytest.raises(PlanError, match="plan 'two' has 1 parts, its partition makes 2"):
        run_plan(replace(plan, parts=plan.parts[:1]), bound, x.coords, x.values, dense)
    with pytest.raises(PlanError, match="has no parts"):
        run_plan(replace(plan, parts=()), bound, x.coords, x.values, dense)
    several = parse("ij,jk->ik", [(3, 4), (4, 5)], [True, True])
    with pytest.raises(PlanError, match="a plan stores one sparse operand"):
        run_plan(plan, several, x.coords, x.values, dense)
