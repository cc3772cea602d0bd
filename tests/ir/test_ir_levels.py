"""Views, plans and tile programs alone: their printers, checkers and counts, with nothing packed and nothing run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import program_checks
import pytest
import torch

import sparsetc as stc
from sparsetc.device.profile import DeviceProfile, cpu, cpu_with_loops, default_gpu
from sparsetc.errors import FormatError, PlanError
from sparsetc.ir import plan as plans
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.ir.lower import Target, lower
from sparsetc.ir.nest.axes import ITEM, LANE, LEAF
from sparsetc.ir.nest.coordinates import Computed, Field, Position
from sparsetc.ir.nest.nest import Nest, blocks, runs
from sparsetc.ir.plan import Part, Plan, Schedule, Storage
from sparsetc.ir.program import tile as tiles
from sparsetc.ir.program.cost import cost_of
from sparsetc.ir.program.operands import operand_names
from sparsetc.ir.program.resources import FIBERS, ITEMS, ONE, STORED, ZERO, Statistics
from sparsetc.ir.program.tile import (
    LANES,
    Add,
    Decode,
    Gather,
    Key,
    Loop,
    Product,
    Statement,
    Tile,
    TileProgram,
    Value,
    Zero,
)
from sparsetc.packing.base import get_format

SIZES = {"i": 10, "j": 20, "k": 30, "r": 32, "s": 32}
ROWS, FIBER = Storage((0,), (), (1, 2), narrow=True), Storage((0,), (1,), (2,), lanes=4, narrow=True)


def bound(equation: str, **sizes: int) -> Bound:
    left, right = equation.split("->")
    return Bound.of(Einsum(tuple(map(tuple, left.split(","))), tuple(right), (0,), equation), SIZES | sizes)


def lowered(
    equation: str,
    format: str,
    storage: Storage,
    target: Target | None = None,
    /,
    dot: bool = False,
    lanes: int = 32,
    unroll: int = 1,
    **sizes: int,
) -> TileProgram:
    b = bound(equation, **sizes)
    view = get_format(format).view(b.shape(0), storage)
    schedule = Schedule(blocks=(("r", 32), ("s", 32)), dot=dot, lanes=lanes, unroll=unroll)
    return lower(b, view, schedule, target or Target(rows=10), format=format)


def mttkrp(format: str) -> TileProgram:
    return lowered("ijk,jr,kr->ir", format, FIBER if format == "fiber" else ROWS)


# -- printers ----------------------------------------------------------------------------------------------------------

MTTKRP_FIBER = """\
tile program  "ijk,jr,kr->ir"  part 0: fiber, blocks of fibers, 4 lanes, modes 0 by item, 1 by fiber, 2 by nonzero
  item over item_ptr
  axes r = 32
  at_i = decode item_word  # 16 bits of each item
  total[lane,r] = 0
  loop blocks of the item
    at_j[lane] = decode lane_word  # 16 bits of each fiber
    b_jr[lane,r] = gather B[at_j, r]
    fiber_sum[lane,r] = 0
    loop steps of 4 lanes, 1 at a time
      at_k[lane] = decode word  # 16 bits of each nonzero
      x[lane] = load X.values
      c_kr[lane,r] = gather C[at_k, r]
      fiber_sum[lane,r] += einsum "n,nr->nr" x, c_kr  # multiply
    total[lane,r] += einsum "nr,nr->nr" fiber_sum, b_jr  # multiply
  add A[at_i, r] total[lane,r]  # lane summed once, here"""

TTMC_COO = """\
tile program  "ijk,jr,ks->irs"  part 0: coo, runs of nonzeros, 32 lanes, modes 0 by item, 1,2 by nonzero
  item over item_ptr
  axes r = 32, s = 64 in blocks of 32
  at_i = decode item_word  # 16 bits of each item
  total[s,r] = 0
  loop steps of 32 lanes, 1 at a time
    at_j[lane] = decode word  # 8 bits of each nonzero
    at_k[lane] = decode word  # 8 bits of each nonzero
    x[lane] = load X.values
    b_jr[lane,r] = gather B[at_j, r]
    c_ks[lane,s] = gather C[at_k, s]
    total[s,r] += einsum "n,ns,nr->sr" x, c_ks, b_jr  # dot over the lanes, ieee
  store A[at_i, r, s] total[s,r]"""

