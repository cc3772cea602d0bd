"""Tiles in three dots of float16 halves: what programs say and mean, who has it, and for what targets."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import TILED, assert_matches
from halves_cases import (
    BY_TILES,
    EVERY_EINSUM,
    FIT,
    PRODUCTS,
    REFUSED,
    SPMM,
    SPREAD,
    TAKEN,
    compiled,
    in_halves,
    problem,
    spmm,
    tiles,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_units import CUDA, MATRIX, dealt
from test_ir_runners import interpreted

import sparsetc as stc
from sparsetc.codegen.split_float16 import largest
from sparsetc.contraction.guard import fit_for_halves
from sparsetc.ir.nest import values as halves
from sparsetc.ir.plan import F16X3
from sparsetc.ir.program.cost import cost_of
from sparsetc.ir.program.tile import Scale

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# --- halves -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(-80, 80), st.integers(0, 36), st.integers(0, 2**31))
def test_what_halves_hold(exponent: int, spread: int, seed: int) -> None:
    """23 bits of a value from 2**-28 of the largest on; of any other, no more than 2**-50 of the largest is lost."""
    g = torch.Generator().manual_seed(seed)
    values = (torch.rand(200, generator=g) + 1) * 2.0 ** -torch.randint(0, spread + 1, (200,), generator=g)
    values = values / 2 * 2.0**exponent * torch.randint(0, 2, (200,), generator=g).mul(2).sub(1)
    most = largest(values)
    high, low = halves.scaled_halves(values, most)
    assert high.dtype == low.dtype == torch.float16
    back = (high.double() + low.double() / halves.LOW) * halves.scale(most, into=False).double()
    lost = (back - values.double()).abs()
    assert bool((lost <= (values.abs().double() * 2.0**-23).clamp(min=2.0**-50 * float(most))).all())
    assert bool((lost <= values.abs().double() * 2.0**-14).all())
    assert 2.0**14 <= float(most * halves.scale(most, into=True)) < 2.0**15


@pytest.mark.parametrize("most", [0.0, 1e-45, 2.0**-126, 3e38])
def test_scales_are_normal_whatever_is_scaled(most: float) -> None:
    into, back = (float(halves.scale(torch.tensor([most]), into=own)) for own in (True, False))
    assert into * back == 1
    assert min(into, back) >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("name", [*FIT, *SPREAD])
def test_which_operands_are_fit(name: str) -> None:
    change: Callable[[torch.Tensor], torch.Tensor] = (FIT | SPREAD)[name]
    plain = torch.linspace(-2, -1, 70).view(7, 10)
    assert fit_for_halves([plain, change(plain)], [True, True]) == (name in FIT)
    assert fit_for_halves([change(plain), plain], [False, True]), "of what is not split only infinities matter"


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("split", [True, False])
def test_nothing_infinite_is_fit(bad: float, split: bool) -> None:
    table = torch.ones(5, 3)
    table[2, 1] = bad
    assert not fit_for_halves([torch.ones(3), table], [True, split])


# --- programs ---------------------------------------------------------------------------------------------------------


@EVERY_EINSUM
def test_what_programs_mean(name: str, request_: stc.plans.Plan) -> None:
    """In float64, but for what halves do not hold of values in float32."""
    equation = TAKEN[name]
    operands = problem(equation).operands()
    kernel = compiled(equation, operands, request_)
    found = interpreted(kernel, [o.double() for o in operands[1:]])
    assert_matches(found.float(), equation, operands, 1e-6)


@BY_TILES
def test_what_the_text_says(request_: stc.plans.Plan) -> None:
    kernel = compiled(SPMM, [*spmm()], request_)
    text = str(kernel.programs[0])
    assert "scale_B = 2 ** (14 - exponent of most_B)" in text
    assert "gather B[at_j, r]  # to be split" in text
    assert "x[i,j] = load X.values  # high and low parts" in text
    assert f"dot over j, {F16X3}" in text
    assert "X = (high_values + low_values / 2048) * 2 ** (exponent of most - 14)" in kernel.source
    assert kernel.source.count("tl.dot(") == 3
    assert f"tensor core, {F16X3}" in str(kernel.explain())
    scales = [s for s, depth in kernel.programs[0].statements if isinstance(s, Scale) and not depth]
    assert [(s.out.name, s.into) for s in scales] == [("scale_B", True), ("unscale_X", False), ("unscale_B", False)]


@BY_TILES
def test_letters_that_spell_what_programs_say(request_: stc.plans.Plan) -> None:
    x, b = spmm()
    for letters in ("scale", "most"):
        table = b[:, :1].expand(-1, 16)
        shape = (*table.shape, *(1 for _ in letters[1:]))
        equation = f"IJ,J{letters}->I{letters}"
        kernel = compiled(equation, [x, table.contiguous().view(shape)], request_)
        assert_matches(interpreted(kernel, [table.view(shape)]).float(), equation, [x, table.view(shape)], 1e-6)


@BY_TILES
@pytest.mark.parametrize("name", REFUSED)
def test_products_of_operands_are_not_split(name: str, request_: stc.plans.Plan) -> None:
    operands = problem(PRODUCTS[name]).operands()
    plan = stc.compile(PRODUCTS[name], *operands, plan=request_, backend="triton").plan
    assert plan.parts[0].schedule.precision == "tf32x3"
    with pytest.raises(stc.PlanError, match="in f16x3 one dot takes stored values and rows of one operand"):
        stc.compile(PRODUCTS[name], *operands, plan=in_halves(plan), backend="triton")


def test_nonzeros_one_by_one_are_not_in_halves() -> None:
    x, b = spmm()
    (part,) = stc.compile(SPMM, x, b, plan="coo", backend="triton").plan.parts
    plan = stc.plans.Plan("p", (replace(part, schedule=replace(part.schedule, precision=F16X3)),))
    with pytest.raises(stc.PlanError, match=r"in f16x3 one dot takes stored values .* found no dot"):
        stc.compile(SPMM, x, b, plan=plan, backend="triton")


# --- who has it -------------------------------------------------------------------------------------------------------


@BY_TILES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_types_take_the_same_plan_as_they_are(dtype: torch.dtype, request_: stc.plans.Plan) -> None:
    plan = compiled(SPMM, [*spmm()], request_).plan
    x, b = (o.to(dtype) for o in spmm())
    kernel = stc.compile(SPMM, x, b, plan=plan, backend="triton")
    assert kernel.plan.parts[0].schedule.precision == "tf32x3"
    assert "most_B" not in kernel.source


@BY_TILES
@pytest.mark.parametrize("name", ["spmm", "mttkrp of order 2", "ttm"])
def test_torch_programs_take_the_same_plan_as_they_are(name: str, request_: stc.plans.Plan) -> None:
    equation = TAKEN[name]
    operands = problem(equation).operands()
    plan = compiled(equation, operands, request_, output="dense").plan
    kernel = stc.compile(equation, *operands, plan=plan, backend="torch", output="dense")
    assert {p.schedule.precision for p in kernel.plan.parts} == {"tf32x3"}
    assert_matches(kernel(*operands[1:]), equation, operands)


@BY_TILES
def test_a_plan_makes_its_kernel_again(request_: stc.plans.Plan) -> None:
    x, b = spmm()
    kernel = compiled(SPMM, [x, b], request_)
    assert pickle.loads(pickle.dumps(kernel.plan)) == kernel.plan
    assert pickle.loads(pickle.dumps(kernel)).source == kernel.source
    assert stc.compile(SPMM, x, b, plan=kernel.plan, backend="triton").source == kernel.source


@pytest.mark.parametrize("name", TILED)
def test_other_parts_are_as_they_were(name: str) -> None:
    x, b = spmm(i=40, j=64)
    coords = x.coords[:, (x.coords[0] < 20) | (x.coords[1] < 3)]
    x = stc.SparseTensor(coords, torch.ones(coords.shape[1]), x.shape)
    kernel = compiled(SPMM, [x, b], tiles(name, 40))
    first, rest = kernel.programs
    assert (first.schedule.precision, rest.schedule.precision) == (F16X3, "tf32x3")
    assert (first.view.packed, rest.view.packed) == (("high_values", "low_values", "most"), ("values",))
    assert_matches(interpreted(kernel, [b]).float(), SPMM, [x, b], 1e-6)


@BY_TILES
def test_what_it_costs(request_: stc.plans.Plan) -> None:
    kernel = compiled(SPMM, [*spmm()], request_)
    found, (part,) = cost_of(kernel.programs[0]), kernel.plan.parts
    plain = replace(kernel.plan, parts=(replace(part, schedule=replace(part.schedule, precision="tf32x3")),))
    other = cost_of(stc.compile(SPMM, *spmm(), plan=plain, backend="triton").programs[0])
    assert (found.stream, found.dot, found.gathers) == (other.stream, other.dot, other.gathers), "4 bytes a value"
    assert found.made == (("split", "B", 34 * 8),)
    assert other.made == ()
    assert "splits B into float16 halves, scaled by its largest element" in found.describe()


# --- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("name", "target"), dealt(TILED))
def test_halves_run_on_the_matrix_units(target: str, name: str) -> None:
    pytest.importorskip("triton")
    operands = problem(SPMM, i=200, j=300, r=64).operands()
    text = compiled(SPMM, operands, tiles(name, width=32)).ptx(target)
    assert re.search(MATRIX[target], text)
    if target in CUDA:
        assert re.search(r"mma\S*(\.f32\.f16\.f16|kind::f16)", text)
        assert "tf32" not in text
        assert not re.search(r"\.local\b", text), "nothing is spilt"
    else:
        assert "f16" not in "".join(re.findall(r"v_mfma_\S*", text)), "float32 as it is"
