"""Given blocks by dots of operands as they are loaded: what is printed, and what targets make of it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from block_dot_cases import CASES, SPMM, BlockDot, in_halves
from golden_blocks import CASES as GOLDEN
from golden_blocks import FOLDER, path, source
from golden_checks import check_as_kept, check_readable
from matrix_units import CUDA, MATRIX, NATIVE, dealt
from test_ir_runners import interpreted

import sparsetc as stc
from sparsetc.ir.program.tile import Add
from sparsetc.tensor.pattern import Pattern

compiling = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
HALF, SINGLE = torch.float16, torch.float32


def compiled(
    case: BlockDot, dtype: torch.dtype, plan: str | stc.plans.Plan = "coo", precision: Any = "highest"
) -> stc.Kernel:
    x, dense = case.operands(dtype)
    return stc.compile(case.equation, x, *dense, plan=plan, backend="triton", precision=precision)


@pytest.mark.parametrize("name", GOLDEN)
def test_generated_source_is_as_kept_and_can_be_read(name: str) -> None:
    check_as_kept(path(name), source(name))
    check_readable(source(name))


def test_every_file_has_its_case() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == set(GOLDEN)


IN_ORDER = [(c, False) for c in CASES if c.equation.split("->")[1] not in ("ij", "isr", "ijr")]
IN_ORDER += [(c, True) for c in CASES if c.equation == SPMM]
"""Cases whose rows come as the result has them, by dots of float32; and in halves."""


@pytest.mark.parametrize(
    ("case", "halves"), [*IN_ORDER, *((c, True) for c, _ in IN_ORDER if c.equation == SPMM)], ids=str
)
def test_a_program_means_its_einsum(case: BlockDot, halves: bool) -> None:
    """The program of entries, of which each is 1, by the meaning of its statements."""
    x, dense = case.operands(SINGLE)
    kernel = compiled(case, SINGLE)
    kernel = compiled(case, SINGLE, in_halves(kernel.plan)) if halves else kernel
    contraction = kernel.contraction
    _, tables = contraction.pull([x.values], dense)
    (pattern,) = contraction._inner
    assert isinstance(pattern, Pattern)
    assert pattern.ones
    ones = stc.SparseTensor(pattern.coords, torch.ones(pattern.nnz), pattern.shape)
    found, want = interpreted(kernel, dense), reference.run(kernel.step.bound.einsum, ones, *tables)
    torch.testing.assert_close(found.flatten(), want.to(found.dtype).flatten(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [c for c in CASES if c.equation == SPMM], ids=str)
def test_nothing_stands_between_a_load_and_its_dot(case: BlockDot) -> None:
    text = compiled(case, HALF).source
    loop = text.split("for pos in tl.range(start, stop, num_stages=")[1].split("tl.store")[0]
    (dot,) = [line.strip() for line in loop.splitlines() if "tl.dot" in line]
    sides = re.fullmatch(r"total = tl\.dot\((\w+), (\w+), total, out_dtype=tl\.float32\)", dot)
    assert sides is not None
    for side in sides.groups():
        assert re.search(rf"{side} = tl\.load\(.*\)\n", loop)
    assert "values + " not in text
    assert "tensor core, f16" in str(compiled(case, HALF).explain())


@compiling
@pytest.mark.parametrize(
    ("case", "kind", "target"),
    dealt((CASES[1], CASES[3], CASES[10]), ((HALF, "highest"), (torch.bfloat16, "highest"), (SINGLE, "high"))),
    ids=str,
)
def test_blocks_run_on_the_matrix_units(case: BlockDot, kind: tuple[torch.dtype, str], target: str) -> None:
    dtype, precision = kind
    text = compiled(case, dtype, precision=precision).ptx(target)
    assert re.search(MATRIX[target], text)
    assert target not in CUDA or not re.search(r"\.local\b", text), "nothing is spilt"


@compiling
def test_rows_of_64_take_hoppers_own_instruction_and_copies_of_16_bytes() -> None:
    text = compiled(BlockDot(SPMM, (4, 4), (64, 64)), HALF).ptx("sm_90")
    assert re.search(NATIVE["sm_90"] + r"\S*\.f32\.f16\.f16", text)
    text = compiled(BlockDot(SPMM, (4, 4), (64, 64)), SINGLE, precision="high").ptx("sm_90")
    assert set(re.findall(r"cp\.async\.c\w\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", text)) <= {"0x10", "0x4"}


def test_an_operand_of_blocks_is_a_view_unless_positions_go_last() -> None:
    case = BlockDot(SPMM, (4, 4), (64, 64))
    for precision, order in (("high", "J, r, j"), ("highest", "J, j, r")):
        assert f"B[{order}]" in compiled(case, SINGLE, precision=precision).source
    assert "B[J, j, r]" in compiled(case, HALF).source
    assert not any(o.arranged for o in compiled(case, HALF).programs[0].operands)


def test_halves_are_of_two_tables_that_one_dot_multiplies() -> None:
    case = BlockDot("ijk,jr,ks->irs", (2, 2, 2), (16, 16, 16))
    with pytest.raises(stc.PlanError, match="or those of two, and is added up"):
        compiled(case, SINGLE, in_halves(compiled(case, SINGLE).plan))


def test_dots_of_16_bits_are_of_operands_of_16_bits() -> None:
    case = BlockDot(SPMM, (4, 4), (16, 16))
    plan = compiled(case, HALF).plan
    assert plan.parts[0].schedule.precision == "f16"
    with pytest.raises(stc.PlanError, match="precision f16 is of operands of 16 bits, found float32"):
        compiled(case, SINGLE, plan=plan)


def test_values_of_nonzeros_are_read_whatever_plan_is_given() -> None:
    """A plan says nothing of values: one that was made for entries, all 1, multiplies the values of another tensor."""
    x, dense = BlockDot("ij,jr->ir", (4, 4), (16, 16)).operands(SINGLE)
    plan = stc.compile("ij,jr->ir", x, *dense, plan="coo").plan
    (part,) = plan.parts
    coords = torch.tensor([[0, 1, 2], [0, 1, 1], [0, 2, 3]])
    y = stc.SparseTensor(coords, torch.tensor([2.0, 3.0, 4.0]), (3, 4, 4))
    tables = [torch.randn(4, 16, 40), torch.randn(3, 16, 16)]
    other = replace(
        plan, parts=(replace(part, schedule=replace(part.schedule, tree=None, tile_sizes=(), tile_loops=())),)
    )
    kernel = stc.compile("aIJ,Jjr,aij->Iir", y, *tables, plan=other, backend="triton")
    want = torch.einsum("aIJ,Jjr,aij->Iir", y.to_dense(), *tables)
    torch.testing.assert_close(interpreted(kernel, tables), want.double(), rtol=1e-4, atol=1e-4)


def test_few_programs_take_narrow_columns_and_load_far_ahead_and_of_long_rows_are_cut() -> None:
    parts = {}
    for grid, columns in (((512, 16), 4096), ((64, 16), 1024), ((8, 16), 16), ((8, 16), 1), ((8, 1024), 16)):
        x, _ = BlockDot(SPMM, grid, (32, 32)).operands(HALF)
        dense = torch.randn(x.shape[1], columns).half()
        (part,) = stc.compile(SPMM, x, dense, plan="coo", backend="triton").plan.parts
        s = part.schedule
        parts[(*grid, columns)] = s.block("r"), s.warps, s.stages, part.storage.max_item_nnz
    assert parts == {
        (512, 16, 4096): (256, 4, 5, 0),
        (64, 16, 1024): (128, 2, 11, 0),
        (8, 16, 16): (16, 2, 15, 0),
        (8, 16, 1): (16, 2, 15, 0),
        (8, 1024, 16): (16, 4, 5, 4),
    }


def test_programs_for_which_there_is_no_room_side_by_side_have_two_buffers() -> None:
    x, _ = BlockDot(SPMM, (256, 256), (64, 64)).operands(HALF, share=0.01)
    (part,) = stc.compile(SPMM, x, torch.zeros(x.shape[1], 256).half(), plan="coo", backend="triton").plan.parts
    assert (part.schedule.block("r"), part.schedule.stages) == (128, 5)


@pytest.mark.parametrize("columns", [1, 16])
def test_a_dot_takes_large_blocks_as_they_are_loaded_however_few_columns_there_are(columns: int) -> None:
    places = (torch.rand((128, 128), generator=torch.Generator().manual_seed(0)) < 0.12).nonzero().T
    blocks = torch.zeros(1, dtype=HALF).expand(places.shape[1], 128, 128)
    x = stc.SparseTensor.from_blocks(places, blocks, (16384, 16384))
    kernel = stc.compile(SPMM, x, torch.zeros(1, dtype=HALF).expand(16384, columns), backend="triton")
    assert {one[0].partition(":")[0] for one in kernel.explain().to_dict()["considered"]} <= {"coo", "dense"}


def test_chains_of_blocks_take_ranks_by_what_each_dot_leaves() -> None:
    x, _ = BlockDot("ijk,jr,ks->irs", (2, 2, 2), (16, 16, 16)).operands(HALF)
    factors = [torch.zeros(32, 32).half()] * 2
    (part,) = stc.compile("ijk,jr,ks->irs", x, *factors, plan="coo", backend="triton").plan.parts
    assert (part.schedule.block("r"), part.schedule.block("s"), part.schedule.warps) == (32, 16, 4)


def test_sides_with_few_columns_are_loaded_as_a_dot_takes_them() -> None:
    kernel = compiled(BlockDot("ij,js->is", (4, 4), (64, 64)), HALF)
    assert "tl.dot(c_aij, b_Jjs, total" in kernel.source


@pytest.mark.parametrize(
    ("case", "split"),
    [
        (BlockDot(SPMM, (8, 4), (64, 512)), "j"),
        (BlockDot("ij,ir,jr->ij", (4, 4), (64, 64)), ""),
        (BlockDot("ijk,jr,kr->ir", (2, 2, 2), (32, 32, 32)), "r"),
    ],
    ids=str,
)
def test_long_reductions_sampled_products_and_large_cubes_take_dots_of_one_entry(case: BlockDot, split: str) -> None:
    kernel = compiled(case, HALF)
    (program,) = kernel.programs
    assert program.dots
    assert not kernel.plan.parts[0].schedule.lanes
    assert "".join(axis.letter for axis in program.split) == split
    (add,) = [s for s, _ in program.statements if isinstance(s, Add)]
    assert add.owned == (split != "j"), "programs that share a sum add to it"


@pytest.mark.parametrize("columns", [64, 128])
def test_a_sampled_product_loads_nothing_ahead_but_the_sides_of_its_dot(columns: int) -> None:
    """Values, and results, of 128 by 128 would be held for each stage as well: 295 KB of 227."""
    x, _ = BlockDot("ij,ir,jr->ij", (8, 8), (128, 128)).operands(HALF)
    dense = [torch.zeros(1024, columns).half() for _ in range(2)]
    kernel = stc.compile("ij,ir,jr->ij", x, *dense, plan="coo", backend="triton")
    assert re.search(r"for pos in range\(start, stop\):", kernel.source)
    assert "tl.dot" in kernel.source


def test_a_dense_product_over_entries_is_not_formed() -> None:
    x, (d,) = BlockDot(SPMM, (2, 2), (64, 64)).operands(SINGLE)
    assert len(stc.compile(SPMM, x, d[:, :16], backend="triton").programs[0].operands) == 2


@pytest.mark.parametrize("equation", [SPMM, "ij,ir,jr->ij"])
def test_a_tensor_without_blocks_has_a_plan(equation: str) -> None:
    x = stc.SparseTensor.from_blocks(torch.zeros(2, 0, dtype=torch.long), torch.zeros(0, 32, 32).half(), (64, 64))
    dense = [torch.ones(64, 16).half() for _ in equation.split("->")[0].split(",")[1:]]
    assert stc.compile(equation, x, *dense, plan="coo", backend="triton").source


@pytest.mark.parametrize(("equation", "columns"), [("aIJ,Iir,Jjr->aij", 200), ("aIJ,Jjr,aij->Iir", 40)])
def test_sums_that_have_an_order_are_of_one_program(equation: str, columns: int) -> None:
    """Gradients of values over many columns, and blocks of long rows, were refused."""
    coords = torch.tensor([[0, 1, 2], [0, 1, 1], [0, 2, 3]])
    pattern = Pattern(coords, (3, 4, 4), True)
    pattern.ones = True
    x = stc.SparseTensor._make(pattern, torch.ones(()).expand(3))
    sizes = {"a": 3, "I": 4, "J": 4, "i": 16, "j": 320 if columns == 40 else 16, "r": columns}
    dense = [torch.randn([sizes[c] for c in term]) for term in equation.split("->")[0].split(",")[1:]]
    kernel = stc.compile(equation, x, *dense, backend="triton", deterministic=True)
    for program in kernel.programs:
        assert {axis.letter for axis in program.split} <= {*program.output_axes}