SAMPLED_COO = """\
tile program  "ijk,ir,jr,kr->ijk"  part 0: coo, runs of nonzeros, 32 lanes, modes 0,1,2 by nonzero
  item over chunks of 512
  axes r = 32
  loop steps of 32 lanes, 2 at a time
    at_i[lane] = decode word  # 4 bits of each nonzero
    at_j[lane] = decode word  # 6 bits of each nonzero
    at_k[lane] = decode word  # 6 bits of each nonzero
    x[lane] = load X.values
    b_ir[lane,r] = gather B[at_i, r]
    c_jr[lane,r] = gather C[at_j, r]
    d_kr[lane,r] = gather D[at_k, r]
    term[lane,r] = einsum "n,nr,nr,nr->nr" x, b_ir, c_jr, d_kr  # multiply
    store A[position] term[lane,r]  # r summed once, here"""


def test_a_tile_program_prints_as_its_grammar_says() -> None:
    assert str(mttkrp("fiber")) == MTTKRP_FIBER
    ttmc = lowered("ijk,jr,ks->irs", "coo", ROWS, Target(owned=True, rows=10), dot=True, s=64)
    assert str(ttmc) == TTMC_COO
    chunks = Storage((), (), (0, 1, 2), max_item_nnz=512, narrow=True)
    target = Target(sparse=True, in_operand_order=True, owned=True)
    assert str(lowered("ijk,ir,jr,kr->ijk", "coo", chunks, target, unroll=2)) == SAMPLED_COO


def test_a_slot_and_strided_rows_print() -> None:
    lines = Storage((), (0, 1), (2,), lanes=16)
    assert "store A[lane_slot, r] fiber_sum[lane,r]" in str(
        lowered("ijk,kr->ijr", "fiber", lines, Target(sparse=True, owned=True))
    )
    assert "add A[at_i*20 + at_j, r] fiber_sum[lane,r]" in str(lowered("ijk,kr->ijr", "fiber", lines))
    assert str(lowered("ijk,kr->r", "coo", ROWS)).endswith("add A[0, r] total[lane,r]  # lane summed once, here")


def test_a_computed_coordinate_prints_its_formula() -> None:
    band = runs((), (Field(0, "word", 0, 4, True), Computed(1, "{m0} + {p} % 3")), 4, chunk=8)
    b = bound("ij,jr->ir")
    assert "at_j[lane] = at_i + position % 3" in str(lower(b, band, Schedule(blocks=(("r", 32),)), Target()))


def test_plans_and_views_print_on_one_line_a_part() -> None:
    part = Part("fiber", FIBER, Schedule(warps=2), nnz=1234567, label="long rows")
    assert str(Plan("mine", (part,))) == (
        "plan mine\n  part 0: fiber[0 | 1 | 2] (long rows): 1,234,567 nonzeros, 4 lanes, 2 warps"
    )
    assert str(mttkrp("coo").view) == "runs of nonzeros, 32 lanes, modes 0 by item, 1,2 by nonzero"


# -- views -------------------------------------------------------------------------------------------------------------


