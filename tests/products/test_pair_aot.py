"""The generated Triton source of contractions, compiled ahead of time for named targets; no GPU is needed."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from cases import random_sparse
from matrix_units import CUDA, NATIVE, TARGETS, dealt, in_turn, other_types
from pair_cases import EQUATIONS, operands, small_blocks

import sparsetc as stc
from sparsetc.codegen import BLOCK, launch
from sparsetc.device import profile as targets
from sparsetc.join import tasks

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

SIZES = {"i": 20, "j": 20, "k": 70, "l": 20, "m": 20}
OPTIONS = {"num_warps": 4, "num_stages": 3, **launch.FUSED}


def third_order(dtype: torch.dtype, storage: str, precision: str, backend: str = "torch") -> stc.Kernel:
    """Blocks of 64 x 32 and 32 x 64."""
    given = operands("ijk,klm->ijlm", "skewed", dtype, sizes=SIZES)
    return stc.compile(
        "ijk,klm->ijlm", *given, plan=stc.plans.plan_bcb(storage=storage), precision=precision, backend=backend
    )


@pytest.mark.parametrize(("storage", "precision", "target"), dealt(["whole", "bitmap"], ["highest", "high", "medium"]))
def test_blocks_run_on_the_matrix_units(storage: str, precision: str, target: str) -> None:
    for backend in ("torch", "triton"):  # without a GPU, that of the kernel which one would run
        text = third_order(torch.float32, storage, precision, backend).ptx(target)
        assert re.search(NATIVE[target], text)
        assert target in text
        assert not re.search(r"\.local\b", text)
    if target == "sm_80":
        highest = ".f16.f16." if storage == "whole" else ".tf32.tf32."
        assert {"medium": ".bf16.bf16.", "high": ".tf32.tf32.", "highest": highest}[precision] in text


def test_pairs_in_halves_are_summed_outside_of_the_dots() -> None:
    """Three dots of 16-bit halves a pair in one sum, which the products of low halves begin; additions of float32."""
    text = third_order(torch.float32, "whole", "highest").ptx("sm_90")
    dots = re.findall(r"wgmma\.mma_async\.\S+\.f32\.f16\.f16", text)
    assert len(dots) == len(re.findall(r"wgmma\.mma_async", text)) == 3 * 2  # 32 positions, 16 a turn
    addition, smaller = r"\badd(?:\.rn)?\.f32", r"\bmul(?:\.rn)?\.f32"
    loop = text[text.rindex("wgmma.mma_async") :]
    loop = loop[: loop.index("bra")]
    assert len(re.findall(addition, loop)) == len(re.findall(addition, text)) == 64 * 64 // 128
    between = text[text.index("wgmma.mma_async") : text.rindex("wgmma.mma_async")]
    assert len(re.findall(smaller, between)) == 64 * 64 // 128
    assert "v_mfma_f32" in third_order(torch.float32, "whole", "highest").ptx("gfx942")


HALVES = {"values": "*fp32", "line": "*i32", "most": "*i32", "verdict": "*i32"}
HALVES |= {"high": "*fp16", "low": "*fp16"}


@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("places", ["*i32", "*i64"])
@pytest.mark.parametrize("name", ["find_most", "split"])
def test_what_makes_halves_compiles(name: str, places: str, target: str) -> None:
    """Neighbours are read by neighbouring threads, and stay in the layout that they are read in."""
    from sparsetc.codegen import kernels

    kernel = getattr(kernels, name)
    types = HALVES | {"at": places}
    given = [types.get(argument, "i32") for argument in kernel.arg_names]
    found = launch.assembled(kernel, given, target, OPTIONS)
    text = found.asm["ptx"]
    assert re.search(r"atom\S*\.max\.s32", text)
    assert not re.search(r"\.local\b", text)
    assert set(re.findall(r"sizePerThread = \[([\d, ]+)\]", found.asm["ttgir"])) <= {"1", "1, 1"}
    assert "convert_layout" not in found.asm["ttgir"]
    if name == "find_most":  # the largest of a group is found within a warp
        assert found.metadata.shared == 0
        assert "redux.sync.max" in text


@pytest.mark.parametrize("target", CUDA)
def test_what_makes_halves_of_one_scale_compiles(target: str) -> None:
    """Nothing is read of positions, and no verdict is given."""
    from sparsetc.codegen.kernels import split

    nothing = dict.fromkeys(("verdict", "at", "line"))
    given = [name for name in split.arg_names if name not in nothing]
    types = {name: HALVES.get(name, "i32") for name in given}
    found = compiled(split, types, nothing, target)
    text = found.asm["ptx"]
    assert not re.search(r"\.local\b|\batom", text)
    assert len(re.findall(r"ld\.global", text)) == BLOCK // 128 + 1, "values, and the largest"
    assert "convert_layout" not in found.asm["ttgir"]


@pytest.mark.parametrize(
    ("dtype", "target", "instruction", "storage"),
    in_turn(other_types(NATIVE), "whole", "bitmap", "bitmap", "whole", "bitmap"),
    ids=str,
)
def test_other_types_run_on_the_matrix_units(dtype: torch.dtype, target: str, instruction: str, storage: str) -> None:
    assert re.search(instruction, third_order(dtype, storage, "highest").ptx(target))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integers_compile(dtype: torch.dtype) -> None:
    for target in TARGETS:
        assert target in third_order(dtype, "whole", "highest").ptx(target)


@pytest.mark.parametrize(("name", "storage"), in_turn([(name,) for name in EQUATIONS], "whole", "bitmap"))
def test_every_equation_compiles(name: str, storage: str) -> None:
    given = operands(EQUATIONS[name], "skewed", torch.float32)
    kernel = stc.compile(EQUATIONS[name], *given, plan=stc.plans.plan_bcb(storage=storage))
    assert ".visible .entry" in kernel.ptx("sm_90")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int32], ids=str)
def test_lists_of_tasks_compile(dtype: torch.dtype, deterministic: bool) -> None:
    """The sums for the result and both gradients; nothing of the innermost loop is kept in local memory."""
    given = operands("ijk,klm->ijlm", "skewed", dtype, sizes=SIZES)
    for backend in ("torch", "triton"):
        kernel = stc.compile("ijk,klm->ijlm", *given, plan="scalar", backend=backend, deterministic=deterministic)
        (step,) = kernel.contraction.steps
        assert kernel.ptx("sm_90") == step.task_sums.of("z").ptx("sm_90")
        for letter in "pqz":
            for target in TARGETS:
                text = step.task_sums.of(letter).ptx(target)
                assert target in text
                assert not re.search(r"\.local\b", text)
            ordered = deterministic and dtype.is_floating_point
            assert ("atom" in step.task_sums.of(letter).ptx("sm_90")) != ordered
        # A byte and a word of the list a task.
        if not deterministic:
            assert "ld.global.b8" in kernel.ptx("sm_90")


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], target: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    aligned: dict[Any, Any] = {(n,): [["tt.divisibility", 16]] for n, t in enumerate(signature.values()) if t[0] == "*"}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget(*targets.TARGETS[target]))


TASKS = {"row": "*i64", "column": "*i32", "x_base": "*i32", "x_word": "*u8", "y_shift": "*i32", "bits": "*i32"}
COUNTS = {"tasks": "i32", "entries": "i32", "columns": "i32"}
OF_TASKS = {"FRAME": 256, "BLOCK": tasks.BLOCK}
MARK_KERNELS = {
    "mark": (1, {"ends": "*i64", "first": "*i64", **TASKS, **COUNTS}, OF_TASKS),
    "count": (2, {"bits": "*i32", "counts": "*i32"}, {"BLOCK": tasks.BLOCK}),
    "write_places": (2, {"bits": "*i32", "upto": "*i32", "places": "*i64"}, {"WORDS": tasks.WORDS}),
    "write_results": (2, {**TASKS, "upto": "*i32", "z_word": "*i32", **COUNTS}, OF_TASKS),
}
"""Arrays with a number a word of marks, types of arguments, constants."""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("words", ["i32", "i64"])
@pytest.mark.parametrize("name", MARK_KERNELS)
def test_kernels_of_marks_compile(name: str, words: str, target: str) -> None:
    """Words of marks, which may be more than 32 bits number, are addressed by 64; a task's neighbour is in the next
    thread, so that a warp's reads lie together.
    """
    from sparsetc.join import mark_kernels

    by_word, types, constants = MARK_KERNELS[name]
    types = {"words": words} | types
    found = compiled(getattr(mark_kernels, name), types, constants, target)
    assert target in (found.asm.get("ptx") or found.asm["amdgcn"])
    assert len(re.findall(r"tensor<\d+x!tt.ptr<i32>>, tensor<\d+xi64>", found.asm["ttir"])) == by_word
    if "tasks" in types:
        assert set(re.findall(r"sizePerThread = \[(\d+)\]", found.asm["ttgir"])) == {"1"}
        assert found.metadata.shared == 0
    if target.startswith("sm") and name == "mark":
        assert re.search(r"(atom|red)\S*\.or\.b32", found.asm["ptx"])
        assert "ld.global.cg" in found.asm["ptx"]


def test_both_kernels_of_a_hybrid_compile() -> None:
    given = operands("ijk,klm->ijlm", "skewed", torch.float32)
    for backend in ("torch", "triton"):
        kernel = stc.compile("ijk,klm->ijlm", *given, plan=small_blocks("ijk,klm->ijlm", 2), backend=backend)
        assert kernel.plan.name == "bcb+scalar"
        assert kernel.ptx("sm_90").count(".visible .entry") == 2


def test_what_has_no_assembly() -> None:
    x, y = (random_sparse((5, 5), "random", torch.complex64, n) for n in range(2))
    with pytest.raises(stc.PlanError, match="complex"):
        stc.compile("ij,jk->ik", x, y, plan="bcb").ptx()
    with pytest.raises(stc.PlanError, match=r"unknown target 'sm_12'.*sm_90.*gfx942"):
        third_order(torch.float32, "whole", "high").ptx("sm_12")


@pytest.mark.parametrize(
    ("limit", "bitmaps"), [(10**8, [False, False]), (10**6, [True, False]), (400_000, [True, True])]
)
def test_memory_decides_which_operands_are_bitmaps(limit: int, bitmaps: list[bool]) -> None:
    """The larger first: whole, 64 blocks of x take 512 KB, as many of y 128 KB."""
    g = torch.Generator().manual_seed(0)
    x, y = (
        stc.SparseTensor(
            torch.stack([torch.randint(0, n, (1500,), generator=g) for n in shape]), torch.ones(1500), shape
        )
        for shape in ((64, 64, 32), (16, 64, 32))
    )
    kernel = stc.compile("ijk,ljk->il", x, y, plan="bcb", memory_limit=limit, backend="triton")
    assert [tiles.bitmap for tiles in kernel.contraction.steps[0].numeric.program.view.pairs] == bitmaps
    assert re.search(NATIVE["sm_80"], kernel.ptx("sm_80"))


@pytest.mark.parametrize("target", TARGETS)
def test_what_finds_magnitudes_compiles(target: str) -> None:
    """Four neighbours are loaded at once, and nothing spills."""
    from sparsetc.codegen.kernels import find

    found = launch.assembled(find, ["i64", "i32", "*fp32", "*i32"], target, OPTIONS)
    if target in CUDA:
        assert "ld.global.v4" in found.asm["ptx"]
        assert not re.search(r"\.local\b", found.asm["ptx"])