def word(mode: int, array: str = "word", shift: int = 0, bits: int = 4, top: bool = True) -> Field:
    return Field(mode, array, shift, bits, top)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (runs((word(0),), (word(2),), 4), r"must address each mode once, found modes \[0, 2\]"),
        (runs((word(0),), (word(0), word(1)), 4), r"found modes \[0, 0, 1\]"),
        (replace(runs((word(0),)), levels=((word(0),), (word(1),), ())), "no lane shares mode 1; use blocks of fibers"),
        (runs((), (word(0),), 12), "lanes must be a power of two, found 12"),
        (blocks((), (word(0),), (word(1),), 0), "lanes must be a power of two, found 0"),
        (blocks((), (word(0),), (), 0), "found 0"),
    ],
)
def test_a_faulty_view_is_refused(view: Nest, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        view.verify()


def test_a_view_says_where_each_mode_is_read_and_what_a_part_must_hold() -> None:
    fiber = mttkrp("fiber").view
    fiber.verify()
    assert [fiber.level_of(m) for m in range(3)] == [ITEM, LANE, LEAF]
    assert fiber.arrays == (
        *("item_ptr", "block_ptr", "block_full", "lane_len"),
        *("item_word", "lane_word", "word", "values"),
    )
    assert runs((), (word(0), word(1)), 4, chunk=8).arrays == ("word", "values")
    with pytest.raises(FormatError, match="the view addresses no mode 3"):
        fiber.level_of(3)


@pytest.mark.parametrize(
    ("field", "expression", "found"),
    [
        (word(0, bits=4), "w", 0b110101),
        (word(0, shift=2, bits=4), "(w >> 2)", 0b1101),
        (word(0, shift=2, bits=2, top=False), "(w >> 2) & 0x3", 0b01),
        (word(0, shift=0, bits=3, top=False), "w & 0x7", 0b101),
        (word(0, bits=0), "w * 0", 0),
    ],
)
def test_a_field_decodes_its_bits(field: Field, expression: str, found: int) -> None:
    (bits,) = field.fields
    assert bits.operations("w")[0] == expression
    assert eval(expression, {"w": torch.tensor(0b110101)}) == found
    assert bits.of(torch.tensor(0b110101)) == found


# -- plans -------------------------------------------------------------------------------------------------------------


def part(**changes: object) -> Part:
    storage = {k: v for k, v in changes.items() if k in Storage.__dataclass_fields__}
    schedule = {k: v for k, v in changes.items() if k in Schedule.__dataclass_fields__}
    return Part("fiber", replace(FIBER, **storage), replace(Schedule(blocks=(("r", 32),)), **schedule))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Plan("p", ()), "plan 'p' has no parts"),
        (
            Plan("p", (part(), part(precision="fp8"))),
            r"plan 'p', part 1 \(fiber\): precision 'fp8' is not one of ieee,",
        ),
        (Plan("p", (part(blocks=(("r", 24),)),)), "the block of axis r must be a power of two, found 24"),
        (Plan("p", (part(blocks=(("r", 0),)),)), "the block of axis r must be a power of two, found 0"),
        (Plan("p", (part(lane=(0, 1)),)), r"each mode must be at one level, found \[0, 0, 1, 2\]"),
        (Plan("p", (part(lane=()),)), r"each mode must be at one level, found \[0, 2\]"),
        (Plan("p", (part(), part(warps=4))), "the parts of one fused launch must agree on the number of warps"),
        (Plan("p", (part(warps=3),)), "warps must be a power of two, found 3"),
        (Plan("p", (part(lanes=12),)), "the number of lanes must be a power of two, found 12"),
        (Plan("p", (part(unroll=0),)), "unroll must be 1 or more, found 0"),
        (Plan("p", (part(masked_unroll=0),)), "masked_unroll must be 1 or more, found 0"),
        (Plan("p", (part(unroll=4000),)), "unroll must be 64 or less, found 4000"),
        (Plan("p", (part(masked_unroll=65),)), "masked_unroll must be 64 or less, found 65"),
        (Plan("p", (part(stages=-1),)), "the number of stages must be 0 or more, found -1"),
        (Plan("p", (part(stages=10**9),)), "the number of stages must be 64 or less, found 1000000000"),
        (Plan("p", (part(warps=64),)), "the number of warps must be 32 or less, found 64"),
        (Plan("p", (part(registers=-1),)), "the number of registers must be 0 or more, found -1"),
        (Plan("p", (part(registers=256),)), "the number of registers must be 255 or less, found 256"),
        (Plan("p", (part(slowest_axes=("s",)),)), "slowest_axes names axes that have a block, each once, found 's'"),
        (
            Plan("p", (part(slowest_axes=("r", "r")),)),
            "slowest_axes names axes that have a block, each once, found 'r'",
        ),
        (Plan("p", (part(max_fiber_len=-1),)), "max_fiber_len must be 0 or more, found -1"),
        (Plan("p", (part(max_item_nnz=-1),)), "max_item_nnz must be 0 or more, found -1"),
    ],
)
def test_a_faulty_plan_is_refused(found: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plans.verify(found)
    x = stc.SparseTensor(torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.ones(2), (10, 20, 30))
    with pytest.raises(PlanError, match=message):  # as a caller meets it
        stc.compile("ijk,jr,kr->ir", x, torch.ones(20, 32), torch.ones(30, 32), plan=found)


def test_sound_plans_pass() -> None:
    plans.verify(Plan("p", (part(), part(lanes=1, max_fiber_len=3, max_item_nnz=100, unroll=3))))
    plans.verify(Plan("p", (part(), part(warps=4)), fused=False))


# -- tile programs -----------------------------------------------------------------------------------------------------


def inside(body: tuple[Statement, ...], change: Callable[[Statement], list[Statement]]) -> tuple[Statement, ...]:
    """Every statement replaced by those that `change` makes of it, in loops too."""
    found: list[Statement] = []
    for s in body:
        found += change(replace(s, body=inside(s.body, change)) if isinstance(s, Loop) else s)
    return tuple(found)


def without(kind: type, name: str = "") -> Callable[[Statement], list[Statement]]:
    def change(s: Statement) -> list[Statement]:
        label = s.letter if isinstance(s, Decode) else getattr(getattr(s, "out", None), "name", "")
        return [] if isinstance(s, kind) and label.startswith(name) else [s]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(Decode, "k"), r"c_kr\[lane,r\] = gather C\[at_k, r\]: at_k is not made before it"),
        (without(Decode, "i"), r"add A\[at_i, r\] total\[lane,r\].*: at_i is not made before it"),
        (without(Gather, "b_jr"), "fiber_sum, b_jr.*: b_jr is not made before it"),
        (without(Value), "x, c_kr.*: x is not made before it"),
        (without(Zero, "fiber_sum"), "fiber_sum is not made before it"),
        (without(Zero, "total"), "total is not made before it"),
        (without(Add), "adds to its output once, found 0"),
        (lambda s: [s, s] if isinstance(s, Add) else [s], "adds to its output once, found 2"),
        (
            lambda s: [replace(s, axes=("s", "r")) if isinstance(s, Add) else s],
            r"add of total\[lane,r\]: it has no axis s",
        ),
        (
            lambda s: [replace(s, source=Tile("fiber_sum", (LANES, "r"), LANE)) if isinstance(s, Add) else s],
            "fiber_sum is not made before it",  # it is, in a loop that has ended
        ),
        (
            lambda s: [
                replace(s, coordinate=word(2, "words").expression(Position("nonzero")))
                if isinstance(s, Decode) and s.letter == "k"
                else s
            ],
            "decode k: the view has no array 'words'",
        ),
        (
            lambda s: [replace(s, out=replace(s.out, axes=("r",))) if isinstance(s, Product) else s],
            r"fiber_sum\[r\]: a product sums no axis, found \['lane'\]",
        ),
    ],
)
def test_a_faulty_tile_program_is_refused(change: Callable[[Statement], list[Statement]], message: str) -> None:
    program = mttkrp("fiber")
    program_checks.verify(program)
    with pytest.raises(PlanError, match=message):
        program_checks.verify(replace(program, body=inside(program.body, change)))


@pytest.mark.parametrize(("axes", "folded"), [((LANES, "s", "r"), 1), (("s", "r"), 0)])
def test_a_dot_that_does_not_contract_what_both_sides_have_is_refused(axes: tuple[str, ...], folded: int) -> None:
    program = lowered("ijk,jr,ks->irs", "coo", ROWS, dot=True)
    out = Tile("total", axes, ITEM, folded)
    body = inside(program.body, lambda s: [replace(s, out=out) if isinstance(s, Product) else s])
    with pytest.raises(PlanError, match="a dot contracts the axes of both sides and folds the others in two"):
        program_checks.verify(replace(program, body=body))


def test_what_a_program_says_of_itself() -> None:
    program = lowered("ijk,jr,ks->irs", "coo", ROWS, Target(sparse=True), dot=True, s=80)
    assert (program.width, program.slot, program.arrays[-2:]) == (32 * 80, "item_slot", ("values", "item_slot"))
    assert [(a.letter, a.programs, a.ragged) for a in program.split] == [("s", 3, True)]
    assert len(program.dots) == 1
    assert [type(s) for s, depth in tiles.walk(mttkrp("fiber").body) if depth == 2] == [Decode, Value, Gather, Product]


# -- lowering ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("ij,jr->ir", "a view of order 3 cannot serve the sparse operand 'ij'"),
        ("iij,jr->ir", "a view of order 3 cannot serve the sparse operand 'iij'"),
        ("ijk,jrr->ir", "operand 2 repeats a letter; take its diagonal first"),
        ("ijk,jt->it", r"the schedule has no block for axis 't'; it has \{'r': 32, 's': 32\}"),
    ],
)
def test_what_cannot_be_lowered_is_refused(equation: str, message: str) -> None:
    view = get_format("coo").view((10, 20, 30), ROWS)
    with pytest.raises(PlanError, match=message):
        lower(bound(equation, t=4), view, Schedule(blocks=(("r", 32), ("s", 32))), Target())


def test_a_dot_needs_sixteen_of_everything() -> None:
    assert lowered("ijk,jr,ks->irs", "coo", ROWS, dot=True).dots
    assert not lowered("ijk,jr,ks->irs", "coo", ROWS, dot=False).dots
    assert not lowered("ijk,jr,ks->irs", "coo", ROWS, dot=True, lanes=8).dots
    assert not lowered("ijk,jr,kr->ir", "coo", ROWS, dot=True).dots
    assert not lowered("ijk,jr,k->ir", "coo", ROWS, dot=True).dots
    small = lower(
        bound("ijk,jr,ks->irs", s=8),
        mttkrp("coo").view,
        Schedule(blocks=(("r", 32), ("s", 8)), dot=True, lanes=32),
        Target(),
    )
    assert not small.dots


def test_operands_are_named_by_letters_the_equation_leaves_free() -> None:
    assert operand_names(bound("ijk,jr,kr->ir")) == ("A", ("B", "C"))
    names = operand_names(Bound.of(Einsum((("A", "B"), ("B", "C")), ("A", "C"), (0,)), {"A": 2, "B": 2, "C": 2}))
    assert names == ("D", ("E",))


def test_a_result_is_stored_only_where_no_other_program_adds_to_it() -> None:
    owned = Target(sparse=True, in_operand_order=True, owned=True)
    chunks = Storage((), (), (0, 1, 2), max_item_nnz=512)
    for size, expected in ((32, True), (64, False)):  # the summed axis in one block, in two
        program = lowered("ijk,ir,jr,kr->ijk", "coo", chunks, owned, r=size)
        (add,) = (s for s, _ in tiles.walk(program.body) if isinstance(s, Add))
        assert add.owned is expected
    (add,) = (s for s in mttkrp("coo").body if isinstance(s, Add))
    assert add.key == Key("row", ITEM, ("i",), (1,))


# -- costs -------------------------------------------------------------------------------------------------------------

P, L, N, R = ITEMS, FIBERS, STORED, 32


def test_the_counts_of_mttkrp_on_runs() -> None:
    c = cost_of(mttkrp("coo"))
    # A value and a word of 10 bits (2 bytes) for each nonzero, a row number (4 bytes) for each item.
    assert c.stream == N.bytes + 2 * N + 4 * P
    assert [(g.operand, g.table_rows) for g in c.gathers] == [("B", 20), ("C", 30)]
    assert all(g.rows == N and g.width == R for g in c.gathers)
    # x * b * c added to the sum: three operations an element.
    assert c.multiply == 3 * R * N
    assert c.dot == ZERO
    assert c.added_rows == P
    assert c.added_bytes == R * P.bytes
    assert c.output == 10 * R * ONE.bytes


def test_the_counts_of_mttkrp_on_fibers() -> None:
    c = cost_of(mttkrp("fiber"))
    # A value and a word of 5 bits for each nonzero; a length and a word for each fiber; a row number for each item.
    assert c.stream == N.bytes + 2 * N + (2 + 4) * L + 4 * P
    assert {g.operand: g.rows for g in c.gathers} == {"B": L, "C": N}
    # R(2M + 2F): MM-CSF, section III.
    assert c.multiply == R * (2 * N + 2 * L)
    assert c.added_rows == P


def test_the_counts_of_a_dot_and_of_split_axes() -> None:
    c = cost_of(lowered("ijk,jr,ks->irs", "coo", ROWS, dot=True, r=24, s=80))
    assert c.dot == 3 * 2 * 32 * 32 * N  # s in 3 blocks, each executed whole; r padded to 32
    assert c.programs == 3
    assert c.added_rows == 3 * P
    gathered = {g.operand: g for g in c.gathers}
    assert gathered["B"].rows == 3 * N
    assert gathered["B"].width == 24
    assert gathered["C"].width == 32


def test_the_counts_agree_with_what_is_packed() -> None:
    generator = torch.Generator().manual_seed(0)
    coords = (torch.rand(10, 20, 30, generator=generator) < 0.2).nonzero().T
    x = stc.SparseTensor(coords, torch.ones(coords.shape[1]), (10, 20, 30))
    dense = torch.ones(20, 32), torch.ones(30, 32)
    for format, storage, pointers in (("coo", ROWS, ("item_ptr",)), ("fiber", FIBER, ("item_ptr", "block_ptr"))):
        plan = Plan("test", (Part(format, storage, Schedule(blocks=(("r", 32),), dot=False, lanes=32)),))
        kernel = stc.compile("ijk,jr,kr->ir", x, *dense, plan=plan, backend="triton")
        packed = kernel.step.parts[0].packed
        fibers = packed.arrays["lane_len"].numel() if format == "fiber" else packed.items
        statistics = Statistics(packed.items, fibers, packed.stored, packed.nnz, 4)
        found = cost_of(kernel.step.parts[0].program).stream @ statistics.symbols
        uncounted = sum(packed.arrays[n].nbytes for n in (*pointers, "block_full") if n in packed.arrays)
        assert found == packed.nbytes - uncounted + 4 * packed.stored


@pytest.mark.parametrize("profile", [default_gpu(), cpu()], ids=lambda p: p.name)
@pytest.mark.parametrize("format", ["coo", "fiber"])
def test_more_work_never_takes_less_time(format: str, profile: DeviceProfile) -> None:
    c = cost_of(mttkrp(format))
    least = Statistics(items=10, fibers=200, stored=10_000, nnz=9_000, itemsize=4)
    each = c.seconds(least, profile)
    assert set(each) == {"memory", "l2", "l1", "add", "multiply", "dot"}
    assert all(t >= 0 for t in each.values())
    resource, seconds = c.roofline(least, profile)
    assert seconds == max(each.values()) == each[resource] > 0
    assert c.predicted(least, profile) >= seconds
    for more in ("items", "fibers", "stored", "itemsize"):
        larger = replace(least, **{more: 2 * getattr(least, more)})
        assert all(t >= each[name] for name, t in c.seconds(larger, profile).items())
        assert c.roofline(larger, profile)[1] >= seconds
        assert c.predicted(larger, profile) >= c.predicted(least, profile)
    tenfold = replace(least, items=100, fibers=2_000, stored=100_000)
    assert c.roofline(tenfold, profile)[1] > seconds


@pytest.mark.parametrize("format", ["coo", "fiber"])
def test_native_loops_are_expected_to_take_no_less_than_their_floor(format: str) -> None:
    program = mttkrp(format)
    c = cost_of(replace(program, schedule=replace(program.schedule, native=True)))
    sizes = Statistics(items=10, fibers=200, stored=300_000, nnz=300_000, itemsize=4)
    resource, floor = c.roofline(sizes, cpu_with_loops())
    assert resource in c.loops(sizes, cpu_with_loops())
    assert c.predicted(sizes, cpu_with_loops()) >= floor > 0


@pytest.mark.parametrize("profile", [default_gpu(), cpu()], ids=lambda p: p.name)
def test_rows_of_larger_tables_come_from_memory_more_often(profile: DeviceProfile) -> None:
    statistics = Statistics(items=10, fibers=10, stored=10**8, nnz=10**8, itemsize=4)
    tables = (20, 10**5, 10**6, 10**7)
    seconds = [
        cost_of(lowered("ijk,jr,kr->ir", "coo", ROWS, j=rows)).seconds(statistics, profile)["memory"] for rows in tables
    ]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 2 * seconds[0]


def test_a_faster_device_takes_no_more_time() -> None:
    c = cost_of(lowered("ijk,jr,ks->irs", "coo", ROWS, dot=True, i=100_000, j=100_000, k=100_000))
    statistics = Statistics(items=1000, fibers=1000, stored=10**6, nnz=10**6, itemsize=4)
    slow = default_gpu()
    before = c.seconds(statistics, slow)
    for rate, resource in (("memory", "memory"), ("l2", "l2"), ("l1", "l1"), ("add", "add"), ("multiply", "multiply")):
        after = c.seconds(statistics, replace(slow, **{rate: 2 * getattr(slow, rate)}))
        assert after[resource] == pytest.approx(before[resource] / 2)
        assert {k: v for k, v in after.items() if k != resource} == {k: v for k, v in before.items() if k != resource}
    exact = lowered("ijk,jr,ks->irs", "coo", ROWS, dot=True)
    fast = replace(exact, schedule=replace(exact.schedule, precision="bf16"))
    assert cost_of(fast).seconds(statistics, slow)["dot"] < cost_of(exact).seconds(statistics, slow)["dot"]


def test_rows_that_are_stored_take_no_additions() -> None:
    statistics = Statistics(items=1000, fibers=1000, stored=10**4, nnz=10**4, itemsize=4)
    added, stored = (
        cost_of(lowered("ijk,jr,kr->ir", "coo", ROWS, Target(owned=owned, rows=10))) for owned in (False, True)
    )
    assert added.seconds(statistics, default_gpu())["add"] > stored.seconds(statistics, default_gpu())["add"] == 0


def test_rows_that_are_added_to_in_no_order_are_counted() -> None:
    def met(format: str, storage: Storage) -> int:
        return cost_of(lowered("ijk,jr,kr->ir", format, storage, Target(rows=10))).met

    assert met("coo", Storage((), (), (0, 1, 2))) == 10
    assert met("coo", ROWS) == 0  # an item adds to one row
    assert met("fiber", Storage((), (0,), (1, 2), lanes=4)) == 0  # a lane has one row, apart from those of others
    assert met("fiber", Storage((), (0, 1), (2,), lanes=4)) == 10


def test_only_sampled_results_have_no_rows_without_nonzeros() -> None:
    assert not cost_of(mttkrp("coo")).sparse
    assert not cost_of(mttkrp("fiber")).sparse
    assert cost_of(lowered("ijk,ir,jr,kr->ijk", "coo", Storage((), (), (0, 1, 2)), Target(sparse=True))).sparse


def test_a_cost_describes_itself() -> None:
    assert cost_of(mttkrp("fiber")).describe() == [
        "streams 6*L + N*w + 2*N + 4*P bytes, writes R*32*w bytes",
        "gathers L rows of 32*w bytes of B",
        "gathers N rows of 32*w bytes of C",
        "adds to P rows of the result",
        "64*L + 64*N flops outside dots",
    ]
    assert cost_of(lowered("ijk,jr,ks->irs", "coo", ROWS, dot=True)).describe()[-1].endswith(", 2048*N inside")
